"""`fedgs audit`: exit codes, what it writes, and that it writes nowhere else."""

import hashlib
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import runs
import tiny
from command_line import refused
from fedgs.app.commands import audit
from fedgs.audit import mechanism, noise_check, one_run, worst_case
from fedgs.audit.finding import CONFIDENCE
from fedgs.data import sources
from fedgs.mechanism.noise import NoiseStream
from fedgs.round.preparation import resolve
from fedgs.runs.run_folder import RunFolder
from tiny import FULL_PARTICIPATION, record_calls, run_config, tiny_config, tiny_data

CLIENTS = 12
QUICK = ("--trials", 3000)
OF_DATA = ("data", "num_clients", "num_classes", "clients_per_round", "noise_seed")
SETTINGS = {n: v for n, v in tiny.SETTINGS.items() if n not in OF_DATA}
SETTINGS |= FULL_PARTICIPATION | {"noise_multiplier": 1.5, "num_rounds": 2}
SETTINGS |= {"discriminator_steps": 1, "warm_start_rounds": 1}


@pytest.fixture(autouse=True)
def _little_noise(monkeypatch):
    monkeypatch.setattr(noise_check, "NUM_DRAWS", 60_000)


@pytest.fixture
def quick(run, exit_code):
    """Runs a quick audit; returns the exit code and what the report says."""

    def quick(path: Path = run, *more: object) -> tuple[int, dict]:
        return exit_code("audit", path, *QUICK, *more), report(path)

    return quick


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of twelve clients."""
    folder = tmp_path_factory.mktemp("audit")
    data = tiny_data(tiny_config())
    clients = np.arange(len(data.images)) % CLIENTS
    path = folder / "data.npz"
    np.savez(path, images=data.images, labels=data.labels, clients=clients)
    values = {"data": f"npz:{path}", "output": str(folder / "run"), **SETTINGS}
    config, data = resolve(run_config(clients_per_round=None, **values))
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


def test_quick_audit_holds_and_alters_nothing(run, quick, capsys, monkeypatch):
    before = content(run)
    read = record_calls(monkeypatch, sources, "read_records")
    code, written = quick()
    assert len(read) == 1
    assert (code, written["holds"]) == (0, True)
    assert content(run) == before
    found = {path.name for path in (run / "audit").iterdir()}
    assert found == {"report.json"}
    printed = capsys.readouterr()
    assert "B, one run with canaries: not run: give --full" in printed.out
    assert "has no test split" in " ".join(printed.out.split())  # why C was skipped
    rows = written["findings"] + written["checks"]
    assert {row["verdict"] for row in rows} == {"holds"}
    assert "every claim rests on" in printed.out
    assert "rounds of each kind" in printed.err  # progress, plain lines


def test_broken_noise_is_exit_code_1_and_membership_uses_the_test_split(
    quick, capsys, monkeypatch
):
    normal, rng = NoiseStream.normal, np.random.default_rng(0)

    def half(self, shape, noise_std):
        return normal(self, shape, noise_std / 2)

    def test_split(config, records):
        return rng.random((40, 1, 16, 16), dtype=np.float32), np.zeros(40, np.int64)

    monkeypatch.setattr(NoiseStream, "normal", half)
    monkeypatch.setattr(audit, "load_test_data", test_split)
    monkeypatch.setattr(audit, "NUM_SYNTHETIC", 50)
    code, written = quick()
    assert (code, written["holds"]) == (1, False)
    found, printed = written["membership"], capsys.readouterr()
    assert (found["num_members"], found["num_others"]) == (40, 40)
    assert "REFUTED: A takes part: release, " in printed.err
    assert "REFUTED: noise, gradient: " in printed.err
    assert "proves nothing" in printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trials", 10), "trials = 10:"),
        (("--rounds", 5), "rounds = 5:"),
        (("--full", "--rounds", 0), "rounds = 0:"),
        (("--full",), "num_clients = 12:"),
    ],
)
def test_bad_numbers_are_exit_code_2(run, fedgs, monkeypatch, arguments, message):
    monkeypatch.setattr(audit, "FEWEST_CANARIES", 13)
    refused(fedgs("audit", run, *arguments), message)


def test_no_run_folder_and_broken_ledger_are_exit_code_2(run, fedgs, tmp_path):
    refused(fedgs("audit", tmp_path), "no run folder")
    for name in ("config.json", "versions.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    lines = (run / "ledger.jsonl").read_bytes().replace(b'"round":1', b'"round":7')
    (tmp_path / "ledger.jsonl").write_bytes(lines)
    refused(fedgs("audit", tmp_path), "ledger.jsonl")
    assert not (tmp_path / "audit").exists()


def test_full_audit_holds_leaves_no_training_behind_and_shares_its_confidence(
    run, quick, monkeypatch, capsys
):
    shares: list[float] = []
    before = content(run)

    def spy(module, name):
        attack = getattr(module, name)

        def found(*arguments, **named):
            bound = inspect.signature(attack).bind(*arguments, **named)
            shares.append(bound.arguments["alpha"])
            return attack(*arguments, **named)

        monkeypatch.setattr(module, name, found)

    spy(mechanism, "attack_claim")
    spy(worst_case, "check_noise")
    spy(one_run, "guess_coins")
    full = ("--full", "--rounds", 1)
    code, written = quick(run, *full, "--json")
    assert (code, content(run)) == (0, before)
    assert sum(shares) == pytest.approx(1 - CONFIDENCE)
    printed = json.loads(capsys.readouterr().out)
    assert printed == written
    assert printed["one_run"] == "ran: 12 canaries, 1 rounds"
    attacks = [finding["attack"] for finding in printed["findings"]]
    assert attacks[-2:] == ["B sums", "B generator"]
    assert [path.name for path in (run / "audit").iterdir()] == ["report.json"]


def test_of_a_deployed_run_no_image_is_looked_for_here():
    """Its settings name no data; the default of a setting is none of its clients'."""
    config = tiny_config(nodes="a,b", clients_per_node=3, engine="flower")
    folder: Any = SimpleNamespace(config=config)
    progress: Any = SimpleNamespace(say=lambda text: None)
    found = audit._membership(folder, None, progress)
    assert (
        found == "skipped: the images of a deployed run are its clients', and not here"
    )
