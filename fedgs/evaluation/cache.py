"""What an evaluation keeps between commands, found again by the hash of its input.

The folder is `$FEDGS_CACHE_DIR`, else `$XDG_CACHE_HOME/fedgs`, else `~/.cache/fedgs`.
It may be deleted at any time. It holds classifiers and results computed from real data:
it is made with mode 0700 and is as private as that data.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.errors import UserError, wrap_error
from fedgs.files import read_json, write_json

HASH_LENGTH = 24  # hexadecimal digits of SHA-256 in a file name


def cache_folder() -> Path:
    """Returns the cache folder, made if it is missing.

    Raises:
        UserError: it cannot be made.
    """
    # A variable that is set and empty counts as unset, as XDG says.
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    chosen = os.environ.get("FEDGS_CACHE_DIR") or f"{base}/fedgs"
    folder = Path(chosen).expanduser()
    remedy = "set it to a folder that can be written"
    with wrap_error(OSError, f"FEDGS_CACHE_DIR = {folder}: it cannot be made", remedy):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def content_hash(*arrays: NDArray[np.generic], **settings: Any) -> str:
    """Returns a short hash of arrays (type, shape, bytes) and JSON-like settings.

    Privacy: reads private data; output private. A hash tells whether a guess is right.

    >>> a = np.arange(3)
    >>> content_hash(a, seed=0) == content_hash(a.copy(), seed=0)
    True
    >>> content_hash(a, seed=0) == content_hash(a, seed=1)
    False
    """
    as_json = json.dumps(settings, sort_keys=True)
    content = hashlib.sha256(as_json.encode())
    for array in arrays:
        # Bytes alone do not tell (2, 3) from (3, 2), nor float32 from int32.
        kind = f"{array.dtype.str}{array.shape}"
        content.update(kind.encode())
        content.update(np.ascontiguousarray(array).data)
    return content.hexdigest()[:HASH_LENGTH]


def read_cached(name: str) -> dict[str, Any] | None:
    """Returns the JSON object of that name, None where there is none or it is torn.

    Privacy: reads private data; output private.
    """
    try:
        return read_json(cache_folder() / f"{name}.json")
    except UserError:
        return None


def write_cached(name: str, content: dict[str, Any]) -> None:
    """Writes a JSON object atomically.

    Privacy: the file is as private as the content; see the module.
    """
    write_json(cache_folder() / f"{name}.json", content)
