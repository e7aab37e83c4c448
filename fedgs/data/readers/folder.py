"""A user's own pictures: `folder:PATH` with CLIENT/LABEL/*.png, or CLIENT/*.png.

Label folders named by numbers are the labels themselves; other names need the setting
`classes`. A picture's client is the first folder, always.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data.readers.labels import number_of_classes, numbered
from fedgs.data.readers.pictures import read_picture
from fedgs.data.records import DARK, Records, gathered
from fedgs.errors import first_n, raise_if_any

SUFFIXES = (".png", ".jpg", ".jpeg")
LAYOUT = "give CLIENT/LABEL/*.png, or CLIENT/*.png without labels"


def read(config: RunConfig) -> Records:
    """Reads `folder:PATH`.

    Pictures are resized to `image_size` where that is set. Hidden files are ignored.

    Privacy: reads private data; output private. The number of classes is public.

    Raises:
        UserError: another layout, a class without a label, a picture that cannot be
            used, named by its file, or pictures of two sizes without `image_size`.
    """
    root = Path(config.data.removeprefix("folder:")).expanduser()
    where = f"data = {config.data!r}"
    raise_if_any(where, _layout_problems(root))
    files = {client: _files(client) for client in _visible(root)}
    raise_if_any(where, _file_problems(files, bool(config.class_names)))
    names = {label for pictures in files.values() for label, _ in pictures if label}
    # All names together, before a picture is read: reading may take long.
    numbers = numbered(config, sorted(names))

    def parts() -> Iterator[tuple[str, NDArray[np.uint8], int]]:
        for client, pictures in files.items():
            for label, file in pictures:
                pixels = read_picture(
                    file, str(file), config.image_channels, config.image_size
                )
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
    )


Pictures = list[tuple[str | None, Path]]  # label, if there is one, and file


def _layout_problems(root: Path) -> Iterator[str]:
    if not root.is_dir():
        yield f"{root} is no folder; {LAYOUT}"
    if stray := [entry.name for entry in _visible(root) if not entry.is_dir()]:
        yield f"{first_n(stray)} is in no client's folder; {LAYOUT}"
    if not _visible(root):
        yield f"{root} is empty; {LAYOUT}"


def _file_problems(files: dict[Path, Pictures], has_classes: bool) -> Iterator[str]:
    if empty := [client for client, pictures in files.items() if not pictures]:
        count = f"{len(empty)} of {len(files)} clients"
        yield f"{empty[0]}: has no pictures ({count}); remove this folder"
    pictures = [picture for found in files.values() for picture in found]
    has_labels = has_classes or any(label for label, _ in pictures)
    for label, file in pictures:
        # A pipe, a device or a link to nothing may have the name of a picture, too.
        if not file.is_file() or file.suffix.lower() not in SUFFIXES:
            names = ", ".join(SUFFIXES)
            yield f"{file}: is no picture ({names}); remove it, or {LAYOUT}"
        if label is None and has_labels:
            yield f"{file} has no label, but the others or --classes have; {LAYOUT}"


def _files(client: Path) -> Pictures:
    """Returns label and file of one client's pictures; the label may be missing."""
    pictures: Pictures = []
    for entry in _visible(client):
        if entry.is_dir():
            pictures.extend((entry.name, file) for file in _visible(entry))
        else:
            pictures.append((None, entry))
    return pictures


def _visible(folder: Path) -> list[Path]:
    """Returns the entries of a folder that are not hidden, in sorted order."""
    return sorted(entry for entry in folder.iterdir() if entry.name[0] != ".")
