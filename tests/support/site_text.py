"""What people read, as the site shows it: links, anchors, code and words of each page.

A page is rendered by the Markdown that mkdocs uses, with the same headings' anchors, so
it says what a reader's browser would get. Notebooks are read cell by cell.
"""

import json
import re
import shlex
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import markdown

from settings_page import PAGE as SETTINGS_PAGE
from settings_page import page as settings_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXTENSIONS = ["attr_list", "fenced_code", "tables", "toc"]
OUTSIDE = ("http://", "https://", "mailto:", "data:")
# A word in capitals stands for what a reader puts there: RUN, DATA, E. A number fits
# wherever a path, a text or a number is expected.
PLACEHOLDER = re.compile(r"^[A-Z][A-Z0-9_]*$")
STANDS_FOR = "1"


@dataclass
class Page(HTMLParser):
    """One page. All lists are in the order of the text.

    Attributes:
        path: of its source; the generated page of settings has one, too.
        anchors: what a link to this page may name after "#".
        targets: of its links and pictures.
        blocks: its blocks of code.
        inline: code inside sentences.
        text: all other words.
    """

    path: Path
    anchors: set[str] = field(default_factory=set)
    targets: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    inline: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes anchors and targets, and notes that code begins."""
        found = dict(attrs)
        anchor = found.get("id")
        if anchor:
            self.anchors.add(anchor)
        target = found.get("href") or found.get("src")
        if target:
            self.targets.append(target)
        if tag in ("pre", "code"):
            self._open.append(tag)
            if tag == "code":
                place = self.blocks if "pre" in self._open else self.inline
                place.append("")

    def handle_endtag(self, tag: str) -> None:
        """Notes that code ends."""
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        """Adds words to what is open."""
        if "code" not in self._open:
            self.text.append(data)
        elif "pre" in self._open:
            self.blocks[-1] += data
        else:
            self.inline[-1] += data

    def commands(self, program: str) -> list[list[str]]:
        """Returns the words of each line of its blocks that calls a program."""
        lines = "\n".join(self.blocks).replace("\\\n", " ").splitlines()
        found = [words_of(line, program) for line in lines]
        return [words for words in found if words]


def words_of(line: str, program: str) -> list[str]:
    """Returns what a line of a shell gives a program; [] if it calls another one."""
    start = re.match(rf"\s*[$!]?\s*([\w./-]*/)?{program} ", line)
    if start is None:
        return []
    # A comment or another command may follow on the same line.
    rest = re.split(r"\s#|\s[|>&]|;", line[start.end() :])[0]
    words = shlex.split(rest)
    return [STANDS_FOR if PLACEHOLDER.match(word) else word for word in words]


def pages() -> list[Page]:
    """Returns the pages of the site, and those of the repository beside it."""
    found = [_page(path) for path in sorted(DOCS.rglob("*.md"))]
    found += [_notebook(path) for path in sorted(DOCS.rglob("*.ipynb"))]
    for name in ("README.md", "CONTRIBUTING.md", "experiments/README.md"):
        found.append(_page(ROOT / name))
    found.append(_rendered(DOCS / SETTINGS_PAGE, settings_page()))
    return found


def _page(path: Path) -> Page:
    return _rendered(path, path.read_text())


def _rendered(path: Path, text: str) -> Page:
    page = Page(path)
    page.feed(markdown.markdown(text, extensions=EXTENSIONS))
    return page


def _notebook(path: Path) -> Page:
    """Reads a notebook: its text as a page, its code as one block for each cell."""
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    page = _rendered(path, "\n\n".join(texts))
    page.blocks += ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    return page
