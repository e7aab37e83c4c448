"""Measures the code: `python tests/support/code_measures.py [FOLDER]`, two tables.

Code lines are lines with a token that is no comment and no docstring. A circle is a
set of modules that import each other, imports inside functions and for types included.
"""

import ast
import dataclasses
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx  # comes with torch
from typer.testing import CliRunner

from fedgs.app.cli.main import app
from fedgs.config.run_config import RunConfig

PACKAGES = ("fedgs", "clients", "server", "experiments", "tests")
HEAD = ["package", "code lines", "modules", "flat", "largest room", "circles"]
HEAD += ["comments per 100", "longest function"]
READING_ORDER = ("fedgs.gs_wgan", "fedgs.methods.base", "fedgs.methods.gs_wgan")
READING_ORDER += ("fedgs.mechanism.sanitizer", "fedgs.round.run", "fedgs.round.node")
READING_ORDER += ("server.strategy", "fedgs.privacy.accountant")
REQUEST = re.compile(r"class Request\b")
ASKED = re.compile(r"getattr\(method|NOT_GS_WGAN|isinstance\(.*StageRequest")


@dataclasses.dataclass(frozen=True)
class Module:
    """One file: its tree, its code lines by number, and its whole-line comments."""

    path: Path
    tree: ast.Module
    code: set[int]
    num_comments: int


def lines_of(node: ast.stmt) -> set[int]:
    return {*range(node.lineno, (node.end_lineno or 0) + 1)}


def read(path: Path) -> Module:
    """Reads and measures one file."""
    text = path.read_text(encoding="utf-8")
    tree, code, num_comments = ast.parse(text), set[int](), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            num_comments += token.line.lstrip().startswith("#")
        elif token.string.strip():
            code |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= lines_of(node) if isinstance(node.value.value, str) else set()
    return Module(path, tree, code, num_comments)


def read_all(root: Path, package: str) -> dict[str, Module]:
    """Reads a package's files, by the dotted names of their modules."""
    paths = {p.relative_to(root): p for p in sorted((root / package).rglob("*.py"))}
    names = {".".join(part.with_suffix("").parts): p for part, p in paths.items()}
    return {name.removesuffix(".__init__"): read(p) for name, p in names.items()}


def imports(tree: ast.Module) -> dict[str, str]:
    """Returns the dotted names that a file imports, by the names that it gives them."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {a.asname or a.name: prefix + a.name for a in node.names}
    return found


def circles(modules: dict[str, Module]) -> list[set[str]]:
    """Returns the sets of two or more modules that import each other."""
    graph = networkx.DiGraph()
    for name, module in modules.items():
        for full in imports(module.tree).values():
            graph.add_edge(name, full if full in modules else full.rpartition(".")[0])
    return [c for c in networkx.strongly_connected_components(graph) if len(c) > 1]


def row(root: Path, package: str, modules: dict[str, Module]) -> list[object]:
    """Returns the cells of a package."""
    flat, code = len([*(root / package).glob("*.py")]), code_lines(modules)
    room = max(Counter(m.path.parent for m in modules.values()).values())
    comments = 100 * sum(m.num_comments for m in modules.values()) / code
    lines, name = max(
        (len(module.code & lines_of(node)), f"{name}.{node.name}")
        for name, module in modules.items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    sizes = [code, len(modules), flat, room, len(circles(modules))]
    return [package, *sizes, f"{comments:.1f}", f"{lines} (`{name}`)"]


def code_lines(modules: dict[str, Module]) -> int:
    return sum(len(module.code) for module in modules.values())


def figures(
    root: Path, product: dict[str, Module], tests: dict[str, Module]
) -> Iterator[tuple[str, object]]:
    """Yields what a newcomer has to hold: lines, settings, flags, names, prose.

    A knob is a setting, a `flag` of a request or a method, or an option of a command.
    """
    nodes = [node for m in product.values() for node in ast.walk(m.tree)]
    called = [ast.unparse(n.func) for n in nodes if isinstance(n, ast.Call)]
    calls = Counter(name.rpartition(".")[2] for name in called)
    yield "product code lines", code_lines(product)
    yield "tests code lines", code_lines(tests)
    support = {n: m for n, m in tests.items() if n.startswith("tests.support.")}
    yield "tests/support code lines", code_lines(support)
    yield "settings", calls["option"]
    yield "knobs", sum(calls[n] for n in ("option", "flag", "Option", "Argument"))
    names = Counter(m.path.stem for m in product.values())
    del names["__init__"]
    yield "module names used twice", sum(count > 1 for count in names.values())
    yield "fields of RunConfig", len(dataclasses.fields(RunConfig))
    words = CliRunner().invoke(app, ["train", "--help"]).output.splitlines()
    yield "lines of `fedgs train --help` with a flag", sum("--" in w for w in words)
    largest = max(READING_ORDER, key=lambda name: len(product[name].code))
    yield f"largest of the reading order, {largest}", len(product[largest].code)
    text = {name: module.path.read_text() for name, module in product.items()}
    asked = sum(len(ASKED.findall(t)) for t in text.values())
    yield "questions to a method's name or type", asked
    yield "classes `Request`", sum(len(REQUEST.findall(t)) for t in text.values())
    known = [n for n, t in text.items() if re.search("1[.]41|flower_1_41|KNOWN_VER", t)]
    yield "modules that know Flower's version", len(known)
    raised = (m.path.read_text().count("raises(UserError") for m in tests.values())
    yield "tests with `raises(UserError`", sum(raised)
    pages = [path.read_text() for path in (root / "docs").rglob("*.md")]
    yield "pages of docs", len(pages)
    yield "words of docs", sum(len(page.split()) for page in pages)
    own = [len(path.read_text().split()) for path in (root / "docs").glob("*.md")]
    yield "of docs/*.md, without reference and tables", f"{sum(own)} in {len(own)}"
    changes = len((root / "CHANGELOG.md").read_text().split())
    yield "words of the changelog", changes
    readme = (root / "README.md").read_text()
    yield "README: lines, words", f"{readme.count(chr(10))}, {len(readme.split())}"


def main(root: Path) -> None:
    """Prints both tables in Markdown."""
    packages = {name: read_all(root, name) for name in PACKAGES}
    *product, tests = packages.values()
    every = {name: module for modules in product for name, module in modules.items()}
    found = [row(root, name, modules) for name, modules in packages.items()]
    print_table(HEAD, found)
    print_table(["figure", "now"], figures(root, every, tests))


def print_table(head: list[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table in Markdown."""
    for cells in (head, ["---"] * len(head), *rows):
        print("|", " | ".join(map(str, cells)), "|")
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
