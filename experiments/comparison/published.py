"""The paper's Tables 1, A1 and A2 beside our rows: the CNN and the mean of thirteen.

Their epsilon of 10 is of a record and by a loose bound, and their CNN and scale are
others: the numbers show the order of the methods, and no more.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Tables 1, A1, A2 (average of
    five runs).
"""

from collections.abc import Sequence
from statistics import mean

from experiments.comparison.rows import ROW_NOT_RUN, Row
from fedgs.app.evaluation.paper_tables import PUBLISHED, TABLE_1
from fedgs.app.tables import Table
from fedgs.evaluation.classifiers import CLASSIFIERS

OURS = {  # our row of the same method, and its epsilon
    "GAN (non-private)": ("wgan-gp", None),
    "G-PATE": ("g-pate", 10.0),
    "DP-SGD GAN": ("dp-sgd-gan", 10.0),
    "DP-Merf": ("dp-merf", 10.0),
    "DP-Merf AE": ("dp-merf-ae", 10.0),
    "GS-WGAN": ("gs-wgan", 10.0),
}


def beside_the_paper(data: str, rows: Sequence[Row]) -> Table | None:
    """Returns the paper's rows beside ours; None for other data than the paper's."""
    if data not in TABLE_1:
        return None
    of_data = [row for row in rows if row.data == data]
    ours = {(row.method, row.asked): row for row in of_data}
    cells: list[list[str]] = []
    for title, (name, epsilon) in OURS.items():
        row = ours.get((name, epsilon))
        if row is None:  # it was not run, and has a line so that nothing seems left out
            row = Row(data=data, method=name, asked=epsilon, unit="–")
        published = TABLE_1[data][title]
        cells.append([title, *published, name, *_ours(row)])
    head = ["Table 1", "published CNN", "published 13", "our row", "unit", "CNN", "13"]
    caption = f"{data}: beside the paper's Tables 1, A1 and A2, epsilon 10"
    return Table(caption, head, cells, numeric=False)


def by_classifier(data: str, rows: Sequence[Row]) -> Table | None:
    """Returns the thirteen accuracies of judged rows, each below the paper's.

    Returns:
        None for other data than the paper's, or where no row was judged by them.
    """
    # The thirteen take hours, so that most rows were not judged by them.
    judged = [row for row in rows if row.data == data and _judged(row)]
    if data not in PUBLISHED or not judged:
        return None
    ours = {(row.method, row.asked): row for row in judged}
    cells: list[list[str]] = []
    for title, column in PUBLISHED[data].items():
        # With two digits, as the paper prints them.
        accuracies = _means([column], digits=2)
        cells.append([f"{title}, published", *accuracies])
        if title not in OURS:
            continue
        row = ours.pop(OURS[title], None)
        if row is not None:
            cells.append(_own(row))
    # Then those that the paper has no row for.
    for row in ours.values():
        cells.append(_own(row))
    head = ["trained on"]
    for name in CLASSIFIERS:
        head.append(name.replace("_", " "))
    head.append("mean")
    table = "A1"
    if data == "fashion-mnist":
        table = "A2"
    return Table(f"{data}: the paper's Table {table} beside our rows", head, cells)


def _ours(row: Row) -> list[str]:
    """Returns a row's unit, its accuracy of the CNN, and the mean of the thirteen."""
    unit = "–"
    if row.done:
        unit = row.done[0]["unit"]
    shown = ROW_NOT_RUN
    thirteen = row.mean("accuracy_mean_of_13")
    if thirteen is not None:
        shown = f"{thirteen:.3f}"
    return [unit, row.shown, shown]


def _judged(row: Row) -> list[dict[str, float]]:
    """Returns the accuracies by classifier of each seed that has all thirteen."""
    found: list[dict[str, float]] = []
    for line in row.done:
        column = line.get("accuracy_by_classifier") or {}
        if set(column) == set(CLASSIFIERS):
            found.append(column)
    return found


def _own(row: Row) -> list[str]:
    noise = "no noise"
    if row.asked is not None:
        noise = f"epsilon {row.asked:g} of one {row.unit}"
    accuracies = _means(_judged(row), digits=3)
    return [f"{row.method}, {noise}", *accuracies]


def _means(columns: Sequence[dict[str, float]], digits: int) -> list[str]:
    # Over the seeds first, then over the classifiers.
    means: list[float] = []
    for name in CLASSIFIERS:
        values = [column[name] for column in columns]
        means.append(mean(values))
    means.append(mean(means))
    return [f"{value:.{digits}f}" for value in means]
