"""From the flags of `fedgs debug` to settings and a request, or to a folder's own."""

from pathlib import Path
from typing import Any

from experiments.debug import bug_detection
from experiments.debug.plan import COHORTS, Request
from fedgs.config.recipes import configure
from fedgs.diagnosis.diagnosis import Rule
from fedgs.errors import UserError, refuse

BUGS = {"flip": "invert", "rotate": "rotate", "none": "none"}
RULE = ("alpha", "min_effect")
SELECTION = ("percentile_below", "percentile_above", "selection_rounds")


def debug(
    given: dict[str, Any],
    recipe: str | None,
    config: Path | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Starts a folder, or continues one where only --output is given.

    Args:
        given: the command's own flags, None where they are not given.
        recipe: of the runs; full-participation when None.
        config: TOML file of settings over the recipe.
        settings: of the command line, over both.
        as_json: print diagnosis.json instead of tables.

    Raises:
        UserError: bad input; nothing was trained.
    """
    given = {name: value for name, value in given.items() if value not in (None, [])}
    output = Path(settings.get("output", "")).expanduser()
    if settings.get("output") and (output / "debug.json").is_file():
        others = {name: v for name, v in settings.items() if name != "output"}
        started = {"recipe": recipe, "config": config, **given, **others}
        why = f"{output} exists and goes on as it was started; choose another --output"
        refuse(started, f"{why}, or leave out")
        bug_detection.resume(output, as_json)
        return
    decided = ("cohort", "corruption", "corruption_fraction", "corruption_seed")
    refuse(
        {name: settings.get(name) for name in decided},
        "fedgs debug sets it by --bug, --fraction and the cohorts; leave out",
    )
    request = request_of(given)
    if request.runs is not None:
        others = {name: v for name, v in settings.items() if name != "output"}
        others |= {"recipe": recipe, "config": config}
        refuse(others, "the runs exist and have their settings; leave out")
    own = {**settings, **_bug(given, request)}
    configured = configure(recipe or "full-participation", config, own, engine="flower")
    bug_detection.debug(configured, request, as_json)


def request_of(given: dict[str, Any]) -> Request:
    """Returns the request of the command's own flags.

    Raises:
        UserError: flags that exclude each other, or values out of range.
    """
    own = {name: v for name, v in given.items() if name in Request.__annotations__}
    rule = Rule(**{name: given[name] for name in RULE if name in given})
    runs = None
    if "healthy_run" in given or "suspicious_run" in given:
        runs = {c: given.get(f"{c}_run", []) for c in COHORTS}
        counts = {name: len(paths) for name, paths in runs.items()}
        if len(set(counts.values())) != 1:
            raise UserError(
                f"healthy_run = {counts['healthy']} runs, suspicious_run = "
                f"{counts['suspicious']}: give each flag equally often"
            )
        own["groups"] = counts["healthy"]
        refuse(
            {"clients_per_group": given.get("clients_per_group")},
            "the runs have their groups; leave out",
        )
    has_cohorts = runs is not None or "healthy" in given or "suspicious" in given
    if has_cohorts:
        names = ("bug", "fraction", *SELECTION)
        refuse(
            {name: given.get(name) for name in names},
            "your own cohorts are compared as they are; leave out",
        )
    if "cohorts" in given:
        refuse(
            {name: given.get(name) for name in ("fraction", *SELECTION)},
            "the folder of --cohorts has its own; leave out",
        )
    is_experiment = "bug" in given and not has_cohorts
    return Request(**own, runs=runs, rule=rule, is_experiment=is_experiment)


def _bug(given: dict[str, Any], request: Request) -> dict[str, Any]:
    """Returns the settings of the planted bug."""
    bug = given.get("bug")
    if bug is None:
        refuse({"fraction": given.get("fraction")}, "needs --bug; give it or leave out")
        return {}
    if bug not in BUGS:
        raise UserError(f"bug = {bug!r}: give --bug one of {', '.join(BUGS)}")
    if request.cohorts is not None and bug != "none":
        raise UserError(
            f"bug = {bug}: the folder of --cohorts says what was planted; leave out "
            "--bug"
        )
    fraction = {"corruption_fraction": given["fraction"]} if "fraction" in given else {}
    return {"corruption": BUGS[bug], **fraction}
