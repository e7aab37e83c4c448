"""How commands that work for long begin and end: a new folder, and what continues."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from experiments.launch.control import FlowerFailed
from fedgs.errors import UserError, explained
from fedgs.federation.training import RunStopped


def new_output(output: str, otherwise: str = "") -> Path:
    """Returns the absolute path of a folder that a command is to create.

    Args:
        output: as of --output.
        otherwise: what else the user may do with a folder that exists.

    Raises:
        UserError: unset, or there is something already.
    """
    if not output:
        raise UserError("output is unset: give --output, the folder to create")
    path = Path(output).expanduser().absolute()
    if path.exists():
        raise UserError(
            f"output = {path}: exists already; choose another --output{otherwise}"
        )
    return path


def make_output(path: Path) -> None:
    """Creates it.

    Raises:
        UserError: it cannot be created.
    """
    problem = f"output = {path}: cannot be made"
    with explained(OSError, problem, "choose another --output"):
        path.mkdir(parents=True)


@contextmanager
def exit_if_stopped(advice: str) -> Iterator[None]:
    """Turns a run that stopped early or failed into two lines and exit code 1.

    Args:
        advice: what continues it.

    Raises:
        typer.Exit: code 1.
    """
    try:
        yield
    except (RunStopped, FlowerFailed) as error:
        print(f"{error}\n{advice}", file=sys.stderr)
        raise typer.Exit(1) from error
