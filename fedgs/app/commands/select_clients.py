"""What `fedgs select-clients` does: select by accuracy, and say what it cost.

What its folder holds is in `fedgs.cohorts.selection`.
"""

import dataclasses
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedgs.app.commands import privacy as privacy_report
from fedgs.app.commands.run_outcome import (
    exit_if_stopped,
    make_output,
    near,
    new_output,
    stopping_on_failure,
)
from fedgs.app.commands.terminal import Progress, say
from fedgs.app.tables import Table
from fedgs.cohorts import cohort_file
from fedgs.cohorts.selection import (
    ASKED_FILE,
    CLASSIFIER,
    OUTCOME,
    REST,
    Selection,
    ask_cohorts,
    read_plan,
    statements,
    training_settings,
    write_plan,
)
from fedgs.config.run_config import RunConfig
from fedgs.data import sources
from fedgs.data.corruption import corrupted_clients
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data, split_records
from fedgs.data.records import Records
from fedgs.errors import UserError, reject
from fedgs.files import check_entries, read_json, write_json
from fedgs.methods.cohort_classifier import Members
from fedgs.methods.schedule import clients_of
from fedgs.privacy.accountant import Statement
from fedgs.privacy.selection_cost import SelectionCost
from fedgs.round import local
from fedgs.round.preparation import resolve, with_absolute_paths
from fedgs.round.run import Report, RunStopped, Stop, stop_on_signal
from fedgs.runs.run_folder import GENERATOR, RunFolder, versions
from server.launch import flower_engine

COMPONENTS = ("server.selection_app:app", "clients.classifier_app:app")
SUMMARY = "cohorts.json"
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
    members = prepare(config, selection)
    path = Path(members.config.output)
    make_output(path)
    write_plan(path, members.config, selection)
    _select(path, members)


def resume(path: Path) -> None:
    """Continues a selection, from the last checkpoint of its classifier.

    In private mode only before its questions: a second answer would cost again.

    Privacy: as `select_clients`.

    Raises:
        UserError: it is finished, or asked in private mode; or the folder is broken.
        typer.Exit: as `select_clients`.
    """
    check_entries(path)
    config, selection = read_plan(path)
    is_asked = selection.is_private and (path / ASKED_FILE).exists()
    if is_asked or (path / SUMMARY).exists():
        raise UserError(
            f"{path}: its clients have been asked for their cohorts; select again "
            "into another --output"
        )
    data = split_selectable(config, sources.load_records(config))
    _select(path, Members(config, selection, data))


def prepare(config: RunConfig, selection: Selection) -> Members:
    """Checks everything before the work, and fixes what the classifier's run uses.

    Raises:
        UserError: an existing output, or data without owners, labels or names that a
            file can hold.
    """
    new_output(config.output)
    flower_engine.check(config)
    why = "cohorts are selected among all clients; leave out"
    reject({"cohort": config.cohort}, why)
    config = dataclasses.replace(
        with_absolute_paths(config),
        seed=secrets.randbelow(2**31) if config.seed is None else config.seed,
    ).validate()
    data = split_selectable(config, sources.load_records(config))
    settings = training_settings(selection, data.num_clients)
    resolved, data = resolve(RunConfig.from_flat(settings, config), data)
    return Members(resolved, selection, data)


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
    cohort_file.check_names(data.client_names)
    return data


# ------------------------------------------------------------------ engines


def _select(path: Path, members: Members) -> None:
    """Trains the classifier, asks the clients, and writes and prints the cohorts."""
    config = members.config
    selection = members.selection
    own = dataclasses.replace(config, output=str(path / CLASSIFIER))
    if not selection.train_corrupted:
        own = dataclasses.replace(own, corruption="none")
    is_new = not Path(own.output).exists()
    if is_new:
        folder = RunFolder.create(own)
    else:
        folder = RunFolder.open(own.output)
    go_on = f"fedgs resume {near(path)}"
    with exit_if_stopped(f"continue with: {go_on}"), stopping_on_failure():
        with stop_on_signal(go_on) as stop, Progress(console) as progress:
            report = progress.rounds(selection.num_rounds)
            if config.engine == "flower":
                flower_engine.train(folder, report, stop, COMPONENTS)
                outcome = read_json(folder.path / ".flower" / OUTCOME)
            else:
                outcome = select_locally(folder, members, report, stop)
        cost = cost_by_ledger(folder, selection)
        suppositions = (config.unit_condition, *config.public_conditions)
        rows = statements(selection, cost, suppositions)
        summary = _write(path, members, cost, rows, outcome)
    shutil.rmtree(folder.private)  # an update of each client: nobody goes on from them
    _show(path, rows, summary)


def select_locally(
    folder: RunFolder, members: Members, report: Report, stop: Stop
) -> dict[str, Any]:
    """Returns the outcome of the local engine; threads ask the clients.

    Privacy: as `select_clients`.
    """
    config = members.config
    is_same = folder.config.corruption == config.corruption
    if is_same:
        data = members.data
    else:
        data = load_data(folder.config)
    local.train(folder, data, report, stop)
    own = [dict[str, Any]() for _ in range(config.num_clients)]
    one_each = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ThreadPoolExecutor(config.num_workers, **one_each) as workers:

        def ask(question: str, details: Mapping[str, Any]) -> list[dict[str, Any]]:
            if stop.is_set():
                raise RunStopped(f"stopped before the question {question}")
            asked = {"question": question, **details}
            answers = workers.map(
                lambda client: members.answer(client, asked, own[client]),
                range(config.num_clients),
            )
            return list(answers)

        weights = (folder.path / GENERATOR).read_bytes()
        return ask_cohorts(folder.path.parent, weights, ask)


# ------------------------------------------------------------------ results


def cost_by_ledger(folder: RunFolder, selection: Selection) -> SelectionCost | None:
    """Returns what a selection cost, by the ledger: repeated rounds count again.

    Privacy: public; of the ledger.
    """
    clients = range(folder.config.num_clients)
    if (planned := selection.cost(len(clients))) is None:
        return None
    times = Counter[int]()
    for event in folder.read_ledger().events:
        times.update(clients_of(event.participants, clients))
    return dataclasses.replace(planned, num_releases=max(times.values()))


def _write(
    path: Path,
    members: Members,
    cost: SelectionCost | None,
    rows: Sequence[Statement],
    outcome: dict[str, Any],
) -> dict[str, Any]:
    """Writes the cohort files, then `cohorts.json`; returns its content."""
    config = members.config
    names = members.data.client_names
    if cost is None:
        selection_id = ""
        kind = cohort_file.SELECTED_OPENLY
        condition_of_runs = cohort_file.EXCLUDED
    else:
        selection_id = secrets.token_hex(8)
        kind = cohort_file.SELECTED_PRIVATELY
        condition_of_runs = cohort_file.INCLUDED
    chosen = [*zip(names, outcome["cohorts"], strict=True)]
    cohorts = {
        cohort: tuple(name for name, of in chosen if of == cohort)
        for cohort in members.selection.cohorts
    }
    for cohort, own in cohorts.items():
        if own:
            title = f"{cohort}: {len(own)} of {len(names)} clients"
            title = f"{title} of {config.data.splitlines()[0]}"
            file = cohort_file.Cohort(own, kind, cost, selection_id)
            cohort_file.write_cohort(path / f"{cohort}.txt", file, title)
    summary = {
        "selection": kind,
        "condition_of_runs": condition_of_runs,
        "statements": [row.to_json() for row in rows],
        "cost": None if cost is None else dataclasses.asdict(cost),
        "id": selection_id,
        "thresholds": {"below": outcome["low"], "above": outcome["high"]},
        "cohorts": {cohort: len(own) for cohort, own in cohorts.items()},
        "planted": planted_counts(config, cohorts),
        "num_clients": len(names),
        "versions": versions(),
    }
    write_json(path / SUMMARY, summary)
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


def _show(path: Path, rows: Sequence[Statement], summary: dict[str, Any]) -> None:
    low = summary["thresholds"]["below"]
    high = summary["thresholds"]["above"]
    limits = {"selected": f"<= {low}", "above": f"> {high}", REST: "others"}
    planted = summary["planted"]
    head = ["cohort", "accuracy", "clients"]
    head += ["corrupted", "intact"] if planted else []
    cells: list[list[str]] = []
    for cohort, count in summary["cohorts"].items():
        if planted:
            counts = planted[cohort].values()
        else:
            counts = ()
        cells.append([cohort, limits[cohort], str(count), *map(str, counts)])
        if not count:
            say(f"{cohort} is empty: no file; give another threshold")
    Table(f"{summary['num_clients']} clients", head, cells).show()
    if rows:
        privacy_report.show(rows)
    else:
        say("NOT PRIVATE: the cohorts tell about the data of who is in them.")
    say(f"A run on one of them: {summary['condition_of_runs']}.")
    say(f"cohorts      {path}")
