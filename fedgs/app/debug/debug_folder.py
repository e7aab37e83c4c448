"""What a folder of `fedgs debug` was asked for: debug.json, written and read."""

import dataclasses
import itertools
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
    own_files: dict[str, str | None] = {}
    for cohort in COHORTS:
        file = getattr(request, cohort)
        # The command that goes on may be called in another folder.
        own_files[cohort] = file and str(file.expanduser().absolute())
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
        "request": dataclasses.asdict(request) | own_files,
        "config": config.to_flat(),
        "versions": versions(),
    }
    write_json(path / "debug.json", content)


def _command(seed: int | None) -> str:
    """Returns the command of this process, with the seed even where it drew one."""
    given = sys.argv[1:]
    # A program that uses fedgs has a command line of its own.
    if Path(sys.argv[0]).stem not in ("fedgs", "__main__"):
        return shlex.join(["python", *sys.argv])
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
    check_entries(path)
    plan = read_json(path / "debug.json")
    if plan.get("format") != DEBUG_FORMAT:
        raise UserError(
            f"{path}: debug folder of format {plan.get('format')}, this fedgs reads "
            f"{DEBUG_FORMAT}; use the version in it"
        )
    broken = (AttributeError, KeyError, TypeError)
    with wrap_error(broken, f"{path}: a broken debug.json", "restore it from a copy"):
        for name in itertools.chain.from_iterable(plan["runs"].values()):
            inside(path, name, "runs in debug.json")
    diagnosis = path / "diagnosis.json"
    return plan, read_json(diagnosis) if diagnosis.is_file() else None
