"""Files and folders that are on the disk, names included, when a function returns.

A name is an entry of its folder: until the folder is synced, a power cut can take a new
file, a rename or a new folder back, however well the file itself was synced. A file
gets its bytes under a temporary name, `.NAME.PID`. A process that is killed leaves it
behind; who owns the folder removes it at its next start.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tomllib
import unicodedata
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import safe_open

from fedgs.errors import UserError, wrap_error

if TYPE_CHECKING:  # torch is imported where tensors are: `fedgs privacy` needs none
    from fedgs.shapes import TensorDict

RESTORE = "restore it from a backup, or start again with another --output"
SEAL = "sha256:"  # begins the hash of tensors in a file's metadata
TEMPORARY_NAME = re.compile(r"\.(.+)\.([0-9]+)")
# Common file systems allow 255. The rest is for what files are called beside it: a
# number, an ending, and of a temporary file a process.
MOST_NAME_BYTES = 220
NAME_RULE = (
    "give a plain name, without slashes and control characters, that does not begin "
    f"with a dot and has at most {MOST_NAME_BYTES} bytes"
)


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
        mode: the mode of all that it makes.

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
        size = os.fstat(file.fileno()).st_size
        file.truncate(size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ------------------------------------------------------------------ names


def is_plain_name(name: object) -> bool:
    r"""Tells whether a value is the name of an entry of a folder; it leads no further.

    >>> [is_plain_name(name) for name in ("cat", "a b", "..", "a/b", "", "a\n", 7)]
    [True, True, False, False, False, False, False]
    """
    if not isinstance(name, str) or not name or name.startswith("."):
        return False
    if "/" in name or "\\" in name:
        return False
    # Control characters, and halves of characters, which are no text.
    kinds = {unicodedata.category(letter) for letter in name}
    if kinds & {"Cc", "Cs"}:
        return False
    return len(name.encode()) <= MOST_NAME_BYTES


def inside(folder: Path, name: object, setting: str) -> Path:
    """Returns the path of an entry of a folder, by a name that others have chosen.

    Every name that comes from a run folder, a data set or another machine becomes a
    path here, wherever it was checked before.

    Args:
        folder: the folder of the entry.
        name: from somewhere else.
        setting: that holds the name, for errors.

    Raises:
        UserError: it is no plain name, so that it could lead to another folder.
    """
    if not is_plain_name(name):
        raise UserError(f"{setting} = {name!r:.80}: {NAME_RULE}")
    return folder / str(name)


def check_entries(folder: Path) -> None:
    """Refuses a folder in which an entry leads out of it, or would never end.

    Whoever hands a folder over could have other files read, or written to.

    Raises:
        UserError: a symbolic link to somewhere else, or no file and no folder.
    """
    root = os.path.realpath(folder)
    for place, folders, names in os.walk(folder):  # follows no link
        for name in (*folders, *names):
            if _leads_out(os.path.join(place, name), root):
                raise UserError(
                    f"{place}/{name}: it is a link that leads out of {folder}, or no "
                    "file; put what it leads to in its place, or remove it"
                )


def _leads_out(path: str, root: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # a run that goes on removes files
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return os.path.commonpath([root, os.path.realpath(path)]) != root
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False


# ------------------------------------------------------------------ writing


@contextlib.contextmanager
def replacing(
    path: Path,
    is_durable: bool = True,
    recycle: Path | None = None,
) -> Iterator[BinaryIO]:
    """Opens a file to write all of `path` to; readers see the old or the new content.

    After an error the old content stays, and nothing else.

    Args:
        path: gets its content when the block ends.
        is_durable: have content and name on the disk then.
        recycle: a file that is not needed any more, to be overwritten.
    """
    temporary = temporary_path(path)
    mode = "wb"
    try:
        if recycle is not None:
            recycle.replace(temporary)
            mode = "r+b"
        with open(temporary, mode) as file:
            yield file
            file.truncate()
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)  # a write does not say which file it is of
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
        names: the names of the files that the lock is about; none: all of the folder.
    """
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            found = TEMPORARY_NAME.fullmatch(entry.name)
            if not found:
                continue
            is_meant = not names or found[1] in names
            if not is_meant:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)


# ------------------------------------------------------------------ contents


def check_regular(path: Path) -> None:
    """Refuses what is no file with an end: a pipe waits for a writer, a device too.

    Raises:
        OSError: it is missing, or a folder, a pipe, a socket or a device.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is no regular file")


def read_bytes(path: Path) -> bytes:
    """Reads a file that somebody hands over.

    Raises:
        OSError: it cannot be read, or is as `check_regular` refuses.
    """
    check_regular(path)
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Reads UTF-8, with or without the byte-order mark that some editors write.

    Raises:
        OSError, UnicodeDecodeError: as `read_bytes`, or it is no UTF-8.
    """
    return read_bytes(path).decode("utf-8-sig")


def read_toml(setting: str, path: Path) -> dict[str, Any]:
    """Reads the TOML file that a setting names.

    Raises:
        UserError: missing or malformed.
    """
    remedy = f"give a TOML file as --{setting}"
    with wrap_error(Exception, f"{setting} = {path}: it cannot be read", remedy):
        return tomllib.loads(read_text(path))


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file durably; a reader sees the old or the new content, never half."""
    with replacing(path) as file:
        file.write(content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON object atomically."""
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(path, text.encode())


def without_nan(value: Any) -> Any:
    """Returns JSON values with None for what is not defined: JSON has no NaN.

    Privacy: as private as the values.

    >>> without_nan({"a": (1.0, float("nan"))})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        UserError: missing or malformed.
    """
    with wrap_error(Exception, f"{path}: it cannot be read", RESTORE):
        content = json.loads(read_text(path))
    if not isinstance(content, dict):
        raise UserError(f"{path}: it is not a JSON object; {RESTORE}")
    return content


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines; nothing where there is no file.

    A last line that was torn by a crash is left out.

    Raises:
        UserError: the file cannot be read, or another line is no JSON object.
    """
    if not path.exists():
        return []
    remedy = "move it away"
    with wrap_error(Exception, f"{path}: it cannot be read", remedy):
        texts = read_text(path).split("\n")
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(texts[:-1], start=1):  # behind the last "\n": torn
        problem = f"{path}: line {number} is no JSON object"
        with wrap_error(Exception, problem, remedy):
            line = json.loads(text)
        if not isinstance(line, dict):
            raise UserError(f"{problem}; {remedy}")
        lines.append(line)
    return lines


def write_tensors(
    path: Path,
    tensors: "TensorDict",
    metadata: dict[str, str] | None = None,
    recycle: Path | None = None,
    is_durable: bool = False,
    is_sealed: bool = False,
) -> None:
    """Writes tensors as safetensors, atomically; durable after `save_checkpoint`.

    Privacy: the file is as private as the tensors.

    Args:
        path: the file; its folder is made.
        tensors: on any device.
        metadata: kept in the file's header.
        recycle: a file that is not needed any more: overwriting it costs a third of
            what new pages and their release do.
        is_durable: have it on the disk when this returns.
        is_sealed: add a hash of the tensors for `check_tensors` to the metadata.
    """
    from safetensors.torch import save

    make_folder(path.parent)
    flat: TensorDict = {}
    for name, value in tensors.items():
        flat[name] = value.detach().cpu().contiguous()
    if is_sealed:
        # In the one entry, because safetensors writes several in no fixed order.
        ((name, text),) = (metadata or {"tensors": ""}).items()
        seal = SEAL + tensors_hash(save(flat))
        metadata = {name: f"{text} {seal}".strip()}
    with replacing(path, is_durable, recycle) as file:
        file.write(save(flat, metadata))


def read_tensors(path: Path) -> "tuple[TensorDict, dict[str, str]]":
    """Reads a safetensors file and its metadata.

    Privacy: output as private as the file.

    Raises:
        UserError: missing or corrupted.
    """
    with _opened_tensors(path) as file:
        tensors: TensorDict = {}
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            tensors[name] = file.get_tensor(name)
        return tensors, file.metadata() or {}


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of a safetensors file; reads no tensor.

    Raises:
        UserError: missing or corrupted.
    """
    with _opened_tensors(path, "np") as file:  # loads no torch
        return file.metadata() or {}


def tensors_hash(content: bytes) -> str:
    """Returns the SHA-256 of the tensors in a safetensors file: names, types and bytes.

    Args:
        content: the file's bytes; what it says beside the tensors does not count.
    """
    # A safetensors file: the header's length in 8 bytes, the header, the tensors.
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    named = json.dumps(header, sort_keys=True).encode()
    values = content[end:]
    return hashlib.sha256(named + values).hexdigest()


def check_tensors(path: Path) -> None:
    """Compares a file's tensors with the hash that `write_tensors` sealed them with.

    Raises:
        UserError: missing or corrupted, or others than were written. A file of a
            version that sealed none passes.
    """
    words = " ".join(read_metadata(path).values()).split()
    seals = [word for word in words if word.startswith(SEAL)]
    if not seals:
        return
    seal = SEAL + tensors_hash(path.read_bytes())
    if seals != [seal]:
        raise UserError(
            f"{path}: its tensors are not those that were written; {RESTORE}"
        )


@contextlib.contextmanager
def _opened_tensors(path: Path, framework: str = "pt") -> Iterator[Any]:
    with wrap_error(Exception, f"{path}: it cannot be read", RESTORE):
        check_regular(path)
        with safe_open(path, framework=framework) as file:
            yield file
