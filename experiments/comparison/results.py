"""The comparison's page, from stored lines alone: users, records and no privacy.

`docs/benchmark/table.md` is the page of the lines that are stored beside it.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.comparison.methods import EPSILONS
from experiments.comparison.published import beside_the_paper, by_classifier
from experiments.comparison.rows import Row
from experiments.grid.lines import NUM_SAMPLES
from experiments.store import Line
from fedgs.app.report.words import num_bytes
from fedgs.app.tables import Table
from fedgs.privacy.rounding import lower, upper

CANNOT = "–"
_ASKED_EPSILONS = (*EPSILONS, None)  # None is without noise
_RELATIONS_SHOWN = ("add-or-remove", "zero-out", "replace-one")  # in this order
UNITS = {
    "user": "epsilon of one user (a client with all its images)",
    "record": "epsilon of one record (one image)",
    "none": "nobody: no guarantee",
}
LIMIT = 15 * 60 * 2  # CPU seconds: 15 minutes on two cores


# ------------------------------------------------------------------ tables


def overview(data: str, kind: str, rows: Sequence[Row]) -> Table:
    """Returns the accuracies and FIDs of all methods of a unit by epsilon.

    Args:
        data: of the table.
        kind: a key of `UNITS`.
        rows: of all data and units.
    """
    chosen = [row for row in rows if (row.data, row.unit) == (data, kind)]
    shown = {(row.method, row.asked): row.shown for row in chosen}
    names = {row.method: row.marked for row in chosen}
    # Epsilons that only some rows were asked for have their columns at the end.
    extra = sorted({row.asked for row in chosen if row.asked} - {*EPSILONS})
    columns = (*_ASKED_EPSILONS, *extra)
    head = ["method"]
    for epsilon in columns:
        head.append("none" if epsilon is None else f"{epsilon:g}")
    cells: list[list[str]] = []
    for method, marked in names.items():
        scores = [shown.get((method, asked), CANNOT) for asked in columns]
        cells.append([marked, *scores])
    return Table(f"{data}: accuracy of the CNN, FID, by {UNITS[kind]}", head, cells)


def details(data: str, kind: str, rows: Sequence[Row]) -> Table:
    """Returns all columns of the rows that were run, the best first.

    The unit of a row that was run is that of its lines: without noise there is none.
    """
    chosen = [row for row in rows if row.data == data and row.done]
    chosen = [row for row in chosen if row.done[0]["unit"] == kind]
    # Without noise first, then from the largest epsilon to the smallest.
    chosen.sort(key=lambda row: (-(row.asked or math.inf), -row.accuracy))
    found = [_details(row, kind) for row in chosen]
    head = list(found[0]) if found else []
    cells = [[*row.values()] for row in found]
    caption = f"{data}: {UNITS[kind]}, what was run"
    return Table(caption, head, cells, numeric=False)


def _details(row: Row, kind: str) -> dict[str, str]:
    """Returns a row of `details` by the names of its columns."""
    first = row.done[0]
    cells = {
        "method": row.marked + (" *" if first["reduced"] else ""),
        "epsilon asked": "none" if row.asked is None else f"{row.asked:g}",
    }
    if kind != "none":
        cells[f"epsilon of one {kind}"] = _epsilons(first, kind)
    if kind == "record":
        of_user = _epsilons(first, "user")
        if first["cap"] is not None:
            of_user += f" (cap {first['cap']})"
        cells["of a user, by group privacy"] = of_user
    cells |= {
        "CNN": _accuracy(row),
        "13": _thirteen(row),
        "FID": _number(row.mean("fid"), ".1f"),
        "coverage": _number(row.mean("coverage"), ".2f"),
        "audited (one release)": _audit(first["audit"]),
        "bytes/client": _bytes(first["bytes_per_client"]),
        "releases": str(first["releases"]),
        "rounds": str(first["rounds"]),
    }
    seconds = row.mean("cpu_seconds")
    is_long = seconds is not None and seconds > LIMIT
    cells |= {
        "CPU s": _number(seconds, ".0f") + (" †" if is_long else ""),
        "wall s": _number(row.mean("wall_seconds"), ".0f"),
        "memory": _bytes(row.mean("peak_memory_bytes")),
        "seeds": str(len(row.done)),
    }
    return cells


def _accuracy(row: Row) -> str:
    """Returns the mean accuracy of the CNN, of several seeds with the range."""
    accuracies = [line["accuracy_cnn"] for line in row.done]
    text = f"{row.accuracy:.3f}"
    if len(accuracies) > 1:
        text += f" ({min(accuracies):.3f}–{max(accuracies):.3f})"
    return text


def _thirteen(row: Row) -> str:
    text = _number(row.mean("accuracy_mean_of_13"), ".3f")
    judged = [line for line in row.done if line["accuracy_mean_of_13"] is not None]
    counts = {line["num_synthetic"] for line in judged}
    for count in counts - {NUM_SAMPLES}:  # of fewer samples than the others
        text += f" ({count:,})"
    return text


def _epsilons(line: Line, kind: str) -> str:
    """Returns the valid epsilons of a unit, each with its relation."""
    of_unit = [row for row in line["guarantees"] if row["unit"] == kind]
    shown = [row for row in of_unit if row["label"] == "valid"]
    note = ""
    if not shown:
        shown = [row for row in of_unit if row["label"] == "distributional"]
        note = " (distributional: no differential privacy)"
    if kind == "user":  # all of them were asked for zero-out; a record's is the first
        shown = sorted(shown, key=lambda row: _RELATIONS_SHOWN.index(row["relation"]))
    texts = [f"{upper(row['epsilon'])} {row['relation']}{note}" for row in shown]
    return "; ".join(texts) or "none"


def _number(value: float | None, form: str) -> str:
    return CANNOT if value is None else format(value, form)


def _bytes(count: float | None) -> str:
    return num_bytes(round(count)) if count else CANNOT


def _audit(audit: Mapping[str, Any] | None) -> str:
    if audit is None:
        return CANNOT
    bound = lower(audit["lower_bound"], 3)
    claimed = upper(audit["claimed"], 3)
    verdict = " REFUTED" if audit["refuted"] else ""
    return f"≥ {bound} of {claimed}{verdict}"


# ------------------------------------------------------------------ the page


def page(rows: Sequence[Row]) -> str:
    """Returns the page as Markdown: losses, tables, reduced settings, failures."""
    done = {row.method: row.done[0] for row in rows if row.done}
    trust = [
        [name, line["trust"], str(line["releases"])] for name, line in done.items()
    ]
    parts = [
        Table("", ["method", "who must be trusted", "releases"], trust).markdown(),
        "## Where fedgs' own methods lose\n",
        _items(losses(rows) or ["nowhere, by accuracy"]),
    ]
    for data in dict.fromkeys(row.data for row in rows):
        parts.append(f"## {data}\n")
        for table in _tables(data, rows):
            caption = table.caption.removeprefix(f"{data}: ")
            parts += [f"**{caption}**\n", table.markdown()]
    for title, texts in {
        "Reduced settings": _reduced(done),
        "Failed": _failed(rows),
    }.items():
        if texts:
            parts += [f"{title}:\n", _items(texts)]
    return "\n".join(parts)


def _tables(data: str, rows: Sequence[Row]) -> list[Table]:
    """Returns the tables of one data set that have rows, in the page's order."""
    tables: list[Table | None] = [overview(data, kind, rows) for kind in UNITS]
    tables += [details(data, kind, rows) for kind in UNITS]
    tables += [beside_the_paper(data, rows), by_classifier(data, rows)]
    return [table for table in tables if table is not None and table.rows]


def _reduced(done: Mapping[str, Line]) -> list[str]:
    """Returns the settings of each method that are below the published ones."""
    texts: list[str] = []
    for name, line in done.items():
        if line["reduced"]:
            known = [f"{key} {value}" for key, value in line["reduced"].items()]
            texts.append(f"{name}: {', '.join(known)}")
    return texts


def _failed(rows: Sequence[Row]) -> list[str]:
    """Returns the cells that failed, and why."""
    lines = [line for row in rows for line in row.lines if "failed" in line]
    return [f"{line['cell']}: {line['failed']}" for line in lines]


def losses(rows: Sequence[Row]) -> list[str]:
    """Returns where fedgs' own methods have less than others of the same unit."""
    found: list[str] = []
    keys = dict.fromkeys((row.data, row.asked, row.unit) for row in rows if row.done)
    for data, asked, unit in keys:
        group = [
            row for row in rows if row.done and (row.data, row.asked) == (data, asked)
        ]
        what = "without noise"
        if asked is not None:  # without noise the unit is no difference
            group = [row for row in group if row.unit == unit]
            what = f"epsilon {asked:g} of one {unit}"
        group.sort(key=lambda row: -row.accuracy)
        for own in group:
            better = [r for r in group if not r.is_own and r.accuracy > own.accuracy]
            if own.is_own and better:
                names = ", ".join(f"{r.method} ({r.accuracy:.3f})" for r in better)
                score = f"{own.method} ({own.accuracy:.3f})"
                found.append(f"{data}, {what}: {score} is below {names}")
    # Of a method without noise there is one text for each unit.
    return [*dict.fromkeys(found), *_records(rows)]


def _records(rows: Sequence[Row]) -> list[str]:
    """Returns where a curator and record level give better pictures."""
    found: list[str] = []
    for row in rows:
        if row.unit != "record" or not row.done or row.asked is None:
            continue
        own: list[float] = []
        for other in rows:
            is_alike = (other.data, other.asked) == (row.data, row.asked)
            if is_alike and other.is_own:
                own.append(other.accuracy)
        if own and row.accuracy > max(own):
            found.append(
                f"{row.data}, epsilon {row.asked:g}: {row.method} has "
                f"{row.accuracy:.3f}, more than all of fedgs' ({max(own):.3f}), with a "
                "trusted curator and for one record"
            )
    return found


def _items(texts: Iterable[str]) -> str:
    wrapped = (
        textwrap.fill(f"- {text}", 100, subsequent_indent="  ", break_long_words=False)
        for text in texts
    )
    return "".join(f"{item}\n" for item in wrapped)
