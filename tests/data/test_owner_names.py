"""Names of owners: one person is one client, however the name was typed."""

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import refused as refused_by_command
from fedgs.data.given import read_given
from fedgs.data.partition import owners_held_out
from fedgs.data.records import DataWarning, Records, check_owners, fit
from loading import configured, load, refused, write_npz
from refusals import assert_refused

ONE_ACCENT = "Ren\u00e9"
TWO_CHARACTERS = "Rene\u0301"
PIXELS = np.random.default_rng(0).integers(256, size=(4, 28, 28), dtype=np.uint8)
SPELLINGS = {
    "accents": (ONE_ACCENT, TWO_CHARACTERS),
    "blanks": ("ann", "ann "),
    "a blank of print": ("ann", "\u00a0ann"),
}


def folder_of(root: Path, names: tuple[str, str]) -> str:
    for name, pixels in zip(names, PIXELS, strict=False):
        path = root / "own" / name / "a.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(pixels).save(path)
    return f"folder:{root / 'own'}"


def arrays_of(root: Path, names: tuple[str, str]) -> str:
    return write_npz(root / "own.npz", images=PIXELS[:2], clients=list(names))


def rows_of(root: Path, names: tuple[str, str]) -> str:
    datasets = pytest.importorskip("datasets")
    columns = {"image": [*map(Image.fromarray, PIXELS[:2])], "who": list(names)}
    kinds = {"image": datasets.Image(), "who": datasets.Value("string")}
    features = datasets.Features(kinds)
    datasets.Dataset.from_dict(columns, features).save_to_disk(root / "rows")
    return f"hf:{root / 'rows'}?client=who"


SOURCES = {"folder": folder_of, "npz": arrays_of, "hf": rows_of}


@pytest.fixture(params=SOURCES)
def write(request, hub_cache):
    return SOURCES[request.param]


@pytest.mark.parametrize("case", SPELLINGS)
def test_one_name_in_two_spellings_is_refused(write, tmp_path, case):
    names = SPELLINGS[case]
    source = write(tmp_path, names)
    words = "two spellings .* could be two clients; give both one name"
    said = refused(words, source)
    assert all(ascii(name) in said for name in names)
    # Also where shards are no owners, and where some are held out whole.
    refused(words, source, partition="iid", num_clients=1, noise_multiplier=0)
    refused(words, source, test_owners=0.5)


def test_images_of_a_program_are_checked_too():
    config = configured("given")
    records = read_given(config, PIXELS[:2], clients=[ONE_ACCENT, TWO_CHARACTERS])
    assert_refused("two spellings", fit, config, records)


def test_names_that_differ_in_capital_letters_are_warned_of(write, tmp_path):
    source = write(tmp_path, ("Anna", "anna"))
    with pytest.warns(DataWarning, match="'Anna' and 'anna' differ in capital letters"):
        assert load(source).num_clients == 2


def test_the_spelling_of_a_name_holds_nobody_out():
    """Golden choices of ASCII names, and one choice for all spellings of another."""
    config = configured("npz:a.npz", test_owners=0.5)
    ascii_names = np.array([f"p{number:02}" for number in range(12)])
    golden = [0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1]
    assert owners_held_out(config, ascii_names).tolist() == golden
    accents = [f"{name}\u00e9" for name in ascii_names]
    typed = [f"{name}e\u0301 " for name in ascii_names]
    choices = owners_held_out(config, np.array(accents))
    assert (choices == owners_held_out(config, np.array(typed))).all()
    assert 0 < choices.sum() < 12


def test_the_spelling_of_a_name_chooses_no_images_to_hold_out(tmp_path):
    pixels = np.repeat(PIXELS, 5, axis=0)
    held = set()
    for name in (ONE_ACCENT, TWO_CHARACTERS):
        names = [name] * 10 + ["bob"] * 10
        source = write_npz(tmp_path / "a.npz", images=pixels, clients=names)
        data = load(source, test_fraction=0.3)
        index = data.client_names.index(name)
        held.add(tuple(data.client_test_records[index].tolist()))
    assert len(held) == 1


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "a\u2028b", "a\x85b"])
def test_names_with_control_characters_are_refused(write, tmp_path, name):
    source = write(tmp_path, ("bob", name))
    said = refused("client = .* contains a control character; rename it", source)
    assert ascii(name) in said


def test_a_folder_of_an_owner_may_not_be_another_owners(tmp_path):
    source = folder_of(tmp_path, ("ann", "bob"))
    own = tmp_path / "own"
    (own / "eve").symlink_to(own / "ann")
    refused("own/eve: it is the same folder as .*own/ann, so one person", source)
    (own / "eve").unlink()
    assert load(source).num_clients == 2


def test_nor_may_a_folder_of_a_label(tmp_path):
    source = folder_of(tmp_path, ("ann/0", "bob/0"))
    (tmp_path / "own/eve").mkdir()
    (tmp_path / "own/eve/0").symlink_to(tmp_path / "own/ann/0")
    refused("own/eve/0: it is the same folder as .*own/ann/0", source)


def test_an_error_stays_one_line_whatever_a_file_is_called(fedgs, tmp_path):
    source = folder_of(tmp_path, ("ann", "bob"))
    (tmp_path / "own/ann/a\nb\x1b[31m.png").write_text("x")
    sheet = str(tmp_path / "sheet.png")
    err = refused_by_command(fedgs("data", "inspect", source, "--sheet", sheet))
    assert err.count("\n") == 1
    assert r"a\nb\x1b[31m.png: it cannot be read" in err


def test_names_of_many_owners_are_checked_fast():
    names = np.array([f"{number:06}\u00e9" for number in range(60_000)])
    labels = np.zeros(len(names), np.int64)
    images = np.zeros((len(names), 1, 1, 1), np.uint8)
    records = Records(images=images, labels=labels, num_classes=1, clients=names)
    started = time.process_time()
    check_owners("npz:a.npz", records)
    assert time.process_time() - started < 5
