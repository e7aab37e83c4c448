"""Registers clients, submits a run to a server, and follows it to its end.

Nothing is written to disk. Success is the run's own status.
"""

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedgs.config.fields import flag
from fedgs.config.run_config import RunConfig
from fedgs.deployment import Access, check_name, file_of, public_key, toml_value
from fedgs.errors import UserError
from fedgs.process import REFUSED
from server.launch.control import UNKNOWN_RUN, Control, FlowerFailed, control_of
from server.launch.flower_app import app_project

STATUS_SECONDS = 2.0
START_PATIENCE = 30.0  # for a server that is started at the same time
PATIENCE = 300.0  # for a server that is being restarted
GOES_ON = (
    "goes on without this command; on the server's machine `fedgs deploy status "
    "STATE_DIR` shows it, and `touch STATE_DIR/runs/NAME/.flower/stop` stops it"
)
# What TLS says of another authority: waiting mends nothing.
REFUSED_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Submission(Access):
    """What `fedgs deploy submit` is asked for.

    Attributes:
        settings: the run's settings as flat scalars; empty with `resume`.
    """

    client: list[str] | None = flag(
        None,
        "Client as NAME=KEY.pub, or NAME if it was registered since the server "
        "started. Repeat for each client, in the order of --node-sizes.",
    )
    follow: bool = flag(True, "Wait until the run ends.")
    resume: str | None = flag(
        None, "Name of a run on the server to continue, instead of a new one."
    )
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks address and name.

        Raises:
            UserError: one of them is none.
        """
        super().__post_init__()
        if self.resume is not None:
            check_run_name("resume", self.resume)

    @cached_property
    def clients(self) -> tuple[tuple[str, Path | None], ...]:
        """Name and public key file, or None, of every node, in their order.

        Raises:
            UserError: no name, a name twice, or no such file.
        """
        clients: dict[str, Path | None] = {}
        for text in self.client or ():
            name, separator, path = text.partition("=")
            check_name(name)
            if name in clients:
                raise UserError(
                    f"client = {name}: given twice; every client has one key"
                )
            clients[name] = None  # without a key it is registered already
            if separator:
                clients[name] = Path(file_of("client", Path(path)))
        return tuple(clients.items())


def run_settings(config: RunConfig, clients: Sequence[str]) -> dict[str, Any]:
    """Returns the flat settings of a deployed run: those given, and the nodes.

    Raises:
        UserError: an output that is no plain name.
    """
    check_run_name("output", config.output)
    flat = config.to_flat()
    return {**flat, "engine": "flower", "nodes": ",".join(clients)}


def check_run_name(setting: str, name: str) -> None:
    """Refuses a run that is not named by one plain word.

    Raises:
        UserError: names the setting.
    """
    if not RUN_NAME.fullmatch(name):
        raise UserError(
            f"{setting} = {name!r}: it names a run folder in the server's state "
            "directory; give one word of letters, digits, '.', '_' and '-'"
        )


def _project(submission: Submission) -> str:
    """Returns the app's pyproject.toml, with all settings: Flower takes no others."""
    known: dict[str, Any] = {"run_folder": "", **RunConfig().to_flat()}
    if submission.resume:
        # The server's run folder has the settings, but Flower wants every name here.
        known = dict.fromkeys(known, "")
        known["run_folder"] = submission.resume
    else:
        known |= submission.settings
    lines = [f"{key} = {toml_value(key, value)}\n" for key, value in known.items()]
    return app_project("".join(lines))


def submit(submission: Submission) -> int:
    """Registers, submits, and follows the run unless told not to.

    Returns:
        Flower's id of the run.

    Raises:
        FlowerFailed: the run failed or stopped, or the server refused something.
        UserError: invalid settings, or a file that holds no key.
    """
    project = _project(submission)
    submission.check()
    authority = submission.ca
    if submission.insecure:
        authority = None
    with control_of(submission.server, authority, START_PATIENCE) as control:
        register(control, submission.clients)
        run_id = control.start(project)
        print(f"run {run_id} is submitted", flush=True)
        if submission.follow:
            try:
                _follow(control, run_id)
            except KeyboardInterrupt:
                print(f"\nrun {run_id} {GOES_ON}", file=sys.stderr)
                raise
        return run_id


def register(control: Control, clients: Iterable[tuple[str, Path | None]]) -> None:
    """Registers the keys of all clients that have one; says so of each.

    Args:
        control: the control of the server.
        clients: names, with the files of public keys.

    Raises:
        FlowerFailed: the server refused one.
        UserError: a file that holds no key, or another's; none is registered then.
    """
    # All are read before the first is registered.
    keys = {name: client_key(name, path) for name, path in clients if path}
    owners: dict[bytes, str] = {}
    for name, key in keys.items():
        other = owners.setdefault(key, name)
        if other != name:
            problem = f"it has the key of {other}; give each client its own"
            raise UserError(f"client = {name}: {problem}")
    for name, key in keys.items():
        was_known = control.register(name, key)
        if not was_known:
            print(f"{name} is registered")
            continue
        registered = control.name_of(key)
        if registered not in (name, ""):
            raise UserError(
                f"client = {name}: its key is registered for {registered}; give the "
                f"key of {name}, or restart the server, which forgets all keys"
            )
        print(f"{name} was registered before")


def client_key(name: str, path: Path) -> bytes:
    """Reads a client's public key.

    Raises:
        UserError: it is none that Flower takes.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = public_key(f"client = {name}={path}", path)
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _follow(control: Control, run_id: int) -> None:
    """Prints the run's log until it ends.

    Raises:
        FlowerFailed: it ended otherwise than completed, or the server is gone.
        UserError: the server refuses its settings.
    """
    shown = ""  # the last problem that was printed
    last = 0.0  # the time of the last line of the log that was printed
    deadline = time.monotonic() + PATIENCE
    while True:
        # A connection that ends ends the log, and the run goes on.
        with contextlib.suppress(FlowerFailed):
            for part in control.log(run_id, last):
                print(part.log_output, end="", flush=True)
                last = max(last, part.latest_timestamp)
        try:
            status, detail = control.status(run_id)
        except FlowerFailed as error:
            if error.code == UNKNOWN_RUN:
                again = "the server was restarted; continue the run with --resume"
                raise FlowerFailed(f"{error}: {again}", error.code) from error
            if time.monotonic() > deadline or REFUSED_CERTIFICATE in str(error):
                raise
            if shown != str(error):
                shown = str(error)
                print(f"{shown}; trying again for {PATIENCE:g} s", flush=True)
        else:
            if status == "finished:completed":
                print(f"run {run_id} is completed", flush=True)
                return
            if status.startswith("finished"):
                if REFUSED in detail:
                    raise UserError(detail.partition(f"{REFUSED}: ")[2])
                raise FlowerFailed(
                    f"run {run_id} did not complete ({status}). {detail}".strip()
                )
            deadline = time.monotonic() + PATIENCE
        time.sleep(STATUS_SECONDS)
