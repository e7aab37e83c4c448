"""What decides whose a record is: no label, no pixel, and no other record.

One record's label or pixels are changed, or it moves in or out of the chosen classes.
Every other record keeps its shard, and is held out or not as before; and all clients
keep their numbers, whatever images they have.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import femnist_files
from clients.deployed_client import own_images
from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.data.load import split_records
from fedgs.data.records import DataWarning
from fedgs.data.sources import load_records
from loading import configured, load, refused, write_mnist, write_npz

datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.usefixtures("hub_cache"),
    pytest.mark.filterwarnings("ignore::fedgs.data.records.DataWarning"),
]
RNG = np.random.default_rng(5)
WRITERS = [f"f{number:04d}" for number in range(6)]
OWNERS = np.repeat(WRITERS, [9, 1, 5, 12, 2, 7])
COUNT = len(OWNERS)
IMAGES = RNG.integers(256, size=(COUNT, 28, 28), dtype=np.uint8)
LABELS = RNG.integers(20, size=COUNT)  # digits, and letters from 10 on
Arrays = tuple[np.ndarray, np.ndarray]  # images and labels


def hdf5(root: Path, images: np.ndarray, labels: np.ndarray) -> str:
    root.mkdir(exist_ok=True)
    with h5py.File(root / "x.h5", "w") as file:
        for writer in WRITERS:
            own = writer == OWNERS
            group = file.create_group(f"examples/{writer}")
            group["pixels"] = (images[own] / 255).astype(np.float32)
            group["label"] = labels[own]
    return f"femnist:{root / 'x.h5'}"


def leaf(root: Path, images: np.ndarray, labels: np.ndarray) -> str:
    root.mkdir(exist_ok=True)
    data = {
        writer: {
            "x": (images[writer == OWNERS] / 255).reshape(-1, 784).tolist(),
            "y": labels[writer == OWNERS].tolist(),
        }
        for writer in WRITERS
    }
    sizes = [len(own["y"]) for own in data.values()]
    content = {"users": WRITERS, "num_samples": sizes, "user_data": data}
    (root / "all_data_0.json").write_text(json.dumps(content))
    return f"femnist:{root}"


def hub(root: Path, images: np.ndarray, labels: np.ndarray) -> str:
    rows = {
        "image": [*map(Image.fromarray, images)],
        "writer_id": OWNERS,
        "hsf_id": np.zeros(COUNT, int),
        "character": labels,
    }
    return femnist_files.write_hub(root, rows)


def npz(root: Path, images: np.ndarray, labels: np.ndarray) -> str:
    root.mkdir(exist_ok=True)
    arrays = {"images": images, "labels": labels}
    return write_npz(root / "a.npz", **arrays, clients=OWNERS)


def nobodys_npz(root: Path, images: np.ndarray, labels: np.ndarray) -> str:
    root.mkdir(exist_ok=True)
    return write_npz(root / "a.npz", images=images, labels=labels)


def rows(query: str) -> Callable[..., str]:
    def make(root: Path, images: np.ndarray, labels: np.ndarray) -> str:
        values = {"image": [*map(Image.fromarray, images)]}
        values |= {"label": labels, "owner": OWNERS}
        kinds = {"image": datasets.Image(), "label": datasets.Value("int64")}
        kinds["owner"] = datasets.Value("string")
        table = datasets.Dataset.from_dict(values, features=datasets.Features(kinds))
        root.mkdir(exist_ok=True)
        table.to_parquet(root / "train.parquet")
        return f"hf:{root}?label=label{query}"

    return make


FILTERED = (hdf5, leaf, hub)
IID = {"partition": "iid", "num_clients": 5}
RECORD = IID | {"privacy_unit": "record"}
HELD_OUT = {"test_fraction": 0.3}
CASES: list[tuple[Callable[..., str], dict[str, Any]]] = [
    *[(make, {"classes": "digits"} | RECORD) for make in FILTERED],
    *[(make, {"classes": "letters"} | RECORD) for make in FILTERED],
    *[(make, {"classes": "digits"} | HELD_OUT) for make in FILTERED],
    *[(make, {"classes": "digits"} | IID | HELD_OUT) for make in FILTERED],
    *[(make, {"classes": "digits", "num_clients": 3}) for make in FILTERED],
    (npz, RECORD),
    (npz, HELD_OUT),
    (nobodys_npz, RECORD | HELD_OUT),
    (rows(""), RECORD | HELD_OUT),
    (rows("&client=owner"), RECORD),
    (rows("&client=owner"), HELD_OUT),
    (rows("&partitioner=IidPartitioner&num_partitions=4"), {}),
]


def whose(data: FederatedImages) -> dict[bytes, tuple[str, int, bool]]:
    """Returns of each image its client's name and number, and if it is held out."""
    found: dict[bytes, tuple[str, int, bool]] = {}
    tests = data.client_test_records or [[]] * data.num_clients
    for number, name in enumerate(data.client_names):
        for is_test, own in (
            (False, data.client_records[number]),
            (True, tests[number]),
        ):
            found |= {data.images[r].tobytes(): (name, number, is_test) for r in own}
    return found


def changes(record: int) -> list[Arrays]:
    """Returns the data with one record changed, in several ways."""
    found = []
    for label in (3, 14):  # one of them is in the chosen classes, the other is not
        images, labels = IMAGES.copy(), LABELS.copy()
        labels[record] = label
        found.append((images, labels))
    for pixels in (0, 255):
        images = IMAGES.copy()
        images[record] = pixels
        found.append((images, LABELS))
    return found


def names(case: object) -> str:
    return getattr(case, "__name__", None) or ",".join(map(str, case))


@pytest.mark.parametrize(("make", "settings"), CASES, ids=names)
def test_no_record_decides_on_another_one(tmp_path, make, settings):
    settings = {"num_classes": None if "classes" in settings else 20} | settings
    data = make(tmp_path / "before", IMAGES, LABELS)
    before = load(data, **settings)
    assert len({client for client, *_ in whose(before).values()}) > 1
    for record in (0, 9, 20):
        for number, changed in enumerate(changes(record)):
            root = tmp_path / f"after-{record}-{number}"
            after = load(make(root, *changed), **settings)
            assert after.client_names == before.client_names
            was, now = whose(before), whose(after)
            common = was.keys() & now.keys()
            assert len(common) >= len(was) - 1
            assert {image: was[image] for image in common} == {
                image: now[image] for image in common
            }


@pytest.mark.parametrize("make", FILTERED)
def test_whatever_images_a_client_has_the_others_keep_their_numbers(tmp_path, make):
    for number, writer in enumerate(WRITERS):
        labels = np.where(writer == OWNERS, 15, LABELS % 10)  # all are letters
        data = load(make(tmp_path / writer, IMAGES, labels), classes="digits")
        assert data.client_names == tuple(WRITERS)
        sizes = [np.count_nonzero(name == OWNERS) for name in WRITERS]
        sizes[number] = 0
        assert data.sizes.tolist() == sizes


def test_the_first_clients_and_those_of_a_cohort_may_be_without_images(tmp_path):
    labels = np.where(WRITERS[1] == OWNERS, 15, LABELS % 10)
    data = hdf5(tmp_path, IMAGES, labels)
    few = load(data, classes="digits", num_clients=3, test_fraction=0.3)
    assert few.client_names == tuple(WRITERS[:3])
    assert few.sizes.tolist() == [6, 0, 3]
    assert [*map(len, few.client_test_records)] == [3, 0, 2]
    cohort = tmp_path / "cohort.txt"
    cohort.write_text(f"{WRITERS[4]}\n{WRITERS[1]}\n")
    some = load(data, classes="digits", cohort=str(cohort))
    assert some.client_names == (WRITERS[1], WRITERS[4])
    assert some.sizes.tolist() == [0, 2]


def test_it_is_said_who_has_no_images(tmp_path):
    labels = np.where(WRITERS[1] == OWNERS, 15, LABELS % 10)
    words = rf"1 of 6 users have no images .* contribute nothing \({WRITERS[1]}\)"
    with pytest.warns(DataWarning, match=words):
        load(hdf5(tmp_path, IMAGES, labels), classes="digits")
    # All of them: that is a mistake. A node of a deployment may have none.
    nobody = hdf5(tmp_path, IMAGES, labels * 0 + 15)
    refused("none of its 6 users has an image", nobody, classes="digits")


def deployed(data: str, count: int, **settings: Any) -> FederatedImages:
    config: Any = RunConfig.from_flat(settings, configured(data))
    return own_images(config, range(10, 10 + count))


def test_a_node_of_a_deployment_keeps_all_its_clients(tmp_path):
    labels = np.full(COUNT, 15)
    data = deployed(hdf5(tmp_path, IMAGES, labels), 6, classes="digits")
    assert [len(own) for own in data.client_records.values()] == [0] * 6
    labels[-1] = 3
    cut = {"classes": "digits", "partition": "iid"}
    before = deployed(hdf5(tmp_path, IMAGES, labels), 4, **cut)
    labels[0] = 3
    after = deployed(hdf5(tmp_path, IMAGES, labels), 4, **cut)
    assert sum(map(len, before.client_records.values())) == 1
    for client, own in before.client_records.items():
        assert {*own} <= {*after.client_records[client]}


def test_a_partition_that_a_partitioner_leaves_empty_stays(tmp_path):
    query = "&partitioner=DirichletPartitioner&num_partitions=30&alpha=0.01"
    query += "&min_partition_size=0&self_balancing=false"
    data = load(rows(query)(tmp_path, IMAGES, LABELS), num_classes=20)
    assert data.client_names == tuple(map(str, range(30)))
    assert data.sizes.min() == 0
    assert data.sizes.sum() == COUNT


@pytest.mark.parametrize("num_clients", [2, 5, 36])
def test_shards_by_label_may_be_empty_where_few_images_are_chosen(
    tmp_path, num_clients
):
    for chosen in (0, 3):  # images
        labels = np.where(np.arange(COUNT) < chosen, 1, 15)
        config = configured(
            hdf5(tmp_path, IMAGES, labels),
            classes="digits",
            partition="dirichlet",
            num_clients=num_clients,
        )
        data = split_records(config, load_records(config))
        assert (data.num_clients, data.sizes.sum()) == (num_clients, chosen)


def test_mnist_is_cut_by_its_order_alone(tmp_path):
    settings = RECORD | {"data_dir": str(tmp_path), "test_fraction": 0.3}
    write_mnist(tmp_path, IMAGES, LABELS % 10)
    before = whose(load("mnist", **settings))
    labels = LABELS % 10
    labels[4] = (labels[4] + 1) % 10
    write_mnist(tmp_path, IMAGES, labels)
    assert whose(load("mnist", **settings)) == before
