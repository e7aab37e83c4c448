"""`fedgs deploy status`: the numbers of a run folder, and their Prometheus text."""

import dataclasses
import json
import os
import shutil
import subprocess
import time
from io import FileIO
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import runs
from events import read_events
from experiments.cli.main import app
from experiments.commands import deploy_metrics, deploy_status
from experiments.commands.deploy_metrics import to_prometheus
from experiments.commands.deploy_status import (
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
from fedgs.files import read_json, write_json
from fedgs.privacy.accounting import Statement
from fedgs.privacy.ledger import Ledger
from fedgs.process import start_of
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from runs import rewrite
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
    nodes=(),
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


def test_status_of_stages_has_no_pace(trained):
    (trained.path / "generator.safetensors").unlink()
    lines = [{"round": round, "num_answers": 2} for round in (1, 2)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (trained.path / "metrics.jsonl").write_text(text)
    status = status_of(trained.path)
    assert (status.seconds_per_round, status.seconds_left) == (None, None)


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
    write_json(trained.path / ".flower" / "result.json", outcome)
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


def deployed(state: Path, pid: int | None = None) -> RunFolder:
    """A state directory with a run at work, whose server is this or another process."""
    (state / "runs").mkdir(parents=True)
    nodes = {"nodes": "hospital-a,hospital-b", "clients_per_node": 3}
    nodes |= {"engine": "flower", "data": "digits"}
    output = str(state / "runs" / "digits")
    folder = RunFolder.create(tiny_config(**FULL_PARTICIPATION | nodes, output=output))
    (folder.path / ".flower").mkdir()
    write_json(folder.path / ".flower" / "nodes.json", TOLD)
    make_certificates(state / "certs", ["localhost"], [], days=30)
    pid = pid or os.getpid()
    roles = ("server", "superlink", "superexec", "serverapp")
    files = {"server": "server.crt", "authority": "ca.crt"}
    told = {
        "state": "running",
        "reason": "",
        "superexec_restarts": 1,
        "certificates": {w: str(state / "certs" / n) for w, n in files.items()},
        "processes": [{"role": r, "pid": pid, "start": start_of(pid)} for r in roles],
    }
    write_json(state / "processes.json", told)
    return folder


def test_status_of_a_deployed_run_names_its_nodes_and_how_each_stands(tmp_path):
    folder = deployed(tmp_path / "state")
    with folder.locked():
        status = status_of(folder.path)
    assert (status.state, status.waiting_for) == ("running", ("hospital-b",))
    assert (status.bytes_sent, status.bytes_received) == (123, 45)
    first, second = status.nodes
    found = (first.name, first.online, first.last_answer_time)
    assert found == ("hospital-a", True, None)
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
    folder = deployed(state, sleeper.pid)
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
    deployed(state, sleeper.pid)
    told = read_json(state / "processes.json")
    for process in told["processes"]:
        process["start"] -= 1
    write_json(state / "processes.json", told)
    assert overview_of(state).server.state == "dead"


def test_metrics_of_a_server_and_its_nodes(tmp_path):
    folder = deployed(tmp_path / "state")
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
    of_b = {"online": 0, "waited_for": 1, "resends_total": 4, "failures_total": 1}
    of_b |= {"last_answer_round": 2, "last_answer_timestamp_seconds": 1799999999}
    for name, value in of_b.items():
        labels = 'node="hospital-b",run="digits"'
        assert samples[f"fedgs_node_{name}{{{labels}}}"] == value
    assert samples['fedgs_last_sign_timestamp_seconds{run="digits"}'] == 1.8e9


def test_table_of_a_server_and_its_nodes(tmp_path):
    folder = deployed(tmp_path / "state")
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
    deployed(tmp_path)
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
    shutil.rmtree(trained.path / "checkpoint")
    for path in (*trained.path.glob("*.safetensors"), trained.path / "ledger.json"):
        path.unlink()
    events = Ledger.read(trained.path / "ledger.jsonl").events
    rewrite(trained.path, [dataclasses.replace(e, counted_nodes=1) for e in events])
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
        answer = httpx.get(f"{url}/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert answer.text == to_prometheus(of(KNOWN))
        assert httpx.get(f"{url}/etc/passwd").status_code == 404
        broken.append(1)
        answer = httpx.get(f"{url}/metrics")
        assert answer.status_code == 503
        assert "secret" not in answer.text
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# ------------------------------------------------------------------ event log


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    """The file that this process's events go to, which is not made yet."""
    monkeypatch.setattr(event_log, "_reported", set())
    monkeypatch.setenv(event_log.EVENT_LOG_VARIABLE, str(tmp_path / "events.jsonl"))
    return tmp_path / "events.jsonl"


def test_events_are_json_lines_for_their_owner(log, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv(event_log.EVENT_LOG_VARIABLE)
        event_log.log_event("answer", node="a", round=1)  # nowhere
    given = {"node": "a", "round": 2, "outcome": "ok", "seconds": 0.5}
    event_log.log_event("answer", **given)
    (event,) = read_events(log)
    assert event.pop("time").endswith("Z")
    assert event == {"event": "answer"} | given
    assert log.stat().st_mode & 0o777 == 0o600


def test_event_takes_scalars_only_so_that_no_tensor_slips_in():
    words = "pixels: an event holds plain scalars"
    assert_refused(words, event_log.log_event, "answer", pixels=[0.0])


def test_event_log_that_cannot_be_written_is_said_once_and_stops_no_run(log, capsys):
    log.mkdir()
    event_log.log_event("round", round=1)
    event_log.log_event("round", round=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{log}: Is a directory; events are lost"


def test_event_that_fits_in_part_leaves_no_half_behind(log, monkeypatch):
    class NearlyFull(FileIO):
        def write(self, line):
            return super().write(line[:9])

    event_log.log_event("round", round=1)
    with monkeypatch.context() as patch:
        patch.setattr(event_log, "FileIO", NearlyFull)
        event_log.log_event("round", round=2)
    event_log.log_event("round", round=3)
    assert [event["round"] for event in read_events(log)] == [1, 3]
