"""docs/deployment.md, the systemd units and compose.yaml: every command exists."""

import re
import shlex
from pathlib import Path

import click
import pytest
import typer
import yaml

from fedgs.app.cli.deploy_flags import app
from fedgs.process import STOP_SECONDS
from server.launch.superlink import GRACE_SECONDS
from server.launch.supervisor import LEAVE_SECONDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "deployment.md").read_text()
UNITS = sorted((DOCS / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((DOCS.parent / "compose.yaml").read_text())


def documented() -> list[str]:
    """Returns the `fedgs deploy` lines of page, units and compose.yaml."""
    text = PAGE.replace("\\\n", " ")
    lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
    found = [line for line in lines if line.startswith("fedgs deploy ")]
    for unit in UNITS:
        for line in unit.read_text().splitlines():
            if line.startswith("ExecStart="):
                found.append(line[line.index("fedgs deploy ") :].replace("%i", "a"))
    head = (DOCS.parent / "compose.yaml").read_text().splitlines()
    found += [line.partition("exec server ")[2] for line in head if "submit" in line]
    return found + [service["command"] for service in COMPOSE["services"].values()]


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
    # Some stand inside a sentence or a table.
    inside = re.findall(r"`fedgs deploy ([a-z-]+)", PAGE)
    names = {line.split()[2] for line in documented()} | {*inside}
    with_runs = {"submit", "debug", "select-clients", "status"}
    assert names == {"certs", "server", "client", *with_runs}


def test_compose_gives_each_client_its_own_key_state_and_the_servers_name():
    services = COMPOSE["services"]
    clients = {n: s for n, s in services.items() if "deploy client" in s["command"]}
    assert len(clients) == 3
    words = shlex.split(services["certs"]["command"])
    for name, client in clients.items():
        start = f"fedgs deploy client {name} --server server:8000 --ca /certs/ca.crt"
        assert client["command"].startswith(f"{start} --key /certs/clients/{name}.key")
        assert f"{name}:/state" in client["volumes"]
        assert f"--client {name}" in " ".join(words)
    assert COMPOSE["volumes"].keys() == {"certs", "server", *clients}
    assert {"server", "localhost"} <= set(words)  # for clients, and for `submit`
    for service in [services["server"], *clients.values()]:
        assert int(service["stop_grace_period"].rstrip("s")) > STOP_SECONDS + 5
        assert service["restart"].startswith("on-failure:")  # bounded


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
