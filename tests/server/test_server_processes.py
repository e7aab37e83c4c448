"""The processes of a deployed server: locked, and ended together.

`supervise` is tested with small stand-ins for Flower's processes; the tests marked
`slow` start Flower's own on the loopback.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgs.files import read_json
from fedgs.process import SERVER_VARIABLE, end_processes, hold_lock, processes_of
from refusals import assert_refused
from server.launch import supervisor
from server.launch.supervisor import ServerEnded, supervise

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
BOTH = {"superlink": SLEEPER, "superexec": SLEEPER}
SUPERVISING = f"""
import sys; from pathlib import Path
from server.launch.supervisor import supervise
supervise(Path(sys.argv[1]), {BOTH}, {{}}, lambda: None)
"""


@pytest.fixture(autouse=True)
def _this_process_is_as_before(tmp_path, monkeypatch) -> Iterator[None]:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    mask = os.umask(0)
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.02)
    yield
    end_processes(str(tmp_path), 0.0, SERVER_VARIABLE)
    os.umask(mask)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def started(state: Path) -> list[int]:
    """The processes of the server that live."""
    return processes_of(str(state), SERVER_VARIABLE)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("role", ["superlink", "superexec"])
@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise SystemExit(7)", "ended with exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    ],
)
def test_a_process_that_ends_ends_the_server_with_a_sentence(tmp_path, role, code, how):
    commands = BOTH | {role: [sys.executable, "-S", "-c", code]}
    with pytest.raises(ServerEnded, match=rf"^the {role} \(pid \d+\) {how}$"):
        supervise(tmp_path, commands, {}, lambda: None)
    assert started(tmp_path) == []


def test_a_process_that_cannot_be_started_leaves_none_of_the_others(tmp_path):
    commands = BOTH | {"superexec": [str(tmp_path / "missing")]}
    with pytest.raises(FileNotFoundError):
        supervise(tmp_path, commands, {}, lambda: None)
    assert started(tmp_path) == []


def test_signal_ends_all_processes_and_what_they_started(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.2)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    child = [sys.executable, "-S", "-c", deaf]
    parent = f"import subprocess, time; subprocess.Popen({child}); time.sleep(600)"
    commands = BOTH | {"superexec": [sys.executable, "-S", "-c", parent]}

    def ask() -> None:
        wait_until(lambda: len(started(tmp_path)) == 3)
        time.sleep(0.3)  # until it ignores SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    supervise(tmp_path, commands, {}, lambda: None)
    assert started(tmp_path) == []


def test_a_killed_server_leaves_nothing_running(tmp_path):
    with subprocess.Popen([sys.executable, "-c", SUPERVISING, str(tmp_path)]) as server:
        wait_until(lambda: len(started(tmp_path)) == 2)
        server.kill()
    wait_until(lambda: not started(tmp_path))


def test_what_outlived_a_killed_server_is_ended_before_the_next_one_starts(tmp_path):
    environment = os.environ | {SERVER_VARIABLE: str(tmp_path)}
    with subprocess.Popen(SLEEPER, env=environment) as left:
        wait_until(lambda: started(tmp_path) == [left.pid])

        def check() -> None:
            assert started(tmp_path) == []
            raise ServerEnded("checked")

        with pytest.raises(ServerEnded, match="checked"):
            supervise(tmp_path, BOTH, {}, check)


def test_second_server_on_a_state_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "SERVER_LOCK_SECONDS", 0.0)
    with hold_lock(tmp_path / "server.lock", ""):
        refusal = r"another server uses it; .* --state-dir"
        assert_refused(refusal, supervise, tmp_path, BOTH, {}, lambda: None)


# ------------------------------------------------------------------ Flower's own


def must_go_on(deployment, server) -> None:
    """The run is resumed, and finishes another round."""
    resumed = deployment.submit("--resume", "digits")
    deployment.until_next_round(server, resumed)


def must_have_stopped(deployment) -> None:
    """The run ended with a checkpoint."""
    result = read_json(deployment.run / ".flower" / "result.json")
    assert result["status"] == "stopped", result


LONG = {"num_rounds": 500}


@pytest.mark.slow
def test_sigterm_commits_the_run_and_ends_within_30_s(deployment):
    server, _ = deployment.running(2, **LONG)
    began = time.monotonic()
    server.terminate()
    assert server.wait(60) == 0, deployment.machines.logs()
    assert time.monotonic() - began < 30
    assert deployment.left() == []
    must_have_stopped(deployment)
    must_go_on(deployment, deployment.serve())


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "superlink", "superexec", "serverapp"])
def test_nothing_is_left_of_a_server_of_which_a_process_was_killed(deployment, victim):
    machines = deployment.machines
    server, submitted = deployment.running(2, **LONG)
    pids = deployment.wait_for("superlink", "superexec", "serverapp")
    pids["server"] = server.pid
    os.kill(pids[victim], signal.SIGKILL)
    if victim == "serverapp":  # the server goes on, and so can the run
        assert submitted.wait(600) == 1, machines.logs()
        must_go_on(deployment, server)
        return
    code = server.wait(60)
    machines.until(lambda: deployment.left() == [])
    if victim != "server":
        assert code == 1, machines.logs()
        how = f"(pid {pids[victim]}) was ended by SIGKILL; the server has ended"
        assert f"error: the {victim} {how}" in machines.log_of(server)
    if victim == "superexec":  # the superlink lives, so the run can end in order
        must_have_stopped(deployment)
    must_go_on(deployment, deployment.serve())  # the port is free, the lock as well
