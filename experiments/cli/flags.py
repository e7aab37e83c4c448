"""The flags that the commands share: one per setting, and how settings are read.

The flags are the fields of `RunConfig`, made from the dataclass.
"""

import dataclasses
import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.recipes import RECIPES, overridden, recipe
from fedgs.config.run_config import RunConfig
from fedgs.config.settings import GROUPS, field_type
from fedgs.errors import UserError

READING = (  # of real data: where it is and how to read it
    *("data", "data_dir", "download", "polarity", "classes", "test_fraction"),
    *("hf_options", "num_classes"),
)
SHAPE = ("image_channels", "image_size")

RecipeOption = Annotated[
    str | None, typer.Option(help=f"Start from a recipe: {', '.join(RECIPES)}.")
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="A TOML file of settings, over the recipe.")
]
RunArgument = Annotated[Path, typer.Argument(help="The run folder.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.")
]


def settings_flags(
    *groups: str,
    only: tuple[str, ...] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds one flag per setting to a command, which receives the given ones.

    Args:
        *groups: of RunConfig's fields; all when empty.
        only: names of these fields; all when empty.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[:-1]
        specs = [
            spec
            for group in groups or GROUPS
            for spec in dataclasses.fields(RunConfig)
            if spec.metadata["group"] == group and (not only or spec.name in only)
        ]

        def run(**arguments: Any) -> None:
            names = {spec.name for spec in specs}
            given = {
                name: value
                for name, value in arguments.items()
                if name in names and value is not None
            }
            rest = {n: v for n, v in arguments.items() if n not in names}
            command(**rest, settings=given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        parameters = own + [_parameter(spec) for spec in specs]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(spec: "dataclasses.Field[Any]") -> inspect.Parameter:
    """Returns one setting as a typer option; unset means: not given."""
    flag = f"--{spec.name.replace('_', '-')}"
    kind, _ = field_type(spec.name)
    text = spec.metadata["help"]
    if spec.metadata["choices"]:
        text += f" \\[{'|'.join(spec.metadata['choices'])}]"
    names = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    default = spec.default if spec.default not in (None, "") else "unset"
    flag_option = typer.Option(
        names,
        help=f"{text} Default without a recipe: {default}.",
        rich_help_panel=spec.metadata["group"],
        show_default=False,
    )
    return inspect.Parameter(
        spec.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, flag_option],
    )


def configure(
    recipe_name: str | None,
    config_file: Path | None,
    given: dict[str, Any],
    engine: str = "local",
) -> RunConfig:
    """Builds a configuration: the recipe, then the TOML file, then the flags.

    Args:
        recipe_name: of the recipe; None starts from the defaults.
        config_file: TOML file of settings over it.
        given: settings over both.
        engine: unless the file or `given` say another one.

    Raises:
        UserError: an unknown recipe, setting or value, or an unreadable file.
    """
    config = recipe(recipe_name) if recipe_name is not None else RunConfig()
    config = dataclasses.replace(config, engine=engine)
    sources = [given]
    if config_file is not None:
        try:
            sources.insert(0, tomllib.loads(config_file.read_text()))
        except (OSError, ValueError) as error:
            raise UserError(
                f"config = {config_file}: {error}; give --config a TOML file"
            ) from error
    for source in sources:
        config = overridden(config, source)
    return config.validate()


def refuse(given: dict[str, Any], why: str) -> None:
    """Refuses settings that a command cannot take beside others."""
    for name, value in given.items():
        if value is not None:
            flag = name if name.isupper() else f"--{name.replace('_', '-')}"
            raise UserError(f"{name} = {value}: {why} {flag}")
