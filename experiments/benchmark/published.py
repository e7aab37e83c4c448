"""The paper's Tables 1, A1 and A2 beside our rows: the CNN and the mean of thirteen.

Their epsilon of 10 is of a record and by a loose bound, and their CNN and scale are
others: the numbers show the order of the methods, and no more.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Tables 1, A1, A2 (average of
    five runs).
"""

from collections.abc import Mapping, Sequence
from statistics import mean

from experiments.benchmark.lines import Line
from experiments.benchmark.tables import NOT_RUN, Row
from experiments.evaluation.paper_tables import PUBLISHED
from experiments.tables import Table
from fedgs.evaluation.classifiers import NAMES

# Row of the paper: CNN and mean of 13, on MNIST and on Fashion-MNIST.
TABLE_1 = {
    "GAN (non-private)": (("0.84", "0.63"), ("0.73", "0.61")),
    "G-PATE": (("0.51", "0.34"), ("0.50", "0.40")),
    "DP-SGD GAN": (("0.63", "0.52"), ("0.46", "0.43")),
    "DP-Merf": (("0.63", "0.57"), ("0.62", "0.51")),
    "DP-Merf AE": (("0.68", "0.42"), ("0.62", "0.45")),
    "GS-WGAN": (("0.80", "0.60"), ("0.65", "0.53")),
}
OURS = {  # our row of the same method, and its epsilon
    "GAN (non-private)": ("wgan-gp", None),
    "G-PATE": ("g-pate", 10.0),
    "DP-SGD GAN": ("dp-sgd-gan", 10.0),
    "DP-Merf": ("dp-merf", 10.0),
    "DP-Merf AE": ("dp-merf-ae", 10.0),
    "GS-WGAN": ("gs-wgan", 10.0),
}
IMAGES = {"mnist": 0, "mnist-by-writer": 0, "fashion-mnist": 1}
NOTE = (
    "Published: Tables 1, A1 and A2 of GS-WGAN's paper, whose epsilon of 10 is of one "
    "record and by a bound that does not hold; another CNN, and full scale. Ours: the "
    "unit of the tables above, reduced settings. So the two cannot be compared number "
    "by number."
)


def beside_the_paper(data: str, rows: Sequence[Row]) -> Table | None:
    """Returns the paper's rows beside ours; None for other data than the paper's."""
    if data not in IMAGES:
        return None
    place, own = IMAGES[data], {(r.method, r.asked): r for r in rows if r.data == data}
    cells: list[list[str]] = []
    for title, (name, epsilon) in OURS.items():
        row = own.get((name, epsilon))
        unit = row.done[0]["unit"] if row and row.done else "–"
        shown = row.shown if row else NOT_RUN
        cells.append([title, *TABLE_1[title][place], name, unit, shown, _thirteen(row)])
    head = ["Table 1", "published CNN", "published 13", "our row", "unit", "CNN", "13"]
    caption = f"{data}: beside the paper's Tables 1, A1 and A2, epsilon 10"
    return Table(caption, head, cells, numeric=False)


def by_classifier(data: str, rows: Sequence[Row]) -> Table | None:
    """Returns the thirteen accuracies of judged rows, each below the paper's.

    Returns:
        None for other data than the paper's, or where no row was judged by them.
    """
    ours = {(row.method, row.asked): row for row in rows if row.data == data}
    ours = {key: row for key, row in ours.items() if _columns(row)}
    if data not in PUBLISHED or not ours:
        return None
    cells: list[list[str]] = []
    for title, column in PUBLISHED[data].items():
        cells.append([f"{title}, published", *_means([column], 2)])
        if title in OURS and (row := ours.pop(OURS[title], None)) is not None:
            cells.append([_called(row), *_means(_columns(row), 3)])
    cells += [[_called(row), *_means(_columns(row), 3)] for row in ours.values()]
    head = ["trained on", *(name.replace("_", " ") for name in NAMES), "mean"]
    table = "A2" if IMAGES[data] else "A1"
    return Table(f"{data}: the paper's Table {table} beside our rows", head, cells)


def _columns(row: Row) -> list[Mapping[str, float]]:
    """Returns the accuracies by classifier, of each seed where all are known."""
    return [line["accuracy_by_classifier"] for line in row.done if is_judged(line)]


def is_judged(line: Line) -> bool:
    """Returns whether a line has all thirteen; older lines have the mean alone."""
    return {*NAMES} == {*(line.get("accuracy_by_classifier") or {})}


def _means(columns: Sequence[Mapping[str, float]], digits: int) -> list[str]:
    means = [mean(column[name] for column in columns) for name in NAMES]
    return [f"{value:.{digits}f}" for value in (*means, mean(means))]


def _called(row: Row) -> str:
    if row.asked is None:
        return f"{row.method}, no noise"
    return f"{row.method}, epsilon {row.asked:g} of one {row.unit}"


def _thirteen(row: Row | None) -> str:
    known = [line["accuracy_mean_of_13"] for line in row.done] if row else []
    known = [value for value in known if value is not None]
    return f"{sum(known) / len(known):.3f}" if known else NOT_RUN
