"""Measures the code: `python tests/support/code_measures.py [FOLDER]`, two tables.

Code lines are lines with a token that is no comment and no docstring. A circle is a
set of modules that import each other, imports inside functions and for types included.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("fedgs", "clients", "server", "experiments", "tests")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
HAS_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file: its tree, its code lines and its whole-line comments, by number."""

    tree: ast.Module
    code: frozenset[int]
    num_comments: int


def read(path: Path) -> Module:
    """Reads and measures one file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree):
        if isinstance(node, HAS_DOCSTRING) and ast.get_docstring(node) is not None:
            code -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    comments = sum(
        token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        for token in tokens
    )
    return Module(tree, frozenset(code), comments)


def longest_function(name: str, module: Module) -> tuple[int, str]:
    """Returns the code lines and the name of a module's longest function."""
    found = [
        (len(module.code & {*range(n.lineno, (n.end_lineno or 0) + 1)}), n.name)
        for n in ast.walk(module.tree)
        if isinstance(n, FUNCTION)
    ]
    lines, function = max(found, default=(0, ""))
    return lines, f"{name}.{function}"


def imported(module: Module, names: set[str]) -> set[str]:
    """Returns those of the names that a module imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & names) or {node.module}
    return found & names


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Returns the sets of two or more modules that import each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [*imports[start]]
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += imports[name]
        return seen

    reach = {name: reached(name) for name in imports}
    found: list[set[str]] = []
    for name in imports:
        circle = {other for other in reach[name] if name in reach[other]} | {name}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def rows(root: Path) -> Iterator[tuple[object, ...]]:
    """Yields one row for each package."""
    read_modules: dict[str, Module] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            read_modules[name.removesuffix(".__init__")] = read(path)
    names = {*read_modules}
    imports = {name: imported(m, names) for name, m in read_modules.items()}
    for package in PACKAGES:
        own = {n: m for n, m in read_modules.items() if n.split(".")[0] == package}
        code = sum(len(module.code) for module in own.values())
        comments = sum(module.num_comments for module in own.values())
        in_circles = circles({n: imports[n] & {*own} for n in own})
        folders: dict[Path, int] = {}
        for path in (root / package).rglob("*.py"):
            folders[path.parent] = folders.get(path.parent, 0) + 1
        flat = len([*(root / package).glob("*.py")])
        longest = max(longest_function(n, m) for n, m in own.items())
        yield (
            package,
            code,
            len(own),
            flat,
            max(folders.values()),
            len(in_circles),
            f"{100 * comments / code:.1f}",
            f"{longest[0]} (`{longest[1]}`)",
        )


def figures(root: Path) -> Iterator[tuple[str, object]]:
    """Yields what a newcomer has to hold: lines, settings, flags, names, prose.

    A knob is a setting, a `flag` of a request or a method, or an option of a command.
    """
    paths = [p for name in PACKAGES[:-1] for p in sorted((root / name).rglob("*.py"))]
    modules = [read(path) for path in paths]
    calls = Counter(
        node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
    )
    yield "product code lines", sum(len(module.code) for module in modules)
    for folder in ("tests", "tests/support"):
        found = [read(path) for path in (root / folder).rglob("*.py")]
        yield f"{folder} code lines", sum(len(module.code) for module in found)
    yield "settings", calls["option"]
    yield "knobs", sum(calls[n] for n in ("option", "flag", "Option", "Argument"))
    names = Counter(path.stem for path in paths if path.stem != "__init__")
    often = sorted(f"{name} {count}" for name, count in names.items() if count > 2)
    yield "module names used more than twice", ", ".join(often) or "none"
    pages = [path.read_text() for path in (root / "docs").rglob("*.md")]
    yield "pages of docs", len(pages)
    yield "words of docs", sum(len(page.split()) for page in pages)
    readme = (root / "README.md").read_text()
    yield "README: lines, words", f"{readme.count(chr(10))}, {len(readme.split())}"


def main() -> None:
    """Prints both tables in Markdown."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    print("| package | code lines | modules | flat | largest room | circles |", end="")
    print(" comments per 100 | longest function |")
    print("|---" * 8 + "|")
    for row in rows(root):
        print("|", " | ".join(map(str, row)), "|")
    print("\n| figure | |\n|---|---|")
    for name, value in figures(root):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
