"""Table 2 of the paper: quality, epsilon for each adversary, and communication.

    python -m experiments.paper.table2 --data mnist-by-writer --data-dir DATA --scale
    small

One row for each way to train. Runs lie in `OUTPUT/runs`, their numbers in
`OUTPUT/scores.jsonl`; called again, the command goes on where it was stopped and trains
nothing twice. Other settings make other runs: `--set ROW.SETTING=VALUE`.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Table 2 and section 5.4.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.paper import scales, table2_report
from experiments.paper.communication import communication
from experiments.paper.scales import Settings, configured, label, parse_settings
from experiments.paper.scores import Line, Protocol, ResultLines, score
from experiments.paper.stored_runs import exit_code, find, last_round, trained
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.federation.training import Stop
from fedgs.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Row:
    """One way to train; `recipe` is None for what does not exist yet."""

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


@dataclass(frozen=True)
class Request:
    """What a call asks for; see `--help`."""

    output: Path
    rows: tuple[str, ...]
    scale: str
    seeds: tuple[int, ...]
    data: Settings
    settings: dict[str, dict[str, Any]]
    protocol: Protocol
    is_training: bool

    def config(self, row: str, seed: int) -> RunConfig:
        """Returns the configuration of a row's run."""
        name = ROWS[row].recipe
        assert name is not None
        own = {**ROWS[row].settings, **self.data, "seed": seed}
        return configured(name, self.scale, own, self.settings[row])


def fill(request: Request, stop: Stop) -> list[Line]:
    """Returns the lines of the table; trains and evaluates what is missing.

    A row that does not exist, or is not trained in a call without training, has a
    `missing` that says so, and no numbers.

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
            missing = "not implemented yet"
            lines.append({"row": name, "title": row.title, "missing": missing})
            continue
        for seed in request.seeds:
            config = configs[name, seed]
            line = {"row": name, "title": row.title, "seed": seed, "scale": ""}
            folder = _folder(request, row.recipe, config, stop)
            if folder is None:
                lines.append({**line, "missing": "not run yet"})
                continue
            line["scale"] = label(config, row.recipe)
            line |= score(folder, last_round(folder), request.protocol, results)
            line |= {"communication": communication(folder)}
            lines.append(line | table2_report.about(folder))
    return lines


def _folder(
    request: Request, title: str, config: RunConfig, stop: Stop
) -> RunFolder | None:
    root = request.output / "runs"
    if request.is_training:
        return trained(root, title, config, stop)
    return find(root, title, config)


def main(words: Sequence[str] | None = None) -> int:
    """Fills and prints the table; returns the exit code."""
    parsed = _parser().parse_args(words)

    def command(stop: Stop) -> None:
        request = _request(parsed)
        lines = fill(request, stop)
        table2_report.write(request.output, lines)
        table2_report.show(request.output, lines)

    return exit_code(command)


def _parser() -> argparse.ArgumentParser:
    parser = scales.parser("table2", "Table 2 of the paper.")
    add = parser.add_argument
    add("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    add("--seeds", default="0", help="one run of every row for each, as 0,1,2")
    add("--set", action="append", default=[], metavar="ROW.SETTING=VALUE", dest="set")
    add("--no-training", action="store_true", help="print what is there")
    return parser


def _request(given: argparse.Namespace) -> Request:
    rows = tuple(given.rows.split(","))
    if unknown := [row for row in rows if row not in ROWS]:
        raise UserError(f"rows = {unknown[0]!r}: give --rows of {', '.join(ROWS)}")
    try:
        seeds = tuple(int(seed) for seed in given.seeds.split(","))
    except ValueError as error:
        raise UserError(f"seeds = {given.seeds!r}: give --seeds like 0,1") from error
    for name, values in (("rows", rows), ("seeds", seeds)):
        if len(set(values)) < len(values):
            raise UserError(f"{name} = {getattr(given, name)!r}: give each one once")
    return Request(
        output=given.output,
        rows=rows,
        scale=given.scale,
        seeds=seeds,
        data=scales.data_settings(given),
        settings=parse_settings(given.set, list(ROWS)),
        protocol=scales.protocol(given),
        is_training=not given.no_training,
    )


if __name__ == "__main__":
    sys.exit(main())
