"""One form of table: on the terminal, in Markdown, and on the report's page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names the row.

    Attributes:
        caption: what it shows.
        head: names of the columns.
        rows: as many cells each as there are columns.
        note: below the table; "" for none.
        numeric: the columns after the first hold numbers.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    numeric: bool = True

    def show(self) -> None:
        """Prints the table and its note."""
        shown = rich_table.Table(title=self.caption, title_justify="left")
        for place, name in enumerate(self.head):
            is_number = place > 0 and self.numeric
            shown.add_column(name, justify="right" if is_number else "left")
        for row in self.rows:
            shown.add_row(*map(escape, row))  # an interval in brackets is no markup
        console = Console()
        console.print(shown)
        if self.note:
            console.print(self.note, highlight=False, soft_wrap=True, markup=False)

    def markdown(self) -> str:
        """Returns the head and the rows as Markdown lines."""
        ruler = "|---" * len(self.head) + "|"
        lines = [f"| {' | '.join(cells)} |" for cells in (self.head, *self.rows)]
        return "\n".join([lines[0], ruler, *lines[1:]]) + "\n"


def is_number(value: Any) -> bool:
    """Tells whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell(value: Any) -> str:
    """Returns a number as a cell of a table; a dash for what is none."""
    if not is_number(value):
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
