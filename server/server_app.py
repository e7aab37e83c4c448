"""The Flower ServerApp: opens or creates the run folder and starts the strategy.

`fedgs train --engine flower` passes `run_folder`; a plain `flwr run .` and a deployment
pass the settings themselves, and the run folder is created here.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from logging import ERROR, INFO, LogRecord
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from filelock import AcquireReturnProxy
from flwr.app import Context
from flwr.common.logger import FLOWER_LOGGER, log
from flwr.serverapp import Grid, ServerApp

from clients.flower_speed import hasten_pulls
from fedgs.config.plugins import COHORT_COUNTS
from fedgs.config.recipes import configure
from fedgs.config.run_config import RunConfig
from fedgs.diagnosis.conclusion import conclude
from fedgs.errors import UserError
from fedgs.event_log import log_event
from fedgs.files import inside, make_folder, write_json
from fedgs.methods import phase_at
from fedgs.methods.base import State
from fedgs.methods.cohort_counts import outcome_of
from fedgs.process import (
    FIT,
    REFUSED,
    RUNS_VARIABLE,
    STOP_SECONDS,
    WATCH_SECONDS,
    keep_freed_memory,
)
from fedgs.round.preparation import check_capacity, resolve, resolve_deployed
from fedgs.round.run import RunStopped
from fedgs.runs.epsilons import of_run
from fedgs.runs.run_folder import RunFolder
from server.strategy import FederatedGan

# What a remedy lacks for `flwr run`, where no flag can be given.
PLAIN = "; a flag --a-flag is the key a-flag of --run-config"
PEEP_SECONDS = 5.0  # for a launcher that looks whether the folder is locked
RUN_LOCK_SECONDS = 60.0  # for the process of a killed server, which may be ending

app = ServerApp()


class StopFile:
    """Is set once the run's stop file is there, or a signal has asked for the end."""

    def __init__(self, path: Path) -> None:
        """Watches the given path."""
        self.path = path
        self._is_requested = False  # no Event: its lock may be held when a signal comes

    def is_set(self) -> bool:
        """Returns whether the run should stop."""
        return self._is_requested or self.path.exists()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Has SIGTERM and SIGINT stop the run after its round, and soon in any case.

        Flower's own handlers end the process at once, without a checkpoint; Flower
        raises SIGINT when the process that started this one has died.
        """
        hurry = threading.Timer(STOP_SECONDS, os._exit, (1,))
        hurry.daemon = True
        threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()

        def ask(number: int, frame: FrameType | None) -> None:
            if not self._is_requested:
                self._is_requested = True
                hurry.start()

        numbers = (signal.SIGTERM, signal.SIGINT)
        stock = {number: signal.signal(number, ask) for number in numbers}
        try:
            yield
        finally:
            # Not cancelled: Flower would tell a dead SuperLink of the end for ever.
            for number, handler in stock.items():
                signal.signal(number, handler)


def _leave_with(parent: int) -> None:
    """Ends this process some seconds after its parent, whatever the main thread does.

    Flower's interrupt is not seen by a main thread that waits for a dead SuperLink.
    """
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    time.sleep(STOP_SECONDS)
    os._exit(1)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains one run; its outcome is in the run folder's `.flower/result.json`.

    Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.
    """
    # Keys of Flower's apps are written a-key, those of settings a_key.
    given = context.run_config.items()
    settings = {name.replace("-", "_"): value for name, value in given}
    # A run that goes on is in the server's folder, and all its settings are empty.
    is_new = not settings.get("run_folder")
    is_plain = is_new and "recipe" in settings and not settings.get("nodes")
    try:
        folder = open_folder(settings)
    except UserError as error:
        more = ""
        if is_plain:
            more = PLAIN
        raise refused(f"{error}{more}") from None
    torch.set_num_threads(1)
    keep_freed_memory()
    is_deployed = folder.is_deployed
    flower = folder.path / ".flower"
    flower.mkdir(exist_ok=True)

    report = functools.partial(log_progress, folder)
    stop = StopFile(flower / "stop")
    strategy = FederatedGan(folder, report, stop)
    if is_deployed:
        hasten_pulls(folder.config.round_timeout)

    def ended(status: str, reason: str) -> None:
        strategy.nodes.progress.close(status)
        log_event("ended", outcome=status, reason=reason)

    # What another process wrote, or waits for, is not ours before we hold the folder.
    patience = PEEP_SECONDS
    if is_deployed:
        patience = RUN_LOCK_SECONDS
    with contextlib.ExitStack() as stack, locked(folder, patience):
        if is_deployed:
            stop.path.unlink(missing_ok=True)
            stack.enter_context(stop.on_signals())
        with recorded_outcome(flower / "result.json", ended):
            strategy.start(grid)
            log_verdicts(folder)
            if folder.config.method == COHORT_COUNTS:
                write_cohorts(folder, strategy.training.server)


def refused(problem: str) -> UserError:
    """Logs in one line what no repetition mends; returns it as the submitter reads it.

    Args:
        problem: names the setting and the remedy.
    """
    refusal = f"{REFUSED}: {problem}"
    log(ERROR, "%s", refusal)
    FLOWER_LOGGER.addFilter(_is_no_crash)
    return UserError(refusal)


def _is_no_crash(record: LogRecord) -> bool:
    """Leaves out what Flower says of an app that raises: the refusal is said already.

    These are a traceback, and that nobody handled an exception, with a page for help.
    """
    is_exit = record.getMessage().startswith("Exit Code:")
    return not (record.exc_info or is_exit)


def write_cohorts(folder: RunFolder, state: State) -> None:
    """Writes and logs what a selection found: the clients keep who is in which cohort.

    Privacy: post-processing of DP output.

    Args:
        folder: the folder of the run, whose rounds are done.
        state: the state of the server.
    """
    config = phase_at(folder.config, folder.config.num_rounds).config
    outcome = outcome_of(config, state)
    for what, values in outcome.items():
        log(INFO, "%s: %s", what, values)
    rows = [row.to_json() for row in of_run(folder.path)]
    write_json(folder.path / "cohorts.json", outcome | {"statements": rows})


def log_verdicts(folder: RunFolder) -> None:
    """Says what a run that compares groups has found: one line for each comparison."""
    content = conclude(folder)
    if content is None:
        return
    for comparison in content["comparisons"]:
        name = comparison["suspicious"]
        verdict = comparison["verdict"]
        log(INFO, "verdict of %s: %s. %s", name, verdict, comparison["sentence"])
    rows = ", ".join(content["rows"])
    text = "picture: %s in the run folder, with a row for each of %s"
    log(INFO, text, content["picture"], rows)


def log_progress(folder: RunFolder, metrics: dict[str, Any]) -> None:
    """Logs public metrics of a round, or how far the fit is."""
    num_rounds = folder.config.num_rounds
    every = max(1, num_rounds // 20)
    if "fit_step" in metrics:
        step = metrics["fit_step"]
        steps = metrics["fit_steps"]
        if metrics["is_first"] or step % max(1, steps // 20) == 0:
            log(INFO, "fit: step %d of %d", step, steps)
        with contextlib.suppress(OSError):  # a full disk loses it, not the run
            write_json(folder.path / ".flower" / FIT, metrics)
    elif metrics["round"] % every == 0:
        log(INFO, "round %d of %d", metrics["round"], num_rounds)
    log_event("round", **metrics)


@contextlib.contextmanager
def recorded_outcome(path: Path, ended: Callable[[str, str], None]) -> Iterator[None]:
    """Writes how a block ended, for the launcher: completed, stopped or failed.

    Args:
        path: the path of the JSON file.
        ended: called before with the status and the reason; the file is the last sign.
    """
    # A launcher must not read the outcome of the start before.
    path.unlink(missing_ok=True)
    outcome = {"status": "failed", "message": ""}
    try:
        yield
        outcome["status"] = "completed"
    except RunStopped as error:
        outcome = {"status": "stopped", "message": str(error)}
        log(ERROR, "%s", error)
        FLOWER_LOGGER.addFilter(_is_no_crash)
        raise
    except Exception as error:
        outcome["message"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        ended(outcome["status"], outcome["message"])
        try:
            write_json(path, outcome)
        except OSError as error:  # a full disk, which may be why the run ended
            text = "%s cannot be written (%s); the outcome of the run is %s"
            log(ERROR, text, path.name, error, outcome)


def locked(folder: RunFolder, patience: float) -> AcquireReturnProxy:
    """Holds the folder, waiting for a process that is about to end, or just looks.

    Raises:
        UserError: another process trains in this folder.
    """
    try:
        return folder.locked()
    except UserError:
        log(INFO, "waiting until the process that trains in this folder has ended")
        return folder.locked(patience=patience)


def open_folder(settings: dict[str, Any]) -> RunFolder:
    """Opens the launcher's run folder, or creates one from a plain run's settings.

    Raises:
        UserError: invalid settings, or no run to go on with.
    """
    run_folder = settings.pop("run_folder", "")
    if run_folder:
        path = run_place(str(run_folder))
        if not (path / "config.json").is_file():
            raise UserError(
                f"resume = {run_folder}: there is no run of this name in "
                f"{path.parent}; give --resume one that is there"
            )
        folder = RunFolder.open(path)
        if folder.is_deployed:  # may be older than what is refused today
            folder.config.validate()
        return folder
    config = _config_of(settings)
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    output = config.output or f"run-{now}"
    path = run_place(output)
    config = dataclasses.replace(config, engine="flower", output=str(path))
    if path.exists():
        other = "choose another output"
        if config.node_names:
            other = f"continue it with --resume {path.name}, or {other}"
        raise UserError(f"output = {path}: it exists already; {other}")
    make_folder(path.parent)
    if config.node_names:
        return RunFolder.create(resolve_deployed(config))
    resolved, _ = resolve(config)
    check_capacity(resolved, path.parent)
    return RunFolder.create(resolved)


def _config_of(given: dict[str, Any]) -> RunConfig:
    """Returns the settings of a submission, or of `flwr run .`.

    The second has a recipe, a TOML file, and keys over both.

    Raises:
        UserError: invalid settings, or no such file.
    """
    if "recipe" not in given:
        return RunConfig.from_flat(given)
    # An empty value is one that the run does not set: Flower wants every key.
    own = {name: value for name, value in given.items() if value != ""}
    recipe = own.pop("recipe", None)
    file = own.pop("config", None)
    path = None
    if file:
        path = Path(file).expanduser()
        if not path.is_file():
            raise UserError(
                f"config = {file}: not in {Path.cwd()}, where Flower's server runs; "
                "give its absolute path"
            )
    return configure(recipe, path, own, engine="flower")


def run_place(name: str) -> Path:
    """Returns where a run folder is; an absolute name stays itself, where it may.

    Whoever may submit a run to a deployed server may not name other folders of it.

    Raises:
        UserError: outside the server's folder of runs.
    """
    given = os.environ.get(RUNS_VARIABLE)
    if not given:
        return Path(os.path.normpath(Path.home() / "fedgs-runs" / name))
    runs = Path(os.path.normpath(given))
    path = Path(os.path.normpath(runs / name))
    if path.parent != runs:
        raise UserError(
            f"output = {name}: a run folder lies in the server's own folder of runs; "
            "give its plain name"
        )
    return inside(runs, path.name, "output")
