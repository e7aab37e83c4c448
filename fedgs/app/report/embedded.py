"""Pictures of the report, embedded in the page."""

import base64
from dataclasses import dataclass

from fedgs.app.report.run import Grid, RunFacts


@dataclass(frozen=True)
class Picture:
    """A picture of the page.

    Attributes:
        content: of a PNG or SVG file.
        alternative: what a reader who does not see it should know.
        caption: below it; "" for none.
    """

    content: bytes
    alternative: str
    caption: str = ""

    @property
    def address(self) -> str:
        """The picture as an address that holds it."""
        kind = "png" if self.content.startswith(b"\x89PNG") else "svg+xml"
        return f"data:image/{kind};base64,{base64.b64encode(self.content).decode()}"


def picture_of(facts: RunFacts, grid: Grid, caption: str) -> Picture:
    """Returns a grid of a run; the caption goes on with its round."""
    step = facts.config.image_size + 2
    rows, columns = grid.height // step, grid.width // step
    what = f"{rows} rows of {columns} generated images of {facts.name}"
    caption = f"{caption} {facts.unit_of_time} {grid.round}"
    what += f", one column for each class from 0 to {columns - 1}"
    caption += ", one column per class"
    what += f", after {facts.unit_of_time} {grid.round}"
    return Picture(grid.png, what, caption)
