"""Federated EMNIST in its three published forms, read into one.

`femnist` is flwrlabs/femnist of the Hugging Face hub, `femnist:FOLDER` its parquet
files or LEAF's JSON, `femnist:FILE.h5` TensorFlow Federated's HDF5. All three store
white paper as the largest value; `records.fit` inverts, so that 0 is background.
Labels are 0-9 for digits, 10-35 for upper case and 36-61 for lower case.

Source:
    Caldas et al., "LEAF: a benchmark for federated settings", arXiv:1812.01097.
    Augenstein et al., "Generative models for effective ML on private, decentralized
    datasets", ICLR 2020 (36 classes: the two cases of a letter are one).
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config.hub import HubSource
from fedgs.config.run_config import RunConfig
from fedgs.data.picture_rules import PictureRules
from fedgs.data.readers import hugging_face
from fedgs.data.readers.hugging_face import Reading
from fedgs.data.records import LEFT_OUT, LIGHT, Records, gathered
from fedgs.errors import UserError, first_n, imported, raise_if_any, wrap_error
from fedgs.files import read_text

FEMNIST_SIDE = 28
NUM_CLASSES = 62
LETTERS = 10  # the first label of upper case
LOWER_CASE = 36  # and that of lower case
HUB_NAME = "flwrlabs/femnist"
LEAF_LAYOUT = "it is users, num_samples and user_data of lists x and y"
TFF_LAYOUT = "TFF's layout is examples/USER/pixels and examples/USER/label"
Part = tuple[NDArray[np.uint8], NDArray[np.int64]]  # (n, 1, 28, 28) and labels (n,)


def class_map(classes: str) -> NDArray[np.int64]:
    """Returns the new label of each of the 62, shape (62,), `LEFT_OUT` of some.

    Args:
        classes: the setting of that name.

    >>> class_map("merged")[[9, 10, 36, 61]], class_map("merged-letters")[[9, 10, 36]]
    (array([ 9, 10, 10, 35]), array([-1,  0,  0]))
    """
    labels = np.arange(NUM_CLASSES)
    is_digit = labels < LETTERS
    # A small letter gets the label of the capital one.
    capital = labels - LOWER_CASE + LETTERS
    merged = np.where(labels < LOWER_CASE, labels, capital)
    maps = {
        "all": labels,
        "merged": merged,
        "digits": np.where(is_digit, labels, LEFT_OUT),
        "letters": np.where(is_digit, LEFT_OUT, labels - LETTERS),
        "merged-letters": np.where(is_digit, LEFT_OUT, merged - LETTERS),
    }
    return maps[classes]


def read(config: RunConfig) -> Records:
    """Reads `femnist`, `femnist:FOLDER` or `femnist:FILE.h5`.

    Privacy: reads private data; output private.

    Raises:
        UserError: missing or damaged data, or data of another layout, naming the file
            and where known the user and the image.
    """
    if config.data == "femnist":
        # A copy of the hub's repository: in data_dir, or where the command runs.
        copy = Path(config.data_dir or HUB_NAME).expanduser()
        has_copy = any(copy.glob("data/*.parquet"))
        if not has_copy:
            return _from_hub(config, HUB_NAME)
        # The folder is the data then, and no cache of the hub.
        without_cache = replace(config, data_dir=None)
        return _from_hub(without_cache, str(copy))
    path = Path(config.data.removeprefix("femnist:")).expanduser()
    if path.is_file():
        return _hdf5(config, path)
    if not path.is_dir():
        problem = "does not exist"
        if path.exists():  # a pipe or a device
            problem = "is no regular file"
        raise UserError(
            f"data = {config.data!r}: {path} {problem}; give a folder with LEAF's "
            "all_data_*.json, a folder with the hub's parquet files, or TFF's .h5 file"
        )
    # The format is told by the files' names: LEAF's and the hub's copy are folders.
    files = sorted(path.glob("all_data_*.json"))
    if files:
        return _leaf(config, files)
    if any(path.rglob("*.parquet")):
        return _from_hub(config, str(path))
    raise UserError(
        f"data = {config.data!r}: {path} holds neither all_data_*.json nor *.parquet; "
        "give LEAF's folder `all_data`, or a copy of the hub's repository"
    )


def read_test(config: RunConfig) -> Records | None:
    """Reads TFF's test file where `..._test.h5` lies beside `..._train.h5`.

    Its users are those of the training file.

    Privacy: reads private data; output private.

    Raises:
        UserError: as `read`.
    """
    file = test_file(config)
    if file is None:
        return None
    return _hdf5(config, file)


def test_file(config: RunConfig) -> Path | None:
    """Returns TFF's test file beside the training file that the settings name."""
    path = Path(config.data.removeprefix("femnist:")).expanduser()
    beside = path.with_name(path.name.replace("_train.", "_test."))
    if path.suffix == ".h5" and beside != path and beside.is_file():
        return beside
    return None


# ------------------------------------------------------------------ TFF's HDF5


def _hdf5(config: RunConfig, path: Path) -> Records:
    h5py = imported("h5py", f"data = {config.data!r}", "h5py")
    remedy = "give TFF's file, whole and unpacked"
    with (
        wrap_error(Exception, f"{path}: it cannot be read as HDF5", remedy),
        h5py.File(path, "r") as file,
    ):
        examples = file.get("examples")
        if not hasattr(examples, "keys") or not len(examples):
            raise UserError(
                f"{path}: it contains {first_n(file) or 'nothing'}; {TFF_LAYOUT}"
            )
        users = sorted(examples)
        capacity = 0
        for user in users:
            labels = _dataset(examples, user, "label", f"{path}: user {user}")
            capacity += labels.size or 0  # None of an empty one, which is refused
        # One user after another, so that memory holds the file's floats of one only.
        parts = (_hdf5_user(config, path, examples, user) for user in users)
        return gathered(
            data=config.data,
            parts=parts,
            capacity=capacity,
            num_classes=_count_classes(config),
            background=LIGHT,
        )


def _hdf5_user(
    config: RunConfig,
    path: Path,
    examples: Any,
    user: str,
) -> tuple[str, NDArray[np.uint8], NDArray[np.int64]]:
    """Returns a user's name, images and labels."""
    where = f"{path}: user {user}"
    arrays: list[NDArray[Any]] = []
    for name in ("pixels", "label"):
        dataset = _dataset(examples, user, name, where)
        with wrap_error(OSError, f"{where}: it is damaged", "get it again"):
            arrays.append(np.asarray(dataset[()]))
    pixels, labels = arrays
    if labels.shape[1:] == (1,):  # TFF has a column of them
        labels = labels.reshape(-1)
    images, labels = _checked(config, pixels, labels, where)
    return user, images, labels


def _dataset(examples: Any, user: str, name: str, where: str) -> Any:
    """Returns the dataset `name` of a user, which is not read yet."""
    with (
        wrap_error(Exception, f"{where} has no {name}", TFF_LAYOUT),
        wrap_error(OSError, f"{where}: it is damaged", "get it again"),
    ):
        dataset = examples[user][name]
        dataset.shape  # noqa: B018 - raises where it is a group
        return dataset


# ------------------------------------------------------------------ LEAF's JSON


def _leaf(config: RunConfig, files: Iterable[Path]) -> Records:
    parts: dict[str, Part] = {}
    origin: dict[str, Path] = {}
    not_leaf = "is not of LEAF's layout"
    for file in files:
        with wrap_error(
            Exception, f"{file}: it cannot be read as JSON", "get it again"
        ):
            content = json.loads(read_text(file), object_hook=_compact)
        with wrap_error(Exception, f"{file}: {not_leaf}", LEAF_LAYOUT):
            counts = zip(content["users"], content["num_samples"], strict=True)
            users: list[tuple[str, Any, Any]] = []
            for user, count in counts:
                values = content["user_data"][user]
                users.append((str(user), values, count))
        for user, values, count in users:
            where = f"{file}: user {user}"
            # Two halves of a user would be two clients, each with a guarantee alone.
            if user in origin:
                raise UserError(
                    f"{where} is in {origin[user]} too; give a folder in which every "
                    "user is in one file, once"
                )
            origin[user] = file
            with wrap_error(Exception, f"{where} {not_leaf}", LEAF_LAYOUT):
                flat = np.asarray(values["x"], np.float32)
                pixels = flat.reshape(-1, FEMNIST_SIDE, FEMNIST_SIDE)
                labels = np.asarray(values["y"])
            if count != len(labels):
                problem = f"it has {len(labels)} labels and num_samples {count}"
                raise UserError(f"{where}: {problem}; the two must agree")
            parts[user] = _checked(config, pixels, labels, where)
    return _gathered(config, parts)


def _compact(values: dict[str, Any]) -> dict[str, Any]:
    """Packs a user's images as soon as they are parsed: lists take eight times more."""
    with contextlib.suppress(Exception):  # `_leaf` says whose they are
        values["x"] = np.asarray(values["x"], np.float32)
    return values


# ------------------------------------------------------------------ all of them


def _problems(pixels: NDArray[Any], labels: NDArray[Any]) -> Iterator[str]:
    """Yields what is wrong with one user's images and labels."""
    side = FEMNIST_SIDE
    own_shape = pixels.shape[1:]
    if own_shape != (side, side):
        yield f"pixels has shape {pixels.shape}; give (n, {side}, {side})"
    if not len(pixels):
        yield "it has no images; leave this user out of the file"
    has_one_each = labels.shape == (len(pixels),)
    are_integers = labels.dtype.kind in "iu"
    if not has_one_each or not are_integers:
        yield (
            f"label has shape {labels.shape} and type {labels.dtype}; give one integer "
            f"for each of the {len(pixels)} images"
        )
    if pixels.dtype.kind != "f":
        yield f"pixels has type {pixels.dtype}; give floats in [0, 1]"
    is_in_range = (pixels >= 0) & (pixels <= 1)  # NaN is not
    is_bad = ~is_in_range.all(axis=(1, 2))
    if is_bad.any():
        yield f"image {is_bad.argmax()} has values outside [0, 1]; remove or repair it"
    is_unknown = (labels < 0) | (labels >= NUM_CLASSES)
    if is_unknown.any():
        known = f"Federated EMNIST has the integers 0 to {NUM_CLASSES - 1}"
        index = is_unknown.argmax()
        yield f"image {index} has the label {labels[index]}; {known}"


def _checked(
    config: RunConfig,
    pixels: NDArray[Any],
    labels: NDArray[Any],
    where: str,
) -> Part:
    """Returns one user's images and labels, `LEFT_OUT` of other classes."""
    raise_if_any(where, _problems(pixels, labels))
    # Rounded, not cut: 254.99999 of float32 means 255.
    images = np.rint(pixels * 255).astype(np.uint8)
    of_format = labels.astype(np.int64)  # the 62 of Federated EMNIST
    new_labels = class_map(config.classes)
    return images[:, None], new_labels[of_format]


def _gathered(config: RunConfig, parts: dict[str, Part]) -> Records:
    """Joins all users' images, in the order of their names."""
    capacity = sum(len(labels) for _, labels in parts.values())
    # Frees the memory as it goes.
    users = ((user, *parts.pop(user)) for user in sorted(parts))
    return gathered(
        data=config.data,
        parts=users,
        capacity=capacity,
        num_classes=_count_classes(config),
        background=LIGHT,
    )


def _count_classes(config: RunConfig) -> int:
    """Returns the number of classes that the setting `classes` leaves."""
    return int(class_map(config.classes).max()) + 1


def _from_hub(config: RunConfig, name: str) -> Records:
    """Reads the hub's data set, or a copy of its files, by flwr-datasets."""
    source = HubSource(
        name,
        image="image",
        label="character",
        client="writer_id",
    )
    dataset = hugging_face.load_split(config, source, source.split)
    missing = {"image", "character", "writer_id"} - set(dataset.features)
    if missing:
        raise UserError(
            f"data = {config.data!r}: it has no column {', '.join(sorted(missing))}; "
            f"give the files of {HUB_NAME}, or read others by --data hf:FOLDER"
        )
    rules = PictureRules(side=FEMNIST_SIDE, channels=1)
    reading = Reading(rules, class_map(config.classes))
    return hugging_face.read_dataset(
        config,
        dataset,
        source,
        reading=reading,
        background=LIGHT,
    )
