"""What `fedgs select-clients` does: select by accuracy, and say what it cost.

A folder of a selection holds:

    selected.txt  above.txt  rest.txt    the cohorts, unless empty
    cohorts.json                         thresholds, counts, privacy
    plan.json                            settings of data and selection
"""

import dataclasses
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from clients import classifier_app
from fedgs.app.commands import privacy as privacy_report
from fedgs.app.commands.run_outcome import exit_if_stopped, make_output, new_output
from fedgs.app.commands.terminal import Progress, say
from fedgs.app.tables import Table
from fedgs.cohorts.files import (
    EXCLUDED,
    INCLUDED,
    NOT_PRIVATE,
    Cohort,
    check_names,
    write_cohort,
)
from fedgs.cohorts.selection import OUTCOME, REST, Selection, statements, write_plan
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data import sources
from fedgs.data.corruption import corrupted_clients
from fedgs.data.federated import FederatedImages
from fedgs.data.load import split_records
from fedgs.data.records import Records
from fedgs.errors import UserError, reject
from fedgs.files import read_json, write_json
from fedgs.round.preparation import with_absolute_paths
from fedgs.round.run import Report, Stop, stop_on_signal
from fedgs.runs.run_folder import RunFolder, versions
from server.launch import flower_engine
from server.launch.local_grid import LocalGrid
from server.selection_app import Selecting

COMPONENTS = ("server.selection_app:app", "clients.classifier_app:app")
console = Console()


def select_clients(config: RunConfig, selection: Selection) -> None:
    """Selects cohorts into the folder `config.output` and prints what is public.

    Privacy: in private mode releases (epsilon, delta)-DP output; event:
    `Selection.cost`. Else reads private data; the cohorts are published.

    Args:
        config: data, seed, output, engine, num_clients and num_workers are used.
        selection: the settings.

    Raises:
        UserError: bad input; nothing was written.
        typer.Exit: the selection stopped early or failed (code 1).
    """
    config, data = prepare(config)
    path = Path(config.output)
    make_output(path)
    (path / ".flower").mkdir()
    write_plan(path, config, selection)
    run = _in_flower if config.engine == "flower" else _locally
    with (
        exit_if_stopped("select again into another --output"),
        stop_on_signal() as stop,
        Progress(console) as progress,
    ):
        report = progress.rounds(selection.num_rounds + selection.num_questions)
        outcome = run(config, path, report, stop)
    summary = _write(config, selection, data, outcome)
    _show(path, selection, data.num_clients, summary)


def prepare(config: RunConfig) -> tuple[ResolvedConfig, FederatedImages]:
    """Checks everything before the work, and fixes seed, K and paths.

    Raises:
        UserError: an existing output, or data without owners, labels or names that a
            file can hold.
    """
    new_output(config.output)
    why = "cohorts are selected among all clients; leave out"
    reject({"cohort": config.cohort}, why)
    config = dataclasses.replace(
        with_absolute_paths(config),
        seed=secrets.randbelow(2**31) if config.seed is None else config.seed,
        clients_per_node=1,
        node_sizes=None,
    ).validate()
    data = split_selectable(config, sources.load_records(config))
    known = {"num_clients": data.num_clients, "num_classes": data.num_classes}
    # A selection has noise of its own, or none; the run's releases do not happen.
    known["noise_multiplier"] = 0
    return ResolvedConfig.from_flat(known, config), data


def split_selectable(config: RunConfig, records: Records) -> FederatedImages:
    """Splits records into clients of which cohorts can be selected.

    Privacy: reads private data; output private.

    Raises:
        UserError: data without owners, labels or names that a file can hold.
    """
    if records.clients is None or config.partition in ("iid", "dirichlet"):
        raise UserError(
            f"data = {config.data}: cohorts are of people, and these clients are "
            "shards; give data that names its clients, such as mnist-by-writer, and no "
            "--partition"
        )
    data = split_records(config, records)
    if data.num_classes < 2:
        raise UserError(
            f"data = {config.data}: has one class only; a classifier needs labels"
        )
    check_names(data.client_names)
    return data


# ------------------------------------------------------------------ engines


def _in_flower(
    config: ResolvedConfig, path: Path, report: Report, stop: Stop
) -> dict[str, Any]:
    """Returns the outcome of a Flower simulation with one node per client."""
    folder = RunFolder(path, config)
    flower_engine.train(folder, report, stop, COMPONENTS)
    return read_json(path / ".flower" / OUTCOME)


def _locally(
    config: ResolvedConfig, path: Path, report: Report, stop: Stop
) -> dict[str, Any]:
    """Returns the outcome of the same strategy and ClientApp in this process."""
    flower_log = logging.getLogger("flwr")
    level = flower_log.level
    flower_log.setLevel(logging.ERROR)
    try:
        grid = LocalGrid(classifier_app.app, config.num_clients, config.num_workers)
        return Selecting(path, grid, report, stop).run()
    finally:
        flower_log.setLevel(level)
        classifier_app.clients_of.cache_clear()


# ------------------------------------------------------------------ results


def _write(
    config: RunConfig,
    selection: Selection,
    data: FederatedImages,
    outcome: dict[str, Any],
) -> dict[str, Any]:
    """Writes the cohort files, then `cohorts.json`; returns its content."""
    path, cost = Path(config.output), selection.cost(data.num_clients)
    selection_id = "" if cost is None else secrets.token_hex(8)
    kind = NOT_PRIVATE if cost is None else "private"
    chosen = [*zip(data.client_names, outcome["cohorts"], strict=True)]
    members = {
        cohort: tuple(name for name, of in chosen if of == cohort)
        for cohort in selection.cohorts
    }
    for cohort, names in members.items():
        if names:
            title = f"{cohort}: {len(names)} of {data.num_clients} clients"
            title = f"{title} of {config.data.splitlines()[0]}"
            file = Cohort(names, kind, cost, selection_id)
            write_cohort(path / f"{cohort}.txt", file, title)
    summary = {
        "selection": kind,
        "condition_of_runs": EXCLUDED if cost is None else INCLUDED,
        "statements": [s.to_json() for s in statements(selection, data.num_clients)],
        "cost": None if cost is None else dataclasses.asdict(cost),
        "id": selection_id,
        "thresholds": {"below": outcome["low"], "above": outcome["high"]},
        "cohorts": {cohort: len(names) for cohort, names in members.items()},
        "planted": planted_counts(config, members),
        "num_clients": data.num_clients,
        "versions": versions(),
    }
    write_json(path / "cohorts.json", summary)
    return summary


def planted_counts(
    config: RunConfig, cohorts: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, int]] | None:
    """Returns how many corrupted and intact clients each cohort has; None of no bug.

    That is a function of settings and names, which are public.
    """
    if config.corruption == "none":
        return None
    counts: dict[str, dict[str, int]] = {}
    for cohort, names in cohorts.items():
        spoilt = int(corrupted_clients(config, names).sum())
        counts[cohort] = {"corrupted": spoilt, "intact": len(names) - spoilt}
    return counts


def _show(
    path: Path, selection: Selection, num_clients: int, summary: dict[str, Any]
) -> None:
    low, high = summary["thresholds"]["below"], summary["thresholds"]["above"]
    limits = {"selected": f"<= {low}", "above": f"> {high}", REST: "others"}
    planted = summary["planted"]
    head = ["cohort", "accuracy", "clients"]
    head += ["corrupted", "intact"] if planted else []
    rows: list[list[str]] = []
    for cohort, count in summary["cohorts"].items():
        counts = planted[cohort].values() if planted else ()
        rows.append([cohort, limits[cohort], str(count), *map(str, counts)])
        if not count:
            say(f"{cohort} is empty: no file; give another threshold")
    Table(f"{num_clients} clients", head, rows).show()
    if selection.is_private:
        privacy_report.show(statements(selection, num_clients))
    else:
        say("NOT PRIVATE: the cohorts tell about the data of who is in them.")
    say(f"A run on one of them: {summary['condition_of_runs']}.")
    say(f"cohorts      {path}")
