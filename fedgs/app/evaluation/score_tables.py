"""Tables of an evaluation, on the terminal and on the report's page."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedgs.app.evaluation import paper_tables
from fedgs.app.tables import Table


def classifier_table(caption: str, data: str, result: Mapping[str, Any]) -> Table:
    """Returns the accuracies of classifiers, beside the paper's on the same data.

    Args:
        caption: the caption of the table.
        data: the real data, as `--data`.
        result: `classifiers` of a line of results.
    """
    published = paper_tables.PUBLISHED.get(data, {})
    synthetic = result.get("accuracy", {})
    all_columns: dict[str, dict[str, float]] = {
        "synthetic": synthetic,
        "calibrated": result.get("calibrated", {}),
        "real": result.get("real_accuracy", {}),
        "paper: real": published.get("Real", {}),
        "paper: GS-WGAN": published.get("GS-WGAN", {}),
    }
    # A column that is not known is left out, the paper's of other data for example.
    head = ["trained on"]
    columns: list[dict[str, float]] = []
    for title, column in all_columns.items():
        if column:
            head.append(title)
            columns.append(column)
    names = list(synthetic)
    rows: list[list[str]] = []
    for name in names:
        row = [name]
        for column in columns:
            row.append(_accuracy(column.get(name)))
        rows.append(row)
    note = "Calibrated: synthetic / real."
    failed = result.get("failed")
    if failed:
        # A mean of the others would look better than the paper's, which is of all.
        who = ", ".join(failed)
        note += f" Without a mean, for these could not be trained: {who}."
    else:
        means = [_mean(column, names) for column in columns]
        rows.append(["average", *means])
    return Table(caption, head, rows, note)


LABELS = "accuracy by number of labelled synthetic images"


def label_table(caption: str, curves: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns `label_efficiency` of a line of results, a row for each teacher."""
    first = next(iter(curves.values()))
    sizes = list(first)  # the same in all curves
    rows: list[list[str]] = []
    for teacher, curve in curves.items():
        row = [f"labels: {teacher}"]
        for size in sizes:
            row.append(_accuracy(curve.get(size)))
        rows.append(row)
    head = ["labelled images", *sizes]
    return Table(caption, head, rows)


def _accuracy(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}"


def _mean(column: Mapping[str, float], names: Sequence[str]) -> str:
    """Returns the average of a column; a dash if it does not have all of the names."""
    known: list[float] = []
    for name in names:
        accuracy = column.get(name)
        if accuracy is None:
            return _accuracy(None)
        known.append(accuracy)
    if not known:
        return _accuracy(None)
    mean = sum(known) / len(known)
    return _accuracy(mean)
