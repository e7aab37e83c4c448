"""Federated EMNIST: three formats, one result; background, classes, test file."""

import shutil
import tracemalloc

import h5py
import numpy as np
import pytest

import femnist_files as files
from fedgs.data.load import load_test_data
from fedgs.data.readers.femnist import class_map, read
from fedgs.data.records import DataWarning
from loading import configured, load, refused
from refusals import assert_refused

pytestmark = pytest.mark.usefixtures("hub_cache")

USERS = sorted(files.WRITERS)
FORMATS = ("hdf5", "leaf", "hub")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same writers in each format: the settings `data`."""
    root = tmp_path_factory.mktemp("femnist")
    return {
        "hdf5": files.write_hdf5(root / "fed_emnist_train.h5"),
        "leaf": files.write_leaf(root / "leaf"),
        "hub": files.write_hub(root / "hub"),
    }


# ------------------------------------------------------------------ one result


def test_the_writers_images_are_inverted(sources):
    data = load(sources["hdf5"])
    assert data.images.dtype == np.uint8
    assert data.client_names == tuple(USERS)
    assert data.num_classes == 62
    for client_id, user in enumerate(USERS):
        records = data.client_records[client_id]
        assert (data.images[records, 0] == 255 - files.paper(user)).all()
        assert data.labels[records].tolist() == files.WRITERS[user]


def test_a_file_is_read_one_writer_after_another(tmp_path):
    """Memory holds all images once and the floats of one writer, not of everybody."""
    writers = {f"f{number:04}_00": [number % 62] * 100 for number in range(80)}
    config = configured(files.write_hdf5(tmp_path / "x.h5", writers))
    tracemalloc.start()
    records = read(config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert records.images.nbytes == 80 * 100 * 28 * 28
    assert peak < 1.3 * records.images.nbytes


@pytest.mark.filterwarnings("ignore::fedgs.data.records.DataWarning")
@pytest.mark.parametrize(
    "settings", [{}, {"image_size": 32}, {"classes": "digits"}, {"background": "dark"}]
)
def test_all_three_loaders_give_identical_arrays(sources, settings):
    """TFF's HDF5, LEAF's JSON, the hub through flwr-datasets: one fixture."""
    first, *others = (load(sources[n], **settings) for n in FORMATS)
    for other in others:
        assert (first.images == other.images).all()
        assert (first.labels == other.labels).all()
        assert first.client_names == other.client_names
        assert [*map(list, first.client_records)] == [*map(list, other.client_records)]


def test_gzipped_pixels_and_labels_in_a_column_are_read(tmp_path, sources):
    data = files.write_hdf5(tmp_path / "z.h5", compression="gzip")
    with h5py.File(tmp_path / "z.h5", "r+") as file:
        pixels = file["examples/f0000_14/pixels"]
        pixels[...] = pixels[...] + 0.4 / 255 * (pixels[...] < 0.9)  # is rounded
        labels = file["examples/f0000_14/label"][()][:, None]
        del file["examples/f0000_14/label"]
        file["examples/f0000_14/label"] = labels
    for name in ("images", "labels"):
        expected = getattr(load(sources["hdf5"]), name)
        assert (getattr(load(data), name) == expected).all()


def test_hub_data_set_is_read_from_the_cache_without_network(
    tmp_path, sources, monkeypatch
):
    """The cache is laid out as a download leaves it; Flower's makers hear nothing."""
    monkeypatch.setattr("flwr_datasets.federated_dataset.event", pytest.fail)
    load(sources["hub"], data_dir=str(tmp_path / "local"))
    (built,) = (tmp_path / "local/hub/default/0.0.0").glob("*[0-9a-f]")
    downloaded = tmp_path / "cache/flwrlabs___femnist/default/0.0.0" / built.name
    shutil.copytree(built, downloaded)
    (downloaded / "hub-train.arrow").rename(downloaded / "femnist-train.arrow")
    data = load("femnist", data_dir=str(tmp_path / "cache"))
    assert (data.images == load(sources["hub"]).images).all()
    copy = load("femnist", data_dir=sources["hub"].removeprefix("femnist:"))
    assert (data.images == copy.images).all()  # of the hub's repository


# ------------------------------------------------------------------ background


def test_declared_dark_background_overrides_and_warns(sources):
    with pytest.warns(DataWarning, match="border pixels look like light"):
        data = load(sources["leaf"], background="dark")
    assert (data.images[data.client_records[0], 0] == files.paper("f0000_14")).all()


# ------------------------------------------------------------------ classes


@pytest.mark.parametrize(
    ("classes", "count", "expected"),  # of the labels 0, 9, 10, 35, 36 and 61
    [
        ("all", 62, [0, 9, 10, 35, 36, 61]),
        ("merged", 36, [0, 9, 10, 35, 10, 35]),
        ("digits", 10, [0, 9, -1, -1, -1, -1]),
        ("letters", 52, [-1, -1, 0, 25, 26, 51]),
        ("merged-letters", 26, [-1, -1, 0, 25, 0, 25]),
    ],
)
def test_class_maps(classes, count, expected):
    found = class_map(classes)
    assert found[[0, 9, 10, 35, 36, 61]].tolist() == expected
    assert set(found) - {-1} == set(range(count))


def test_users_without_images_of_the_classes_keep_their_places(sources, tmp_path):
    with pytest.warns(DataWarning, match=r"1 of 4 users have no images .*\(f0002_30\)"):
        data = load(sources["hub"], classes="digits")
    assert data.client_names == ("f0000_14", "f0001_41", "f0002_30", "f0010_07")
    assert data.sizes.tolist() == [1, 1, 0, 5]
    assert data.num_classes == 10
    own = np.concatenate(data.client_records)
    assert data.labels[own].tolist() == [0, 9, 3, 3, 3, 5, 7]
    expected = 255 - files.paper("f0010_07")[[0, 1, 2, 5, 6]]
    assert (data.images[own[2:], 0] == expected).all()
    nobody = files.write_hdf5(tmp_path / "x", writers={"f0002_30": [50]})
    with pytest.warns(DataWarning, match="1 of 1 users have no images"):
        refused("none of its 1 users has an image", nobody, classes="digits")


def test_classes_of_other_data_are_refused():
    for data, classes, words in (
        ("mnist", "digits", "only femnist.*'mnist'"),
        ("femnist", "cat,dog", "give .* all, merged"),
    ):
        words = f"classes = '{classes}': {words}"
        assert_refused(words, configured, data, classes=classes)


# ------------------------------------------------------------------ test split


def test_test_file_beside_the_train_file_is_the_test_split(tmp_path):
    writers = {"f0001_41": [9, 35]}
    data = files.write_hdf5(tmp_path / "fed_emnist_train.h5")
    files.write_hdf5(tmp_path / "fed_emnist_test.h5", writers)
    images, labels = load_test_data(configured(data))
    assert labels.tolist() == [9, 35]
    assert (np.rint(images[:, 0] * 255) == 255 - files.paper("f0001_41")).all()
    (tmp_path / "fed_emnist_test.h5").unlink()
    words = "has no test split, .* with --test-fr"
    assert_refused(words, load_test_data, configured(data))
