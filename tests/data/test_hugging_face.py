"""`hf:NAME`: columns, splits and the partitioners of flwr-datasets, on local files."""

import numpy as np
import pytest
from PIL import Image

from fedgs.config.recipes import HELD_OUT
from fedgs.data.load import load_test_data
from fedgs.data.sources import has_test_split
from fedgs.round.preparation import with_held_out
from loading import configured, load, refused
from refusals import assert_refused

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("hub_cache")

PIXELS = np.random.default_rng(0).integers(256, size=(40, 28, 28), dtype=np.uint8)
LABELS = [number % 4 for number in range(40)]
OWNERS = [f"owner {number % 3}" for number in range(40)]
COLUMNS = {
    "img": datasets.Image(),
    "fine": datasets.ClassLabel(names=["a", "b", "c", "d"]),
    "owner": datasets.Value("string"),
    "number": datasets.Value("int64"),
}


def write(folder, split="train", count=40, columns=COLUMNS, **changes):
    values = {
        "img": [Image.fromarray(pixels) for pixels in PIXELS[:count]],
        "fine": LABELS[:count],
        "owner": OWNERS[:count],
        "number": [*range(count)],
        **changes,
    }
    table = datasets.Dataset.from_dict(
        {name: values[name] for name in columns}, features=datasets.Features(columns)
    )
    folder.mkdir(exist_ok=True)
    table.to_parquet(folder / f"{split}.parquet")
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    write(folder, "test", 8)
    return write(folder)


def images_of(data):
    """Which of PIXELS each client has."""
    known = {pixels.tobytes(): number for number, pixels in enumerate(PIXELS)}
    return [
        [known[image.tobytes()] for image in data.images[own, 0]]
        for own in data.client_records
    ]


def by(source, partitioner, options):
    return f"{source}?partitioner={partitioner}Partitioner&{options}"


PATHOLOGICAL = "num_partitions=4&num_classes_per_partition=1"
PATHOLOGICAL += "&class_assignment_mode=deterministic"


# ------------------------------------------------------------------ columns and splits


def test_columns_are_found_by_type_and_clients_need_a_number(source, tmp_path):
    data = load(source, num_clients=4)
    assert (data.num_classes, data.sizes.tolist()) == (4, [10] * 4)
    assert (data.images[:, 0] == PIXELS).all()
    assert data.labels.tolist() == LABELS
    refused("give --num-clients", source)
    unlabelled = write(tmp_path, columns={"img": datasets.Image()})
    assert load(unlabelled, num_clients=2).num_classes == 1
    assert_refused("^data = 'hf:", load_test_data, configured(unlabelled))


def test_columns_split_and_classes_are_taken_by_name(source):
    data = load(f"{source}?client=owner", classes="d,c,b,a,e")
    assert data.client_names == ("owner 0", "owner 1", "owner 2")
    assert images_of(data)[1] == list(range(1, 40, 3))
    assert data.num_classes == 5
    first = data.client_records[0]
    assert data.labels[first].tolist() == [3 - LABELS[n] for n in range(0, 40, 3)]
    numbers, given = f"{source}?label=number&split=test", {"num_clients": 2}
    assert load(numbers, **given).labels.tolist() == list(range(8))
    refused("classes = 'a,b': ", numbers, classes="a,b", **given)


def test_split_test_is_the_test_split_and_is_not_partitioned(source):
    for name in (source, by(source, "Size", "partition_sizes=[30,10]")):
        images, labels = load_test_data(configured(name))
        assert labels.tolist() == LABELS[:8]
        assert (np.rint(images[:, 0] * 255) == PIXELS[:8]).all()


def test_whether_there_is_a_test_split_decides_what_is_held_out(source, tmp_path):
    alone = write(tmp_path)
    named = f"{alone}?test_split=no"  # which the user says is there
    found = [has_test_split(configured(name)) for name in (source, alone, named)]
    assert found == [True, False, True]
    config = configured(alone, num_clients=4)
    assert with_held_out(config, ()).test_fraction == HELD_OUT
    assert with_held_out(configured(source), ()).test_fraction == 0


def test_folders_of_pictures_are_labelled_by_name(tmp_path):
    """Not those of their order, which another client's folder would change."""
    for folder in ("cat", "dog"):
        (tmp_path / "train" / folder).mkdir(parents=True)
        Image.fromarray(PIXELS[0]).save(tmp_path / "train" / folder / "1.png")
    data = load(f"hf:{tmp_path}", num_clients=1, classes="dog,cat")
    assert data.labels.tolist() == [1, 0]
    refused(r"give --classes 'cat,dog'", f"hf:{tmp_path}", num_clients=1)


# ------------------------------------------------------------------ partitioners


@pytest.mark.parametrize(
    ("partitioner", "options", "sizes"),
    [
        ("Size", "partition_sizes=[1,30,9]", [1, 30, 9]),
        ("Pathological", PATHOLOGICAL, [10] * 4),
    ],
)
def test_every_image_goes_to_one_client(source, partitioner, options, sizes):
    data = load(by(source, partitioner, options))
    assert data.sizes.tolist() == sizes
    owned = sorted(number for own in images_of(data) for number in own)
    assert owned == list(range(40))
    if partitioner == "Pathological":  # labels decide by default
        assert {len({*data.labels[own]}) for own in data.client_records} == {1}


def test_partitioners_draw_by_the_runs_seed_unless_another_is_given(source):
    options = "num_partitions=4&alpha=1&min_partition_size=1"
    unset, same, other = (
        images_of(load(by(source, "Dirichlet", options + seed)))
        for seed in ("", "&seed=0", "&seed=1")
    )
    assert unset == same
    assert unset != other
    three = by(source, "Iid", "num_partitions=3")  # shuffled before they are dealt
    first, second = (load(three, seed=seed) for seed in (0, 1))
    assert images_of(first) != images_of(second)
    assert first.client_names == ("0", "1", "2")


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("image=no", "0 columns of pictures fit, among img, fine"),
        ("split=no", "has no split 'no', it has train, test"),
        ("columns=a", "columns is unknown; give image, label, client, split"),
        ("client=owner&partitioner=IidPartitioner", "leave one of the two out"),
        ("partitioner=VerticalEvenPartitioner", "give a class .* that deals rows"),
        ("partitioner=IidPartitioner&n=3", "'n'.; IidPartitioner takes num_part"),
    ],
)
def test_options_that_do_not_suit_are_refused(source, query, message):
    refused(message, f"{source}?{query}", num_clients=1)


def test_a_partition_beside_a_partitioner_is_refused():
    source = "hf:x?partitioner=IidPartitioner"
    assert_refused("partition = 'iid':", configured, source, partition="iid")


def test_missing_data_set_is_not_looked_for_on_the_network(tmp_path, monkeypatch):
    def connect(*address, **_):
        asked.append(address)
        raise OSError("no network")

    asked = []
    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    words = r"no/such cannot be read .*; add --download"
    refused(words, "hf:no/such", data_dir=str(tmp_path))
    assert not asked
    monkeypatch.setattr("datasets.load_dataset", connect)
    settings = {"download": True, "data_dir": str(tmp_path)}
    refused(r"download = True: no/such .*no network", "hf:no/such", **settings)
