"""How the runs of a server stand, as far as Flower's own commands do not tell.

`flwr list` says whether a run goes on, `flwr supernode list` which clients are there.
Here are its round, its releases and epsilons, and when each client answered last: from
files on the server machine, without a lock, so that looking disturbs nothing.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedgs.app.tables import Table
from fedgs.errors import UserError
from fedgs.files import read_json
from fedgs.privacy.accountant import in_short
from fedgs.privacy.rounding import upper
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder

NODE_HEAD = ("node", "last answer", "resends", "failures", "why")
EPSILON = ("adversary", "relation", "delta", "epsilon", "guarantee")
Status = dict[str, Any]  # of one run; what `--json` prints


def statuses_in(path: Path) -> list[Status]:
    """Reads how every run of a place stands; a broken one does not hide the others.

    Args:
        path: a run folder, a folder of them, or a server's state directory.

    Raises:
        UserError: there is no run folder.
    """
    places = (path, path / "runs")
    found = (run.parent for place in places for run in place.glob("*/config.json"))
    if (path / "config.json").is_file():
        runs = [path]
    else:
        runs = sorted(found)
    if not runs:
        raise UserError(f"{path}: no run folder here yet; give the server's state-dir")
    statuses: list[Status] = []
    for run in runs:
        try:
            statuses.append(status_of(run))
        except (UserError, OSError) as error:  # broken, or removed meanwhile
            statuses.append({"run": run.absolute().name, "error": str(error)})
    return statuses


def status_of(path: Path) -> Status:
    """Reads how a run stands; all public.

    Returns:
        The run's name; finished and planned rounds; events in the ledger, repeated
        rounds included; the epsilons of them; and what a deployed run last wrote down
        (`server.progress`): phase, time, who is waited for, and every node.

    Raises:
        UserError: no run folder, or a broken ledger.
    """
    folder = RunFolder.open(path)
    ledger = folder.read_ledger()
    rounds = [line["round"] for line in folder.metrics()]
    said = folder.path / ".flower" / "nodes.json"
    if said.exists():
        progress = read_json(said)
    else:
        progress = {}
    return {
        "run": folder.path.name,
        # A full disk takes lines of metrics, and the run goes on.
        "round": max([folder.last_round, *rounds[-1:]]),
        "num_rounds": folder.config.num_rounds,
        "released": ledger.length,
        "epsilons": _epsilons(path) if ledger.length else [],
        "unit": in_short(folder.config.unit_condition),
        **{key: progress.get(key) for key in ("phase", "time", "waiting_for", "nodes")},
    }


def _epsilons(run: Path) -> list[dict[str, Any]]:
    """Returns what `fedgs privacy` says, by adversary and relation."""
    rows = [row.to_json() for row in epsilons.of_run(run)]
    return [{name: row[name] for name in EPSILON} for row in rows]


def show(status: Status) -> None:
    """Prints a table of a run, and one of its nodes."""
    Table(status["run"], ("what", "now"), [*_rows(status)], numeric=False).show()
    if nodes := status.get("nodes"):
        rows = [(name, *_node_cells(node)) for name, node in nodes.items()]
        Table(f"nodes of {status['run']}", NODE_HEAD, rows, numeric=False).show()


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    if "error" in status:
        yield "cannot be read", status["error"]
        return
    if status["phase"]:
        yield "phase", f"{status['phase']}, said {_clock(status['time'])}"
    yield "round", f"{status['round']} of {status['num_rounds']}"
    if status["waiting_for"]:
        yield "waiting for", ", ".join(status["waiting_for"])
    yield "releases", f"{status['released']} (repeated rounds count again)"
    for row in status["epsilons"]:
        note = "" if row["guarantee"] else " (NO guarantee)"
        title = f"epsilon, {row['adversary']}, {row['relation']}"
        at = f"at delta {upper(row['delta'], 6)}{note}"
        yield title, f"{upper(row['epsilon'])} {at}"
    yield "unit", status["unit"]
    yield "conditions", "fedgs privacy RUN prints what each epsilon depends on"


def _node_cells(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of one node, in the order of `NODE_HEAD`."""
    if node["last_answer"]:
        answer = f"round {node['last_answer']}"
    else:
        answer = "none yet"
    if node.get("last_answer_time") is not None:
        answer += f", {_clock(node['last_answer_time'])}"
    counts = (str(node.get("resends", 0)), str(node.get("failures", 0)))
    return (answer, *counts, node["reason"] or node.get("last_failure", ""))


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
