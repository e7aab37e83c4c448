"""Commands that other packages bring: entry points of the group `fedgs.commands`.

An entry point is a function, which becomes a command of its name, or a `typer.Typer`,
which becomes a command with subcommands. fedgs imports none of these packages itself.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import typer

from fedgs.errors import UserError

GROUP = "fedgs.commands"


def add_commands(app: typer.Typer, groups: Mapping[str, typer.Typer]) -> None:
    """Adds the commands of all installed packages to a command line, by their names.

    Args:
        app: the command line.
        groups: its commands that have subcommands; "privacy.NAME" is one of `privacy`.
    """
    # Sorted, so that the help is the same whatever the order of installation.
    for entry in sorted(entry_points(group=GROUP)):
        group, _, name = entry.name.rpartition(".")
        parent = groups.get(group, app)
        known = {command.name for command in parent.registered_commands}
        if name in known:
            continue  # no package replaces a command of fedgs
        loaded = _loaded(entry)
        if isinstance(loaded, typer.Typer):
            parent.add_typer(loaded, name=name)
        else:
            parent.command(name)(loaded)


def _loaded(entry: EntryPoint) -> Any:
    """Returns what an entry point names; a command that says so if it is broken."""
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        # A broken package must not take all of fedgs' own commands with it, so only its
        # own command fails, when somebody calls it.
        problem = f"{entry.name}: {entry.value} cannot be loaded: {error}"

    def broken() -> NoReturn:
        raise UserError(f"{problem}; install its package again, or remove it")

    # typer's help
    broken.__doc__ = "This command cannot be loaded; call it to see why."
    return broken
