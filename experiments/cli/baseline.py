"""`fedgs baseline NAME`: one command for each method, made of the method's settings."""

import dataclasses
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from experiments.flags import request_flags, settings_flags
from fedgs.baselines import METHODS, find
from fedgs.baselines.asked import SHARED_SETTINGS, Asked
from fedgs.config.run_config import RunConfig


class Methods(TyperGroup):
    """The methods as commands; a method is imported when its command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all methods of fedgs."""
        return list(METHODS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Returns the command of a method, by its name or by module:object.

        Raises:
            UserError: there is no such method.
        """
        return command_of(cmd_name)


app = typer.Typer(
    cls=Methods,
    no_args_is_help=True,
    help="Train a method that others published, on the same data, in the same folders.",
)


def _list_methods(is_asked: bool) -> None:
    if is_asked:
        from experiments.baselines.command import list_methods

        list_methods()
        raise typer.Exit


@app.callback()
def options(
    list_all: Annotated[
        bool,
        typer.Option(
            "--list",
            help="Print the methods: unit, who is trusted, title.",
            callback=_list_methods,
            is_eager=True,
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
    own = {spec.name for spec in dataclasses.fields(method.Settings)}
    chosen = [
        spec.name
        for spec in dataclasses.fields(RunConfig)
        if {spec.name, spec.metadata["group"]}
        & {*SHARED_SETTINGS, *getattr(method, "more_settings", ())}
        and spec.name not in own
    ]

    def train(*, given: dict[str, Any], settings: dict[str, Any]) -> None:
        from experiments.baselines import command

        command.train(name, given, settings)

    recipe = ", ".join(f"{key} = {value}" for key, value in method.recipe.items())
    train.__doc__ = f"{method.title}. Guarantee: {method.unit}."
    if recipe:
        train.__doc__ += f" Recipe: {recipe}."
    flagged = settings_flags(*chosen, defaults=method.recipe)(train)
    flagged = request_flags(method.Settings, Asked, has_defaults=False)(flagged)
    single = typer.Typer(add_completion=False)
    single.command(name)(flagged)
    return typer.main.get_command(single)
