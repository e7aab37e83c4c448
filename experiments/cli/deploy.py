"""`fedgs deploy`: server and clients on different machines; docs/deployment.md."""

from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.baseline import DeployedMethods
from experiments.flags import (
    ConfigOption,
    JsonOption,
    PrintOption,
    RecipeOption,
    request_flags,
    settings_flags,
)
from experiments.launch.commands import Client, Server
from experiments.launch.submit import Submission
from fedgs.config.settings import settings_with

app = typer.Typer(
    no_args_is_help=True, help="Train with server and clients on different machines."
)

app.add_typer(
    typer.Typer(
        cls=DeployedMethods,
        no_args_is_help=True,
        help="Register clients and start a run of a method that others published.",
    ),
    name="baseline",
)

# How a client reads its own data; beside `data`.
CLIENT_DATA = tuple(name for name in settings_with("of_client") if name != "data")


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
    days: Annotated[int, typer.Option(help="The server certificate's life.")] = 365,
    replace: Annotated[
        bool, typer.Option("--replace", help="Make these anew; never the authority.")
    ] = False,
) -> None:
    """Make the authority and the server's certificate, and clients' key pairs."""
    from experiments.launch.certs import make_certificates

    for path in make_certificates(folder, host or [], client or [], days, replace):
        print(f"{path.stat().st_mode & 0o777:o} {path}")


@app.command()
@request_flags(Server)
def server(print_only: PrintOption = False, *, given: dict[str, Any]) -> None:
    """Run the server (a Flower SuperLink and SuperExec) in the foreground.

    SIGTERM ends it within 30 seconds, runs at their next round. The exit code is 1 if a
    process that it needs has ended.
    """
    from experiments.commands import deploy

    deploy.serve(Server(**given), print_only)


@app.command()
@settings_flags(*CLIENT_DATA)
@request_flags(Client)
def client(
    print_only: PrintOption = False, *, given: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Run a client (a Flower SuperNode) in the foreground."""
    from experiments.commands import deploy

    deploy.join(Client(**given, settings=settings), print_only)


@app.command()
@settings_flags()
@request_flags(Submission)
def submit(
    print_only: PrintOption = False,
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    *,
    given: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Register clients and start a run; exit code 1 unless it completes."""
    from experiments.commands import deploy

    deploy.submit(Submission(**given), recipe, config, settings, print_only)


@app.command()
def status(
    run: Annotated[
        Path, typer.Argument(help="A run folder, or a folder of them, on the server.")
    ],
    as_json: JsonOption = False,
    prometheus: Annotated[
        Path | None,
        typer.Option(help="Write this file for node_exporter, every 15 seconds."),
    ] = None,
    serve: Annotated[
        str | None, typer.Option(help="Serve /metrics at HOST:PORT until stopped.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="With --prometheus: write once and end.")
    ] = False,
) -> None:
    """Print how a server and its runs stand: nodes, round, epsilon, time left.

    The exit code is 1 if a run cannot be read.
    """
    from experiments.commands import deploy

    deploy.status(run, as_json, prometheus, serve, once)
