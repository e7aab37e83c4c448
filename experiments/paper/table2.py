"""Table 2 of the paper: quality, epsilon for each adversary, and communication.

    python -m experiments.paper.table2 --data mnist-by-writer --data-dir DATA --scale
    small

One row for each way to train. Runs lie in `OUTPUT/runs`, their numbers in
`OUTPUT/scores.jsonl`; called again, the command goes on where it was stopped and trains
nothing twice. Other settings make other runs: `--set SETTING=VALUE`.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Table 2 and section 5.4.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.paper import table2_report
from experiments.paper.fed_avg_gan import fed_avg_gan_lines
from experiments.paper.scales import Experiment, configured, label
from experiments.paper.scores import score
from experiments.paper.stored_runs import (
    NotStored,
    last_round,
    stopped_by_signal,
    stored,
    train,
)
from experiments.store import Line, Store
from fedgs.app.flags import request_flags, run_command
from fedgs.config.fields import flag
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, wrap_error
from fedgs.federation.training import Stop
from server.launch.measuring_grid import communication

ALGORITHM_2, FULL = "algorithm-2", "full-participation"
COMPACT = {"message_precision": "compact"}
FED_AVG_GAN = "fed-avg-gan"  # is trained by `fedgs baseline`
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {  # row: title, recipe, settings
    "paper-mode": ("Algorithm 2 (paper mode)", ALGORITHM_2, {}),
    "paper-mode-compact": ("Algorithm 2, compact messages", ALGORITHM_2, COMPACT),
    FULL: ("full participation", FULL, {}),
    f"{FULL}-compact": ("full participation, compact messages", FULL, COMPACT),
    FED_AVG_GAN: ("Fed-Avg GAN", "", {}),
}


@dataclass(frozen=True, kw_only=True)
class Request(Experiment):
    """What a call asks for; each flag's help says what it is."""

    output: Path = flag(Path("runs/table2"), "Its folder.")
    rows: tuple[str, ...] = flag(tuple(ROWS), f"Of {', '.join(ROWS)}.")
    seeds: tuple[str, ...] = flag(("0",), "One run of every row for each, as 0,1,2.")
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
        _, recipe, settings = ROWS[row]
        with wrap_error(ValueError, f"seeds = {seed!r}", "give --seeds like 0,1"):
            own = {"seed": int(seed), "engine": "flower"}
        return configured(recipe, self.scale, settings, self.settings, own)


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
    configs = {
        row: [request.config(row, seed) for seed in request.seeds]
        for row in request.rows  # all checked before anything trains
        if row != FED_AVG_GAN
    }
    store = Store(request.output / "scores.jsonl")
    training = None if request.no_training else partial(train, stop=stop)
    lines: list[Line] = []
    for row in request.rows:
        title, recipe, _ = ROWS[row]
        for config in configs.get(row, ()):
            line: Line = {"row": row, "title": title, "seed": config.seed}
            try:
                folder = stored(request.output / "runs", recipe, config, training)
            except NotStored:
                lines.append({**line, "scale": "", "missing": "not run yet"})
                continue
            line["scale"] = label(config, recipe)
            line |= score(folder, last_round(folder), request.protocol, store)
            line |= {"communication": communication(folder)}
            lines.append(line | table2_report.about(folder))
        if row == FED_AVG_GAN:
            known = {"row": row, "title": title}
            lines += [
                known | line
                for line in fed_avg_gan_lines(
                    request.fed_avg_gan or (), request.protocol, store
                )
            ]
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Fills and prints the table; returns the exit code."""
    return run_command(table2, words)


@request_flags(Request)
def table2(*, given: dict[str, Any]) -> None:
    """Fill Table 2 of the paper; train and evaluate what is missing."""
    request = Request(**given)
    with stopped_by_signal() as stop:
        lines = fill(request, stop)
    table2_report.show(request.output, lines)


if __name__ == "__main__":
    sys.exit(main())
