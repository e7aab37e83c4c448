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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from experiments.commands.endings import exit_if_stopped
from experiments.commands.progress import say
from experiments.commands.train import go_back, train_from_checkpoint
from experiments.evaluation.evaluate import evaluate
from experiments.evaluation.request import EvaluationRequest
from experiments.flags import request_flags, run_command
from experiments.tables import Table
from fedgs.config.fields import flag
from fedgs.config.recipes import overridden, recipe
from fedgs.data.load import load_data
from fedgs.errors import UserError, explained
from fedgs.federation.preparation import new_run
from fedgs.federation.training import RunStopped
from fedgs.files import read_json, read_json_lines, write_atomically, write_json
from fedgs.privacy.plan import RELATIONS
from fedgs.runs import epsilons, sample
from fedgs.runs.run_folder import RunFolder

Settings = dict[str, Any]
NO_NOISE = math.inf
NUM_SAMPLES = 10_000
ACCURACY = "downstream_cnn_accuracy"
COST = "cpu-seconds.json"  # in the run folder: of training, all threads
SHARDS = {"partition": "iid", "num_clients": 1000, "clients_per_node": 50}


@dataclass(frozen=True)
class Source:
    """Private data, and the accuracy aimed at by epsilon."""

    settings: Settings
    targets: dict[float, float]


@dataclass(frozen=True)
class Method:
    """One way to train; `of_epsilon` holds the settings of every epsilon it has."""

    recipe: str
    settings: Settings
    of_epsilon: dict[float, Settings]
    data: tuple[str, ...] = ()  # all when empty
    seeds: tuple[int, ...] = (0, 1, 2)  # of those that are asked for


DATA = {
    "mnist-by-writer": Source({}, {10: 0.93, 3: 0.88, 1: 0.80}),
    "mnist": Source(SHARDS, {10: 0.95, 3: 0.92, 1: 0.85}),
    "fashion-mnist": Source(SHARDS, {10: 0.80, 3: 0.76, 1: 0.70}),
}
WEIGHTS = {"stage_weights": "0.25,0.25,0.5"}
RANDOM = {
    "stages": "random",
    "num_rounds": 1,
    "stage_steps": "500",
    "generator_learning_rate": 3e-3,
    "ema_decay": 0.985,
}
SHORT = {"num_rounds": 50}
SURROGATE = {**SHORT, "surrogate_steps": 8}
WRITERS = {"data": ("mnist-by-writer",), "seeds": (0,)}
METHODS = {
    # Sizes and weights were chosen on digits of fonts and on Fashion-MNIST.
    "staged": Method(
        "staged",
        WEIGHTS,
        {10: {"moment_size": 10}, 3: {"moment_size": 8}, 1: {"moment_size": 6}},
    ),
    "staged-none": Method("staged", WEIGHTS, {NO_NOISE: {}}),
    # DP-MERF (Harder et al., AISTATS 2021) made federated: one release, random features
    "mean-embedding": Method("full-participation", RANDOM, {10: {}}),
    "gs-wgan": Method("full-participation", SHORT, {10: {}}, **WRITERS),
    "gs-wgan-surrogate": Method("full-participation", SURROGATE, {10: {}}, **WRITERS),
}


@dataclass(frozen=True, order=True)
class Cell:
    """One run of the table."""

    data: str
    method: str
    epsilon: float
    seed: int

    @property
    def row(self) -> str:
        """What its seeds have in common, as the name of a file."""
        return f"{self.data}-{self.method}-eps{self.epsilon:g}"

    @property
    def name(self) -> str:
        """Of the run folder."""
        return f"{self.row}-seed{self.seed}"

    def settings(self, output: Path, data_dir: str | None) -> Settings:
        """Returns its settings over the method's recipe; the noise has no seed."""
        method, noise = METHODS[self.method], {"target_epsilon": self.epsilon}
        return {
            **DATA[self.data].settings,
            **method.settings,
            **method.of_epsilon[self.epsilon],
            **({"noise_multiplier": 0.0} if self.epsilon == NO_NOISE else noise),
            "data": self.data,
            "data_dir": data_dir or "",
            "seed": self.seed,
            "num_workers": 1,
            "output": str(output / self.name),
        }


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a call asks for; each flag's help says what it is."""

    only: str = flag("", "Regular expression: the cells with such a name.")
    seeds: tuple[str, ...] = flag(("0", "1", "2"), "Of each row, at most.")
    output: Path = flag(Path("runs/pictures"), "Its folder.")
    data_dir: str | None = flag(None, "As of fedgs train.")
    printed: bool = flag(False, "Compute nothing.", names=("--print",))

    @property
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
            if data in (method.data or DATA)
            for epsilon in method.of_epsilon
            for seed in seeds
            if seed in method.seeds
        ]
        if not (found := [cell for cell in cells if asked.search(cell.name)]):
            names = ", ".join(dict.fromkeys(cell.row for cell in cells))
            raise UserError(f"only = {self.only!r}: give --only a part of {names}")
        return found


def compute(cell: Cell, request: Request) -> None:
    """Trains and evaluates a cell, as far as it is not there.

    Privacy: releases (epsilon, delta)-DP output; events: in the run's ledger. The
    accuracy is computed from real data: output private.
    """
    path = request.output.expanduser().absolute() / cell.name
    if not (path / "generator.safetensors").exists():
        say(f"{cell.name}: training")
        _train(cell, path, request.data_dir)
    if not (path / "evaluations.jsonl").exists():
        scored = {"count": NUM_SAMPLES, "metrics": ("cnn",)}
        evaluate(EvaluationRequest(str(path), **scored), as_json=True)


def _train(cell: Cell, path: Path, data_dir: str | None) -> None:
    if is_resumed := (path / "config.json").exists():
        folder = RunFolder.open(path)
        go_back(folder)
        data = load_data(folder.config)
    else:
        settings = cell.settings(path.parent, data_dir)
        base = recipe(METHODS[cell.method].recipe)
        folder, data = new_run(overridden(base, settings).validate())
    started = time.process_time()
    train_from_checkpoint(folder, data)
    if not is_resumed:  # else nobody knows what the first part took
        write_json(path / COST, {"cpu_seconds": time.process_time() - started})


def fill(request: Request) -> list[str]:
    """Computes what is missing; returns the names of cells that failed."""
    failed: list[str] = []
    for cell in request.cells:
        try:
            compute(cell, request)
        except RunStopped:
            raise
        except Exception as error:  # a failed cell costs no other
            say(f"{cell.name}: failed, {type(error).__name__}: {error}", is_error=True)
            failed.append(cell.name)
    return failed


def table(request: Request) -> Table:
    """Returns the table of the cells that are there, and draws a grid of each row."""
    head = ["data", "method", "CNN accuracy", "seeds", "target"]
    head += [f"epsilon, {name}" for name in RELATIONS] + ["CPU s", "rounds"]
    rows: list[list[str]] = []
    for _, group in groupby(request.cells, key=lambda cell: cell.row):
        there = {c: request.output / c.name / "evaluations.jsonl" for c in group}
        there = {cell: path.parent for cell, path in there.items() if path.exists()}
        if there:
            rows.append(_row(there))
            cell, run = next(iter(there.items()))
            folder = RunFolder.open(run)
            generator = sample.load_generator(folder)
            path = request.output / f"{cell.row}.png"
            sample.write_grid(path, folder.config, generator)
    note = f"CNN: trained on {NUM_SAMPLES} samples; mean (least to most) over seeds."
    return Table("Pictures", head, rows, note)


def _row(runs: dict[Cell, Path]) -> list[str]:
    cell, run = next(iter(runs.items()))
    lines = [read_json_lines(r / "evaluations.jsonl")[-1] for r in runs.values()]
    found = [float(line[ACCURACY]) for line in lines]
    mean = f"{sum(found) / len(found):.3f} ({min(found):.3f} to {max(found):.3f})"
    target = DATA[cell.data].targets.get(cell.epsilon)
    costs = [read_json(r / COST) for r in runs.values() if (r / COST).exists()]
    seconds = [float(cost["cpu_seconds"]) for cost in costs]
    stated = {
        row.relation: row.epsilon
        for row in epsilons.of_run(run)
        if row.adversary == "release" and not row.theorem.startswith("amplification")
    }
    return [
        cell.data,
        cell.method,
        mean,
        str(len(found)),
        f"{target:g}" if target else "–",
        *(f"{e:.3g}" if (e := stated.get(name)) else "none" for name in RELATIONS),
        f"{sum(seconds) / len(seconds):.0f}" if seconds else "–",
        str(RunFolder.open(run).last_round),
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Fills and prints the table; returns the exit code."""
    return run_command(pictures, words)


@request_flags(Request)
def pictures(*, given: dict[str, Any]) -> None:
    """Reprint the table of pictures; train and evaluate what is missing."""
    request = Request(**given)
    with exit_if_stopped("continue with the same command"):
        failed = [] if request.printed else fill(request)
    found = table(request)
    write_atomically(request.output / "table.md", found.markdown().encode())
    found.show()
    if failed:
        raise UserError(f"{', '.join(failed)}: failed; call again for these alone")


if __name__ == "__main__":
    sys.exit(main())
