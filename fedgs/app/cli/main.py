"""The command line: `fedgs train`, `resume`, `sample`, `privacy`, `audit`, ...

The flags of settings are made in `fedgs.app.flags`. Bad input is one line and
exit code 2; a run that stopped early or failed is exit code 1 and can be resumed.
docs/using.md lists all codes.
"""

import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgs import __version__
from fedgs.app.cli import deploy_flags, extensions, privacy_flags
from fedgs.app.commands.audit_request import AuditRequest
from fedgs.app.commands.sample_request import SampleRequest
from fedgs.app.debug.debug_request import (
    OF_DEBUG,
    Compared,
    OwnSuspects,
    PlantedBug,
    planted,
)
from fedgs.app.evaluation.request import READING, SHAPE, EvaluationRequest
from fedgs.app.flags import (
    MOST_USED,
    ConfigOption,
    JsonOption,
    RecipeOption,
    RunArgument,
    defaults_of,
    eager,
    request_flags,
    run_app,
    settings_flags,
)
from fedgs.app.tables import folded
from fedgs.cohorts.selection_settings import Selection
from fedgs.config.plugins import GROUP_MEANS
from fedgs.config.recipes import (
    DEFAULT,
    FITTED,
    HELD_OUT,
    configure,
    is_fitted,
    recipe,
    settings_in,
)
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, printable, reject

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    # A traceback that shows the values of variables could show private data.
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",  # so help texts have to escape brackets
    help="Train a generator of images that never leave their owners, and find out what"
    " it costs in privacy.",
)
data_app = typer.Typer(
    no_args_is_help=True,
    help="Check private images that you own before you train on them.",
)
app.add_typer(data_app, name="data")
app.add_typer(privacy_flags.app, name="privacy")
app.add_typer(deploy_flags.app, name="deploy")
# What the help of `train` says: this is the fraction if the data have no test split.
OF_TRAIN = defaults_of(DEFAULT) | {"test_fraction": HELD_OUT}
# How images are read follows from the run, or from what is evaluated.
OF_EVALUATION = dict.fromkeys((*READING, *SHAPE))
# Of a selection of clients, beside how its data are read.
SELECTING = ("output", "engine", "seed", "num_clients", "num_workers")
FORMAT_WARNING = warnings.formatwarning  # Python's own, before `main` replaces it


def main() -> None:
    """Runs the command line; the console script `fedgs`."""
    warnings.formatwarning = _format_warning
    sys.exit(run_app(app))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"fedgs {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, eager("--version", "Print the version of fedgs.", _print_version)
    ] = False,
) -> None:
    """Holds the options of `fedgs` itself; the help text is the app's."""


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Prints what fedgs says, or says of data, in one line; others as usual."""
    # Users read the former. A library's warning is for developers, who need its place.
    if issubclass(category, UserWarning) or "fedgs" in Path(filename).parts:
        line = printable(f"Warning: {message}")
        return folded(f"{line}\n", sys.stderr)
    return FORMAT_WARNING(message, category, filename, lineno, line)


@app.command(epilog=f"The defaults are those of the recipe {DEFAULT}.")
@settings_flags(*MOST_USED, defaults=OF_TRAIN, has_set=True)
def train(
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what the run would do and cost, and stop."
        ),
    ] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Train a generator, and keep it in a new run folder.

    Flags replace settings of --config, which replace those of the recipe.
    Example: fedgs train --data npz:mine.npz --output runs/mine
    """
    # Before torch is imported, which takes seconds: most errors are typing errors.
    configured = configure(recipe, config, settings)
    from fedgs.app.commands import train as running
    from fedgs.round.preparation import with_held_out

    # What the user chose, in a file or by flags, stays; the data decide the rest.
    known = settings_in(config, configured.phases) | settings
    configured = with_held_out(configured, known)
    running.train(configured, known, dry_run)


@app.command()
def resume(run: RunArgument) -> None:
    """Continue an interrupted run from its last checkpoint.

    Example: fedgs resume runs/mine
    """
    from fedgs.app.commands import train as running

    running.resume(run)


@app.command()
def demo(
    output: Annotated[
        str, typer.Option(help="Run folder to create. Default: a new folder in runs/.")
    ] = "",
) -> None:
    """Train on handwritten digits in a Flower simulation, to see how a run looks.

    The same as `fedgs train --recipe demo --engine flower`.
    """
    from fedgs.app.commands import train as running
    from fedgs.round.preparation import with_held_out

    # Through Flower, because the demo is to show messages between processes.
    config = replace(recipe("demo"), engine="flower", output=output)
    running.train(with_held_out(config, {}), {})


@app.command()
@request_flags(SampleRequest)
def sample(*, given: dict[str, Any]) -> None:
    """Draw images from the generator of a run. This costs no privacy.

    Example: fedgs sample runs/mine --per-class 100 -o folder:drawn
    """
    request = SampleRequest(**given)
    from fedgs.app.commands import train as running

    running.sample(request)


@app.command()
def publish(
    run: RunArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to create.")],
    count: Annotated[
        int, typer.Option("-n", "--count", help="Number of images to publish.", min=1)
    ] = 1000,
) -> None:
    """Write into a new folder what you may publish, and nothing private.

    That is the generator, images, the privacy label and a card.

    Example: fedgs publish runs/mine -o for-others
    """
    from fedgs.app.commands import train as running

    running.publish(run, output, count)


@app.command()
@settings_flags(*READING, *SHAPE, defaults=OF_EVALUATION)
@request_flags(EvaluationRequest)
def evaluate(
    as_json: JsonOption = False,
    *,
    given: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Measure how good synthetic images are, by comparison with real ones.

    The scores are computed from real images, so no epsilon covers them.

    Example: fedgs evaluate runs/mine --metrics cnn
    """
    # `data` is a field of its own; the other settings say how its images are read.
    data = settings.pop("data", "")
    request = EvaluationRequest(**given, data=data, reading=settings)
    from fedgs.app.evaluation import evaluate as evaluation

    evaluation.evaluate(request, as_json)


@app.command("settings")
@settings_flags(has_set=True)
def show_settings(
    source: Annotated[
        str | None,
        typer.Argument(help="Name of a recipe, or a run folder.", show_default=DEFAULT),
    ] = None,
    config: ConfigOption = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Print all settings of a recipe or a run, with help, as a file for --config.

    Example: fedgs settings gs-wgan > my.toml
    """
    from fedgs.config.tree import as_toml

    if source is not None and (Path(source) / "config.json").exists():
        from fedgs.runs.run_folder import RunFolder

        # A run's settings are what it was made with; nothing can be put over them.
        reject(
            {"config": config, **settings},
            "SOURCE is a run, whose settings are fixed; leave out",
        )
        folder = RunFolder.open(source)
        if folder.is_published:
            raise UserError(
                f"{source}: it is published, without the settings of its training; "
                "read its privacy_label.json, or give the run folder"
            )
        lines = as_toml(folder.config)
    else:
        configured = configure(source, config, settings)
        given = settings_in(config, configured.phases) | settings
        # `train` decides them by the data.
        undecided = {"test_fraction", "test_owners"}
        if is_fitted(configured):
            undecided.update(FITTED)
        lines = as_toml(configured, undecided - given.keys())
    for line in lines:
        print(line)


@app.command()
@request_flags(AuditRequest)
def audit(as_json: JsonOption = False, *, given: dict[str, Any]) -> None:
    """Test by attacks whether the guarantee of a run holds.

    The exit code is 1 if an attack proves that epsilon is larger than stated.

    Example: fedgs audit runs/mine
    """
    request = AuditRequest(**given)
    from fedgs.app.commands import audit as attacks

    # So that a test or a release script fails with it.
    if not attacks.audit(request, as_json):
        raise typer.Exit(1)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders to show on one page."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="HTML file to write.")
    ] = Path("report.html"),
) -> None:
    """Write one HTML page about runs: pictures, curves, privacy and settings.

    Example: fedgs report runs/mine -o report.html
    """
    from fedgs.app.report import page as reporting

    reporting.report(folders, output)


@data_app.command("inspect")
@settings_flags("Data", "num_clients", "seed", has_set=True)
def inspect_data(
    source: Annotated[
        str,
        typer.Argument(help="Images to check, written as for --data of `fedgs train`."),
    ],
    sheet: Annotated[
        Path, typer.Option(help="PNG file to write; it shows private images.")
    ] = Path("contact-sheet.png"),
    as_json: JsonOption = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Print what a data source contains, and write a sheet of twelve clients' images.

    Both are private: only the owner of the images may see them.

    Example: fedgs data inspect npz:mine.npz
    """
    # --data is among the flags of reading, but here the argument is the source.
    reject(
        {"data": settings.pop("data", None)}, "SOURCE names the data already; leave out"
    )
    config = RunConfig(data=source, **settings)
    from fedgs.app.commands import data as data_report

    data_report.inspect(config, sheet, as_json)


@app.command()
@settings_flags(*MOST_USED, *OF_DEBUG, defaults=defaults_of(GROUP_MEANS), has_set=True)
@request_flags(Compared, PlantedBug, OwnSuspects, has_defaults=False)
def debug(
    config: ConfigOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print which bugs can be found, and stop.")
    ] = False,
    *,
    given: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Find out whether the images of some clients have a bug, and which.

    Compares two groups of clients, or each node with all others, by private
    mean images (recipe group-means). To resume, give only --output of the
    earlier call; add --alpha or --min-effect to judge it by another rule.

    Example: fedgs debug --data npz:bug.npz --healthy old.txt --suspicious new.txt
    --output runs/verdict
    """
    from fedgs.app.debug import bug_detection

    bug_detection.from_flags(given, config, settings, dry_run)


@app.command()
@settings_flags("Data", *SELECTING, defaults={"engine": "flower"}, has_set=True)
@request_flags(PlantedBug, Selection, has_defaults=False)
def select_clients(*, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Select clients on whose images a federated classifier is good, or bad.

    Writes the names of each group's clients into files for `fedgs debug`.
    --output is the folder to create. The default engine is flower.

    Example: fedgs select-clients --data mnist-by-writer --data-dir DATA
    --percentiles --below 25 --above 75 --output runs/cohorts
    """
    own = {"engine": "flower", "num_workers": 2} | planted(given)
    config = RunConfig(**own | settings)
    # `given` has the fields of both requests; those of the bug are settings of the run.
    of_bug = {spec.name for spec in fields(PlantedBug)}
    of_selection = {name: given[name] for name in given if name not in of_bug}
    selection = Selection(**of_selection)
    from fedgs.app.commands import select_clients as selecting

    selecting.select_clients(config, selection, settings)


# Last: a package may add commands, but none that fedgs has.
extensions.add_commands(app, {"privacy": privacy_flags.app})
