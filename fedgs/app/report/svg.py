"""The report's drawings: lines with their words, as SVG."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedgs.app.report.words import number
from fedgs.errors import imported

WIDTH, HEIGHT, LEGEND = 3.5, 2.2, 0.17  # inches; the last for a line of the legend
WIDEST_NAME = 55  # letters, of a line of the legend
DASHES = ("-", "--", ":", "-.")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One line of a curve.

    Attributes:
        name: in the legend; a run or an adversary.
        place: of the run or adversary among all of the page: decides the colour.
        points: x and y, by increasing x.
    """

    name: str
    place: int
    points: Points

    @property
    def label(self) -> str:
        """The name with the last value."""
        return f"{self.name}: {number(self.points[-1][1])}"


@dataclass(frozen=True)
class Curve:
    """A figure with its words.

    Attributes:
        title: what it shows.
        y_name: its unit.
        lines: each with a point; none, and the page has the note alone.
        text: how to read it.
        note: what is left out, and why; "" for nothing.
    """

    title: str
    y_name: str
    lines: Sequence[Line]
    text: str
    note: str = ""

    @property
    def description(self) -> str:
        """The text alternative of the drawing."""
        parts = [
            f"{line.name}: {number(y0)} at round {x0:g}, {number(y1)} at round {x1:g}"
            for line in self.lines
            for (x0, y0), (x1, y1) in [(line.points[0], line.points[-1])]
        ]
        return f"{self.title}. {'; '.join(parts)}."


def draw(curve: Curve) -> bytes:
    """Returns a curve with a line or more as an SVG file.

    The same numbers give the same bytes.

    Raises:
        UserError: matplotlib is missing.
    """
    matplotlib = imported("matplotlib", "report", "'fedgs[report]'")
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {  # keys are matplotlib's
        "svg.fonttype": "none",
        "svg.hashsalt": curve.title,
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    labels = [textwrap.fill(line.label, WIDEST_NAME) for line in curve.lines]
    height = HEIGHT + LEGEND * sum(1 + label.count("\n") for label in labels)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        _plot(figure.subplots(), curve, labels)
        figure.legend(loc="outside lower left", frameon=False)
        content = io.BytesIO()
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return content.getvalue()


def _plot(axes: Any, curve: Curve, labels: Sequence[str]) -> None:
    for line, label in zip(curve.lines, labels, strict=True):
        if len(line.points) < 3:
            marker = "o"
        else:
            marker = None
        dashes = DASHES[line.place % len(DASHES)]
        how = {"color": f"C{line.place}", "marker": marker, "label": label}
        axes.plot(*zip(*line.points, strict=True), dashes, linewidth=1.6, **how)
    tops = [max(y for _, y in line.points) for line in curve.lines]
    if min(tops) > 0 and max(tops) > 10 * min(tops):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel="round", ylabel=curve.y_name)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.5, linewidth=0.5)
