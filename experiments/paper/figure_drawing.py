"""The figures themselves: from numbers to pictures; nothing here trains or computes.

Every picture says at which scale its numbers were made.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

from experiments.paper.gradient_norms import Norms
from fedgs.app.commands.drawing import new_figure, to_png
from fedgs.files import write_atomically

Images = NDArray[np.float32]
GRID_ROWS = 6
HISTOGRAM_BINS = 40


class Point(NamedTuple):
    """What one run reached after a round; epsilon is None where it is unbounded.

    `note` is written beside it.
    """

    note: str
    epsilon: float | None
    inception_score: float
    fid: float


def save(path: Path, figure: Figure) -> None:
    """Writes a PNG atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_png(figure))


def norm_dynamics(norms: Sequence[Norms], clip_bound: float, scale: str) -> Figure:
    """Returns the norms before clipping against the rounds (Fig. 2)."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    rounds = [found.round for found in norms]
    low, middle, high = np.array(
        [np.quantile(found.before, (0.05, 0.5, 0.95)) for found in norms]
    ).T
    axes.fill_between(rounds, low, high, alpha=0.3, label="5 % to 95 % of the fakes")
    axes.plot(rounds, middle, label="median")
    axes.axhline(clip_bound, color="black", linestyle="--", label="clip bound")
    axes.set(xlabel="round", ylabel="gradient norm before clipping", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    _say_scale(figure, f"NOT PRIVATE. {scale}")
    return figure


def norm_histograms(norms: Sequence[Norms], clip_bound: float, scale: str) -> Figure:
    """Returns the distribution of norms before and after clipping (Fig. A1)."""
    figure = new_figure(8, 3.6)
    both = {
        "before clipping": np.concatenate([found.before for found in norms]),
        "after clipping": np.concatenate([found.after for found in norms]),
    }
    top = max(clip_bound, float(np.quantile(both["before clipping"], 0.999)))
    bins = np.linspace(0, 1.05 * top, HISTOGRAM_BINS + 1)
    parts: NDArray[np.object_] = figure.subplots(1, 2, sharex=True, squeeze=False)
    for axes, (title, values) in zip(parts[0], both.items(), strict=True):
        axes.hist(np.minimum(values, bins[-1]), bins=bins)
        axes.axvline(clip_bound, color="black", linestyle="--")
        words = f"{title}: mean {values.mean():.3g}, std {values.std():.2g}"
        axes.set_title(words, fontsize=10)
        axes.set(xlabel="gradient norm", ylabel="fakes")
    _say_scale(figure, f"NOT PRIVATE. {scale}")
    return figure


def privacy_utility(
    curves: Mapping[str, Sequence[Point]],
    names: tuple[str, str],
    asked: str,
    scale: str,
) -> Figure:
    """Returns IS above FID against epsilon, a line for each curve (Fig. 4, A2).

    A curve whose epsilon is unbounded is a horizontal line at its last point.

    Args:
        curves: its points by the name of a curve, of one run in the order of rounds.
        names: of the two scores, with their protocol.
        asked: what epsilon is stated for: adversary, relation, delta.
        scale: in words.
    """
    figure = new_figure(7, 7)
    both: NDArray[np.object_] = figure.subplots(2, 1, sharex=True)
    for row, axes in enumerate(both):
        assert isinstance(axes, Axes)
        for colour, (title, points) in enumerate(curves.items()):
            _draw_curve(axes, title, points, row, f"C{colour % 10}")
        axes.set(ylabel=names[row], xscale="log")
        axes.grid(alpha=0.3)
    both[1].set(xlabel=f"epsilon ({asked})", yscale="log")
    for axis in (both[1].xaxis, both[1].yaxis):  # 20, not 2 x 10^1
        axis.set_major_formatter(LogFormatter(labelOnlyBase=False))
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    both[0].legend(fontsize=8)
    _say_scale(figure, scale)
    return figure


def _draw_curve(
    axes: Axes, title: str, points: Sequence[Point], row: int, colour: str
) -> None:
    values = [(point.inception_score, point.fid)[row] for point in points]
    known = [p.epsilon for p in points if p.epsilon]
    if len(known) < len(points):
        axes.axhline(values[-1], color=colour, linestyle="--", label=title)
        return
    axes.plot(known, values, marker="o", color=colour, label=title)
    for epsilon, value, point in zip(known, values, points, strict=True):
        where = {"xytext": (4, 4), "textcoords": "offset points"}
        axes.annotate(point.note, (epsilon, value), fontsize=7, **where)


def sample_grids(grids: Mapping[str, Images], columns: int, scale: str) -> Figure:
    """Returns grids of images side by side, each with its title (Fig. 3, 5).

    Args:
        grids: images (rows * columns, C, S, S) in [0, 1] by title, C = 1 or 3.
        columns: of each grid.
        scale: in words.
    """
    figure = new_figure(3.4 * len(grids), 2.7)
    parts: NDArray[np.object_] = figure.subplots(1, len(grids), squeeze=False)
    for axes, (title, images) in zip(parts[0], grids.items(), strict=True):
        axes.imshow(_tiled(images, columns), vmin=0, vmax=1, cmap="gray")
        axes.set_title("\n".join(textwrap.wrap(title, 34)), fontsize=9)
        axes.set_axis_off()
    _say_scale(figure, scale)
    return figure


def _tiled(images: Images, columns: int) -> Images:
    """Returns (rows * S, columns * S, C) of images (rows * columns, C, S, S)."""
    count, channels, side, _ = images.shape
    grid = images.reshape(count // columns, columns, channels, side, side)
    tiled = grid.transpose(0, 3, 1, 4, 2).reshape(-1, columns * side, channels)
    return tiled.repeat(3, axis=2) if channels == 1 else tiled


def _say_scale(figure: Figure, scale: str) -> None:
    """Writes below the axes at which scale the numbers were made."""
    width = int(figure.get_figwidth() * 17)
    figure.supxlabel("\n".join(textwrap.wrap(scale, width)), fontsize=7, color="0.35")
