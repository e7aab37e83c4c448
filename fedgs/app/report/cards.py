"""The form of every page of the report: sections of cards, whatever they tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedgs.app.report.embedded import Picture
from fedgs.app.tables import Table


@dataclass(frozen=True)
class Card:
    """One block of a section; what is empty is not shown.

    Attributes:
        title: of the block; of a folded one what unfolds it.
        answer: in large letters.
        pictures: beside the words, or above them on a narrow screen.
        texts: paragraphs.
        facts: short values by their names.
        tables: below the texts and facts.
        items: a list below them.
        commands: of a shell.
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
        return has_rows or bool(self.kind) or self.is_folded or len(self.pictures) > 1


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
