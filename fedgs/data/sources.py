"""Where the images come from: bundled digits, MNIST and its relatives, npz files.

All sources yield uint8 images with 0 = background. MNIST's families are read from the
raw idx files of torchvision's folder layout; torchvision itself only downloads them
and resizes images, and is imported when one of the two is needed.

Source:
    LeCun, Cortes, Burges, "The MNIST database of handwritten digits" (idx format).
    Yadav, Bottou, "Cold case: the lost MNIST digits", NeurIPS 2019 (QMNIST: writers).
    Xiao, Rasul, Vollgraf, "Fashion-MNIST", arXiv:1708.07747, 2017.
"""

import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config import RunConfig, UserError

NAMES = ("digits", "mnist", "fashion-mnist", "mnist-by-writer", "npz:PATH")
FOLDERS = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "mnist-by-writer": "MNIST",
}
QMNIST_LABELS = "QMNIST/raw/qmnist-train-labels-idx2-int"
QMNIST_LABEL, QMNIST_WRITER = 0, 2  # columns of the 8 in a row
IDX_TYPES = {"ubyte": (0x08, "u1"), "int": (0x0C, ">i4")}
NPZ_ERRORS = (  # what numpy and zipfile raise on damaged or hostile files
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)
NPZ_KEYS = ("images", "labels", "clients")
RESIZE_CHUNK = 4096  # images in float32 at a time: bounds the memory


@dataclass(frozen=True, eq=False)
class Records:
    """The records of one source, before they are split into clients.

    Attributes:
        images: shape (N, channel, height, width), uint8, 0 = background.
        labels: shape (N,), int64, in [0, num_classes).
        num_classes: number of labels, at least 1.
        clients: owner of each record, shape (N,), integers or strings; None without.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    num_classes: int
    clients: NDArray[np.generic] | None = None


def load_records(config: RunConfig) -> Records:
    """Loads `config.data`, fitted to the image size and channels of the run.

    Privacy: reads private data; output private.

    Raises:
        UserError: an unknown source, missing or malformed data, labels beyond
            `num_classes`, or RGB images for a grey run.
    """
    if config.data == "digits":
        records = _digits()
    elif config.data in FOLDERS:
        records = _mnist(config, "train")
    elif config.data.startswith("npz:"):
        records = _npz(config)
    else:
        raise UserError(f"data = {config.data!r}: give --data one of {_list(NAMES)}")
    return _fit(config, records)


def load_test_records(config: RunConfig) -> Records:
    """Loads the test split of `config.data`, fitted like the data.

    Privacy: public. Benchmark test splits, of no client of the run.

    Raises:
        UserError: the source has no test split, or as `load_records`.
    """
    if config.data not in FOLDERS:
        raise UserError(
            f"data = {config.data!r}: has no test split; only {_list(FOLDERS)} have one"
        )
    return _fit(config, _mnist(config, "t10k"))


def read_idx(path: Path, kind: str, num_dims: int) -> NDArray[Any]:
    """Reads one raw file of the MNIST family.

    Privacy: reads private data; output private.

    Args:
        path: an uncompressed idx file.
        kind: "ubyte" (uint8) or "int" (big-endian int32), the end of its name.
        num_dims: number of dimensions that the file must have.

    Returns:
        A read-only array of that kind.

    Raises:
        UserError: another kind or number of dimensions, or a truncated file.
    """
    code, dtype = IDX_TYPES[kind]
    content = path.read_bytes()
    start = 4 + 4 * num_dims
    if content[:4] != bytes((0, 0, code, num_dims)) or len(content) < start:
        raise UserError(
            f"{path}: not an idx file of {num_dims} dimensions of type {kind}; "
            "remove it and add --download, or give another --data-dir"
        )
    shape = [int(side) for side in np.frombuffer(content, ">u4", num_dims, offset=4)]
    expected = start + int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    if len(content) != expected:
        raise UserError(
            f"{path}: has {len(content)} bytes, its header says {expected}; "
            "remove it and add --download, or give another --data-dir"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


def _digits() -> Records:
    """Returns scikit-learn's 1797 digits of 8x8 pixels, 0..16 scaled to 0..255.

    They fill their frame; a border of 2 pixels gives them about MNIST's margin.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "data = digits: needs scikit-learn; run `pip install scikit-learn`"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(np.asarray(pixels) * (255 / 16)).astype(np.uint8)
    framed = np.pad(images.reshape(-1, 1, 8, 8), ((0, 0), (0, 0), (2, 2), (2, 2)))
    return Records(framed, np.asarray(labels, np.int64), 10)


def _mnist(config: RunConfig, split: str) -> Records:
    """Reads the split `train` or `t10k`, with its writers for mnist-by-writer."""
    raw = f"{FOLDERS[config.data]}/raw/{split}"
    names = [f"{raw}-images-idx3-ubyte", f"{raw}-labels-idx1-ubyte"]
    by_writer = config.data == "mnist-by-writer" and split == "train"
    paths = _find(config, names + [QMNIST_LABELS] * by_writer)
    images = read_idx(paths[0], "ubyte", 3)
    labels = read_idx(paths[1], "ubyte", 1)
    if len(images) != len(labels):
        raise UserError(
            f"data_dir = {config.data_dir!r}: {names[0]} has {len(images)} images, "
            f"{names[1]} has {len(labels)} labels; give files that belong together"
        )
    clients = _writers(paths[2], labels) if by_writer else None
    return Records(images[:, None], labels.astype(np.int64), 10, clients)


def _writers(path: Path, labels: NDArray[np.integer]) -> NDArray[np.integer]:
    """Returns the writer of each MNIST training image, shape (N,)."""
    rows = read_idx(path, "int", 2)
    same = rows.shape == (len(labels), 8)
    if not same or (rows[:, QMNIST_LABEL] != labels).any():
        raise UserError(
            f"{path}: does not describe the {len(labels)} images of MNIST's training "
            "split in their order (its labels differ); give files that belong together"
        )
    return rows[:, QMNIST_WRITER].astype(np.int64)


def _find(config: RunConfig, names: list[str]) -> list[Path]:
    """Returns the paths of files below data_dir, downloaded first if asked for."""
    if config.data_dir is None:
        raise UserError(
            f"data_dir is unset: data = {config.data} needs --data-dir, a folder with "
            f"{_list(names)}\nor one to fill with --download"
        )
    root = Path(config.data_dir).expanduser()
    missing = [name for name in names if not (root / name).is_file()]
    if missing and config.download:
        _download(config, root, missing)
    elif missing:
        raise UserError(
            f"data_dir = {config.data_dir!r}: {_list(missing)} not found there\n"
            "give --data-dir the folder that holds these files, or add --download"
        )
    return [root / name for name in names]


def _download(config: RunConfig, root: Path, missing: list[str]) -> None:
    import torchvision

    for folder in sorted({name.split("/")[0] for name in missing}):
        try:
            getattr(torchvision.datasets, folder)(root, download=True)
        except (OSError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1:]
            raise UserError(
                f"download = True: {folder} for data_dir = {config.data_dir!r} failed: "
                f"{_list(reason)}\nput {_list(missing)} there by hand"
            ) from error


def _npz(config: RunConfig) -> Records:
    """Reads images, and if given labels and clients, from an npz file."""
    arrays = _read_npz(config.data)
    images = _to_uint8(config.data, _channels_first(config.data, arrays["images"]))
    for key in ("labels", "clients"):
        if key in arrays and arrays[key].shape != (len(images),):
            raise UserError(
                f"data = {config.data!r}: {key} has shape {arrays[key].shape}; "
                f"give one value for each of the {len(images)} images"
            )
    clients = arrays.get("clients")
    if clients is not None and clients.dtype.kind not in "iuU":
        raise UserError(
            f"data = {config.data!r}: clients has dtype {clients.dtype}; "
            "give integers or strings"
        )
    if "labels" not in arrays:
        if (config.num_classes or 1) > 1:
            raise UserError(
                f"num_classes = {config.num_classes}: data = {config.data!r} has no "
                "labels; leave --num-classes out or add the array 'labels'"
            )
        return Records(images, np.zeros(len(images), np.int64), 1, clients)
    labels = arrays["labels"]
    if labels.dtype.kind not in "iu":
        raise UserError(
            f"data = {config.data!r}: labels has dtype {labels.dtype}; give integers "
            "from 0"
        )
    num_classes = max(int(labels.max()), 0) + 1
    return Records(images, labels.astype(np.int64), num_classes, clients)


def _read_npz(data: str) -> dict[str, NDArray[np.generic]]:
    """Reads the known arrays of the setting `npz:PATH`, never unpickling anything."""
    path = Path(data.removeprefix("npz:")).expanduser()
    if not path.is_file() or not zipfile.is_zipfile(path):
        problem = "is not an npz file" if path.is_file() else "does not exist"
        raise UserError(f"data = {data!r}: {path} {problem}; write it with np.savez")
    try:
        with np.load(path, allow_pickle=False) as archive:
            keys = archive.files
            arrays = {key: archive[key] for key in keys if key in NPZ_KEYS}
    except NPZ_ERRORS as error:
        raise UserError(
            f"data = {data!r}: cannot be read ({error}); write plain numeric or string "
            "arrays with np.savez, no objects"
        ) from error
    if "images" not in arrays or len(arrays) < len(keys):
        raise UserError(
            f"data = {data!r}: holds {_list(keys) or 'no arrays'}; give 'images' and, "
            "if known, 'labels' and 'clients', no others"
        )
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise UserError(f"data = {data!r}: {key} is not an array; use np.savez")
    return arrays


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
    """Returns images in [0, 255]; floats in [0, 1] are rounded to steps of 1/255.

    Floats with a value above 1 must all be whole numbers in [0, 255].
    """
    if images.dtype.kind not in "iuf":
        raise UserError(
            f"data = {data!r}: images has dtype {images.dtype}; give uint8 in [0, 255] "
            "or floats in [0, 1]"
        )
    is_float = images.dtype.kind == "f"
    if is_float and not np.isfinite(images).all():
        raise UserError(
            f"data = {data!r}: images has NaN or infinite values; give numbers in "
            "[0, 1] or [0, 255]"
        )
    low, high = images.min(), images.max()
    if not is_float and high == 1:
        raise UserError(
            f"data = {data!r}: images are integers and none is above 1; give integers "
            "up to 255, or floats in [0, 1]"
        )
    if low >= 0 and is_float and high <= 1:
        return np.rint(images.astype(np.float32) * 255).astype(np.uint8)
    if low < 0 or high > 255 or (is_float and (images != np.rint(images)).any()):
        raise UserError(
            f"data = {data!r}: images has values in [{low}, {high}]; give all in "
            "[0, 1], or whole numbers in [0, 255]"
        )
    return images.astype(np.uint8)


def _fit(config: RunConfig, records: Records) -> Records:
    """Checks labels against `num_classes`; fits size and channels of the images."""
    num_classes = config.num_classes or records.num_classes
    labels = records.labels
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        value = wrong.max()
        remedy = "labels from 0" if value < 0 else f"--num-classes above {value}"
        raise UserError(
            f"num_classes = {num_classes}: data = {config.data!r} has the label "
            f"{value}; give {remedy}"
        )
    images = records.images
    channels = images.shape[1]
    if channels > config.image_channels:
        raise UserError(
            f"image_channels = {config.image_channels}: data = {config.data!r} has RGB "
            "images; give --image-channels 3"
        )
    if images.shape[2:] != (config.image_size, config.image_size):
        images = _resize(images, config.image_size)
    if channels < config.image_channels:
        images = np.repeat(images, config.image_channels, axis=1)
    return Records(images, labels, num_classes, records.clients)


def _resize(images: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Resizes with antialiased bilinear interpolation, in chunks."""
    import torch
    from torchvision.transforms import functional

    resized = np.empty((*images.shape[:2], side, side), np.uint8)
    for start in range(0, len(images), RESIZE_CHUNK):
        part = slice(start, start + RESIZE_CHUNK)
        chunk = torch.from_numpy(images[part].astype(np.float32))
        chunk = functional.resize(chunk, [side, side], antialias=True)
        resized[part] = chunk.round().clamp(0, 255).numpy()
    return resized


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
