"""The drawings of the documentation that replace long texts, as SVG files.

    python -m experiments.drawings

writes them into `docs/images`. A drawing is a table of boxes, read from top to bottom,
with an arrow between two rows that says what goes on. Text stays text, so it can be
searched, read aloud and scaled. A drawing brings its own background, with other colours
where the reader's system is dark, so it is readable on any page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fedgs.files import write_atomically

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
# All lengths are in pixels of the drawing; a page shows about 700 of them side by side.
_MARGIN = 16
_PADDING = 12  # inside a row's box
_LINE = 18  # from one line of text to the next
_HEAD = 22  # the line of the columns' headings
_ARROW = 36  # between two rows
_BARRIER = 12  # more where the privacy barrier lies between them
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2933; }
.name { font-weight: 700; font-size: 15px; }
.note, .head { fill: #52606d; }
.panel { fill: #ffffff; }
.box { fill: #eef2f6; stroke: #9aa5b1; }
.optional { stroke-dasharray: 5 4; }
.arrow { stroke: #52606d; fill: none; stroke-width: 1.5; }
.tip { fill: #52606d; }
.barrier { stroke: #c2410c; stroke-width: 2; stroke-dasharray: 7 5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb; }
  .note, .head { fill: #a7b3c0; }
  .panel { fill: #161b22; }
  .box { fill: #232b36; stroke: #5b6b7c; }
  .arrow { stroke: #a7b3c0; }
  .tip { fill: #a7b3c0; }
  .barrier { stroke: #fb923c; }
}
"""


@dataclass(frozen=True)
class ObserverRow:
    """One box, over the whole width.

    Attributes:
        name: in bold, in the first column.
        note: lines below the name.
        cells: the lines of each other column.
        onward: what goes from this row to the next one; "" draws an arrow alone.
        is_barrier: whether the privacy barrier lies below this row.
        is_optional: whether some runs have no such row.
    """

    name: str
    note: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    onward: str = ""
    is_barrier: bool = False
    is_optional: bool = False

    @property
    def height(self) -> int:
        """Height of the box in pixels, which the longest column decides."""
        lines = [1 + len(self.note)]
        lines += [len(cell) for cell in self.cells]
        return max(lines) * _LINE + 2 * _PADDING - 4

    @property
    def gap(self) -> int:
        """Pixels from this box to the next one."""
        if self.is_barrier:
            return _ARROW + _BARRIER
        return _ARROW


@dataclass(frozen=True)
class Drawing:
    """A drawing.

    Attributes:
        file: its name in `docs/images`.
        title: what it shows, for people who cannot see it.
        width: the width of the drawing, in pixels.
        columns: where each column begins, in pixels from the left side of a box.
        heads: the columns' headings.
        rows: from top to bottom.
    """

    file: str
    title: str
    width: int
    columns: tuple[int, ...]
    heads: tuple[str, ...]
    rows: tuple[ObserverRow, ...]


WHO_SEES_WHAT = Drawing(
    file="who-sees-what.svg",
    title="Who sees what in a run, and which epsilon holds against whom",
    width=740,
    columns=(12, 190, 440),
    heads=("who", "sees", "epsilon against it"),
    rows=(
        ObserverRow(
            "Client",
            ("one patient or writer,", "with all images"),
            (("its own images",), ("it is the one who is protected",)),
            onward="images, on the node's own disk",
        ),
        ObserverRow(
            "Node",
            ("a hospital's machine,", "which hosts its clients"),
            (
                (
                    "the images of its own clients,",
                    "what they answer before noise,",
                    "and what the server asks",
                ),
                ("none: nobody is protected", "against the node that hosts it"),
            ),
            onward="one noisy sum over its clients: nothing else of them leaves a node",
            is_barrier=True,
        ),
        ObserverRow(
            "Server",
            ("asks, adds up,", "makes the generator"),
            (
                (
                    "who took part,",
                    "and each node's noisy sum",
                    "(with secure aggregation only",
                    "the sum of all nodes)",
                ),
                (
                    "row “server”:",
                    "the noise of one node counts",
                    "(with secure aggregation that",
                    "of all nodes that are honest)",
                ),
            ),
            onward="the generator",
        ),
        ObserverRow(
            "Outsider",
            ("anybody to whom", "something is published"),
            (
                ("the generator, its samples,", "and the privacy label"),
                ("row “release”:", "the noise of all nodes counts"),
            ),
        ),
    ),
)

PHASES = Drawing(
    file="phases.svg",
    title="The phases of a run by the default recipe, and what leaves a machine",
    width=740,
    columns=(12, 190, 432),
    heads=("phase", "the server sends", "a node answers, clipped and with noise"),
    rows=(
        ObserverRow(
            "means",
            ("one answer",),
            (
                ("no more than settings",),
                (
                    "of each class: its share of images",
                    "and their mean, in low frequencies",
                ),
            ),
        ),
        ObserverRow(
            "scatter",
            ("one answer",),
            (
                ("the means that were released",),
                ("how images deviate from them:", "one covariance for all classes"),
            ),
        ),
        ObserverRow(
            "moments",
            ("one answer",),
            (
                ("the axes along which", "images deviate most"),
                ("of each class: mean and", "covariance along these axes"),
            ),
        ),
        ObserverRow(
            "parts",
            ("with many clients only",),
            (
                ("where each class is cut", "into four parts"),
                ("of each part: share,", "mean and covariance"),
            ),
            is_optional=True,
        ),
        ObserverRow(
            "pretrained-features",
            ("one answer",),
            (
                ("a centre, a scale and axes, from", "samples of the generator so far"),
                (
                    "of each class: the mean of what",
                    "public networks make of its images",
                ),
            ),
            onward="from here on nothing leaves a node",
            is_barrier=True,
        ),
        ObserverRow(
            "fit",
            ("minutes, on the server",),
            (
                ("nothing",),
                ("nothing: the generator is fitted", "to what was released"),
            ),
        ),
    ),
)

DRAWINGS = (WHO_SEES_WHAT, PHASES)


def svg(drawing: Drawing) -> str:
    """Returns a drawing as the text of an SVG file; the same text every time."""
    # From top to bottom: where a box begins follows from those above it.
    parts = []
    top = _MARGIN
    for column, head in zip(drawing.columns, drawing.heads, strict=True):
        parts.append(_text(_MARGIN + column, top + 12, head, "head"))
    top += _HEAD
    for row in drawing.rows:
        parts += _row(drawing, row, top)
        top += row.height
        if row is not drawing.rows[-1]:
            parts += _arrow(drawing, row, top)
            top += row.gap
    height = top + _MARGIN
    # In a title as well, for readers whom the picture is read to.
    title = escape(drawing.title)
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{title}" '
        f'width="{drawing.width}" height="{height}" '
        f'viewBox="0 0 {drawing.width} {height}">'
    )
    panel = f'<rect class="panel" width="{drawing.width}" height="{height}" rx="8"/>'
    head = [start, f"<title>{title}</title>", f"<style>\n{_STYLE}</style>", panel]
    return "\n".join([*head, *parts, "</svg>", ""])


def _row(drawing: Drawing, row: ObserverRow, top: int) -> list[str]:
    """Returns the elements of one box whose upper side is at `top`."""
    kind = "box"
    if row.is_optional:
        kind = "box optional"
    box = (
        f'<rect class="{kind}" x="{_MARGIN}" y="{top}" '
        f'width="{drawing.width - 2 * _MARGIN}" height="{row.height}" rx="6"/>'
    )
    first, *others = drawing.columns
    baseline = top + _PADDING + 12
    parts = [box, _text(_MARGIN + first, baseline, row.name, "name")]
    parts += _lines(_MARGIN + first, baseline + _LINE, row.note, "note")
    for column, cell in zip(others, row.cells, strict=True):
        parts += _lines(_MARGIN + column, baseline, cell, "cell")
    return parts


def _arrow(drawing: Drawing, row: ObserverRow, top: int) -> list[str]:
    """Returns the arrow below a box whose lower side is at `top`, and its label."""
    x = _MARGIN + drawing.columns[0] + 24
    end = top + row.gap - 3
    label = top + _ARROW // 2 + 3
    parts = []
    # Across the whole drawing, because nothing passes it but what the arrow says.
    if row.is_barrier:
        right = drawing.width - _MARGIN
        parts.append(f'<path class="barrier" d="M{_MARGIN} {label + 10}H{right}"/>')
    parts.append(f'<path class="arrow" d="M{x} {top + 3}V{end - 6}"/>')
    parts.append(f'<path class="tip" d="M{x - 5} {end - 7}H{x + 5}L{x} {end}Z"/>')
    if row.onward:
        parts.append(_text(x + 14, label, row.onward, "note"))
    return parts


def _lines(x: int, y: int, lines: Sequence[str], kind: str) -> list[str]:
    return [
        _text(x, y + number * _LINE, line, kind) for number, line in enumerate(lines)
    ]


def _text(x: int, y: int, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>'


def main() -> None:
    """Writes all drawings."""
    for drawing in DRAWINGS:
        path = FOLDER / drawing.file
        write_atomically(path, svg(drawing).encode())
        print(path)


if __name__ == "__main__":
    main()
