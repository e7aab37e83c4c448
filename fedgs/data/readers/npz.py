"""Images in a numpy archive of the user's own.

Arrays: `images`, and if known `labels` and `clients`; see docs/data.md. Nothing is
ever unpickled.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data.readers.arrays import COLUMNS, from_arrays
from fedgs.data.records import Records
from fedgs.errors import UserError

ERRORS = (  # what numpy and zipfile raise on damaged or hostile files
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)
KEYS = ("images", *COLUMNS)


def read(config: RunConfig) -> Records:
    """Reads images, and if given labels and clients, from `npz:PATH`.

    Privacy: reads private data; output private.

    Raises:
        UserError: a missing or damaged file, or arrays that contradict each other.
    """
    return from_arrays(config, _read_npz(config.data))


def _read_npz(data: str) -> dict[str, NDArray[np.generic]]:
    """Reads the known arrays of the setting `npz:PATH`, never unpickling anything."""
    path = Path(data.removeprefix("npz:")).expanduser()
    if not path.is_file() or not zipfile.is_zipfile(path):
        problem = "is not an npz file" if path.is_file() else "does not exist"
        raise UserError(f"data = {data!r}: {path} {problem}; write it with np.savez")
    try:
        with np.load(path, allow_pickle=False) as archive:
            keys = archive.files
            arrays = {key: archive[key] for key in keys if key in KEYS}
    except ERRORS as error:
        raise UserError(
            f"data = {data!r}: cannot be read ({error}); write plain numeric or string "
            "arrays with np.savez, no objects"
        ) from error
    if "images" not in arrays or len(arrays) < len(keys):
        raise UserError(
            f"data = {data!r}: holds {', '.join(keys) or 'no arrays'}; give 'images' "
            "and, if known, 'labels' and 'clients', no others"
        )
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise UserError(f"data = {data!r}: {key} is not an array; use np.savez")
    return arrays
