"""`fedgs audit`: exit codes, what it writes, and that it writes nowhere else."""

import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import runs
import tiny
from experiments.commands import audit
from fedgs.config.run_config import RunConfig
from fedgs.federation.preparation import resolve
from fedgs.mechanism.noise import NoiseStream
from fedgs.runs.run_folder import RunFolder
from tiny import FULL_PARTICIPATION, tiny_config, tiny_data

CLIENTS = 12
QUICK = ("--trials", 3000)
OF_DATA = ("data", "num_clients", "num_classes", "clients_per_round", "noise_seed")
SETTINGS = {n: v for n, v in tiny.SETTINGS.items() if n not in OF_DATA}
SETTINGS |= FULL_PARTICIPATION | {"noise_multiplier": 1.5, "num_rounds": 2}
SETTINGS |= {"discriminator_steps": 1, "warm_start_rounds": 1}


@pytest.fixture
def fedgs(exit_code):
    """Returns the exit code alone: the tests read what is printed themselves."""
    return exit_code


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of twelve clients."""
    folder = tmp_path_factory.mktemp("audit")
    data = tiny_data(tiny_config())
    clients = np.arange(len(data.images)) % CLIENTS
    path = folder / "data.npz"
    np.savez(path, images=data.images, labels=data.labels, clients=clients)
    values = {"data": f"npz:{path}", "output": str(folder / "run"), **SETTINGS}
    config, data = resolve(RunConfig(clients_per_round=None, **values))
    created = RunFolder.create(config)
    runs.train(created, data=data)
    return created.path


def content(run: Path) -> dict[str, str]:
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run.rglob("*")
        if path.is_file() and not path.is_relative_to(run / "audit")
    }


def report(run: Path) -> dict:
    return json.loads((run / "audit" / "report.json").read_text())


def test_quick_audit_holds_and_alters_nothing(run, fedgs, capsys):
    before = content(run)
    assert fedgs("audit", run, *QUICK) == 0
    assert content(run) == before
    found = {path.name for path in (run / "audit").iterdir()}
    assert found == {"report.json", "table.txt", "plot.png"}
    printed = capsys.readouterr()
    assert "B, one run with canaries: not run: give --full" in printed.out
    assert "has no test split" in " ".join(printed.out.split())  # why C was skipped
    assert (run / "audit" / "table.txt").read_text().split()[:2] == ["audit", "at"]
    assert report(run)["holds"] is True
    assert {f["verdict"] for f in report(run)["findings"]} == {"holds"}
    with Image.open(run / "audit" / "plot.png") as picture:
        assert picture.size[0] > 500
    assert "rounds with gradient" in printed.err  # progress, plain lines


def test_full_audit_holds_and_leaves_no_training_behind(run, fedgs, capsys):
    before = content(run)
    full = ("--full", "--canaries", 10, "--rounds", 2)
    assert fedgs("audit", run, *QUICK, *full, "--json") == 0
    assert content(run) == before
    printed = json.loads(capsys.readouterr().out)
    assert printed == report(run)
    assert printed["one_run"] == "ran: 10 canaries, 2 rounds"
    attacks = [finding["attack"] for finding in printed["findings"]]
    assert attacks[-2:] == ["B sums", "B generator"]
    names = {path.name for path in (run / "audit").iterdir()}
    assert names == {"report.json", "table.txt", "plot.png"}


def test_broken_noise_is_exit_code_1(run, fedgs, capsys, monkeypatch):
    normal = NoiseStream.normal

    def half(self, shape, noise_std):
        return normal(self, shape, noise_std / 2)

    monkeypatch.setattr(NoiseStream, "normal", half)
    assert fedgs("audit", run, *QUICK) == 1
    assert "REFUTED: A takes part: release, " in capsys.readouterr().err
    assert report(run)["holds"] is False


def test_run_without_a_generator_skips_membership(run, fedgs, tmp_path, capsys):
    copy = tmp_path / "run"
    (copy / "private").mkdir(parents=True)
    for name in ("config.json", "versions.json", "ledger.jsonl"):
        (copy / name).write_bytes((run / name).read_bytes())
    assert fedgs("audit", copy, *QUICK) == 0
    assert "no generator yet" in report(copy)["membership"]


def test_missing_matplotlib_leaves_table_and_json(run, fedgs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (run / "audit" / "plot.png").unlink(missing_ok=True)
    assert fedgs("audit", run, *QUICK) == 0
    assert "needs matplotlib" in capsys.readouterr().out
    assert not (run / "audit" / "plot.png").exists()
    assert "needs matplotlib" in report(run)["plot"]


def test_missing_autodp_leaves_the_other_rows(run, fedgs, without_autodp, capsys):
    assert fedgs("audit", run, *QUICK) == 0
    assert "autodp is not installed" in report(run)["published"]
    assert "A takes part" in capsys.readouterr().out


def test_membership_uses_the_test_split(run, fedgs, monkeypatch, capsys):
    rng = np.random.default_rng(0)

    def test_split(config):
        return rng.random((40, 1, 16, 16), dtype=np.float32), np.zeros(40, np.int64)

    monkeypatch.setattr(audit, "load_test_data", test_split)
    monkeypatch.setattr(audit, "NUM_SYNTHETIC", 50)
    assert fedgs("audit", run, *QUICK) == 0
    found = report(run)["membership"]
    assert (found["num_members"], found["num_others"]) == (20, 20)
    assert "proves nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trials", 10), "trials = 10: give --trials at least 1000"),
        (("--canaries", 20), "canaries = 20: is for --full"),
        (("--rounds", 5), "rounds = 5: is for --full"),
        (("--full", "--canaries", 9), "canaries = 9: --full needs"),
        (("--full", "--canaries", 13), "canaries = 13: .* 12 clients"),
        (("--full", "--rounds", 0), "rounds = 0: give --rounds at least 1"),
    ],
)
def test_bad_numbers_are_exit_code_2(run, fedgs, capsys, arguments, message):
    assert fedgs("audit", run, *arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_no_run_folder_and_broken_ledger_are_exit_code_2(run, fedgs, tmp_path, capsys):
    assert fedgs("audit", tmp_path) == 2
    assert "no run folder" in capsys.readouterr().err
    for name in ("config.json", "versions.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    lines = (run / "ledger.jsonl").read_bytes().replace(b'"round":1', b'"round":7')
    (tmp_path / "ledger.jsonl").write_bytes(lines)
    assert fedgs("audit", tmp_path) == 2
    assert "ledger.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "audit").exists()
