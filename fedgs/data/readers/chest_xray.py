"""Chest radiographs of children, in the public archive's own layout.

`chest-xray` is the archive below `data_dir`, `chest-xray:FOLDER` its folder. Pictures
lie in NORMAL and PNEUMONIA, which may lie in train, test and val. The archive's split
is not one of patients, so all three are read as one; `test_owners` holds out patients.

The patient is in the name of a file, and for pneumonia its kind:

    NORMAL/IM-0123-0001.jpeg               patient IM-0123
    NORMAL/NORMAL2-IM-0123-0001.jpeg       patient NORMAL2-IM-0123
    PNEUMONIA/person12_bacteria_45.jpeg    patient person12
    PNEUMONIA/person12_virus_46.jpeg       patient person12, too

The archive may count patients of bacteria and of virus apart. Nothing says so, and two
persons of one number are one client here: each of them is then protected, with the
other one, as a whole.

Source: Kermany et al., "Identifying medical diagnoses and treatable diseases by
image-based deep learning", Cell 172 (2018); doi.org/10.17632/rscbjbr9sj, CC BY 4.0.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedgs.config.checks import NO_DOWNLOAD
from fedgs.config.run_config import RunConfig
from fedgs.data.picture_rules import PictureRules
from fedgs.data.readers.folder import is_picture, visible
from fedgs.data.readers.pictures import PictureReader
from fedgs.data.records import DARK, Records, gathered
from fedgs.errors import UserError, raise_if_any

DIAGNOSES = ("normal", "bacteria", "virus")  # in the order of their labels
NORMAL = "NORMAL"
PNEUMONIA = "PNEUMONIA"
SPLITS = ("train", "test", "val")
# Names of the archive's folder: unpacked by hand, and by those who publish copies.
ARCHIVE_FOLDERS = (
    "ChestXRay",
    "chest_xray",
    "ChestXRay2017/chest_xray",
    "ChestXRay2017",
    ".",
)
SIDE = 28  # of images by default: pictures of the archive differ in size
FILE_NAMES = {
    NORMAL: re.compile(r"(?P<patient>(NORMAL\d*-)?IM-\d+)-.*"),
    PNEUMONIA: re.compile(r"(?P<patient>person\d+)_(?P<kind>bacteria|virus)_.*"),
}
EXAMPLES = {
    NORMAL: "IM-0123-0001.jpeg or NORMAL2-IM-0123-0001.jpeg",
    PNEUMONIA: "person12_bacteria_45.jpeg or person12_virus_46.jpeg",
}
ARCHIVE_LAYOUT = (
    f"give the archive's folder, with {NORMAL} and {PNEUMONIA} ({NO_DOWNLOAD})"
)


class _Radiograph(NamedTuple):
    """One file of the archive: its patient, by its name, its label, and where it is."""

    patient: str
    label: int
    path: Path


def read(config: RunConfig) -> Records:
    """Reads `chest-xray` or `chest-xray:FOLDER`; the owner of an image is its patient.

    Pictures are resized to `image_size`, else to 28 pixels, and are grey unless
    `image_channels` says otherwise.

    Privacy: reads private data; output private. Classes and size are the format's.

    Raises:
        UserError: another layout, a file whose name and folder contradict each other or
            occur twice, or a picture that cannot be used, named by its file.
    """
    archive = archive_folder(config)
    files = sorted(_files(archive))
    raise_if_any(f"data = {config.data!r}", _problems(archive, files))
    rules = PictureRules.of(config)
    if rules.side is None:
        rules = replace(rules, side=SIDE)
    # Radiographs are grey, and copies that were saved in colour are too.
    if rules.channels is None:
        rules = replace(rules, channels=1)
    reader = PictureReader(rules)

    def parts() -> Iterator[tuple[str, NDArray[np.uint8], int]]:
        for patient, own in groupby(files, key=lambda file: file.patient):
            for file in own:
                pixels = reader.read(file.path, str(file.path), patient)
                yield patient, pixels[None], file.label

    return gathered(
        config.data,
        parts(),
        capacity=len(files),
        num_classes=len(DIAGNOSES),
        background=DARK,
        found=reader.found,
    )


def archive_folder(config: RunConfig) -> Path:
    """Returns the folder that holds the archive's classes or splits."""
    _, _, where = config.data.partition(":")
    if where:
        root = Path(where).expanduser()
        if _class_folders(root):
            return root
        raise UserError(
            f"data = {config.data!r}: {root} holds no such data; {ARCHIVE_LAYOUT}"
        )
    if config.data_dir is None:
        raise UserError(
            "data_dir is unset: data = chest-xray needs --data-dir, the folder that "
            f"holds ChestXRay or chest_xray; {ARCHIVE_LAYOUT}"
        )
    data_dir = Path(config.data_dir).expanduser()
    for name in ARCHIVE_FOLDERS:
        if _class_folders(data_dir / name):
            return data_dir / name
    raise UserError(
        f"data_dir = {config.data_dir!r}: it contains neither ChestXRay nor "
        f"chest_xray; {ARCHIVE_LAYOUT}"
    )


def _class_folders(root: Path) -> list[Path]:
    """Returns the folders of the classes that are there, of all splits."""
    parents = [root]
    parents += [root / split for split in SPLITS]
    folders: list[Path] = []
    for parent in parents:
        for name in FILE_NAMES:
            if (parent / name).is_dir():
                folders.append(parent / name)
    return folders


def _files(root: Path) -> Iterator[_Radiograph]:
    """Yields all files, by the name of each.

    Raises:
        UserError: a name is not one of its folder's class.
    """
    for folder in _class_folders(root):
        for path in visible(folder):
            match = FILE_NAMES[folder.name].fullmatch(path.name)
            if match is None or not is_picture(path):
                raise UserError(
                    f"{path}: it is no picture of {folder.name} by its name; give "
                    f"{EXAMPLES[folder.name]}, or remove it"
                )
            found = match.groupdict()
            label = DIAGNOSES.index(found.get("kind") or "normal")
            yield _Radiograph(found["patient"], label, path)


def _problems(root: Path, files: list[_Radiograph]) -> Iterator[str]:
    """Yields what is wrong with the archive as a whole."""
    if not files:
        yield f"{root} holds no pictures; {ARCHIVE_LAYOUT}"
    first: dict[str, Path] = {}
    for file in files:
        known = first.setdefault(file.path.name, file.path)
        # Two patients under one name, or one picture twice.
        if known != file.path:
            yield (
                f"{file.path} has the name of {known}, so both would be of the patient "
                f"{file.patient}; remove one of them, or give it another patient's name"
            )
