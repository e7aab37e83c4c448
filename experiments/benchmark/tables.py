"""Tables of the benchmark, from stored lines alone: users, records and no privacy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from experiments.baselines.command import epsilon_text
from experiments.benchmark.grid import EPSILONS, IN_VIEW, unit
from experiments.benchmark.lines import Line, identity
from experiments.paper.cell_list import Cell
from experiments.paper.cells import NUM_SAMPLES
from experiments.report.words import num_bytes
from experiments.tables import Table
from fedgs.baselines.contract import RELATIONS, Guarantee
from fedgs.errors import UserError

NOT_RUN, FAILED, CANNOT = "not run", "failed", "–"
COLUMNS = (*EPSILONS, None)  # None is without noise
UNITS = {
    "user": "epsilon of one user (a client with all its images)",
    "record": "epsilon of one record (one image)",
    "none": "nobody: no guarantee",
}
ALIKE = ("num_clients", "rounds", "reduced")  # in all seeds of a row
LIMIT = 15 * 60 * 2  # CPU seconds: 15 minutes on two cores


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
        """Mean accuracy of the CNN; -1 where nothing is done."""
        return mean([line["accuracy_cnn"] for line in self.done] or [-1.0])

    @property
    def is_own(self) -> bool:
        """Whether the method is fedgs' own."""
        return bool(self.done) and self.done[0]["own"]

    @property
    def marked(self) -> str:
        """The method, with a mark if its settings were chosen with scores in view."""
        return self.method + " ‡" * (self.method in IN_VIEW.get(self.data, ()))

    @property
    def shown(self) -> str:
        """Accuracy and number of seeds, or why there is none."""
        if self.done:
            count = len(self.done)
            return f"{self.accuracy:.3f}" + (f" ({count})" if count > 1 else "")
        return FAILED if self.lines else NOT_RUN

    @property
    def name(self) -> str:
        """Of its picture."""
        epsilon = "inf" if self.asked is None else f"{self.asked:g}"
        return f"{self.data}-{self.method}-eps{epsilon}"


def rows_of(cells: Sequence[Cell], lines: Mapping[str, Line]) -> list[Row]:
    """Returns a row for every method, epsilon and data: of the grid, then of lines.

    Raises:
        UserError: a row whose seeds were not run alike.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    for cell in cells:
        own = identity(cell)
        key = (own["data"], own["method"], own["asked_epsilon"])
        rows.setdefault(key, Row(*key, unit(cell.how)))
    for line in lines.values():
        key = (line["data"], line["method"], line["asked_epsilon"])
        row = rows.setdefault(key, Row(*key, line.get("unit", "none")))
        row.lines.append(line)
    for row in rows.values():
        _check_alike(row.done)
    return list(rows.values())


def _check_alike(lines: Sequence[Line]) -> None:
    """Refuses to take the mean of runs with different settings."""
    for line in lines:
        if other := [n for n in ALIKE if line.get(n) != lines[0].get(n)]:
            raise UserError(
                f"{line['cell']}: differs from {lines[0]['cell']} in "
                f"{', '.join(other)}; "
                "remove the older one, its line of cells.jsonl and its run folder, "
                "and call again"
            )


def overview(data: str, kind: str, rows: Sequence[Row]) -> Table:
    """Returns the accuracies of all methods of a unit by epsilon.

    Args:
        data: of the table.
        kind: "user", "record" or "none".
        rows: of all data and units.
    """
    own = [row for row in rows if (row.data, row.unit) == (data, kind)]
    methods = {row.method: row.marked for row in own}
    found = {(row.method, row.asked): row for row in own}
    head = ["method", *(f"{epsilon:g}" if epsilon else "none" for epsilon in COLUMNS)]
    extra = sorted({row.asked for row in own if row.asked} - {*EPSILONS})
    columns = (*COLUMNS, *extra)
    cells = [
        [
            marked,
            *(
                found[method, asked].shown if (method, asked) in found else CANNOT
                for asked in columns
            ),
        ]
        for method, marked in methods.items()
    ]
    head += [f"{epsilon:g}" for epsilon in extra]
    return Table(f"{data}: accuracy of the CNN by {UNITS[kind]}", head, cells)


def details(data: str, kind: str, rows: Sequence[Row]) -> Table:
    """Returns all columns of the rows that were run, the best first."""
    own = [row for row in rows if row.data == data and row.done]
    own = [row for row in own if _kind(row) == kind]
    own.sort(key=lambda row: (-(row.asked or float("inf")), -row.accuracy))
    head = ["method", "epsilon asked"]
    if kind != "none":
        head += [f"epsilon of one {kind}"]
    head += ["of a user, by group privacy"] if kind == "record" else []
    head += ["CNN", "13", "FID", "audited (one release)"]
    head += ["bytes/client", "releases", "rounds", "CPU s", "wall s", "memory", "seeds"]
    cells = [_cells(row, kind) for row in own]
    caption = f"{data}: {UNITS[kind]}, what was run"
    return Table(caption, head, cells, "", numeric=False)


def _kind(row: Row) -> str:
    """Returns the unit of a row that was run: without noise there is none."""
    return row.done[0]["unit"]


def _cells(row: Row, kind: str) -> list[str]:
    first = row.done[0]
    accuracies = [line["accuracy_cnn"] for line in row.done]
    spread = f" ({min(accuracies):.3f}–{max(accuracies):.3f})"
    method = row.marked + (" *" if first["reduced"] else "")
    asked = "none" if row.asked is None else f"{row.asked:g}"
    epsilons = [] if kind == "none" else [_epsilons(first, kind)]
    if kind == "record":
        epsilons.append(_group(first))
    seconds = _mean(row, "cpu_seconds")
    return [
        method,
        asked,
        *epsilons,
        f"{row.accuracy:.3f}" + (spread if len(accuracies) > 1 else ""),
        _thirteen(row),
        _number(_mean(row, "fid"), ".1f"),
        _audit(first),
        _bytes(first),
        str(first["releases"]),
        str(first["rounds"]),
        _number(seconds, ".0f") + (" †" if (seconds or 0) > LIMIT else ""),
        _number(_mean(row, "wall_seconds"), ".0f"),
        _memory(row),
        str(len(row.done)),
    ]


def _thirteen(row: Row) -> str:
    judged = [line for line in row.done if line["accuracy_mean_of_13"] is not None]
    text = _number(_mean(row, "accuracy_mean_of_13"), ".3f")
    others = {line["num_synthetic"] for line in judged} - {NUM_SAMPLES}
    return text + "".join(f" ({count:,})" for count in others)


def _epsilons(line: Line, kind: str) -> str:
    """Returns the valid epsilons of a unit, each with its relation."""
    own = [row for row in line["guarantees"] if row["unit"] == kind]
    valid = [row for row in own if row["label"] == "valid"]
    shown = valid or [row for row in own if row["label"] == "distributional"]
    if kind == "user":  # all of them were asked for zero-out; a record's is the first
        shown = sorted(shown, key=lambda row: RELATIONS.index(row["relation"]))
    texts = [
        f"{_text(row)} {row['relation']}"
        + ("" if valid else " (distributional: no differential privacy)")
        for row in shown
    ]
    return "; ".join(texts) or "none"


def _group(line: Line) -> str:
    stated = _epsilons(line, "user")
    return stated if line["cap"] is None else f"{stated} (cap {line['cap']})"


def _text(row: Mapping[str, Any]) -> str:
    return epsilon_text(Guarantee(**row))


def _mean(row: Row, name: str) -> float | None:
    known = [line[name] for line in row.done if line[name] is not None]
    return mean(known) if known else None


def _number(value: float | None, form: str) -> str:
    return CANNOT if value is None else format(value, form)


def _audit(line: Line) -> str:
    found = line["audit"]
    if found is None:
        return CANNOT
    claimed = found["claimed"]
    of = "unbounded" if claimed is None else f"{claimed:.3g}"
    refuted = " REFUTED" if found["refuted"] else ""
    return f"≥ {found['lower_bound']:.3g} of {of}{refuted}"


def _bytes(line: Line) -> str:
    if line["bytes_per_client"]:
        return num_bytes(line["bytes_per_client"])
    return CANNOT


def _memory(row: Row) -> str:
    found = _mean(row, "peak_memory_bytes")
    return CANNOT if found is None else num_bytes(round(found))
