"""What `fedgs benchmark` does: fills cells, and prints all of them from their lines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark.grid import grid
from experiments.benchmark.lines import (
    Line,
    append_line,
    identity,
    line_of,
    read_lines,
)
from experiments.benchmark.page import html, markdown
from experiments.benchmark.request import BenchmarkRequest
from experiments.benchmark.tables import UNITS, Row, overview, rows_of
from experiments.commands.progress import say
from experiments.paper.cell_list import Cell
from experiments.paper.cells import compute, draw_grid, each, end
from fedgs.config.recipes import overridden
from fedgs.config.run_config import RunConfig
from fedgs.data.sources import load_records
from fedgs.errors import UserError
from fedgs.federation.preparation import check_device
from fedgs.files import write_atomically

SCORES = {"cnn": "accuracy_cnn", "images": "fid", "classifiers": "accuracy_mean_of_13"}


def benchmark(request: BenchmarkRequest, settings: dict[str, Any]) -> None:
    """Computes the cells that are missing, unless only printed; writes the pages.

    Raises:
        UserError: no such cell, bad settings, seeds of a row that were not run alike,
            or cells that failed; a failed cell costs no other.
        typer.Exit: stopped by the user; the same command goes on.
    """
    cells = grid(request, settings)
    asked = request.of(cells)
    failed: dict[str, str] = {}
    known = read_lines(request.output)
    if request.printed and not known:
        raise UserError(
            f"output = {request.output}: no cells are stored there; give --output the "
            "folder of an earlier call, or leave out --print"
        )
    rows_of([], known)  # refuses seeds that were not run alike before work starts
    if not request.printed:
        missing = [c for c in asked if not is_done(known.get(c.name), request.metrics)]
        check_data(missing, request.data_dir)
        failed = each(missing, lambda cell: _fill(cell, request))
        for cell in asked:
            if cell.name in failed:
                line = identity(cell) | {"failed": failed[cell.name]}
                append_line(request.output, line)
    known = read_lines(request.output)
    # All that is stored, and of the grid what was asked for: the rest was not run.
    rows = rows_of(cells.of_seeds([0]), known)
    write_pages(request.output, rows)
    shown = _of(rows, asked)
    for data in dict.fromkeys(row.data for row in shown):
        for kind in UNITS:
            if (table := overview(data, kind, shown)).rows:
                table.show()
    end(failed)


def check_data(cells: Sequence[Cell], data_dir: str | None) -> None:
    """Refuses what every cell of a data set would fail by, before one is trained.

    Privacy: reads private data; output nothing.

    Raises:
        UserError: data that cannot be read, or no such device.
    """
    for name, source in {cell.data: cell.source for cell in cells}.items():
        places = {"data": name, "data_dir": data_dir or ""}
        config = overridden(RunConfig(), places | source.settings)
        check_device(config)
        load_records(config)


def is_done(line: Line | None, metrics: Sequence[str]) -> bool:
    """Returns whether a stored line has all that is asked for."""
    if line is None or "failed" in line:
        return False
    return all(line[SCORES[name]] is not None for name in metrics)


def _fill(cell: Cell, request: BenchmarkRequest) -> None:
    found = compute(cell, request, request.metrics)
    run = request.output.expanduser().absolute() / cell.name
    append_line(request.output, line_of(cell, run, found, request.full))
    say(f"{cell.name}: stored")


def _of(rows: Sequence[Row], cells: Sequence[Cell]) -> list[Row]:
    """Returns the rows of these cells."""
    names = {cell.row for cell in cells}
    return [row for row in rows if row.name in names]


def write_pages(output: Path, rows: Sequence[Row]) -> None:
    """Writes benchmark.md and benchmark.html, and a grid of each row that has a run.

    Privacy: post-processing of DP output, and scores computed from real data.
    """
    pictures: dict[str, Path] = {}
    for row in rows:
        picture = output / f"{row.name}.png"
        run = output / str(row.done[0]["cell"]) if row.done else None
        if run is not None and run.is_dir() and not picture.exists():
            draw_grid(run, picture)
        if picture.exists():
            pictures[row.name] = picture
    write_atomically(output / "benchmark.md", markdown(rows).encode())
    write_atomically(output / "benchmark.html", html(rows, pictures).encode())
    say(f"page  {output / 'benchmark.html'}")
