"""The import rule and the bans, read from the syntax tree of every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {  # experiments -> server, clients -> fedgs -> torch, numpy, scipy
    "fedgs": {"flwr", "ray", "clients", "server", "experiments"},
    "clients": {"server", "experiments"},
    "server": {"clients", "experiments"},
    "experiments": set[str](),
}
TORCH_FREE = [
    *(
        f"fedgs/config/{name}.py"
        for name in (
            *("checks", "conditions", "fields", "hosting", "run_config", "settings"),
        )
    ),
    *(
        f"fedgs/privacy/{name}.py"
        for name in (
            *("accounting", "amplification", "budget", "exposure", "gaussian"),
            *("ledger", "oracle", "participation", "plan"),
        )
    ),
    "fedgs/files.py",
]
BANNED = {"pickle", "cloudpickle", "dill", "joblib", "torch.load", "torch.save"}
BANNED |= {"sys.path", "site.addsitedir"}
SOURCES = [p.relative_to(ROOT) for d in FORBIDDEN for p in (ROOT / d).rglob("*.py")]
each_source = pytest.mark.parametrize("source", sorted(SOURCES), ids=str)


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


@each_source
def test_imports_point_one_way(source):
    wrong = among({*imports(source).values()}, FORBIDDEN[source.parts[0]])
    if source == Path("fedgs/__main__.py"):
        wrong -= among(wrong, {"experiments.cli.main"})
    assert not wrong


@pytest.mark.parametrize("source", TORCH_FREE)
def test_privacy_arithmetic_needs_no_torch(source):
    assert not among({*imports(source).values()}, {"torch", "torchvision"})


@each_source
def test_no_pickle_and_no_sys_path(source):
    names = imports(source)
    used = [ast.unparse(n) for n in nodes(source) if isinstance(n, ast.Attribute)]
    parts = [attribute.partition(".") for attribute in used]
    full = {names.get(head, head) + dot + rest for head, dot, rest in parts}
    assert not among(full | {*names.values()}, BANNED)
