"""From the flags of `fedgs debug` to settings and a request, or to a folder's own."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.debug import bug_detection
from experiments.debug.debug_request import DebugRequest, planted
from experiments.debug.suspects import load_suspect
from fedgs.config.recipes import CLASS_MEANS, configure, is_left_open
from fedgs.diagnosis.rule import Rule
from fedgs.errors import reject


def debug(
    given: dict[str, Any],
    recipe: str | None,
    config: Path | None,
    settings: dict[str, Any],
    dry_run: bool = False,
) -> None:
    """Starts a folder, or continues one where only --output is given.

    Args:
        given: the command's own flags, without those that are not given.
        recipe: of the runs; when None class-means, if a target epsilon and nothing of
            a method is given, else full-participation.
        config: TOML file of settings over the recipe.
        settings: of the command line, over both.
        dry_run: only say what the plan can find.

    Raises:
        UserError: bad input; nothing was trained.
    """
    given = dict(given)
    suspects = [load_suspect(text) for text in given.pop("suspect", [])]
    output = Path(settings.get("output", "")).expanduser()
    of_runs = {name: v for name, v in settings.items() if name != "output"}
    of_runs = {"recipe": recipe, "config": config, **of_runs}
    of_runs["dry_run"] = dry_run or None
    is_alone = {*settings} == {"output"} and not (given or recipe or config)
    # A folder that is given alone is to go on with, so it has to be there.
    if is_alone or (settings.get("output") and (output / "debug.json").is_file()):
        why = f"{output} exists and goes on as it was started; choose another --output"
        reject({**given, **of_runs}, f"{why}, or leave out")
        bug_detection.resume(output, suspects)
        return
    if recipe is None:
        is_open = config is None and is_left_open(settings)
        recipe = CLASS_MEANS if is_open else "full-participation"
    configured = configure(recipe, config, settings | planted(given), engine="flower")
    why = "fedgs debug sets it by --healthy and --suspicious; leave out"
    reject({"cohort": configured.cohort}, why)
    bug_detection.debug(configured, request_of(given), suspects, dry_run)


def request_of(given: Mapping[str, Any]) -> DebugRequest:
    """Returns the request of the command's own flags.

    Raises:
        UserError: one cohort without the other, or values out of range.
    """

    def of(kind: type) -> dict[str, Any]:
        names = {spec.name for spec in dataclasses.fields(kind)}
        return {name: value for name, value in given.items() if name in names}

    rule = Rule(**of(Rule))
    return DebugRequest(**of(DebugRequest), rule=rule, is_experiment="bug" in given)
