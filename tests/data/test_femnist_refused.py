"""Federated EMNIST that cannot be used: refused by file, user and image."""

import json
import sys

import h5py
import numpy as np
import pytest

import femnist_files as files
from fedgs.errors import UserError
from loading import load, refused

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("hub_cache")


# ------------------------------------------------------------------ bad HDF5


def break_hdf5(change):
    def broken(tmp_path):
        data = files.write_hdf5(tmp_path / "bad.h5")
        with h5py.File(tmp_path / "bad.h5", "r+") as file:
            change(file)
        return data

    return broken


def replace_hdf5(name, value):
    def change(file):
        del file[f"examples/f0001_41/{name}"]
        if value is not None:
            file[f"examples/f0001_41/{name}"] = value

    return break_hdf5(change)


def put(group, name, value):
    """Replaces what has that name, by an empty group where the value is None."""
    if name in group:
        del group[name]
    if value is None:
        group.create_group(name)
    else:
        group[name] = value


def truncated_hdf5(tmp_path):
    data = files.write_hdf5(tmp_path / "bad.h5")
    content = (tmp_path / "bad.h5").read_bytes()
    (tmp_path / "bad.h5").write_bytes(content[: len(content) // 2])
    return data


def text_as_hdf5(tmp_path):
    (tmp_path / "bad.h5").write_text("no HDF5")
    return f"femnist:{tmp_path / 'bad.h5'}"


def damaged_hdf5(tmp_path):
    """Overwrites the compressed pixels of one user."""
    data = files.write_hdf5(tmp_path / "bad.h5", compression="gzip")
    with h5py.File(tmp_path / "bad.h5") as file:
        chunk = file["examples/f0001_41/pixels"].id.get_chunk_info(0)
    with open(tmp_path / "bad.h5", "r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(bytes(chunk.size))
    return data


def pixels_with(value):
    pixels = np.ones((2, 28, 28), np.float32)
    pixels[1, 5, 5] = value
    return pixels


USER = r"bad\.h5: user f0001_41"
BAD_HDF5 = {
    "missing file": (lambda path: f"femnist:{path}/no.h5", "no.h5 does not exist"),
    "text": (text_as_hdf5, r"bad\.h5: cannot be read as HDF5"),
    "truncated": (truncated_hdf5, r"bad\.h5: cannot be read as HDF5 .*truncated"),
    "damaged": (damaged_hdf5, f"{USER}: is damaged"),
    "other layout": (
        break_hdf5(lambda file: file.move("examples", "data")),
        "holds data; TFF's layout is examples/USER/pixels",
    ),
    "no users": (
        break_hdf5(lambda file: file["examples"].clear()),
        "TFF's layout is examples/USER/pixels",
    ),
    "no pixels": (replace_hdf5("pixels", None), f"{USER.split()[1]}.* has no pixels"),
    "no label": (replace_hdf5("label", None), "user f0001_41 has no label"),
    "flat": (replace_hdf5("pixels", np.ones((2, 784))), r"shape \(2, 784\); give"),
    "integers": (
        replace_hdf5("pixels", np.ones((2, 28, 28), np.uint8)),
        f"{USER}: pixels has type uint8",
    ),
    "NaN": (replace_hdf5("pixels", pixels_with(np.nan)), f"{USER}: image 1 has values"),
    "above 1": (replace_hdf5("pixels", pixels_with(1.1)), f"{USER}: image 1 has val"),
    "below 0": (replace_hdf5("pixels", pixels_with(-0.1)), f"{USER}: image 1 has val"),
    "float label": (replace_hdf5("label", np.ones(2)), f"{USER}: label has shape"),
    "user an array": (
        break_hdf5(lambda file: put(file["examples"], "f0001_41", np.ones(3))),
        "user f0001_41 has no pixels",
    ),
    "pixels a group": (
        break_hdf5(lambda file: put(file["examples/f0001_41"], "pixels", None)),
        "user f0001_41 has no pixels .*; TFF's layout",
    ),
    "label a group": (
        break_hdf5(lambda file: put(file["examples/f0001_41"], "label", None)),
        "user f0001_41 has no label .*; TFF's layout",
    ),
    "label without a space": (
        replace_hdf5("label", h5py.Empty("i4")),
        r"user f0001_41: label has shape \(\)",
    ),
    "dangling": (
        break_hdf5(lambda file: put(file["examples"], "x", h5py.SoftLink("/none"))),
        "user x has no pixels|cannot be read as HDF5",
    ),
    "user without images": (
        replace_hdf5("pixels", np.ones((0, 28, 28), np.float32)),
        f"{USER}: has no images; leave this user out",
    ),
    "few labels": (replace_hdf5("label", np.ones(1, int)), r"label has shape \(1,\)"),
    "label 62": (replace_hdf5("label", np.array([1, 62])), f"{USER}: image 1 has the"),
    "label -1": (replace_hdf5("label", np.array([-1, 1])), "image 0 has the label -1"),
}


@pytest.mark.parametrize("case", BAD_HDF5)
def test_bad_hdf5_is_refused_by_file_user_and_index(tmp_path, case):
    make, message = BAD_HDF5[case]
    refused(message, make(tmp_path))


@pytest.mark.parametrize("module", ["h5py", "flwr_datasets"])
def test_missing_package_says_what_to_install(tmp_path, monkeypatch, module):
    writers = {"h5py": files.write_hdf5, "flwr_datasets": files.write_hub}
    data = writers[module](tmp_path / "data")
    monkeypatch.setitem(sys.modules, module, None)
    commands = {
        "h5py": "needs h5py; run `pip install h5py`",
        "flwr_datasets": "pip install --no-deps flwr-datasets==0.6.0",
    }
    refused(commands[module], data)


# ------------------------------------------------------------------ bad LEAF


def break_leaf(change):
    def broken(tmp_path):
        data = files.write_leaf(tmp_path)
        path = tmp_path / "all_data_0.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        return data

    return broken


def set_leaf(name, index, value):
    def change(content):
        content["user_data"]["f0010_07"][name][index] = value

    return break_leaf(change)


def put_leaf(**lists):
    return break_leaf(lambda content: content["user_data"]["f0010_07"].update(lists))


def truncated_leaf(tmp_path):
    data = files.write_leaf(tmp_path)
    path = tmp_path / "all_data_0.json"
    path.write_text(path.read_text()[:-20])
    return data


def binary_leaf(tmp_path):
    (tmp_path / "all_data_0.json").write_bytes(b"\xff\xfe\x00")
    return f"femnist:{tmp_path}"


LISTS = ("users", "num_samples")
LEAF_USER = r"all_data_0\.json: user f0010_07"
BAD_LEAF = {
    "empty folder": (lambda path: f"femnist:{path}", "holds neither all_data_"),
    "truncated": (truncated_leaf, r"all_data_0\.json: cannot be read as JSON"),
    "binary": (binary_leaf, r"all_data_0\.json: cannot be read as JSON"),
    "list": (
        lambda path: (path / "all_data_0.json").write_text("[1]") and f"femnist:{path}",
        r"all_data_0\.json: is not of LEAF's layout",
    ),
    "no user_data": (
        break_leaf(lambda content: content.pop("user_data")),
        r"not of LEAF's layout \('user_data'\)",
    ),
    "user without data": (
        break_leaf(lambda content: content["user_data"].pop("f0010_07")),
        r"not of LEAF's layout \('f0010_07'\)",
    ),
    "other num_samples": (
        break_leaf(lambda content: content["num_samples"].__setitem__(0, 6)),
        f"{LEAF_USER}: has 7 images, 7 labels and num_samples 6",
    ),
    "few num_samples": (
        break_leaf(lambda content: content["num_samples"].pop()),
        "not of LEAF's layout .*users, num_samples",
    ),
    "a user twice": (
        break_leaf(lambda content: [content[k].append(content[k][0]) for k in LISTS]),
        r"user f0010_07 is in .*all_data_0\.json too; give",
    ),
    "few labels": (
        break_leaf(lambda content: content["user_data"]["f0010_07"]["y"].pop()),
        f"{LEAF_USER}: has 7 images, 6 labels",
    ),
    "short image": (set_leaf("x", 2, [1.0] * 783), f"{LEAF_USER}: image 2 is no list"),
    "no image": (set_leaf("x", 2, None), f"{LEAF_USER}: image 2 is no list of 784"),
    "text": (set_leaf("x", 2, ["1.0"] * 784), f"{LEAF_USER}: image 2 is no list"),
    "NaN": (set_leaf("x", 2, [float("nan")] * 784), f"{LEAF_USER}: image 2 has values"),
    "label 62": (set_leaf("y", 3, 62), f"{LEAF_USER}: image 3 has the label 62"),
    "text label": (set_leaf("y", 3, "a"), f"{LEAF_USER}: image 3 has the label a"),
    "huge label": (set_leaf("y", 3, 10**30), f"{LEAF_USER}: image 3 has the label 1"),
    "list as label": (set_leaf("y", 3, [1]), f"{LEAF_USER}: image 3 has the label"),
    "a null": (set_leaf("x", 2, [1.0] * 783 + [None]), f"{LEAF_USER}: image 2 is no"),
    "ragged": (set_leaf("x", 2, [[1.0], [1.0, 2.0]]), f"{LEAF_USER}: image 2 is no"),
    "x a number": (put_leaf(x=3), f"{LEAF_USER} is not of LEAF's layout"),
    "y null": (put_leaf(y=None), f"{LEAF_USER} is not of LEAF's layout"),
    "user a list": (
        break_leaf(lambda content: content["user_data"].update(f0010_07=[1])),
        f"{LEAF_USER} is not of LEAF's layout",
    ),
    "user a number": (
        break_leaf(lambda content: content["users"].__setitem__(0, 3)),
        r"not of LEAF's layout \(3\)",
    ),
    "user without images": (
        put_leaf(x=[], y=[]),
        f"{LEAF_USER}: has 0 images, 0 labels and num_samples 7",
    ),
}


@pytest.mark.parametrize("case", BAD_LEAF)
def test_bad_leaf_is_refused_by_file_user_and_index(tmp_path, case):
    make, message = BAD_LEAF[case]
    refused(message, make(tmp_path))


def test_user_in_two_leaf_files_is_refused(tmp_path):
    data = files.write_leaf(tmp_path, files=((0, 1), (1, 2)))
    refused(r"_1\.json: user f0001_41 is in .*_0\.json", data)


# ------------------------------------------------------------------ bad hub files


def test_uncached_hub_data_set_names_both_remedies(tmp_path):
    with pytest.raises(UserError) as caught:
        load("femnist", data_dir=str(tmp_path))
    message = str(caught.value)
    assert "flwrlabs/femnist cannot be read from the Hugging Face cache" in message
    assert "--download" in message
    assert message.count("\n") == 1


def test_damaged_parquet_is_refused(tmp_path):
    data = files.write_hub(tmp_path)
    (path,) = tmp_path.rglob("*.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    refused("cannot be read", data)


def test_other_columns_are_refused(tmp_path):
    rows = datasets.Dataset.from_dict({"image": [1], "writer": ["a"]})
    rows.to_parquet(tmp_path / "train.parquet")
    refused("has no column character, writer_id", f"femnist:{tmp_path}")


@pytest.mark.parametrize("label", [62, -1])
def test_unknown_hub_label_is_named(tmp_path, label):
    data = files.write_hub(tmp_path)
    (path,) = tmp_path.rglob("*.parquet")
    rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    rows = rows.cast_column("character", datasets.Value("int64"))
    labels = [*rows["character"]]
    labels[5] = label
    rows = rows.remove_columns("character").add_column("character", labels)
    rows.to_parquet(path)
    refused(f"f0001_41: image 1: has the label {label}", data)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (b"no picture", "client f0001_41: image 1: cannot be read as a picture"),
        (files.hub_rows()["image"][0]["bytes"][:60], "image 1: cannot be read"),
        (None, "client f0001_41: image 1: is missing"),
    ],
)
def test_unreadable_hub_picture_is_named(tmp_path, picture, message):
    rows = files.hub_rows()
    rows["image"][5] = None if picture is None else {"bytes": picture, "path": None}
    refused(message, files.write_hub(tmp_path, rows))


def test_hub_picture_of_another_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "paper", lambda user: np.full((7, 30, 30), 9, np.uint8))
    monkeypatch.setattr(files, "WRITERS", {"a": [1] * 7})
    data = files.write_hub(tmp_path, files.hub_rows(files.WRITERS))
    refused("client a: image 0: has 30 x 30 pixels", data)
