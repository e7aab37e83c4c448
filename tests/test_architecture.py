"""The bans, read from the syntax tree of every module; import-linter has the rest."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BANNED = {"pickle", "cloudpickle", "dill", "joblib", "torch.load", "torch.save"}
BANNED |= {"sys.path", "site.addsitedir"}
PACKAGES = ("fedgs", "clients", "server", "experiments")
SOURCES = [p.relative_to(ROOT) for d in PACKAGES for p in (ROOT / d).rglob("*.py")]


def imports(tree: ast.Module) -> dict[str, str]:
    """Returns the dotted names that a file imports, by the names that it gives them."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {a.asname or a.name: prefix + a.name for a in node.names}
    return found


def among(names: set[str], parents: set[str]) -> set[str]:
    return {n for n in names for p in parents if n == p or n.startswith(f"{p}.")}


def reads_weights_only(node: ast.AST) -> bool:
    """Whether it is a call that reads tensors of a pickle and executes none of it."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "torch.load":
        return False
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    return given.get("weights_only") == "True"


@pytest.mark.parametrize("source", sorted(SOURCES), ids=str)
def test_no_pickle_and_no_sys_path(source):
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    names = imports(tree)
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    harmless = [n.func for n in ast.walk(tree) if reads_weights_only(n)]
    used = [ast.unparse(n) for n in nodes if n not in harmless]
    parts = [attribute.partition(".") for attribute in used]
    full = {names.get(head, head) + dot + rest for head, dot, rest in parts}
    assert not among(full | {*names.values()}, BANNED)


# ------------------------------------------------------------------ names


def public_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the classes and upper-case constants that a module defines, with kind."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield "classes", node.name
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id.isupper():
                yield "constants", target.id


@pytest.mark.parametrize(
    ("kind", "most"), [("classes", 2), ("constants", 15), ("modules", 3)]
)
def test_a_public_name_has_one_meaning(kind, most):
    """Method objects are all METHOD, and a page has the name of its method's file."""
    defined: dict[str, set[Path]] = defaultdict(set)
    for source in SOURCES:
        if kind == "modules":
            defined[source.stem].add(source)
            continue
        tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
        for found, name in public_names(tree):
            if found == kind and not name.startswith("_"):
                defined[name].add(source)
    own = {"__init__", "__main__"}
    twice = sorted(n for n, places in defined.items() if len(places) > 1)
    assert len({*twice} - own) <= most, twice
