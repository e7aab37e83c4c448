"""`fedgs baseline NAME`: one command for each method, made of the method's settings."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperGroup

from experiments.baselines import BASELINES, find
from experiments.baselines.target import BaselineRequest, check_noise, settings_read
from fedgs.app.flags import eager, request_flags, settings_flags
from fedgs.app.tables import Table
from fedgs.config.recipes import HELD_OUT

if TYPE_CHECKING:
    from experiments.baselines.baseline import Baseline

LIST_NOTE = (
    "The units are those of the default settings, which `fedgs baseline NAME --help` "
    "lists. Whoever runs a method sees all images. To use a method of your own, give "
    "module:object (docs/baselines.md)."
)


class Methods(TyperGroup):
    """The methods as commands; a method is imported when its command is asked for."""

    methods = tuple(BASELINES)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns their names."""
        return list(self.methods)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Returns the command of a method, by its name or by module:object.

        Raises:
            UserError: there is no such method.
        """
        return command_of(cmd_name)


app = typer.Typer(
    cls=Methods,
    no_args_is_help=True,
    help="Train a method that others published, on the same data as `fedgs train`.",
)


def _list_methods(is_asked: bool) -> None:
    if is_asked:
        methods = {name: find(name) for name in BASELINES}
        rows = [[name, method.unit, method.title] for name, method in methods.items()]
        head = ["name", "unit", "title"]
        Table("Baselines", head, rows, LIST_NOTE, numeric=False).show()
        raise typer.Exit


@app.callback()
def options(
    list_all: Annotated[
        bool,
        eager(
            "--list",
            "Print the methods with the unit of privacy of each.",
            _list_methods,
        ),
    ] = False,
) -> None:
    """Holds the options of `fedgs baseline` itself; the help text is the app's."""


def command_of(name: str) -> click.Command:
    """Returns the command that trains a method: its settings and the run's as flags.

    Raises:
        UserError: there is no such method.
    """
    method = find(name, is_typed=True)

    def train(*, given: dict[str, Any], settings: dict[str, Any]) -> None:
        check_noise(given)
        # Loads torch.
        from experiments.baselines.training import train_baseline

        train_baseline(name, given | settings)

    chosen = settings_of(method)
    # The help shows the recipe's values, which are the defaults of this command.
    shown = dict(method.recipe) | {"test_fraction": HELD_OUT}
    flagged = settings_flags(*chosen, defaults=shown)(train)
    own_flags = request_flags(method.Settings, BaselineRequest, has_defaults=False)
    flagged = own_flags(flagged)
    return _command(method, method.recipe, flagged)


def settings_of(method: "type[Baseline[Any]]") -> list[str]:
    """Returns the settings of a run that a method reads and does not have itself."""
    own = {spec.name for spec in dataclasses.fields(method.Settings)}
    return [spec.name for spec in settings_read(method) if spec.name not in own]


def _command(
    method: "type[Baseline[Any]]",
    defaults: Mapping[str, Any],
    flagged: Callable[..., None],
) -> click.Command:
    recipe = ", ".join(f"{key} = {value}" for key, value in defaults.items())
    flagged.__doc__ = f"{method.title}. Guarantee: {method.unit}."
    if recipe:
        flagged.__doc__ += f" Recipe: {recipe}."
    single = typer.Typer(add_completion=False)
    single.command(method.name)(flagged)
    return typer.main.get_command(single)
