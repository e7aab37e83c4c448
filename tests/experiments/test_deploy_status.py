"""`fedgs deploy status`: the numbers of a run folder, and their Prometheus text."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from io import FileIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

import runs
from events import read_events
from experiments.cli.main import app
from experiments.commands import deploy_metrics, deploy_status
from experiments.commands.deploy_metrics import to_prometheus
from experiments.commands.deploy_status import (
    Node,
    Overview,
    Status,
    overview_of,
    status_of,
    statuses_in,
)
from experiments.launch.certs import make_certificates
from experiments.launch.health import Server
from fedgs import event_log
from fedgs.errors import UserError
from fedgs.privacy.accounting import Statement
from fedgs.privacy.ledger import Ledger
from fedgs.process import start_of
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from tiny import FULL_PARTICIPATION, tiny_config, tiny_data


def _stated(**about) -> Statement:
    rest = {"unit": "client", "theorem": "", "conditions": (), "asked": "epsilon"}
    rest |= {"client_selection": "all", "num_rounds": 8}
    return Statement(delta=1e-5, **about, **rest)


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
        _stated(adversary="server", relation="zero-out", epsilon=1.5, guarantee=True),
        _stated(
            adversary="release", relation="replace-one", epsilon=None, guarantee=False
        ),
    ),
    waiting_for=(),
    nodes=(
        Node(
            name="hospital-a",
            online=True,
            is_waited_for=False,
            last_answer=7,
            last_answer_time=1.8e9,
            resends=2,
            failures=1,
            last_failure="hospital-a: no answer in time",
            reason="",
        ),
        Node(
            name="hospital-b",
            online=None,
            is_waited_for=False,
            last_answer=0,
            last_answer_time=None,
            resends=0,
            failures=0,
            last_failure="",
            reason="its state is lost",
        ),
    ),
    bytes_sent=1000,
    bytes_received=None,
    seconds_per_round=0.5,
    seconds_left=6.5,
    updated=1.25,
    last_sign=None,
)


def of(*runs: object, server: Server | None = None) -> Overview:
    return Overview(server=server, runs=runs)


def train(path: Path, **settings: object) -> RunFolder:
    config = tiny_config(**FULL_PARTICIPATION | settings, output=str(path))
    folder = RunFolder.create(config)
    runs.train(folder, data=tiny_data(config))
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
    stated = epsilons.of_run(trained.path)
    found = [(e.adversary, e.relation, e.epsilon) for e in status.epsilons]
    assert found == [(s.adversary, s.relation, s.epsilon) for s in stated]
    assert not any(e.guarantee for e in status.epsilons)  # the noise is seeded


def test_status_of_a_run_that_has_not_begun(tmp_path):
    folder = RunFolder.create(tiny_config(output=str(tmp_path / "run")))
    status = status_of(folder.path)
    assert (status.state, status.round, status.released) == ("interrupted", 0, 0)
    assert status.epsilons == ()
    assert status.seconds_left is None
    assert "fedgs resume RUN continues it" in status.message


def test_status_of_an_interrupted_run_estimates_the_time_left(trained):
    (trained.path / "generator.safetensors").unlink()
    lines = [{"round": r, "seconds": s, "num_answers": 2} for r, s in ((1, 9), (2, 1))]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"round": 3, "sec'
    (trained.path / "metrics.jsonl").write_text(text)
    shutil.rmtree(trained.path / "checkpoint")  # it was of round 3
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


def test_a_lock_of_another_file_with_the_same_number_is_not_the_runs(
    trained, tmp_path, monkeypatch
):
    """File systems number their files each for itself."""
    (trained.path / "generator.safetensors").unlink()
    number = (trained.path / ".lock").stat().st_ino
    line = f"1: FLOCK  ADVISORY  WRITE {os.getpid()} fd:01:{number} 0 EOF\n"
    monkeypatch.setattr(deploy_status, "LOCKS", tmp_path / "locks")
    (tmp_path / "locks").write_text(line)
    assert status_of(trained.path).state == "interrupted"
    with trained.locked():
        assert status_of(trained.path).state == "running"


def test_round_is_told_by_the_checkpoint_where_metrics_were_lost(trained):
    (trained.path / "metrics.jsonl").unlink()
    assert status_of(trained.path).round == 3


TOLD = {
    "time": 1.8e9,
    "waiting_for": ["hospital-b"],
    "bytes_sent": 123,
    "bytes_received": 45,
    "nodes": {
        "hospital-a": {"online": True, "last_answer": 3, "reason": ""},  # of before
        "hospital-b": {
            "online": False,
            "last_answer": 2,
            "last_answer_time": 1799999999,
            "resends": 4,
            "failures": 1,
            "last_failure": "hospital-b: no answer in time",
            "reason": "hospital-b: has not joined",
        },
    },
}


def deployed(state: Path, process: "subprocess.Popen[bytes] | None") -> RunFolder:
    """A state directory with a run at work, whose server is a process that sleeps."""
    (state / "runs").mkdir(parents=True)
    nodes = {"nodes": "hospital-a,hospital-b", "clients_per_node": 3}
    nodes |= {"engine": "flower", "data": "digits"}
    output = str(state / "runs" / "digits")
    folder = RunFolder.create(tiny_config(**FULL_PARTICIPATION | nodes, output=output))
    (folder.path / ".flower").mkdir()
    (folder.path / ".flower" / "nodes.json").write_text(json.dumps(TOLD))
    make_certificates(state / "certs", ["localhost"], [], days=30)
    pid = os.getpid() if process is None else process.pid
    given = {"server": "server.crt", "authority": "ca.crt"}
    told = {
        "state": "running",
        "reason": "",
        "superexec_restarts": 1,
        "certificates": {w: str(state / "certs" / n) for w, n in given.items()},
        "processes": [
            {"role": role, "pid": pid, "start": start_of(pid)}
            for role in ("server", "superlink", "superexec", "serverapp")
        ],
    }
    (state / "processes.json").write_text(json.dumps(told))
    return folder


def test_status_of_a_deployed_run_names_its_nodes_and_how_each_stands(tmp_path):
    folder = deployed(tmp_path / "state", None)
    with folder.locked():
        status = status_of(folder.path)
    assert (status.state, status.waiting_for) == ("running", ("hospital-b",))
    assert (status.bytes_sent, status.bytes_received) == (123, 45)
    first, second = status.nodes
    assert (first.name, first.online, first.last_answer_time) == (
        *("hospital-a", True, None),
    )
    assert (second.online, second.is_waited_for) == (False, True)
    assert (second.resends, second.failures, second.last_answer) == (4, 1, 2)


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_dead_server_is_seen_as_dead_and_nobody_as_online(tmp_path, sleeper):
    """The run's own process may live a little longer, and holds the run's lock."""
    state = tmp_path / "state"
    folder = deployed(state, sleeper)
    with folder.locked():
        assert overview_of(state).server.state == "running"
        assert status_of(folder.path).state == "running"
        sleeper.kill()
        sleeper.wait()
        for place in (state, state / "runs", folder.path):
            assert overview_of(place).server.state == "dead"
        status = status_of(folder.path)
    assert status.state == "interrupted"
    assert "its server is dead (no process: server, superlink" in status.message
    assert status.waiting_for == ()
    assert [node.online for node in status.nodes] == [None, None]
    samples = parsed(to_prometheus(overview_of(state)))
    assert samples["fedgs_server_up"] == 0
    assert samples['fedgs_processes{role="superlink"}'] == 0
    assert not [name for name in samples if name.startswith("fedgs_node_online")]


def test_a_pid_that_was_given_again_is_not_the_server(tmp_path, sleeper):
    state = tmp_path / "state"
    deployed(state, sleeper)
    told = json.loads((state / "processes.json").read_text())
    for process in told["processes"]:
        process["start"] -= 1
    (state / "processes.json").write_text(json.dumps(told))
    assert overview_of(state).server.state == "dead"


def test_metrics_of_a_server_and_its_nodes(tmp_path):
    folder = deployed(tmp_path / "state", None)
    with folder.locked():
        overview = overview_of(tmp_path / "state")
    samples = parsed(to_prometheus(overview))
    assert samples["fedgs_server_up"] == samples['fedgs_processes{role="server"}'] == 1
    assert samples["fedgs_superexec_restarts_total"] == 1
    assert 0 < samples["fedgs_disk_free_bytes"] < samples["fedgs_disk_size_bytes"]
    name = "fedgs_certificate_expiry_timestamp_seconds"
    left = {
        whose: (samples[f'{name}{{certificate="{whose}"}}'] - time.time()) / 86400
        for whose in ("server", "authority")
    }
    assert left["server"] == pytest.approx(30, abs=0.1)
    assert left["authority"] == pytest.approx(3650, abs=0.1)
    of_b = 'node="hospital-b",run="digits"'
    assert samples[f"fedgs_node_online{{{of_b}}}"] == 0
    assert samples[f"fedgs_node_waited_for{{{of_b}}}"] == 1
    assert samples[f"fedgs_node_resends_total{{{of_b}}}"] == 4
    assert samples[f"fedgs_node_failures_total{{{of_b}}}"] == 1
    assert samples[f"fedgs_node_last_answer_round{{{of_b}}}"] == 2
    when = samples[f"fedgs_node_last_answer_timestamp_seconds{{{of_b}}}"]
    assert when == 1799999999
    assert samples['fedgs_last_sign_timestamp_seconds{run="digits"}'] == 1.8e9


def test_table_of_a_server_and_its_nodes(tmp_path):
    folder = deployed(tmp_path / "state", None)
    (tmp_path / "state" / "certs" / "ca.crt").write_text("no certificate")
    with folder.locked():
        arguments = ["deploy", "status", str(tmp_path / "state")]
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.strip("│┃ ").split()) for line in done.stdout.splitlines()]
    assert f"superlink │ pid {os.getpid()} lives" in lines
    assert "certificate, authority │ cannot be read" in lines
    assert any(line.startswith("certificate, server │ until 2") for line in lines)
    (second,) = [line for line in lines if line.startswith("hospital-b │ NO │")]
    assert "round 2, 2027-01-15 07:59:59 UTC │ 4 │ 1 │ hospital-b: has not" in second


def test_status_of_a_server_without_runs(tmp_path):
    deployed(tmp_path, None)
    shutil.rmtree(tmp_path / "runs" / "digits")
    arguments = ["deploy", "status", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["runs"] == []
    assert found["server"]["state"] == "running"


def test_broken_ledger_is_an_error_not_a_number(trained):
    ledger = trained.path / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"attempt":1', b'"attempt":2', 1))
    assert_refused("ledger", status_of, trained.path)


def test_broken_run_does_not_hide_the_others(tmp_path, broken, trained):
    first, second = statuses_in(tmp_path)
    assert (first.run, first.state) == ("broken", "unreadable")
    assert "ledger.jsonl: line 1" in first.message
    assert second == status_of(trained.path)
    samples = parsed(to_prometheus(of(first, second)))
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
    assert json.loads(output)["server"] is None
    first, second = json.loads(output)["runs"]
    assert sorted(first) == ["message", "run", "state"]
    assert second["round"] == 3
    code, output = status()
    assert code == 1
    assert "unreadable: " in output
    assert "3 of 3" in output
    code, _ = status("--prometheus", tmp_path / "fedgs.prom", "--once")
    assert code == 0  # the file says it
    assert (tmp_path / "fedgs.prom").read_text() == to_prometheus(overview_of(tmp_path))


def test_run_made_anew_in_the_same_place_has_its_own_epsilon(trained):
    before = status_of(trained.path)
    shutil.rmtree(trained.path)
    train(trained.path, delta=1e-3)
    after = status_of(trained.path)
    assert after.released == before.released
    assert after.epsilons != before.epsilons
    stated = epsilons.of_run(trained.path)
    assert [e.epsilon for e in after.epsilons] == [s.epsilon for s in stated]


def test_another_ledger_of_the_same_length_has_its_own_epsilon(trained):
    before = status_of(trained.path)
    path = trained.path / "ledger.jsonl"
    events = Ledger.read(path).events
    path.unlink()
    shutil.rmtree(trained.path / "checkpoint")
    (trained.path / "ledger.json").unlink()
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
    assert_refused("no such folder; give", deploy_status.runs_of, tmp_path / "nothing")


def test_prometheus_text():
    text = to_prometheus(of(KNOWN))
    expected = """# HELP fedgs_round Finished generator updates.
# TYPE fedgs_round gauge
fedgs_round{run="a \\"run\\"\\\\"} 7.0
"""
    assert expected in text
    samples = parsed(text)
    run = r'run="a \"run\"\\"'
    delta = 'delta="1e-05"'
    where = f'adversary="server",{delta},guarantee="yes",relation="zero-out",{run}'
    assert samples[f"fedgs_epsilon{{{where}}}"] == 1.5
    where = f'adversary="release",{delta},guarantee="no",relation="replace-one",{run}'
    assert samples[f"fedgs_epsilon{{{where}}}"] == float("inf")
    assert samples[f'fedgs_state{{{run},state="running"}}'] == 1
    assert samples[f'fedgs_state{{{run},state="failed"}}'] == 0
    assert samples[f"fedgs_sent_bytes{{{run}}}"] == 1000
    assert not [name for name in samples if name.startswith("fedgs_received_bytes")]


def test_prometheus_text_of_two_runs_has_one_header_for_each_name():
    lines = to_prometheus(of(KNOWN, KNOWN)).splitlines()
    headers = [line for line in lines if line.startswith("#")]
    assert len(headers) == len(set(headers))
    assert to_prometheus(of()) == ""


def parsed(text: str) -> dict[str, float]:
    """Reads the text format's samples; every line but comments is NAME{...} VALUE."""
    assert text.endswith("\n")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines)}


def test_prometheus_file_is_whole(tmp_path):
    path = tmp_path / "fedgs.prom"
    deploy_metrics.write_prometheus(path, of(KNOWN))
    assert path.read_text() == to_prometheus(of(KNOWN))
    assert [p.name for p in tmp_path.iterdir()] == ["fedgs.prom"]
    with pytest.raises(UserError, match="prometheus = "):
        deploy_metrics.write_prometheus(tmp_path / "no" / "x.prom", of(KNOWN))


def test_metrics_endpoint():
    def current() -> Overview:
        if broken:
            raise UserError("/secret/path: is broken")
        return of(KNOWN)

    broken: list[int] = []
    server, thread = deploy_metrics.serve_metrics("127.0.0.1", 0, current)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith(
                "text/plain; version=0.0.4"
            )
            assert answer.read().decode() == to_prometheus(of(KNOWN))
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
    monkeypatch.setattr(event_log, "_reported", set())


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
    class NearlyFull(FileIO):
        def write(self, line):
            return super().write(line[:9])

    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(event_log.EVENT_LOG_VARIABLE, str(path))
    event_log.log_event("round", round=1)
    with monkeypatch.context() as patch:
        patch.setattr(event_log, "FileIO", NearlyFull)
        event_log.log_event("round", round=2)
    event_log.log_event("round", round=3)
    assert [event["round"] for event in read_events(path)] == [1, 3]


def test_event_log_is_for_its_owner(tmp_path, monkeypatch):
    path: Path = tmp_path / "events.jsonl"
    monkeypatch.setenv(event_log.EVENT_LOG_VARIABLE, str(path))
    event_log.log_event("round", round=1)
    assert path.stat().st_mode & 0o777 == 0o600
