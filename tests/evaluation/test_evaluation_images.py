"""Sources of images: npz files good and bad, yardsticks, what does not fit."""

import re
from pathlib import Path

import numpy as np
import pytest

from evaluation_data import labelled, write_mnist
from fedgs.config.run_config import RunConfig
from fedgs.evaluation import images
from fedgs.evaluation.images import LabelledImages, RealImages
from refusals import assert_refused
from tiny import run_config

FLOATS = np.full((12, 16, 16), 0.5, np.float32)
LABELS = np.arange(12) % 3


def write(path: Path, **arrays: object) -> Path:
    np.savez(path, **{name: x for name, x in arrays.items() if x is not None})
    return path


@pytest.mark.parametrize("shape", [(12, 16, 16), (12, 1, 16, 16), (12, 3, 16, 16)])
def test_floats_and_bytes_are_the_same_images(tmp_path, shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    bytes_path = write(tmp_path / "a.npz", images=pixels, labels=LABELS)
    floats = pixels / 255
    floats_path = write(tmp_path / "b.npz", images=floats, labels=LABELS, more=LABELS)
    found = [images.read_npz(path) for path in (bytes_path, floats_path)]
    assert found[0].images.shape == (12, shape[1] if len(shape) == 4 else 1, 16, 16)
    assert found[0].images.dtype == found[1].images.dtype == np.float32
    np.testing.assert_allclose(found[0].images, found[1].images, atol=1e-7)
    assert found[0].labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": None}, "contains images; give 'images' and 'labels'"),
        ({"images": FLOATS[:, :8, :8]}, "of 8 pixels; give at least 16"),
        ({"images": FLOATS * 255}, r"values outside of \[0, 1\]; give"),
        (None, "does not exist; write it with `fedgs sample"),
    ],
)
def test_bad_file_is_refused(tmp_path, changes, said):
    path = tmp_path / "bad.npz"
    if changes is not None:
        write(path, **{"images": FLOATS, "labels": LABELS} | changes)
    assert_refused(re.escape(str(path)) + ":? .*" + said, images.read_npz, path)


def config(folder: Path, **settings: object) -> RunConfig:
    return run_config(data="mnist", data_dir=str(folder), **settings)


def test_real_images_are_clean_complete_and_at_most_as_many_as_asked_for(tmp_path):
    write_mnist(tmp_path)
    clean = images.load_real(config(tmp_path))
    assert (len(clean.train.labels), len(clean.test.labels)) == (120, 60)
    assert clean.num_classes == 10  # MNIST's, whatever the files hold
    for part in (clean.train, clean.test):
        assert part.images.dtype == np.float32
        assert part.images.shape[1:] == (1, 28, 28)
        assert 0 <= part.images.min() < 0.2 < 0.8 < part.images.max() <= 1
    spoiled = {"corruption": "invert", "corruption_fraction": 1.0, "num_clients": 9}
    found = images.load_real(config(tmp_path, **spoiled))
    assert (found.train.images == clean.train.images).all()
    few = images.load_real(config(tmp_path), most=50).train
    assert len(few.labels) == 50
    assert min(np.bincount(few.labels)) > 5


def test_what_a_run_held_out_is_tested_on_and_not_trained_on():
    real = images.load_real(run_config(data="digits", test_fraction=0.25))
    assert (len(real.train.labels), len(real.test.labels)) == (1348, 449)
    train = {image.tobytes() for image in real.train.images}
    held_out = {image.tobytes() for image in real.test.images}
    assert len(train & held_out) < 5  # a few digits are there twice


REAL = RealImages(labelled(30, 0), labelled(20, 1), 3)


def test_yardsticks_are_what_they_are_called():
    train = images.yardstick("real", REAL, seed=0, count=100)
    assert (train.images == REAL.train.images).all()
    test = images.yardstick("real-test", REAL, seed=0, count=8)
    assert len(test.labels) == 8
    for image, label in zip(*test, strict=True):
        (row,) = np.flatnonzero((REAL.test.images == image).all((1, 2, 3)))
        assert REAL.test.labels[row] == label
    noise = images.yardstick("noise", REAL, seed=0, count=3000)
    assert noise.images.shape == (3000, 1, 16, 16)
    assert abs(noise.images.mean() - 0.5) < 0.01
    assert min(np.bincount(noise.labels, minlength=3)) > 850
    assert (images.yardstick("noise", REAL, 1, 5).images != noise.images[:5]).any()
    fonts = images.yardstick("fonts", REAL, seed=0, count=100)
    assert fonts.images.shape == (100, 1, 16, 16)
    assert len(np.unique(fonts.labels)) == 10


def test_subset_is_random_without_repetition_and_depends_on_the_seed():
    numbered = LabelledImages(np.zeros((50, 1, 2, 2), np.float32), np.arange(50))
    first, again, other = (
        numbered.subset(20, seed, "test").labels.tolist() for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len(set(first)) == 20
    assert first != sorted(first)
    assert numbered.subset(50, 0, "test") is numbered
