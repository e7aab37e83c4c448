"""Tables of an evaluation, on the terminal and on the report's page."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedgs.app.evaluation import paper_tables
from fedgs.app.tables import Table


def classifier_table(caption: str, data: str, result: Mapping[str, Any]) -> Table:
    """Returns the accuracies of classifiers, beside the paper's on the same data.

    Args:
        caption: of the table.
        data: the real data, as `--data`.
        result: `classifiers` of a line of results.
    """
    published = paper_tables.PUBLISHED.get(data, {})
    columns: dict[str, dict[str, float]] = {
        "synthetic": result.get("accuracy", {}),
        "calibrated": result.get("calibrated", {}),
        "real": result.get("real_accuracy", {}),
        "paper: real": published.get("Real", {}),
        "paper: GS-WGAN": published.get("GS-WGAN", {}),
    }
    columns = {title: column for title, column in columns.items() if column}
    names = list(result.get("accuracy", {}))
    rows = [
        [name, *(_accuracy(column.get(name)) for column in columns.values())]
        for name in names
    ]
    note = "Calibrated: synthetic / real."
    if failed := result.get("failed"):
        note += f" Without a mean, for these could not be trained: {', '.join(failed)}."
    else:
        means = (_mean([column.get(n) for n in names]) for column in columns.values())
        rows.append(["average", *means])
    return Table(caption, ["trained on", *columns], rows, note)


LABELS = "accuracy by number of labelled synthetic images"


def label_table(caption: str, curves: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns `label_efficiency` of a line of results, a row for each teacher."""
    sizes = list(next(iter(curves.values())))
    rows = [
        [f"labels: {teacher}", *(_accuracy(curve.get(size)) for size in sizes)]
        for teacher, curve in curves.items()
    ]
    return Table(caption, ["labelled images", *sizes], rows)


def _accuracy(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _mean(column: Sequence[float | None]) -> str:
    """Returns the average of a complete column."""
    known = [value for value in column if value is not None]
    is_complete = len(known) == len(column) > 0
    return _accuracy(sum(known) / len(known) if is_complete else None)
