"""The report's page about runs of `fedgs baseline`: public files only."""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.baselines.command import tables
from experiments.report.evaluation import evaluation_tables
from experiments.report.run import Grid, RunFacts, read_folder, shown_settings
from experiments.report.tables import versions_table
from experiments.tables import Table
from fedgs.baselines.asked import SHARED_SETTINGS
from fedgs.baselines.run import BaselineRun, more_settings, open_run


@dataclass(frozen=True)
class BaselineFacts:
    """One run of a baseline, as its folder records it.

    Attributes:
        run: the run.
        facts: what its folder says as that of any run; no events, no statements.
        guarantees: a table for each unit; none for a method that guarantees nothing.
    """

    run: BaselineRun
    facts: RunFacts
    guarantees: Sequence[Table]

    @property
    def grid(self) -> Grid:
        """The last picture."""
        return self.facts.grids[-1]

    @property
    def command(self) -> str:
        """The command that trains the run again; paths without their folders."""
        words = ["fedgs", "baseline", self.run.name]
        if names := self.run.config.node_names:
            words = ["fedgs", "deploy", "baseline", self.run.name]
            words += ["--server", "HOST:PORT", *(f"--client={n}" for n in names)]
        default = self.run.method.Settings()
        for spec in dataclasses.fields(default):
            value = getattr(self.run.settings, spec.name)
            if value != getattr(default, spec.name):
                words += flags(spec.name, value)
        for name, value in self.settings("of the run").items():
            words += flags(name, value)
        return shlex.join(words)

    def settings(self, which: str) -> dict[str, Any]:
        """Returns the settings of the method, or those of the run that it reads."""
        if which == "of the method":
            return dataclasses.asdict(self.run.settings)
        shown, more = shown_settings(self.run.config), more_settings(self.run.method)
        config = self.run.config
        default = {spec.name: spec.default for spec in dataclasses.fields(config)}
        return {
            name: text
            for group, values in shown.items()
            for name, text in values.items()
            if {group, name} & {*SHARED_SETTINGS, *more, "node_sizes"}
            and getattr(config, name) != default[name]
            and (name != "engine" or not config.node_names)
        }


def flags(name: str, value: Any) -> list[str]:
    """Returns a setting as words of a command line."""
    flag = name.replace("_", "-")
    if str(value) == "True":  # 1.0 == True
        return [f"--{flag}"]
    if str(value) == "False":
        return [f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def read_baseline(path: Path) -> BaselineFacts:
    """Reads what the report shows of a baseline's run folder.

    Privacy: post-processing of DP output, or public; reads nothing private.

    Raises:
        UserError: no such run folder, a broken file, or no sample grid yet.
    """
    run = open_run(path)
    rows = run.guarantees()
    facts = read_folder(run.folder, [], [])
    return BaselineFacts(run, facts, tables(run, rows))


def settings_of(runs: Sequence[BaselineFacts]) -> list[Table]:
    """Returns the settings of each run that are its own."""
    found: list[Table] = []
    for facts in runs:
        for which in ("of the method", "of the run"):
            rows = [[name, str(v)] for name, v in facts.settings(which).items()]
            caption = f"{facts.facts.name}: settings {which}"
            found.append(Table(caption, ["setting", "value"], rows, numeric=False))
    return found


def page_of(paths: Sequence[Path]) -> dict[str, Any]:
    """Returns what the template `baseline.html` shows of runs.

    Raises:
        UserError: as `read_baseline`.
    """
    runs = [read_baseline(path) for path in paths]
    plain = [facts.facts for facts in runs]
    return {
        "baselines": runs,
        "evaluations": evaluation_tables(plain),
        "settings": settings_of(runs),
        "versions": versions_table(plain),
    }
