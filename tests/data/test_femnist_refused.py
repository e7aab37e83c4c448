"""Federated EMNIST that cannot be used: refused by file, user and image."""

import json
import sys

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import femnist_files as files
from fedgs.errors import UserError
from loading import load, refused

datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.usefixtures("hub_cache"),
    pytest.mark.filterwarnings("ignore::fedgs.data.records.DataWarning"),
]

# ------------------------------------------------------------------ damaged bytes

FORMATS = {
    "hdf5": lambda root: files.write_hdf5(root / "x.h5", compression="gzip"),
    "leaf": files.write_leaf,
}


@pytest.fixture(scope="module", params=FORMATS)
def stored(request, tmp_path_factory):
    """A data set: its setting, the file that is damaged, its bytes, what it holds."""
    root = tmp_path_factory.mktemp("femnist")
    data = FORMATS[request.param](root)
    (path, *_) = sorted(path for path in root.rglob("*") if path.is_file())
    return data, path, path.read_bytes(), load(data)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.floats(0, 0.999),
    cut=st.integers(0, 9) | st.just(10**9),
    put=st.binary(max_size=4),
)
@example(place=0.0, cut=10**9, put=b"")
@example(place=0.0, cut=10**9, put=b"no data")
@example(place=0.5, cut=10**9, put=b"")
def test_damaged_bytes_are_refused_or_read_as_images_of_the_format(
    stored, place, cut, put
):
    """Neither format has a hash: a digit of a pixel may change, its range may not."""
    data, path, whole, before = stored
    start = int(place * len(whole))
    path.write_bytes(whole[:start] + put + whole[start + cut :])
    try:
        found = load(data)
    except UserError:
        pass
    else:
        assert found.images.dtype == np.uint8
        assert found.images.shape[1:] == before.images.shape[1:]
        assert found.num_classes == before.num_classes
        assert ((found.labels >= 0) & (found.labels < 62)).all()
    finally:
        path.write_bytes(whole)


# ------------------------------------------------------------------ other content


def put_hdf5(name, value):
    """Replaces a user's array, or the whole user; None leaves it out."""

    def change(root):
        data = files.write_hdf5(root / "bad.h5")
        with h5py.File(root / "bad.h5", "r+") as file:
            del file[name]
            if value is not None:
                file[name] = value
        return data

    return change


def put_leaf(**changes):
    """Replaces lists of a user, or those of the file: users, num_samples, user_data."""

    def change(root):
        data, path = files.write_leaf(root), root / "all_data_0.json"
        content = json.loads(path.read_text())
        for name, value in changes.items():
            own = content if name in content else content["user_data"]["f0010_07"]
            own[name] = value(own[name]) if callable(value) else value
        path.write_text(json.dumps(content))
        return data

    return change


def with_one(index, value):
    """Replaces one item of a list."""
    return lambda items: [*items[:index], value, *items[index + 1 :]]


def pixels(value):
    pixels = np.ones((2, 28, 28), np.float32)
    pixels[1, 5, 5] = value
    return pixels


OWN = "examples/f0001_41"
USER = r"bad\.h5: user f0001_41"
LEAF_USER = r"all_data_0\.json: user f0010_07"
LAYOUT = f"{LEAF_USER} is not of LEAF's layout"
BAD = [
    (put_hdf5("examples", None), "TFF's layout is examples/USER/pixels"),
    (put_hdf5(f"{OWN}/label", None), "user f0001_41 has no label"),
    (put_hdf5(f"{OWN}/pixels", np.ones((2, 784))), r"shape \(2, 784\); give"),
    (put_hdf5(f"{OWN}/pixels", pixels(np.nan)), f"{USER}: image 1 has values"),
    (put_hdf5(f"{OWN}/pixels", pixels(1)[:0]), "has no images; leave this user out"),
    (put_hdf5(f"{OWN}/label", h5py.Empty("i4")), r"label has shape \(\)"),
    (put_hdf5(f"{OWN}/label", np.array([1, 62])), f"{USER}: image 1 has the label 62"),
    (lambda root: f"femnist:{root}", "holds neither all_data_"),
    (put_leaf(num_samples=with_one(0, 6)), "7 labels and num_samples 6"),
    (put_leaf(y=lambda labels: labels[:-1]), f"{LEAF_USER}: it has 6 labels"),
    *[
        (put_leaf(x=with_one(2, image)), LAYOUT)
        for image in ([1.0] * 783, [[], [1.0]], [10**400] * 784)
    ],
    (put_leaf(x=with_one(2, [np.nan] * 784)), f"{LEAF_USER}: image 2 has values"),
    (put_leaf(y=with_one(3, 10**30)), f"{LEAF_USER}: label has .* type object"),
    (
        lambda root: files.write_leaf(root, files=((0, 1), (1, 2))),
        r"_1\.json: user f0001_41 is in .*_0\.json",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_content_is_refused_by_file_user_and_index(tmp_path, make, message):
    refused(message, make(tmp_path))


@pytest.mark.parametrize(
    ("module", "write", "command"),
    [
        ("h5py", files.write_hdf5, "needs h5py; run `pip install h5py`"),
        ("flwr_datasets", files.write_hub, "pip install --no-deps flwr-datasets=="),
    ],
)
def test_missing_package_says_what_to_install(
    tmp_path, monkeypatch, module, write, command
):
    data = write(tmp_path / "data")
    monkeypatch.setitem(sys.modules, module, None)
    refused(command, data)


# ------------------------------------------------------------------ bad hub files


def test_uncached_hub_data_set_names_both_remedies(tmp_path):
    words = (
        r"flwrlabs/femnist cannot be read from the Hugging Face cache[^$]*--download"
    )
    refused(words, "femnist", data_dir=str(tmp_path))


def test_damaged_or_other_parquet_is_refused(tmp_path):
    data = files.write_hub(tmp_path / "a")
    (path,) = tmp_path.rglob("*.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    refused("cannot be read", data)
    rows = datasets.Dataset.from_dict({"image": [1], "writer": ["a"]})
    (tmp_path / "b").mkdir()
    rows.to_parquet(tmp_path / "b" / "train.parquet")
    refused("data = .* character, writer_id", f"femnist:{tmp_path / 'b'}")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("character", 62, "f0001_41: image 1: it has the label 62"),
        ("image", {"bytes": b"no picture", "path": None}, "cannot be read as a pict"),
        ("image", None, "client f0001_41: image 1: it is missing"),
    ],
)
def test_bad_hub_row_is_named(tmp_path, column, value, message):
    rows = files.hub_rows()
    rows[column][5] = value
    data = files.write_hub(tmp_path, rows, names=[*files.CLASS_NAMES, "of no class"])
    refused(message, data)
