"""How a run stands: round, participants, epsilon so far, bytes, time left.

Everything is read from the run folder on the server machine, without a lock and
without a word to the server, so that looking disturbs nothing. The same numbers go to
a table, to JSON and to Prometheus (a file for node_exporter, or a small endpoint).
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments import privacy_report
from fedgs.config import RunConfig, UserError
from fedgs.run_folder import RunFolder, read_json, write_atomically

RECENT_ROUNDS = 20  # whose median duration estimates the time left
STATES = ("running", "completed", "stopped", "failed", "interrupted", "unreadable")


@dataclass(frozen=True, kw_only=True)
class Epsilon:
    """One statement of `fedgs privacy`, without its conditions; None is unbounded."""

    adversary: str
    relation: str
    delta: float
    epsilon: float | None
    guarantee: bool


@dataclass(frozen=True, kw_only=True)
class Status:
    """How a run stands; all public.

    Attributes:
        run: the folder's name.
        state: one of `STATES` but unreadable; interrupted: neither at work nor at an
            end.
        message: why it stopped or failed.
        round, num_rounds: finished and planned generator updates.
        released: events in the ledger, repeated rounds included.
        participants: clients asked in the last round.
        num_clients, num_nodes: of the run.
        num_answers: nodes that answered the last finished round.
        waiting_for: names of the nodes that the server waits for; deployed runs only.
        epsilons: of everything released so far.
        bytes_sent, bytes_received: payloads; None where the server does not count.
        seconds_per_round, seconds_left: an estimate by the last rounds; None at first.
        updated: Unix time of the last finished round.
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
    epsilons: tuple[Epsilon, ...]
    bytes_sent: int | None
    bytes_received: int | None
    seconds_per_round: float | None
    seconds_left: float | None
    updated: float | None


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


Found = Status | Unreadable


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


def statuses_in(path: Path) -> list[Found]:
    """Reads how every run of a place stands; a broken one does not hide the others.

    Privacy: public.

    Args:
        path: as of `runs_of`.

    Raises:
        UserError: there is no such folder.
    """
    found: list[Found] = []
    for run in runs_of(path):
        try:
            found.append(status_of(run))
        except (UserError, OSError) as error:  # broken, or removed meanwhile
            found.append(Unreadable(run=run.absolute().name, message=str(error)))
    return found


def status_of(path: Path) -> Status:
    """Reads how a run stands.

    Privacy: public.

    Raises:
        UserError: no run folder, or a broken ledger.
    """
    folder = RunFolder.open(path)
    config = folder.config
    metrics = _metrics(folder.path / "metrics.jsonl")
    last = metrics[-1] if metrics else {}
    ledger = folder.read_ledger()
    events = ledger.events
    done = int(last.get("round", 0))
    pace = None
    if metrics:
        recent = [float(m["seconds"]) for m in metrics[-RECENT_ROUNDS:]]
        pace = round(statistics.median(recent), 4)
    state, message = _state(folder)
    left = None if pace is None else round(pace * (config.num_rounds - done), 1)
    told = _told(folder.path / ".flower" / "nodes.json")
    return Status(
        run=folder.path.name,
        state=state,
        message=message,
        round=done,
        num_rounds=config.num_rounds,
        released=len(events),
        participants=events[-1].num_participants if events else 0,
        num_clients=config.num_clients or 0,
        num_nodes=config.num_nodes if config.num_clients else 0,
        num_answers=int(last.get("num_answers", 0)),
        waiting_for=tuple(map(str, told.get("waiting_for", ()))),
        epsilons=_epsilons(str(folder.path), ledger.head, config) if events else (),
        bytes_sent=told.get("bytes_sent"),
        bytes_received=told.get("bytes_received"),
        seconds_per_round=pace,
        seconds_left=left,
        updated=(folder.path / "metrics.jsonl").stat().st_mtime if metrics else None,
    )


@lru_cache(maxsize=64)
def _epsilons(path: str, head: str, config: RunConfig) -> tuple[Epsilon, ...]:
    """Computes once per state of the ledger: a scrape must cost nothing.

    Args:
        path: of the run folder.
        head: hash of the ledger's last line; with `config` it tells a run from another
            one in the same place.
        config: the run's.
    """
    names = [spec.name for spec in dataclasses.fields(Epsilon)]
    return tuple(
        Epsilon(**{name: getattr(row, name) for name in names})
        for row in privacy_report.of_run(Path(path))
    )


def _metrics(path: Path) -> list[dict[str, Any]]:
    found = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # being written
                break
    return found


def _told(path: Path) -> dict[str, Any]:
    """Returns what the server of a deployed run writes about its nodes."""
    return read_json(path) if path.exists() else {}


def _state(folder: RunFolder) -> tuple[str, str]:
    if _is_held(folder.path / ".lock"):
        return "running", ""
    if (folder.path / "generator.safetensors").exists():
        return "completed", ""
    result = folder.path / ".flower" / "result.json"
    if result.exists():
        outcome = read_json(result)
        state = str(outcome.get("status"))
        if state in ("stopped", "failed"):
            return state, str(outcome.get("message", ""))
    return "interrupted", ""


def _is_held(path: Path) -> bool:
    """Tells whether a process holds a file's lock, without taking it for a moment."""
    try:
        inode = str(path.stat().st_ino)
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any(
        "FLOCK" in line and line.split()[-3].rpartition(":")[2] == inode
        for line in locks
    )


# ------------------------------------------------------------------ for people


def show(found: Sequence[Found]) -> None:
    """Prints one table per run."""
    console = Console()
    for status in found:
        table = Table(title=status.run, show_header=False)
        for name, value in _rows(status):
            table.add_row(name, escape(value))
        console.print(table)


def _rows(status: Found) -> Iterator[tuple[str, str]]:
    why = f": {status.message}" if status.message else ""
    yield "state", status.state + why
    if isinstance(status, Unreadable):
        return
    yield "round", f"{status.round} of {status.num_rounds}"
    yield (
        "participants",
        f"{status.participants} of {status.num_clients} clients; "
        f"{status.num_answers} of {status.num_nodes} nodes answered",
    )
    if status.waiting_for:
        yield "waiting for", ", ".join(status.waiting_for)
    yield "releases", f"{status.released} (repeated rounds count again)"
    for row in status.epsilons:
        value = "unbounded" if row.epsilon is None else f"{row.epsilon:.4g}"
        note = "" if row.guarantee else " (NO guarantee)"
        yield (
            f"epsilon, {row.adversary}, {row.relation}",
            f"{value} at delta {row.delta:g}{note}",
        )
    if status.bytes_sent is not None and status.bytes_received is not None:
        sent, received = status.bytes_sent / 1e6, status.bytes_received / 1e6
        yield "traffic", f"{sent:.2f} MB to nodes, about {received:.2f} MB from them"
    if status.seconds_per_round is not None and status.seconds_left is not None:
        yield (
            "time left",
            f"about {status.seconds_left / 60:.1f} min "
            f"({status.seconds_per_round:.2f} s/round)",
        )
    yield "conditions", "fedgs privacy RUN prints what each epsilon depends on"


def to_json(status: Found) -> dict[str, Any]:
    """Returns the fields as JSON values; an unbounded epsilon is null."""
    return dataclasses.asdict(status)


# ------------------------------------------------------------------ for Prometheus

_HELP = {
    "fedgs_round": ("gauge", "Finished generator updates."),
    "fedgs_rounds_planned": ("gauge", "Generator updates of the whole run."),
    "fedgs_releases": ("gauge", "Events in the ledger; repeated rounds count again."),
    "fedgs_participants": ("gauge", "Clients asked in the last round."),
    "fedgs_clients": ("gauge", "Clients of the run."),
    "fedgs_nodes": ("gauge", "Nodes of the run."),
    "fedgs_nodes_answered": ("gauge", "Nodes that answered the last finished round."),
    "fedgs_nodes_waited_for": ("gauge", "Nodes that the server waits for now."),
    "fedgs_epsilon": ("gauge", "Epsilon of all releases so far; +Inf is unbounded."),
    "fedgs_sent_bytes": ("gauge", "Payload to nodes."),
    "fedgs_received_bytes": ("gauge", "Payload from nodes; compact: an estimate."),
    "fedgs_round_seconds": ("gauge", "Median duration of the last rounds."),
    "fedgs_left_seconds": ("gauge", "Estimated time to the last round."),
    "fedgs_updated_timestamp_seconds": ("gauge", "When the last round finished."),
    "fedgs_state": ("gauge", "1 for the state that the run is in."),
}


def to_prometheus(found: Sequence[Found]) -> str:
    """Returns the numbers in Prometheus' text exposition format.

    Privacy: public.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/ (0.0.4).
    """
    samples: dict[str, list[str]] = {name: [] for name in _HELP}
    for status in found:
        for name, labels, value in _samples(status):
            given = {"run": status.run, **labels}
            text = ",".join(f'{key}="{_escaped(given[key])}"' for key in given)
            samples[name].append(f"{name}{{{text}}} {_number(value)}\n")
    parts = []
    for name, (kind, text) in _HELP.items():
        if samples[name]:
            parts += [f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n"]
            parts += samples[name]
    return "".join(parts)


def _samples(status: Found) -> Iterator[tuple[str, dict[str, str], float]]:
    for state in STATES:
        yield "fedgs_state", {"state": state}, float(state == status.state)
    if isinstance(status, Unreadable):
        return
    plain = {
        "fedgs_round": status.round,
        "fedgs_rounds_planned": status.num_rounds,
        "fedgs_releases": status.released,
        "fedgs_participants": status.participants,
        "fedgs_clients": status.num_clients,
        "fedgs_nodes": status.num_nodes,
        "fedgs_nodes_answered": status.num_answers,
        "fedgs_nodes_waited_for": len(status.waiting_for),
        "fedgs_sent_bytes": status.bytes_sent,
        "fedgs_received_bytes": status.bytes_received,
        "fedgs_round_seconds": status.seconds_per_round,
        "fedgs_left_seconds": status.seconds_left,
        "fedgs_updated_timestamp_seconds": status.updated,
    }
    for name, value in plain.items():
        if value is not None:
            yield name, {}, value
    for row in status.epsilons:
        labels = {
            "adversary": row.adversary,
            "relation": row.relation,
            "delta": f"{row.delta:g}",
            "guarantee": "yes" if row.guarantee else "no",
        }
        yield "fedgs_epsilon", labels, math.inf if row.epsilon is None else row.epsilon


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(value)


def write_prometheus(path: Path, found: Sequence[Found]) -> None:
    """Writes a file for node_exporter's textfile collector; name it *.prom.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_atomically(path, to_prometheus(found).encode())
    except OSError as error:
        raise UserError(f"prometheus = {path}: {error.strerror}") from error


def metrics_server(
    host: str, port: int, current: Callable[[], Sequence[Found]]
) -> ThreadingHTTPServer:
    """Returns a server of GET /metrics; the caller runs `serve_forever`.

    Raises:
        UserError: the address cannot be listened on.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404)
                return
            try:
                content = to_prometheus(current()).encode()
            except UserError as error:
                print(error, flush=True)  # paths are not for who asks
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: Any) -> None:
            """Says nothing: a scrape every few seconds is no news."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise UserError(f"serve = {host}:{port}: {error.strerror}") from error
