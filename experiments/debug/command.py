"""From the flags of `fedgs debug` to settings and a request, or to a folder's own."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.debug import bug_detection
from experiments.debug.request import COHORTS, DebugRequest, planted
from experiments.debug.suspects import load_suspect
from fedgs.config.recipes import CLASS_MEANS, configure, is_left_open
from fedgs.diagnosis.rule import FEWEST_GROUPS, Rule
from fedgs.errors import UserError, reject

RULE = ("alpha", "min_effect")
SELECTION = ("percentile_below", "percentile_above", "selection_rounds")


def debug(
    given: dict[str, Any],
    recipe: str | None,
    config: Path | None,
    settings: dict[str, Any],
    as_json: bool,
    dry_run: bool = False,
) -> None:
    """Starts a folder, or continues one where only --output is given.

    Args:
        given: the command's own flags, without those that are not given.
        recipe: of the runs; when None class-means, if a target epsilon and nothing of
            a method is given, else full-participation.
        config: TOML file of settings over the recipe.
        settings: of the command line, over both.
        as_json: print diagnosis.json instead of tables.
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
        bug_detection.resume(output, as_json, suspects)
        return
    why = "fedgs debug sets it by --healthy and --suspicious; leave out"
    reject({"cohort": settings.get("cohort")}, why)
    request = request_of(given)
    if request.runs is not None:
        reject(of_runs, "the runs exist and have their settings; leave out")
    if request.cohorts is not None and given.get("bug", "none") != "none":
        raise UserError(
            f"bug = {given['bug']}: the folder of --cohorts says what was planted; "
            "leave out --bug"
        )
    if recipe is None:
        is_open = config is None and is_left_open(settings)
        recipe = CLASS_MEANS if is_open else "full-participation"
    configured = configure(recipe, config, settings | planted(given), engine="flower")
    bug_detection.debug(configured, request, as_json, suspects, dry_run)


def request_of(given: Mapping[str, Any]) -> DebugRequest:
    """Returns the request of the command's own flags.

    Raises:
        UserError: flags that exclude each other, or values out of range.
    """
    names = {spec.name for spec in dataclasses.fields(DebugRequest)}
    values = {name: value for name, value in given.items() if name in names}
    runs = _runs(given)
    if runs is not None:
        values["groups"] = len(runs["healthy"])
        reject(
            {"clients_per_group": given.get("clients_per_group")},
            "the runs have their groups; leave out",
        )
    has_cohorts = runs is not None or "healthy" in given or "suspicious" in given
    if has_cohorts:
        reject(
            {name: given.get(name) for name in ("bug", "fraction", *SELECTION)},
            "your own cohorts are compared as they are; leave out",
        )
    if "cohorts" in given:
        reject(
            {name: given.get(name) for name in ("fraction", *SELECTION)},
            "the folder of --cohorts has its own; leave out",
        )
    return DebugRequest(
        **values,
        runs=runs,
        rule=Rule(**{name: given[name] for name in RULE if name in given}),
        is_experiment="bug" in given and not has_cohorts,
    )


def _runs(given: Mapping[str, Any]) -> dict[str, list[Path]] | None:
    """Returns the runs of each cohort that exist already; None where none are given."""
    runs = {cohort: given.get(f"{cohort}_run", []) for cohort in COHORTS}
    counts = {cohort: len(paths) for cohort, paths in runs.items()}
    if len(set(counts.values())) != 1:
        raise UserError(
            f"healthy_run = {counts['healthy']} runs, suspicious_run = "
            f"{counts['suspicious']}: give each flag equally often"
        )
    if 0 < counts["healthy"] < FEWEST_GROUPS:
        raise UserError(
            f"healthy_run = {counts['healthy']} runs: give --healthy-run and "
            f"--suspicious-run at least {FEWEST_GROUPS} times each"
        )
    return runs if counts["healthy"] else None
