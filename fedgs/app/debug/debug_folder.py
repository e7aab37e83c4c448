"""What a folder of `fedgs debug` was asked for: debug.json, written and read."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

from fedgs.app.debug.debug_request import COHORTS, DebugRequest
from fedgs.cohorts.cohort_file import read_cohort
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, wrap_error
from fedgs.files import check_entries, inside, read_json, write_json
from fedgs.runs.run_folder import versions

DEBUG_FORMAT = 3
BY_ACCURACY = "selected by accuracy"  # the source of cohorts


def write_plan(path: Path, config: RunConfig, request: DebugRequest) -> None:
    """Writes debug.json; the sizes are missing until the cohorts are known.

    Args:
        path: the folder.
        config: settings of all runs.
        request: everything else.
    """
    # Absolute, because the folder may be continued from another working directory.
    files: dict[str, str | None] = {}
    for cohort in COHORTS:
        file: Path | None = getattr(request, cohort)
        if file is None:
            files[cohort] = None
        else:
            files[cohort] = str(file.expanduser().absolute())
    # Files of an earlier `fedgs select-clients` were selected by accuracy too, and the
    # verdict's conditions depend on that.
    source = BY_ACCURACY
    if request.healthy and read_cohort(request.healthy).selection == "given":
        source = "the user's own files"
    content = {
        "format": DEBUG_FORMAT,
        "groups": request.groups,
        "runs": {c: [f"{c}-{i}" for i in range(request.groups)] for c in COHORTS},
        "clients_per_group": None,
        "clients": None,
        "source": source,
        "command": _command(config.seed),
        "request": dataclasses.asdict(request) | files,
        "config": config.to_flat(),
        "versions": versions(),
    }
    write_json(path / "debug.json", content)


def _command(seed: int | None) -> str:
    """Returns the command of this process, with the seed even where it drew one."""
    given = sys.argv[1:]
    # A program that calls the library has no command line of fedgs to repeat.
    if Path(sys.argv[0]).stem not in ("fedgs", "__main__"):
        return shlex.join(["python", *sys.argv])
    # Without the seed, the command would make other groups and another planted bug.
    if not any(w.split("=")[0] == "--seed" for w in given):
        given = [*given, "--seed", str(seed)]
    return shlex.join(["fedgs", *given])


def config_of(plan: dict[str, Any]) -> RunConfig:
    """Returns the settings that the runs share."""
    return RunConfig.from_flat(plan["config"])


def request_of(plan: dict[str, Any]) -> DebugRequest:
    """Returns the request as it was given."""
    fields = dict(plan["request"])
    for cohort in COHORTS:
        # JSON has no paths. A cohort that was not given is null.
        if fields[cohort]:
            fields[cohort] = Path(fields[cohort])
    return DebugRequest(**fields)


def read_debug(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Reads debug.json and, if it is there, diagnosis.json.

    Raises:
        UserError: no folder of `fedgs debug`, of another version, or one that names
            something outside itself.
    """
    if not (path / "debug.json").is_file():
        raise UserError(
            f"{path}: no folder of `fedgs debug` (debug.json is missing); give its "
            "--output"
        )
    # The folder may come from somebody else: nothing in it may lead out of it.
    check_entries(path)
    plan = read_json(path / "debug.json")
    if plan.get("format") != DEBUG_FORMAT:
        raise UserError(
            f"{path}: debug folder of format {plan.get('format')}, this fedgs reads "
            f"{DEBUG_FORMAT}; use the version in it"
        )
    broken = (AttributeError, KeyError, TypeError)
    with wrap_error(broken, f"{path}: a broken debug.json", "restore it from a copy"):
        for names in plan["runs"].values():
            for name in names:
                inside(path, name, "runs in debug.json")
    # diagnosis.json is missing until all generators are trained.
    diagnosis = path / "diagnosis.json"
    if not diagnosis.is_file():
        return plan, None
    return plan, read_json(diagnosis)
