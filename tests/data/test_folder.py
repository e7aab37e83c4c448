"""A user's own pictures in folders: layout, kinds of pictures, what is refused."""

import numpy as np
import pytest
from PIL import Image

from fedgs.data.records import DataWarning
from loading import configured, load, refused
from refusals import assert_refused

PIXELS = np.random.default_rng(0).integers(256, size=(6, 28, 28), dtype=np.uint8)


def source(root):
    return f"folder:{root}"


def save(path, pixels=PIXELS[0], mode=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(path, **options)


def write(root, names):
    """Writes one picture for each name, in the order of PIXELS; returns the source."""
    for name, pixels in zip(names, PIXELS, strict=False):
        save(root / name, pixels)
    return source(root)


# ------------------------------------------------------------------ layouts


def test_clients_and_labels_are_the_folders(tmp_path):
    names = ["bob/cat/1.png", "bob/dog/1.png", "ann/dog/1.png", "ann/dog/2.png"]
    write(tmp_path, names)
    data = load(source(tmp_path), classes="cat,dog")
    assert data.client_names == ("ann", "bob")
    assert data.num_classes == 2
    assert [data.labels[own].tolist() for own in data.client_records] == [
        [1, 1],
        [0, 1],
    ]
    found = [data.images[own, 0] for own in data.client_records]
    assert (found[0] == PIXELS[2:4]).all()
    assert (found[1] == PIXELS[:2]).all()


def test_folders_of_numbers_or_of_no_labels(tmp_path):
    names = ["ann/3/1.png", "ann/10/1.png", "bob/7/1.png", "bob/03/1.PNG"]
    data = load(write(tmp_path / "numbers", names))
    assert data.num_classes == 11
    assert sorted(data.labels) == [3, 3, 7, 10]  # two spellings of one number
    plain = tmp_path / "plain"
    save(plain / "ann/1.png", np.full((40, 40), 100, np.uint8))
    save(plain / "ann/2.png", np.full((7, 7), 50, np.uint8))
    save(plain / "bob/1.png", PIXELS[0] > 127)
    (plain / ".DS_Store").write_text("")
    (plain / "ann/._1.png").write_text("")  # hidden
    data = load(source(plain), image_size=28)
    assert (data.num_classes, data.sizes.tolist()) == (1, [2, 1])
    assert np.unique(data.images[:2]).tolist() == [50, 100]
    assert (data.images[2, 0] == 255 * (PIXELS[0] > 127)).all()


def test_classes_are_the_settings_even_if_nobody_has_them(tmp_path):
    """An accent of one character, as typed here, or of two, as macOS writes names."""
    write(tmp_path, ["ann/cafe\u0301/1.png", "bob/caf\u00e9/1.png", "bob/7/1.png"])
    data = load(source(tmp_path), classes="7, caf\u00e9, tea")
    assert data.num_classes == 3
    assert data.labels.tolist() == [1, 0, 1]
    for classes in ("cat,", "caf\u00e9,cafe\u0301"):
        words = "give --classes each name once"
        assert_refused(words, configured, source(tmp_path), classes=classes)


def test_light_background_is_warned_of_and_inverted_on_request(tmp_path):
    save(tmp_path / "ann/1.png", np.full((28, 28), 250, np.uint8))
    with pytest.warns(DataWarning, match="give --background light"):
        assert load(source(tmp_path)).images.max() == 250
    assert load(source(tmp_path), background="light").images.max() == 5


# ------------------------------------------------------------------ kinds of pictures


@pytest.mark.parametrize("mode", ["RGBA", "P"])
def test_grey_stored_otherwise_is_read_exactly(tmp_path, mode):
    save(tmp_path / "ann/1.png", PIXELS[0], mode)
    assert (load(source(tmp_path)).images[0, 0] == PIXELS[0]).all()


def test_a_photograph_is_turned_upright_and_grey_beside_colour_is_repeated(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    save(tmp_path / "ann/1.png", PIXELS[:3].transpose(1, 2, 0), exif=exif)
    save(tmp_path / "bob/1.png", PIXELS[3])
    images = load(source(tmp_path), image_channels=3).images
    assert (images[0] == np.rot90(PIXELS[:3], -1, axes=(1, 2))).all()
    assert (images[1] == PIXELS[3]).all()


# ------------------------------------------------------------------ refused


RGBA = np.dstack([PIXELS[0]] * 3 + [np.full((28, 28), 128, np.uint8)])


def picture(pixels):
    return lambda root: save(root / "ann/1.png", pixels)


def truncated(root):
    save(root / "ann/1.png")
    content = (root / "ann/1.png").read_bytes()
    (root / "ann/1.png").write_bytes(content[: len(content) // 2])


def files(*names):
    return lambda root: write(root, names)


FILE = r"ann/1\.png"
BAD = {
    "colour": (
        picture(PIXELS[:3].T),
        f"{FILE}: it is in colour; give --image-channels 3",
        {"image_channels": 1},
    ),
    "transparent": (picture(RGBA), f"{FILE}: it has transparent pixels"),
    "16 bits": (
        picture(PIXELS[0].astype(np.uint16) * 257),
        f"{FILE}: it has 16 bits, .* give --window",
    ),
    "truncated": (truncated, f"{FILE}: it cannot be read as a picture"),
    "empty": (lambda root: None, "is empty; give CLIENT/LABEL"),
    "an empty client": (lambda root: (root / "bob").mkdir(), "bob: it has no pictures"),
    "pictures of nobody": (files("1.png"), "1.png is in no client's folder"),
    "some without label": (
        files("ann/a/1.png", "bob/1.png"),
        r"bob/1\.png has no label, but the others",
    ),
    "a name that is no number": (
        files("ann/03/1.png", "ann/11/1.png", "bob/Cat/1.png"),
        "classes is unset: .* the class 'Cat', .* give --classes "
        "'0,1,2,03,4,5,6,7,8,9,10,11,Cat'",
    ),
    "a name that classes lack": (
        files("ann/cat/1.png", "bob/Dog/1.png"),
        "classes = 'cat,dog': .* has the class 'Dog'; add it to --classes",
        {"classes": "cat,dog"},
    ),
    "a date as label": (files("ann/2024/1.png"), "2024 would make 2025 classes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folder_is_refused_by_file(tmp_path, case):
    make, message, *settings = BAD[case]
    make(tmp_path)
    refused(message, source(tmp_path), **dict(*settings))
