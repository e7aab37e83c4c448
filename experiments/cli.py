"""The command line: `fedgs train`, `resume`, `sample`, `privacy`, `evaluate`, `demo`.

The flags of `train` and `privacy` are the fields of `RunConfig`, made from the
dataclass. Bad input is one line and exit code 2; a run that stopped early or failed is
exit code 1 and can be resumed.
"""

import dataclasses
import inspect
import json
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from experiments.recipes import RECIPES, recipe
from fedgs.config import GROUPS, RunConfig, UserError, field_type

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Trains a generator on images that never leave their owners.",
)
RUN_HELP = "The run folder."
JSON_HELP = "Print JSON instead of a table."


def main() -> None:
    """Runs the command line; the console script `fedgs`."""
    try:
        sys.exit(app(standalone_mode=False))
    except click.UsageError as error:
        if text := error.format_message():  # empty where the help was printed
            where = error.ctx.command_path if error.ctx else "fedgs"
            print(f"Error: {text} See `{where} --help`.", file=sys.stderr)
        sys.exit(2)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


# ------------------------------------------------------------------ flags


def settings_flags(
    *groups: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds one flag per setting to a command, which receives the given ones.

    Args:
        *groups: of RunConfig's fields; all when empty.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[:-1]
        specs = [
            spec
            for group in groups or GROUPS
            for spec in dataclasses.fields(RunConfig)
            if spec.metadata["group"] == group
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
    recipe_name: str | None, config_file: Path | None, given: dict[str, Any]
) -> RunConfig:
    """Builds a configuration: the recipe, then the TOML file, then the flags.

    A noise_multiplier or target_epsilon replaces the other one of an earlier source.

    Raises:
        UserError: an unknown recipe, setting or value, or an unreadable file.
    """
    config = recipe(recipe_name) if recipe_name is not None else RunConfig()
    sources = [given]
    if config_file is not None:
        try:
            sources.insert(0, tomllib.loads(config_file.read_text()))
        except (OSError, ValueError) as error:
            raise UserError(
                f"config = {config_file}: {error}; give --config a TOML file"
            ) from error
    for source in sources:
        noise = {"noise_multiplier", "target_epsilon"} & set(source)
        if len(noise) == 1:
            other = ({"noise_multiplier", "target_epsilon"} - noise).pop()
            source = {other: "", **source}
        if source.get("client_selection") == "all":
            source = {"clients_per_round": "", **source}
        config = RunConfig.from_flat(source, config)
    return config.validate()


# ------------------------------------------------------------------ commands

RecipeOption = Annotated[
    str | None, typer.Option(help=f"Start from a recipe: {', '.join(RECIPES)}.")
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="A TOML file of settings, over the recipe.")
]
RunArgument = Annotated[Path, typer.Argument(help=RUN_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


@app.command()
@settings_flags()
def train(
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Train a generator. Settings: recipe, then TOML file, then flags."""
    configured = configure(recipe, config, settings)  # fails before torch is imported
    from experiments import running

    running.train(configured, recipe or "run")


@app.command()
def resume(run: RunArgument) -> None:
    """Continue an interrupted run from its last checkpoint."""
    from experiments import running

    running.resume(run)


@app.command()
def demo(
    output: Annotated[Path | None, typer.Option(help="Folder for both runs.")] = None,
) -> None:
    """Train on scikit-learn's digits, with privacy and without, in minutes."""
    from experiments import running

    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    running.demo(output or Path("runs") / f"demo-{stamp}")


@app.command()
def sample(
    run: RunArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="FILE.npz or FILE.png.")
    ],
    count: Annotated[int, typer.Option("-n", "--count", help="Images.")] = 80,
    labels: Annotated[
        str | None, typer.Option(help="Labels in turn, e.g. 3,7; uniform when unset.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the latents.")] = 0,
) -> None:
    """Draw images from a run's generator; costs no privacy."""
    from experiments import running

    running.sample(run, output, count, labels, seed)


@app.command()
def evaluate(
    run: RunArgument,
    data: Annotated[str, typer.Option(help="Data whose test split to use.")],
    data_dir: Annotated[str | None, typer.Option(help="Its folder.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", help="Images.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of latents and classifier.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a small CNN on synthetic images and test it on real ones."""
    from experiments import running

    running.evaluate(run, data, data_dir, count, seed, as_json)


@app.command()
@settings_flags("Federation", "Privacy", "Training", "Runtime")
def privacy(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP)] = None,
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Print the epsilons of a run, or of planned settings without a run."""
    from experiments import privacy_report

    if run is None:
        statements = privacy_report.of_settings(recipe, config, settings)
    else:
        for name, value in {"recipe": recipe, "config": config, **settings}.items():
            if name != "delta" and value is not None:
                remedy = f"leave out RUN or --{name.replace('_', '-')}"
                raise UserError(f"{name} = {value}: RUN has its own; {remedy}")
        statements = privacy_report.of_run(run, settings.get("delta"))
    if as_json:
        print(json.dumps([s.to_json() for s in statements], indent=2))
    else:
        privacy_report.show(statements)
