"""The bans, read from the syntax tree of every module; import-linter has the rest."""

import ast
from pathlib import Path

import pytest

from code_measures import imports

ROOT = Path(__file__).resolve().parent.parent
BANNED = {"pickle", "cloudpickle", "dill", "joblib", "torch.load", "torch.save"}
BANNED |= {"sys.path", "site.addsitedir"}
PACKAGES = ("fedgs", "clients", "server", "experiments")
SOURCES = [p.relative_to(ROOT) for d in PACKAGES for p in (ROOT / d).rglob("*.py")]


def among(names: set[str], parents: set[str]) -> set[str]:
    return {n for n in names for p in parents if n == p or n.startswith(f"{p}.")}


@pytest.mark.parametrize("source", sorted(SOURCES), ids=str)
def test_no_pickle_and_no_sys_path(source):
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    names = imports(tree)
    used = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    parts = [attribute.partition(".") for attribute in used]
    full = {names.get(head, head) + dot + rest for head, dot, rest in parts}
    assert not among(full | {*names.values()}, BANNED)
