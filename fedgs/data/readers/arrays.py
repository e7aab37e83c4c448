"""Images that are arrays: of an npz file, or of the caller's own program.

Arrays: `images`, and if known `labels` and `clients`; see docs/data.md. Nothing is
ever unpickled.
"""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data.picture_rules import (
    BYTE_VALUES,
    FLOAT_VALUES,
    Found,
    Picture,
    PictureRules,
)
from fedgs.data.records import Records
from fedgs.errors import UserError, raise_if_any, wrap_error

_COLUMNS = {  # kinds of numpy's types, and what they are called
    "labels": ("iu", "integers from 0"),
    "clients": ("iuU", "integers or strings"),
}
_KNOWN_ARRAYS = {"images", *_COLUMNS}
_PIXELS = (1, 2, 3)  # the axes of one image
_LARGEST_VALUE = 1e300  # differences of larger ones may overflow
_RANGES = (
    "give uint8 in [0, 255] or floats in [0, 1], or say which values are black and "
    "white: --window LOW,HIGH or --normalize"
)


def read(config: RunConfig) -> Records:
    """Reads images, and if given labels and clients, from `npz:PATH`.

    Privacy: reads private data; output private.

    Raises:
        UserError: a missing or damaged file, or arrays that contradict each other.
    """
    where = f"data = {config.data!r}"
    path = Path(config.data.removeprefix("npz:")).expanduser()
    # The likeliest mistake, so it gets a remedy of its own.
    if path.is_dir():
        raise UserError(f"{where}: it is a folder; give --data folder:{path}")
    arrays, others = read_arrays(where, path, {"images"})
    if others:
        raise UserError(
            f"{where}: it contains {', '.join([*arrays, *others])}; give 'images' "
            "and, if known, 'labels' and 'clients', no others"
        )
    return from_arrays(
        where,
        arrays,
        rules=PictureRules.of(config),
        num_classes=config.num_classes,
    )


def read_arrays(
    where: str,
    path: Path,
    needed: set[str],
    writer: str = "np.savez",
) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Reads the known arrays of a file, never unpickling anything.

    Privacy: reads private data; output private.

    Args:
        where: the file, in errors.
        path: the path of an npz file.
        needed: names that must be there.
        writer: what writes such a file, in errors.

    Returns:
        The arrays by name, and the names of those that are not known.

    Raises:
        UserError: a missing or damaged file, or one that lacks an array.
    """
    if not path.is_file() or not zipfile.is_zipfile(path):
        problem = "does not exist"
        if path.exists():
            problem = "is not an npz file"
        raise UserError(f"{where}: {path} {problem}; write it with {writer}")
    remedy = "write plain numeric or string arrays with np.savez, no objects"
    with (
        wrap_error(Exception, f"{where}: it cannot be read", remedy),
        open(path, "rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        # A small file may unpack to more than there is room for.
        unpacked = sum(member.file_size for member in archive.zip.infolist())
        if unpacked > psutil.virtual_memory().available:
            raise MemoryError(f"{unpacked / 1e9:.1f} GB unpacked, more than is free")
        names = archive.files
        arrays: dict[str, NDArray[Any]] = {}
        others: list[str] = []
        for name in names:
            if name in _KNOWN_ARRAYS:
                # A member that is no array comes as bytes.
                arrays[name] = np.asarray(archive[name])
            else:
                others.append(name)
    if not needed <= arrays.keys():
        raise UserError(
            f"{where}: it contains {', '.join(names) or 'no arrays'}; give "
            f"{' and '.join(map(repr, sorted(needed)))}, written with np.savez"
        )
    return arrays, others


def from_arrays(
    where: str,
    arrays: Mapping[str, NDArray[Any]],
    rules: PictureRules | None = None,
    num_classes: int | None = None,
) -> Records:
    """Checks arrays and makes them records.

    Privacy: reads private data; output private.

    Args:
        where: the arrays' source, in errors.
        arrays: "images" of shape (N, H, W), (N, H, W, C) or (N, C, H, W), and if known
            "labels" and "clients" of shape (N,).
        rules: by which pictures become images; None: as they are.
        num_classes: that the run is told of; above 1 it needs labels.

    Raises:
        UserError: arrays that contradict each other.
    """
    if rules is None:
        rules = PictureRules()
    pictures = _channels_first(arrays["images"])
    raise_if_any(where, _shape_problems(arrays["images"].shape, pictures.shape))
    raise_if_any(where, _pixel_problems(pictures, rules))
    raise_if_any(where, _column_problems(arrays, num_classes))
    found = Found()
    kind = f"{8 * pictures.dtype.itemsize} bits"
    own_range = BYTE_VALUES
    if pictures.dtype.kind == "f":
        kind = "floats"
        own_range = FLOAT_VALUES
    found.note(
        Picture(values=pictures[0], declared=None, kind=kind),
        range_of=rules.range_of(own_range),
        is_colour=pictures.shape[1] == 3,
        where=where,
        count=len(pictures),
    )
    images = _in_bytes(pictures, rules)
    unlabelled = np.zeros(len(images), np.int64)
    labels = arrays.get("labels", unlabelled)
    return Records(
        images=rules.squared(images, where),
        labels=labels.astype(np.int64),
        num_classes=max(int(labels.max()), 0) + 1,
        clients=arrays.get("clients"),
        found=found,
    )


def _in_bytes(pictures: NDArray[Any], rules: PictureRules) -> NDArray[np.uint8]:
    """Returns pictures (N, C, H, W) in [0, 255]."""
    if rules.has_own_range:
        images = np.empty(pictures.shape, np.uint8)
        for index, picture in enumerate(pictures):
            images[index] = rules.in_bytes(picture, None, f"image {index}")
        return images
    # The type alone decides the range: what an image becomes, no other one decides.
    if pictures.dtype.kind == "f":
        floats = pictures.astype(np.float32)
        pictures = np.rint(floats * np.float32(255))
    return pictures.astype(np.uint8)


def _channels_first(images: NDArray[Any]) -> NDArray[Any]:
    """Returns images as (N, C, H, W) where they can be.

    (N, H, W) is grey. Of four axes, the second is the channel if it is 1 or 3 long,
    else the last.
    """
    if images.ndim == 3:
        return images[:, None]
    has_channels_last = images.ndim == 4 and images.shape[1] not in (1, 3)
    if has_channels_last:
        return np.moveaxis(images, 3, 1)
    return images


def _shape_problems(given: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[str]:
    """Yields what is wrong with the shape of images.

    Args:
        given: in the file.
        shape: of the same images with their channels first, where that was possible.
    """
    if len(shape) != 4 or shape[1] not in (1, 3):
        yield (
            f"images has shape {given}; give (N, H, W), (N, H, W, C) or (N, C, H, W) "
            "with C = 1 or 3"
        )
    if 0 in shape:
        yield f"images has shape {given}; give at least one image, of some pixels"


def _pixel_problems(images: NDArray[Any], rules: PictureRules) -> Iterator[str]:
    """Yields what is wrong with images: integers in [0, 255], floats in [0, 1].

    By the rules of a window, or of each image's own values, all finite ones are right.
    No value is quoted, because it is a private pixel's.
    """
    if images.dtype.kind == "b":
        yield "images has dtype bool; save black as 0 and white as 255, as uint8"
    elif images.dtype.kind not in "iuf":
        yield f"images has dtype {images.dtype}; {_RANGES}"
    lowest = images.min(axis=_PIXELS)
    highest = images.max(axis=_PIXELS)
    # If an image contains NaN, its smallest and its largest value are NaN.
    is_finite = np.isfinite(lowest) & np.isfinite(highest)
    if not is_finite.all():
        worst = is_finite.argmin()
        yield (
            f"image {worst} has values that are not finite (NaN or infinity); replace "
            "them, or leave the image out"
        )
    least = 0.0
    most = 255.0
    if images.dtype.kind == "f":
        most = 1.0
    if rules.has_own_range:
        least = -_LARGEST_VALUE
        most = _LARGEST_VALUE
    is_in_range = (lowest >= least) & (highest <= most)
    if not is_in_range.all():
        worst = is_in_range.argmin()
        remedy = _RANGES
        if rules.has_own_range:
            remedy = "scale them down"
        yield f"image {worst} has values outside of [{least:g}, {most:g}]; {remedy}"
    # Black and white, or floats that were cast.
    if most == 255 and highest.max() == 1:
        yield f"images are integers and none is above 1; {_RANGES}"


def _column_problems(
    arrays: Mapping[str, NDArray[Any]],
    num_classes: int | None,
) -> Iterator[str]:
    """Yields labels or clients that are not one value of their type per image."""
    count = len(arrays["images"])
    for name in _COLUMNS.keys() & arrays.keys():
        kinds, words = _COLUMNS[name]
        values = arrays[name]
        if values.shape != (count,):
            remedy = f"give one value for each of the {count} images"
            yield f"{name} has shape {values.shape}; {remedy}"
        if values.dtype.kind not in kinds:
            yield f"{name} has dtype {values.dtype}; give {words}"
    clients = arrays.get("clients")
    if clients is not None and clients.dtype.kind == "U":
        is_blank = np.char.strip(clients) == ""
        if is_blank.any():  # all such images would be one owner's
            index = int(is_blank.argmax())
            yield f"image {index} has a blank owner; name its owner, or leave it out"
    # Several classes, of which nobody has said which image has which.
    if "labels" not in arrays and (num_classes or 1) > 1:
        yield (
            f"it has no labels for num_classes = {num_classes}; leave out "
            "--num-classes, or add the array 'labels'"
        )
    elif "labels" in arrays:
        labels = arrays["labels"]
        # An unsigned label may be larger than those that are kept.
        largest = np.iinfo(np.int64).max
        is_wrong = (labels < 0) | (labels > largest)
        if is_wrong.any():
            index = int(is_wrong.argmax())
            yield f"image {index} has the label {labels[index]}; give labels from 0"
