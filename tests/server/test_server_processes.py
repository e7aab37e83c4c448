"""The processes of a deployed server: supervised, locked, ended together.

The supervisor is tested with small stand-ins for Flower's processes; the tests marked
`multihost` start Flower's own on the loopback.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from experiments.commands.deploy_status import overview_of
from experiments.launch import supervisor as deploy_supervisor
from experiments.launch.supervisor import ServerEnded, Supervisor
from fedgs import process
from fedgs.files import read_json
from fedgs.process import SERVER_VARIABLE, processes_of, start_of
from refusals import assert_refused

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


# ------------------------------------------------------------------ stand-ins


@pytest.fixture
def make(tmp_path, monkeypatch) -> Iterator[object]:
    """Makes supervisors of stand-ins; this process's environment is put back."""
    environment = dict(os.environ)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    mask = os.umask(0)
    monkeypatch.setattr(deploy_supervisor, "LOOK_SECONDS", 0.02)

    def supervisor(superlink=SLEEPER, superexec=SLEEPER, port=1) -> Supervisor:
        url = f"http://127.0.0.1:{port}/health"
        return Supervisor(tmp_path, superlink, superexec, {}, url)

    yield supervisor
    process.end_processes(str(tmp_path), 0.0, SERVER_VARIABLE)
    os.environ.clear()
    os.environ.update(environment)
    os.umask(mask)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def told(state: Path) -> dict:
    return read_json(state / "processes.json")


def ending(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


KILLED = ending("import os; os.kill(os.getpid(), 9)")


def own(tmp_path: Path) -> list[int]:
    """The processes of the server that live."""
    return processes_of(str(tmp_path), SERVER_VARIABLE)


def test_server_ends_with_a_reason_when_its_superlink_does(make, tmp_path, capfd):
    supervisor = make(superlink=ending("raise SystemExit(7)"))
    with pytest.raises(ServerEnded, match=r"superlink \(pid \d+\) .* exit code 7"):
        supervisor.run()
    assert own(tmp_path) == []
    assert told(tmp_path)["state"] == "ended"
    assert "exit code 7" in told(tmp_path)["reason"]


def test_dead_superexec_is_started_again_until_it_ends_too_often(make, tmp_path, capfd):
    supervisor = make(superexec=KILLED)
    with pytest.raises(ServerEnded, match=r"superexec .* by SIGKILL, 6 times in 600 s"):
        supervisor.run()
    again = capfd.readouterr().err.count("was ended by SIGKILL; starting it again")
    assert again == deploy_supervisor.MOST_RESTARTS
    assert own(tmp_path) == []


def test_restarts_of_the_superexec_are_all_counted(make, tmp_path, monkeypatch, capfd):
    """Also those that are too long ago to end the server: a counter never falls."""
    monkeypatch.setattr(deploy_supervisor, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(deploy_supervisor, "MOST_RESTARTS", 1)
    supervisor = make(superexec=KILLED)

    counts: list[int] = []
    tell = supervisor._write_down

    def telling(state: str, reason: str = "") -> None:
        tell(state, reason)
        counts.append(told(tmp_path)["superexec_restarts"])
        if len(counts) > 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(supervisor, "_write_down", telling)
    supervisor.run()
    assert counts == sorted(counts)
    assert counts[-1] >= 3


def test_end_by_an_error_of_the_server_itself_has_a_reason(make, tmp_path, capfd):
    supervisor = make(superexec=[str(tmp_path / "missing")])
    with pytest.raises(FileNotFoundError):
        supervisor.run()
    assert told(tmp_path)["state"] == "ended"
    assert "No such file" in told(tmp_path)["reason"]


def test_port_that_speaks_no_http_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def speak() -> None:
            with other.accept()[0] as caller:
                caller.recv(1000)
                caller.sendall(b"220 mail.example.org\r\n")

        threading.Thread(target=speak, daemon=True).start()
        port = other.getsockname()[1]
        assert not deploy_supervisor._answers(f"http://127.0.0.1:{port}/health")


def test_signal_ends_all_processes_and_what_they_started(make, tmp_path, monkeypatch):
    monkeypatch.setattr(deploy_supervisor, "STOP_SECONDS", 0.2)
    (tmp_path / "child.py").write_text(
        "import signal, subprocess, sys, time\n"
        "deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); '\n"
        "child = [sys.executable, '-S', '-c', deaf + 'time.sleep(600)']\n"
        "subprocess.Popen(child, start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    supervisor = make(superexec=[sys.executable, "-S", str(tmp_path / "child.py")])
    count = 3  # superlink, superexec and its child

    def ask() -> None:
        while len(own(tmp_path)) < count:
            time.sleep(0.02)
        time.sleep(0.3)  # until it ignores SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    supervisor.run()
    assert own(tmp_path) == []
    assert told(tmp_path)["state"] == "ended"
    assert told(tmp_path)["reason"] == ""


def test_second_server_on_a_state_directory_is_refused(make, tmp_path, monkeypatch):
    lock = process.hold_lock(tmp_path / "server.lock", "", 0.0)
    monkeypatch.setattr(deploy_supervisor, "LOCK_SECONDS", 0.0)
    assert_refused(r"another server uses it; .* --state-dir", make().run)
    assert not (tmp_path / "processes.json").exists()
    lock.lock.release()


def test_process_left_by_a_killed_server_is_ended_before_the_next_one_starts(
    make, tmp_path, monkeypatch
):
    environment = {**os.environ, SERVER_VARIABLE: str(tmp_path)}
    left = subprocess.Popen(SLEEPER, env=environment)
    while left.pid not in own(tmp_path):
        time.sleep(0.01)  # until it has its own environment
    found: list[int | None] = []

    def start(self: Supervisor, role: str) -> None:
        found.append(start_of(left.pid))
        raise ServerEnded("enough")

    monkeypatch.setattr(Supervisor, "_start", start)
    with pytest.raises(ServerEnded):
        make().run()
    assert found == [None]
    assert left.wait(10) == -signal.SIGKILL


def test_superlink_that_answers_no_more_ends_the_server(make, monkeypatch, tmp_path):
    monkeypatch.setattr(deploy_supervisor, "HEALTH_SECONDS", 0.0)
    monkeypatch.setattr(deploy_supervisor, "START_SECONDS", 0.0)
    answers = iter([False, True] + [False] * deploy_supervisor.MOST_FAILURES)
    monkeypatch.setattr(deploy_supervisor, "_answers", lambda url: next(answers))
    sent: list[str] = []
    monkeypatch.setattr(deploy_supervisor, "notify", sent.append)
    with pytest.raises(ServerEnded, match="did not answer 24 times"):
        make().run()
    assert sent == ["READY=1\nWATCHDOG=1", "STOPPING=1"]
    assert own(tmp_path) == []


def test_health_check_asks_the_server_itself(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert deploy_supervisor._answers(f"{url}/health")
        assert not deploy_supervisor._answers(f"{url}/other")
        server.shutdown()
    assert not deploy_supervisor._answers(f"{url}/health")


# ------------------------------------------------------------------ helpers


def test_start_of_a_process_tells_it_from_another_one():
    child = subprocess.Popen(SLEEPER)
    try:
        assert start_of(child.pid) == start_of(child.pid) is not None
        assert start_of(child.pid) >= start_of(os.getpid())
    finally:
        child.kill()
    while start_of(child.pid) is not None:  # a zombie has ended
        time.sleep(0.01)
    child.wait()
    assert start_of(child.pid) is None


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_over_its_socket(tmp_path, monkeypatch, abstract):
    path = "\0fedgs-test-notify" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", path.replace("\0", "@"))
        process.notify("READY=1")
        assert systemd.recv(100) == b"READY=1"
    process.notify("READY=1")  # systemd is gone: no error
    monkeypatch.delenv("NOTIFY_SOCKET")
    process.notify("READY=1")


# ------------------------------------------------------------------ Flower's own


@pytest.mark.slow
def test_run_starts_after_the_superexec_was_killed(deployment):
    machines, server = deployment.machines, deployment.serve()
    first = deployment.wait_for("superlink", "superexec")["superexec"]
    os.kill(first, signal.SIGKILL)
    machines.until(
        lambda: deployment.processes().get("superexec", first) != first, server
    )
    deployment.join("a")
    deployment.join("b")
    submitted = deployment.start_run(num_rounds=2)
    assert submitted.wait(600) == 0, machines.logs()
    assert "by SIGKILL; starting it again" in machines.log_of(server)


def must_have_stopped(deployment) -> None:
    """The run ended with a checkpoint, from which it goes on."""
    result = read_json(deployment.run / ".flower" / "result.json")
    assert result["status"] == "stopped", result


LONG = {"num_rounds": 500, "checkpoint_every": 500}


@pytest.mark.slow
def test_run_whose_superexec_is_killed_stops_with_a_checkpoint(deployment):
    machines = deployment.machines
    server, submitted = deployment.running(2, **LONG)
    pids = deployment.wait_for("superexec", "serverapp")
    os.kill(pids["superexec"], signal.SIGKILL)
    assert submitted.wait(120) == 1, machines.logs()
    machines.until(lambda: start_of(pids["serverapp"]) is None, server)
    must_have_stopped(deployment)
    deployment.until_next_round(server, deployment.resume())


@pytest.mark.slow
def test_sigterm_commits_the_run_and_ends_within_30_s(deployment):
    server, _ = deployment.running(2, **LONG)
    started = time.monotonic()
    server.terminate()
    assert server.wait(60) == 0, deployment.machines.logs()
    assert time.monotonic() - started < 30
    assert deployment.left() == []
    must_have_stopped(deployment)
    assert deployment.told()["state"] == "ended"
    server = deployment.serve()
    deployment.until_next_round(server, deployment.resume())


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "superlink", "serverapp"])
def test_nothing_is_left_of_a_process_that_was_killed(deployment, victim):
    machines = deployment.machines

    def states() -> list[str]:
        return [run.state for run in overview_of(deployment.state).runs]

    server, submitted = deployment.running(1, num_rounds=500)
    pids = deployment.wait_for("superlink", "superexec", "serverapp")
    before = overview_of(deployment.state)
    assert before.server is not None
    assert before.server.state == "running"
    assert states() == ["running"]
    assert {node.online for node in before.runs[0].nodes} == {True}
    os.kill(pids[victim], signal.SIGKILL)
    machines.until(lambda: states() == ["interrupted"])
    if victim == "serverapp":  # the server goes on, and so can the run
        assert overview_of(deployment.state).server.state == "running"
        assert submitted.wait(600) == 1, machines.logs()
        deployment.until_next_round(server, deployment.resume())
        return
    code = server.wait(60)
    machines.until(lambda: deployment.left() == [])
    overview = overview_of(deployment.state)
    assert overview.server.state == ("dead" if victim == "server" else "ended")
    assert {node.online for node in overview.runs[0].nodes} == {None}
    if victim == "superlink":
        assert code == 1, machines.logs()
        reason = "was ended by SIGKILL; the server has ended"
        assert reason in machines.log_of(server)
        assert "by SIGKILL" in deployment.told()["reason"]
    deployment.serve()  # the port is free, the lock as well
