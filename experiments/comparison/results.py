"""The comparison's page, from stored lines alone: users, records and no privacy.

`docs/benchmark/table.md` is the page of the lines that are stored beside it.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.comparison.methods import EPSILONS
from experiments.comparison.published import beside_the_paper, by_classifier
from experiments.comparison.rows import CANNOT, Row
from experiments.grid.lines import NUM_SAMPLES
from experiments.store import Line
from fedgs.app.report.words import num_bytes
from fedgs.app.tables import Table
from fedgs.privacy.rounding import lower, upper

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
        data: the data of the table.
        kind: a key of `UNITS`.
        rows: the rows of all data and units.
    """
    columns: list[float | None] = [*EPSILONS, None]  # None is without noise
    names: dict[str, str] = {}
    shown: dict[tuple[str, float | None], str] = {}
    extra: set[float] = set()
    for row in rows:
        if row.data != data or row.unit != kind:
            continue
        names[row.method] = row.marked
        shown[row.method, row.asked] = row.shown
        if row.asked and row.asked not in EPSILONS:
            extra.add(row.asked)
    # Epsilons that only some rows were asked for have their columns at the end.
    columns += sorted(extra)
    head = ["method"]
    for epsilon in columns:
        head.append(_asked(epsilon))
    cells: list[list[str]] = []
    for method, marked in names.items():
        line = [marked]
        for epsilon in columns:
            cell = shown.get((method, epsilon), CANNOT)
            line.append(cell)
        cells.append(line)
    caption = f"{data}: accuracy of the CNN, FID, by {UNITS[kind]}"
    return Table(caption, head, cells)


def _asked(target: float | None) -> str:
    """Returns a target epsilon, which is given and no bound, in words."""
    if target is None:
        return "none"
    return f"{target:g}"


def details(data: str, kind: str, rows: Sequence[Row]) -> Table:
    """Returns all columns of the rows that were run, the best first.

    The unit of a row that was run is that of its lines: without noise there is none.
    """
    chosen: list[Row] = []
    for row in rows:
        if row.data != data or not row.done:
            continue
        first = row.done[0]
        if first["unit"] == kind:
            chosen.append(row)

    def rank(row: Row) -> tuple[float, float]:
        # Without noise first, then from the largest epsilon to the smallest.
        epsilon = row.asked or math.inf
        return -epsilon, -row.accuracy

    head: list[str] = []
    cells: list[list[str]] = []
    for row in sorted(chosen, key=rank):
        found = _details(row, kind)
        head = list(found)
        cells.append(list(found.values()))
    caption = f"{data}: {UNITS[kind]}, what was run"
    return Table(caption, head, cells, numeric=False)


def _details(row: Row, kind: str) -> dict[str, str]:
    """Returns a row of `details` by the names of its columns."""
    first = row.done[0]
    method = row.marked
    if first["reduced"]:
        method += " *"
    cells = {"method": method, "epsilon asked": _asked(row.asked)}
    if kind != "none":
        cells[f"epsilon of one {kind}"] = _epsilons(first, kind)
    if kind == "record":
        of_user = _epsilons(first, "user")
        if first["cap"] is not None:
            of_user += f" (cap {first['cap']})"
        cells["of a user, by group privacy"] = of_user
    cells["CNN"] = _accuracy(row)
    cells["13"] = _thirteen(row)
    cells["FID"] = _number(row.mean("fid"), ".1f")
    cells["coverage"] = _number(row.mean("coverage"), ".2f")
    cells["audited (one release)"] = _audit(first["audit"])
    cells["bytes/client"] = _bytes(first["bytes_per_client"])
    cells["releases"] = str(first["releases"])
    cells["rounds"] = str(first["rounds"])
    # CPU time and not the clock's: other work on the machine does not count.
    seconds = row.mean("cpu_seconds")
    cells["CPU s"] = _number(seconds, ".0f")
    if seconds is not None and seconds > LIMIT:
        cells["CPU s"] += " †"
    cells["wall s"] = _number(row.mean("wall_seconds"), ".0f")
    cells["memory"] = _bytes(row.mean("peak_memory_bytes"))
    cells["seeds"] = str(len(row.done))
    return cells


def _accuracy(row: Row) -> str:
    """Returns the mean accuracy of the CNN, of several seeds with the range."""
    found = [line["accuracy_cnn"] for line in row.done]
    accuracies = [accuracy for accuracy in found if accuracy is not None]
    text = _number(row.mean("accuracy_cnn"), ".3f")
    if len(accuracies) > 1:
        lowest = min(accuracies)
        highest = max(accuracies)
        text += f" ({lowest:.3f}–{highest:.3f})"
    return text


def _thirteen(row: Row) -> str:
    text = _number(row.mean("accuracy_mean_of_13"), ".3f")
    counts: set[int | None] = set()
    for line in row.done:
        if line["accuracy_mean_of_13"] is not None:
            counts.add(line["num_synthetic"])
    # A reader must not compare scores of fewer samples with the others unwarned.
    for count in counts - {NUM_SAMPLES, None}:
        text += f" ({count:,})"
    return text


def _epsilons(line: Line, kind: str) -> str:
    """Returns the valid epsilons of a unit, each with its relation."""
    # What was published is no guarantee, and stands in no column of guarantees.
    of_unit = [row for row in line["guarantees"] if row["unit"] == kind]
    shown = [row for row in of_unit if row["label"] == "valid"]
    note = ""
    if not shown:
        shown = [row for row in of_unit if row["label"] == "distributional"]
        note = " (distributional: no differential privacy)"
    if kind == "user":  # all of them were asked for zero-out; a record's is the first
        shown.sort(key=lambda row: _RELATIONS_SHOWN.index(row["relation"]))
    texts: list[str] = []
    for row in shown:
        epsilon = upper(row["epsilon"])
        texts.append(f"{epsilon} {row['relation']}{note}")
    if not texts:
        return "none"
    return "; ".join(texts)


def _number(value: float | None, form: str) -> str:
    if value is None:
        return CANNOT
    return format(value, form)


def _bytes(count: float | None) -> str:
    if not count:
        return CANNOT
    return num_bytes(round(count))


def _audit(audit: Mapping[str, Any] | None) -> str:
    if audit is None:
        return CANNOT
    bound = lower(audit["lower_bound"], 3)
    claimed = upper(audit["claimed"], 3)
    text = f"≥ {bound} of {claimed}"
    if audit["refuted"]:
        text += " REFUTED"
    return text


def _releases(method: str, rows: Sequence[Row]) -> str:
    """Returns how many releases a method makes: fewer where epsilon is small."""
    numbers: set[int] = set()
    for row in rows:
        if row.method == method:
            numbers |= {line["releases"] for line in row.done}
    least = min(numbers)
    most = max(numbers)
    if least == most:
        return str(most)
    return f"{least} to {most}"


# ------------------------------------------------------------------ the page


def page(rows: Sequence[Row]) -> str:
    """Returns the page as Markdown: losses, tables, reduced settings, failures."""
    # One line of each method, because all its runs agree in the facts taken from it.
    done = {row.method: row.done[0] for row in rows if row.done}
    trust: list[list[str]] = []
    for name, line in done.items():
        trust.append([name, line["trust"], _releases(name, rows)])
    methods = Table("", ["method", "who must be trusted", "releases"], trust)
    lost = losses(rows) or ["nowhere, by accuracy"]
    parts = [
        methods.markdown(),
        "## Where fedgs' own methods lose to others of these\n",
        _items(lost),
    ]
    # By dict.fromkeys, which keeps the order of the grid.
    for data in dict.fromkeys(row.data for row in rows):
        parts.append(f"## {data}\n")
        for table in _tables(data, rows):
            caption = table.caption.removeprefix(f"{data}: ")
            parts += [f"**{caption}**\n", table.markdown()]
    notes = {"Reduced settings": _reduced(done), "Failed": _failed(rows)}
    for title, texts in notes.items():
        if texts:
            parts += [f"{title}:\n", _items(texts)]
    return "\n".join(parts)


def _tables(data: str, rows: Sequence[Row]) -> list[Table]:
    """Returns the tables of one data set that have rows, in the page's order."""
    tables: list[Table | None] = []
    for kind in UNITS:
        tables.append(overview(data, kind, rows))
    for kind in UNITS:
        tables.append(details(data, kind, rows))
    tables.append(beside_the_paper(data, rows))
    tables.append(by_classifier(data, rows))
    return [table for table in tables if table is not None and table.rows]


def _reduced(done: Mapping[str, Line]) -> list[str]:
    """Returns the settings of each method that are below the published ones."""
    texts: list[str] = []
    for name, line in done.items():
        known = [f"{key} {value}" for key, value in line["reduced"].items()]
        if known:
            texts.append(f"{name}: {', '.join(known)}")
    return texts


def _failed(rows: Sequence[Row]) -> list[str]:
    """Returns the cells that failed, and why."""
    texts: list[str] = []
    for row in rows:
        for line in row.lines:
            why = line.get("failed")
            if why is not None:
                texts.append(f"{line['cell']}: {why}")
    return texts


def losses(rows: Sequence[Row]) -> list[str]:
    """Returns where fedgs' own methods have less than others of the same unit."""
    found: list[str] = []
    done = [row for row in rows if row.accuracy >= 0]
    kinds = [(row.data, row.asked, row.unit) for row in done]
    for data, asked, unit in dict.fromkeys(kinds):
        group: list[Row] = []
        for row in done:
            # Without noise the unit is no difference.
            is_alike = asked is None or row.unit == unit
            if row.data == data and row.asked == asked and is_alike:
                group.append(row)
        what = "without noise"
        if asked is not None:
            what = f"epsilon {asked:g} of one {unit}"
        group.sort(key=lambda row: -row.accuracy)
        others = [row for row in group if not row.is_own]
        ours = [row for row in group if row.is_own]
        for own in ours:
            better = [row for row in others if row.accuracy > own.accuracy]
            if better:
                names = ", ".join(_scored(row) for row in better)
                found.append(f"{data}, {what}: {_scored(own)} is below {names}")
    # Of a method without noise there is one text for each unit.
    return [*dict.fromkeys(found), *_records(done)]


def _scored(row: Row) -> str:
    return f"{row.method} ({row.accuracy:.3f})"


def _records(rows: Sequence[Row]) -> list[str]:
    """Returns where a curator and record level give better pictures."""
    found: list[str] = []
    for row in rows:
        if row.unit != "record" or row.asked is None:
            continue
        own: list[float] = []
        for other in rows:
            is_alike = other.data == row.data and other.asked == row.asked
            if is_alike and other.is_own:
                own.append(other.accuracy)
        best = max(own, default=math.inf)  # where there is none, nothing was lost
        if row.accuracy > best:
            found.append(
                f"{row.data}, epsilon {row.asked:g}: {row.method} has "
                f"{row.accuracy:.3f}, more than all of fedgs' ({best:.3f}), with a "
                "trusted curator and for one record"
            )
    return found


def _items(texts: Iterable[str]) -> str:
    items: list[str] = []
    for text in texts:
        item = textwrap.fill(
            f"- {text}",
            width=100,
            subsequent_indent="  ",
            break_long_words=False,
        )
        items.append(f"{item}\n")
    return "".join(items)
