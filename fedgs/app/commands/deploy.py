"""What `fedgs deploy` does."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from clients.client_command import ClientOptions, become
from fedgs.app.commands.run_outcome import with_advice
from fedgs.cohorts.selection import deployed_settings, refuse_decided
from fedgs.cohorts.selection_settings import Thresholds
from fedgs.config.phases import read_phases
from fedgs.config.plugins import COHORT_CLASSIFIER, COHORT_COUNTS
from fedgs.config.recipes import (
    configure,
    described,
    is_fitted,
    moments_for,
    settings_in,
)
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError, reject
from fedgs.files import make_folder
from fedgs.process import make_private
from server.launch import submit as submitting
from server.launch.control import FlowerFailed
from server.launch.server_command import ServerOptions
from server.launch.submit import Submission
from server.launch.supervisor import ServerEnded, supervise

# Prints what a run can do, from its settings alone; refuses one that can do nothing.
Forecast = Callable[[ResolvedConfig], None]


def serve(server: ServerOptions) -> None:
    """Runs a server until it is told to end.

    Raises:
        UserError: bad input; nothing was started.
        typer.Exit: a process that it needs has ended (code 1).
    """
    # Commands first: they check the server's flags before anything is made on disk.
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
    # The client's state, its counts of releases above all, is for its owner alone.
    make_private("state_dir", client.folder)
    become(command, environment)


def submit(
    submission: Submission,
    recipe: str | None,
    config: Path | None,
    settings: dict[str, Any],
    forecast: Forecast | None = None,
    is_dry: bool = False,
) -> None:
    """Registers clients and starts or continues a run.

    Args:
        submission: without the run's settings.
        recipe: the recipe of the run; None takes the default one.
        config: TOML file of settings over it.
        settings: over both.
        forecast: the check of a new run; called with its settings before anything is
            sent.
        is_dry: end after that.

    Raises:
        UserError: bad input; nothing was submitted.
        typer.Exit: the run did not complete (code 1).
    """
    if submission.resume is not None:
        given = {"recipe": recipe, "config": config, **settings}
        given["dry_run"] = is_dry or None
        reject(given, "a resumed run keeps its own settings; leave out")
    else:
        names = _names(submission)
        engine = settings.get("engine")
        if engine not in (None, "flower"):
            problem = "clients on other machines take part through Flower; leave it out"
            raise UserError(f"engine = {engine!r}: {problem}")
        given = {**settings, "engine": "flower", "nodes": ",".join(names)}
        configured = configure(recipe, config, given)
        if is_fitted(configured):
            chosen = settings_in(config, configured.phases) | given
            configured = _fitted(configured, chosen)
        configured = _named(configured, configured.recipe)
        # Flushed, because Flower's output follows, from another process.
        print(described(configured), flush=True)
        if forecast is not None:
            forecast(_resolved(configured))
        if is_dry:
            return
        flat = submitting.run_settings(configured, names)
        submission = dataclasses.replace(submission, settings=flat)
    _submit(submission)


def select_clients(
    submission: Submission,
    selection: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Registers clients and starts a run that selects cohorts among theirs.

    Args:
        submission: without the run's settings.
        selection: the fields of `Thresholds`.
        settings: the settings of the run, beside what the selection decides.

    Raises:
        UserError: bad input; nothing was submitted.
        typer.Exit: the run did not complete (code 1).
    """
    resume = {"resume": submission.resume}
    reject(
        resume, "use `fedgs deploy submit --resume` to continue a selection; leave out"
    )
    num_nodes = len(_names(submission))
    plain = RunConfig.from_flat(settings)
    num_clients = plain.num_clients or num_nodes * plain.clients_per_node
    decided = deployed_settings(Thresholds(**selection), num_clients, num_nodes)
    refuse_decided(settings, decided)
    submit(submission, COHORT_COUNTS, None, settings | decided)


def _names(submission: Submission) -> list[str]:
    """Returns the names of a new run's clients, at least one."""
    names = [name for name, _ in submission.clients]
    if not names:
        raise UserError(
            "client is unset: a run needs clients; give --client NAME=KEY.pub for each"
        )
    return names


def _fitted(config: RunConfig, chosen: Mapping[str, Any]) -> RunConfig:
    """Returns the default recipe fitted to the clients and the noise of a run.

    Nobody here sees an image: what the clients have is not asked for.

    Args:
        config: the configuration of the recipe.
        chosen: settings that stay.
    """
    own = moments_for(_resolved(config), chosen)
    return dataclasses.replace(config, **own).validate()


def _resolved(config: RunConfig) -> ResolvedConfig:
    """Returns the settings as the server will fix them, but for a seed it draws."""
    from fedgs.round.preparation import resolve_deployed  # loads torch

    return resolve_deployed(config)


def _named(config: RunConfig, name: str) -> RunConfig:
    """Returns settings with the name of a run folder.

    The submitter chooses it, because with it a run is resumed whose server has not said
    anything yet.
    """
    if config.output:
        return config
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return dataclasses.replace(config, output=f"{name}-{stamp}")


def _submit(submission: Submission) -> None:
    run = submission.resume or submission.settings["output"]
    # Before the run starts: a submitter whose connection breaks needs the name.
    print(f"run folder: {run} in the server's state directory", flush=True)
    try:
        submitting.submit(submission)
    except FlowerFailed as error:
        again = (
            f"fedgs deploy submit --server {submission.server} ... --resume {run} "
            "--client NAME=KEY.pub ..."
        )
        # The run may have failed before the server made its folder.
        begun = "if the run has begun; else submit it again"
        print(with_advice(error, f"continue with: {again} ({begun})"), file=sys.stderr)
        raise typer.Exit(1) from error
    if submission.follow:
        place = f"STATE_DIR/runs/{run}"
        print(
            "On the server's machine, where STATE_DIR is its --state-dir: "
            f"`fedgs privacy of {place}` explains what the run cost"
            f"{_what_came(submission, place)}"
        )


def _what_came(submission: Submission, place: str) -> str:
    """Returns where to look for what came of a run: a selection has no report.

    Args:
        submission: of the run, which is completed.
        place: the run folder on the server.
    """
    report = f", and `fedgs report {place} -o report.html` shows what came of it"
    if submission.resume is not None:  # only the server has its settings
        return f"{report}, unless it was a selection of owners"
    last = read_phases(submission.settings["phases"])[-1].method
    if last == COHORT_COUNTS:
        return f", and {place}/cohorts.json has the thresholds and the noisy counts"
    if last == COHORT_CLASSIFIER:
        return ""
    return report


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
