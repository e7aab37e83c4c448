"""Registers clients, submits a run to a server, and follows it to its end.

Uses the commands `flwr supernode register`, `run`, `log` and `list` with a private
FLWR_HOME. Success is the run's own status, never an exit code of `flwr run`.
"""

import contextlib
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.deploy_certs import check_name
from experiments.deploy_commands import connection, toml_value
from experiments.deploy_processes import file_of, full_environment, show
from experiments.flower_app import QUIET, TRAINING, app_project
from fedgs.config import RunConfig, UserError
from fedgs.preparation import check_submitted

SERVER = "server"  # the connection's name in config.toml
KNOWN_KEY = "already in use"  # what Flower says of a key that is registered
TIMEOUT = 180.0  # of one short command
STATUS_SECONDS = 2.0
PATIENCE = 300.0  # for a server that is being restarted
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class SubmitFailed(RuntimeError):
    """The run failed, stopped early, or the server cannot be reached."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What to submit and where.

    Attributes:
        server: HOST:PORT.
        ca: certificate of the authority; None with `insecure`.
        insecure, insecure_network: as of the server.
        clients: (name, public key file or None) of every node, in the order of the
            clients that they host.
        settings: the run's settings as flat scalars; empty with `resume`.
        resume: name of a run folder on the server to continue.
    """

    server: str
    ca: Path | None
    insecure: bool
    insecure_network: bool
    clients: tuple[tuple[str, Path | None], ...]
    settings: Mapping[str, Any]
    resume: str | None = None


def read_clients(texts: Sequence[str]) -> tuple[tuple[str, Path | None], ...]:
    """Reads NAME=KEY.pub, or NAME of a client that is registered already.

    Raises:
        UserError: no name, a name twice, or no such file.
    """
    found: list[tuple[str, Path | None]] = []
    for text in texts:
        name, separator, path = text.partition("=")
        check_name(name)
        if name in dict(found):
            raise UserError(f"client = {name}: given twice; every client has one key")
        key = Path(file_of("client", Path(path))) if separator else None
        found.append((name, key))
    return tuple(found)


def run_settings(config: RunConfig, clients: Sequence[str]) -> dict[str, Any]:
    """Returns the flat settings of a deployed run: those given, and the nodes.

    Raises:
        UserError: no clients, or an output that is no plain name.
    """
    if not clients:
        raise UserError("client is unset: give --client NAME=KEY.pub for every client")
    check_run_name("output", config.output)
    check_submitted(config)
    flat = config.to_flat()
    return {**flat, "engine": "flower", "nodes": ",".join(clients)}


def check_run_name(setting: str, name: str) -> None:
    """Refuses a run that is not named by one plain word.

    Raises:
        UserError: names the setting.
    """
    if not RUN_NAME.fullmatch(name):
        raise UserError(
            f"{setting} = {name!r}: give the name of a run folder in the server's "
            "state directory: letters, digits, '.', '_', '-'"
        )


@contextlib.contextmanager
def workplace(submission: Submission) -> Iterator[tuple[Path, dict[str, str]]]:
    """Makes a private FLWR_HOME and the app; yields both, the home as environment."""
    text = connection(
        submission.server,
        submission.ca,
        submission.insecure,
        submission.insecure_network,
    )
    with tempfile.TemporaryDirectory(prefix="fedgs-submit-") as name:
        home, app = Path(name) / "flwr", Path(name) / "app"
        home.mkdir()
        app.mkdir()
        (home / "config.toml").write_text(text)
        config = _app_config(submission)
        project = app_project("fedgs deploy submit", config, TRAINING)
        (app / "pyproject.toml").write_text(project)
        yield app, {**QUIET, "FLWR_HOME": str(home)}


def _app_config(submission: Submission) -> str:
    """Returns the app's settings: all of them, because Flower takes no others."""
    known: dict[str, Any] = {"run_folder": "", **RunConfig().to_flat()}
    known |= dict.fromkeys(known, "") if submission.resume else submission.settings
    known["run_folder"] = submission.resume or ""
    return "".join(f"{key} = {toml_value(key, known[key])}\n" for key in known)


def commands(submission: Submission, app: Path) -> list[list[str]]:
    """Returns the commands in order: registrations, then the run."""
    found = [
        ["flwr", "supernode", "register", str(key), SERVER, "--name", name]
        for name, key in submission.clients
        if key is not None
    ]
    return [*found, ["flwr", "run", str(app), SERVER, "--format", "json"]]


def print_commands(submission: Submission) -> None:
    """Prints the commands and the files they need, and runs nothing.

    Raises:
        UserError: invalid settings.
    """
    with workplace(submission) as (app, environment):
        home = {"FLWR_HOME": environment["FLWR_HOME"]}
        for path in (Path(home["FLWR_HOME"]) / "config.toml", app / "pyproject.toml"):
            print(f"# {path}\n{path.read_text()}")
        for command in commands(submission, app):
            show(command, home)


def submit(submission: Submission, follow: bool) -> str:
    """Registers, submits, and follows the run unless told not to.

    Returns:
        Flower's id of the run.

    Raises:
        SubmitFailed: the run failed or stopped, or a command did.
        UserError: invalid settings.
    """
    with workplace(submission) as (app, environment):
        *registrations, run = commands(submission, app)
        for command in registrations:
            _register(command, environment)
        run_id = _start(run, environment)
        print(f"run {run_id} is submitted", flush=True)
        if follow:
            _follow(run_id, environment)
        return run_id


def _register(command: list[str], environment: Mapping[str, str]) -> None:
    code, output = _call(command, environment)
    if code and KNOWN_KEY not in output:
        raise SubmitFailed(f"{' '.join(command[:3])} failed: {output}")
    known = "was registered before" if code else "is registered"
    print(f"{command[-1]} {known}", flush=True)


def _start(command: list[str], environment: Mapping[str, str]) -> str:
    code, output = _call(command, environment)
    with contextlib.suppress(ValueError, KeyError):
        answer = json.loads(output[output.index("{") : output.rindex("}") + 1])
        if answer["success"] and code == 0:
            return str(answer["run-id"])
    raise SubmitFailed(f"flwr run failed: {output}")


def _follow(run_id: str, environment: Mapping[str, str]) -> None:
    """Prints the run's log until it ends.

    Raises:
        SubmitFailed: it ended otherwise than completed, or the server is gone.
    """
    command = ["flwr", "log", run_id, SERVER, "--stream"]
    show(command, {"FLWR_HOME": environment["FLWR_HOME"]})
    deadline = time.monotonic() + PATIENCE
    while True:
        subprocess.run(command, env=full_environment(environment), check=False)
        status, detail = status_of(run_id, environment)
        if status == "finished:completed":
            print(f"run {run_id} is completed", flush=True)
            return
        if status.startswith("finished"):
            raise SubmitFailed(f"run {run_id}: {status}. {detail}".strip())
        if status != "unknown":
            deadline = time.monotonic() + PATIENCE
        if time.monotonic() > deadline:
            raise SubmitFailed(f"run {run_id}: the server does not answer")
        time.sleep(STATUS_SECONDS)


def status_of(run_id: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns the run's own status, or "unknown", and what Flower says of it."""
    command = ["flwr", "list", SERVER, "--run-id", run_id, "--format", "json"]
    _, output = _call(command, environment, is_shown=False)
    with contextlib.suppress(ValueError, KeyError, IndexError):
        answer = json.loads(output[output.index("{") : output.rindex("}") + 1])
        found = answer["runs"][0]
        return str(found["status"]), str(found.get("status-details") or "")
    return "unknown", ""


def _call(
    command: list[str], environment: Mapping[str, str], is_shown: bool = True
) -> tuple[int, str]:
    """Runs a short command; returns its exit code and output."""
    if is_shown:
        show(command, {"FLWR_HOME": environment["FLWR_HOME"]})
    try:
        done = subprocess.run(
            command,
            env=full_environment(environment),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {TIMEOUT:g} s"
    return done.returncode, (done.stdout + done.stderr).strip()
