"""The shape of the repository: names that say something, no stray or large files."""

import io
import re
import subprocess
import tomllib
import warnings
import zipfile
from importlib import import_module
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


@pytest.fixture
def committed() -> dict[str, Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    files = {name: ROOT / name for name in listed.split("\0")}
    return {name: path for name, path in files.items() if path.is_file()}


def test_no_committed_file_is_above_500_kb(committed):
    assert not [p for p in committed.values() if p.stat().st_size > 500_000]


def test_the_lock_has_what_pyproject_asks_for_from_public_addresses():
    lock = (ROOT / "uv.lock").read_text()
    packages = tomllib.loads(lock)["package"]
    hosts = {word.split("/")[2] for word in lock.split('"') if "://" in word}
    assert hosts == {"pypi.org", "files.pythonhosted.org"}
    (own,) = [package for package in packages if package["name"] == "fedgs"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {re.split(r"[\[<>=]", text)[0] for text in project["dependencies"]}
    assert {one["name"] for one in own["dependencies"]} == asked
    extras = own["optional-dependencies"]
    assert extras.keys() == project["optional-dependencies"].keys()
    assert all("version" in p for p in packages if p is not own)


def test_flower_hub_takes_this_app(committed):
    """By Flower's own checks before it publishes, and of the bundle that it builds."""
    publish = import_module("flwr.cli.app_cmd.publish")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        built, bundle = import_module("flwr.cli.build").build_fab_from_files(committed)
        files = publish.filter_paths_for_publish(committed)
    assert (bundle.fab_format_version, bundle.flwr_version_min) == (1, "1.41")
    assert {"pyproject.toml", "README.md", "LICENSE"} <= files.keys()
    read = {name for name in committed if name.startswith("fedgs/") and ".json" in name}
    assert len(read) == 6  # by the program
    assert read <= set(zipfile.ZipFile(io.BytesIO(built)).namelist())
    publish._validate_files(list(files.values()))  # number, sizes, UTF-8
    app = tomllib.loads(committed["pyproject.toml"].read_text())
    publish._validate_description(app["project"]["description"])
    keys = app["tool"]["flwr"]["app"]["config"]
    assert not [key for key in keys if key != key.lower() or "_" in key]  # kebab-case
