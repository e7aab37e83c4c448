"""The public archive of chest radiographs: its layout, its patients, its mistakes."""

import numpy as np
import pytest
from PIL import Image

from fedgs.config.recipes import OWNERS_HELD_OUT, overridden, recipe
from fedgs.data.load import load_test_data
from fedgs.round.preparation import with_held_out
from loading import configured, load, refused

PIXELS = np.random.default_rng(0).integers(256, size=(9, 60, 80), dtype=np.uint8)
FILES = (
    "NORMAL/IM-0001-0001.jpeg",
    "NORMAL/IM-0001-0001-0002.jpeg",
    "NORMAL/NORMAL2-IM-0001-0001.jpeg",
    "PNEUMONIA/person1_bacteria_1.jpeg",
    "PNEUMONIA/person1_bacteria_2.jpeg",
    "PNEUMONIA/person1_virus_6.jpeg",
    "PNEUMONIA/person447_virus_921_1.jpeg",
)
BY_PATIENT = {
    "IM-0001": [0, 0],
    "NORMAL2-IM-0001": [0],
    "person1": [1, 1, 2],
    "person447": [2],
}


def save(root, *names):
    for name, pixels in zip(names, PIXELS, strict=False):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def labels_of(data):
    return {
        name: data.labels[own].tolist()
        for name, own in zip(data.client_names, data.client_records, strict=True)
    }


@pytest.mark.parametrize("folder", ["ChestXRay", "chest_xray", "."])
def test_owners_are_patients_and_classes_are_of_names(tmp_path, folder):
    save(tmp_path / folder, *FILES)
    (tmp_path / folder / "NORMAL/.DS_Store").write_text("")
    data = load("chest-xray", data_dir=str(tmp_path))
    assert labels_of(data) == BY_PATIENT
    assert data.num_classes == 3
    assert data.images.shape == (7, 1, 28, 28)  # of 80 x 60 pixels
    assert not data.images[:, :, :3].any()  # what pad adds


def test_splits_of_the_archive_are_read_as_one(tmp_path):
    for split, files in zip(
        ("train", "test", "val"), (FILES[:3], FILES[3:5], FILES[5:]), strict=True
    ):
        save(tmp_path / split, *files)
    assert labels_of(load(f"chest-xray:{tmp_path}")) == BY_PATIENT


def test_a_class_that_nobody_has_is_a_class(tmp_path):
    save(tmp_path, *FILES[:3])
    assert load(f"chest-xray:{tmp_path}").num_classes == 3


BAD = {
    "bacteria among the normal": (["NORMAL/person1_bacteria_1.jpeg"], "NORMAL by its"),
    "normal among pneumonia": (["PNEUMONIA/IM-0001-0001.jpeg"], "PNEUMONIA by its"),
    "no kind": (["PNEUMONIA/person1_1.jpeg"], "person1_1.jpeg: .* give person12_"),
    "two of one name": (
        ["train/NORMAL/IM-0001-0001.jpeg", "test/NORMAL/IM-0001-0001.jpeg"],
        "has the name of .*remove one of them",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_name_that_contradicts_is_refused(tmp_path, bad):
    names, words = BAD[bad]
    save(tmp_path, *names)
    refused(words, f"chest-xray:{tmp_path}")


def test_no_archive_is_refused(tmp_path):
    refused("data_dir is unset: .*--data-dir", "chest-xray")
    refused("data_dir = ", "chest-xray", data_dir=str(tmp_path))
    refused(f"data = 'chest-xray:{tmp_path}': ", f"chest-xray:{tmp_path}")
    (tmp_path / "NORMAL").mkdir()
    refused(f"data = 'chest-xray:{tmp_path}': ", f"chest-xray:{tmp_path}")
    colour = np.random.default_rng(0).integers(256, size=(30, 30, 3), dtype=np.uint8)
    Image.fromarray(colour).save(tmp_path / "NORMAL/IM-0001-0001.jpeg")
    refused("IM-0001-0001.jpeg: it is in colour", f"chest-xray:{tmp_path}")


def test_patients_are_held_out_by_default(tmp_path):
    config = overridden(recipe("moments"), {"data": "chest-xray"})
    held = with_held_out(config, ())
    assert (held.test_owners, held.test_fraction) == (OWNERS_HELD_OUT, 0)
    given = overridden(config, {"test_fraction": 0.3})
    held = with_held_out(given, ("test_fraction",))
    assert (held.test_owners, held.test_fraction) == (0, 0.3)


def test_the_archive_itself(data_dir):
    """Published numbers: 5,856 images; 1,583 normal, 2,780 of bacteria, 1,493 virus."""
    if not (data_dir / "ChestXRay").is_dir():
        pytest.skip("needs the X-rays: FEDGS_DATA_DIR/ChestXRay/{NORMAL,PNEUMONIA}")
    settings = {"data_dir": str(data_dir), "test_owners": 0.2}
    data = load("chest-xray", **settings)
    assert data.num_clients + len(data.test_owners) == 3118
    assert abs(len(data.test_owners) - 0.2 * 3118) < 5 * np.sqrt(3118 * 0.16)
    assert np.bincount(data.labels).tolist() == [1583, 2780, 1493]
    images, _ = load_test_data(configured("chest-xray", **settings))
    assert len(images) == 5856 - data.sizes.sum()
