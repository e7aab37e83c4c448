"""The shape of the repository: names that say something, no stray or large files."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fedgs", "clients", "server", "experiments")


def test_modules_are_named_after_what_they_hold():
    modules = [m.relative_to(ROOT) for p in PACKAGES for m in (ROOT / p).rglob("*.py")]
    words = {word for module in modules for word in module.with_suffix("").parts}
    assert words.isdisjoint({"utils", "helpers", "common"})


def test_every_test_file_is_collected():
    tests, support = ROOT / "tests", ROOT / "tests" / "support"
    paths = {*tests.rglob("*.py")} - {*support.glob("*.py"), tests / "conftest.py"}
    assert {path.name for path in paths if not path.name.startswith("test_")} == set()


def test_no_committed_file_is_above_500_kb():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    # But for the weights that come with the package.
    names = {*listed.split("\0")} - {"", "fedgs/gan/fonts.json"}
    files = [ROOT / name for name in names]
    assert not [f for f in files if f.is_file() and f.stat().st_size > 500_000]
