"""Private images that belong to clients: the one form in which all data enters.

Images are uint8 in memory, (record, channel, height, width), 0 = background, and become
float32 in [0, 1] one client at a time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgs.cohorts.client_groups import CohortOfClient


@dataclass(frozen=True, eq=False)
class ClientImages:
    """The labelled images of one client, and of nobody else.

    Privacy: reads private data; output private. Number and name are public.

    Attributes:
        number: the client's index among all of them, from 0.
        name: its public name.
        images: shape (n, channel, height, width), uint8, 0 = background.
        labels: shape (n,), int64.
    """

    number: int
    name: str
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


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
        client_records: for each client the numbers of its records, 1-D int64. A client
            without images has none and keeps its place, so that no other client's
            number depends on it.
        client_names: one public name per client, in the order of `client_records`.
        num_classes: number of labels, at least 1.
        name: the setting `data` that it was loaded from.
        client_test_records: the records that each client holds out of training, which
            may be none; empty where the clients are not the data's own.
        client_cohorts: the cohort of each client by the file of cohorts, None for a
            client that it does not name; empty if there is no such file.
        owners: "kept" where the clients are the owners that the data name, "cut" where
            such owners are cut into shards; "" where the data name none.
        test_owners: names of the owners of whom no client has an image; a cohort may
            name them.
        holds_out_owners: whether owners are held out whole, although the share of them
            may come to none.
        held_out_records: all records that are held out of training, whoever has them,
            1-D int64, which may be none; None where the settings hold out nothing.

    Raises:
        ValueError: there is no client, or a record is not there or belongs to two.

    >>> images = np.full((3, 1, 2, 2), 255, dtype=np.uint8)
    >>> labels = np.array([0, 1, 0])
    >>> records = (np.array([2, 1]), np.array([0]))
    >>> data = FederatedImages(images, labels, records, ("ann", "bob"), 2, "toy")
    >>> data.num_clients, data.sizes, data.of(0).labels
    (2, array([2, 1]), array([0, 1]))
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    client_records: tuple[NDArray[np.int64], ...]
    client_names: tuple[str, ...]
    num_classes: int
    name: str
    client_test_records: tuple[NDArray[np.int64], ...] = ()
    client_cohorts: tuple[CohortOfClient | None, ...] = ()
    owners: str = ""
    test_owners: tuple[str, ...] = ()
    holds_out_owners: bool = False
    held_out_records: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Checks what the rest of the package relies on."""
        count = len(self.images)
        # A run without any would divide by zero, somewhere far from here.
        if not self.client_records:
            raise ValueError("there must be at least one client")
        # A held-out image that is in training as well would make a score worthless.
        held_out = self.client_test_records
        if self.held_out_records is not None:  # those of clients among them
            held_out = (self.held_out_records,)
        owned = np.concatenate(self.client_records + held_out)
        is_there = (owned >= 0) & (owned < count)
        is_of_type = owned.dtype == np.int64
        if not is_of_type or not is_there.all():
            raise ValueError(f"client_records must be int64 in [0, {count})")
        is_owned_twice = np.bincount(owned, minlength=1) > 1
        if is_owned_twice.any():
            raise ValueError("a record must not belong to two clients or twice to one")

    @property
    def num_clients(self) -> int:
        """K, the number of clients."""
        return len(self.client_records)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Records of each client, shape (K,), int64; private where clients are real."""
        sizes = [len(records) for records in self.client_records]
        return np.array(sizes, np.int64)

    def client(self, client_id: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Returns copies of one client's images and labels.

        Privacy: reads private data; output private.

        Args:
            client_id: the client's number, in [0, num_clients).

        Returns:
            Images, shape (n, channel, height, width), float32 in [0, 1], and labels,
            shape (n,), int64.
        """
        records = self.client_records[client_id]
        # Only now, because float32 takes four times the memory.
        images = to_float(self.images[records])
        labels = self.labels[records]
        return images, labels

    def of(self, client_id: int) -> ClientImages:
        """Returns copies of one client's images and labels, as a method gets them.

        Of a client without any it is a black image of label 0, so that it trains as
        long as the others; the frame makes zero of whatever it answers.

        Privacy: reads private data; output private.

        Args:
            client_id: the client's number, in [0, num_clients).
        """
        records = self.client_records[client_id]
        images = self.images[records]  # an index array copies
        labels = self.labels[records]
        if not len(records):
            shape = self.images.shape[1:]
            images = np.zeros((1, *shape), np.uint8)
            labels = np.zeros(1, np.int64)
        return ClientImages(
            number=client_id,
            name=self.client_names[client_id],
            images=images,
            labels=labels,
        )


def to_float(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns images in [0, 255] as float32 in [0, 1], of the same shape.

    Privacy: reads private data; output private.
    """
    return images.astype(np.float32) / np.float32(255)
