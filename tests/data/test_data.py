"""The contract `FederatedImages`, and real data behind it.

MNIST comes from the folder in the environment variable FEDGS_DATA_DIR.
"""

import numpy as np
import pytest

from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_test_data
from loading import configured, load

LABELS = np.array([0, 1, 0])


def toy(**changes):
    parts = {
        "images": np.zeros((3, 1, 2, 2), np.uint8),
        "labels": LABELS,
        "client_records": (np.array([2, 1]), np.array([0])),
        "client_names": ("ann", "bob"),
        "num_classes": 2,
        "name": "toy",
    }
    return FederatedImages(**{**parts, **changes})


def test_a_client_has_copies_of_its_images_and_labels():
    images = np.array([0, 51, 255], np.uint8)[:, None, None, None]
    own = toy(images=images.repeat(2, 2).repeat(2, 3)).of(0)
    assert own.images.dtype == np.uint8
    assert own.images[:, 0, 0, 0].tolist() == [255, 51]
    assert own.images.shape == (2, 1, 2, 2)
    assert own.labels.dtype == np.int64
    assert own.labels.tolist() == [0, 1]
    data = toy(images=images.repeat(2, 2).repeat(2, 3))
    x, y = data.client(0)
    assert x.dtype == np.float32
    assert x[:, 0, 0, 0].tolist() == [1.0, np.float32(0.2)]
    assert y.tolist() == [0, 1]
    data = toy()
    assert (data.num_clients, data.sizes.tolist()) == (2, [2, 1])
    data.of(0).images[:] = 1  # a copy
    data.of(0).labels[:] = 9
    assert (data.images.max(), data.labels.max()) == (0, 1)


def test_a_client_may_have_no_records():
    data = toy(client_records=(LABELS[:0], np.array([0])))
    assert (data.num_clients, data.sizes.tolist()) == (2, [0, 1])
    assert [len(part) for part in data.client(0)] == [0, 0]
    stand_in = data.of(0)  # so that it trains as long as the others
    assert (stand_in.images.shape, stand_in.images.max()) == ((1, 1, 2, 2), 0)
    assert stand_in.labels.tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client_records": (), "client_names": ()}, "at least one client"),
        ({"client_records": (np.array([0]), np.array([3]))}, r"int64 in \[0, 3\)"),
        ({"client_records": (np.array([0]), np.array([0]))}, "two clients"),
    ],
)
def test_contradictory_parts_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        toy(**changes)


# Real data


def test_mnist_by_writer_has_539_writers_of_60000_images(data_dir):
    data = load(data="mnist-by-writer", data_dir=str(data_dir))
    assert data.num_clients == 539  # Yadav, Bottou 2019
    assert data.images.shape == (60_000, 1, 28, 28)
    assert data.sizes.sum() == 60_000
    assert data.num_classes == 10
    assert np.bincount(data.labels)[:2].tolist() == [5923, 6742]  # MNIST
    assert abs(data.images.mean() / 255 - 0.1307) < 1e-4  # the usual normalisation
    for name in ("fashion-mnist", "mnist-by-writer"):
        images, labels = load_test_data(configured(name, data_dir=str(data_dir)))
        assert images.shape == (10_000, 1, 28, 28)
        assert images.max() == 1.0
        assert len(np.unique(labels)) == 10
