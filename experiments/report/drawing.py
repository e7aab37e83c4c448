"""The report's drawings: lines with their words, as SVG in the colours of the page."""

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.report.words import number
from fedgs.errors import UserError

MOST_LISTED = 24  # points of a line in words
MOST_BANDS = 4  # more of them hide each other
INCHES = (3.5, 2.3)
DASHES = ("-", "--", ":", "-.")
NUM_COLOURS = 6
INK, FAINT = "#010101", "#020202"  # replaced by the page's own, light and dark
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One line of a curve.

    Attributes:
        name: in the legend; a run or an adversary.
        place: of the run or adversary among all of the page: decides the colour.
        points: x and y, by increasing x.
        low, high: the band around it, as y values; empty for none.
    """

    name: str
    place: int
    points: Points
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    @property
    def sparse(self) -> Points:
        """At most `MOST_LISTED` of the points, the last one among them."""
        step = math.ceil(len(self.points) / MOST_LISTED)
        return list(reversed(self.points[::-1][::step]))


@dataclass(frozen=True)
class Curve:
    """A figure with its words.

    Attributes:
        key: names it in the page.
        title: what it shows.
        y_name: its unit.
        lines: at least one with a point, or the page has the note alone.
        text: how to read it.
        note: what is left out, and why; "" for nothing.
        svg: the drawing; "" where there is no line.
    """

    key: str
    title: str
    y_name: str
    lines: Sequence[Line]
    text: str
    note: str = ""
    svg: str = ""

    @property
    def description(self) -> str:
        """The text alternative of the drawing."""
        parts = []
        for line in self.lines:
            (x0, y0), (x1, y1) = line.points[0], line.points[-1]
            parts.append(
                f"{line.name}: {number(y0)} at round {x0:g}, {number(y1)} at round "
                f"{x1:g}"
            )
        return f"{self.title}. {'; '.join(parts)}."


def draw(curve: Curve) -> str:
    """Returns a curve as an SVG element that takes its colours from the page.

    The same numbers give the same text.

    Raises:
        UserError: matplotlib is missing.
    """
    if not any(line.points for line in curve.lines):
        return ""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "report: draws with matplotlib; run `pip install 'fedgs[report]'`"
        ) from error
    style: dict[Any, Any] = {  # keys are matplotlib's
        "svg.fonttype": "none",
        "svg.hashsalt": curve.key,
        "font.size": 8,
        **{f"{part}.color": INK for part in ("xtick", "ytick", "text")},
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": FAINT,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=INCHES, layout="constrained")
        _plot(figure.subplots(), curve)
        content = io.StringIO()
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return _inline(content.getvalue(), curve)


def _plot(axes: Any, curve: Curve) -> None:
    for line in curve.lines:
        x, y = zip(*line.points, strict=True)
        colour = _colour(line.place)
        marker = "o" if len(x) < 3 else None
        dashes = DASHES[line.place % len(DASHES)]
        axes.plot(x, y, dashes, color=colour, linewidth=1.6, marker=marker)
        if line.low and len(curve.lines) <= MOST_BANDS:
            axes.fill_between(x, line.low, line.high, color=colour, alpha=0.2, lw=0)
    tops = [max(y for _, y in line.points) for line in curve.lines]
    if min(tops) > 0 and max(tops) > 10 * min(tops):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel="round", ylabel=curve.y_name)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.5, linewidth=0.5)


def _colour(place: int) -> str:
    """Returns the stand-in of the page's colour of a line."""
    return f"#0a0a{place % NUM_COLOURS:02x}"


def _inline(svg: str, curve: Curve) -> str:
    """Returns the svg element alone, with own names, page colours and a description."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    prefix = f"{curve.key}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    svg = svg.replace("url(#", f"url(#{prefix}")
    svg = svg.replace(INK, "var(--ink)").replace(FAINT, "var(--line)")
    for place in range(NUM_COLOURS):
        svg = svg.replace(_colour(place), f"var(--series-{place})")
    head, _, rest = svg.partition(">")
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    words = html.escape(curve.description, quote=True)
    return f'{head} role="img" aria-label="{words}">{rest}'
