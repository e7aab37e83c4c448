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
from fedgs.errors import UserError, wrap_error
from fedgs.files import read_json
from fedgs.privacy.accountant import in_short
from fedgs.privacy.rounding import upper
from fedgs.process import FIT
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
    if (path / "config.json").is_file():
        runs = [path]
    else:
        # In a folder of runs, or in a state directory, whose runs are in `runs`.
        files = [*path.glob("*/config.json"), *path.glob("runs/*/config.json")]
        runs = sorted(file.parent for file in files)
    if not runs:
        raise UserError(
            f"{path}: there is no run folder here yet; give the server's state-dir"
        )
    statuses: list[Status] = []
    for run in runs:
        try:
            status = status_of(run)
            # A damaged file must not end the report of all runs.
            damaged = f"{run / '.flower' / 'nodes.json'}: it is damaged"
            with wrap_error(Exception, damaged, "the server writes it anew"):
                _tables(status)
            statuses.append(status)
        except (UserError, OSError) as error:  # broken, or removed meanwhile
            statuses.append({"run": run.absolute().name, "error": str(error)})
    return statuses


def status_of(path: Path) -> Status:
    """Reads how a run stands; all public.

    Returns:
        The run's name; finished and planned rounds; events in the ledger, repeated
        rounds included; the epsilons of them; and what a deployed run last wrote down
        (`server.progress`): phase, time, who is waited for, the fit, and every node.

    Raises:
        UserError: no run folder, or a broken ledger.
    """
    folder = RunFolder.open(path)
    ledger = folder.read_ledger()
    rounds = [line["round"] for line in folder.metrics()]
    # Only a deployed run that has begun writes it.
    said = folder.path / ".flower" / "nodes.json"
    if said.exists():
        progress = read_json(said)
    else:
        progress = {}
    # Before the first release there is nothing to account for.
    if ledger.length:
        stated = _epsilons(path)
    else:
        stated = []
    return {
        "run": folder.path.name,
        # A full disk takes lines of metrics, and the run goes on.
        "round": max([folder.last_round, *rounds[-1:]]),
        "num_rounds": folder.config.num_rounds,
        "released": ledger.length,
        "epsilons": stated,
        "unit": in_short(folder.config.unit_condition),
        # Named one by one: what else the file may hold is not for this report.
        "phase": progress.get("phase"),
        "time": progress.get("time"),
        "waiting_for": progress.get("waiting_for"),
        "fit": _fit(folder),
        "nodes": progress.get("nodes"),
    }


def _fit(folder: RunFolder) -> str | None:
    """Returns how far the fit of the generator is, which follows the last round."""
    path = folder.path / ".flower" / FIT
    if folder.is_finished or not path.exists():
        return None
    steps = read_json(path)
    return f"step {steps.get('fit_step')} of {steps.get('fit_steps')}"


def _epsilons(run: Path) -> list[dict[str, Any]]:
    """Returns what `fedgs privacy` says, by adversary and relation.

    What secure aggregation would give is left out where the run has none: here are no
    conditions that say so.
    """
    found = epsilons.of_run(run)
    rows = [row.to_json() for row in found if not row.is_hypothetical]
    return [{name: row[name] for name in EPSILON} for row in rows]


def show(status: Status) -> None:
    """Prints a table of a run, and one of its nodes."""
    for table in _tables(status):
        table.show()


def _tables(status: Status) -> list[Table]:
    rows = list(_rows(status))
    tables = [Table(status["run"], ("what", "now"), rows, numeric=False)]
    nodes = status.get("nodes")
    if nodes:
        rows = [(name, *_node_cells(node)) for name, node in nodes.items()]
        title = f"nodes of {status['run']}"
        tables.append(Table(title, NODE_HEAD, rows, numeric=False))
    return tables


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    if "error" in status:
        yield "cannot be read", status["error"]
        return
    if status["phase"]:
        yield "phase", f"{status['phase']}, as of {_clock(status['time'])}"
    yield "round", f"{status['round']} of {status['num_rounds']}"
    if status["fit"]:
        yield "fitting the generator", status["fit"]
    if status["waiting_for"]:
        yield "waiting for", ", ".join(status["waiting_for"])
    yield "releases", f"{status['released']} (a repeated round counts again)"
    for row in status["epsilons"]:
        title = f"epsilon, {row['adversary']}, {row['relation']}"
        delta = upper(row["delta"], 6)
        value = f"{upper(row['epsilon'])} at delta {delta}"
        # A number without a guarantee must not be quoted by mistake.
        if not row["guarantee"]:
            value += " (NO guarantee)"
        yield title, value
    yield "unit", status["unit"]
    yield "conditions", "fedgs privacy of RUN explains what each epsilon depends on"


def _node_cells(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of one node, in the order of `NODE_HEAD`."""
    if node["last_answer"]:
        answer = f"round {node['last_answer']}"
    else:
        answer = "none yet"
    if node.get("last_answer_time") is not None:
        answer += f", {_clock(node['last_answer_time'])}"
    # Why the server waits for it now, or else what failed last.
    why = node["reason"] or node.get("last_failure", "")
    resends = str(node.get("resends", 0))
    failures = str(node.get("failures", 0))
    return answer, resends, failures, why


def _clock(moment: float) -> str:
    # In UTC, because clients, server and reader may be in different places.
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
