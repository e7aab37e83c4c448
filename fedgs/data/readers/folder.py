"""A user's own pictures: `folder:PATH` with CLIENT/LABEL/*.png, or CLIENT/*.png.

Label folders named by numbers are the labels themselves; other names need the setting
`classes`. A picture's client is the first folder, always.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data.picture_rules import PictureRules
from fedgs.data.readers.dicom import has_mark
from fedgs.data.readers.labels import number_of_classes, numbered
from fedgs.data.readers.pictures import PictureReader
from fedgs.data.records import DARK, Records, gathered
from fedgs.errors import first_n, raise_if_any

SUFFIXES = (".png", ".jpg", ".jpeg", ".dcm")
# Formats that other programs write, and that a name in a folder does not vouch for.
OTHER_PICTURES = (".tif", ".tiff", ".bmp", ".gif", ".webp", ".jp2", ".pgm", ".ppm")
LAYOUT = "give CLIENT/LABEL/*.png, or CLIENT/*.png without labels"


class _File(NamedTuple):
    """One picture file.

    Attributes:
        label: the name of its folder, None where it lies beside no label.
        path: where the file lies.
    """

    label: str | None
    path: Path


def read(config: RunConfig) -> Records:
    """Reads `folder:PATH`.

    Pictures are resized to `image_size` where that is set. Hidden files are ignored.

    Privacy: reads private data; output private. The number of classes is public.

    Raises:
        UserError: another layout, a class without a label, a picture that cannot be
            used, named by its file, pictures of two sizes without `image_size`, or grey
            ones and others in colour without `image_channels`.
    """
    root = Path(config.data.removeprefix("folder:")).expanduser()
    where = f"data = {config.data!r}"
    raise_if_any(where, _layout_problems(root))
    files = {client: _files(client) for client in visible(root)}
    has_classes = bool(config.class_names)
    raise_if_any(where, _file_problems(files, has_classes))
    raise_if_any(where, _link_problems(files))
    # All names together, before a picture is read: reading may take long.
    numbers = numbered(config, _names_of_labels(files))
    reader = PictureReader(PictureRules.of(config))
    reader.found.hidden = _num_hidden(root, files)

    def parts() -> Iterator[tuple[str, NDArray[np.uint8], int]]:
        for client, pictures in files.items():
            for label, path in pictures:
                pixels = reader.read(path, str(path), client.name)
                number = 0
                if label is not None:
                    number = numbers[label]
                yield client.name, pixels[None], number

    return gathered(
        config.data,
        parts(),
        capacity=sum(map(len, files.values())),
        num_classes=number_of_classes(config, numbers.values()),
        background=DARK,
        found=reader.found,
        # One stray file in colour would change the images of all owners.
        may_mix=False,
    )


def _names_of_labels(files: dict[Path, list[_File]]) -> list[str]:
    names: set[str] = set()
    for pictures in files.values():
        labels = [file.label for file in pictures if file.label]
        names.update(labels)
    return sorted(names)


def _layout_problems(root: Path) -> Iterator[str]:
    if not root.is_dir():
        yield f"{root} is no folder; {LAYOUT}"
    entries = visible(root)
    stray = [entry.name for entry in entries if not entry.is_dir()]
    if stray:
        yield f"{first_n(stray)} is in no client's folder; {LAYOUT}"
    if not entries:
        yield f"{root} is empty; {LAYOUT}"


def _file_problems(files: dict[Path, list[_File]], has_classes: bool) -> Iterator[str]:
    empty = [client for client, pictures in files.items() if not pictures]
    if empty:
        count = f"{len(empty)} of {len(files)} clients"
        yield f"{empty[0]}: it has no pictures ({count}); remove this folder"
    has_labels = has_classes or bool(_names_of_labels(files))
    for pictures in files.values():
        for label, path in pictures:
            if not is_picture(path):
                yield f"{path}: {_instead_of_picture(path)}"
            if label is None and has_labels:
                yield f"{path} has no label, but the others or --classes have; {LAYOUT}"


def _link_problems(files: dict[Path, list[_File]]) -> Iterator[str]:
    """Yields a folder that is there twice: its owner would be two clients."""
    first: dict[tuple[int, int], Path] = {}
    for client, pictures in files.items():
        folders = {client, *(path.parent for _, path in pictures)}
        for folder in sorted(folders):
            found = folder.stat()  # of what a link leads to
            known = first.setdefault((found.st_dev, found.st_ino), folder)
            if known != folder:
                yield (
                    f"{folder}: it is the same folder as {known}, so one person could "
                    "be two clients; remove one of these two"
                )


def is_picture(path: Path) -> bool:
    """Tells whether a file may be a picture, by its name or by the mark of DICOM.

    A scanner often writes DICOM files without a suffix, or with a number as one.
    """
    # A pipe, a device or a link to nothing may have the name of a picture, too.
    if not path.is_file():
        return False
    return path.suffix.lower() in SUFFIXES or has_mark(path)


def _instead_of_picture(path: Path) -> str:
    """Returns what lies in the place of a picture, with the remedy."""
    if path.is_dir():
        return f"it is a folder, and pictures lie directly in CLIENT/LABEL; {LAYOUT}"
    if not path.exists():
        return "it is a link that leads to no file; remove it"
    if not path.is_file():
        return "it is no file, but a pipe, a socket or a device; remove it"
    if path.suffix.lower() in OTHER_PICTURES:
        return f"a {path.suffix} file is not read in folders; convert it to PNG"
    names = ", ".join(SUFFIXES)
    return f"it is no picture ({names}); remove it, or {LAYOUT}"


def _num_hidden(root: Path, files: dict[Path, list[_File]]) -> int:
    """Returns how many entries of all folders are passed over, because of a dot."""
    folders = {root, *files}
    for pictures in files.values():
        folders.update(path.parent for _, path in pictures)
    hidden = 0
    for folder in folders:
        names = os.listdir(folder)
        hidden += sum(name.startswith(".") for name in names)
    return hidden


def _files(client: Path) -> list[_File]:
    """Returns one client's pictures."""
    found: list[_File] = []
    for entry in visible(client):
        if entry.is_dir():
            for path in visible(entry):
                found.append(_File(label=entry.name, path=path))
        else:
            found.append(_File(label=None, path=entry))
    return found


def visible(folder: Path) -> list[Path]:
    """Returns the entries of a folder that are not hidden, in sorted order."""
    entries = [entry for entry in folder.iterdir() if entry.name[0] != "."]
    return sorted(entries)
