"""How commands that work for long begin and end: a new folder, and what continues."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from typer import Exit as Exit  # experiments end with it, too

from fedgs.app.commands.privacy_words import protection
from fedgs.app.commands.terminal import say
from fedgs.app.flags import INTERRUPTED
from fedgs.app.tables import folded
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, refused_by_system, wrap_error
from fedgs.privacy_label import privacy_label
from fedgs.process import CANNOT_GO_ON
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import check_free
from server.launch.control import FlowerFailed


def new_output(output: str) -> Path:
    """Returns the absolute path of a folder that a command is to create.

    Args:
        output: as of --output.

    Raises:
        UserError: unset, there is something already, or it cannot be there.
    """
    if not output:
        raise UserError("output is unset: give --output, the folder to create")
    check_free(output)
    return Path(output).expanduser().absolute()


def make_output(path: Path) -> None:
    """Creates it.

    Raises:
        UserError: it cannot be created.
    """
    problem = f"output = {path}: it cannot be made"
    with wrap_error(OSError, problem, "choose another --output"):
        path.mkdir(parents=True)


@contextmanager
def exit_if_stopped(advice: str) -> Iterator[None]:
    """Turns a run that stopped early or failed into two lines and exit code 1.

    Args:
        advice: what continues it.

    Raises:
        Exit: code 1.
    """
    try:
        yield
    except (RunStopped, FlowerFailed) as error:
        # Exit code 1 tells a script that a run had begun; bad input has 2.
        text = with_advice(error, advice)
        print(folded(text, sys.stderr), file=sys.stderr)
        raise Exit(1) from error


def with_advice(error: Exception, advice: str) -> str:
    """Returns why a run ended, and what continues it, unless nothing does."""
    if CANNOT_GO_ON in str(error):
        return str(error)
    return f"{error}\n{advice}"


@contextmanager
def stopping_on_failure() -> Iterator[None]:
    """Makes a failure of the system stop a run that has begun, such as a full disk.

    Raises:
        RunStopped: with the reason; another `UserError` is bad input, and stays.
    """
    try:
        yield
    except UserError as error:
        # With an OSError as its cause it is a failure of the system in other words
        # (`fedgs.errors.wrap_error`), so the run can go on once there is room.
        if not isinstance(error.__cause__, OSError):
            raise
        raise RunStopped(str(error)) from error
    except OSError as error:
        raise RunStopped(refused_by_system(error)) from error


@contextmanager
def end_when_hurried() -> Iterator[None]:
    """Ends this process at once on an interrupt: its threads may compute for long.

    A run folder outlives that as it outlives a power cut.
    """
    try:
        yield
    except KeyboardInterrupt:
        # Neither waits for threads nor flushes, so what was printed is flushed before.
        sys.stdout.flush()
        os._exit(INTERRUPTED)


def near(path: Path) -> Path:
    """Returns a path as short as it can be typed from here."""
    is_below = path.is_relative_to(Path.cwd()) and path != Path.cwd()
    if is_below:
        return path.relative_to(Path.cwd())
    return path


def show_end(path: Path, typed: str = "", is_comparison: bool = False) -> None:
    """Prints how a training ends: the picture, the one epsilon, what to do next.

    Args:
        path: the path of the run folder.
        typed: a method that the user named on the command line, and so trusts.
        is_comparison: whether groups were compared, of whose pictures the verdict
            speaks: nobody draws samples of them.
    """
    grids = sorted((path / "samples").glob("*.png"))
    for grid in grids[-1:]:  # none where the disk was full
        if not is_comparison:
            say(f"Samples:     {grid}")
    label = privacy_label(path, typed)
    say(f"Privacy:     {protection(label)}; details: fedgs privacy of {path}")
    say(f"Run folder:  {path}; keep it to yourself, for it holds private files")
    # A run without an epsilon is refused.
    if label["epsilon"] is not None and not is_comparison:
        say(f"To publish:  fedgs publish {path} -o FOLDER")
    say(f"Report:      fedgs report {path} -o report.html")


def in_words(config: ResolvedConfig, ratios: Mapping[int, float]) -> str:
    """Returns ratios of signal to noise by what was released, means over rounds.

    Args:
        config: the run's configuration.
        ratios: by round.
    """
    found: dict[str, list[float]] = {}
    for round, ratio in ratios.items():
        own = config.at_round(round)
        # Several phases of one run release an "embedding", each of another kind, so
        # they are told apart by their methods.
        if own.releases_once:
            kind = own.method
        else:
            kind = config.terms(round).release
        found.setdefault(kind, []).append(ratio)
    texts: list[str] = []
    for kind, of_kind in found.items():
        texts.append(f"{kind} {fmean(of_kind):.3g}")
    return ", ".join(texts)
