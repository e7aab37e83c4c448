"""The bans, read from the syntax tree of every module; import-linter has the rest."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BANNED = {"pickle", "cloudpickle", "dill", "joblib", "torch.load", "torch.save"}
BANNED |= {"sys.path", "site.addsitedir"}
PACKAGES = ("fedgs", "clients", "server", "experiments")
SOURCES = [p.relative_to(ROOT) for d in PACKAGES for p in (ROOT / d).rglob("*.py")]


def nodes(source: Path | str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))))


def imports(source: Path | str) -> dict[str, str]:
    """The dotted names that a file imports, by the names that it gives them."""
    found: dict[str, str] = {}
    for node in nodes(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {a.asname or a.name: prefix + a.name for a in node.names}
    return found


def among(names: set[str], parents: set[str]) -> set[str]:
    return {n for n in names for p in parents if n == p or n.startswith(f"{p}.")}


@pytest.mark.parametrize("source", sorted(SOURCES), ids=str)
def test_no_pickle_and_no_sys_path(source):
    names = imports(source)
    used = [ast.unparse(n) for n in nodes(source) if isinstance(n, ast.Attribute)]
    parts = [attribute.partition(".") for attribute in used]
    full = {names.get(head, head) + dot + rest for head, dot, rest in parts}
    assert not among(full | {*names.values()}, BANNED)
