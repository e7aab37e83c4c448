"""Rows of the comparison: a method at an epsilon on one data set, with its seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from experiments.comparison.methods import IN_VIEW
from experiments.grid.cells import Cell, unit
from experiments.store import Line
from fedgs.errors import UserError

ROW_NOT_RUN = "not run"
_FAILED = "failed"
CANNOT = "–"
ALIKE = ("num_clients", "rounds", "reduced", "settings")  # in all seeds of a row


@dataclass(eq=False)
class Row:
    """A method at an epsilon on one data set; lines are those of its seeds."""

    data: str
    method: str
    asked: float | None
    unit: str
    lines: list[Line] = field(default_factory=list[Line])

    @property
    def done(self) -> list[Line]:
        """Lines of the cells that were judged."""
        return [line for line in self.lines if "failed" not in line]

    @property
    def accuracy(self) -> float:
        """Mean accuracy of the CNN; -1 where none was computed."""
        found = self.mean("accuracy_cnn")
        if found is None:  # so that such a row stands last
            return -1.0
        return found

    def mean(self, name: str) -> float | None:
        """Returns the mean of a number over the seeds that have it; None if none."""
        values = [line.get(name) for line in self.done]
        known = [value for value in values if value is not None]
        if not known:
            return None
        return mean(known)

    @property
    def is_own(self) -> bool:
        """Whether the method is fedgs' own."""
        return bool(self.done) and self.done[0]["own"]

    @property
    def marked(self) -> str:
        """The method, with a mark if its settings were chosen with scores in view."""
        if self.method in IN_VIEW.get(self.data, ()):
            return f"{self.method} ‡"
        return self.method

    @property
    def shown(self) -> str:
        """Accuracy, FID and number of seeds, or why there is none."""
        if not self.lines:
            return ROW_NOT_RUN
        if not self.done:
            return _FAILED
        text = CANNOT
        if self.accuracy >= 0:
            text = f"{self.accuracy:.3f}"
        fid = self.mean("fid")
        if fid is not None:
            text += f", {fid:.0f}"
        if len(self.done) > 1:
            text += f" ({len(self.done)})"
        return text

    @property
    def name(self) -> str:
        """What its cells' names begin with."""
        epsilon = "inf"
        if self.asked is not None:
            epsilon = f"{self.asked:g}"
        return f"{self.data}-{self.method}-eps{epsilon}"


def rows_of(cells: Sequence[Cell], lines: Mapping[str, Line]) -> list[Row]:
    """Returns a row for every method, epsilon and data: of the grid, then of lines.

    Raises:
        UserError: a row whose seeds were not run alike.
    """
    rows: dict[tuple[Any, ...], Row] = {}

    def row_of(identity: Line, unit: str) -> Row:
        key = (identity["data"], identity["method"], identity["asked_epsilon"])
        return rows.setdefault(key, Row(*key, unit))

    # First the grid, so that rows have its order and those not run are there too.
    for cell in cells:
        row_of(cell.identity, unit(cell.how))
    for line in lines.values():
        row_of(line, line.get("unit", "none")).lines.append(line)
    for row in rows.values():
        _check_alike(row.done)
    return list(rows.values())


def _check_alike(lines: Sequence[Line]) -> None:
    """Refuses to take the mean of runs with different settings."""
    for line in lines:
        first = lines[0]
        # A line of an older version does not tell all settings.
        told = [name for name in ALIKE if name in line and name in first]
        other = [name for name in told if line[name] != first[name]]
        if other:
            raise UserError(
                f"{line['cell']}: differs from {first['cell']} in "
                f"{', '.join(other)}; "
                "remove the older one, its line of cells.jsonl and its run folder, "
                "and call again"
            )
