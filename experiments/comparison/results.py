"""The comparison's page, from stored lines alone: users, records and no privacy.

`docs/benchmark/table.md` is the page of the lines that are stored beside it.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.baselines.baseline import RELATIONS
from experiments.comparison.methods import EPSILONS
from experiments.comparison.published import beside_the_paper, by_classifier
from experiments.comparison.rows import Row
from experiments.grid.lines import NUM_SAMPLES
from experiments.store import Line
from fedgs.app.report.words import num_bytes
from fedgs.app.tables import Table
from fedgs.privacy.rounding import lower, upper

CANNOT = "–"
COLUMNS = (*EPSILONS, None)  # None is without noise
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
    cells = {(row.method, row.asked): row.shown for row in chosen}
    extra = sorted({row.asked for row in chosen if row.asked} - {*EPSILONS})
    columns = (*COLUMNS, *extra)
    head = ["method", *(f"{epsilon:g}" if epsilon else "none" for epsilon in columns)]
    shown = [
        [marked, *(cells.get((method, asked), CANNOT) for asked in columns)]
        for method, marked in {row.method: row.marked for row in chosen}.items()
    ]
    return Table(f"{data}: accuracy of the CNN, FID, by {UNITS[kind]}", head, shown)


def details(data: str, kind: str, rows: Sequence[Row]) -> Table:
    """Returns all columns of the rows that were run, the best first.

    The unit of a row that was run is that of its lines: without noise there is none.
    """
    chosen = [row for row in rows if row.data == data and row.done]
    chosen = [row for row in chosen if row.done[0]["unit"] == kind]
    chosen.sort(key=lambda row: (-(row.asked or float("inf")), -row.accuracy))
    columns = [_details(row, kind) for row in chosen]
    head = list(columns[0]) if columns else []
    caption = f"{data}: {UNITS[kind]}, what was run"
    return Table(caption, head, [[*row.values()] for row in columns], numeric=False)


def _details(row: Row, kind: str) -> dict[str, str]:
    """Returns a row of `details` by the names of its columns."""
    first, seconds = row.done[0], row.mean("cpu_seconds")
    accuracies = [line["accuracy_cnn"] for line in row.done]
    spread = f" ({min(accuracies):.3f}–{max(accuracies):.3f})"
    cells = {
        "method": row.marked + (" *" if first["reduced"] else ""),
        "epsilon asked": "none" if row.asked is None else f"{row.asked:g}",
    }
    if kind != "none":
        cells[f"epsilon of one {kind}"] = _epsilons(first, kind)
    if kind == "record":
        cap = "" if first["cap"] is None else f" (cap {first['cap']})"
        cells["of a user, by group privacy"] = _epsilons(first, "user") + cap
    memory, sent = row.mean("peak_memory_bytes"), first["bytes_per_client"]
    return cells | {
        "CNN": f"{row.accuracy:.3f}" + (spread if len(accuracies) > 1 else ""),
        "13": _thirteen(row),
        "FID": _number(row.mean("fid"), ".1f"),
        "coverage": _number(row.mean("coverage"), ".2f"),
        "audited (one release)": _audit(first["audit"]),
        "bytes/client": num_bytes(sent) if sent else CANNOT,
        "releases": str(first["releases"]),
        "rounds": str(first["rounds"]),
        "CPU s": _number(seconds, ".0f") + (" †" if (seconds or 0) > LIMIT else ""),
        "wall s": _number(row.mean("wall_seconds"), ".0f"),
        "memory": CANNOT if memory is None else num_bytes(round(memory)),
        "seeds": str(len(row.done)),
    }


def _thirteen(row: Row) -> str:
    judged = [line for line in row.done if line["accuracy_mean_of_13"] is not None]
    text = _number(row.mean("accuracy_mean_of_13"), ".3f")
    counts = {line["num_synthetic"] for line in judged} - {NUM_SAMPLES}
    return text + "".join(f" ({count:,})" for count in counts)


def _epsilons(line: Line, kind: str) -> str:
    """Returns the valid epsilons of a unit, each with its relation."""
    of_unit = [row for row in line["guarantees"] if row["unit"] == kind]
    valid = [row for row in of_unit if row["label"] == "valid"]
    shown = valid or [row for row in of_unit if row["label"] == "distributional"]
    if kind == "user":  # all of them were asked for zero-out; a record's is the first
        shown = sorted(shown, key=lambda row: RELATIONS.index(row["relation"]))
    texts = [
        f"{upper(row['epsilon'])} {row['relation']}"
        + ("" if valid else " (distributional: no differential privacy)")
        for row in shown
    ]
    return "; ".join(texts) or "none"


def _number(value: float | None, form: str) -> str:
    return CANNOT if value is None else format(value, form)


def _audit(audit: Mapping[str, Any] | None) -> str:
    if audit is None:
        return CANNOT
    bound, claimed = lower(audit["lower_bound"], 3), upper(audit["claimed"], 3)
    return f"≥ {bound} of {claimed}" + " REFUTED" * audit["refuted"]


# ------------------------------------------------------------------ the page


def page(rows: Sequence[Row]) -> str:
    """Returns the page as Markdown: losses, tables, reduced settings, failures."""
    done = {row.method: row.done[0] for row in rows if row.done}
    trust = [
        [name, line["trust"], str(line["releases"])] for name, line in done.items()
    ]
    reduced = [
        f"{name}: {', '.join(f'{key} {value}' for key, value in known.items())}"
        for name, line in done.items()
        if (known := line["reduced"])
    ]
    failed = [
        f"{line['cell']}: {line['failed']}"
        for row in rows
        for line in row.lines
        if "failed" in line
    ]
    parts = [
        Table("", ["method", "who must be trusted", "releases"], trust).markdown(),
        "## Where fedgs' own methods lose\n",
        _items(losses(rows) or ["nowhere, by accuracy"]),
    ]
    for data in dict.fromkeys(row.data for row in rows):
        parts += [f"## {data}\n"]
        known = [of(data, kind, rows) for of in (overview, details) for kind in UNITS]
        published = (beside_the_paper(data, rows), by_classifier(data, rows))
        for table in (*known, *published):
            if table is not None and table.rows:
                parts += [f"**{table.caption.removeprefix(f'{data}: ')}**\n"]
                parts += [table.markdown()]
    for title, texts in {"Reduced settings": reduced, "Failed": failed}.items():
        parts += [f"{title}:\n", _items(texts)] if texts else []
    return "\n".join(parts)


def losses(rows: Sequence[Row]) -> list[str]:
    """Returns where fedgs' own methods have less than others of the same unit."""
    found: list[str] = []
    keys = dict.fromkeys((row.data, row.asked, row.unit) for row in rows if row.done)
    for data, asked, unit in keys:
        group = [r for r in rows if (r.data, r.asked, r.unit) == (data, asked, unit)]
        if asked is None:  # without noise the unit is no difference
            group = [r for r in rows if (r.data, r.asked) == (data, asked)]
        group = sorted((r for r in group if r.done), key=lambda row: -row.accuracy)
        for own in (row for row in group if row.is_own):
            better = [r for r in group if not r.is_own and r.accuracy > own.accuracy]
            if better:
                names = ", ".join(f"{r.method} ({r.accuracy:.3f})" for r in better)
                what = f"epsilon {asked:g} of one {unit}" if asked else "without noise"
                score = f"{own.method} ({own.accuracy:.3f})"
                found.append(f"{data}, {what}: {score} is below {names}")
    return [*dict.fromkeys(found), *_records(rows)]


def _records(rows: Sequence[Row]) -> list[str]:
    """Returns where a curator and record level give better pictures."""
    found: list[str] = []
    for row in rows:
        if row.unit != "record" or not row.done or row.asked is None:
            continue
        same = [r for r in rows if (r.data, r.asked) == (row.data, row.asked)]
        own = [r.accuracy for r in same if r.is_own]
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
