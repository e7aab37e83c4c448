"""What `fedgs baseline NAME` does."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from experiments.baselines import find
from experiments.baselines.baseline_run import new_run
from experiments.baselines.target import Asked
from fedgs.app.commands import forecast
from fedgs.app.commands.terminal import say
from fedgs.app.commands.train import run_to_end


def train_baseline(name: str, given: Mapping[str, Any]) -> None:
    """Creates a run folder of a central method and trains in it.

    Args:
        name: of the method, or module:object.
        given: settings of the method, of `Asked`, and of `RunConfig`.

    Raises:
        UserError: bad input; nothing was written.
        typer.Exit: the run stopped early (code 1).
    """
    kinds = (find(name, is_typed=True).Settings, Asked)
    own, asked = (
        {spec.name: given[spec.name] for spec in fields(kind) if spec.name in given}
        for kind in kinds
    )
    settings = {n: v for n, v in given.items() if n not in own and n not in asked}
    run, data = new_run(name, own, Asked(**asked), settings)
    for warning in forecast.warnings_of(run.config, data, run.target_epsilon):
        say(f"Warning: {warning}", is_error=True)
    say(f"scores: {forecast.evaluation_note(run.config, data)}")
    run_to_end(run.folder, data, run)
