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
    defaults_of,
    refuse_empty,
    request_flags,
    settings_flags,
)
from fedgs.cohorts.selection_settings import Thresholds
from fedgs.config.method_settings import settings_with
from fedgs.config.plugins import GROUP_MEANS
from fedgs.config.recipes import ALL, DEFAULT
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, reject
from server.launch.server_command import ServerOptions
from server.launch.submit import Submission

app = typer.Typer(
    no_args_is_help=True, help="Train with a server and clients on different machines."
)

OF_CLIENT = settings_with("of_client")
# What the submitter decides about a run: where the data lie is each client's own
# matter. The server sees no data, so the number of classes has to be given.
# It runs through Flower in any case, so there is no engine to choose.
SUBMITTED = (
    *(name for name in MOST_USED if name not in {*OF_CLIENT, "engine"}),
    *("node_sizes", "num_classes"),
)
COMPARING = tuple(name for name in OF_DEBUG if name not in OF_CLIENT)
# The same of a selection of clients, which decides noise and rounds.
SELECTING = ("image_size", "num_classes", "num_clients", "clients_per_node")
SELECTING += ("node_sizes", "relation", "output", "seed")
OF_COUNTS = ALL | {"clients_per_node": 1}  # what the help says is their default
# How a client reads its own data. Where they lie is a flag of `ClientOptions`.
CLIENT_DATA = tuple(name for name in OF_CLIENT if name != "data")


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Folder to write into.")] = Path(
        "certs"
    ),
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of the server. Can be repeated."),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option(help="Name of a client. Can be repeated.")
    ] = None,
) -> None:
    """Make the certificates and keys that are still missing in a folder.

    These are the authority, the server's certificate and the clients' key pairs.

    Example: fedgs deploy certs --host 10.0.0.1 --client ward1 --client ward2
    """
    from server.launch.certs import make_certificates

    for path in make_certificates(folder, host or [], client or []):
        # With its mode, so that the reader sees which files nobody else may read.
        mode = path.stat().st_mode & 0o777
        kind = "public"
        if mode & 0o077 == 0:
            kind = "private: leave it here, or on a machine that nobody can reach"
        print(f"{path} (mode {mode:o}, {kind})")


@app.command()
@request_flags(ServerOptions)
def server(*, given: dict[str, Any]) -> None:
    """Run the server (a Flower SuperLink and SuperExec) in the foreground.

    SIGTERM ends it within 30 seconds; runs stop at their next round. If one
    of its processes ends, all end with exit code 1, so that systemd or Docker
    can start it again.

    Example: fedgs deploy server --host 0.0.0.0 --certs certs
    """
    from fedgs.app.commands import deploy

    deploy.serve(ServerOptions(**given))


@app.command()
@settings_flags(*CLIENT_DATA)
@request_flags(ClientOptions)
def client(*, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Run a client (a Flower SuperNode) in the foreground.

    Example: fedgs deploy client ward1 --server 10.0.0.1:8000 --ca ca.crt
    --data folder:images --key ward1.key --limits limits.toml
    """
    from fedgs.app.commands import deploy

    deploy.join(ClientOptions(**given, settings=settings))


@app.command()
@settings_flags(*SUBMITTED, defaults=defaults_of(DEFAULT), has_set=True)
@request_flags(Submission)
def submit(
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    cohort: Annotated[
        str | None,
        typer.Option(
            help="Cohort to train on: a value in the clients' files of --cohorts. "
            "--node-sizes gives the number of its owners at each client."
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
    """Register clients at a server and start a run; fail unless the run completes.

    Example: fedgs deploy submit --server 10.0.0.1:8000 --ca certs/ca.crt
    --client ward1=certs/clients/ward1.pub --node-sizes 120,80
    --client ward2=certs/clients/ward2.pub --num-classes 2 --image-size 28
    """
    if cohort is not None:
        refuse_empty("cohort", cohort)  # it would be a run of everybody
        settings["cohort_value"] = cohort
    from fedgs.app.commands import deploy, forecast

    said = None
    if dry_run:
        said = forecast.show_deployed
    deploy.submit(Submission(**given), recipe, config, settings, said, dry_run)


@app.command()
@settings_flags(*SUBMITTED, *COMPARING, defaults=defaults_of(GROUP_MEANS), has_set=True)
@request_flags(Submission, Compared)
def debug(
    config: ConfigOption = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print which bugs can be found, and send nothing."
        ),
    ] = False,
    *,
    given: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Find out whether a client's images, or those of a cohort, have a bug.

    The verdicts are printed, and written with a picture into the run folder
    on the server. The recipe is group-means.
    """
    names = {spec.name for spec in fields(Compared)}
    asked = given | settings  # --set has some of them, too
    # A flag that is off says nothing: a run that goes on has its own comparison. An
    # empty name is given, and refused below.
    compared = {
        name: asked[name]
        for name in names & asked.keys()
        if asked[name] not in (None, False)
    }
    of_run = {name: value for name, value in given.items() if name not in names}
    submission = Submission(**of_run)
    if submission.resume is not None:
        reject(compared, "a resumed run compares what it compared before; leave out")
        recipe = None
    else:
        recipe = GROUP_MEANS
        settings |= Compared(**compared).settings
        # What can be found depends on it, so the recipe's own number would mislead.
        if config is None and not {"node_sizes", "clients_per_node"} & settings.keys():
            raise UserError(
                "node_sizes is unset: what can be found depends on it; give "
                "--node-sizes, the number of owners at each client, such as 120,45,300"
            )
    from fedgs.app.commands import deploy, forecast
    from fedgs.app.debug import power

    def shown(resolved: ResolvedConfig) -> None:
        power.show(resolved)
        if dry_run:
            forecast.show_deployed(resolved)

    deploy.submit(submission, recipe, config, settings, shown, dry_run)


@app.command()
@settings_flags(*SELECTING, defaults=OF_COUNTS, has_set=True)
@request_flags(Submission, Thresholds)
def select_clients(*, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Divide owners into cohorts by how well a classifier does on their images.

    Only the client learns in which cohort an owner is, from its cohorts.csv.
    The run's cohorts.json on the server contains thresholds and noisy counts.
    To resume, use `fedgs deploy submit --resume RUN`.
    """
    from fedgs.app.commands import deploy

    of_submission = {spec.name for spec in fields(Submission)} & given.keys()
    submission = Submission(**{name: given.pop(name) for name in of_submission})
    deploy.select_clients(submission, given, settings)


@app.command()
def status(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run folder on the server, or a folder that contains run folders."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Print how the runs of a server stand: round, epsilon and last answers.

    The exit code is 1 if a run cannot be read.

    Example: fedgs deploy status fedgs-server
    """
    from fedgs.app.commands import deploy

    deploy.status(run, as_json)
