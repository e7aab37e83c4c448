"""Results of `fedgs evaluate` as tables: on the report's page and on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.commands import paper_tables
from experiments.report.run import RunFacts, shown_data
from experiments.report.words import cell, is_number
from experiments.tables import Table

METRICS = {  # beginnings of a metric's name, in the order of the table
    "downstream_cnn_accuracy": "a CNN trained on the synthetic images, tested on real",
    "is_": "Inception Score: higher is sharper and more varied",
    "fid_": "Frechet distance to the real images: lower is nearer",
    "precision_": "share of synthetic images that look like real ones",
    "recall_": "share of real images that the synthetic ones cover",
    "density_": "how densely real images surround the synthetic ones",
    "coverage_": "share of real images with a synthetic neighbour",
    "memorisation_ratio": "1: as fresh images; 0: copies of the training images",
    "memorised_share": "share of synthetic images suspiciously near one real image",
}
# Last in the table.
BOOKKEEPING = ("seed", "seconds", "round", "num_", "downstream_cnn_num")


def evaluation_tables(runs: Sequence[RunFacts]) -> list[Table]:
    """Returns the results of `fedgs evaluate`, none where it was not run.

    Privacy: the numbers were computed from real images; no epsilon covers them.
    """
    evaluated = [facts for facts in runs if facts.evaluation]
    if not evaluated:
        return []
    results = [facts.evaluation for facts in evaluated]
    names = {name for found in results for name in found if is_number(found[name])}
    rows = [
        [name, *(cell(found.get(name)) for found in results), _meaning(name)]
        for name in sorted(names, key=_rank)
    ]
    data = sorted({shown_data(str(found.get("data", "?"))) for found in results})
    head = ["metric", *(facts.name for facts in evaluated), "what it says"]
    tables = [Table(f"Against {', '.join(data)}", head, rows)]
    for facts, found in zip(evaluated, results, strict=True):
        if accuracies := found.get("classifiers"):
            caption = f"{facts.name}: classifiers tested on real images"
            tables.append(classifier_table(caption, str(found.get("data")), accuracies))
        if curves := found.get("label_efficiency"):
            tables.append(label_table(f"{facts.name}: {LABELS}", curves))
    return tables


def classifier_table(caption: str, data: str, found: Mapping[str, Any]) -> Table:
    """Returns the accuracies of classifiers, beside the paper's on the same data.

    Args:
        caption: of the table.
        data: the real data, as `--data`.
        found: `classifiers` of a line of results.
    """
    columns: dict[str, dict[str, float]] = {
        "synthetic": found.get("accuracy", {}),
        "calibrated": found.get("calibrated", {}),
        "real": found.get("real_accuracy", {}),
        "paper: real": paper_tables.REAL.get(data, {}),
        "paper: GS-WGAN": paper_tables.GS_WGAN.get(data, {}),
    }
    columns = {title: column for title, column in columns.items() if column}
    names = list(found.get("accuracy", {}))
    rows = [
        [name, *(_accuracy(column.get(name)) for column in columns.values())]
        for name in names
    ]
    note = f"Protocol {found.get('protocol', '?')}. Calibrated: synthetic / real."
    if failed := found.get("failed"):
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


def _rank(name: str) -> tuple[int, str]:
    if name.startswith(BOOKKEEPING):
        return len(METRICS) + 1, name
    places = (place for place, start in enumerate(METRICS) if name.startswith(start))
    return next(places, len(METRICS)), name


def _meaning(name: str) -> str:
    if name.endswith("_std") or name.startswith(BOOKKEEPING):
        return ""
    return next((text for start, text in METRICS.items() if name.startswith(start)), "")
