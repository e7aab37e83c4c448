"""Fills tables of cells: each run is trained, judged, and kept as one line.

A run lies in `OUTPUT/<data>-<method>-eps<epsilon>-seed<seed>`; its generator is judged
by `fedgs evaluate` on 10,000 samples. What is there is not computed again, and an
interrupted run is resumed. `OUTPUT/cells.jsonl` has all that a table needs.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.baselines.training import train_baseline
from experiments.grid.cells import (
    NO_NOISE,
    Cell,
    Cells,
    CellSettings,
    TableRequest,
    unit,
)
from experiments.grid.line_checks import check_line
from experiments.grid.lines import (
    COST_FILE,
    NUM_SAMPLES,
    asked_data,
    asked_of,
    line_of,
)
from experiments.store import Line, Store, each, end
from fedgs.app.commands.run_outcome import Exit
from fedgs.app.commands.terminal import say
from fedgs.app.commands.train import resume, train_from_checkpoint
from fedgs.app.evaluation.evaluate import evaluate
from fedgs.app.evaluation.request import EvaluationRequest
from fedgs.app.tables import Table
from fedgs.config.recipes import DEFAULT, overridden, recipe
from fedgs.config.run_config import RunConfig
from fedgs.data.sources import load_records
from fedgs.errors import UserError
from fedgs.files import read_json_lines, write_atomically, write_json
from fedgs.process import forget_peak_memory, peak_memory
from fedgs.round.preparation import check_device, fitted_to_data, new_run
from fedgs.runs import sample, sample_files
from fedgs.runs.run_folder import RunFolder, check_place

# Of a metric of `fedgs evaluate`: a score that it alone has, and what a line calls it.
SCORES_OF_METRICS = {
    "cnn": ("downstream_cnn_accuracy", "accuracy_cnn"),
    "images": ("num_neighbour_images", "fid"),
    "classifiers": ("classifiers", "accuracy_mean_of_13"),
}
Lines = dict[str, Line]


def fill(
    cells: Cells,
    request: TableRequest,
    page_of: Callable[[Lines], str],
    tables_of: Callable[[Lines], Sequence[Table]],
) -> Lines:
    """Trains and evaluates what is missing, unless only printed; prints the tables.

    Args:
        cells: all of the table.
        request: which of them, and where.
        page_of: the Markdown page of the stored lines.
        tables_of: what is printed of them.

    Returns:
        All stored lines, by the names of their cells.

    Raises:
        UserError: no such cell or folder, lines that make no table or are of other
            settings, or cells that failed; a failed cell costs no other.
        Exit: stopped by the user; the same command goes on.
    """
    chosen = request.of(cells)
    check_place(str(request.output))
    store = Store(request.output / "cells.jsonl", check_line)
    if request.printed and not store.lines:
        raise UserError(
            f"output = {request.output}: no cells are stored there; give --output the "
            "folder of an earlier call, or leave out --print"
        )
    page_of(store.lines)  # refuses what it cannot show before work starts
    failed: dict[str, str] = {}
    if not request.printed:
        check_as_asked(chosen, request.output, store.lines)
        failed = _fill_missing(chosen, request, store)
    request.output.mkdir(parents=True, exist_ok=True)
    page = request.output / "table.md"
    write_atomically(page, page_of(store.lines).encode())
    for table in tables_of(store.lines):
        table.show()
    say(f"page  {page}")
    if not request.printed:  # last: the table needs no data
        draw_rows(chosen, request.output)
    end(failed)
    return store.lines


def _fill_missing(
    cells: Sequence[Cell],
    request: TableRequest,
    store: Store,
) -> dict[str, str]:
    """Computes what no line tells yet; returns the cells that failed, and why."""
    missing: list[Cell] = []
    for cell in cells:
        if not is_done(store.lines.get(cell.name), request.metrics):
            missing.append(cell)
    check_data(missing)
    work: dict[str, Callable[[], object]] = {}
    for cell in missing:
        work[cell.name] = partial(compute, cell, request, store)
    failed = each(work)
    # A failure has a line too: the table says of what it has no number. Scores of
    # other metrics that the cell has already stay.
    for cell in missing:
        if cell.name in failed and not store.has_scores(cell.name):
            store.add(cell.name, cell.identity | {"failed": failed[cell.name]})
    return failed


def check_as_asked(cells: Sequence[Cell], output: Path, lines: Lines) -> None:
    """Refuses cells whose names stand for other settings in this folder.

    A name is shorter than what it is made of: it does not tell the number of clients,
    and npz:a/b.npz and npz:a-b.npz share one.

    Raises:
        UserError: a line that is there is of other settings, or a run of other data.
    """
    for cell in cells:
        line = lines.get(cell.name, {})
        if "failed" not in line:
            _check_alike(cell, output, line, _asked_of_line(cell))
        path = output / cell.name
        if (path / "config.json").exists():
            config = RunFolder.open(path).config
            _check_alike(cell, output, vars(config), asked_data(cell))


def _asked_of_line(cell: Cell) -> Line:
    """Returns what a cell's line has to say, as far as that is known before its run."""
    asked = asked_of(cell)
    num_clients = cell.settings.get("num_clients")
    if num_clients:  # else the number is that of the data
        asked["num_clients"] = num_clients
    if cell.epsilon != NO_NOISE:
        asked["unit"] = unit(cell.how)
    if cell.how.baseline:
        asked["cap"] = cell.settings.get("max_images_per_user")
    return asked


def _check_alike(
    cell: Cell,
    output: Path,
    stored: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> None:
    for name, value in asked.items():
        # A line of an older version does not tell all settings.
        if name in stored and stored[name] != value:
            raise UserError(
                f"output = {output}: {cell.name} is stored with {name} = "
                f"{stored[name]!r}, not {value!r}; give another --output, or --print "
                "to see what is stored"
            )


def check_data(cells: Sequence[Cell]) -> None:
    """Refuses what every cell of a data set would fail by, before one is trained.

    Privacy: reads private data; output nothing.

    Raises:
        UserError: data that cannot be read, or no such device.
    """
    sources = {cell.data: cell.source for cell in cells}
    for name, source in sources.items():
        values = {"data": name, **source.settings}
        config = overridden(RunConfig(), values)
        check_device(config)
        load_records(config)


def is_done(line: Line | None, metrics: Sequence[str]) -> bool:
    """Returns whether a stored line has all that is asked for."""
    if line is None or "failed" in line:
        return False
    for metric in metrics:
        _, score = SCORES_OF_METRICS[metric]
        if line[score] is None:
            return False
    return True


def compute(cell: Cell, request: TableRequest, store: Store) -> None:
    """Trains and evaluates a cell, as far as it is not there, and keeps its line.

    Privacy: releases (epsilon, delta)-DP output; events: in the run's ledger. The
    scores are computed from real data: output private.
    """
    path = request.output.absolute() / cell.name
    # The generator is written last, so a run that has it is finished.
    if not (path / "generator.safetensors").exists():
        say(f"{cell.name}: training")
        train_cell(cell, path)
    known = _scores(path)
    missing: list[str] = []
    for metric in request.metrics:
        score, _ = SCORES_OF_METRICS[metric]
        if score not in known:
            missing.append(metric)
    if missing:
        asked = EvaluationRequest(
            str(path),
            count=NUM_SAMPLES,
            metrics=tuple(missing),
        )
        evaluate(asked, as_json=True)
    store.add(cell.name, line_of(cell, path, _scores(path)))
    say(f"{cell.name}: stored")


def _scores(run: Path) -> Line:
    """Returns all that evaluations of a run found; of the same score the last."""
    found: Line = {}
    for line in read_json_lines(run / "evaluations.jsonl"):
        found |= line
    return found


def train_cell(cell: Cell, path: Path) -> None:
    """Trains a cell's run, or goes on with it.

    Privacy: releases (epsilon, delta)-DP output; events: in the run's ledger.
    """
    baseline = cell.how.baseline
    values = cell.settings | {"output": str(path)}
    if (path / "config.json").exists():
        resume(path, baseline)  # unmeasured: nobody knows what its first part took
    elif baseline:
        with _measured(path):
            train_baseline(baseline, values)
    else:
        _train_own(cell, path, values)


def _train_own(cell: Cell, path: Path, values: CellSettings) -> None:
    config = overridden(recipe(cell.how.recipe), values)
    if cell.how.recipe == DEFAULT:  # as `fedgs train --target-epsilon` does
        config, _ = fitted_to_data(config, values)
    folder, data = new_run(config)
    with _measured(path):
        is_told_to_stop = train_from_checkpoint(folder, data)
    if is_told_to_stop:
        raise Exit(1)


@contextmanager
def _measured(run: Path) -> Iterator[None]:
    """Writes what a training took: seconds, and the most memory of this process."""
    # Cells share a process, and the peak of an earlier one is not this one's.
    forget_peak_memory()
    started = time.process_time()
    began = time.monotonic()
    yield
    cost = {
        "cpu_seconds": time.process_time() - started,
        "wall_seconds": time.monotonic() - began,
        "peak_memory_bytes": peak_memory(),
    }
    write_json(run / COST_FILE, cost)


def draw_rows(cells: Sequence[Cell], output: Path) -> None:
    """Draws one picture for each data set and epsilon: a row for every method.

    A column is a class. Samples are of the first latents and of the first seed that
    was run; the last row has the first real image of every class.

    Privacy: the last row is private; the others are post-processing of DP output.
    """
    tables: dict[str, dict[str, RunFolder]] = {}
    for cell in cells:
        path = output / cell.name
        if (path / "generator.safetensors").exists():
            rows = tables.setdefault(f"{cell.data}-eps{cell.epsilon:g}", {})
            rows.setdefault(cell.method, RunFolder.open(path))
    for name, rows in tables.items():
        # All runs of a picture are of the same data.
        some_run = next(iter(rows.values()))
        config = some_run.config
        labels = np.arange(config.num_classes)
        images = []
        for folder in rows.values():
            generator = sample.load_generator(folder)
            images.append(sample.draw(folder.config, generator, labels, seed=0))
        real = load_records(config)
        last_row = np.zeros_like(images[0])  # a class without images stays black
        present, first = np.unique(real.labels, return_index=True)
        last_row[present] = real.images[first] / 255
        images.append(last_row)
        picture = output / f"{name}.png"
        grid = np.concatenate(images)
        sample_files.save_images(picture, grid, columns=len(labels))
        say(f"rows  {picture}: {', '.join(rows)}, real images (private)")
