"""Where the images come from: bundled digits, fonts, MNIST and its kin, the readers.

All sources yield uint8 images with 0 = background. MNIST's families are read from the
raw idx files of torchvision's folder layout, file by file: its data sets want all four
files of both splits, and load a `processed` folder of pickles first if there is one.

Source:
    LeCun, Cortes, Burges, "The MNIST database of handwritten digits" (idx format).
    Yadav, Bottou, "Cold case: the lost MNIST digits", NeurIPS 2019 (QMNIST: writers).
    Xiao, Rasul, Vollgraf, "Fashion-MNIST", arXiv:1708.07747, 2017.
"""

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.config.settings import GIVEN
from fedgs.data.picture_rules import resize
from fedgs.data.readers import arrays, chest_xray, femnist, folder, fonts, hugging_face
from fedgs.data.records import Records, fit
from fedgs.errors import UserError, imported, wrap_error

FOLDERS = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "mnist-by-writer": "MNIST",
}
READERS = {
    "femnist": femnist.read,
    "chest-xray": chest_xray.read,
    "folder": folder.read,
    "npz": arrays.read,
    "hf": hugging_face.read,
}
BY_DATA_DIR = ("femnist", "chest-xray")  # of these, which need no path of their own
_NAMES = "digits, fonts, mnist, fashion-mnist, mnist-by-writer, femnist[:PATH], "
_NAMES += "chest-xray[:PATH], folder:PATH, npz:PATH, hf:NAME"
QMNIST_LABELS = "QMNIST/raw/qmnist-train-labels-idx2-int"
DIGITS_SIDE = 28  # of `digits` by default, which are too small to be generated
# Columns of the 8 in a row.
QMNIST_LABEL = 0
QMNIST_WRITER = 2
log = logging.getLogger(__name__)  # the command line prints it
_REMEDY = "give whole files of a layout in docs/data.md, which this user can read"


def load_records(config: RunConfig) -> Records:
    """Loads `config.data`, fitted to the image size and channels of the run.

    Privacy: reads private data; output private.

    Raises:
        UserError: an unknown source, missing or malformed data, labels beyond
            `num_classes`, RGB images for a grey run, or pictures without one size that
            can be generated and no `image_size`.
    """
    return fit(config, read_records(config))


def load_kept_records(config: RunConfig) -> Records:
    """Loads records that are split into clients more than once, so are read once.

    A bug that is planted spoils a copy of them, where it would spoil `load_records`' in
    their place.

    Privacy: reads private data; output private.

    Raises:
        UserError: as `load_records`.
    """
    records = load_records(config)
    records.images.flags.writeable = False
    return records


def read_records(config: RunConfig) -> Records:
    """Reads `config.data` as it is; pictures in files have the run's size if it is set.

    Privacy: reads private data; output private.

    Raises:
        UserError: an unknown source, missing or malformed data, or picture files that
            differ in size without `image_size`.
    """
    kind, _, where = config.data.partition(":")
    # Chosen first and read under the guard: what is refused here is refused as it is.
    read: Callable[[], Records]
    if config.data == "digits":
        read = partial(_digits, config)
    elif config.data == "fonts":
        read = partial(fonts.read, "train")
    elif config.data in FOLDERS:
        read = partial(_mnist, config, "train")
    elif kind in READERS and (where or config.data in BY_DATA_DIR):
        read = partial(READERS[kind], config)
    elif config.data == GIVEN:
        raise UserError(
            f"data = {GIVEN!r}: these images were given in Python and are in no file; "
            "continue the run there, by fedgs.load(RUN).resume(images, labels, "
            f"clients), or give --data one of {_NAMES}"
        )
    elif (path := Path(config.data).expanduser()).exists():
        kind = "folder" if path.is_dir() else "npz"
        # The prefix says what is read, so that a name cannot become a path by chance.
        raise UserError(f"data = {config.data!r}: give --data {kind}:{config.data}")
    else:
        raise UserError(f"data = {config.data!r}: give --data one of {_NAMES}")
    log.info("reading %s ...", config.data)
    with _guarded(config):
        return read()


def _guarded(config: RunConfig) -> AbstractContextManager[None]:
    """Returns the last guard of all formats: folders that cannot be listed, and more.

    What a reader foresees it refuses itself, by file, user and image.
    """
    return wrap_error(Exception, f"data = {config.data!r}: it cannot be read", _REMEDY)


def has_test_split(config: RunConfig) -> bool:
    """Tells whether a source has test images of its own, of no client.

    Privacy: public. Whether there is such a split says nothing of an image.

    Args:
        config: the settings that say what is read.

    >>> [has_test_split(RunConfig(data=data)) for data in ("mnist", "npz:a.npz")]
    [True, False]
    """
    if config.data in FOLDERS or config.data == "fonts":
        return True
    kind = config.data.partition(":")[0]
    with _guarded(config):
        if kind == "femnist":
            return femnist.test_file(config) is not None
        return kind == "hf" and hugging_face.has_test_split(config)


def has_few_images_each(data: str) -> bool:
    """Tells whether a source is published as one of owners with one or two images each.

    Privacy: public. Of the user's own data nobody may know it without looking.

    >>> has_few_images_each("chest-xray:a"), has_few_images_each("folder:a")
    (True, False)
    """
    return data.partition(":")[0] == "chest-xray"


def load_test_records(config: RunConfig) -> Records | None:
    """Loads the test split that the source itself has, fitted like the data.

    Privacy: public. Benchmark test splits, of no client of the run.

    Returns:
        None where the source has none.

    Raises:
        UserError: as `load_records`.
    """
    kind = config.data.partition(":")[0]
    records: Records | None = None
    # A file of the user's own has no split that nobody trained on.
    with _guarded(config):
        if config.data in FOLDERS:
            records = _mnist(config, "t10k")
        elif config.data == "fonts":
            records = fonts.read("test")
        elif kind == "femnist":
            records = femnist.read_test(config)
        elif kind == "hf":
            records = hugging_face.read_test(config)
    if records is None:
        return None
    return fit(config, records)


def with_absolute_path(data: str) -> str:
    """Returns the setting `data` so that it holds from any working directory.

    >>> with_absolute_path("mnist"), with_absolute_path("npz:/data/a.npz")
    ('mnist', 'npz:/data/a.npz')
    """
    kind, _, where = data.partition(":")
    if kind not in READERS or not where:
        return data
    mark = ""
    query = ""
    if kind == "hf":
        where, mark, query = where.partition("?")
    path = Path(where).expanduser()
    if kind == "hf" and not path.is_dir():  # a name of the hub
        return data
    return f"{kind}:{path.absolute()}{mark}{query}"


def place_of(config: RunConfig) -> tuple[str, str]:
    """Returns where images lie, the same for all spellings of a path, and options.

    Options stand after ? and say how to read the images of a place.

    >>> place_of(RunConfig(data="npz:/data/../a.npz"))
    ('npz:/a.npz', '')
    """
    data = with_absolute_path(config.data)
    kind, _, where = data.partition(":")
    options = ""
    if kind == "hf":
        where, _, options = where.partition("?")
        data = f"{kind}:{where}"
    if kind == "chest-xray":
        with contextlib.suppress(UserError):  # whoever reads it says what is wrong
            where = str(chest_xray.archive_folder(config).absolute())
    if Path(where).is_absolute():
        data = f"{kind}:{Path(where).resolve()}"
    return data, options


def read_idx(path: Path, dtype: str, num_dims: int) -> NDArray[Any]:
    """Reads one raw file of the MNIST family.

    Privacy: reads private data; output private.

    Args:
        path: an uncompressed idx file.
        dtype: uint8 or int32, the type that the file must have.
        num_dims: number of dimensions that it must have.

    Raises:
        UserError: another type or number of dimensions, or a truncated file.
    """
    # Imported here: it loads a compiler, a third of the time a client takes to start.
    from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

    with contextlib.suppress(Exception):  # whatever a damaged file makes it raise
        values = read_sn3_pascalvincent_tensor(str(path)).numpy()
        is_right = values.dtype == dtype and values.ndim == num_dims
        if is_right and values.size > 0:
            return values
    raise UserError(
        f"{path}: not a whole idx file of {num_dims} dimensions of type {dtype}; "
        "remove it and add --download, or give another --data-dir"
    )


def _digits(config: RunConfig) -> Records:
    """Returns scikit-learn's 1797 digits of 8x8 pixels, 0..16 scaled to 0..255.

    They fill their frame; a border of 2 pixels gives them about MNIST's margin. They
    are scaled up to the run's size, or else to MNIST's.
    """
    datasets = imported("sklearn.datasets", "data = digits", "scikit-learn")
    pixels, labels = datasets.load_digits(return_X_y=True)
    scaled = np.asarray(pixels) * (255 / 16)
    images = np.rint(scaled).astype(np.uint8)
    images = images.reshape(-1, 1, 8, 8)
    none = (0, 0)
    border = (2, 2)
    framed = np.pad(images, (none, none, border, border))
    return Records(
        images=resize(framed, config.image_size or DIGITS_SIDE),
        labels=np.asarray(labels, np.int64),
        num_classes=10,
    )


def _mnist(config: RunConfig, split: str) -> Records:
    """Reads the split `train` or `t10k`, with its writers for mnist-by-writer."""
    raw = f"{FOLDERS[config.data]}/raw/{split}"
    names = [f"{raw}-images-idx3-ubyte", f"{raw}-labels-idx1-ubyte"]
    # QMNIST tells who wrote MNIST's training images; the test split is nobody's here.
    by_writer = config.data == "mnist-by-writer" and split == "train"
    if by_writer:
        names.append(QMNIST_LABELS)
    paths = _find(config, names)
    images = read_idx(paths[0], "uint8", 3)
    labels = read_idx(paths[1], "uint8", 1)
    # A file of one split beside one of the other.
    if len(images) != len(labels):
        raise UserError(
            f"data_dir = {config.data_dir!r}: {names[0]} has {len(images)} images, "
            f"{names[1]} has {len(labels)} labels; give files that belong together"
        )
    clients = None
    if by_writer:
        clients = _writers(paths[2], labels)
    return Records(
        images=images[:, None],
        labels=labels.astype(np.int64),
        num_classes=10,
        clients=clients,
    )


def _writers(path: Path, labels: NDArray[np.integer]) -> NDArray[np.integer]:
    """Returns the writer of each MNIST training image, shape (N,)."""
    rows = read_idx(path, "int32", 2)
    is_shape = rows.shape == (len(labels), 8)
    # The files name no image, so that equal labels are the only sign of equal order.
    if not is_shape or (rows[:, QMNIST_LABEL] != labels).any():
        raise UserError(
            f"{path}: it does not describe the {len(labels)} images of MNIST's "
            "training split in their order (its labels differ); give files that "
            "belong together"
        )
    return rows[:, QMNIST_WRITER].astype(np.int64)


def _find(config: RunConfig, names: list[str]) -> list[Path]:
    """Returns the paths of files below data_dir, downloaded first if asked for."""
    if config.data_dir is None:
        raise UserError(
            f"data_dir is unset: data = {config.data} needs --data-dir, a folder with "
            f"{', '.join(names)}, or one to fill with --download"
        )
    root = Path(config.data_dir).expanduser()
    # Without --download nothing goes over the network.
    missing = [name for name in names if not (root / name).is_file()]
    if missing and config.download:
        _download(config, root, missing)
    elif missing:
        raise UserError(
            f"data_dir = {config.data_dir!r}: {', '.join(missing)} not found there; "
            "give --data-dir the folder that holds these files, or add --download"
        )
    return [root / name for name in names]


def _download(config: RunConfig, root: Path, missing: list[str]) -> None:
    import torchvision

    families = {name.split("/")[0] for name in missing}  # classes of torchvision
    for family in sorted(families):
        where = f"download = True: {family} for data_dir = {config.data_dir!r} failed"
        remedy = f"put {', '.join(missing)} there by hand"
        with wrap_error((OSError, RuntimeError), where, remedy):
            getattr(torchvision.datasets, family)(root, download=True)
