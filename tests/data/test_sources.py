"""Data sources, on the bundled digits and on small files in the real formats."""

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import loading
from fedgs.data.load import load_test_data
from fedgs.data.readers import fonts
from loading import configured, load, refused
from refusals import assert_refused

PIXELS = np.random.default_rng(0).integers(256, size=(12, 28, 28), dtype=np.uint8)
LABELS = np.arange(12) % 10
WRITERS = np.array([7, 7, 7, 30, 30, 30, 30, 4, 4, 4, 4, 4])


def write_mnist(root: Path, folder="MNIST", split="train", pixels=PIXELS):
    loading.write_mnist(root, pixels, LABELS, folder, split)


def write_writers(root: Path, labels=LABELS):
    loading.write_writers(root, labels, WRITERS[: len(labels)])


def write_npz(root: Path, **arrays) -> str:
    return loading.write_npz(root / "toy.npz", **arrays)


# Digits


def test_digits_are_1797_images_of_180_clients():
    data = load()
    assert (data.images.shape, data.images.dtype) == ((1797, 1, 28, 28), np.uint8)
    assert (data.num_clients, data.num_classes, data.name) == (180, 10, "digits")
    assert set(data.sizes) == {9}
    # load_digits has the mean 4.884 of 16; 8x8 pixels in a frame of 12x12.
    expected = 4.884 / 16 * 8**2 / 12**2
    assert abs(data.images.mean() / 255 - expected) < 0.01
    assert_refused("data = 'digits':", load_test_data, configured())
    larger = load(image_size=64, image_channels=3).images  # 16 in the original is 255
    assert (larger.shape, larger.max() > 240) == ((1797, 3, 64, 64), True)
    assert np.median(larger[:, :, :, 0]) == 0
    assert (larger[:, 0] == larger[:, 2]).all()


# Fonts


@pytest.fixture
def few_fonts(monkeypatch):
    """Sixty pseudo-writers to train on and twenty to test on."""
    assert fonts.WRITERS == {"train": 539, "test": 100}
    assert fonts.IMAGES_OF_WRITER == {"train": 111, "test": 60}
    monkeypatch.setattr(fonts, "WRITERS", {"train": 60, "test": 20})
    monkeypatch.setattr(fonts, "IMAGES_OF_WRITER", {"train": 40, "test": 30})
    fonts.read.cache_clear()
    yield
    fonts.read.cache_clear()


def unit(images):
    """Returns images as vectors of mean 0 and length 1, however strong their ink is."""
    x = images.reshape(len(images), -1) / 255
    x = x - x.mean(1, keepdims=True)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_fonts_are_legible_centred_and_the_same_bits_every_time(few_fonts):
    """The nearest digit of other pseudo-writers names most of the test digits."""
    data = load(data="fonts")
    assert (data.images.shape, data.images.dtype) == ((2400, 1, 28, 28), np.uint8)
    assert (data.num_clients, data.num_classes, set(data.sizes)) == (60, 10, {40})
    assert np.median(data.images[:, :, :, 0]) == 0
    assert data.images.max() > 240
    train, test = fonts.read("train"), fonts.read("test")
    found = train.labels[(unit(test.images) @ unit(train.images).T).argmax(1)]
    assert (found == test.labels).mean() > 0.8  # by chance 0.1
    at = np.arange(28) - 13.5
    centre = (test.images[:, 0].sum(1) @ at) / test.images.sum((1, 2, 3))
    assert np.abs(centre).max() < 0.5
    # No pseudo-writer is in both splits.
    known = {image.tobytes() for image in train.images}
    assert not any(image.tobytes() in known for image in test.images)
    images, labels = load_test_data(configured(data="fonts"))
    assert (images.shape, len(labels)) == ((600, 1, 28, 28), 600)
    again = fonts.read.__wrapped__("test")
    assert test.images is not again.images
    assert test.images.tobytes() == again.images.tobytes()
    assert test.labels.tobytes() == again.labels.tobytes()
    # They stay in memory, so that corruption needs a copy.
    settings = {"corruption": "invert", "corruption_fraction": 1.0}
    assert (load(data="fonts", **settings).images == 255 - train.images).all()


def test_source_that_is_unknown_or_not_installed_is_refused(monkeypatch, caplog):
    caplog.set_level("INFO")
    refused(r"data = 'cifar': .*digits, fonts, mnist, .*npz:PATH", data="cifar")
    assert "reading" not in caplog.text
    refused(r"data_dir is unset: .*train-images-idx3", data="mnist", num_clients=2)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    refused("pip install scikit-learn")


# MNIST's families, in small files of the real format


def test_idx_files_of_28_pixels_pass_through_exactly(tmp_path):
    write_mnist(tmp_path, "FashionMNIST")
    data = load(data="fashion-mnist", data_dir=str(tmp_path), num_clients=4)
    assert (data.images[:, 0] == PIXELS).all()
    assert (data.labels == LABELS).all()
    assert data.num_classes == 10
    assert data.sizes.tolist() == [3, 3, 3, 3]


def test_writers_are_clients_in_name_order(tmp_path):
    write_mnist(tmp_path)
    write_writers(tmp_path)
    data = load(data="mnist-by-writer", data_dir=str(tmp_path))
    assert data.client_names == ("4", "7", "30")
    assert data.sizes.tolist() == [5, 3, 4]
    assert data.client_records[1].tolist() == [0, 1, 2]
    write_writers(tmp_path, LABELS[::-1])
    place = {"data": "mnist-by-writer", "data_dir": str(tmp_path)}
    write_mnist(tmp_path, split="t10k")
    images, labels = load_test_data(configured(**place))  # MNIST's
    assert (images.dtype, images.shape) == (np.float32, (12, 1, 28, 28))
    assert np.allclose(images[:, 0] * 255, PIXELS)
    assert (labels == LABELS).all()
    refused("qmnist-train-labels", **place)


def test_missing_files_are_named_and_only_they_are_downloaded(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    place = {"data": "mnist-by-writer", "data_dir": str(tmp_path)}
    message = refused(f"data_dir = {str(tmp_path)!r}", **place)
    assert "QMNIST/raw/qmnist-train-labels-idx2-int not found" in message
    assert "--download" in message
    assert "MNIST/raw/train" not in message

    def download(root, download):
        assert download
        write_writers(root)

    monkeypatch.setattr("torchvision.datasets.QMNIST", download)
    assert load(download=True, **place).num_clients == 3


@given(start=st.integers(0, 20), cut=st.integers(1, 30) | st.just(10**6))
@example(start=2, cut=1)  # the type
@example(start=4, cut=4)  # the number of images
def test_an_idx_file_that_lost_bytes_is_refused(tmp_path_factory, start, cut):
    root = tmp_path_factory.mktemp("mnist")
    write_mnist(root)
    path = root / "MNIST/raw/train-images-idx3-ubyte"
    content = path.read_bytes()
    path.write_bytes(content[:start] + content[start + cut :])
    message = "not a whole idx file of 3 dimensions of"
    refused(message, data="mnist", data_dir=str(root), num_clients=2)


def test_files_of_another_format_or_of_two_splits_are_refused(tmp_path):
    place = {"data": "mnist", "data_dir": str(tmp_path), "num_clients": 2}
    write_mnist(tmp_path, pixels=PIXELS[:5])
    refused(r"data_dir = .* 5 .* 12 ", **place)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(b"\x1f\x8b\x08\x00" + path.read_bytes()[4:])
    refused("train-images-idx3-ubyte: ", **place)


# Files of the user


@pytest.mark.parametrize(
    "images",
    [
        PIXELS[:, None],
        PIXELS[..., None],
        PIXELS.astype(np.int64),
        (PIXELS / 255).astype(np.float32),
    ],
    ids=["NCHW", "NHWC", "int64", "float32"],
)
def test_npz_images_arrive_exactly(tmp_path, images):
    path = write_npz(tmp_path, images=images, labels=LABELS)
    data = load(data=path, num_clients=3, num_classes=26)
    assert data.images.shape == (12, 1, 28, 28)
    assert (data.images[:, 0] == PIXELS).all()
    assert (data.labels == LABELS).all()
    assert (data.num_classes, data.name) == (26, path)
    unlabelled = load(data=write_npz(tmp_path, images=images), num_clients=3)
    assert (unlabelled.num_classes, unlabelled.labels.max()) == (1, 0)


def test_npz_rgb_images_keep_their_channels(tmp_path):
    rgb = PIXELS.reshape(4, 3, 28, 28)
    path = write_npz(tmp_path, images=np.moveaxis(rgb, 1, 3))
    assert (load(data=path, num_clients=2).images == rgb).all()
    refused("^image_channels = 1", path, num_clients=2, image_channels=1)


def wrong_pixel(value):
    images = PIXELS / 255
    images[0, 0, 0] = value
    return images


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": PIXELS}, "contains x; give 'images'"),
        ({"images": PIXELS, "label": LABELS}, "contains images, label; .*no others"),
        ({"images": np.zeros((2, 2, 28, 28))}, r"C = 1 or 3"),
        ({"images": np.zeros((2, 28, 0))}, "at least one image"),
        ({"images": wrong_pixel(np.nan)}, "image 0 has values that are not finite"),
        ({"images": PIXELS * 1.0}, r"outside of \[0, 1\]; give uint8 in .* or"),
        ({"images": PIXELS // 128}, "integers and none is above 1; give uint8 in"),
        ({"images": PIXELS, "labels": LABELS[:5]}, r"labels has shape \(5,\)"),
        ({"images": PIXELS, "labels": LABELS - 1}, "label -1; give labels from 0"),
        (
            {"images": PIXELS, "labels": np.full(12, 2**64 - 5, np.uint64)},
            "image 0 has the label 18446744073709551611; give labels from 0",
        ),
        ({"images": PIXELS, "clients": WRITERS * 1.0}, "clients has dtype float64"),
    ],
)
def test_malformed_npz_is_refused(tmp_path, arrays, message):
    path = write_npz(tmp_path, **arrays)
    refused(message, path, num_clients=2, partition="iid")


def test_num_classes_that_the_labels_contradict_is_refused(tmp_path):
    for labels, message in (
        ({"labels": LABELS}, r"label [5-9]; give --num-classes above 9"),
        ({}, "has no labels for num_classes = 5"),
    ):
        path = write_npz(tmp_path, images=PIXELS, **labels)
        refused(message, path, num_clients=2, num_classes=5)


NPY = b"\x93NUMPY\x01\x00"  # the start of a file of one array


def damaged(path):
    content = bytearray(path.read_bytes())
    content[2000] ^= 255
    path.write_bytes(content)


def of_text(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images", "text")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, "does not exist"),
        (lambda path: path.write_bytes(NPY), "is not an npz file"),
        (damaged, "cannot be read"),
        (of_text, r"images has shape \(\)"),
    ],
)
def test_file_that_is_no_npz_is_refused(tmp_path, spoil, message):
    source = write_npz(tmp_path, images=PIXELS)
    spoil(tmp_path / "toy.npz")
    refused(message, source)
