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
    # A column that is not known is left out, the paper's of other data for example.
    columns = {title: column for title, column in columns.items() if column}
    names = list(result.get("accuracy", {}))
    rows: list[list[str]] = []
    for name in names:
        accuracies = [_accuracy(column.get(name)) for column in columns.values()]
        rows.append([name, *accuracies])
    note = "Calibrated: synthetic / real."
    failed = result.get("failed")
    if failed:
        # A mean of the others would look better than the paper's, which is of all.
        note += f" Without a mean, for these could not be trained: {', '.join(failed)}."
    else:
        means = [_mean(column, names) for column in columns.values()]
        rows.append(["average", *means])
    return Table(caption, ["trained on", *columns], rows, note)


LABELS = "accuracy by number of labelled synthetic images"


def label_table(caption: str, curves: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns `label_efficiency` of a line of results, a row for each teacher."""
    sizes = list(next(iter(curves.values())))
    rows: list[list[str]] = []
    for teacher, curve in curves.items():
        accuracies = [_accuracy(curve.get(size)) for size in sizes]
        rows.append([f"labels: {teacher}", *accuracies])
    return Table(caption, ["labelled images", *sizes], rows)


def _accuracy(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}"


def _mean(column: Mapping[str, float], names: Sequence[str]) -> str:
    """Returns the average of a column; a dash if it does not have all of the names."""
    known = [column[name] for name in names if column.get(name) is not None]
    if not known or len(known) < len(names):
        return _accuracy(None)
    return _accuracy(sum(known) / len(known))
