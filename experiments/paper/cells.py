"""Cells of a table: runs that are trained, judged by a small CNN, and printed together.

A cell is one run, `OUTPUT/<data>-<method>-eps<epsilon>-seed<seed>`. Its generator is
judged by the small CNN of `fedgs evaluate`, trained on 10,000 samples. What is there is
not computed again; an interrupted run is resumed. `pictures` and `study` list cells.
"""

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from experiments.commands.endings import exit_if_stopped
from experiments.commands.progress import say
from experiments.commands.train import resume, train_from_checkpoint
from experiments.evaluation.evaluate import evaluate
from experiments.evaluation.request import READING, EvaluationRequest
from experiments.tables import Table
from fedgs.config.fields import flag
from fedgs.config.recipes import overridden, recipe
from fedgs.errors import UserError, explained
from fedgs.federation.checkpoint import restore
from fedgs.federation.preparation import new_run
from fedgs.federation.round import new_server
from fedgs.files import read_json, read_json_lines, write_atomically, write_json
from fedgs.runs import epsilons, sample
from fedgs.runs.run_folder import RunFolder

Settings = dict[str, Any]
NO_NOISE = math.inf
NUM_SAMPLES = 10_000
AT_ONCE = 500  # samples whose candidates are scored at a time
COST = "cpu-seconds.json"  # in the run folder: of training, all threads
OTHER_CLAIMS = ("amplification", "as published")  # theorems of rows that are not shown


class Source(NamedTuple):
    """Private data: its clients, and the accuracy aimed at by epsilon."""

    settings: Settings
    targets: Mapping[float, float]


class Method(NamedTuple):
    """One way to train: settings over a recipe, and more of them by epsilon.

    A method that sets `noise_multiplier` has no target: its epsilon is what that costs.
    With `draws` above 1, so many images are drawn for each sample, and the surrogate
    critic chooses among them.
    """

    recipe: str
    settings: Settings
    of_epsilon: Mapping[float, Settings]
    data: Collection[str] = ()  # all where empty
    seeds: Collection[int] = range(1000)  # of those that are asked for
    draws: int = 1


class Cell(NamedTuple):
    """One run of a table; its data and its method by name and by content."""

    data: str
    method: str
    epsilon: float
    seed: int
    source: Source
    how: Method

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
        more = self.how.settings | self.how.of_epsilon[self.epsilon]
        noise: Settings = {"target_epsilon": self.epsilon}
        if self.epsilon == NO_NOISE:
            noise = {"noise_multiplier": 0.0}
        elif "noise_multiplier" in more:
            noise = {}
        own = {"data": self.data, "seed": self.seed, "num_workers": 1}
        return self.source.settings | more | noise | own


class Cells(NamedTuple):
    """The rows of a table: every method on its data, at its epsilons."""

    caption: str
    data: Mapping[str, Source]
    methods: Mapping[str, Method]

    def of_seeds(self, seeds: Sequence[int]) -> list[Cell]:
        """Returns the cells in the order of the table."""
        return [
            Cell(data, name, epsilon, seed, self.data[data], method)
            for data in self.data
            for name, method in self.methods.items()
            for epsilon in method.of_epsilon
            for seed in seeds
            if data in (method.data or self.data) and seed in method.seeds
        ]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a call asks for; each flag's help says what it is."""

    only: str = flag("", "Regular expression: the cells with such a name.")
    seeds: tuple[str, ...] = flag(("0", "1", "2"), "Of each row, at most.")
    output: Path = flag(Path("runs/pictures"), "Its folder.")
    data_dir: str | None = flag(None, "As of fedgs train.")
    printed: bool = flag(False, "Compute nothing.", names=("--print",))

    def of(self, cells: Cells) -> list[Cell]:
        """Returns the cells that are asked for, in the order of the table.

        Raises:
            UserError: no such cell, a bad expression or bad seeds.
        """
        with explained(ValueError, f"seeds = {self.seeds}", "give --seeds like 0,1"):
            seeds = [int(seed) for seed in self.seeds]
        with explained(re.error, f"only = {self.only!r}", "give a regular expression"):
            asked = re.compile(self.only)
        known = cells.of_seeds(seeds)
        if not (found := [cell for cell in known if asked.search(cell.name)]):
            rows = ", ".join(dict.fromkeys(cell.row for cell in known))
            raise UserError(f"only = {self.only!r}: give --only a part of {rows}")
        return found


def fill(cells: Cells, request: Request) -> None:
    """Trains and evaluates what is missing, unless only printed; prints the table.

    Raises:
        UserError: no such cell, or cells that failed; a failed cell costs no other.
    """
    failed = list[str]()
    for cell in [] if request.printed else request.of(cells):
        try:
            with exit_if_stopped("continue with the same command"):
                compute(cell, request)
        except typer.Exit:
            raise
        except Exception as error:
            say(f"{cell.name}: {error!r}", is_error=True)
            failed.append(cell.name)
    found = table(cells.caption, request.of(cells), request.output)
    write_atomically(request.output / "table.md", found.markdown().encode())
    found.show()
    if failed:
        raise UserError(f"{', '.join(failed)}: failed; call again for these alone")


def compute(cell: Cell, request: Request) -> None:
    """Trains and evaluates a cell, as far as it is not there.

    Privacy: releases (epsilon, delta)-DP output; events: in the run's ledger. The
    accuracy is computed from real data: output private.
    """
    path = request.output.expanduser().absolute() / cell.name
    if not (path / "generator.safetensors").exists():
        _train(cell, path, request.data_dir)
    if (path / "evaluations.jsonl").exists():
        return
    asked = EvaluationRequest(str(path), count=NUM_SAMPLES, metrics=("cnn",))
    if cell.how.draws > 1:
        config = RunFolder.open(path).config
        reading = {name: getattr(config, name) for name in {*READING} - {"data"}}
        best = str(write_best(path, cell.how.draws))
        own = {"source": best, "data": config.data, "reading": reading}
        asked = replace(asked, **own, output=path)
    evaluate(asked, as_json=True)


def _train(cell: Cell, path: Path, data_dir: str | None) -> None:
    say(f"{cell.name}: training")
    if (path / "config.json").exists():
        return resume(path)  # nobody knows what its first part took
    places = {"data_dir": data_dir or "", "output": str(path)}
    config = overridden(recipe(cell.how.recipe), cell.settings())
    folder, data = new_run(overridden(config, places))
    started = time.process_time()
    train_from_checkpoint(folder, data)
    write_json(path / COST, {"cpu_seconds": time.process_time() - started})


def write_best(run: Path, draws: int) -> Path:
    """Writes, for each sample, the image that the surrogate critic scores best.

    Privacy: post-processing of DP output.

    Args:
        run: folder of a finished run with a surrogate critic.
        draws: images of one label that it chooses from.

    Returns:
        FILE.npz with `NUM_SAMPLES` images.

    Raises:
        UserError: the run has no surrogate critic.
    """
    folder = RunFolder.open(run)
    restore(folder, server := new_server(folder.config))
    if server.surrogate is None:
        raise UserError(f"{run}: no surrogate critic; give --surrogate-steps 8")
    critic = server.surrogate.network
    labels = sample.uniform_labels(folder.config, NUM_SAMPLES, 0)
    best: list[NDArray[np.float32]] = []
    for start in range(0, NUM_SAMPLES, AT_ONCE):
        wanted = labels[start : start + AT_ONCE].repeat(draws)
        images = sample.draw(folder.config, server.ema, wanted, start)
        with torch.no_grad():
            scores = critic(*map(torch.from_numpy, (images, wanted)))
        images = images.reshape(-1, draws, *images.shape[1:])
        best.append(images[range(len(images)), scores.view(-1, draws).argmax(1)])
    path = run / "best.npz"
    sample.Samples(np.concatenate(best), labels, ()).write(path)
    return path


def table(caption: str, cells: Sequence[Cell], output: Path) -> Table:
    """Returns the table of the cells that are there, and draws a grid of each row."""
    head = ["data", "method", "epsilon", "CNN", "seeds", "target", "CPU s", "rounds"]
    rows: list[list[str]] = []
    for name, group in groupby(cells, key=lambda cell: cell.row):
        found = [cell for cell in group if _lines(output / cell.name)]
        if not found:
            continue
        rows.append(_row(found, output))
        folder = RunFolder.open(output / found[0].name)
        generator = sample.load_generator(folder)
        sample.write_grid(output / f"{name}.png", folder.config, generator)
    note = f"epsilon: release, zero-out (replace-one); CNN: {NUM_SAMPLES} samples, mean"
    note += " and range of the seeds' accuracies"
    return Table(caption, head, rows, note)


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
        if row.adversary == "release" and not row.theorem.startswith(OTHER_CLAIMS)
    }
    zero_out, replace_one = stated["zero-out"], stated["replace-one"]
    return [
        first.data,
        first.method,
        f"{zero_out:.3g} ({replace_one:.3g})" if zero_out and replace_one else "none",
        f"{sum(found) / len(found):.3f} ({min(found):.3f}–{max(found):.3f})",
        str(len(found)),
        f"{first.source.targets.get(first.epsilon, '–')}",
        f"{sum(seconds) / len(seconds):.0f}" if seconds else "–",
        str(RunFolder.open(runs[0]).last_round),
    ]
