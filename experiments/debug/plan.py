"""What a folder of `fedgs debug` was asked for: debug.json, written and read."""

import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.debug.request import COHORTS, DebugRequest
from fedgs.cohorts.files import Cohort, write_cohort
from fedgs.config.run_config import RunConfig
from fedgs.diagnosis.rule import Rule
from fedgs.errors import UserError
from fedgs.files import read_json, write_json
from fedgs.runs.run_folder import versions

FORMAT = 1
BY_ACCURACY = "selected by accuracy"  # the source of cohorts


@dataclass(frozen=True)
class Groups:
    """The groups of both cohorts.

    Attributes:
        size: clients of each group.
        found: clients of each cohort, before they were grouped.
        members: name of the group, such as healthy-0, to its clients.
        is_selected: whether accuracy decided who is in which cohort.
    """

    size: int
    found: dict[str, int]
    members: dict[str, Cohort]
    is_selected: bool

    def write(self, folder: Path) -> None:
        """Writes one cohort file per group."""
        folder.mkdir(exist_ok=True)
        for name, cohort in self.members.items():
            title = f"{name}: {self.size} clients, a random group of its cohort"
            write_cohort(folder / f"{name}.txt", cohort, title)


def write_plan(
    path: Path,
    config: RunConfig,
    request: DebugRequest,
    groups: Groups | None = None,
    is_selected: bool = False,
) -> None:
    """Writes debug.json; the groups are missing until the cohorts are known.

    Args:
        path: the folder.
        config: settings of all runs.
        request: everything else.
        groups: of the cohorts.
        is_selected: whether accuracy decided who is in which cohort.
    """
    planted = None
    if request.is_experiment or config.corruption != "none":
        planted = {
            "corruption": config.corruption,
            "fraction": config.corruption_fraction,
        }
    fields = dataclasses.asdict(request)
    rule = fields.pop("rule")
    runs = {cohort: list[str]() for cohort in COHORTS}
    if groups is not None:
        runs = {c: [f"{c}-{i}" for i in range(request.groups)] for c in COHORTS}
    elif request.runs is not None:
        runs = {c: [str(p.absolute()) for p in request.runs[c]] for c in COHORTS}
    content = {
        "format": FORMAT,
        "cohorts": list(COHORTS),
        "groups": request.groups,
        "runs": runs,
        "clients_per_group": groups.size if groups else None,
        "clients": groups.found if groups else None,
        "source": BY_ACCURACY if is_selected else "the user's own files",
        "planted": planted,
        "command": _command(None if request.runs else config.seed),
        "settings": {
            **rule,
            "samples_per_group": request.samples_per_group,
            "groups": request.groups,
        },
        "request": _plain(fields),
        "config": config.to_flat(),
        "versions": versions(),
    }
    if groups is not None:
        content["command"] = read_json(path / "debug.json")["command"]
    write_json(path / "debug.json", content)


def _command(seed: int | None) -> str:
    """Returns the command of this process, with the seed even where it drew one."""
    given = sys.argv[1:]
    if Path(sys.argv[0]).stem == "bug_table":
        return shlex.join(["python", "-m", "experiments.debug.bug_table", *given])
    if seed is not None and not any(w.split("=")[0] == "--seed" for w in given):
        given = [*given, "--seed", str(seed)]
    return shlex.join(["fedgs", *given])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value.expanduser().absolute()) if isinstance(value, Path) else value


def config_of(plan: dict[str, Any]) -> RunConfig:
    """Returns the settings that the runs share."""
    return RunConfig.from_flat(plan["config"])


def request_of(plan: dict[str, Any]) -> DebugRequest:
    """Returns the request as it was given."""
    fields = dict(plan["request"])
    for name in ("healthy", "suspicious", "cohorts"):
        fields[name] = Path(fields[name]) if fields[name] else None
    if fields["runs"] is not None:
        fields["runs"] = {c: [Path(p) for p in fields["runs"][c]] for c in COHORTS}
    rule = {name: plan["settings"][name] for name in Rule.__dataclass_fields__}
    return DebugRequest(**fields, rule=Rule(**rule))


def read_debug(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Reads debug.json and, if it is there, diagnosis.json.

    Raises:
        UserError: no folder of `fedgs debug`, or of another version.
    """
    if not (path / "debug.json").is_file():
        raise UserError(
            f"{path}: no folder of `fedgs debug` (debug.json is missing); give its "
            "--output"
        )
    plan = read_json(path / "debug.json")
    if plan.get("format") != FORMAT:
        raise UserError(
            f"{path}: debug folder of format {plan.get('format')}, this fedgs reads "
            f"{FORMAT}; use the version in it"
        )
    diagnosis = path / "diagnosis.json"
    return plan, read_json(diagnosis) if diagnosis.is_file() else None


def change_rule(path: Path, rule: Rule) -> None:
    """Gives a folder another rule for its next diagnosis; its runs stay as they are."""
    plan, _ = read_debug(path)
    plan["settings"].update(dataclasses.asdict(rule))
    write_json(path / "debug.json", plan)
