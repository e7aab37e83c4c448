"""The report's drawings: lines with their words, as SVG."""

import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedgs.app.report.words import number
from fedgs.errors import imported

WIDTH = 3.5  # inches
HEIGHT = 2.2
LEGEND = 0.17  # of one line of the legend
WIDEST_NAME = 55  # letters, of a line of the legend
DASHES = ("-", "--", ":", "-.")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One line of a curve.

    Attributes:
        name: in the legend; a run or an adversary.
        place: where the run or adversary stands on the page: decides the colour.
        points: x and y, by increasing x.
    """

    name: str
    place: int
    points: Points


@dataclass(frozen=True)
class Curve:
    """A figure with its words.

    Attributes:
        title: what it shows.
        y_name: its unit.
        lines: each with a point; none, and the page has the note alone.
        text: how to read it.
        note: what is left out, and why; "" for nothing.
        shown: writes a value of y in words.
    """

    title: str
    y_name: str
    lines: Sequence[Line]
    text: str
    note: str = ""
    shown: Callable[[float], str] = number

    @property
    def labels(self) -> list[str]:
        """The name of each line with its last value, for the legend."""
        found: list[str] = []
        for line in self.lines:
            _, last = line.points[-1]
            found.append(f"{line.name}: {self.shown(last)}")
        return found

    @property
    def description(self) -> str:
        """The text alternative of the drawing."""
        parts: list[str] = []
        for line in self.lines:
            # The first and the last point; a line of one round has one.
            ends = dict.fromkeys((line.points[0], line.points[-1]))
            values = [f"{self.shown(y)} at round {x:g}" for x, y in ends]
            parts.append(f"{line.name}: {', '.join(values)}")
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
        # Words stay words, which a reader can select and a screen reader can read.
        "svg.fonttype": "none",
        # Without a salt matplotlib names the elements at random in each drawing.
        "svg.hashsalt": curve.title,
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    labels = [textwrap.fill(label, WIDEST_NAME) for label in curve.labels]
    num_lines = sum(1 + label.count("\n") for label in labels)
    height = HEIGHT + LEGEND * num_lines
    with matplotlib.rc_context(style):
        # Not by pyplot, which would look for a display and keep every figure.
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        _plot(figure.subplots(), curve, labels)
        figure.legend(loc="outside lower left", frameon=False)
        content = io.BytesIO()
        # Without a date, the same numbers give the same file.
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return content.getvalue()


def _plot(axes: Any, curve: Curve, labels: Sequence[str]) -> None:
    for line, label in zip(curve.lines, labels, strict=True):
        # A line of one point would be invisible.
        marker = None
        if len(line.points) < 3:
            marker = "o"
        # Dashes as well as colours, for readers who cannot tell the colours apart.
        rounds = [x for x, _ in line.points]
        values = [y for _, y in line.points]
        axes.plot(
            rounds,
            values,
            DASHES[line.place % len(DASHES)],
            color=f"C{line.place}",
            linewidth=1.6,
            marker=marker,
            label=label,
        )
    # On a linear axis a line ten times below another looks like zero. Otherwise the
    # axis begins at 0, so that heights can be compared.
    tops: list[float] = []
    for line in curve.lines:
        values = [y for _, y in line.points]
        tops.append(max(values))
    lowest = min(tops)
    if lowest > 0 and max(tops) > 10 * lowest:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel="round", ylabel=curve.y_name)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.5, linewidth=0.5)
