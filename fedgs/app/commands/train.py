"""What `fedgs train`, `resume` and `sample` do."""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from fedgs.app.commands import forecast, select_clients
from fedgs.app.commands.run_outcome import (
    end_when_hurried,
    exit_if_stopped,
    near,
    show_end,
    stopping_on_failure,
)
from fedgs.app.commands.sample_request import DEFAULT_COUNT, SampleRequest
from fedgs.app.commands.terminal import Progress, say
from fedgs.cohorts.selection import PLAN
from fedgs.config.recipes import described, is_fitted
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data
from fedgs.diagnosis.conclusion import conclude
from fedgs.errors import UserError, wrap_error
from fedgs.privacy.accountant import SEEDED
from fedgs.privacy_label import privacy_label
from fedgs.round import local
from fedgs.round.preparation import Load, fitted_to_data, free_output, planned_run
from fedgs.round.run import RunStopped, stop_on_signal
from fedgs.runs import publication
from fedgs.runs.data_card import LABEL
from fedgs.runs.other_runs import OtherRun, open_other
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import draw_samples
from fedgs.runs.sample_files import Output, check_output
from server.launch import flower_engine

console = Console()
# Refuses a run that can start, for a reason that only the caller knows.
Precheck = Callable[[ResolvedConfig, FederatedImages], None]


def train(
    config: RunConfig,
    given: Mapping[str, Any],
    is_dry: bool = False,
    precheck: Precheck | None = None,
    load: Load = load_data,
) -> None:
    """Creates a run folder and trains in it.

    Args:
        config: the settings, of a recipe.
        given: the user's own settings, which stay where the recipe is fitted to the
            data.
        is_dry: only says what a run would do and cost.
        precheck: called with the run's settings and data before anything is written.
        load: the function that loads the data.

    Raises:
        UserError: bad input; nothing was written.
        typer.Exit: the run stopped early or failed (code 1).
    """
    planned = _planned(config, given, is_dry, precheck, load)
    if planned is not None:
        folder, data = planned
        run_to_end(folder, data)


def _planned(
    config: RunConfig,
    given: Mapping[str, Any],
    is_dry: bool,
    precheck: Precheck | None,
    load: Load,
) -> tuple[RunFolder, FederatedImages | None] | None:
    """Returns a new run folder and what the local engine trains on; None of a dry run.

    Flower's workers read the data themselves, so this process does not keep them.
    """
    flower_engine.check(config)
    name = config.recipe
    if is_fitted(config):
        # The name of the folder is checked before the data are loaded, which takes
        # long.
        config, loaded = fitted_to_data(free_output(config, name), given, load)
        # Fitting changes nothing about the data, so they are not loaded again.
        load = lambda config: loaded  # noqa: E731
    resolved, data = planned_run(config, load, name)
    if precheck is not None:
        precheck(resolved, data)
    if is_dry:
        folder = None
    else:
        # Before anything is printed: a second process that chose the same name fails.
        folder = RunFolder.create(resolved)
    say(described(resolved))
    if is_fitted(resolved):
        say(forecast.choice(resolved))
    for warning in forecast.warnings_of(resolved, data):
        say(f"Warning: {warning}", is_error=True)
    if folder is None:
        forecast.show(resolved, data)
        return None
    if is_fitted(resolved):
        say(f"The run takes {forecast.duration(resolved, data)}.")
    if not resolved.compares_groups:
        say(forecast.evaluation_note(resolved, data))
    if resolved.engine == "local":
        return folder, data
    return folder, None


def resume(path: Path, typed: str = "") -> None:
    """Continues a run folder, or a selection of cohorts.

    Args:
        path: where the folder lies.
        typed: a method that the user named on the command line, and so trusts.

    Raises:
        UserError: not a run folder, or a corrupted one.
        typer.Exit: the run stopped early or failed (code 1).
    """
    if (path / PLAN).exists():
        return select_clients.resume(path)
    folder = RunFolder.open(path)
    if folder.is_finished:
        say(f"{path} is finished; its generator is written.")
    elif folder.is_deployed:
        raise UserError(
            f"RUN = {path}: its data lie with the clients of a deployment; continue it "
            f"with `{folder.go_on}`"
        )
    elif folder.is_baseline:
        other = open_other(path, typed)
        run_to_end(folder, other.load_data(), other)
    else:
        go_back(folder)
        if folder.config.engine == "local":
            data = load_data(folder.config)
        else:
            data = None
        run_to_end(folder, data)


def go_back(folder: RunFolder) -> None:
    """Takes an interrupted run back to its last checkpoint.

    The checkpoint is checked here, where errors are plain.

    Raises:
        UserError: a corrupted run, or another process trains in it.
    """
    # What a killed launcher left would go on releasing, beside the resumed run.
    flower_engine.end_previous(folder)
    # Opening the ledger checks it. Its events after the checkpoint stay: these releases
    # were made, and the repeated rounds make others.
    with folder.locked(), closing(folder.ledger()):
        checkpoint = folder.load_checkpoint()
        last_round = 0
        if checkpoint:
            last_round = checkpoint[0]
        # The lines after it are written again by the repeated rounds.
        folder.truncate_metrics(last_round)


def train_from_checkpoint(
    folder: RunFolder,
    data: FederatedImages | None,
    other: OtherRun | None = None,
) -> bool:
    """Trains a run folder from its last checkpoint on, through its engine.

    Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

    Args:
        folder: new, or of `go_back`.
        data: what a local run trains on; None: the Flower engine loads its own.
        other: the folder's run, where its method is not of fedgs.

    Returns:
        Whether the run is complete although it was told to stop, in its last round:
        whoever trains more after it stops now.

    Raises:
        RunStopped: the run ended early with a checkpoint, or the system failed.
        FlowerFailed: the run failed; it can be resumed.
    """
    go_on = f"fedgs resume {near(folder.path)}"
    # From the outside in: a second Ctrl-C ends at once, whatever the others would do; a
    # full disk becomes a stop with a reason; the bars are gone before either is
    # printed.
    with (
        end_when_hurried(),
        stopping_on_failure(),
        stop_on_signal(go_on) as stop,
        Progress(console) as progress,
    ):
        if other:
            title = "step"
        else:
            title = "round"
        report = progress.rounds(folder.config.num_rounds, title)
        if data is not None and other:
            other.train(data, report, stop)
        elif data is not None:
            local.train(folder, data, report, stop)
        else:
            flower_engine.train(folder, report, stop)
        return stop.is_set()


def run_to_end(
    folder: RunFolder,
    data: FederatedImages | None,
    other: OtherRun | None = None,
) -> None:
    """Trains as `train_from_checkpoint`, and says before and after what it is about.

    Raises:
        typer.Exit: the run stopped early or failed (code 1).
    """
    path = near(folder.path)
    if other:
        description = other.description
        trusted = other.name
    else:
        description = _description(folder.config)
        trusted = ""
    say(description)
    with exit_if_stopped(f"continue with: fedgs resume {path}"):
        try:
            train_from_checkpoint(folder, data, other)
        except RunStopped as end:
            # A spent budget ends a run early with its generator written. Nothing is
            # left to continue, so that is no failure.
            if other or not folder.is_finished:
                raise
            say(f"The privacy budget is spent, so the run is complete: {end}")
        conclude(folder)  # writes a diagnosis where groups are compared
    show_end(path, trusted, is_comparison=folder.config.compares_groups)


def _description(config: RunConfig) -> str:
    noise = f"noise_multiplier {config.noise_multiplier:g}"
    if config.noise_multiplier == 0:
        noise += ": NOT PRIVATE"
    elif config.noise_seed is not None:
        noise += f" ({SEEDED})"
    return (
        f"Training with {config.num_clients} clients (nodes: {config.num_nodes}, "
        f"rounds: {config.num_rounds}, clients in each: {config.clients_per_round}); "
        f"{noise}, engine {config.engine}"
    )


def publish(path: Path, output: Path, count: int) -> None:
    """Writes what may go out into a new folder; see `fedgs.runs.publication`.

    Raises:
        UserError: it exists, or the run is not finished or guarantees nothing.
    """
    label = privacy_label(path)
    publication.publish(RunFolder.open(path), output, label, count)
    say(f"Published in {output}. The guarantee and its conditions: {output / LABEL}")


def sample(asked: SampleRequest) -> None:
    """Draws images into a file or a folder; see `Samples.write`.

    Raises:
        UserError: invalid labels, count or output, or no generator yet.
    """
    # The cheap checks first: drawing many images takes minutes.
    check_output(asked.output)
    wanted = None
    labels = asked.labels
    if labels is not None:
        with wrap_error(ValueError, f"labels = {labels!r}", "give numbers like 3,7"):
            wanted = [int(label) for label in labels.split(",")]
    folder = RunFolder.open(asked.run)
    count = asked.count or DEFAULT_COUNT
    if asked.per_class is not None:
        wanted = wanted or [*range(folder.config.num_classes)]
        count = asked.per_class * len(wanted)
    draw_samples(folder, count, wanted, asked.seed).write(asked.output)
    say(f"Wrote {count} images to {Output.of(asked.output).path}")
    if not folder.has_average:
        say(
            f"Warning: {asked.run} is not finished, so these images are of its last "
            f"checkpoint and may be no pictures yet; go on with `{folder.go_on}`",
            is_error=True,
        )
