"""A user's own pictures: `folder:PATH` with CLIENT/LABEL/*.png, or CLIENT/*.png.

Label folders named by numbers are the labels themselves; other names need the setting
`classes`. A picture's client is the first folder, always.
"""

from pathlib import Path

import numpy as np

from fedgs.config.run_config import RunConfig
from fedgs.data.readers.labels import number_of_classes, numbered
from fedgs.data.readers.pictures import read_picture
from fedgs.data.records import DARK, Gathering, Records, resize
from fedgs.errors import UserError, some

SUFFIXES = (".png", ".jpg", ".jpeg")
LAYOUT = "give CLIENT/LABEL/*.png, or CLIENT/*.png without labels"


def read(config: RunConfig) -> Records:
    """Reads `folder:PATH`.

    Pictures of any size are resized to the run's. Hidden files are ignored.

    Privacy: reads private data; output private. The number of classes is public.

    Raises:
        UserError: another layout, a class without a label, or a picture that cannot be
            used, named by its file.
    """
    root = Path(config.data.removeprefix("folder:")).expanduser()
    if not root.is_dir():
        raise UserError(f"data = {config.data!r}: {root} is no folder; {LAYOUT}")
    clients = [entry for entry in _visible(root) if entry.is_dir()]
    if stray := [entry.name for entry in _visible(root) if not entry.is_dir()]:
        raise UserError(
            f"data = {config.data!r}: {some(stray)} is in no client's folder; {LAYOUT}"
        )
    if not clients:
        raise UserError(f"data = {config.data!r}: {root} is empty; {LAYOUT}")
    files = {client.name: _files(client) for client in clients}
    if empty := [client for client in clients if not files[client.name]]:
        raise UserError(
            f"{empty[0]}: has no pictures ({len(empty)} of {len(clients)} clients); "
            "remove this folder"
        )
    names = {label for found in files.values() for label, _ in found}
    if None in names and (len(names) > 1 or config.class_names):
        mixed = [file for found in files.values() for label, file in found if not label]
        raise UserError(
            f"data = {config.data!r}: {mixed[0]} has no label, but the others or "
            f"--classes have; {LAYOUT}"
        )
    numbers = numbered(config, sorted(name for name in names if name is not None))
    shape = (config.image_channels, config.image_size, config.image_size)
    gathering = Gathering(sum(map(len, files.values())), shape)
    for client, found in files.items():
        gathering.add(client, np.empty((0, *shape), np.uint8), 0)
        for label, file in found:
            pixels = read_picture(file, str(file), config.image_channels)[None]
            if pixels.shape[1:] != shape:
                pixels = resize(pixels, config.image_size)
            gathering.add(client, pixels, numbers[label] if label else 0)
    num_classes = number_of_classes(config, numbers.values())
    return gathering.records(config.data, num_classes, DARK)


def _files(client: Path) -> list[tuple[str | None, Path]]:
    """Returns label and file of one client's pictures; the label may be missing."""
    found: list[tuple[str | None, Path]] = []
    for entry in _visible(client):
        if entry.is_dir():
            found += [(entry.name, file) for file in _visible(entry)]
        else:
            found.append((None, entry))
    for _, file in found:
        if file.is_dir() or file.suffix.lower() not in SUFFIXES:
            raise UserError(
                f"{file}: is no picture ({', '.join(SUFFIXES)}); remove it, or {LAYOUT}"
            )
    return found


def _visible(folder: Path) -> list[Path]:
    """Returns the entries of a folder that are not hidden, in sorted order."""
    return sorted(entry for entry in folder.iterdir() if entry.name[0] != ".")
