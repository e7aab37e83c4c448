"""How a server and its runs stand: processes, nodes, rounds, epsilon, time left.

Everything is read from files on the server machine and from its table of processes,
without a lock and without a word to the server, so that looking disturbs nothing. The
same numbers go to a table, to JSON and to Prometheus
(`experiments.commands.deploy_metrics`); docs/deployment.md says what each means.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from experiments.launch.health import Server, server_of
from experiments.tables import Table
from fedgs.baselines.releases import ReleaseLedger
from fedgs.baselines.run import BaselineRun, open_run
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError
from fedgs.federation.training import Asking
from fedgs.files import read_json
from fedgs.privacy.accounting import SEEDED, Statement
from fedgs.privacy.ledger import Ledger
from fedgs.runs import epsilons
from fedgs.runs.run_folder import METRICS, RunFolder, is_baseline

LOCKS = Path("/proc/locks")
RECENT_ROUNDS = 20  # whose median duration estimates the time left
NODE_HEAD = ("node", "online", "last answer", "resends", "failures", "why")
STATES = ("running", "completed", "stopped", "failed", "interrupted", "unreadable")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of a deployed run, since the run was submitted last.

    Attributes:
        name: of the client.
        online: whether Flower can reach it; None where nobody looks (no run at work).
        is_waited_for: whether the server waits for its answer now.
        last_answer: round of its last valid answer, 0 before the first.
        last_answer_time: Unix time of that, to the second.
        resends: requests that were sent to it again.
        failures: answers that were refused or did not come.
        last_failure: why the last of these failed.
        reason: why it is not there now, if that is known.
    """

    name: str
    online: bool | None
    is_waited_for: bool
    last_answer: int
    # Files of an older version have not all of these.
    last_answer_time: float | None = None
    resends: int = 0
    failures: int = 0
    last_failure: str = ""
    reason: str


# Of the server's file; `online` and `waiting_for` are looked at by themselves.
KEPT_FIELDS = {spec.name for spec in dataclasses.fields(Node)} - {"online"}


@dataclass(frozen=True, kw_only=True)
class Status:
    """How a run stands; all public.

    Attributes:
        run: the folder's name.
        state: one of `STATES` but unreadable; interrupted: neither at work nor at an
            end, also where its server is dead.
        message: why it is in this state.
        round, num_rounds: finished and planned generator updates.
        released: events in the ledger, repeated rounds included.
        participants: clients asked in the last round.
        num_clients, num_nodes: of the run.
        num_answers: nodes that answered the last finished round.
        waiting_for: names of the nodes that the server waits for; deployed runs only.
        nodes: of a deployed run.
        epsilons: of everything released so far.
        bytes_sent, bytes_received: payloads; None where the server does not count.
        seconds_per_round, seconds_left: an estimate by the last rounds; None at first.
        updated: Unix time of the last finished round.
        last_sign: Unix time when the server last wrote down who is there.
    """

    run: str
    state: str
    message: str
    round: int
    num_rounds: int
    released: int
    participants: int
    num_clients: int
    num_nodes: int
    num_answers: int
    waiting_for: tuple[str, ...]
    nodes: tuple[Node, ...]
    epsilons: tuple[Statement, ...]
    bytes_sent: int | None
    bytes_received: int | None
    seconds_per_round: float | None
    seconds_left: float | None
    updated: float | None
    last_sign: float | None


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A run folder that cannot be read; no number of it is shown.

    Attributes:
        run: the folder's name.
        message: why.
        state: "unreadable".
    """

    run: str
    message: str
    state: str = "unreadable"


RunStatus = Status | Unreadable


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A place, as it was found at one look.

    Attributes:
        server: whose state directory it is or lies in, if any.
        runs: of the place.
    """

    server: Server | None
    runs: tuple[RunStatus, ...]


def overview_of(path: Path) -> Overview:
    """Reads how a server and its runs stand.

    Args:
        path: as of `runs_of`.

    Raises:
        UserError: there is no such folder, or the server's own file is broken.
    """
    return Overview(server=server_of(path), runs=tuple(statuses_in(path)))


def runs_of(path: Path) -> list[Path]:
    """Returns a run folder itself, or the run folders in a folder, maybe none.

    Args:
        path: a run folder, a folder of them, or a server's state directory.

    Raises:
        UserError: there is no such folder.
    """
    if (path / "config.json").is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give the server's --state-dir")
    places = (path, path / "runs")
    return sorted(run.parent for place in places for run in place.glob("*/config.json"))


def statuses_in(path: Path) -> list[RunStatus]:
    """Reads how every run of a place stands; a broken one does not hide the others.

    Args:
        path: as of `runs_of`.

    Raises:
        UserError: there is no such folder.
    """
    statuses: list[RunStatus] = []
    for run in runs_of(path):
        try:
            statuses.append(status_of(run))
        except (UserError, OSError) as error:  # broken, or removed meanwhile
            statuses.append(Unreadable(run=run.absolute().name, message=str(error)))
    return statuses


def status_of(path: Path) -> Status:
    """Reads how a run stands.

    Raises:
        UserError: no run folder, or a broken ledger.
    """
    folder = RunFolder.open(path)
    config = folder.config
    metrics = folder.metrics()
    last = metrics[-1] if metrics else {}
    ledger = folder.read_ledger(ReleaseLedger if folder.is_baseline else Ledger)
    events: Sequence[Asking] = ledger.events
    # A full disk takes lines of metrics, and the run goes on.
    done = max(int(last.get("round", 0)), folder.last_round)
    pace = left = None
    recent = [m["seconds"] for m in metrics[-RECENT_ROUNDS:] if "seconds" in m]
    if recent:  # stages have none
        pace = round(statistics.median(recent), 4)
        left = round(pace * (config.num_rounds - done), 1)
    state, message = _state(folder)
    path = folder.path / ".flower" / "nodes.json"  # of a deployed run only
    progress = read_json(path) if path.exists() else {}
    nodes = _nodes(progress, state == "running")
    return Status(
        run=folder.path.name,
        state=state,
        message=message,
        round=done,
        num_rounds=config.num_rounds,
        released=len(events),
        participants=_num_asked(events[-1], config) if events else 0,
        num_clients=config.num_clients,
        num_nodes=config.num_nodes,
        num_answers=int(last.get("num_answers", 0)),
        waiting_for=tuple(node.name for node in nodes if node.is_waited_for),
        nodes=nodes,
        epsilons=_epsilons(str(folder.path), ledger.head, config) if events else (),
        bytes_sent=progress.get("bytes_sent"),
        bytes_received=progress.get("bytes_received"),
        seconds_per_round=pace,
        seconds_left=left,
        updated=(folder.path / METRICS).stat().st_mtime if metrics else None,
        last_sign=progress.get("time"),
    )


@lru_cache(maxsize=64)
def _epsilons(path: str, head: str, config: RunConfig) -> tuple[Statement, ...]:
    """Computes once per state of the ledger: a scrape must cost nothing.

    Args:
        path: of the run folder.
        head: hash of the ledger's last line; with `config` it tells a run from another
            one in the same place.
        config: the run's.
    """
    if is_baseline(Path(path)):
        return tuple(_of_baseline(open_run(path)))
    return tuple(epsilons.of_run(Path(path)))


def _of_baseline(run: BaselineRun) -> Iterator[Statement]:
    """Yields what `fedgs privacy` calls valid for a user, as other runs state it."""
    asked = {release.participants == "all" for release in run.releases}
    for row in run.guarantees():
        if row.unit == "user" and row.label in ("valid", SEEDED):
            yield Statement(
                adversary=run.config.adversary,
                relation=row.relation,
                unit="client",
                delta=row.delta,
                epsilon=row.epsilon,
                asked="epsilon",
                theorem=row.theorem,
                conditions=row.conditions,
                guarantee=row.is_guarantee,
                client_selection="all" if asked == {True} else "balanced",
                num_rounds=len(run.releases),
            )


def _num_asked(event: Asking, config: ResolvedConfig) -> int:
    clients = event.participants
    return config.num_clients if clients == "all" else len(clients)


def _nodes(progress: dict[str, Any], is_running: bool) -> tuple[Node, ...]:
    """Returns the nodes; who is there is known only while the run is at work."""
    waiting = set(progress.get("waiting_for", ())) if is_running else set[str]()
    return tuple(
        Node(
            name=name,
            online=bool(node["online"]) if is_running else None,
            is_waited_for=name in waiting,
            **{field: node[field] for field in node if field in KEPT_FIELDS},
        )
        for name, node in progress.get("nodes", {}).items()
    )


def _state(folder: RunFolder) -> tuple[str, str]:
    if _is_held(folder.path / ".lock"):
        server = server_of(folder.path) if folder.config.node_names else None
        if server is None or server.is_alive:
            return "running", ""
        return "interrupted", f"its server is dead ({server.reason})"
    result = folder.path / ".flower" / "result.json"
    outcome = read_json(result) if result.exists() else {}
    state, message = str(outcome.get("status")), str(outcome.get("message", ""))
    if (folder.path / "generator.safetensors").exists():
        return "completed", message
    if state in ("stopped", "failed"):
        return state, message
    how = "fedgs resume RUN"
    if folder.config.node_names:
        how = f"fedgs deploy submit --resume {folder.path.name}"
    return "interrupted", f"no process trains it, and none said why; {how} continues it"


def _is_held(path: Path) -> bool:
    """Tells whether a process holds a file's lock, without taking it for a moment."""
    try:
        number = str(path.stat().st_ino)
        locks = LOCKS.read_text().splitlines()
    except OSError:
        return False
    for line in locks:  # "1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END"
        *_, pid, file, _, _ = line.split()
        is_alike = "FLOCK" in line and file.rpartition(":")[2] == number
        # Other file systems have a file of that number too.
        if is_alike and _has_open(int(pid), path):
            return True
    return False


def _has_open(pid: int, path: Path) -> bool:
    """Tells whether a process has a file open, or may have it: we may not look."""
    try:
        files = psutil.Process(pid).open_files()
    except psutil.Error:
        return True
    return str(path.resolve()) in {file.path for file in files}


# ------------------------------------------------------------------ for people


def show(overview: Overview) -> None:
    """Prints a table of the server, and one or two per run."""
    head = ("what", "now")
    if overview.server is not None:
        Table("server", head, [*_server_rows(overview.server)], numeric=False).show()
    for status in overview.runs:
        Table(status.run, head, [*_rows(status)], numeric=False).show()
        if isinstance(status, Status) and status.nodes:
            rows = [_node_row(node) for node in status.nodes]
            Table(f"nodes of {status.run}", NODE_HEAD, rows, numeric=False).show()


def _server_rows(server: Server) -> Iterator[tuple[str, str]]:
    yield "state", server.state + (f": {server.reason}" if server.reason else "")
    for process in server.processes:
        word = "lives" if process.is_alive else "has ended"
        yield process.role, f"pid {process.pid} {word}"
    if server.superexec_restarts:
        yield "restarts of superexec", str(server.superexec_restarts)
    for certificate in server.certificates:
        yield f"certificate, {certificate.whose}", _until(certificate.expires)
    free, size = server.free_bytes / 1e9, server.disk_bytes / 1e9
    yield "free disk", f"{free:.2f} of {size:.2f} GB"


def _until(expires: float | None) -> str:
    if expires is None:
        return "cannot be read"
    days = (expires - time.time()) / 86400
    word = f"{days:.0f} days left" if days > 0 else "has EXPIRED"
    return f"until {_clock(expires)}; {word}"


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _node_row(node: Node) -> tuple[str, ...]:
    """Returns the cells of one node, in the order of `NODE_HEAD`."""
    online = {True: "yes", False: "NO", None: "-"}[node.online]
    answer = f"round {node.last_answer}" if node.last_answer else "none yet"
    if node.last_answer_time is not None:
        answer += f", {_clock(node.last_answer_time)}"
    counts = (str(node.resends), str(node.failures))
    return (node.name, online, answer, *counts, node.reason or node.last_failure)


def _rows(status: RunStatus) -> Iterator[tuple[str, str]]:
    why = f": {status.message}" if status.message else ""
    yield "state", status.state + why
    if isinstance(status, Unreadable):
        return
    yield "round", f"{status.round} of {status.num_rounds}"
    clients = f"{status.participants} of {status.num_clients} clients"
    nodes = f"{status.num_answers} of {status.num_nodes} nodes answered"
    yield "participants", f"{clients}; {nodes}"
    if status.waiting_for:
        yield "waiting for", ", ".join(status.waiting_for)
    yield "releases", f"{status.released} (repeated rounds count again)"
    for row in status.epsilons:
        value = "unbounded" if row.epsilon is None else f"{row.epsilon:.4g}"
        note = "" if row.guarantee else " (NO guarantee)"
        title = f"epsilon, {row.adversary}, {row.relation}"
        yield title, f"{value} at delta {row.delta:g}{note}"
    if status.bytes_sent is not None and status.bytes_received is not None:
        sent, received = status.bytes_sent / 1e6, status.bytes_received / 1e6
        yield "traffic", f"{sent:.2f} MB to nodes, about {received:.2f} MB from them"
    if status.seconds_per_round is not None and status.seconds_left is not None:
        pace = f"({status.seconds_per_round:.2f} s/round)"
        yield "time left", f"about {status.seconds_left / 60:.1f} min {pace}"
    yield "conditions", "fedgs privacy RUN prints what each epsilon depends on"


def to_json(overview: Overview) -> dict[str, Any]:
    """Returns the fields as JSON values; an unbounded epsilon is null."""
    return dataclasses.asdict(overview)
