"""`fedgs data inspect`: numbers, picture, exit codes; training on the same sources."""

import json
import sys
import warnings
from functools import partial

import numpy as np
import pytest
from PIL import Image

import femnist_files as files
from command_line import flags, plain_flags, printed, refused

SHEET_SIDE = 2 + 10 * (28 + 2)  # ten images and the lines between them


@pytest.fixture
def inspect(fedgs, monkeypatch, tmp_path):
    """Runs the command in an empty folder: code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    return partial(fedgs, "data", "inspect")


@pytest.fixture
def source(tmp_path):
    return files.write_hdf5(tmp_path / "fed_emnist_train.h5")


def test_json_counts_clients_images_and_classes(inspect, source, tmp_path):
    report = json.loads(printed(inspect(source, "--json"), ""))
    assert (report["clients"], report["images"], report["classes"]) == (4, 14, 62)
    assert report["images_per_client"] == {"min": 1, "median": 3.0, "max": 7}
    assert report["images_per_class"][3] == 3
    assert report["image_shape"] == [1, 28, 28]
    assert report["background"] == report["background_guess"] == "light"
    assert report["memory_bytes"] == 14 * (28 * 28 + 8)
    assert report["contact_sheet"] == "contact-sheet.png"


def test_contact_sheet_has_a_row_per_client_as_training_sees_it(inspect, source):
    out = printed(inspect(source, "--sheet", "sheet.png"))
    assert "1 to 7, median 3" in out
    picture = np.asarray(Image.open("sheet.png"))
    assert picture.shape[:2] == (2 + 4 * 30, SHEET_SIDE)
    first = 255 - files.paper("f0000_14")
    assert np.abs(picture[2:30, 2:30, 0].astype(int) - first[0]).max() <= 1
    assert picture[2:30, 32:60, 0].astype(int).sum() == first[1].astype(int).sum()
    assert picture[2:30, 4 * 30 + 2 : 5 * 30, 0].max() == 0  # four images, then blank


def test_contact_sheet_shows_first_and_last_clients_and_classes(inspect, tmp_path):
    """Owners are often sorted by name, and the images of one by class."""
    shade = np.repeat(np.arange(40), 20) + np.tile(10 * np.arange(20), 40)
    images = np.zeros((800, 16, 16), np.uint8) + shade[:, None, None].astype(np.uint8)
    arrays = {"images": images, "clients": np.repeat(np.arange(40), 20)}
    np.savez(tmp_path / "a.npz", labels=np.tile(np.arange(20) // 10, 40), **arrays)
    out = printed(inspect("npz:a.npz", "--sheet", "sheet.png"))
    assert "a row of images for each of 12 clients" in out
    picture = np.asarray(Image.open("sheet.png"))[..., 0]
    rows = picture[2::18, 2::18][:12, :10]
    assert (rows[0, 0], rows[-1, -1]) == (0, 39 + 190)


def test_flags_of_the_data_apply(inspect, source, tmp_path):
    given = {"classes": "merged", "test_fraction": 0.4, "image_size": 32}
    report = json.loads(inspect(source, *plain_flags(**given), "--json")[1])
    assert (report["classes"], report["image_shape"]) == (36, [1, 32, 32])
    assert (report["images"], report["held_out"]) == (8, 6)
    (tmp_path / "some.txt").write_text("f0001_41\nf0010_07\n")
    report = json.loads(inspect(source, "--cohort", "some.txt", "--json")[1])
    assert report["clients"] == 2


def test_what_shards_hold_out_is_counted(inspect, tmp_path):
    images = np.zeros((40, 28, 28), np.uint8)
    np.savez(tmp_path / "a.npz", images=images, clients=np.arange(40) // 10)
    given = {"partition": "iid", "num_clients": 3, "test_fraction": 0.2}
    report = json.loads(inspect("npz:a.npz", *flags(**given), "--json")[1])
    assert (report["images"], report["held_out"], report["without_client"]) == (
        30,
        8,
        2,
    )


def test_warnings_are_one_line_on_standard_error(inspect, source):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *parts: print(
            warnings.formatwarning(*parts[:4]), end="", file=sys.stderr
        )
        code, out, err = inspect(source, "--json", "--background", "dark")
    assert code == 0
    assert json.loads(out)["background"] == "dark"
    assert err.startswith("Warning: background = dark: data = 'femnist:")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("more", "clients"), [([], 1), (["--num-clients", 3], 3)])
def test_data_without_clients_is_inspected_too(inspect, tmp_path, more, clients):
    np.savez(tmp_path / "toy.npz", images=np.zeros((9, 28, 28), np.uint8))
    report = json.loads(inspect(f"npz:{tmp_path / 'toy.npz'}", *more, "--json")[1])
    assert report["clients"] == clients


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "--data", "mnist"], "data = mnist:"),
        (["digits", "--sheet", "no/such.png"], "sheet = no/such.png:"),
        (["digits", "--sheet", "sheet.txt"], "sheet = sheet.txt:"),
    ],
)
def test_bad_input_is_one_line_and_code_2(inspect, arguments, message):
    assert refused(inspect(*arguments), message).count("\n") == 1


def pictures(root):
    """Writes two owners' pictures; returns the source, and one of the pictures."""
    for index, name in enumerate(("ann", "bob")):
        (root / "own" / name).mkdir(parents=True)
        pixels = np.full((28, 28), 40 * index, np.uint8)
        Image.fromarray(pixels).save(root / "own" / name / "0.png")
    return f"folder:{root / 'own'}", root / "own/ann/0.png"


@pytest.mark.parametrize("place", ["own/ann/0.png", "own/sheet.png", "link.png"])
def test_no_sheet_replaces_a_picture_of_the_data(inspect, tmp_path, place):
    source, picture = pictures(tmp_path)
    (tmp_path / "link.png").symlink_to(picture)
    before = picture.read_bytes()
    err = refused(inspect(source, "--sheet", place), "sheet = .*would lie in the data")
    assert "reading" not in err
    assert picture.read_bytes() == before
    assert not (tmp_path / "own/sheet.png").exists()


def test_a_sheet_replaces_sheets_alone(inspect, tmp_path, monkeypatch):
    source, picture = pictures(tmp_path)
    sheets = ([], ["--sheet", "mine.png"])
    for sheet in sheets * 2:  # twice each
        printed(inspect(source, *sheet))
    for name in ("other.png", "contact-sheet.png", "text.png"):
        (tmp_path / name).write_bytes(b"text" if "text" in name else b"")
        if "text" not in name:
            Image.open(picture).save(tmp_path / name)
        words = f"sheet = {name}: it is there already and is no contact sheet"
        refused(inspect(source, "--sheet", name), words)
    # From inside of the data, where the default name would lie in them.
    monkeypatch.chdir(tmp_path / "own")
    refused(inspect("folder:."), "sheet = contact-sheet.png: it would lie in the data")


def test_what_is_hidden_is_counted(inspect, tmp_path):
    source, picture = pictures(tmp_path)
    assert "passed over" not in printed(inspect(source))
    for name in (".eve/0.png", "ann/.0.png", "bob/.DS_Store"):
        path = tmp_path / "own" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture.read_bytes())
    assert "passed over" in (shown := printed(inspect(source)))
    assert "3 hidden" in shown
    report = json.loads(printed(inspect(source, "--json")))
    assert (report["clients"], report["pictures"]["hidden"]) == (2, 3)
