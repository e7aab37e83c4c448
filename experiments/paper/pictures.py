"""The table of pictures: what a user-level epsilon buys, by data set and method.

    python -m experiments.paper.pictures --data-dir DATA              train and print
    python -m experiments.paper.pictures --only by-writer-staged-eps  some cells
    python -m experiments.paper.pictures --print                      from folders only

See `experiments.grid.runs` for what a cell is; the cells are in `pictures.toml`.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.grid.cells import Cell, Cells, Request
from experiments.store import Line
from fedgs.app.flags import request_flags, run_command
from fedgs.app.tables import Table

PICTURES = Cells.read(Path(__file__).with_suffix(".toml"))


def table(caption: str, cells: Sequence[Cell], lines: Mapping[str, Line]) -> Table:
    """Returns a row for each method, data set and epsilon that was computed."""
    head = ["data", "method", "epsilon", "CNN", "seeds", "target", "CPU s", "rounds"]
    rows: list[list[str]] = []
    for _, group in groupby(cells, key=lambda cell: cell.row):
        done = [c for c in group if "failed" not in lines.get(c.name, {"failed": ""})]
        if done:
            rows.append(_row(done[0], [lines[cell.name] for cell in done]))
    note = "epsilon: release, zero-out (replace-one); CNN: 10000 samples, mean and "
    note += "range of the seeds' accuracies"
    return Table(caption, head, rows, note)


def _row(cell: Cell, lines: Sequence[Line]) -> list[str]:
    accuracies = [line["accuracy_cnn"] for line in lines]
    seconds = [s for line in lines if (s := line["cpu_seconds"]) is not None]
    epsilons = {row["relation"]: row["epsilon"] for row in lines[0]["guarantees"]}
    spread = f"{min(accuracies):.3f}–{max(accuracies):.3f}"
    return [
        cell.data,
        cell.method,
        "{zero-out:.3g} ({replace-one:.3g})".format(**epsilons) if epsilons else "none",
        f"{mean(accuracies):.3f} ({spread})",
        str(len(lines)),
        f"{cell.source.targets.get(cell.epsilon, '–')}",
        f"{mean(seconds):.0f}" if seconds else "–",
        str(lines[0]["rounds"]),
    ]


def show(cells: Cells, request: Request) -> None:
    """Prints a table of cells; trains and evaluates what is missing."""
    from experiments.grid.runs import fill

    def table_of(lines: Mapping[str, Line]) -> Table:
        return table(cells.caption, request.of(cells), lines)

    fill(
        cells,
        request,
        lambda lines: table_of(lines).markdown(),
        lambda lines: [table_of(lines)],
    )


def main(words: Sequence[str] | None = None) -> int:
    """Fills and prints the table; returns the exit code."""
    return run_command(pictures, words)


@request_flags(Request)
def pictures(*, given: dict[str, Any]) -> None:
    """Reprint the table of pictures; train and evaluate what is missing."""
    show(PICTURES, Request(**given))


if __name__ == "__main__":
    sys.exit(main())
