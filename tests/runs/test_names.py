"""Names that others chose lead nowhere else: not by their letters, not by links.

A run folder may be handed over, a data set downloaded, a message sent. Wherever a name
from there becomes a part of a path, it stays in its folder.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command_line import flags, refused
from experiments.baselines import find
from experiments.comparison import methods
from experiments.comparison.options import CompareRequest
from experiments.grid import runs
from experiments.grid.cells import CellMethod, Cells, Source, TableRequest
from fedgs.cohorts.selection import PLAN
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.files import inside, write_json
from fedgs.privacy.client_ledger import COUNT_FORMAT, ClientLedger
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import draw_samples, load_generator
from fedgs.runs.sample_files import Samples
from refusals import assert_refused
from report_folders import make_diagnosed, make_run
from server.server_app import run_place

BAD = ["", ".", "..", ".hidden", "../out", "/etc", "a/b", "a\\b", "a\0b", "a\nb"]
BAD += ["a\x1b[2J", "\ud800", "x" * 256, "ä" * 128, 7, None, ["a"]]
GOOD = ["cat", "a b", "3", "Straße", "…", "a..b", "x" * 220, "a\u200cb"]


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "handed over").mkdir()
    return make_run(tmp_path / "handed over" / "run")


def edited(run: Path, **settings: object) -> Path:
    """Changes the settings of a run folder, as whoever hands it over can."""
    content = json.loads((run / "config.json").read_text())
    write_json(run / "config.json", content | settings)
    return run


def tree(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


# ------------------------------------------------------------------ letters


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_a_name_that_is_more_than_one_entry_is_refused(tmp_path, name):
    assert_refused("file = .*:", inside, tmp_path, name, "file")


@pytest.mark.parametrize("name", GOOD, ids=ascii)
def test_a_plain_name_is_an_entry_of_its_folder(tmp_path, name):
    path = inside(tmp_path, name, "file")
    assert path.parent == tmp_path
    path.touch()


@pytest.mark.parametrize("name", ["a/b", "../out", "/tmp/out", "a\\b", ".x"])
def test_classes_are_checked_where_they_enter(name):
    config = RunConfig(data="folder:pictures", classes=f"cat,{name}")
    assert_refused("classes = .* cannot be a folder's name; give", config.validate)
    # Of a data set of the hub they are no folders, and may be called T-shirt/top.
    RunConfig(
        data="hf:fashion", classes="T-shirt/top,trouser", num_clients=2
    ).validate()


@pytest.mark.parametrize(
    ("classes", "named"),
    [
        ("a,../out,b", "the class '../out' cannot be the name of a folder; give npz"),
        ("a,TMP/out,b", "the class '/.*/out' cannot be"),
        ("a,..,b", r"the class '\.\.' cannot be"),
        ("a,,b", "the class '' cannot be"),
        ("a,a,b", "two classes have one name; give npz:PATH"),
        ("2,b", "two classes have one name"),  # the third is called by its number
    ],
)
def test_classes_are_checked_where_they_become_folders(
    run, fedgs, monkeypatch, classes, named
):
    edited(run, classes=classes.replace("TMP", str(run.parent.parent)))
    # Who makes a folder with evil names makes its ledger, too.
    monkeypatch.setattr(RunFolder, "check_history", lambda self: None)
    monkeypatch.chdir(run.parent)
    before = tree(run.parent.parent)
    refused(fedgs("sample", run, "-n", 9, "-o", "folder:drawn"), f".*{named}")
    assert tree(run.parent.parent) == before


def test_a_writer_of_folders_trusts_no_check_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgs.runs.sample_files.is_plain_name", lambda name: True)
    images = np.zeros((1, 1, 2, 2), np.float32)
    drawn = Samples(np.array([0]), ("../out",), (1, 2, 2), lambda: iter([images]))
    assert_refused("class = '../out'", drawn.write, f"folder:{tmp_path}/drawn")
    assert tree(tmp_path) == []


def test_the_file_of_a_checkpoint_is_in_its_folder(run, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "check_history", lambda self: None)
    (run / "generator.safetensors").unlink()
    secret = (run / "generator_ema.safetensors").rename(tmp_path / "secret")
    for name in (str(secret), "../../../secret", "..", 7):
        write_json(run / "checkpoint" / "checkpoint.json", {"file": name, "round": 3})
        folder = RunFolder.open(run)
        assert_refused("checkpoint.json: file = ", load_generator, folder)
        assert_refused("checkpoint.json: file = ", folder.load_checkpoint)


def test_the_ledgers_of_a_client_are_in_its_folder(tmp_path):
    write_json(
        tmp_path / "clients.json", {"format": COUNT_FORMAT, "../other.jsonl": ["ann"]}
    )
    count = ClientLedger(tmp_path, ["ann"])
    with pytest.raises(UserError, match=r"clients.json = '../other.jsonl': give"):
        count.released("0" * 16, "ann")


def test_a_server_takes_plain_names_of_runs_only(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDGS_RUNS", str(tmp_path))
    assert run_place("run") == tmp_path / "run"
    for name in ("../run", "/etc", "a/b", ".", ".hidden", "a\nb", "x" * 300):
        assert_refused("output = ", run_place, name)


def test_no_setting_has_a_character_that_no_path_has(tmp_path, fedgs):
    (tmp_path / "own.toml").write_text(r'output = "a\u0000b"')
    refused(fedgs("train", "--config", tmp_path / "own.toml"), "output = .*character 0")
    assert_refused("data_dir = ", RunConfig, data_dir="a\0b")


# ------------------------------------------------------------------ cleaned names


def test_two_methods_with_one_name_are_no_two_rows(monkeypatch):
    own = find("wgan-gp")
    monkeypatch.setattr(methods, "find", lambda name, **_: own)
    request = CompareRequest(method=("mine:GAN",))
    assert_refused(
        "method = mine:GAN: wgan-gp is a row already", methods.grid, request, {}
    )


def test_a_run_of_other_data_with_the_same_name_is_not_taken(tmp_path):
    made = make_run(tmp_path / "out" / "npz-a-b-moments-eps10-seed0", data="npz:/a-b")
    before = tree(tmp_path)
    cells = Cells(
        {"npz-a-b": Source({"data": "npz:/a/b"})},
        {"moments": CellMethod("moments", {}, {10.0: {}})},
    )
    request = TableRequest(seeds=("0",), only="moments", output=tmp_path / "out")

    def refuse(cells: Cells, words: str) -> None:
        named = f"npz-a-b-moments-eps10-seed0 is stored with {words};"
        assert_refused(named, runs.fill, cells, request, json.dumps, lambda lines: [])

    refuse(cells, "data = 'npz:/a-b', not 'npz:/a/b'")
    # Nor of other clients, where the run was interrupted and has no line.
    more = {"npz-a-b": Source({"data": "npz:/a-b", "num_clients": 1000})}
    refuse(cells._replace(data=more), "num_clients = [0-9]+, not 1000")
    assert (tree(tmp_path), made.exists()) == (before, True)


# ------------------------------------------------------------------ links


def link_to_folder(place: Path, outside: Path) -> None:
    shutil.rmtree(place)
    place.symlink_to(outside)


def link_to_file(place: Path, outside: Path) -> None:
    place.unlink(missing_ok=True)
    place.symlink_to(outside / "secret")


def relative_link(place: Path, outside: Path) -> None:
    place.symlink_to(os.path.relpath(outside, place.parent))


def dangling_link(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "not there yet")


def fifo(place: Path, outside: Path) -> None:
    place.unlink(missing_ok=True)
    os.mkfifo(place)


LINKS = [("samples", link_to_folder), ("private", link_to_folder)]
LINKS += [("metrics.jsonl", link_to_file), ("flower.log", link_to_file)]
LINKS += [("ledger.jsonl", link_to_file), ("config.json", link_to_file)]
LINKS += [("samples/round-0000009.png", link_to_file), (".flower", relative_link)]
LINKS += [("private/node-00000", relative_link), ("audit", dangling_link)]
LINKS += [("evaluations.jsonl", dangling_link), ("ledger.json", fifo)]


@pytest.mark.parametrize(("name", "make"), LINKS)
def test_a_run_folder_with_a_link_out_of_it_is_neither_read_nor_written(
    run, tmp_path, name, make: Callable[[Path, Path], None]
):
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(run / "config.json", outside / "secret")
    make(run / name, outside)
    before = {path: path.lstat().st_mtime_ns for path in outside.rglob("*")}
    assert_refused(
        rf"{name}: it is a link that leads out of .*run", RunFolder.open, run
    )
    assert {p: p.lstat().st_mtime_ns for p in outside.rglob("*")} == before


def test_links_inside_a_run_folder_and_to_it_stay(run, tmp_path):
    (run / "last.png").symlink_to("samples/round-0000003.png")
    (tmp_path / "short").symlink_to(run)
    assert len(draw_samples(RunFolder.open(tmp_path / "short"), 3)) == 3


def test_every_command_refuses_links_of_folders_that_hold_runs(tmp_path, fedgs):
    run = make_diagnosed(tmp_path / "run")
    (run / "groups").symlink_to("/etc")
    selection = tmp_path / "selection"
    selection.mkdir()
    write_json(selection / PLAN, {})
    (selection / "classifier").symlink_to("/etc")
    commands = [["report", run, "-o", tmp_path / "r.html"], ["resume", selection]]
    commands += [["debug", *flags(output=run)]]
    for command in commands:
        refused(fedgs(*command), ".*: it is a link that leads out of")
    assert not (tmp_path / "r.html").exists()
