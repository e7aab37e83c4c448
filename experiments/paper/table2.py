"""Table 2 of the paper: quality, epsilon for each adversary, and communication.

    python -m experiments.paper.table2 --data mnist-by-writer --data-dir DATA --scale
    small

One row for each way to train. Runs lie in `OUTPUT/runs`, their numbers in
`OUTPUT/scores.jsonl`; called again, the command goes on where it was stopped and trains
nothing twice. Other settings make other runs: `--set ROW.SETTING=VALUE`.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Table 2 and section 5.4.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.flags import request_flags, run_command
from experiments.paper import table2_report
from experiments.paper.communication import (
    communication,
    fed_avg_run,
    update_communication,
)
from experiments.paper.scales import (
    Experiment,
    Settings,
    configured,
    label,
    parse_settings,
)
from experiments.paper.scores import Line, ResultLines, score
from experiments.paper.stored_runs import find, last_round, stopped_by_signal, trained
from fedgs.baselines.run import is_finished
from fedgs.config.fields import flag
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, explained
from fedgs.federation.training import Stop


@dataclass(frozen=True)
class Row:
    """One way to train; `recipe` is None for what this command does not train."""

    title: str
    recipe: str | None
    settings: Settings


ROWS = {
    "paper-mode": Row("Algorithm 2 (paper mode)", "algorithm-2", {}),
    "paper-mode-compact": Row(
        "Algorithm 2, compact messages", "algorithm-2", {"transport": "compact"}
    ),
    "full-participation": Row("full participation", "full-participation", {}),
    "full-participation-compact": Row(
        "full participation, compact messages",
        "full-participation",
        {"transport": "compact"},
    ),
    "fed-avg-gan": Row("Fed-Avg GAN", None, {}),
}


@dataclass(frozen=True, kw_only=True)
class Request(Experiment):
    """What a call asks for; each flag's help says what it is."""

    output: Path = flag(Path("runs/table2"), "Its folder.")
    rows: tuple[str, ...] = flag(tuple(ROWS), f"Of {', '.join(ROWS)}.")
    seeds: tuple[str, ...] = flag(("0",), "One run of every row for each, as 0,1,2.")
    changes: list[str] | None = flag(
        None, "ROW.SETTING=VALUE; again for more.", names=("--set",)
    )
    no_training: bool = flag(False, "Print what is there.")
    fed_avg_gan: list[Path] | None = flag(
        None, "A run of fedgs baseline fedavg-gan, for its row; again for more."
    )

    def __post_init__(self) -> None:
        """Checks the rows and the seeds."""
        super().__post_init__()
        if unknown := [row for row in self.rows if row not in ROWS]:
            raise UserError(f"rows = {unknown[0]!r}: give --rows of {', '.join(ROWS)}")
        for name, values in (("rows", self.rows), ("seeds", self.seeds)):
            if len(set(values)) < len(values):
                raise UserError(f"{name} = {','.join(values)!r}: give each one once")

    def config(self, row: str, seed: str) -> RunConfig:
        """Returns the configuration of a row's run."""
        name = ROWS[row].recipe
        assert name is not None
        with explained(ValueError, f"seeds = {seed!r}", "give --seeds like 0,1"):
            settings = {**ROWS[row].settings, **self.data_settings, "seed": int(seed)}
        changes = parse_settings(self.changes or (), list(ROWS))[row]
        return configured(name, self.scale, settings, changes)


def fill(request: Request, stop: Stop) -> list[Line]:
    """Returns the lines of the table; trains and evaluates what is missing.

    A row that this command does not train, or not in this call, has a `missing` that
    says so, and no numbers.

    Privacy: releases (epsilon, delta)-DP output; events: in the runs' ledgers. The
    scores are computed from real data: output private.

    Raises:
        RunStopped: `stop` was set; call again to continue.
        UserError: bad settings or data.
    """
    existing = [row for row in request.rows if ROWS[row].recipe is not None]
    configs = {
        (row, seed): request.config(row, seed)  # all checked before anything trains
        for row in existing
        for seed in request.seeds
    }
    results = ResultLines(request.output / "scores.jsonl")
    lines: list[Line] = []
    for name in request.rows:
        row = ROWS[name]
        if row.recipe is None:
            lines += _fed_avg_gan(name, request, results)
            continue
        for seed in request.seeds:
            config = configs[name, seed]
            line: Line = {"row": name, "title": row.title, "seed": config.seed}
            line["scale"] = ""
            place = (request.output / "runs", row.recipe, config)
            folder = find(*place) if request.no_training else trained(*place, stop)
            if folder is None:
                lines.append({**line, "missing": "not run yet"})
                continue
            line["scale"] = label(config, row.recipe)
            line |= score(folder, last_round(folder), request.protocol, results)
            line |= {"communication": communication(folder)}
            lines.append(line | table2_report.about(folder))
    return lines


def _fed_avg_gan(name: str, request: Request, results: ResultLines) -> list[Line]:
    """Returns the lines of the runs of `fedgs baseline` that are given."""
    row: Line = {"row": name, "title": ROWS[name].title}
    lines: list[Line] = []
    for path in request.fed_avg_gan or ():
        run = fed_avg_run(path)
        if not is_finished(run):
            raise UserError(
                f"fed_avg_gan = {path}: is not finished; `fedgs resume {path}`"
            )
        found = score(
            run.folder, last_round(run.folder), request.protocol, results, run
        )
        own, known = map(dataclasses.asdict, (run.settings, type(run.settings)()))
        changed = [f"{k} {v} (default: {known[k]})" for k, v in own.items()]
        scale = [
            text for text, k in zip(changed, own, strict=True) if own[k] != known[k]
        ]
        seeded = run.config.noise_seed is not None
        about = table2_report.about(run.folder)
        about["is_private"] = own["noise_per_clip"] > 0 and not seeded
        sent = {"communication": update_communication(run)}
        lines.append(row | {"scale": ", ".join(scale)} | found | sent | about)
    return lines or [row | {"missing": "fedgs baseline"}]


def main(words: Sequence[str] | None = None) -> int:
    """Fills and prints the table; returns the exit code."""
    return run_command(table2, words)


@request_flags(Request)
def table2(*, given: dict[str, Any]) -> None:
    """Fill Table 2 of the paper; train and evaluate what is missing."""
    request = Request(**given)
    with stopped_by_signal() as stop:
        lines = fill(request, stop)
    table2_report.write(request.output, lines)
    table2_report.show(request.output, lines)


if __name__ == "__main__":
    sys.exit(main())
