"""The form of every page of the report: sections of cards, whatever they tell."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedgs.app.report.run import GRID_PADDING, Grid, RunFacts
from fedgs.app.tables import Table


@dataclass(frozen=True)
class Picture:
    """A picture of the page.

    Attributes:
        content: the content of a PNG or SVG file.
        alternative: what a reader who does not see it should know.
        caption: below it; "" for none.
    """

    content: bytes
    alternative: str
    caption: str = ""

    @property
    def address(self) -> str:
        """The picture as an address that holds it."""
        kind = "svg+xml"
        if self.content.startswith(b"\x89PNG"):
            kind = "png"
        # The page has to work without a network, so it holds its pictures itself.
        encoded = base64.b64encode(self.content).decode()
        return f"data:image/{kind};base64,{encoded}"


def picture_of(facts: RunFacts, grid: Grid, caption: str) -> Picture:
    """Returns a grid of a run; the caption goes on with its round."""
    step = facts.config.image_size + GRID_PADDING
    rows = grid.height // step
    columns = grid.width // step
    when = f"{facts.unit_of_time} {grid.round}"
    # For a reader who cannot see the picture: what it shows, not what it looks like,
    # which nobody has judged.
    alternative = (
        f"{rows} rows of {columns} generated images of {facts.name}, one column for "
        f"each class from 0 to {columns - 1}, after {when}"
    )
    caption = f"{caption} {when}, one column per class"
    return Picture(grid.png, alternative, caption)


@dataclass(frozen=True)
class Card:
    """One block of a section; what is empty is not shown.

    Attributes:
        title: the title of the block; of a folded one what unfolds it.
        answer: in large letters.
        pictures: beside the words, or above them on a narrow screen.
        texts: paragraphs.
        facts: short values by their names.
        tables: below the texts and facts.
        items: a list below them.
        commands: the commands of a shell.
        kind: good, unsure or bad gives the block a colour.
        is_folded: whether the reader unfolds it.
    """

    title: str = ""
    answer: str = ""
    pictures: Sequence[Picture] = ()
    texts: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    items: Sequence[str] = ()
    commands: Sequence[str] = ()
    kind: str = ""
    is_folded: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether no other card stands beside it."""
        has_rows = bool(self.tables or self.items or self.commands)
        is_answer = bool(self.kind)
        has_strip = len(self.pictures) > 1
        return has_rows or is_answer or self.is_folded or has_strip


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        key: names it in links.
        title: in the navigation and above it.
        cards: none, and the section is left out.
        texts: paragraphs above the cards.
    """

    key: str
    title: str
    cards: Sequence[Card]
    texts: Sequence[str] = ()
