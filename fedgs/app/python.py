"""Commands as functions of a Python program: `fedgs.evaluate`, `fedgs.debug`, ...

Keywords are a command's flags, with `_` for `-`. They print what the commands print.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedgs.app.commands import forecast as forecasts
from fedgs.app.debug import bug_detection, debug_request
from fedgs.app.evaluation import evaluate as evaluation
from fedgs.app.evaluation.request import EvaluationRequest
from fedgs.app.report import page
from fedgs.config.run_config import check_names
from fedgs.errors import UserError
from fedgs.library import TrainingRun, folder_of, planned
from fedgs.round.preparation import planned_run

Run = TrainingRun | Path | str


def evaluate(run: Run, **asked: Any) -> dict[str, Any]:
    """Compares a run's images with real ones, as `fedgs evaluate`; returns the scores.

    Privacy: reads private data; output private.

    Args:
        run: or its folder, a file of images, or the name of a yardstick.
        **asked: flags; a run of images that were `given` needs `data`, a file of them.

    Raises:
        UserError: bad input.
    """
    own, reading = _split(asked, EvaluationRequest)
    if isinstance(own.get("metrics"), str):  # as on the command line
        own["metrics"] = tuple(own["metrics"].split(","))
    request = EvaluationRequest(source=str(_place(run)), **own, reading=reading)
    return evaluation.evaluate(request, as_json=False)


def report(runs: Run | Sequence[Run], output: str | Path = "report.html") -> None:
    """Writes one page about runs or folders of `debug`, as `fedgs report`.

    Privacy: as the command's page.

    Raises:
        UserError: bad input; nothing was written.
    """
    if isinstance(runs, Run):  # first, because a text is a sequence, too
        listed = [runs]
    else:
        listed = runs
    if not isinstance(listed, Sequence) or not listed:
        raise UserError(f"runs = {runs!r}: give one run or several")
    page.report([_place(run) for run in listed], Path(output))


def forecast(*given: Any, **settings: Any) -> dict[str, str]:
    """Returns what `fedgs.train` of the same arguments would do and cost.

    Privacy: reads private data, for their owner's eyes; nothing is written or spent.

    Raises:
        UserError: bad input.
    """
    # `planned` takes what `train` takes, which is written down there alone.
    plan, load = planned(*given, **settings)
    config, data = planned_run(plan, load)
    found = forecasts.lines(config, data)
    rows = forecasts.stated(config)
    if not rows:
        found["privacy"] = forecasts.no_guarantee(config)
    for adversary, relation, epsilon in rows:
        found[f"epsilon ({adversary}, {relation})"] = epsilon
    return found


def debug(dry_run: bool = False, **asked: Any) -> dict[str, Any] | None:
    """Compares groups of clients, as `fedgs debug`; returns the diagnosis.

    Privacy: releases (epsilon, delta)-DP output; event: in the run's ledger.

    Args:
        dry_run: only say what the plan can find; returns None.
        **asked: flags and settings.

    Raises:
        UserError: bad input; nothing was trained.
    """
    for name in ("healthy", "suspicious"):  # a file, or a value
        if isinstance(asked.get(name), Path):
            asked[name] = str(asked[name])
    given, settings = _split(
        asked,
        debug_request.Compared,
        debug_request.PlantedBug,
        debug_request.OwnSuspects,
    )
    return bug_detection.from_flags(given, None, settings, dry_run)


def _place(run: Run) -> Path:
    if isinstance(run, TrainingRun):
        return run.path
    return folder_of(run)


def _split(
    asked: dict[str, Any],
    *requests: type[Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of requests, and what must be settings of a run."""
    names = {spec.name for request in requests for spec in fields(request)}
    own: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, value in asked.items():
        if name not in names:
            settings[name] = value
        else:
            own[name] = value
    check_names(settings)
    # Settings go to a file and back, so a path is a text among them.
    for name, value in settings.items():
        if isinstance(value, Path):
            settings[name] = str(value)
    return own, settings
