"""What `fedgs deploy` does: each command prints the Flower commands that it runs."""

import dataclasses
import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import typer

from experiments.launch import processes
from experiments.launch import submit as submitting
from experiments.launch.commands import Client, Server, who_submits
from experiments.launch.control import FlowerFailed
from experiments.launch.submit import Submission
from experiments.launch.supervisor import ServerEnded, Supervisor
from fedgs.config.recipes import configure
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, refuse
from fedgs.files import make_folder

STATUS_PERIOD = 15.0  # seconds between two writings of a Prometheus file


def serve(server: Server, print_only: bool) -> None:
    """Runs a server until it is told to end.

    Raises:
        UserError: bad input; nothing was started.
        typer.Exit: a process that it needs has ended (code 1).
    """
    superlink, environment = server.command()
    superexec = server.superexec()
    for command in (superlink, superexec):
        processes.show(command, environment)
    if print_only:
        return
    state = processes.make_state(server.state)
    make_folder(state / "runs", 0o700)
    print(who_submits(server), flush=True)
    how = server.health, server.certificates, server.check
    supervisor = Supervisor(state, superlink, superexec, environment, *how)
    try:
        supervisor.run()
    except ServerEnded as error:
        print(f"error: {error}; the server has ended", file=sys.stderr)
        raise typer.Exit(1) from error


def join(client: Client, print_only: bool) -> None:
    """Becomes the process of a client.

    Raises:
        UserError: bad input.
    """
    command, environment = client.command()
    processes.show(command, environment)
    if not print_only:
        processes.make_state(client.folder)
        processes.become(command, environment)


def submit(
    submission: Submission,
    recipe: str | None,
    config: Path | None,
    settings: dict[str, Any],
    print_only: bool,
) -> None:
    """Registers clients and starts or continues a run.

    Args:
        submission: without the run's settings.
        recipe: of the run; None starts from the defaults.
        config: TOML file of settings over it.
        settings: over both.
        print_only: print Flower's commands and files, run nothing.

    Raises:
        UserError: bad input; nothing was submitted.
        typer.Exit: the run did not complete (code 1).
    """
    names = [name for name, _ in submission.clients]
    if submission.resume is not None:
        given = {"recipe": recipe, "config": config, **settings}
        refuse(given, "--resume takes the run's own settings; leave out")
    else:
        given = {"engine": "flower", "nodes": ",".join(names), **settings}
        configured = _named(configure(recipe, config, given), recipe or "run")
        flat = submitting.run_settings(configured, names)
        submission = dataclasses.replace(submission, settings=flat)
    _submit(submission, print_only)


def submit_baseline(
    submission: Submission,
    name: str,
    given: dict[str, Any],
    settings: dict[str, Any],
    print_only: bool,
) -> None:
    """Registers clients and starts a run of a baseline.

    Args:
        submission: without the run's settings.
        name: of the method.
        given: settings of the method, and of `fedgs.baselines.asked.Asked`.
        settings: of the run, over the method's recipe.
        print_only: print Flower's commands and files, run nothing.

    Raises:
        UserError: bad input; nothing was submitted.
        typer.Exit: the run did not complete (code 1).
    """
    from fedgs.baselines import deployed

    names = [client for client, _ in submission.clients]
    own = {n: v for n, v in given.items() if n not in deployed.ASKED}
    nodes = {"nodes": ",".join(names)} if names else {}
    configured = _named(deployed.submitted(own, settings | nodes), name)
    flat = submitting.run_settings(configured, names)
    told = {"name": name} | given
    deployed.planned(RunConfig.from_flat(flat), told)  # as the server will
    flat |= deployed.joined(told)
    _submit(dataclasses.replace(submission, settings=flat), print_only)


def _named(config: RunConfig, name: str) -> RunConfig:
    """Returns settings with the name of a run folder."""
    if config.output:
        return config
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return dataclasses.replace(config, output=f"{name}-{stamp}")


def _submit(submission: Submission, print_only: bool) -> None:
    if print_only:
        submitting.print_commands(submission)
        return
    run = submission.resume or submission.settings["output"]
    print(f"run folder: {run}, in the server's state directory", flush=True)
    try:
        submitting.submit(submission)
    except FlowerFailed as error:
        again = f"fedgs deploy submit --server {submission.server} ... --resume {run} "
        again += "--client NAME=KEY.pub ..."
        begun = "where the run has begun; else submit it again"
        print(f"{error}\ncontinue with: {again} ({begun})", file=sys.stderr)
        raise typer.Exit(1) from error


def status(
    run: Path, as_json: bool, prometheus: Path | None, address: str | None, once: bool
) -> None:
    """Shows, writes or serves how a server and its runs stand.

    Args:
        run: a run folder, or a folder of them.
        as_json: print JSON instead of tables.
        prometheus: file to write instead, every `STATUS_PERIOD`.
        address: HOST:PORT to serve /metrics at instead, until stopped.
        once: write the file once.

    Raises:
        UserError: no run folder there, or a file or address that cannot be used.
        typer.Exit: a run cannot be read (code 1).
    """
    from experiments.commands import deploy_metrics, deploy_status

    current = partial(deploy_status.overview_of, run)
    overview = current()
    is_kept = address is not None or prometheus is not None
    if not overview.runs and overview.server is None and not is_kept:
        raise UserError(f"{run}: no run folder here yet; give --output of a run")
    if address is not None:
        where = processes.split_address(address)
        _, endpoint = deploy_metrics.serve_metrics(*where, current)
        print(f"http://{address}/metrics", flush=True)
        endpoint.join()
    elif prometheus is not None:
        pause = threading.Event()
        deploy_metrics.write_prometheus(prometheus, overview)
        while not once and not pause.wait(STATUS_PERIOD):
            deploy_metrics.write_prometheus(prometheus, current())
    else:
        if as_json:
            print(json.dumps(deploy_status.to_json(overview), indent=2))
        else:
            deploy_status.show(overview)
        if any(isinstance(line, deploy_status.Unreadable) for line in overview.runs):
            raise typer.Exit(1)
