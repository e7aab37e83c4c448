"""`fedgs deploy`: server and clients on different machines; docs/deployment.md."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from clients.client_command import ClientOptions
from fedgs.app.debug.debug_request import OF_DEBUG, Compared
from fedgs.app.flags import (
    MOST_USED,
    ConfigOption,
    JsonOption,
    RecipeOption,
    request_flags,
    settings_flags,
)
from fedgs.cohorts.selection_settings import Thresholds
from fedgs.config.method_settings import settings_with
from fedgs.config.plugins import GROUP_MEANS
from fedgs.errors import UserError, reject
from server.launch.server_command import ServerOptions
from server.launch.submit import Submission

app = typer.Typer(
    no_args_is_help=True, help="Train with server and clients on different machines."
)

OF_CLIENT = settings_with("of_client")
# What the submitter decides about a run: where the data lie is each client's own
# matter. The server sees no data, so the number of classes has to be given.
SUBMITTED = (
    *(name for name in MOST_USED if name not in OF_CLIENT),
    *("node_sizes", "num_classes"),
)
COMPARING = tuple(name for name in OF_DEBUG if name not in OF_CLIENT)
# The same of a selection of clients, which decides noise and rounds.
SELECTING = ("image_size", "num_classes", "num_clients", "clients_per_node")
SELECTING += ("node_sizes", "relation", "output", "seed")
# How a client reads its own data. Where they lie is a flag of `ClientOptions`.
CLIENT_DATA = tuple(name for name in OF_CLIENT if name != "data")


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Where to.")] = Path("certs"),
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of the server; again for more."),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option(help="Name of a client; again for more.")
    ] = None,
) -> None:
    """Make what is missing: authority, server certificate, clients' key pairs."""
    from server.launch.certs import make_certificates

    for path in make_certificates(folder, host or [], client or []):
        # With its mode, so that the reader sees which files nobody else may read.
        mode = path.stat().st_mode & 0o777
        print(f"{mode:o} {path}")


@app.command()
@request_flags(ServerOptions)
def server(*, given: dict[str, Any]) -> None:
    """Run the server (a Flower SuperLink and SuperExec) in the foreground.

    SIGTERM ends it within 30 seconds, runs at their next round. If one of its processes
    ends, all end with exit code 1: let systemd or Docker start it again.
    """
    from fedgs.app.commands import deploy

    deploy.serve(ServerOptions(**given))


@app.command()
@settings_flags(*CLIENT_DATA)
@request_flags(ClientOptions)
def client(*, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Run a client (a Flower SuperNode) in the foreground."""
    from fedgs.app.commands import deploy

    deploy.join(ClientOptions(**given, settings=settings))


@app.command()
@settings_flags(*SUBMITTED, has_set=True)
@request_flags(Submission)
def submit(
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    cohort: Annotated[
        str | None,
        typer.Option(
            help="Train on the owners with this value in the clients' files of "
            "--cohorts alone; --node-sizes says how many each client has."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what a run does and costs; send nothing."),
    ] = False,
    *,
    given: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Register clients and start a run; exit code 1 unless it completes."""
    if cohort is not None:
        settings["cohort_value"] = cohort
    from fedgs.app.commands import deploy, forecast

    check = None
    if dry_run:
        check = forecast.show_deployed
    deploy.submit(Submission(**given), recipe, config, settings, check, dry_run)


@app.command()
@settings_flags(*SUBMITTED, *COMPARING, has_set=True)
@request_flags(Submission, Compared)
def debug(
    config: ConfigOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what can be found; send nothing.")
    ] = False,
    *,
    given: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Compare the clients as sites, or cohorts that only they know, for a bug.

    The verdicts are in the run's log and, with a picture, in its folder on the server.
    The recipe is group-means.
    """
    names = {spec.name for spec in fields(Compared)}
    asked = given | settings  # --set has some of them, too
    # A flag that is off says nothing: a run that goes on has its own comparison.
    compared = {name: asked[name] for name in names & asked.keys() if asked[name]}
    of_run = {name: value for name, value in given.items() if name not in names}
    submission = Submission(**of_run)
    if submission.resume is not None:
        reject(compared, "--resume compares what the run does; leave out")
        recipe = None
    else:
        recipe = GROUP_MEANS
        settings |= Compared(**compared).settings
        # What can be found depends on it, so the recipe's own number would mislead.
        if config is None and not {"node_sizes", "clients_per_node"} & settings.keys():
            raise UserError(
                "node_sizes is unset: give --node-sizes, how many owners each client "
                "has, such as 120,45,300"
            )
    from fedgs.app.commands import deploy
    from fedgs.app.debug import power

    deploy.submit(submission, recipe, config, settings, power.show, dry_run)


@app.command()
@settings_flags(*SELECTING, has_set=True)
@request_flags(Submission, Thresholds)
def select_clients(*, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Select clients by accuracy, privately; who is in which cohort stays with them.

    The run's cohorts.json has thresholds and noisy counts, a client's cohorts.csv the
    cohort of each owner. `deploy submit --resume RUN` continues it.
    """
    from fedgs.app.commands import deploy

    of_submission = {spec.name for spec in fields(Submission)} & given.keys()
    submission = Submission(**{name: given.pop(name) for name in of_submission})
    deploy.select_clients(submission, given, settings)


@app.command()
def status(
    run: Annotated[
        Path, typer.Argument(help="A run folder, or a folder of them, on the server.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Print round, releases, epsilon and the nodes' last answers of a server's runs.

    The exit code is 1 if a run cannot be read.
    """
    from fedgs.app.commands import deploy

    deploy.status(run, as_json)
