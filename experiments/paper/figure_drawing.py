"""Privacy-utility curves as pictures; nothing here trains or computes.

Every picture says at which scale its numbers were made.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy import object_
from numpy.typing import NDArray

from fedgs.files import replacing


class Point(NamedTuple):
    """What a run reached; epsilon is None where it is unbounded.

    `note` is written beside it.
    """

    note: str
    epsilon: float | None
    inception_score: float
    fid: float


def save(path: Path, figure: Figure, scale: str) -> None:
    """Writes a PNG atomically; below the axes it says at which scale it was made."""
    width = int(figure.get_figwidth() * 17)  # characters of this size in an inch
    lines = textwrap.wrap(scale, width)
    figure.supxlabel("\n".join(lines), fontsize=7, color="0.35")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)


def privacy_utility(points: Sequence[Point]) -> Figure:
    """Returns IS above FID against epsilon of the release, replace-one (Fig. 4, A2).

    What has no bounded epsilon is a horizontal line.
    """
    figure = Figure((7, 7), layout="constrained")
    both: NDArray[object_] = figure.subplots(2, 1, sharex=True)
    scores = {
        "IS": [point.inception_score for point in points],
        "FID": [point.fid for point in points],
    }
    for axes, (name, values) in zip(both, scores.items(), strict=True):
        assert isinstance(axes, Axes)
        for point, value in zip(points, values, strict=True):
            if point.epsilon is None:
                axes.axhline(value, linestyle="--", color="black")
                continue
            place = (point.epsilon, value)
            axes.plot(*place, "o")
            axes.annotate(
                point.note,
                place,
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
            )
        axes.set(ylabel=name, xscale="log")
        axes.grid(alpha=0.3)
    both[1].set(xlabel="epsilon (release, replace-one)", yscale="log")
    for axis in (both[1].xaxis, both[1].yaxis):  # 20, not 2 x 10^1
        axis.set_major_formatter(LogFormatter(labelOnlyBase=False))
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    return figure
