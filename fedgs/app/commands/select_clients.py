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

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import load

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
    ABOVE,
    ASKED_FILE,
    CLASSIFIER,
    PLAN,
    REST,
    SELECTED,
    Selection,
    divided,
    read_plan,
    refuse_decided,
    statements,
    training_settings,
    write_plan,
)
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data import sources
from fedgs.data.corruption import corrupted_clients
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data, split_records
from fedgs.data.records import Records
from fedgs.errors import UserError, reject
from fedgs.files import check_entries, write_atomically, write_json
from fedgs.methods.cohort_classifier import accuracy_of
from fedgs.methods.schedule import clients_of
from fedgs.privacy.accountant import Statement
from fedgs.privacy.selection_cost import SelectionCost
from fedgs.round import local
from fedgs.round.preparation import resolve, with_absolute_paths
from fedgs.round.run import stop_on_signal
from fedgs.runs.run_folder import GENERATOR, RunFolder, versions
from server.launch import flower_engine

SUMMARY = "cohorts.json"
console = Console()


def select_clients(
    config: RunConfig,
    selection: Selection,
    given: Mapping[str, Any],
) -> None:
    """Selects cohorts into the folder `config.output` and prints what is public.

    Privacy: in private mode releases (epsilon, delta)-DP output; event:
    `Selection.cost`. Else reads private data; the cohorts are published.

    Args:
        config: data, seed, output, engine, num_clients and num_workers are used.
        selection: the settings.
        given: the settings that the user has given, of those in `config`.

    Raises:
        UserError: bad input; nothing was written.
        typer.Exit: the selection stopped early or failed (code 1).
    """
    refuse_decided(given, training_settings(selection, num_clients=1))
    resolved, data = prepare(config, selection)
    path = Path(resolved.output)
    make_output(path)
    write_plan(path, resolved, selection)
    _select(path, resolved, selection, data)


def resume(path: Path) -> None:
    """Continues a selection, from the last checkpoint of its classifier.

    In private mode only before its clients are asked: a second answer would cost again.

    Privacy: as `select_clients`.

    Raises:
        UserError: it is finished, or asked in private mode; or the folder is broken.
        typer.Exit: as `select_clients`.
    """
    # Before anything of the folder is read: whoever handed it over could have made an
    # entry lead to other files.
    check_entries(path)
    config, selection = read_plan(path)
    # The file is made before anybody is asked. So a crash in between counts as asked,
    # and the clients are never charged for a second answer.
    is_asked = selection.is_private and (path / ASKED_FILE).exists()
    if is_asked or (path / SUMMARY).exists():
        raise UserError(
            f"{path}: its clients were asked for their cohorts already; select "
            "again, with another --output"
        )
    data = split_selectable(config, sources.load_records(config))
    _select(path, config, selection, data)


def prepare(
    config: RunConfig,
    selection: Selection,
) -> tuple[ResolvedConfig, FederatedImages]:
    """Checks everything before the work, and fixes what the classifier's run uses.

    Returns:
        The settings of the classifier's run, and the data with the planted bug.

    Raises:
        UserError: an existing output, or data without owners, labels or names that a
            file can hold.
    """
    new_output(config.output)
    flower_engine.check(config)
    why = "cohorts are selected among all clients; leave out"
    of_cohorts = {
        "cohort": config.cohort,
        "cohorts": config.cohorts,
        "cohort_value": config.cohort_value,
    }
    reject(of_cohorts, why)
    # Workers of Flower have another working directory.
    config = with_absolute_paths(config)
    if config.seed is None:
        # Drawn here, once: `resume` has to make the same split as this call.
        config = dataclasses.replace(config, seed=secrets.randbelow(2**31))
    config = config.validate()
    data = split_selectable(config, sources.load_records(config))
    settings = training_settings(selection, data.num_clients)
    return resolve(RunConfig.from_flat(settings, config), data)


def split_selectable(config: RunConfig, records: Records) -> FederatedImages:
    """Splits records into clients of which cohorts can be selected.

    Privacy: reads private data; output private.

    Raises:
        UserError: data without owners, labels or names that a file can hold.
    """
    if records.clients is None or config.partition in ("iid", "dirichlet"):
        raise UserError(
            f"data = {config.data}: a cohort consists of people, but these clients are "
            "shards; give data that names its owners, such as mnist-by-writer, and no "
            "--partition"
        )
    data = split_records(config, records)
    if data.num_classes < 2:
        raise UserError(
            f"data = {config.data}: it has only one class, but a classifier needs "
            "two; give labels"
        )
    cohort_file.check_names(data.client_names)
    return data


# ------------------------------------------------------------------ selection


def _select(
    path: Path,
    config: ResolvedConfig,
    selection: Selection,
    data: FederatedImages,
) -> None:
    """Trains the classifier, divides the clients, and writes and prints the cohorts."""
    own = dataclasses.replace(config, output=str(path / CLASSIFIER))
    # The bug is still in the images on which the clients measure the classifier.
    if not selection.train_corrupted:
        own = dataclasses.replace(own, corruption="none")
    if Path(own.output).exists():  # of a selection that was stopped
        folder = RunFolder.open(own.output)
        _check_plan(path, own, selection, folder)
    else:
        folder = RunFolder.create(own)
    go_on = f"fedgs resume {near(path)}"
    with exit_if_stopped(f"continue with: {go_on}"), stopping_on_failure():
        with stop_on_signal(go_on) as stop, Progress(console) as progress:
            report = progress.rounds(selection.num_rounds)
            if config.engine == "flower":
                flower_engine.train(folder, report, stop)
            elif own.corruption == config.corruption:
                local.train(folder, data, report, stop)
            else:
                local.train(folder, load_data(own), report, stop)
        accuracies = accuracies_of(folder, config, data)
        # Before anything is told of them: a second answer would cost again.
        write_atomically(path / ASKED_FILE, b"")
        thresholds, cohorts = divided(selection, accuracies)
        cost = cost_by_ledger(folder, selection)
        suppositions = (config.unit_condition, *config.public_conditions)
        rows = statements(selection, cost, suppositions)
        # One that is empty is told as well, so all of them are listed first.
        members_of: dict[str, list[str]] = {name: [] for name in selection.cohorts}
        for name, cohort in zip(data.client_names, cohorts, strict=True):
            members_of[cohort].append(name)
        # Within the `with` block: a full disk ends with the advice to resume.
        summary = _write(path, config, cost, rows, thresholds, members_of)
    shutil.rmtree(folder.private)  # an update of each client: nobody goes on from them
    _show(path, rows, summary)


def _check_plan(
    path: Path,
    config: ResolvedConfig,
    selection: Selection,
    begun: RunFolder,
) -> None:
    """Refuses a plan that is not the one by which the classifier's run began.

    What a selection costs follows from its plan. The run's settings follow from it too,
    and its ledger binds them.

    Args:
        path: the folder of the selection.
        config: the settings of the run, by the plan.
        selection: by the plan.
        begun: the folder of the run.

    Raises:
        UserError: they differ, or the ledger is not that of the settings.
    """
    begun.check_history()
    decided = training_settings(selection, config.num_clients)
    planned = RunConfig.from_flat(decided, config).to_flat()
    found = begun.config.to_flat()
    # The folder may have been moved since, and the run has drawn a secret of its own.
    for name in ("output", "selection_hash"):
        del planned[name]
    for name, value in planned.items():
        if found.get(name) != value:
            raise UserError(
                f"{path / PLAN}: {name} is {value} by it, and {found.get(name)} in the "
                f"classifier's run; restore {PLAN} from a copy, or select again"
            )


def accuracies_of(
    folder: RunFolder,
    config: ResolvedConfig,
    data: FederatedImages,
) -> NDArray[np.float64]:
    """Returns the classifier's accuracy on what each client holds out, shape (K,).

    Privacy: reads private data; output private.

    Args:
        folder: the folder of the classifier's run, which is finished.
        config: the configuration of the selection.
        data: the data of all clients, with the planted bug.
    """
    weights = load((folder.path / GENERATOR).read_bytes())

    def measured(client: int) -> float:
        return accuracy_of(config, data.of(client), weights)

    with ThreadPoolExecutor(
        config.num_workers,
        # One thread of torch for each worker, else they would compete for the cores.
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as workers:
        return np.array([*workers.map(measured, range(data.num_clients))])


# ------------------------------------------------------------------ results


def cost_by_ledger(folder: RunFolder, selection: Selection) -> SelectionCost | None:
    """Returns what a selection cost, by the ledger: repeated rounds count again.

    Privacy: public; of the ledger.
    """
    clients = range(folder.config.num_clients)
    planned = selection.cost(len(clients))
    if planned is None:  # not private
        return None
    times = Counter[int]()
    for event in folder.read_ledger().events:
        times.update(clients_of(event.participants, clients))
    # The guarantee is that of the client who was asked most often.
    return dataclasses.replace(planned, num_releases=max(times.values()))


def _write(
    path: Path,
    config: ResolvedConfig,
    cost: SelectionCost | None,
    rows: Sequence[Statement],
    thresholds: Mapping[str, float],
    cohorts: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Writes the cohort files, then `cohorts.json`; returns its content."""
    if cost is None:
        selection_id = ""
        kind = cohort_file.SELECTED_OPENLY
        condition_of_runs = cohort_file.EXCLUDED
    else:
        # By it a run knows that two of its cohorts come of one selection, and charges
        # that once.
        selection_id = secrets.token_hex(8)
        kind = cohort_file.SELECTED_PRIVATELY
        condition_of_runs = cohort_file.INCLUDED
    # The title is a comment in the file, which has to stay on one line.
    source = config.data.splitlines()[0]
    for cohort, own in cohorts.items():
        if own:
            title = f"{cohort}: {len(own)} of {config.num_clients} clients of {source}"
            file = cohort_file.Cohort(tuple(own), kind, cost, selection_id)
            cohort_file.write_cohort(path / f"{cohort}.txt", file, title)
    if cost is None:
        cost_fields = None
    else:
        cost_fields = dataclasses.asdict(cost)
    summary = {
        "selection": kind,
        "condition_of_runs": condition_of_runs,
        "statements": [row.to_json() for row in rows],
        "cost": cost_fields,
        "id": selection_id,
        "thresholds": thresholds,
        "cohorts": {cohort: len(own) for cohort, own in cohorts.items()},
        "planted": planted_counts(config, cohorts),
        "num_clients": config.num_clients,
        "versions": versions(),
    }
    # Last: `resume` takes a folder with this file for a finished one.
    write_json(path / SUMMARY, summary)
    return summary


def planted_counts(
    config: RunConfig,
    cohorts: Mapping[str, Sequence[str]],
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
    low = summary["thresholds"].get("below")
    high = summary["thresholds"].get("above")
    limits = {SELECTED: f"<= {low}", ABOVE: f"> {high}", REST: "others"}
    planted = summary["planted"]
    head = ["cohort", "accuracy", "clients"]
    if planted:
        head += ["corrupted", "intact"]
    cells: list[list[str]] = []
    for cohort, count in summary["cohorts"].items():
        row = [cohort, limits[cohort], str(count)]
        if planted:
            counts = planted[cohort]
            row += [str(counts["corrupted"]), str(counts["intact"])]
        cells.append(row)
        if not count:
            say(
                f"The cohort {cohort} is empty and has no file; give another threshold."
            )
    Table(f"{summary['num_clients']} clients", head, cells).show()
    if rows:
        privacy_report.show(rows)
    else:
        say("NOT PRIVATE: a cohort reveals something about the data of its clients.")
    say(f"Condition of every run on a cohort: {summary['condition_of_runs']}.")
    say(f"Cohorts: {path}")
