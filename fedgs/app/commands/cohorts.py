"""What `fedgs cohorts` does: select clients by their accuracy, and say what it cost.

A folder of a selection holds:

    selected.txt  above.txt  rest.txt    the cohorts, unless empty
    cohorts.json                         thresholds, settings, privacy
    plan.json                            what the clients were asked to do
    private/                             with --private-diagnostics: every accuracy
"""

import dataclasses
import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from clients import selection_app as classifier_app
from fedgs.app.commands import privacy as privacy_report
from fedgs.app.commands.drawing import new_figure, to_png
from fedgs.app.commands.progress import Progress, say
from fedgs.app.commands.run_outcome import exit_if_stopped, make_output, new_output
from fedgs.app.tables import Table
from fedgs.cohorts.files import EXCLUDED, INCLUDED, NOT_PRIVATE, Cohort, check_names
from fedgs.cohorts.files import write_cohort as write_cohort
from fedgs.cohorts.selection import OUTCOME, REST, Selection, statements, write_plan
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data import sources
from fedgs.data.corruption import corrupted_clients
from fedgs.data.federated import FederatedImages
from fedgs.data.load import split_records
from fedgs.data.records import Records
from fedgs.errors import UserError, reject
from fedgs.federation.preparation import with_absolute_paths
from fedgs.federation.training import Report, Stop, stop_on_signal
from fedgs.files import read_json, write_atomically, write_json
from fedgs.runs.run_folder import RunFolder, versions
from server.launch import flower_engine
from server.launch.local_grid import LocalGrid
from server.selection_app import Selecting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPONENTS = ("server.selection_app:app", "clients.selection_app:app")
PRIVATE_TITLE = "private diagnostics, not private: accuracy of each client"
console = Console()


def cohorts(config: RunConfig, selection: Selection, as_json: bool) -> None:
    """Selects cohorts into the folder `config.output` and prints what is public.

    Privacy: in private mode releases (epsilon, delta)-DP output; event:
    `Selection.cost`. Else reads private data; the cohorts are published.

    Args:
        config: data, seed, output, engine, num_clients and num_workers are used.
        selection: the settings.
        as_json: print `cohorts.json` instead of tables.

    Raises:
        UserError: bad input; nothing was written.
        typer.Exit: the selection stopped early or failed (code 1).
    """
    config, data = prepare(config, selection)
    path = Path(config.output)
    make_output(path)
    (path / ".flower").mkdir()
    (path / "private").mkdir(mode=0o700)
    write_plan(path, config, selection)
    run = _in_flower if config.engine == "flower" else _locally
    with (
        exit_if_stopped("select again into another --output"),
        stop_on_signal() as stop,
        _progress(selection, as_json) as report,
    ):
        outcome = run(config, path, report, stop)
    summary = _write(config, selection, data, outcome)
    if selection.keep_accuracies:
        _write_diagnostics(config, data, outcome)
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        _show(path, selection, data.num_clients, summary)


def prepare(
    config: RunConfig, selection: Selection
) -> tuple[ResolvedConfig, FederatedImages]:
    """Checks everything before the work, and fixes seed, K and paths.

    Raises:
        UserError: an existing output, data without owners, labels or names that a file
            can hold, or a library that is missing.
    """
    new_output(config.output)
    refuse_cohort(config)
    if selection.keep_accuracies and find_spec("matplotlib") is None:
        raise UserError(
            "private_diagnostics: draws with matplotlib; run `pip install matplotlib`"
        )
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


def refuse_cohort(config: RunConfig) -> None:
    """Refuses to select among the clients of a cohort."""
    why = "cohorts are selected among all clients; leave out"
    reject({"cohort": config.cohort}, why)


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


@contextmanager
def _progress(selection: Selection, as_json: bool) -> Iterator[Report]:
    if as_json:
        yield lambda metrics: None
    else:
        total = selection.num_rounds + selection.num_questions
        with Progress(console) as progress:
            yield progress.rounds(total)


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
        "cost": None if cost is None else cost.to_json(),
        "id": selection_id,
        "thresholds": {"below": outcome["low"], "above": outcome["high"]},
        "cohorts": {cohort: len(names) for cohort, names in members.items()},
        "planted": planted_counts(config, members) if is_planted(config) else None,
        "num_clients": data.num_clients,
        "settings": dataclasses.asdict(selection),
        "config": config.to_flat(),
        "versions": versions(),
    }
    write_json(path / "cohorts.json", summary)
    return summary


def is_planted(config: RunConfig) -> bool:
    """Tells whether a bug is planted in whole clients."""
    return config.corruption != "none" and config.corruption_unit == "client"


def planted_counts(
    config: RunConfig, cohorts: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, int]]:
    """Returns how many corrupted and intact clients each cohort has.

    That is a function of settings and names, which are public.
    """
    counts: dict[str, dict[str, int]] = {}
    for cohort, names in cohorts.items():
        spoilt = 0
        if config.corruption != "none":
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


# ------------------------------------------------------------------ diagnostics


def _write_diagnostics(
    config: RunConfig, data: FederatedImages, outcome: dict[str, Any]
) -> None:
    """Writes every client's accuracy, and their histogram, to `private/`."""
    folder, accuracies = Path(config.output) / "private", dict[str, Any]()
    for client_id, name in enumerate(data.client_names):
        path = folder / f"accuracy-{client_id:05d}.json"
        accuracies[name] = read_json(path)["accuracy"]
        path.unlink()
    write_json(folder / "accuracies.json", {"note": PRIVATE_TITLE, **accuracies})
    groups = {"clients": np.ones(data.num_clients, bool)}
    if is_planted(config):
        is_corrupted = corrupted_clients(config, data.client_names)
        words = f"with {config.corruption}"
        groups = {"intact": ~is_corrupted, words: is_corrupted}
    values = np.array([np.nan if a is None else a for a in accuracies.values()])
    figure = histogram(
        {name: values[chosen] for name, chosen in groups.items()},
        [limit for limit in (outcome["low"], outcome["high"]) if limit is not None],
    )
    write_atomically(folder / "accuracies.png", to_png(figure))


def histogram(
    groups: dict[str, "np.ndarray[Any, Any]"], limits: Sequence[float]
) -> "Figure":
    """Returns stacked bars of 1/40 in width and a line at each threshold."""
    figure = new_figure(7, 3.6)
    axes = figure.subplots()
    edges = np.linspace(0, 1, 41).tolist()
    shown = [values[np.isfinite(values)] for values in groups.values()]
    labels = [f"{name} ({len(v)})" for name, v in zip(groups, shown, strict=True)]
    colors = ["#4477aa", "#ee6677"][: len(shown)]
    axes.hist(shown, edges, stacked=True, label=labels, color=colors)
    for number, limit in enumerate(limits):
        label = "thresholds" if number == 0 else None
        axes.axvline(limit, color="black", linestyle="--", linewidth=1, label=label)
    axes.set(
        xlabel="accuracy on its own held-out images",
        ylabel="clients",
        title=PRIVATE_TITLE,
    )
    axes.legend(loc="upper center")
    return figure
