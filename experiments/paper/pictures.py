"""The table of pictures: what a user-level epsilon buys, by data set and method.

    python -m experiments.paper.pictures --data-dir DATA              train and print
    python -m experiments.paper.pictures --only by-writer-staged-eps  some cells
    python -m experiments.paper.pictures --print                      from folders only

A cell is one run, `OUTPUT/<data>-<method>-eps<epsilon>-seed<seed>`. Its generator is
judged by the small CNN of `fedgs evaluate`, trained on 10,000 samples. What is there is
not computed again; an interrupted run is resumed.
"""

import math
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import typer

from experiments.commands.endings import exit_if_stopped
from experiments.commands.progress import say
from experiments.commands.train import resume, train_from_checkpoint
from experiments.evaluation.evaluate import evaluate
from experiments.evaluation.request import EvaluationRequest
from experiments.flags import request_flags, run_command
from experiments.tables import Table
from fedgs.config.fields import flag
from fedgs.config.recipes import overridden, recipe
from fedgs.errors import UserError, explained
from fedgs.federation.preparation import new_run
from fedgs.files import read_json, read_json_lines, write_atomically, write_json
from fedgs.runs import epsilons, sample
from fedgs.runs.run_folder import RunFolder

Settings = dict[str, Any]
NO_NOISE = math.inf
NUM_SAMPLES = 10_000
COST = "cpu-seconds.json"  # in the run folder: of training, all threads


class Source(NamedTuple):
    """Private data: its clients, and the accuracy aimed at by epsilon."""

    settings: Settings
    targets: Mapping[float, float]


SHARDS = {"partition": "iid", "num_clients": 1000, "clients_per_node": 50}
DATA = {
    "mnist-by-writer": Source({}, {10: 0.93, 3: 0.88, 1: 0.80}),
    "mnist": Source(SHARDS, {10: 0.95, 3: 0.92, 1: 0.85}),
    "fashion-mnist": Source(SHARDS, {10: 0.80, 3: 0.76, 1: 0.70}),
}


class Method(NamedTuple):
    """One way to train: settings over a recipe, and more of them by epsilon."""

    recipe: str
    settings: Settings
    of_epsilon: Mapping[float, Settings]
    data: Collection[str] = DATA
    seeds: Collection[int] = range(1000)  # of those that are asked for


# Chosen on digits of fonts and on Fashion-MNIST.
SIZES = {10.0: {"moment_size": 10}, 3.0: {"moment_size": 8}, 1.0: {"moment_size": 6}}
AXES = {10.0: {"latent_dim": 30}, 3.0: {"latent_dim": 20}, 1.0: {"latent_dim": 15}}
# 40 rounds of gradients of 32 fakes cost 1280, a fifth of mu^2; stages have the rest.
REFINED = {"stage_weights": "1280,1280,2560", "num_rounds": 43}
RANDOM = {"stages": "random", "num_rounds": 1, "stage_steps": "500"}
LARGE_STEPS = {"generator_learning_rate": 3e-3, "ema_decay": 0.985}
SHORT, SURROGATE = {"num_rounds": 50}, {"surrogate_steps": 8}
FAST, SLOW = {"generator_learning_rate": 1e-3}, {"generator_learning_rate": 3e-4}
TEN, ONCE = {10.0: {}}, (["mnist-by-writer"], [0])
GS_WGAN = "full-participation"
METHODS = {
    "staged": Method("staged", {}, SIZES),
    "staged-fonts": Method("staged-fonts", {}, AXES, ["mnist-by-writer", "mnist"]),
    "staged-none": Method("staged", {}, {NO_NOISE: {}}),
    # DP-MERF (Harder et al., AISTATS 2021) made federated: one release, random features
    "mean-embedding": Method(GS_WGAN, RANDOM | LARGE_STEPS, TEN),
    "refined": Method("staged", REFINED | FAST, TEN, *ONCE),
    "refined-surrogate": Method("staged", REFINED | SLOW | SURROGATE, TEN, *ONCE),
    "gs-wgan": Method(GS_WGAN, SHORT, TEN, *ONCE),
    "gs-wgan-surrogate": Method(GS_WGAN, SHORT | SURROGATE, TEN, *ONCE),
}


class Cell(NamedTuple):
    """One run of the table."""

    data: str
    method: str
    epsilon: float
    seed: int

    @property
    def row(self) -> str:
        """What its seeds have in common."""
        return f"{self.data}-{self.method}-eps{self.epsilon:g}"

    @property
    def name(self) -> str:
        """Of the run folder."""
        return f"{self.row}-seed{self.seed}"

    def settings(self) -> Settings:
        """Returns its settings over the method's recipe; the noise has no seed."""
        method, noise = METHODS[self.method], {"target_epsilon": self.epsilon}
        noise = {"noise_multiplier": 0.0} if self.epsilon == NO_NOISE else noise
        own = {"data": self.data, "seed": self.seed, "num_workers": 1}
        more = method.settings | method.of_epsilon[self.epsilon]
        return DATA[self.data].settings | more | noise | own


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a call asks for; each flag's help says what it is."""

    only: str = flag("", "Regular expression: the cells with such a name.")
    seeds: tuple[str, ...] = flag(("0", "1", "2"), "Of each row, at most.")
    output: Path = flag(Path("runs/pictures"), "Its folder.")
    data_dir: str | None = flag(None, "As of fedgs train.")
    printed: bool = flag(False, "Compute nothing.", names=("--print",))

    def cells(self) -> list[Cell]:
        """Returns the cells that are asked for, in the order of the table.

        Raises:
            UserError: no such cell, a bad expression or bad seeds.
        """
        with explained(ValueError, f"seeds = {self.seeds}", "give --seeds like 0,1"):
            seeds = [int(seed) for seed in self.seeds]
        with explained(re.error, f"only = {self.only!r}", "give a regular expression"):
            asked = re.compile(self.only)
        cells = [
            Cell(data, name, epsilon, seed)
            for data in DATA
            for name, method in METHODS.items()
            for epsilon in method.of_epsilon
            for seed in seeds
            if data in method.data and seed in method.seeds
        ]
        if not (found := [cell for cell in cells if asked.search(cell.name)]):
            rows = ", ".join(dict.fromkeys(cell.row for cell in cells))
            raise UserError(f"only = {self.only!r}: give --only a part of {rows}")
        return found


def compute(cell: Cell, request: Request) -> None:
    """Trains and evaluates a cell, as far as it is not there.

    Privacy: releases (epsilon, delta)-DP output; events: in the run's ledger. The
    accuracy is computed from real data: output private.
    """
    path = request.output.expanduser().absolute() / cell.name
    if not (path / "generator.safetensors").exists():
        _train(cell, path, request.data_dir)
    if not (path / "evaluations.jsonl").exists():
        scored = EvaluationRequest(str(path), count=NUM_SAMPLES, metrics=("cnn",))
        evaluate(scored, as_json=True)


def _train(cell: Cell, path: Path, data_dir: str | None) -> None:
    say(f"{cell.name}: training")
    if (path / "config.json").exists():
        return resume(path)  # nobody knows what its first part took
    places = {"data_dir": data_dir or "", "output": str(path)}
    config = overridden(recipe(METHODS[cell.method].recipe), cell.settings())
    folder, data = new_run(overridden(config, places))
    started = time.process_time()
    train_from_checkpoint(folder, data)
    write_json(path / COST, {"cpu_seconds": time.process_time() - started})


def table(request: Request) -> Table:
    """Returns the table of the cells that are there, and draws a grid of each row."""
    head = ["data", "method", "epsilon", "CNN", "seeds", "target", "CPU s", "rounds"]
    rows: list[list[str]] = []
    for name, group in groupby(request.cells(), key=lambda cell: cell.row):
        cells = [cell for cell in group if _lines(request.output / cell.name)]
        if not cells:
            continue
        rows.append(_row(cells, request.output))
        folder = RunFolder.open(request.output / cells[0].name)
        generator = sample.load_generator(folder)
        sample.write_grid(request.output / f"{name}.png", folder.config, generator)
    note = f"epsilon: release, zero-out (replace-one); CNN: {NUM_SAMPLES} samples, mean"
    note += " and range of the seeds' accuracies"
    return Table("Pictures", head, rows, note)


def _lines(run: Path) -> list[dict[str, Any]]:
    return read_json_lines(run / "evaluations.jsonl")


def _row(cells: Sequence[Cell], output: Path) -> list[str]:
    runs, first = [output / cell.name for cell in cells], cells[0]
    found = [_lines(run)[-1]["downstream_cnn_accuracy"] for run in runs]
    costs = [read_json(run / COST) for run in runs if (run / COST).exists()]
    seconds = [cost["cpu_seconds"] for cost in costs]
    stated = {
        row.relation: row.epsilon
        for row in epsilons.of_run(runs[0])
        if row.adversary == "release" and not row.theorem.startswith("amplification")
    }
    zero_out, replace_one = stated["zero-out"], stated["replace-one"]
    return [
        first.data,
        first.method,
        f"{zero_out:.3g} ({replace_one:.3g})" if zero_out and replace_one else "none",
        f"{sum(found) / len(found):.3f} ({min(found):.3f}–{max(found):.3f})",
        str(len(found)),
        f"{DATA[first.data].targets.get(first.epsilon, '–')}",
        f"{sum(seconds) / len(seconds):.0f}" if seconds else "–",
        str(RunFolder.open(runs[0]).last_round),
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Fills and prints the table; returns the exit code."""
    return run_command(pictures, words)


@request_flags(Request)
def pictures(*, given: dict[str, Any]) -> None:
    """Reprint the table of pictures; train and evaluate what is missing."""
    request, failed = Request(**given), list[str]()
    for cell in [] if request.printed else request.cells():
        try:
            with exit_if_stopped("continue with the same command"):
                compute(cell, request)
        except typer.Exit:
            raise
        except Exception as error:  # a failed cell costs no other
            say(f"{cell.name}: {error!r}", is_error=True)
            failed.append(cell.name)
    found = table(request)
    write_atomically(request.output / "table.md", found.markdown().encode())
    found.show()
    if failed:
        raise UserError(f"{', '.join(failed)}: failed; call again for these alone")


if __name__ == "__main__":
    sys.exit(main())
