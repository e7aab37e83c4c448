"""Pictures of the report: embedded in the page, and as PNG files beside it."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from experiments.report.run import Grid, RunFacts

GAP = 12  # pixels between two grids
GREY = (128, 128, 128)


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
        is_png = self.content.startswith(b"\x89PNG")
        return data_uri(self.content, "png" if is_png else "svg+xml")


def data_uri(picture: bytes, kind: str = "png") -> str:
    """Returns a picture as an address that holds it."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def picture_of(facts: RunFacts, grid: Grid, caption: str) -> Picture:
    """Returns a grid of a run; the caption goes on with its round."""
    step = facts.config.image_size + 2
    rows, columns = grid.height // step, grid.width // step
    what = f"{rows} rows of {columns} generated images of {facts.name}"
    caption = f"{caption} {facts.unit_of_time} {grid.round}"
    if facts.config.conditional:
        what += f", one column for each class from 0 to {columns - 1}"
        caption += ", one column per class"
    what += f", after {facts.unit_of_time} {grid.round}"
    return Picture(grid.png, what, caption)


def side_by_side(runs: Sequence[RunFacts]) -> bytes:
    """Returns one PNG with the last grid of every run, left to right.

    Privacy: post-processing of DP output.
    """
    grids = [Image.open(io.BytesIO(f.grids[-1].png)).convert("RGB") for f in runs]
    width = sum(grid.width for grid in grids) + GAP * (len(grids) - 1)
    whole = Image.new("RGB", (width, max(grid.height for grid in grids)), GREY)
    left = 0
    for grid in grids:
        whole.paste(grid, (left, 0))
        left += grid.width + GAP
    content = io.BytesIO()
    whole.save(content, format="PNG")
    return content.getvalue()


def png_files(runs: Sequence[RunFacts], verdicts: dict[str, bytes]) -> dict[str, bytes]:
    """Returns the pictures that lie beside the page, by file name.

    Privacy: post-processing of DP output.

    Args:
        runs: each with its last grid.
        verdicts: name of a debug folder to its picture of both cohorts.
    """
    files = {f"{f.name}-round-{f.grids[-1].round}.png": f.grids[-1].png for f in runs}
    if len(runs) > 1 and not verdicts:
        files["side-by-side.png"] = side_by_side(runs)
    return files | {f"{name}-diagnosis.png": png for name, png in verdicts.items()}
