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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data.readers import hugging_face
from fedgs.data.readers.hugging_face import Options, Reading
from fedgs.data.records import LIGHT, Gathering, Records
from fedgs.errors import UserError, some

SIDE = 28
NUM_CLASSES = 62
LETTERS, LOWER_CASE = 10, 36  # the first label of each
HUB_NAME = "flwrlabs/femnist"
TFF_LAYOUT = "TFF's layout is examples/USER/pixels and examples/USER/label"
# What h5py raises on damaged files, or on groups in the place of arrays.
HDF5_ERRORS = (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError)


def class_map(classes: str) -> NDArray[np.int64]:
    """Returns the new label of each of the 62, shape (62,), -1 for those left out.

    Args:
        classes: the setting of that name.

    >>> class_map("merged")[[9, 10, 36, 61]], class_map("merged-letters")[[9, 10, 36]]
    (array([ 9, 10, 10, 35]), array([-1,  0,  0]))
    """
    labels = np.arange(NUM_CLASSES)
    merged = np.where(labels < LOWER_CASE, labels, labels - LOWER_CASE + LETTERS)
    maps = {
        "all": labels,
        "merged": merged,
        "digits": np.where(labels < LETTERS, labels, -1),
        "letters": np.where(labels < LETTERS, -1, labels - LETTERS),
        "merged-letters": np.where(labels < LETTERS, -1, merged - LETTERS),
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
        copy = Path(config.data_dir or HUB_NAME).expanduser()
        if any(copy.glob("data/*.parquet")):
            return _from_hub(replace(config, data_dir=None), str(copy))
        return _from_hub(config, HUB_NAME)
    path = Path(config.data.removeprefix("femnist:")).expanduser()
    if path.is_file():
        return _hdf5(config, path)
    if not path.is_dir():
        raise UserError(
            f"data = {config.data!r}: {path} does not exist; give a folder with LEAF's "
            "all_data_*.json, a folder with the hub's parquet files, or TFF's .h5 file"
        )
    if files := sorted(path.glob("all_data_*.json")):
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
    path = Path(config.data.removeprefix("femnist:")).expanduser()
    beside = path.with_name(path.name.replace("_train.", "_test."))
    if path.suffix == ".h5" and beside != path and beside.is_file():
        return _hdf5(config, beside)
    return None


# ------------------------------------------------------------------ TFF's HDF5


def _hdf5(config: RunConfig, path: Path) -> Records:
    try:
        import h5py
    except ImportError as error:
        raise UserError(
            f"data = {config.data!r}: needs h5py; run `pip install h5py`"
        ) from error
    try:
        with h5py.File(path, "r") as file:
            return _users_of(config, path, file)
    except UserError:
        raise
    except HDF5_ERRORS as error:
        raise UserError(
            f"{path}: cannot be read as HDF5 ({error}); give TFF's file, whole and "
            "unpacked"
        ) from error


def _users_of(config: RunConfig, path: Path, file: Any) -> Records:
    examples = file.get("examples")
    if not hasattr(examples, "keys") or not len(examples):
        raise UserError(f"{path}: holds {some(file) or 'nothing'}; {TFF_LAYOUT}")
    users = sorted(examples)
    counts = [_count(path, user, examples[user]) for user in users]
    gathering = Gathering(sum(counts), (1, SIDE, SIDE))
    for user in users:
        where = f"{path}: user {user}"
        try:
            pixels, labels = examples[user]["pixels"][()], examples[user]["label"][()]
        except HDF5_ERRORS as error:
            raise UserError(f"{where}: is damaged ({error}); get it again") from error
        labels = labels.reshape(-1) if labels.shape[1:] == (1,) else labels
        gathering.add(user, *_checked(config, pixels, labels, where))
    return gathering.records(config.data, num_classes(config), LIGHT)


def _count(path: Path, user: str, group: Any) -> int:
    """Returns a user's number of images, read from the shape alone."""
    where = f"{path}: user {user}"
    shapes = {name: _shape(group, name) for name in ("pixels", "label")}
    missing = [name for name, shape in shapes.items() if shape is None]
    shape = shapes["pixels"]
    if missing or shape is None:
        raise UserError(f"{where} has no {' and no '.join(missing)}; {TFF_LAYOUT}")
    if shape[1:] != (SIDE, SIDE):
        raise UserError(f"{where}: pixels has shape {shape}; give (n, {SIDE}, {SIDE})")
    if not shape[0]:
        raise UserError(f"{where}: has no images; leave this user out of the file")
    return shape[0]


def _shape(group: Any, name: str) -> tuple[int, ...] | None:
    """Returns the shape of an array in a group, None where there is no such array."""
    try:
        return getattr(group[name], "shape", None)
    except HDF5_ERRORS:
        return None


# ------------------------------------------------------------------ LEAF's JSON


class _Floats(dict[str, float]):
    """The few hundred distinct numbers of LEAF's files, each one object."""

    def __missing__(self, text: str) -> float:
        self[text] = value = float(text)
        return value


def _leaf(config: RunConfig, files: list[Path]) -> Records:
    parts: dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]] = {}
    origin: dict[str, Path] = {}
    for file in files:
        for user, pixels, labels in _leaf_users(file):
            if user in origin:
                raise UserError(
                    f"{file}: user {user} is in {origin[user]} too; give a folder in "
                    "which every user is in one file"
                )
            origin[user] = file
            parts[user] = _checked(config, pixels, labels, f"{file}: user {user}")
    capacity = sum(len(labels) for _, labels in parts.values())
    gathering = Gathering(capacity, (1, SIDE, SIDE))
    for user in sorted(parts):
        gathering.add(user, *parts.pop(user))
    return gathering.records(config.data, num_classes(config), LIGHT)


def _compact(found: dict[str, Any]) -> dict[str, Any]:
    """Packs a user's images as soon as they are parsed: lists take eight times more."""
    if isinstance(found.get("x"), list):
        with contextlib.suppress(ValueError):  # of several lengths: refused by index
            pixels = np.array(found["x"])
            found["x"] = pixels.astype(np.float32) if pixels.dtype == float else pixels
    return found


def _leaf_users(file: Path) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Yields name, pixels (n, 28, 28) and labels of each user of a file."""
    try:
        with open(file, encoding="utf-8") as text:
            content = json.load(
                text, parse_float=_Floats().__getitem__, object_hook=_compact
            )
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file}: cannot be read as JSON ({error}); get it again"
        ) from error
    try:
        users, counts = list(content["users"]), list(content["num_samples"])
        data = content["user_data"]
        lists = [(data[user]["x"], data[user]["y"]) for user in users]
        is_known = all(isinstance(user, str) for user in users)
    except KeyError as error:
        raise _not_leaf(file, f"{error} is missing") from error
    except (TypeError, IndexError) as error:
        raise _not_leaf(file, "a part is of another kind") from error
    if not is_known:
        raise _not_leaf(file, "a user is no string")
    if len(set(users)) < len(users) or len(counts) != len(users):
        raise UserError(
            f"{file}: names {len(set(users))} different users in {len(users)}, with "
            f"{len(counts)} num_samples; give one of each per user"
        )
    for user, count, (x, y) in zip(users, counts, lists, strict=True):
        where = f"{file}: user {user}"
        if not (isinstance(x, list | np.ndarray) and isinstance(y, list)):
            raise _not_leaf(file, f"of user {user}, x or y is no list")
        if not len(x):
            raise UserError(f"{where}: has no images; leave this user out of the file")
        if not len(x) == len(y) == count:
            raise UserError(
                f"{where}: has {len(x)} images, {len(y)} labels and num_samples "
                f"{count}; the three must agree"
            )
        for index, image in enumerate(x):
            if not _is_flat(image):
                raise UserError(
                    f"{where}: image {index} is no list of {SIDE**2} numbers; remove "
                    "or repair it"
                )
        for index, label in enumerate(y):
            if type(label) is not int or abs(label) >= 2**31:
                raise _unknown_label(where, index, label)
        yield user, np.asarray(x).reshape(-1, SIDE, SIDE), np.array(y, np.int64)


def _is_flat(image: Any) -> bool:
    """Tells whether these are 784 values, none of them missing."""
    try:
        values = np.asarray(image)
    except ValueError:  # lists of several lengths
        return False
    if values.shape != (SIDE**2,):
        return False
    return values.dtype != object or all(value is not None for value in values)


def _not_leaf(file: Path, problem: str) -> UserError:
    return UserError(
        f"{file}: is not of LEAF's layout ({problem}); it is users, num_samples and "
        "user_data of lists x and y"
    )


# ------------------------------------------------------------------ all of them


def num_classes(config: RunConfig) -> int:
    """Returns the number of classes that `config.classes` leaves."""
    return int(class_map(config.classes).max()) + 1


def _unknown_label(where: str, index: int, label: object) -> UserError:
    return UserError(
        f"{where}: image {index} has the label {label!s:.40}; Federated EMNIST has "
        f"the integers 0 to {NUM_CLASSES - 1}"
    )


def _checked(
    config: RunConfig, pixels: NDArray[Any], labels: NDArray[Any], where: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Returns one user's images (n, 1, 28, 28) and labels of the chosen classes."""
    if labels.shape != (len(pixels),) or (
        len(labels) and labels.dtype.kind not in "iu"
    ):
        raise UserError(
            f"{where}: label has shape {labels.shape} and type {labels.dtype}; give "
            f"one integer for each of the {len(pixels)} images"
        )
    if len(pixels) and pixels.dtype.kind != "f":
        raise UserError(
            f"{where}: pixels has type {pixels.dtype}; give floats in [0, 1]"
        )
    is_bad = ~((pixels >= 0) & (pixels <= 1)).all(axis=(1, 2))  # NaN is bad too
    if is_bad.any():
        raise UserError(
            f"{where}: image {is_bad.argmax()} has values outside [0, 1]; "
            "remove or repair it"
        )
    labels = labels.astype(np.int64)
    is_unknown = (labels < 0) | (labels >= NUM_CLASSES)
    if is_unknown.any():
        index = is_unknown.argmax()
        raise _unknown_label(where, int(index), labels[index])
    labels = class_map(config.classes)[labels]
    is_kept = labels >= 0
    images = np.rint(pixels[is_kept] * 255).astype(np.uint8)
    return images[:, None], labels[is_kept]


def _from_hub(config: RunConfig, name: str) -> Records:
    """Reads the hub's data set, or a copy of its files, by flwr-datasets."""
    options = Options(image="image", label="character", client="writer_id")
    dataset = hugging_face.load_split(config, name, options, options.split)
    missing = {"image", "character", "writer_id"} - set(dataset.features)
    if missing:
        raise UserError(
            f"data = {config.data!r}: has no column {', '.join(sorted(missing))}; give "
            f"the files of {HUB_NAME}, or read others by --data hf:FOLDER"
        )
    reading = Reading(SIDE, 1, resizes=False, class_map=class_map(config.classes))
    return hugging_face.read_dataset(config, dataset, options, reading, LIGHT)
