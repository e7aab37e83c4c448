"""Images of the calling program: arrays, a torch Dataset, a Hugging Face data set."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch.utils.data import Dataset

from fedgs.config.run_config import RunConfig
from fedgs.data.picture_rules import PictureRules
from fedgs.data.readers.arrays import from_arrays
from fedgs.data.readers.pictures import PictureReader, opened_picture
from fedgs.data.records import Records, warn_of_mixed_colours
from fedgs.errors import UserError, first_n, wrap_error

_REMEDY = "give whole pictures or arrays, and one value for each of them"
Column = ArrayLike | str | None  # a value for each image, or a column's name


def read_given(
    config: RunConfig,
    images: Any,
    labels: Column = None,
    clients: Column = None,
) -> Records:
    """Makes records of what a program holds in memory; not fitted to the run yet.

    Privacy: reads private data; output private.

    Args:
        config: uses `num_classes`, the settings of pictures, and `data` in errors.
        images: an array or tensor (N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or
            float in [0, 1], or of any values with a window; a torch Dataset of (image,
            label) or (image, label, client); or a `datasets.Dataset` with one column of
            pictures.
        labels: (N,) integers; of a `datasets.Dataset` a column's name, by default the
            one of class labels. None where a Dataset has them, or nobody.
        clients: (N,) integers or strings, or a column's name.

    Raises:
        UserError: they contradict each other, or cannot be read.
    """
    columns: dict[str, Any] = {}
    if labels is not None:
        columns["labels"] = labels
    if clients is not None:
        columns["clients"] = clients
    num_classes = 0
    where = f"data = {config.data!r}"
    rules = PictureRules.of(config)
    reader = PictureReader(rules)
    # Outside the guard below: what a Dataset's own code raises stays as it is.
    if isinstance(images, Dataset):
        columns = _of_torch(config, reader, images) | columns
    elif isinstance(images, Sequence) and _has_pictures(images):
        columns["images"] = _pictures(config, reader, images)
    with wrap_error(Exception, f"{where}: it cannot be read", _REMEDY):
        if hasattr(images, "column_names"):  # without importing `datasets`
            columns, num_classes = _of_hugging_face(config, reader, images, columns)
        columns.setdefault("images", images)
        arrays = {
            name: _array(f"{where}: {name}", values) for name, values in columns.items()
        }
    has_pictures = bool(reader.found.sizes)
    if has_pictures:  # the rules were applied when they were read
        rules = PictureRules()
    records = from_arrays(
        where,
        arrays,
        rules=rules,
        num_classes=config.num_classes,
    )
    if has_pictures:
        records = dataclasses.replace(records, found=reader.found)
    # Declared classes that nobody has an image of are classes.
    num_classes = max(num_classes, records.num_classes)
    return dataclasses.replace(records, num_classes=num_classes)


def _has_pictures(images: Sequence[Any]) -> bool:
    """Tells whether a list contains pictures of Pillow, which are no arrays yet."""
    return any(isinstance(image, Image.Image) for image in images)


def _array(where: str, values: Any) -> NDArray[Any]:
    """Returns a column as an array, whose values are all there.

    Args:
        where: names the column in errors.
        values: the column.

    Raises:
        UserError: names the first value that is missing.
    """
    array = np.asarray(values)
    is_listed = isinstance(values, list | tuple)
    if is_listed and array.dtype.kind == "U":  # NumPy makes texts of NaN, too
        _check_present(where, values)
    if array.dtype.kind == "O":  # what pandas calls a column of strings
        _check_present(where, array)
        return np.array(array.tolist())
    return array


def _check_present(where: str, values: Iterable[Any]) -> None:
    """Refuses a column with gaps: the text of NaN would be one owner of them all."""
    for index, value in enumerate(values):
        is_missing = value is None or (isinstance(value, float) and math.isnan(value))
        if is_missing:
            raise UserError(
                f"{where}: image {index} has no value; give each image its own, or "
                "leave it out"
            )


def _of_torch(config: RunConfig, reader: PictureReader, dataset: Any) -> dict[str, Any]:
    """Reads all items, as a map or an iterable."""
    items = dataset
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        # Nothing else ends: `torch.utils.data.Dataset` raises no IndexError.
        items = (dataset[i] for i in range(len(dataset)))
    rows: list[Sequence[Any]] = []
    for item in items:
        if isinstance(item, Sequence):
            rows.append(item)
        else:
            rows.append((item,))  # an image alone
    widths = [len(row) for row in rows]
    width = max(widths, default=0)
    if not 1 <= width <= 3 or min(widths) < width:
        raise UserError(
            f"data = {config.data!r}: a torch Dataset with items of {width} values; "
            "give (image, label) or (image, label, client), the same of all"
        )
    images = _pictures(config, reader, (row[0] for row in rows))
    columns: dict[str, Any] = {"images": images}
    for place, name in enumerate(("labels", "clients"), start=1):
        if place < width:
            columns[name] = [row[place] for row in rows]
    return columns


def _of_hugging_face(
    config: RunConfig,
    reader: PictureReader,
    dataset: Any,
    columns: dict[str, Any],
) -> tuple[dict[str, Any], int]:
    """Returns the columns, and how many classes the data set declares."""
    pictures: list[str] = []
    classes: list[str] = []
    for name, feature in dataset.features.items():
        # By the class' name, because `datasets` need not be installed.
        kind = type(feature).__name__
        if kind == "Image":
            pictures.append(name)
        elif kind == "ClassLabel":
            classes.append(name)
    if len(classes) == 1:  # the labels, unless the caller names others
        columns = {"labels": classes[0], **columns}
    named = {name: value for name, value in columns.items() if isinstance(value, str)}
    has_columns = set(named.values()) <= dataset.features.keys()
    if len(pictures) != 1 or not has_columns:
        shown = first_n(map(repr, named.values())) or None
        names = first_n(dataset.features, 9)
        # One picture a row, and columns that are there.
        raise UserError(
            f"data = {config.data!r}: it has the columns {names}, of which "
            f"{len(pictures)} hold pictures; keep one of these, and give labels "
            f"and clients names of columns, not {shown}"
        )
    for name, column in named.items():
        columns[name] = dataset[column][:]
    # One at a time: a data set on a disk may be larger than the memory.
    rows = dataset.select_columns(pictures)
    items = (row[pictures[0]] for row in rows)
    columns["images"] = _pictures(config, reader, items)
    num_classes = 0
    label = named.get("labels")
    if label in classes:
        num_classes = dataset.features[label].num_classes
    return columns, num_classes


def _pictures(
    config: RunConfig,
    reader: PictureReader,
    items: Iterable[Any],
) -> NDArray[Any]:
    """Stacks images, all of Pillow or all arrays.

    Those of Pillow are read and fitted, (N, C, S, S), and noted in `reader.found`.
    """
    where = f"data = {config.data!r}"
    images: list[NDArray[Any]] = []
    num_pictures = 0
    for index, item in enumerate(items):
        if isinstance(item, Image.Image):
            num_pictures += 1
            of_item = f"{where}: image {index}"
            picture = opened_picture(item, of_item)
            images.append(reader.image_of(picture, of_item))
        else:
            images.append(np.asarray(item))
    # An array's range of values is another one than a picture's: 0 to 1, or 0 to 255.
    if num_pictures not in (0, len(images)):
        raise UserError(
            f"{where}: {num_pictures} of {len(images)} images are pictures and the "
            "others arrays; give all in one form"
        )
    return _stacked(config, images)


def _stacked(config: RunConfig, images: list[NDArray[Any]]) -> NDArray[Any]:
    """Returns images of one shape, or grey and RGB ones of one size, as one array."""
    where = f"data = {config.data!r}"
    shapes = {image.shape for image in images}
    some_shape = next(iter(shapes), ())
    size = some_shape[1:]
    grey = (1, *size)
    colour = (3, *size)
    are_grey_and_rgb = shapes == {grey, colour}
    if len(shapes) != 1 and not are_grey_and_rgb:
        raise UserError(
            f"{where}: images have shapes {first_n(sorted(shapes))}; give at least "
            "one, and all of one shape, or pictures and --image-size"
        )
    # Grey is RGB with three equal channels.
    if are_grey_and_rgb:
        if config.image_channels is None:
            num_grey = sum(image.shape == grey for image in images)
            warn_of_mixed_colours(where, num_grey, len(images) - num_grey)
        images = [np.broadcast_to(image, colour) for image in images]
    return np.stack(images)
