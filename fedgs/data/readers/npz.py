"""Images in a numpy archive of the user's own.

Arrays: `images`, and if known `labels` and `clients`; see docs/data.md. Nothing is
ever unpickled.
"""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data.readers.arrays import COLUMNS, from_arrays
from fedgs.data.records import Records
from fedgs.errors import UserError, explained

ERRORS = (  # what numpy and zipfile raise on damaged or hostile files
    *(OSError, ValueError, EOFError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)
KEYS = {"images", *COLUMNS}


def read(config: RunConfig) -> Records:
    """Reads images, and if given labels and clients, from `npz:PATH`.

    Privacy: reads private data; output private.

    Raises:
        UserError: a missing or damaged file, or arrays that contradict each other.
    """
    where = f"data = {config.data!r}"
    path = Path(config.data.removeprefix("npz:")).expanduser()
    arrays, others = read_arrays(where, path, {"images"})
    if others:
        raise UserError(
            f"{where}: holds {', '.join([*arrays, *others])}; give 'images' and, if "
            "known, 'labels' and 'clients', no others"
        )
    return from_arrays(where, arrays, config.num_classes)


def read_arrays(
    where: str, path: Path, needed: set[str], writer: str = "np.savez"
) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Reads the known arrays of a file, never unpickling anything.

    Privacy: reads private data; output private.

    Args:
        where: the file, in errors.
        path: of an npz file.
        needed: names that must be there.
        writer: what writes such a file, in errors.

    Returns:
        The arrays by name, and the names of those that are not known.

    Raises:
        UserError: a missing or damaged file, or one that lacks an array.
    """
    if not path.is_file() or not zipfile.is_zipfile(path):
        problem = "is not an npz file" if path.is_file() else "does not exist"
        raise UserError(f"{where}: {path} {problem}; write it with {writer}")
    remedy = "write plain numeric or string arrays with np.savez, no objects"
    with (
        explained(ERRORS, f"{where}: cannot be read", remedy),
        np.load(path, allow_pickle=False) as archive,
    ):
        names = archive.files
        # A member that is no array comes as bytes.
        arrays = {name: np.asarray(archive[name]) for name in names if name in KEYS}
    if not needed <= arrays.keys():
        raise UserError(
            f"{where}: holds {', '.join(names) or 'no arrays'}; give "
            f"{' and '.join(map(repr, sorted(needed)))}, written with np.savez"
        )
    return arrays, [name for name in names if name not in KEYS]
