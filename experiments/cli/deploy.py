"""`fedgs deploy`: server and clients on different machines; docs/deployment.md.

Thin: each command prints the Flower commands it runs, or only prints them.
"""

import dataclasses
import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.flags import (
    ConfigOption,
    JsonOption,
    RecipeOption,
    settings_flags,
)
from fedgs.config.recipes import configure
from fedgs.errors import UserError, refuse
from fedgs.files import make_folder

app = typer.Typer(
    no_args_is_help=True, help="Train with server and clients on different machines."
)

CLIENT_DATA = (  # how a client reads its own data; beside `data`
    *("data_dir", "download", "polarity", "classes", "test_fraction", "hf_options"),
    *("partitioner", "partitioner_options", "partition", "dirichlet_alpha"),
    *("cohort", "device"),
)
STATUS_PERIOD = 15.0  # seconds between two writings of a Prometheus file

CaOption = Annotated[
    Path | None, typer.Option(help="Certificate of the authority, ca.crt.")
]
ServerOption = Annotated[str, typer.Option(help="HOST:PORT of the server.")]
InsecureOption = Annotated[
    bool,
    typer.Option("--insecure", help="No TLS, no authentication; on one machine only."),
]
NetworkOption = Annotated[
    bool, typer.Option("--insecure-network", help="With --insecure: on a network too.")
]
PrintOption = Annotated[
    bool, typer.Option("--print-only", help="Print the Flower commands, run nothing.")
]
LogOption = Annotated[
    Path | None,
    typer.Option(help="Append events as JSON lines: who, round, outcome, duration."),
]


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
def server(
    state_dir: Annotated[Path, typer.Option(help="Database and run folders.")] = Path(
        "fedgs-server"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The only port.")] = 8000,
    certs: Annotated[Path, typer.Option(help="Of `fedgs deploy certs`.")] = Path(
        "certs"
    ),
    control_from: Annotated[
        str, typer.Option(help="Networks that may submit runs, e.g. 10.0.0.0/24.")
    ] = "",
    insecure: InsecureOption = False,
    insecure_network: NetworkOption = False,
    log_json: LogOption = None,
    print_only: PrintOption = False,
) -> None:
    """Run the server (a Flower SuperLink and SuperExec) in the foreground.

    SIGTERM ends it within 30 seconds, runs at their next round. The exit code is 1 if a
    process that it needs has ended.
    """
    from experiments.launch import commands as deploy_commands
    from experiments.launch import processes as deploy_processes
    from experiments.launch.supervisor import ServerEnded, Supervisor

    wanted = deploy_commands.Server(
        host=host,
        port=port,
        state=state_dir.expanduser().absolute(),
        certs=certs,
        insecure=insecure,
        insecure_network=insecure_network,
        control_from=control_from,
        log_json=log_json,
    )
    superlink, environment = wanted.command()
    superexec = wanted.superexec()
    for command in (superlink, superexec):
        deploy_processes.show(command, environment)
    if print_only:
        return
    state = deploy_processes.make_state(state_dir)
    make_folder(state / "runs", 0o700)
    print(deploy_commands.who_submits(wanted), flush=True)
    supervisor = Supervisor(
        state, superlink, superexec, environment, wanted.health, wanted.certificates
    )
    try:
        supervisor.run()
    except ServerEnded as error:
        print(f"error: {error}; the server has ended", file=sys.stderr)
        raise typer.Exit(1) from error


@app.command()
@settings_flags(only=CLIENT_DATA)
def client(
    name: Annotated[str, typer.Argument(help="As registered at the server.")],
    server: ServerOption,
    data: Annotated[str, typer.Option(help="This client's own, as --data of train.")],
    ca: CaOption = None,
    key: Annotated[
        Path | None, typer.Option(help="Private key of this client, NAME.key.")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="Discriminators, own count; fedgs-client-NAME when unset."),
    ] = None,
    limits: Annotated[
        Path | None, typer.Option(help="TOML file of what this client agrees to.")
    ] = None,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="Flower's own SuperNode: slow, runs sent code."),
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="With --stock: of its local interface.")
    ] = None,
    insecure: InsecureOption = False,
    insecure_network: NetworkOption = False,
    log_json: LogOption = None,
    print_only: PrintOption = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Run a client (a Flower SuperNode) in the foreground."""
    from experiments.launch import commands as deploy_commands
    from experiments.launch import processes as deploy_processes

    state = state_dir or Path(f"fedgs-client-{name}")
    command, environment = deploy_commands.Client(
        name=name,
        data=data,
        server=server,
        state=state.expanduser().absolute(),
        ca=ca,
        key=key,
        limits=limits,
        settings=tuple(settings.items()),
        stock=stock,
        port=port,
        insecure=insecure,
        insecure_network=insecure_network,
        log_json=log_json,
    ).command()
    deploy_processes.show(command, environment)
    if not print_only:
        deploy_processes.make_state(state)
        deploy_processes.become(command, environment)


@app.command()
@settings_flags()
def submit(
    server: ServerOption,
    ca: CaOption = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=KEY.pub of a client, or NAME if registered; one for each, in "
            "the order of the clients of the data."
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Continue this run of the server instead.")
    ] = None,
    accept_restore: Annotated[
        bool,
        typer.Option(
            "--accept-restore",
            help="With --resume: the server was restored from a backup; add what the "
            "clients have released since to the ledger.",
        ),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Wait for the run's end.")
    ] = True,
    insecure: InsecureOption = False,
    insecure_network: NetworkOption = False,
    print_only: PrintOption = False,
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Register clients and start a run; exit code 1 unless it completes."""
    from experiments.launch import submit as deploy_submit

    clients = deploy_submit.read_clients(client or [])
    if accept_restore and resume is None:
        raise UserError("accept_restore: is for a run that goes on; give --resume NAME")
    flat: dict[str, Any] = {}
    if resume is not None:
        given = {"recipe": recipe, "config": config, **settings}
        refuse(given, "--resume takes the run's own settings; leave out")
        deploy_submit.check_run_name("resume", resume)
    else:
        names = [name for name, _ in clients]
        given = {"engine": "flower", "nodes": ",".join(names), **settings}
        wanted = configure(recipe, config, given)
        if not wanted.output:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            wanted = dataclasses.replace(wanted, output=f"{recipe or 'run'}-{stamp}")
        flat = deploy_submit.run_settings(wanted, names)
    submission = deploy_submit.Submission(
        server=server,
        ca=ca,
        insecure=insecure,
        insecure_network=insecure_network,
        clients=clients,
        settings=flat,
        resume=resume,
        accept_restore=accept_restore,
    )
    if print_only:
        deploy_submit.print_commands(submission)
        return
    run = resume or str(flat["output"])
    print(f"run folder: {run}, in the server's state directory", flush=True)
    try:
        deploy_submit.submit(submission, follow)
    except deploy_submit.FlowerFailed as error:
        same = f"fedgs deploy submit --server {server} ... --resume {run}"
        print(f"{error}\ncontinue with: {same}", file=sys.stderr)
        raise typer.Exit(1) from error


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
    from experiments.commands import deploy_metrics, deploy_status

    current = partial(deploy_status.overview_of, run)
    found = current()
    if not found.runs and found.server is None and serve is None and prometheus is None:
        raise UserError(f"{run}: no run folder here yet; give --output of a run")
    if serve is not None:
        from experiments.launch.processes import split_address

        where = split_address(serve)
        _, endpoint = deploy_metrics.serve_metrics(*where, current)
        print(f"http://{serve}/metrics", flush=True)
        endpoint.join()
    elif prometheus is not None:
        pause = threading.Event()
        deploy_metrics.write_prometheus(prometheus, found)
        while not once and not pause.wait(STATUS_PERIOD):
            deploy_metrics.write_prometheus(prometheus, current())
    else:
        if as_json:
            print(json.dumps(deploy_status.to_json(found), indent=2))
        else:
            deploy_status.show(found)
        if any(isinstance(line, deploy_status.Unreadable) for line in found.runs):
            raise typer.Exit(1)
