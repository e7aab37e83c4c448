"""Private images that belong to clients: the one form in which all data enters.

Images are uint8 in memory, (record, channel, height, width), 0 = background, and become
float32 in [0, 1] one client at a time. `sources` reads the data sets, `held_out` keeps
test images back, `partition` decides which records belong to which client, and
`corruption` spoils some for experiments.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgs.cohorts.files import for_all_clients, keep_cohort
from fedgs.config.run_config import RunConfig, UserError
from fedgs.data import partition, sources
from fedgs.data.corruption import corrupt
from fedgs.data.held_out import held_out
from fedgs.data.records import DataWarning, Records

__all__ = [
    "DataWarning",
    "FederatedImages",
    "load_data",
    "load_test_data",
    "split_records",
]


@dataclass(frozen=True, eq=False)
class FederatedImages:
    """Labelled images and the client that each of them belongs to.

    A record may belong to no client (what an even split leaves over), never to two:
    the sensitivity of a release rests on that.

    Privacy: reads private data; output private.

    Attributes:
        images: all records, shape (N, channel, height, width), uint8, 0 = background;
            may be read-only.
        labels: shape (N,), int64, in [0, num_classes); all 0 for data without labels.
        client_records: for each client its record numbers, 1-D int64, at least one.
        client_names: one public name per client, in the order of `client_records`.
        num_classes: number of labels, at least 1.
        name: the setting `data` that it was loaded from.
        client_test_records: the records that each client holds out of training, which
            may be none; empty where the clients are not the data's own.

    Raises:
        ValueError: the arrays contradict each other, a client is empty or a record
            belongs to two clients.

    >>> images = np.full((3, 1, 2, 2), 255, dtype=np.uint8)
    >>> labels = np.array([0, 1, 0])
    >>> records = (np.array([2, 1]), np.array([0]))
    >>> data = FederatedImages(images, labels, records, ("ann", "bob"), 2, "toy")
    >>> data.num_clients, data.sizes, data.client(0)[1]
    (2, array([2, 1]), array([0, 1]))
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    client_records: tuple[NDArray[np.int64], ...]
    client_names: tuple[str, ...]
    num_classes: int
    name: str
    client_test_records: tuple[NDArray[np.int64], ...] = ()

    def __post_init__(self) -> None:
        """Checks what the rest of the package relies on."""
        count = len(self.images)
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise ValueError("images must be uint8 of shape (N, C, H, W)")
        if self.labels.dtype != np.int64 or self.labels.shape != (count,):
            raise ValueError(f"labels must be int64 of shape ({count},)")
        if count and not 0 <= self.labels.min() <= self.labels.max() < self.num_classes:
            raise ValueError(f"labels must lie in [0, {self.num_classes})")
        if not 0 < len(self.client_records) == len(self.client_names):
            raise ValueError("client_names must name every client, at least one")
        if self.sizes.min() == 0:
            raise ValueError("every client needs at least one record")
        if len(self.client_test_records) not in (0, len(self.client_records)):
            raise ValueError("client_test_records must be of every client, or of none")
        owned = np.concatenate(self.client_records + self.client_test_records)
        if owned.dtype != np.int64 or owned.min() < 0 or owned.max() >= count:
            raise ValueError(f"client_records must be int64 in [0, {count})")
        if np.bincount(owned).max() > 1:
            raise ValueError("a record must not belong to two clients or twice to one")

    @property
    def num_clients(self) -> int:
        """K, the number of clients."""
        return len(self.client_records)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Records of each client, shape (K,), int64; private where clients are real."""
        return np.array([len(records) for records in self.client_records], np.int64)

    def client(self, client_id: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Returns copies of one client's images and labels.

        Privacy: reads private data; output private.

        Args:
            client_id: in [0, num_clients).

        Returns:
            Images, shape (n, channel, height, width), float32 in [0, 1], and labels,
            shape (n,), int64.

        Raises:
            ValueError: there is no such client.
        """
        return self._copies(self.client_records, client_id)

    def client_test(
        self, client_id: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Returns copies of what one client holds out; may be empty.

        Privacy: reads private data; output private.

        Args:
            client_id: in [0, num_clients).

        Returns:
            As `client`.

        Raises:
            ValueError: there is no such client, or nothing is held out by clients.
        """
        return self._copies(self.client_test_records, client_id)

    def _copies(
        self, groups: tuple[NDArray[np.int64], ...], client_id: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if not 0 <= client_id < len(groups):
            raise ValueError(f"client_id = {client_id}: must be in [0, {len(groups)})")
        records = groups[client_id]
        return to_float(self.images[records]), self.labels[records]


def to_float(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns images in [0, 255] as float32 in [0, 1], of the same shape.

    Privacy: reads private data; output private.
    """
    return images.astype(np.float32) / np.float32(255)


def load_data(config: RunConfig) -> FederatedImages:
    """Loads the data of a run, fits its images and splits it into clients.

    Images of another size are resized with antialiased bilinear interpolation, grey
    images become RGB by repetition, and RGB images are never turned into grey.

    Privacy: reads private data; output private. Without `num_classes` the largest label
    of an npz file becomes public; give the setting where that is not acceptable.

    Args:
        config: resolved, so with a seed; a `num_clients` of None takes all clients of
            the data, or 180 for `digits`.

    Raises:
        UserError: the data is missing or malformed, or does not suit the settings.
    """
    records = sources.load_records(config)
    return keep_cohort(config, split_records(for_all_clients(config), records))


def split_records(config: RunConfig, records: Records) -> FederatedImages:
    """Splits records into clients, without those held out, and corrupts images.

    Privacy: reads private data; output private.

    Args:
        config: as for `load_data`.
        records: fitted to the run.

    Raises:
        UserError: the partition does not suit the data.
    """
    is_held_out = held_out(config, records)
    train = np.flatnonzero(~is_held_out)
    owners = records.clients
    groups, names = partition.split(
        config,
        records.labels[train],
        records.num_classes,
        None if owners is None else owners[train],
    )
    groups, tests = [train[group] for group in groups], []
    is_by_client = partition.rule(config, owners) == "by-client"
    if config.test_fraction and is_by_client and owners is not None:
        tests = _records_of(owners, np.flatnonzero(is_held_out), names)
    own = [*map(np.concatenate, zip(groups, tests, strict=True))] if tests else groups
    return FederatedImages(
        corrupt(config, records.images, own, names),
        records.labels,
        tuple(groups),
        names,
        records.num_classes,
        config.data,
        tuple(tests),
    )


def _records_of(
    owners: NDArray[np.generic], records: NDArray[np.int64], names: tuple[str, ...]
) -> list[NDArray[np.int64]]:
    """Returns those of `records` that belong to each name, possibly none."""
    groups, found = partition.by_client(owners[records])
    known = dict(zip(found, groups, strict=True))
    return [records[known.get(name, np.empty(0, np.int64))] for name in names]


def load_test_data(
    config: RunConfig,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Loads the test images that belong to `config.data`, fitted like the data.

    It is the source's own test split where it has one (MNIST's for `mnist` and
    `mnist-by-writer`, Fashion-MNIST's, the split `test` of a Hugging Face data set,
    `..._test.h5` beside TFF's `..._train.h5`), else what all owners hold out by
    `test_fraction`. It is never corrupted.

    Privacy: a benchmark's own split is public; what owners hold out is private.

    Returns:
        Images, shape (n, channel, height, width), float32 in [0, 1], 0 = background,
        and labels, shape (n,), int64.

    Raises:
        UserError: the data has no test images, or it is missing or malformed.
    """
    records = sources.load_test_records(config)
    if records is not None:
        return to_float(records.images), records.labels
    if not config.test_fraction:
        raise UserError(
            f"data = {config.data!r}: has no test split, and nothing was held out; "
            "give data that has one, such as mnist, or train and evaluate with "
            "--test-fraction"
        )
    records = sources.load_records(config)
    chosen = np.flatnonzero(held_out(config, records))
    return to_float(records.images[chosen]), records.labels[chosen]
