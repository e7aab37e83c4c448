"""`fedgs deploy status`: the numbers of a run folder, and their Prometheus text."""

import contextlib
import dataclasses
import json
import os
import shutil
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from events import read_events
from experiments import deploy_status, privacy_report
from experiments.cli import app
from experiments.deploy_status import (
    Epsilon,
    Status,
    status_of,
    statuses_in,
    to_prometheus,
)
from fedgs import event_log, local
from fedgs.config import UserError
from fedgs.ledger import Ledger
from fedgs.run_folder import RunFolder
from tiny import FULL_PARTICIPATION, tiny_config, tiny_data

KNOWN = Status(
    run='a "run"\\',
    state="running",
    message="",
    round=7,
    num_rounds=20,
    released=8,
    participants=2,
    num_clients=3,
    num_nodes=3,
    num_answers=2,
    epsilons=(
        Epsilon(
            adversary="server",
            relation="zero-out",
            delta=1e-5,
            epsilon=1.5,
            guarantee=True,
        ),
        Epsilon(
            adversary="release",
            relation="replace-one",
            delta=1e-5,
            epsilon=None,
            guarantee=False,
        ),
    ),
    waiting_for=(),
    bytes_sent=1000,
    bytes_received=None,
    seconds_per_round=0.5,
    seconds_left=6.5,
    updated=1.25,
)


def train(path: Path, **settings: object) -> RunFolder:
    config = tiny_config(**FULL_PARTICIPATION | settings, output=str(path))
    folder = RunFolder.create(config)
    local.train(folder, tiny_data(config), lambda metrics: None, threading.Event())
    return folder


@pytest.fixture
def trained(tmp_path) -> RunFolder:
    return train(tmp_path / "run")


@pytest.fixture
def broken(tmp_path) -> RunFolder:
    folder = RunFolder.create(tiny_config(output=str(tmp_path / "broken")))
    (folder.path / "ledger.jsonl").write_text("[torn]\n")
    return folder


def test_status_of_a_finished_run(trained):
    status = status_of(trained.path)
    assert (status.state, status.round, status.num_rounds) == ("completed", 3, 3)
    assert (status.participants, status.num_clients) == (6, 6)
    assert (status.num_answers, status.num_nodes, status.released) == (3, 3, 3)
    assert status.seconds_left == 0
    stated = privacy_report.of_run(trained.path)
    found = [(e.adversary, e.relation, e.epsilon) for e in status.epsilons]
    assert found == [(s.adversary, s.relation, s.epsilon) for s in stated]
    assert not any(e.guarantee for e in status.epsilons)  # the noise is seeded


def test_status_of_a_run_that_has_not_begun(tmp_path):
    folder = RunFolder.create(tiny_config(output=str(tmp_path / "run")))
    status = status_of(folder.path)
    assert (status.state, status.round, status.released) == ("interrupted", 0, 0)
    assert status.epsilons == ()
    assert status.seconds_left is None


def test_status_of_an_interrupted_run_estimates_the_time_left(trained):
    (trained.path / "generator.safetensors").unlink()
    lines = [{"round": r, "seconds": s, "num_answers": 2} for r, s in ((1, 9), (2, 1))]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"round": 3, "sec'
    (trained.path / "metrics.jsonl").write_text(text)
    status = status_of(trained.path)
    assert (status.state, status.round, status.num_answers) == ("interrupted", 2, 2)
    assert (status.seconds_per_round, status.seconds_left) == (5.0, 5.0)


def test_status_tells_who_holds_the_folder_and_does_not_hold_it(trained):
    with trained.locked():
        assert status_of(trained.path).state == "running"
    assert status_of(trained.path).state == "completed"
    with trained.locked():  # looking has left no lock behind
        pass


def test_status_says_why_a_run_stopped(trained):
    (trained.path / "generator.safetensors").unlink()
    (trained.path / ".flower").mkdir()
    outcome = {"status": "stopped", "message": "2 of 3 nodes answered"}
    (trained.path / ".flower" / "result.json").write_text(json.dumps(outcome))
    status = status_of(trained.path)
    assert (status.state, status.message) == ("stopped", "2 of 3 nodes answered")


def test_status_of_a_deployed_run_names_who_is_waited_for_and_the_bytes(trained):
    (trained.path / ".flower").mkdir()
    told = {"waiting_for": ["hospital-b"], "bytes_sent": 123, "bytes_received": 45}
    (trained.path / ".flower" / "nodes.json").write_text(json.dumps(told))
    status = status_of(trained.path)
    assert status.waiting_for == ("hospital-b",)
    assert (status.bytes_sent, status.bytes_received) == (123, 45)


def test_broken_ledger_is_an_error_not_a_number(trained):
    ledger = trained.path / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"attempt":1', b'"attempt":2', 1))
    with pytest.raises(UserError, match="ledger"):
        status_of(trained.path)


def test_broken_run_does_not_hide_the_others(tmp_path, broken, trained):
    first, second = statuses_in(tmp_path)
    assert (first.run, first.state) == ("broken", "unreadable")
    assert "ledger.jsonl: line 1" in first.message
    assert second == status_of(trained.path)
    samples = parsed(to_prometheus([first, second]))
    assert samples['fedgs_state{run="broken",state="unreadable"}'] == 1
    assert samples['fedgs_state{run="run",state="unreadable"}'] == 0
    assert samples['fedgs_round{run="run"}'] == 3
    of_broken = [name for name in samples if 'run="broken"' in name]
    assert all(name.startswith("fedgs_state") for name in of_broken)


def test_command_shows_broken_runs_beside_others(tmp_path, broken, trained):
    def status(*flags: object) -> tuple[int, str]:
        arguments = ["deploy", "status", tmp_path, *flags]
        done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "300"})
        return done.exit_code, done.stdout

    code, output = status("--json")
    assert code == 1
    first, second = json.loads(output)
    assert sorted(first) == ["message", "run", "state"]
    assert second["round"] == 3
    code, output = status()
    assert code == 1
    assert "unreadable: " in output
    assert "3 of 3" in output
    code, _ = status("--prometheus", tmp_path / "fedgs.prom", "--once")
    assert code == 0  # the file says it
    assert (tmp_path / "fedgs.prom").read_text() == to_prometheus(statuses_in(tmp_path))


def test_run_made_anew_in_the_same_place_has_its_own_epsilon(trained):
    before = status_of(trained.path)
    shutil.rmtree(trained.path)
    train(trained.path, delta=1e-3)
    after = status_of(trained.path)
    assert after.released == before.released
    assert after.epsilons != before.epsilons
    stated = privacy_report.of_run(trained.path)
    assert [e.epsilon for e in after.epsilons] == [s.epsilon for s in stated]


def test_another_ledger_of_the_same_length_has_its_own_epsilon(trained):
    before = status_of(trained.path)
    path = trained.path / "ledger.jsonl"
    events = Ledger.read(path).events
    path.unlink()
    shutil.rmtree(trained.path / "checkpoint")
    (trained.path / "finished.json").unlink()
    with contextlib.closing(Ledger.open(path)) as ledger:
        for event in events:
            ledger.append(dataclasses.replace(event, noise_std=2 * event.noise_std))
    assert status_of(trained.path).epsilons != before.epsilons


def test_runs_of_a_state_directory(tmp_path, trained):
    assert deploy_status.runs_of(trained.path) == [trained.path]
    assert deploy_status.runs_of(tmp_path) == [trained.path]
    state = tmp_path / "state"
    (state / "runs").mkdir(parents=True)
    assert deploy_status.runs_of(state) == []
    trained.path.rename(state / "runs" / "digits")
    assert deploy_status.runs_of(state) == [state / "runs" / "digits"]
    with pytest.raises(UserError, match="no such folder; give"):
        deploy_status.runs_of(tmp_path / "nothing")


def test_prometheus_text():
    assert to_prometheus([KNOWN]).splitlines()[:3] == [
        "# HELP fedgs_round Finished generator updates.",
        "# TYPE fedgs_round gauge",
        r'fedgs_round{run="a \"run\"\\"} 7',
    ]
    samples = parsed(to_prometheus([KNOWN]))
    run = r'run="a \"run\"\\"'
    where = 'adversary="server",relation="zero-out",delta="1e-05",guarantee="yes"'
    assert samples[f"fedgs_epsilon{{{run},{where}}}"] == 1.5
    where = 'adversary="release",relation="replace-one",delta="1e-05",guarantee="no"'
    assert samples[f"fedgs_epsilon{{{run},{where}}}"] == float("inf")
    assert samples[f'fedgs_state{{{run},state="running"}}'] == 1
    assert samples[f'fedgs_state{{{run},state="failed"}}'] == 0
    assert samples[f"fedgs_sent_bytes{{{run}}}"] == 1000
    assert not [name for name in samples if name.startswith("fedgs_received_bytes")]


def test_prometheus_text_of_two_runs_has_one_header_for_each_name():
    lines = to_prometheus([KNOWN, KNOWN]).splitlines()
    headers = [line for line in lines if line.startswith("#")]
    assert len(headers) == len(set(headers))
    assert to_prometheus([]) == ""


def parsed(text: str) -> dict[str, float]:
    """Reads the text format's samples; every line but comments is NAME{...} VALUE."""
    assert text.endswith("\n")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines)}


def test_prometheus_file_is_whole(tmp_path):
    path = tmp_path / "fedgs.prom"
    deploy_status.write_prometheus(path, [KNOWN])
    assert path.read_text() == to_prometheus([KNOWN])
    assert [p.name for p in tmp_path.iterdir()] == ["fedgs.prom"]
    with pytest.raises(UserError, match="prometheus = "):
        deploy_status.write_prometheus(tmp_path / "no" / "x.prom", [KNOWN])


def test_metrics_endpoint():
    def current() -> list[Status]:
        if broken:
            raise UserError("/secret/path: is broken")
        return [KNOWN]

    broken: list[int] = []
    server = deploy_status.metrics_server("127.0.0.1", 0, current)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4"
            assert answer.read().decode() == to_prometheus([KNOWN])
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(f"{url}/etc/passwd")
        refused.value.close()
        broken.append(1)
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(f"{url}/metrics")
        assert b"secret" not in refused.value.read()
        refused.value.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# ------------------------------------------------------------------ event log


@pytest.fixture(autouse=True)
def _nothing_is_told(monkeypatch):
    monkeypatch.setattr(event_log, "_told", set())


def test_events_are_json_lines(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    event_log.log_event("answer", node="a", round=1)  # nowhere
    monkeypatch.setenv(event_log.EVENT_LOG_VARIABLE, str(path))
    event_log.log_event("answer", node="a", round=2, outcome="ok", seconds=0.5)
    (event,) = read_events(path)
    assert event.pop("time").endswith("Z")
    assert event == {
        "event": "answer", "node": "a", "round": 2, "outcome": "ok", "seconds": 0.5
    }  # fmt: skip


def test_event_takes_scalars_only_so_that_no_tensor_slips_in():
    with pytest.raises(UserError, match="pixels: an event holds plain scalars"):
        event_log.log_event("answer", pixels=[0.0])


def test_event_log_that_cannot_be_written_is_said_once_and_stops_no_run(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(event_log.EVENT_LOG_VARIABLE, str(tmp_path))  # a folder
    event_log.log_event("round", round=1)
    event_log.log_event("round", round=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{tmp_path}: Is a directory; events are lost"


def test_event_that_fits_in_part_leaves_no_half_behind(tmp_path, monkeypatch):
    path, write = tmp_path / "events.jsonl", os.write
    monkeypatch.setenv(event_log.EVENT_LOG_VARIABLE, str(path))
    event_log.log_event("round", round=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, line: write(file, line[:9]))
        event_log.log_event("round", round=2)
    event_log.log_event("round", round=3)
    assert [event["round"] for event in read_events(path)] == [1, 3]


def test_event_log_is_for_its_owner(tmp_path, monkeypatch):
    path: Path = tmp_path / "events.jsonl"
    monkeypatch.setenv(event_log.EVENT_LOG_VARIABLE, str(path))
    event_log.log_event("round", round=1)
    assert path.stat().st_mode & 0o777 == 0o600
