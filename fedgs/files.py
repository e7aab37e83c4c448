"""Files and folders that are on the disk, names included, when a function returns.

A name is an entry of its folder: until the folder is synced, a power cut can take a new
file, a rename or a new folder back, however well the file itself was synced. A file
gets its bytes under a temporary name, `.NAME.PID`. A process that is killed leaves it
behind; who owns the folder removes it at its next start.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

TEMPORARY = re.compile(r"\.(.+)\.([0-9]+)")


def sync(path: Path) -> None:
    """Has a file's bytes, or a folder's names, on the disk when it returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes a folder and those above it, if they are missing, durably.

    Args:
        path: the folder.
        mode: of all that it makes.

    Raises:
        OSError: it cannot be made, or is a file.
    """
    if path.is_dir():
        return
    if not path.parent.exists():
        make_folder(path.parent, mode)
    path.mkdir(mode, exist_ok=True)
    sync(path.parent)


def append_whole(file: FileIO, content: bytes) -> None:
    """Appends to a file all of the content or nothing: half a line spoils the next.

    Args:
        file: open for appending, without a buffer.
        content: in one write, so that lines of several processes do not mix.

    Raises:
        OSError: it cannot be written; also where the disk had room for a part only.
    """
    written = file.write(content)
    if written != len(content):
        file.truncate(os.fstat(file.fileno()).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def replacing(
    path: Path, is_durable: bool = True, recycle: Path | None = None
) -> Iterator[BinaryIO]:
    """Opens a file to write all of `path` to; readers see the old or the new content.

    After an error the old content stays, and nothing else.

    Args:
        path: gets its content when the block ends.
        is_durable: have content and name on the disk then.
        recycle: a file that is not needed any more, to be overwritten.
    """
    temporary = temporary_path(path)
    try:
        if recycle is not None:
            recycle.replace(temporary)
        with open(temporary, "wb" if recycle is None else "r+b") as file:
            yield file
            file.truncate()
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync(path.parent)


def temporary_path(path: Path) -> Path:
    """Returns the temporary name of a path for this process.

    >>> temporary_path(Path("runs/a.json")).name == f".a.json.{os.getpid()}"
    True
    """
    return path.with_name(f".{path.name}.{os.getpid()}")


def remove_temporaries(folder: Path, *names: str) -> None:
    """Removes what killed processes were writing in a folder.

    Only for who holds the folder's lock, so that nobody else is writing these files.

    Args:
        folder: need not be there.
        names: of the files that the lock is about; none: all of the folder.
    """
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            found = TEMPORARY.fullmatch(entry.name)
            if not found or (names and found[1] not in names):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)
