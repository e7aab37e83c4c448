"""Results of `fedgs evaluate` as tables: on the report's page."""

from collections.abc import Sequence

from fedgs.app.evaluation.score_tables import LABELS, classifier_table, label_table
from fedgs.app.report.run import RunFacts
from fedgs.app.report.settings_tables import shown_data
from fedgs.app.tables import Table, cell, is_number

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
    # Runs may have been evaluated with different metrics, so a cell may be empty.
    names: set[str] = set()
    for found in results:
        names.update(name for name in found if is_number(found[name]))
    rows: list[list[str]] = []
    for name in sorted(names, key=_rank):
        values = [cell(found.get(name)) for found in results]
        rows.append([name, *values, _meaning(name)])
    data = {shown_data(str(found.get("data", "?"))) for found in results}
    against = ", ".join(sorted(data))
    head = ["metric"]
    head += [facts.name for facts in evaluated]
    head.append("what it says")
    tables = [Table(f"Against {against}", head, rows)]
    for facts, found in zip(evaluated, results, strict=True):
        data_name = str(found.get("data"))
        accuracies = found.get("classifiers")
        if isinstance(accuracies, dict):
            caption = f"{facts.name}: classifiers tested on real images"
            tables.append(classifier_table(caption, data_name, accuracies))
        curves = found.get("label_efficiency")
        if isinstance(curves, dict) and curves:
            tables.append(label_table(f"{facts.name}: {LABELS}", curves))
    return tables


def _rank(name: str) -> tuple[int, str]:
    if name.startswith(BOOKKEEPING):
        return len(METRICS) + 1, name
    # A metric that this table does not know is shown after those that it explains.
    for place, start in enumerate(METRICS):
        if name.startswith(start):
            return place, name
    return len(METRICS), name


def _meaning(name: str) -> str:
    # The spread of a metric has the metric's beginning but not its meaning.
    if name.endswith("_std") or name.startswith(BOOKKEEPING):
        return ""
    for start, text in METRICS.items():
        if name.startswith(start):
            return text
    return ""
