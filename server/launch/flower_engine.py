"""Starts a Flower simulation for a run folder, watches it, and ends all of it.

A SuperLink of the run's own on a free port, a private FLWR_HOME, telemetry, update
checks and dependency installation off, and a minimal app that names the installed
packages. Success is the run's own status, not an exit code.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from fedgs import process
from fedgs.config.run_config import RunConfig
from fedgs.deployment import QUIET, full_environment, without_proxy
from fedgs.errors import UserError
from fedgs.files import read_json, write_atomically
from fedgs.round.run import Report, RunStopped, Stop
from fedgs.runs.run_folder import RunFolder
from server.launch.control import Control, FlowerFailed, control_of
from server.launch.flower_app import app_project, free_port, wait_for_port

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A simulation is on the loopback: no other machine's Ray, and no other machine
    # reaches this one, which would do what anybody asks of it.
    "RAY_ADDRESS": "local",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_grpc_enable_http_proxy": "0",
}
# Ray gives itself 30 s, which no setting changes; a busy machine may need more.
RAY_IS_LATE = "node timed out during startup"
STARTS = 3
START_TIMEOUT = 120.0
END_TIMEOUT = 30.0  # for the run's own status, once it has an outcome
LAUNCHER_LOCK_SECONDS = 5.0  # for what a killed launcher left behind
FOLLOW_SECONDS = 0.2
MANY_ROUNDS = 100  # from which on Flower's waiting is more than the work


def train(folder: RunFolder, report: Report, stop: Stop) -> None:
    """Trains a run folder in a Flower simulation, from its last checkpoint on.

    Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

    Args:
        folder: the run folder; its configuration is resolved.
        report: called with the public metrics of each round.
        stop: when set, the run checkpoints after the current round and stops.

    Raises:
        RunStopped: the run ended early with a checkpoint.
        FlowerFailed: the run failed; it can be resumed.
        UserError: another process trains in this folder, or as `check`.
    """
    flower = folder.path / ".flower"
    flower.mkdir(exist_ok=True)
    with folder.locked(".flower/launcher.lock", LAUNCHER_LOCK_SECONDS):
        end_previous(folder)
        with folder.locked():
            pass  # whoever still holds it is alive and reachable by no token
        status, details, log = simulate(folder, report, stop)
        for _ in range(STARTS - 1):
            if RAY_IS_LATE not in log or stop.is_set():
                break
            status, details, log = simulate(folder, report, stop)
    _conclude(folder, status, details)


def check(config: RunConfig) -> None:
    """Refuses, before any work, a simulation that has no place for its sockets.

    Raises:
        UserError: names TMPDIR; of no run with another engine.
    """
    if config.engine == "flower":
        token = secrets.token_hex(16)
        try:
            process.make_home(token)
        finally:
            process.end_simulation(token)


def simulate(folder: RunFolder, report: Report, stop: Stop) -> tuple[str, str, str]:
    """Runs one simulation to its end; returns its status, details, and log if failed.

    Raises:
        FlowerFailed: Flower did not start, or did not take the run.
    """
    flower = folder.path / ".flower"
    token = secrets.token_hex(16)
    log = ""
    # What was asked of an earlier start must not stop this one.
    for name in ("stop", "result.json", process.FIT):
        (flower / name).unlink(missing_ok=True)
    # Before anything is started: a launcher that is killed leaves what it can be found
    # by.
    write_atomically(flower / "token", token.encode())
    try:
        with _superlink(folder, token) as address, control_of(address) as control:
            run_id = start_run(control, folder)
            _follow(folder, report, stop, lambda: _status(control, run_id)[0])
            status, details = _final_status(control, run_id)
            if status == "finished:failed":
                log = _log_of(control, run_id)
    finally:
        process.end_simulation(token)
        (flower / "token").unlink(missing_ok=True)
    with open(folder.path / "flower.log", "a") as file:  # of the SuperLink until here
        file.write(log)
    return status, details, log


def end_previous(folder: RunFolder) -> None:
    """Ends what a killed launcher left running, and removes its temporary files."""
    with contextlib.suppress(FileNotFoundError):
        token = (folder.path / ".flower" / "token").read_text()
        if token.isalnum():  # a file in a folder of the user: no path may come from it
            process.end_simulation(token, patience=0)


@contextlib.contextmanager
def _superlink(folder: RunFolder, token: str) -> Iterator[str]:
    """Runs a SuperLink; yields its address."""
    home = process.make_home(token)
    port = free_port()
    address = f"127.0.0.1:{port}"
    more = {
        **QUIET,
        **RAY,
        **without_proxy(),
        "FLWR_HOME": str(home / "flwr"),
        "RAY_TMPDIR": str(home),
        process.FAST_VARIABLE: hastening(folder.config),
        process.TOKEN_VARIABLE: token,
        process.LOCK_VARIABLE: str(folder.path / ".flower" / "launcher.lock"),
    }
    command = [sys.executable, "-m", "server.launch.simulation", "--simulation"]
    command += ["--insecure", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--disable-runtime-dependency-installation"]
    environment = full_environment(more)
    with open(folder.path / "flower.log", "ab") as log:
        superlink = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for us; we stop the run in order
        )
    try:
        if not wait_for_port(address, superlink, START_TIMEOUT):
            problem = "the SuperLink did not start"
            raise FlowerFailed(f"{problem}; see flower.log in the run folder")
        yield address
    finally:
        superlink.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            superlink.wait(timeout=10)


def hastening(config: RunConfig) -> str:
    """Returns "1" if the run's messages are hastened, else "0".

    Flower looks for messages ten times a second, which only a run of many rounds
    notices. The environment may decide otherwise.
    """
    by_rounds = "0"
    if config.num_rounds >= MANY_ROUNDS:
        by_rounds = "1"
    return os.environ.get(process.FAST_VARIABLE, by_rounds)


def start_run(control: Control, folder: RunFolder) -> int:
    """Submits the run; returns its id."""
    config = folder.config
    path = json.dumps(str(folder.path), ensure_ascii=False)  # is TOML, too
    project = app_project(f"run_folder = {path}\n")
    simulation: dict[str, float] = {
        "num_supernodes": config.num_nodes,
        # One of so many CPUs for each: Ray makes as many workers.
        "client_resources_num_cpus": 1,
        "init_args_num_cpus": config.num_workers,
    }
    if config.device != "cpu":  # the actors share the card
        simulation["client_resources_num_gpus"] = 1 / config.num_workers
    return control.start(project, **simulation)


def _follow(
    folder: RunFolder,
    report: Report,
    stop: Stop,
    status: Callable[[], str],
) -> None:
    """Reports rounds and the fit, until the run has an outcome."""
    flower = folder.path / ".flower"
    result = flower / "result.json"
    news = _News(folder, report)
    has_started = False
    started = time.monotonic()
    while True:
        # Before the lines are read: those that were written until then are reported.
        is_over = result.exists()
        news.report()
        if is_over:
            return
        if stop.is_set():
            (flower / "stop").touch()
        is_training = _is_locked(folder)
        # The ServerApp has died without an outcome.
        if has_started and not is_training and not result.exists():
            return
        if not (has_started or is_training or result.exists()):
            is_late = time.monotonic() - started > START_TIMEOUT
            if is_late or status().startswith("finished"):
                return  # it failed before it began
        has_started = has_started or is_training
        time.sleep(FOLLOW_SECONDS)


class _News:
    """What a run writes while it trains: metrics of rounds, and how far the fit is."""

    def __init__(self, folder: RunFolder, report: Report) -> None:
        """Passes over the rounds of earlier starts, which have been reported."""
        self._metrics = folder.path / "metrics.jsonl"
        self._fit = folder.path / ".flower" / process.FIT
        self._report = report
        self._position = self._size()
        self._fit_steps: dict[str, Any] = {}

    def report(self) -> None:
        """Reports what is new since the last call."""
        if self._size() < self._position:
            self._position = 0  # a resumed run drops the metrics that it repeats
        with contextlib.suppress(FileNotFoundError), open(self._metrics) as lines:
            lines.seek(self._position)
            while (line := lines.readline()).endswith("\n"):
                self._position = lines.tell()
                self._report(json.loads(line))
        if self._fit.exists():
            steps = read_json(self._fit)
            if steps != self._fit_steps:
                self._fit_steps = steps
                self._report(steps)

    def _size(self) -> int:
        return self._metrics.stat().st_size if self._metrics.exists() else 0


def _is_locked(folder: RunFolder) -> bool:
    try:
        with folder.locked():
            return False
    except UserError:
        return True


def _final_status(control: Control, run_id: int) -> tuple[str, str]:
    """Returns the run's own status once it is final, and Flower's details of it."""
    status = "unknown"
    details = ""
    deadline = time.monotonic() + END_TIMEOUT
    while not status.startswith("finished") and time.monotonic() < deadline:
        status, details = _status(control, run_id)
        time.sleep(FOLLOW_SECONDS)
    return status, details


def _log_of(control: Control, run_id: int) -> str:
    """Returns what a run that is over has logged."""
    parts: list[str] = []
    with contextlib.suppress(FlowerFailed):  # the outcome is known without it
        parts.extend(part.log_output for part in control.log(run_id, 0.0))
    return "".join(parts)


def _status(control: Control, run_id: int) -> tuple[str, str]:
    with contextlib.suppress(FlowerFailed):  # the outcome says more
        return control.status(run_id)
    return "unknown", ""


def _conclude(folder: RunFolder, status: str, details: str) -> None:
    path = folder.path / ".flower" / "result.json"
    outcome: dict[str, Any] = {}
    if path.exists():
        outcome = read_json(path)
    if outcome.get("status") == "stopped":
        raise RunStopped(outcome["message"])
    if outcome.get("status") != "completed" or status != "finished:completed":
        unknown = f"the simulation ended without an outcome. {details}".strip(". ")
        detail = outcome.get("message") or unknown
        raise FlowerFailed(
            f"the Flower run failed ({status}): {detail}; see {folder.path}/flower.log"
        )
