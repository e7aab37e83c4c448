"""Data sets of the Hugging Face hub, split by the partitioners of flwr-datasets.

`hf:NAME` is a data set of the hub, or a folder in one of its formats. Without
`--download` nothing goes over the network: the data comes from the Hugging Face cache
(`data_dir`, or its own default). flwr-datasets reports to its maker when partitions are
loaded through `FederatedDataset.load_partition`; that method is not used here.

Source: Caldas et al., "LEAF", arXiv:1812.01097 (flwrlabs/femnist follows it).
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config.hub import HubSource
from fedgs.config.run_config import RunConfig
from fedgs.data.picture_rules import PictureRules
from fedgs.data.readers.flower_partitions import partitions
from fedgs.data.readers.labels import number_of_classes, numbered
from fedgs.data.readers.pictures import PictureReader
from fedgs.data.records import DARK, NO_IMAGES, Records, gathered
from fedgs.errors import UserError, first_n, wrap_error
from fedgs.files import check_regular

INSTALL = (
    "run `pip install datasets matplotlib seaborn` and then "
    "`pip install --no-deps flwr-datasets==0.6.0`"
)
_ROWS_AT_ONCE = 256


class SplitMissing(UserError):
    """The data set is there, without a split of the name asked for."""


@dataclass(frozen=True)
class Reading:
    """How pictures become images.

    Attributes:
        rules: the rules of all pictures.
        class_map: new label of each label, or `LEFT_OUT`; None: all stay.
    """

    rules: PictureRules
    class_map: NDArray[np.int64] | None = None


def read(config: RunConfig) -> Records:
    """Reads `hf:NAME`.

    Privacy: reads private data; output private.

    Raises:
        UserError: packages or data are missing, options do not suit the data, or a
            picture is damaged, named by client and index.
    """
    source = _source(config)
    dataset = load_split(config, source, source.split)
    return read_dataset(config, dataset, source)


def read_test(config: RunConfig) -> Records | None:
    """Reads the split `test` of `hf:NAME`, None where the data set has none.

    Privacy: public. Benchmark test splits, of no client of the run.

    Raises:
        UserError: as `read`, or the option test_split names none.
    """
    source = _source(config)
    # Many data sets have no split `test`; one that the user has named must be there.
    try:
        dataset = load_split(config, source, source.test_split)
    except SplitMissing:
        if source.test_split == HubSource.test_split:
            return None
        raise
    # These images belong to no client.
    without_clients = replace(source, client=None, partitioner=None)
    return read_dataset(config, dataset, without_clients)


def has_test_split(config: RunConfig) -> bool:
    """Tells whether `hf:NAME` has test images; True if the data cannot be found.

    Whoever reads the data says then what is wrong.
    """
    source = _source(config)
    if source.test_split != HubSource.test_split:
        return True  # the user has named it
    try:
        load_split(config, source, source.test_split)
    except SplitMissing:
        return False
    except UserError:
        pass
    return True


def _source(config: RunConfig) -> HubSource:
    source = config.hub
    assert source is not None  # noqa: S101 - the reader of `hf:NAME` alone
    return source


def load_split(config: RunConfig, source: HubSource, split: str) -> Any:
    """Loads one split through `flwr_datasets.FederatedDataset`.

    Privacy: reads private data; output private.

    Args:
        config: uses `data`, `data_dir` and `download`.
        source: uses `name` and `subset`.
        split: its name.

    Returns:
        A `datasets.Dataset`, memory-mapped.

    Raises:
        SplitMissing: the data has other splits.
        UserError: packages or the data are missing.
    """
    with wrap_error(
        ImportError, f"data = {config.data!r}: it needs a package", INSTALL
    ):
        from flwr_datasets import FederatedDataset
    path = Path(source.name).expanduser()
    is_local = path.is_dir()
    # What `save_to_disk` wrote, flwr-datasets does not read.
    if is_local and (saved := _saved(path)):
        if split not in saved:
            raise _missing(config, split, saved)
        return _validated(saved[split])
    # The splits that there are, for an error: only its preprocessor sees them.
    splits: list[str] = []

    def note_splits(found: Any) -> Any:
        splits.extend(found)
        return found

    name = source.name
    if is_local:
        name = str(path.absolute())
    cache_dir = None
    if config.data_dir is not None:
        cache_dir = str(Path(config.data_dir).expanduser())
    federated = FederatedDataset(
        dataset=name,
        subset=source.subset,
        partitioners={split: 1},
        preprocessor=note_splits,
        shuffle=False,
        cache_dir=cache_dir,
    )
    network = _offline()
    if config.download and not is_local:
        network = contextlib.nullcontext()
    try:
        with network:
            return _validated(federated.partitioners[split].dataset)
    except Exception as error:
        if splits and split not in splits:
            raise _missing(config, split, splits) from error
        problem = _problem(config, source.name, _reason(error))
        raise UserError(problem) from error


def _reason(error: Exception) -> str:
    """Returns the first line of what went wrong."""
    # Of a full disk it says that an error occurred, and what in its cause.
    cause: BaseException = error
    if isinstance(error.__cause__, OSError):
        cause = error.__cause__
    lines = str(cause).strip().splitlines()
    if not lines:
        return type(cause).__name__
    return lines[0]


def _saved(folder: Path) -> dict[str, Any]:
    """Returns the splits that `save_to_disk` wrote there, none if it did not.

    A data set that was saved alone may not say which split it is; it is `train` then.
    """
    import datasets

    for path in folder.rglob("[!.]*"):
        if not path.is_dir():
            check_regular(path)  # a pipe would be waited for
    marks = [folder / name for name in ("dataset_dict.json", "state.json")]
    if not any(mark.exists() for mark in marks):
        return {}
    found: Any = datasets.load_from_disk(folder)
    if isinstance(found, datasets.DatasetDict):
        return {str(split): dataset for split, dataset in found.items()}
    return {str(found.split or HubSource.split): found}


def _validated(dataset: Any) -> Any:
    """Returns a data set whose offsets point into its file: others end a process."""
    dataset.data.validate(full=True)
    return dataset


def _missing(config: RunConfig, split: str, splits: Iterable[str]) -> SplitMissing:
    return SplitMissing(
        f"data = {config.data!r}: it has no split {split!r}, it has {first_n(splits)}; "
        "give --data hf:NAME?split=SPLIT"
    )


def _problem(config: RunConfig, name: str, reason: str) -> str:
    if config.download:
        return f"download = True: {name} failed: {reason}"
    where = config.data_dir or "its default folder"
    return (
        f"data = {config.data!r}: {name} cannot be read from the Hugging Face cache "
        f"({where}) or a folder: {reason}; add --download, or give --data-dir or a "
        "folder with its files"
    )


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keeps `datasets` off the network and its progress bars off the terminal."""
    import datasets
    import huggingface_hub.constants as hub
    from datasets import config as settings

    was_offline = settings.HF_HUB_OFFLINE
    was_hub_offline = hub.HF_HUB_OFFLINE
    had_bars = not datasets.are_progress_bars_disabled()
    verbosity = datasets.logging.get_verbosity()
    settings.HF_HUB_OFFLINE = True
    hub.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it raises errors, too
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = was_offline
        hub.HF_HUB_OFFLINE = was_hub_offline
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


# ------------------------------------------------------------------ rows to images


def read_dataset(
    config: RunConfig,
    dataset: Any,
    source: HubSource,
    reading: Reading | None = None,
    background: str = DARK,
) -> Records:
    """Reads all pictures of a split, client by client.

    Privacy: reads private data; output private.

    Args:
        config: uses `seed` and the image's settings.
        dataset: a `datasets.Dataset`.
        source: the columns, and who owns what.
        reading: how pictures become images; fitted to the run by default.
        background: what the data set's format declares.

    Raises:
        UserError: columns or partitioner do not suit the data, a picture is damaged, or
            pictures differ in size and `image_size` is unset.
    """
    import datasets

    if reading is None:
        reading = Reading(PictureRules.of(config))
    image = _image_column(config, dataset, source)
    label, num_classes = _label_column(config, dataset, source)
    _check_client_column(config, dataset, source)
    if reading.class_map is not None:
        num_classes = int(reading.class_map.max()) + 1
    elif label is not None:
        class_map = _class_map(config, dataset, label)
        if class_map is not None:
            reading = replace(reading, class_map=class_map)
            num_classes = number_of_classes(config, class_map.tolist())
    # Pictures as bytes: ours are the checks of what is in them.
    dataset = dataset.cast_column(image, datasets.Image(decode=False))
    has_clients = source.partitioner is not None or source.client is not None
    pictures = PictureReader(reading.rules)

    def parts() -> Iterator[tuple[str | int, NDArray[np.uint8], int]]:
        for client, rows in partitions(config, dataset, source, label):
            yield client, NO_IMAGES, 0  # also one without rows is a client
            who = ""
            owner = None
            if has_clients:
                who = f"client {client}: "
            if source.client is not None:
                owner = str(client)
            for index, row in enumerate(_rows(rows)):
                where = f"data = {config.data!r}: {who}image {index}"
                content = _content(row[image], where)
                pixels = pictures.read(content, where, owner)
                number = 0
                if label is not None:
                    number = _label(row[label], reading, where)
                yield client, pixels[None], number

    records = gathered(
        config.data,
        parts(),
        capacity=len(dataset),
        num_classes=num_classes,
        background=background,
        found=pictures.found,
    )
    if has_clients:
        return records
    return replace(records, clients=None, owners=None)


def _rows(rows: Any) -> Iterator[dict[str, Any]]:
    for batch in rows.iter(batch_size=_ROWS_AT_ONCE):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(names, values, strict=True))


def _content(cell: Any, where: str) -> Path | bytes:
    """Returns the picture of a row: a folder has its path, a parquet file its bytes."""
    if not cell or not (cell["bytes"] or cell["path"]):
        raise UserError(f"{where}: it is missing; leave this row out")
    return cell["bytes"] or Path(cell["path"])


def _label(value: Any, reading: Reading, where: str) -> int:
    """Returns the new label."""
    class_map = reading.class_map
    allowed = "integers from 0"
    is_allowed = isinstance(value, int) and value >= 0
    if class_map is not None:
        allowed = f"{allowed} to {len(class_map) - 1}"
        is_allowed = is_allowed and value < len(class_map)
    if not is_allowed:
        raise UserError(f"{where}: it has the label {value}; give {allowed}")
    if class_map is None:
        return value
    return int(class_map[value])


# ------------------------------------------------------------------ columns


def _image_column(config: RunConfig, dataset: Any, source: HubSource) -> str:
    import datasets

    columns = _columns(dataset, datasets.Image)
    fitting = [name for name in columns if source.image in (None, name)]
    if len(fitting) != 1:
        raise UserError(
            f"data = {config.data!r}: {len(fitting)} columns of pictures fit, among "
            f"{first_n(dataset.features, 9)}; give --data hf:NAME?image=COLUMN"
        )
    return fitting[0]


def _columns(dataset: Any, kind: type) -> list[str]:
    return [name for name, own in dataset.features.items() if isinstance(own, kind)]


def _label_column(
    config: RunConfig,
    dataset: Any,
    source: HubSource,
) -> tuple[str | None, int]:
    """Returns the column of labels, if any, and their number."""
    import datasets

    classes = _columns(dataset, datasets.ClassLabel)
    labels = classes
    if source.label is not None:
        labels = [source.label]
    if not labels:
        return None, 1
    label = labels[0]
    kind = dataset.features.get(label)
    is_number = label in classes or _has_type(kind, "int")
    if len(labels) > 1 or not is_number:
        raise UserError(
            f"data = {config.data!r}: {first_n(labels)} cannot be the label, of "
            f"columns {first_n(dataset.features, 9)}; give --data "
            "hf:NAME?label=COLUMN of one column of class labels or integers"
        )
    if label in classes:
        return label, len(kind.names)
    # Where a label is missing, the reader of the rows says of which image.
    known = [value for value in dataset[label] if value is not None]
    largest = max(known, default=0)
    return label, max(largest, 0) + 1


def _check_client_column(config: RunConfig, dataset: Any, source: HubSource) -> None:
    """Refuses a column of clients that is missing, or has no name in each row."""
    client = source.client
    if client is None:
        return
    # Floats are no names: two that differ in their last bit would be two clients.
    is_name = _has_type(dataset.features.get(client), "int", "string")
    if is_name:
        # Without a name, the images of several owners would be one's.
        names = dataset.unique(client)
        is_name = all(name is not None and str(name).strip() for name in names)
    if not is_name:
        raise UserError(
            f"data = {config.data!r}: {client} cannot name the clients, of columns "
            f"{first_n(dataset.features, 9)}; give --data hf:NAME?client=COLUMN of one "
            "column of integers or strings, with a value in each row"
        )


def _has_type(kind: Any, *types: str) -> bool:
    """Tells whether a column has single values of these types, integers of any size."""
    import datasets

    is_value = isinstance(kind, datasets.Value | datasets.ClassLabel)
    if not is_value:
        return False
    # "int" stands for int8 to int64 and uint8 to uint64.
    return any(name in kind.dtype for name in types)


def _class_map(config: RunConfig, dataset: Any, label: str) -> NDArray[np.int64] | None:
    """Returns the run's label of each label of the data; None where they are the same.

    A data set declares its class labels. A folder of pictures does not: its labels are
    numbered in the order of the folders that are there.
    """
    import datasets

    kind = dataset.features[label]
    is_named = isinstance(kind, datasets.ClassLabel)
    if config.class_names and not is_named:
        raise UserError(
            f"classes = {config.classes!r}: the column {label} of data = "
            f"{config.data!r} has numbers, not names; leave out --classes"
        )
    is_folder = dataset.info.builder_name == "imagefolder"
    if not is_named or not (config.class_names or is_folder):
        return None
    labels = numbered(config, kind.names)
    return np.array(list(labels.values()), np.int64)
