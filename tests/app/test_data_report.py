"""`fedgs data inspect`: numbers, picture, exit codes; training on the same sources."""

import json
import re
import sys
import warnings
from functools import partial

import numpy as np
import pytest
from PIL import Image

import femnist_files as files
from command_line import flags, printed, refused
from fedgs.app.commands import data as data_report
from fedgs.runs.run_folder import RunFolder
from tiny import SETTINGS as TINY

OF_MODELS = ("image_size", "noise_multiplier", "clients_per_round", "batch_size")
OF_MODELS += ("generator", "generator_dim", "discriminator_dim", "latent_dim")
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
    out = printed(inspect(source, "--json"), "")
    report = json.loads(out)
    assert (report["clients"], report["images"], report["classes"]) == (4, 14, 62)
    assert report["images_per_client"] == {"min": 1, "median": 3.0, "max": 7}
    assert report["images_per_class"][3] == 3
    assert report["image_shape"] == [1, 28, 28]
    assert report["background"] == report["background_guess"] == "light"
    assert report["memory_bytes"] == 14 * (28 * 28 + 8)
    assert report["contact_sheet"] == "contact-sheet.png"
    assert (tmp_path / "contact-sheet.png").exists()


def test_contact_sheet_has_a_row_per_client_as_training_sees_it(inspect, source):
    assert inspect(source, "--sheet", "sheet.png")[0] == 0
    picture = np.asarray(Image.open("sheet.png"))
    assert picture.shape[:2] == (2 + 4 * 30, SHEET_SIDE)
    first = 255 - files.paper("f0000_14")
    assert np.abs(picture[2:30, 2:30, 0].astype(int) - first[0]).max() <= 1
    assert picture[2:30, 32:60, 0].astype(int).sum() == first[1].astype(int).sum()
    assert picture[2:30, 4 * 30 + 2 : 5 * 30, 0].max() == 0  # four images, then blank


def test_table_shows_the_same(inspect, source):
    out = printed(inspect(source))
    for words in ("14, each 1 x 28 x 28", "1 to 7, median 3", "contact-sheet.png"):
        assert words in out
    assert out.count("█") > 4


def test_flags_of_the_data_apply(inspect, source):
    given = {"classes": "merged", "test_fraction": 0.4, "image_size": 32}
    report = json.loads(inspect(source, *flags(**given), "--json")[1])
    assert report["classes"] == 36
    assert report["image_shape"] == [1, 32, 32]
    assert (report["images"], report["held_out"]) == (8, 6)


def test_a_cohort_is_inspected_alone(inspect, source, tmp_path):
    (tmp_path / "some.txt").write_text("f0001_41\nf0010_07\n")
    report = json.loads(inspect(source, "--cohort", "some.txt", "--json")[1])
    assert report["clients"] == 2
    (tmp_path / "other.txt").write_text("nobody\n")
    refused(inspect(source, "--cohort", "other.txt"), "no client 'nobody'")


def test_a_sheet_that_cannot_be_written_leaves_nothing(inspect, source, tmp_path):
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.iterdir())
    refused(inspect(source, "--sheet", "folder.png"), "give another --sheet")
    assert sorted(tmp_path.iterdir()) == before


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


@pytest.mark.parametrize(
    ("arguments", "clients"),
    [(["digits"], 180), (["PATH"], 1), (["PATH", "--num-clients", 3], 3)],
)
def test_data_without_clients_is_inspected_too(inspect, tmp_path, arguments, clients):
    pixels = np.zeros((9, 28, 28), np.uint8)
    pixels[:, 9:12] = 200
    np.savez(tmp_path / "toy.npz", images=pixels)
    path = f"npz:{tmp_path / 'toy.npz'}"
    words = [path if word == "PATH" else word for word in arguments]
    assert json.loads(inspect(*words, "--json")[1])["clients"] == clients


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["femnist:no.h5"], "no.h5 does not exist"),
        (["folder:no"], "no is no folder"),
        (["cifar"], "data = 'cifar': give --data one of digits"),
        (["digits", "--data", "mnist"], "data = mnist: SOURCE says it; leave out"),
        (["digits", "--sheet", "no/such.png"], "sheet = no/such.png: "),
        (
            ["digits", "--sheet", "sheet.txt"],
            "sheet = sheet.txt: give a name that ends",
        ),
        (["digits", "--classes", "digits"], "only femnist, folder:PATH and hf:NAME"),
    ],
)
def test_bad_input_is_one_line_and_code_2(inspect, arguments, message):
    assert refused(inspect(*arguments), message).count("\n") == 1


def test_a_run_keeps_the_absolute_path(fedgs, monkeypatch, source, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = {name: TINY[name] for name in OF_MODELS} | {
        "data": "femnist:fed_emnist_train.h5",
        "classes": "merged",
        "test_fraction": 0.2,
        "num_rounds": 1,
        "warm_start_rounds": 0,
        "output": "run",
    }
    printed(fedgs("train", *flags(**settings)))
    config = RunFolder.open(tmp_path / "run").config
    assert config.data == source
    assert (config.num_clients, config.num_classes) == (4, 36)


def test_histogram_has_even_bins_of_whole_sizes():
    sizes = np.repeat(np.arange(5, 25), 2)  # 20 sizes, two clients each
    lines = data_report._histogram(sizes).splitlines()
    ranges = [tuple(map(int, re.findall(r"\d+", line)[:2])) for line in lines]
    assert ranges[:2] == [(5, 7), (8, 10)]
    assert {high - low for low, high in ranges} == {2}
    assert [int(line.split()[-1]) for line in lines] == [6, 6, 6, 6, 6, 6, 4]
    assert data_report._histogram(np.array([4, 4])).split()[::2] == ["4", "2"]
