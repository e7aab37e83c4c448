"""What a folder of `fedgs debug` was asked for: debug.json, written and read."""

import dataclasses
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgs.config.run_config import RunConfig
from fedgs.diagnosis.diagnosis import FEWEST_GROUPS, MOST_GROUPS, Rule
from fedgs.errors import UserError
from fedgs.files import read_json, write_json
from fedgs.runs.run_folder import versions

if TYPE_CHECKING:
    from experiments.debug.cohorts import Groups

COHORTS = ("healthy", "suspicious")
FORMAT = 1
BY_ACCURACY = "selected by accuracy"  # the source of cohorts
MOST_SAMPLES = 1000  # of a generator: the kernel of 12 groups then takes about 2 GB


@dataclass(frozen=True)
class Request:
    """What `fedgs debug` is asked for, beside the settings of the runs.

    Attributes:
        healthy: cohort file of the user's own, or None.
        suspicious: likewise; both or none.
        cohorts: folder of `fedgs cohorts`, instead of selecting.
        runs: run folders of each cohort, instead of training.
        percentile_below: suspicious are clients of at most this percentile's accuracy.
        percentile_above: healthy are clients of more than this percentile's accuracy.
        selection_rounds: of the federated classifier that measures it.
        groups: G of each cohort.
        clients_per_group: as many as there are when None.
        samples_per_group: images drawn from each generator.
        rule: of the verdict.
        is_experiment: whether the planted bug, or none, is known to be the truth.
    """

    healthy: Path | None = None
    suspicious: Path | None = None
    cohorts: Path | None = None
    runs: dict[str, list[Path]] | None = None
    percentile_below: float = 50.0
    percentile_above: float = 50.0
    selection_rounds: int = 40
    groups: int = 4
    clients_per_group: int | None = None
    samples_per_group: int = 500
    rule: Rule = field(default_factory=Rule)
    is_experiment: bool = False

    def __post_init__(self) -> None:
        """Checks what needs no data.

        Raises:
            UserError: a value out of range, or sources of cohorts that exclude others.
        """
        if not FEWEST_GROUPS <= self.groups <= MOST_GROUPS:
            raise UserError(
                f"groups = {self.groups}: give --groups from {FEWEST_GROUPS} to "
                f"{MOST_GROUPS}"
            )
        if not 50 <= self.samples_per_group <= MOST_SAMPLES:
            raise UserError(
                f"samples_per_group = {self.samples_per_group}: give "
                f"--samples-per-group from 50 to {MOST_SAMPLES}"
            )
        if self.clients_per_group is not None and self.clients_per_group < 2:
            raise UserError(
                f"clients_per_group = {self.clients_per_group}: give "
                "--clients-per-group at least 2"
            )
        if (self.healthy is None) != (self.suspicious is None):
            name, other = COHORTS if self.suspicious is None else COHORTS[::-1]
            raise UserError(
                f"{name} = {getattr(self, name)}: compares two cohorts; give "
                f"--{other} too"
            )
        given = (self.healthy, self.cohorts, self.runs)
        if sum(source is not None for source in given) > 1:
            raise UserError(
                "healthy, cohorts, healthy_run: each says which clients are in the "
                "cohorts; give one of them"
            )


def write_plan(
    path: Path,
    config: RunConfig,
    request: Request,
    groups: "Groups | None" = None,
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
    own = dataclasses.asdict(request)
    rule = own.pop("rule")
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
        "request": _plain(own),
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


def request_of(plan: dict[str, Any]) -> Request:
    """Returns the request as it was given."""
    own = dict(plan["request"])
    for name in ("healthy", "suspicious", "cohorts"):
        own[name] = Path(own[name]) if own[name] else None
    if own["runs"] is not None:
        own["runs"] = {c: [Path(p) for p in own["runs"][c]] for c in COHORTS}
    rule = {name: plan["settings"][name] for name in Rule.__dataclass_fields__}
    return Request(**own, rule=Rule(**rule))


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
    found = path / "diagnosis.json"
    return plan, read_json(found) if found.is_file() else None


def change_rule(path: Path, rule: Rule) -> None:
    """Gives a folder another rule for its next diagnosis; its runs stay as they are."""
    plan, _ = read_debug(path)
    plan["settings"].update(dataclasses.asdict(rule))
    write_json(path / "debug.json", plan)
