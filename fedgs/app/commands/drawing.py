"""Figures of the commands: made without a window, written as PNG."""

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of a size in inches.

    Raises:
        ImportError: matplotlib is missing; only the commands that draw need it.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def to_png(figure: "Figure") -> bytes:
    """Returns the content of a PNG file."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
