"""docs/deployment.md and the systemd units: every command exists."""

import shlex
from pathlib import Path

import click
import pytest
import typer

from fedgs.app.cli.deploy_flags import app
from fedgs.process import STOP_SECONDS
from server.launch.superlink import GRACE_SECONDS
from server.launch.supervisor import LEAVE_SECONDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "deployment.md").read_text()
UNITS = sorted((DOCS / "systemd").glob("*.service"))


def documented() -> list[str]:
    """Returns the `fedgs deploy` lines of the page and of the units."""
    text = PAGE.replace("\\\n", " ")
    lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
    found = [line for line in lines if line.startswith("fedgs deploy ")]
    for unit in UNITS:
        for line in unit.read_text().splitlines():
            if line.startswith("ExecStart="):
                found.append(line[line.index("fedgs deploy ") :].replace("%i", "a"))
    return found


@pytest.mark.parametrize("line", documented())
def test_documented_command_is_understood(line):
    _, _, name, *arguments = shlex.split(line)
    group = typer.main.get_command(app)
    command = group.get_command(None, name)  # type: ignore[attr-defined]
    assert command is not None, name
    if isinstance(command, click.Group):  # of methods
        name, *arguments = arguments
        command = command.get_command(click.Context(command), name)
    context = command.make_context(name, arguments)  # raises for an unknown flag
    assert context.command is command


def test_page_shows_every_command():
    names = {line.split()[2] for line in documented()}
    assert names == {"certs", "server", "client", "submit", "status"}


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Returns the settings of a unit; one may be given more than once."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_server_unit_waits_for_runs_that_commit():
    unit = settings_of(DOCS / "systemd" / "fedgs-server.service")
    assert STOP_SECONDS + LEAVE_SECONDS < 30 < float(*unit["TimeoutStopSec"])
    assert GRACE_SECONDS < LEAVE_SECONDS
    assert unit["KillMode"] == ["mixed"]  # runs commit before they are signalled


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_unit_restarts_unless_the_input_is_bad_and_keeps_its_state_private(unit):
    found = settings_of(unit)
    assert found["Restart"] == ["always"]
    assert found["RestartPreventExitStatus"] == ["2"]
    assert found["StateDirectoryMode"] == ["0700"]
    assert f"--state-dir /var/lib/{found['StateDirectory'][0]}" in unit.read_text()
