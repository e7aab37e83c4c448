"""Images that are arrays: of an npz file, or of the caller's own program."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data.records import Records
from fedgs.errors import UserError

COLUMNS = {  # kinds of numpy's types, and what they are called
    "labels": ("iu", "integers from 0"),
    "clients": ("iuU", "integers or strings"),
}
_REMEDY = "save them as uint8 in [0, 255]"


def from_arrays(
    config: RunConfig, arrays: Mapping[str, NDArray[np.generic]]
) -> Records:
    """Checks arrays and makes them records.

    Privacy: reads private data; output private.

    Args:
        config: uses `num_classes`, and `data` in errors.
        arrays: "images" of shape (N, H, W), (N, H, W, C) or (N, C, H, W), and if known
            "labels" and "clients" of shape (N,).

    Raises:
        UserError: arrays that contradict each other.
    """
    images = _to_uint8(config.data, _channels_first(config.data, arrays["images"]))
    for key in [key for key in COLUMNS if key in arrays]:
        _check_column(config.data, key, arrays[key], len(images))
    clients = arrays.get("clients")
    if "labels" not in arrays:
        if (config.num_classes or 1) > 1:
            raise UserError(
                f"num_classes = {config.num_classes}: data = {config.data!r} has no "
                "labels; leave --num-classes out or add the array 'labels'"
            )
        return Records(images, np.zeros(len(images), np.int64), 1, clients)
    labels = arrays["labels"]
    if labels.max() > np.iinfo(np.int64).max:
        raise UserError(
            f"data = {config.data!r}: image {labels.argmax()} has the label "
            f"{labels.max()}; give labels from 0"
        )
    num_classes = max(int(labels.max()), 0) + 1
    return Records(images, labels.astype(np.int64), num_classes, clients)


def _check_column(data: str, key: str, values: NDArray[np.generic], count: int) -> None:
    """Refuses labels or clients that are not one value of their type per image."""
    problem = ""
    kinds, words = COLUMNS[key]
    if values.shape != (count,):
        problem = f"shape {values.shape}; give one value for each of the {count} images"
    elif values.dtype.kind not in kinds:
        problem = f"dtype {values.dtype}; give {words}"
    if problem:
        raise UserError(f"data = {data!r}: {key} has {problem}")


def _channels_first(data: str, images: NDArray[np.generic]) -> NDArray[np.generic]:
    """Returns images as (N, C, H, W).

    (N, H, W) is grey. Of four axes, the second is the channel if it is 1 or 3 long,
    else the last.
    """
    shape = images.shape
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and shape[1] not in (1, 3):
        images = np.moveaxis(images, 3, 1)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise UserError(
            f"data = {data!r}: images has shape {shape}; give (N, H, W), (N, H, W, C) "
            "or (N, C, H, W) with C = 1 or 3"
        )
    if images.size == 0 or images.shape[2] != images.shape[3]:
        raise UserError(
            f"data = {data!r}: images has shape {shape}; give at least one image, all "
            "square (crop or pad them)"
        )
    return images


def _to_uint8(data: str, images: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Returns images in [0, 255]; what one image becomes, no other one decides.

    A float image with a fraction is in [0, 1], and rounded to steps of 1/255; one with
    a value above 1 has whole numbers in [0, 255]. One with neither may be of either
    range, and images of both ranges were hardly meant: such files are refused.
    """
    if images.dtype.kind not in "iuf":
        raise UserError(
            f"data = {data!r}: images has dtype {images.dtype}; give uint8 in [0, 255] "
            "or floats in [0, 1]"
        )
    pixels = (1, 2, 3)
    is_float = images.dtype.kind == "f"
    if is_float and not (is_finite := np.isfinite(images).all(axis=pixels)).all():
        raise UserError(
            f"data = {data!r}: image {is_finite.argmin()} has NaN or infinite values; "
            "give numbers in [0, 1] or [0, 255]"
        )
    low, high = images.min(axis=pixels), images.max(axis=pixels)
    if not is_float and high.max() == 1:
        raise UserError(
            f"data = {data!r}: images are integers and none is above 1; {_REMEDY}"
        )
    is_unit = np.zeros(len(images), np.bool_)
    if is_float:
        is_unit = (images != np.rint(images)).any(axis=pixels)
    is_bad = (low < 0) | (high > 255) | is_unit & (high > 1)
    if is_bad.any():
        worst = is_bad.argmax()
        raise UserError(
            f"data = {data!r}: image {worst} has values in [{low[worst]}, "
            f"{high[worst]}]; give each in [0, 1], or whole numbers in [0, 255]"
        )
    if not is_float:
        return images.astype(np.uint8)
    _check_range(data, is_unit, high)
    scale = np.float32(255 if is_unit.any() else 1)
    return np.rint(images.astype(np.float32) * scale).astype(np.uint8)


def _check_range(data: str, is_unit: NDArray[np.bool_], high: NDArray[Any]) -> None:
    """Refuses float images whose range is not plain, or not that of all others.

    Args:
        data: the setting.
        is_unit: which images have a fraction.
        high: largest value of each image.

    Raises:
        UserError: with the number of an image.
    """
    is_either = ~is_unit & (high == 1)
    if is_either.any():
        raise UserError(
            f"data = {data!r}: images are floats, and image {is_either.argmax()} has "
            "no other values than 0 and 1, which may be meant in [0, 1] or in "
            f"[0, 255]; {_REMEDY}"
        )
    is_above = high > 1
    if is_unit.any() and is_above.any():
        raise UserError(
            f"data = {data!r}: image {is_unit.argmax()} has fractions in [0, 1], image "
            f"{is_above.argmax()} whole numbers up to 255; {_REMEDY}"
        )
