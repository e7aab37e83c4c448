"""Cells of a table: runs that are trained, judged by a small CNN, and printed together.

A cell is one run, `OUTPUT/<data>-<method>-eps<epsilon>-seed<seed>`. Its generator is
judged by the small CNN of `fedgs evaluate`, trained on 10,000 samples. What is there is
not computed again; an interrupted run is resumed. `pictures` lists cells.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from experiments.baselines import command as baselines
from experiments.commands.endings import exit_if_stopped
from experiments.commands.progress import say
from experiments.commands.train import resume, train_from_checkpoint
from experiments.evaluation.evaluate import evaluate
from experiments.evaluation.request import EvaluationRequest
from experiments.paper.cell_list import Cell, Cells, Request
from experiments.tables import Table
from fedgs.baselines import find
from fedgs.baselines.asked import Asked
from fedgs.config.recipes import overridden, recipe
from fedgs.errors import UserError, some
from fedgs.federation.preparation import new_run
from fedgs.files import read_json, read_json_lines, write_atomically, write_json
from fedgs.privacy.accounting import Statement
from fedgs.process import forget_peak_memory, peak_memory
from fedgs.runs import epsilons, sample
from fedgs.runs.run_folder import RunFolder, is_baseline

NUM_SAMPLES = 10_000
COST = "cpu-seconds.json"  # in the run folder: of training, all threads
MARKS = {  # metric of `fedgs evaluate`: a score that only it has
    "cnn": "downstream_cnn_accuracy",
    "images": "num_neighbour_images",
    "classifiers": "classifiers",
}
OTHER_CLAIMS = ("amplification", "as published")  # theorems of rows that are not shown


def fill(cells: Cells, request: Request) -> None:
    """Trains and evaluates what is missing, unless only printed; prints the table.

    Raises:
        UserError: no such cell or folder, or cells that failed; a failed cell costs
            no other.
    """
    failed: Collection[str] = ()
    if request.printed and not request.output.is_dir():
        raise UserError(
            f"output = {request.output}: no such folder; give --output that of an "
            "earlier call, or leave out --print"
        )
    if not request.printed:
        failed = each(request.of(cells), lambda cell: compute(cell, request))
    found = table(cells.caption, request.of(cells), request.output)
    write_atomically(request.output / "table.md", found.markdown().encode())
    found.show()
    end(failed)


def each(cells: Sequence[Cell], work: Callable[[Cell], object]) -> dict[str, str]:
    """Does the work of every cell; returns the cells that failed, by name, and why.

    Raises:
        typer.Exit: stopped by the user; the same command goes on.
    """
    failed = dict[str, str]()
    for cell in cells:
        try:
            with exit_if_stopped("continue with the same command"):
                work(cell)
        except typer.Exit:
            raise
        except Exception as error:
            say(f"{cell.name}: {error!r}", is_error=True)
            failed[cell.name] = str(error) or repr(error)
    return failed


def end(failed: Collection[str]) -> None:
    """Ends a command with the names of what failed.

    Raises:
        UserError: if anything did.
    """
    if failed:
        raise UserError(f"{some(failed)}: failed; call again for these alone")


def compute(
    cell: Cell, request: Request, metrics: Sequence[str] = ("cnn",)
) -> dict[str, Any]:
    """Trains and evaluates a cell, as far as it is not there; returns its scores.

    Privacy: releases (epsilon, delta)-DP output; events: in the run's ledger. The
    accuracy is computed from real data: output private.
    """
    path = request.output.expanduser().absolute() / cell.name
    if not (path / "generator.safetensors").exists():
        _train(cell, path, request.data_dir)
    known = scores(path)
    missing = tuple(name for name in metrics if MARKS[name] not in known)
    if not missing:
        return known
    # Calibration trains the thirteen on 60,000 real images: no column shows it.
    asked = EvaluationRequest(
        str(path), count=NUM_SAMPLES, metrics=missing, calibrate=False
    )
    evaluate(asked, as_json=True)
    return scores(path)


def scores(run: Path) -> dict[str, Any]:
    """Returns all that evaluations of a run found; of the same score the last."""
    found = dict[str, Any]()
    for line in read_json_lines(run / "evaluations.jsonl"):
        found |= line
    return found


def _train(cell: Cell, path: Path, data_dir: str | None) -> None:
    say(f"{cell.name}: training")
    name = cell.how.baseline
    if is_baseline(path):
        return baselines.resume(path, typed=name)
    if (path / "config.json").exists():
        return resume(path)  # nobody knows what its first part took
    places = {"data_dir": data_dir or "", "output": str(path)}
    if name:
        own = {
            spec.name
            for kind in (find(name, True).Settings, Asked)
            for spec in fields(kind)
        }
        values = cell.settings() | places
        given = {key: value for key, value in values.items() if key in own}
        others = {key: value for key, value in values.items() if key not in own}
        with _measured(path):
            baselines.train(name, given, others)
        return None
    config = overridden(recipe(cell.how.recipe), cell.settings())
    folder, data = new_run(overridden(config, places))
    with _measured(path):
        is_told_to_stop = train_from_checkpoint(folder, data)
    if is_told_to_stop:
        raise typer.Exit(1)
    return None


@contextmanager
def _measured(run: Path) -> Iterator[None]:
    """Writes what a training took: seconds, and the most memory of this process."""
    forget_peak_memory()
    started, began = time.process_time(), time.monotonic()
    yield
    cost = {
        "cpu_seconds": time.process_time() - started,
        "wall_seconds": time.monotonic() - began,
        "peak_memory_bytes": peak_memory(),
    }
    write_json(run / COST, cost)


def table(caption: str, cells: Sequence[Cell], output: Path) -> Table:
    """Returns the table of the cells that are there, and draws a grid of each row."""
    head = ["data", "method", "epsilon", "CNN", "seeds", "target", "CPU s", "rounds"]
    rows: list[list[str]] = []
    for name, group in groupby(cells, key=lambda cell: cell.row):
        found = [cell for cell in group if scores(output / cell.name)]
        if not found:
            continue
        rows.append(_row(found, output))
        draw_grid(output / found[0].name, output / f"{name}.png")
    note = f"epsilon: release, zero-out (replace-one); CNN: {NUM_SAMPLES} samples, mean"
    note += " and range of the seeds' accuracies"
    return Table(caption, head, rows, note)


def draw_grid(run: Path, picture: Path) -> None:
    """Draws a finished run's sample grid, of the first latents.

    Privacy: post-processing of DP output.
    """
    folder = RunFolder.open(run)
    sample.write_grid(picture, folder.config, sample.load_generator(folder))


def stated_of(run: Path) -> list[Statement]:
    """Returns what is guaranteed against who sees what is published, by relation."""
    return [
        row
        for row in epsilons.of_run(run)
        if row.adversary == "release" and not row.theorem.startswith(OTHER_CLAIMS)
    ]


def _row(cells: Sequence[Cell], output: Path) -> list[str]:
    runs, first = [output / cell.name for cell in cells], cells[0]
    found = [scores(run)["downstream_cnn_accuracy"] for run in runs]
    costs = [read_json(run / COST) for run in runs if (run / COST).exists()]
    seconds = [cost["cpu_seconds"] for cost in costs]
    stated = {row.relation: row.epsilon for row in stated_of(runs[0])}
    zero_out, replace_one = stated["zero-out"], stated["replace-one"]
    return [
        first.data,
        first.method,
        f"{zero_out:.3g} ({replace_one:.3g})" if zero_out and replace_one else "none",
        f"{sum(found) / len(found):.3f} ({min(found):.3f}–{max(found):.3f})",
        str(len(found)),
        f"{first.source.targets.get(first.epsilon, '–')}",
        f"{sum(seconds) / len(seconds):.0f}" if seconds else "–",
        str(RunFolder.open(runs[0]).last_round),
    ]
