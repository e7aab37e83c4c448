"""`fedgs select-clients`: files, bad input, and the same through Flower."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from command_line import plain_flags, printed, refused
from fedgs.app.commands import select_clients
from fedgs.cohorts.cohort_file import read_cohort
from fedgs.cohorts.selection import Selection, read_plan, statements
from fedgs.data.corruption import corrupted_clients
from fedgs.round.run import RunStopped
from server import roll_call
from tiny import SIZES, write_tiny_npz

K = len(SIZES)
SETTINGS = {"image_size": 16, "num_rounds": 2, "clients_per_round": 4, "seed": 3}


@pytest.fixture
def fedgs(fedgs, monkeypatch):
    """The command line, with a server that never sleeps."""
    monkeypatch.setattr(roll_call, "ROLL_CALL_POLL_SECONDS", 0.0)
    return fedgs


@pytest.fixture
def select(fedgs, tmp_path):
    """Selects with the local engine; settings of value True are flags."""
    data = write_tiny_npz(tmp_path / "tiny.npz")

    def select(name: str = "cohorts", **settings: object) -> tuple[int, str, str, Path]:
        path = tmp_path / name
        given = {"data": data, "output": path, "engine": "local"} | SETTINGS | settings
        return (*fedgs("select-clients", *plain_flags(**given)), path)

    return select


def test_selection_writes_cohorts_and_says_that_it_is_not_private(select):
    code, out, err, path = select(below=0.3, above=0.4, bug="flip")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "round 2 of 2" in text
    assert "NOT PRIVATE" in text
    summary = json.loads((path / "cohorts.json").read_text())
    assert summary["selection"] == "not private"
    assert summary["condition_of_runs"].startswith("excludes cohort selection")
    assert (summary["statements"], summary["cost"]) == ([], None)
    assert summary["thresholds"] == {"below": 0.3, "above": 0.4}
    assert sum(summary["cohorts"].values()) == K
    names = [str(client) for client in range(K)]
    truth = dict(zip(names, corrupted_clients(read_plan(path)[0], names), strict=True))
    assert 0 < sum(truth.values()) < K
    seen = []
    for cohort, count in summary["cohorts"].items():
        file = path / f"{cohort}.txt"
        assert file.exists() == (count > 0)
        if count:
            found = read_cohort(file)
            assert (found.selection, len(found.names)) == ("not private", count)
            seen += found.names
            bad = sum(truth[name] for name in found.names)  # the planted bug
            expected = {"corrupted": bad, "intact": count - bad}
            assert summary["planted"][cohort] == expected
    assert sorted(seen) == names


def test_private_selection_states_its_epsilon_and_cost(select):
    code, out, err, path = select(below=0.5, noise_per_clip=2.0)
    assert (code, err) == (0, "")
    summary = json.loads((path / "cohorts.json").read_text())
    rounds = {"num_rounds": 2, "clients_per_round": 4}
    selection = Selection(below=0.5, noise_per_clip=2.0, **rounds)
    config = read_plan(path)[0]
    supposed = (config.unit_condition, *config.public_conditions)
    expected = statements(selection, selection.cost(K), supposed)
    assert summary["statements"] == [s.to_json() for s in expected]
    assert expected[0].epsilon == pytest.approx(9.557, abs=0.001)  # mu^2 = 2
    for cohort, count in summary["cohorts"].items():
        if count:
            found = read_cohort(path / f"{cohort}.txt")
            assert (found.selection, found.cost) == ("private", selection.cost(K))
            assert found.selection_id == summary["id"] != ""
    assert "unbounded" in out  # for the server
    assert "public: num_clients = 6, num_classes = 3, image_channels = 1, taken" in out
    assert "NOT PRIVATE" not in out


@pytest.mark.parametrize(
    ("arrays", "settings", "named"),
    [
        ({}, {"partition": "iid", "num_clients": 2}, ".*a cohort consists of people"),
        ({}, {"cohort": "c.txt"}, "cohort = c.txt:"),
        (
            {},
            {"noise_per_clip": 2.0, "set": "target_epsilon=2.5"},
            "target_epsilon = 2.5: the selection states its cost",
        ),
        ({}, {"set": "clip_bound=3"}, "clip_bound = 3: the selection decides this"),
        ({"clients": ["#a"] * 3 + ["b"] * 3}, {}, "client '#a': a cohort file cannot"),
        ({"labels": [0] * 6}, {}, "data = npz:.* one class"),
    ],
)
def test_bad_input_is_refused_before_work(select, tmp_path, arrays, settings, named):
    arrays = {"labels": [0, 1, 2] * 2, "clients": ["a"] * 3 + ["b"] * 3} | arrays
    arrays = {name: np.array(values) for name, values in arrays.items()}
    np.savez(tmp_path / "own.npz", images=np.zeros((6, 16, 16), np.uint8), **arrays)
    data = f"npz:{tmp_path / 'own.npz'}"
    *done, path = select(below=0.5, data=data, **settings)
    refused(done, named)
    assert not path.exists()


def test_empty_cohort_has_no_file(select):
    code, out, _, path = select(below=0.0, above=1.0)
    assert code == 0
    assert "above is empty and has no file" in out
    assert not (path / "above.txt").exists()


@pytest.mark.parametrize("noise", [{}, {"noise_per_clip": 2.0}])
@pytest.mark.parametrize("is_asked", [False, True])
def test_stopped_selection_goes_on_but_asks_privately_only_once(
    select, fedgs, monkeypatch, is_asked, noise
):
    def stop(*_: object) -> None:
        raise RunStopped("stopped at its end")

    step = "divided" if is_asked else "accuracies_of"
    original = getattr(select_clients, step)
    monkeypatch.setattr(select_clients, step, stop)
    settings = {"below": 0.5, "bug": "flip"} | noise
    code, _, err, path = select(**settings)
    assert code == 1
    assert re.match(r"stopped at .*\ncontinue with: fedgs resume ", err)
    assert not (path / "cohorts.json").exists()
    monkeypatch.setattr(select_clients, step, original)
    done = fedgs("resume", path)
    if not (noise and is_asked):
        assert done[0] == 0
        summary = json.loads((path / "cohorts.json").read_text())
        assert sum(summary["cohorts"].values()) == K
        if not noise:
            whole = select("whole", **settings)[3]
            assert json.loads((whole / "cohorts.json").read_text()) == summary
        done = fedgs("resume", path)
    refused(done, f"{path}: its clients were asked for their cohorts")


@pytest.mark.parametrize(
    "changed", [{"noise_per_clip": 50.0}, {"noise_per_clip": None}]
)
def test_a_plan_that_was_changed_is_not_what_the_selection_cost(
    select, fedgs, monkeypatch, changed
):
    def stop(*_: object) -> None:
        raise RunStopped("stopped at its end")

    original = select_clients.accuracies_of
    monkeypatch.setattr(select_clients, "accuracies_of", stop)
    path = select(below=0.5, noise_per_clip=2.0)[3]
    monkeypatch.setattr(select_clients, "accuracies_of", original)
    intact = (path / "plan.json").read_text()
    plan = json.loads(intact)
    plan["selection"] |= changed
    (path / "plan.json").write_text(json.dumps(plan))
    refused(fedgs("resume", path), ".*plan.json: (clip_bound|noise_multiplier) is")
    assert not (path / "asked").exists()
    (path / "plan.json").write_text(intact)
    printed(fedgs("resume", path))


@pytest.mark.parametrize("flag", ["cohorts", "cohort_value"])
def test_cohorts_are_selected_among_all_clients(select, flag):
    *done, path = select(below=0.5, **{flag: "v1"})
    refused(done, f"{flag} = v1: cohorts are selected among all clients; leave out")
    assert not path.exists()


def test_the_classifiers_run_says_what_it_is(select, fedgs):
    run = select(below=0.5, noise_per_clip=2.0)[3] / "classifier"
    code, out, _ = fedgs("privacy", "of", run)
    assert code == 0
    # Two releases of z = 2: mu^2 = 2, and no response of epsilon 3 yet.
    assert "6.573" in out
    assert "excludes the questions that select cohorts" in " ".join(out.split())
    for command, file in (("sample", "x.png"), ("report", "x.html")):
        told = fedgs(command, run, "--output", run.parent / file)
        refused(told, ".*a classifier, which draws no images; .*fedgs privacy of")


@pytest.mark.flower
@pytest.mark.slow
def test_flower_selects_what_the_local_engine_selects(select, monkeypatch):
    """The same strategy and ClientApp: two Ray actors against threads.

    All clients train in every round: fewer would be drawn by a secret of each run.
    """
    root = Path(__file__).resolve().parents[2]
    python_path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", python_path.rstrip(os.pathsep))
    settings = {"below": 40, "above": 60, "percentiles": True, "num_rounds": 3}
    settings |= {"bug": "flip", "clients_per_round": K}
    code, out, err, flower = select("flower", engine="flower", **settings)
    assert (code, err) == (0, ""), (flower / "flower.log").read_text()
    assert "round 3 of 3" in out
    local = select("local", **settings)[3]
    for cohort in ("selected", "above", "rest"):
        ours, theirs = (path / f"{cohort}.txt" for path in (local, flower))
        assert ours.exists() == theirs.exists()
        assert not ours.exists() or ours.read_text() == theirs.read_text()
