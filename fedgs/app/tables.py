"""One form of table: on the terminal, in Markdown, on the report's page; and text."""

import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

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
        shown = rich_table.Table()
        for place, name in enumerate(self.head):
            # Numbers stand with their digits below each other.
            if self.numeric and place > 0:
                shown.add_column(name, justify="right")
            else:
                shown.add_column(name, justify="left")
        for row in self.rows:
            shown.add_row(*map(escape, row))  # an interval in brackets is no markup
        console = Console()
        print(folded(self.caption, console.file))  # a title is as narrow as its table
        console.print(shown)
        if self.note:
            print(folded(self.note, console.file))

    def markdown(self) -> str:
        """Returns the head and the rows as Markdown lines."""
        ruler = "|---" * len(self.head) + "|"
        head, *rows = [f"| {' | '.join(row)} |" for row in (self.head, *self.rows)]
        lines = [head, ruler, *rows]
        return "\n".join(lines) + "\n"


def folded(text: str, stream: IO[str]) -> str:
    """Returns a text as a stream shows it: broken between words on a terminal only.

    Elsewhere a program may read it, so a line stays a line. A line that begins with a
    name and blanks goes on below what it says.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines: list[str] = []
    for line in text.split("\n"):
        # Only in its beginning: two blanks further on are no label.
        label = re.match(r"\S+( \S+)* {2,}", line[:20])
        if label:
            indent = " " * len(label[0])
        else:
            indent = ""
        wrapped = textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            # Whole paths and flags, which somebody may copy.
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += wrapped or [""]  # of an empty line `wrap` makes none
    return "\n".join(lines)


def is_number(value: Any) -> bool:
    """Tells whether a JSON value is a number."""
    # In Python a bool is an int, too.
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell(value: Any) -> str:
    """Returns a number as a cell of a table; a dash for what is none."""
    if not is_number(value):
        return "–"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}"
