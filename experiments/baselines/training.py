"""What `fedgs baseline NAME` does."""

from collections.abc import Mapping
from typing import Any

from experiments.baselines.baseline_run import new_run
from fedgs.app.commands import forecast
from fedgs.app.commands.terminal import say
from fedgs.app.commands.train import run_to_end


def train_baseline(name: str, given: Mapping[str, Any]) -> None:
    """Creates a run folder of a central method and trains in it.

    Args:
        name: the name of the method, or module:object.
        given: settings of the method, of `BaselineRequest`, and of `RunConfig`.

    Raises:
        UserError: bad input; nothing was written.
        typer.Exit: the run stopped early (code 1).
    """
    run, data = new_run(name, given)
    # Before the training, which may take hours.
    for warning in forecast.warnings_of(run.config, data, run.target_epsilon):
        say(f"Warning: {warning}", is_error=True)
    say(forecast.evaluation_note(run.config, data))
    run_to_end(run.folder, data, run)
