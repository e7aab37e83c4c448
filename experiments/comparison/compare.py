"""What `fedgs compare` does: fills cells, and prints all of them from their lines."""

from typing import Any

from experiments.comparison.methods import grid
from experiments.comparison.options import CompareRequest
from experiments.comparison.results import UNITS, overview, page
from experiments.comparison.rows import Row, rows_of
from experiments.grid.runs import Lines, fill
from fedgs.app.tables import Table


def compare(request: CompareRequest, settings: dict[str, Any]) -> None:
    """Computes the cells that are missing, unless only printed; writes the page.

    Raises:
        UserError: no such cell, bad settings, seeds of a row that were not run alike,
            stored lines of other settings, or cells that failed; a failed cell costs no
            other.
        Exit: stopped by the user; the same command goes on.
    """
    cells = grid(request, settings)
    names = {cell.row for cell in request.of(cells)}

    # All that is stored, and of the grid what was not run.
    def rows(lines: Lines) -> list[Row]:
        return rows_of(cells.of_seeds([0]), lines)

    def tables_of(lines: Lines) -> list[Table]:
        shown = [row for row in rows(lines) if row.name in names]
        tables: list[Table] = []
        data_sets = dict.fromkeys(row.data for row in shown)
        for data in data_sets:
            for kind in UNITS:
                table = overview(data, kind, shown)
                if table.rows:
                    tables.append(table)
        return tables

    fill(cells, request, lambda lines: page(rows(lines)), tables_of)
