"""What `fedgs deploy` does."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import typer

from clients.client_command import ClientOptions, become
from fedgs.config.recipes import (
    configure,
    described,
    is_fitted,
    moments_for,
    settings_in,
)
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, reject
from fedgs.files import make_folder
from fedgs.process import make_private
from server.launch import submit as submitting
from server.launch.control import FlowerFailed
from server.launch.server_command import ServerOptions
from server.launch.submit import Submission
from server.launch.supervisor import ServerEnded, supervise


def serve(server: ServerOptions) -> None:
    """Runs a server until it is told to end.

    Raises:
        UserError: bad input; nothing was started.
        typer.Exit: a process that it needs has ended (code 1).
    """
    superlink, environment = server.command()
    commands = {"superlink": superlink, "superexec": server.superexec()}
    state = server.state
    make_private("state_dir", state)
    make_folder(state / "runs", 0o700)
    print("runs can be submitted from this machine, and by ssh -L to it", flush=True)
    try:
        supervise(state, commands, environment, server.check)
    except ServerEnded as error:
        print(f"error: {error}; the server has ended", file=sys.stderr)
        raise typer.Exit(1) from error


def join(client: ClientOptions) -> None:
    """Becomes the process of a client.

    Raises:
        UserError: bad input.
    """
    command, environment = client.command()
    make_private("state_dir", client.folder)
    become(command, environment)


def submit(
    submission: Submission,
    recipe: str | None,
    config: Path | None,
    settings: dict[str, Any],
) -> None:
    """Registers clients and starts or continues a run.

    Args:
        submission: without the run's settings.
        recipe: of the run; None takes the default one.
        config: TOML file of settings over it.
        settings: over both.

    Raises:
        UserError: bad input; nothing was submitted.
        typer.Exit: the run did not complete (code 1).
    """
    names = [name for name, _ in submission.clients]
    if submission.resume is not None:
        given = {"recipe": recipe, "config": config, **settings}
        reject(given, "--resume takes the run's own settings; leave out")
    else:
        if not names:
            problem = "give --client NAME=KEY.pub for every client"
            raise UserError(f"client is unset: {problem}")
        given = {"engine": "flower", "nodes": ",".join(names), **settings}
        configured = configure(recipe, config, given)
        if is_fitted(configured):
            from fedgs.round.preparation import resolve_deployed

            own = moments_for(resolve_deployed(configured))
            chosen = settings_in(config, configured.phases) | given
            fitted = {n: v for n, v in own.items() if n not in chosen}
            configured = dataclasses.replace(configured, **fitted).validate()
        configured = _named(configured, configured.recipe)
        print(described(configured), flush=True)
        flat = submitting.run_settings(configured, names)
        submission = dataclasses.replace(submission, settings=flat)
    _submit(submission)


def _named(config: RunConfig, name: str) -> RunConfig:
    """Returns settings with the name of a run folder."""
    if config.output:
        return config
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return dataclasses.replace(config, output=f"{name}-{stamp}")


def _submit(submission: Submission) -> None:
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


def status(run: Path, as_json: bool) -> None:
    """Prints how the runs of a server stand.

    Args:
        run: a run folder, a folder of them, or a server's state directory.
        as_json: print JSON instead of tables.

    Raises:
        UserError: no run folder there.
        typer.Exit: a run cannot be read (code 1).
    """
    from fedgs.app.commands import deploy_status

    statuses = deploy_status.statuses_in(run)
    if as_json:
        print(json.dumps(statuses, indent=2))
    else:
        for line in statuses:
            deploy_status.show(line)
    if any("error" in line for line in statuses):
        raise typer.Exit(1)
