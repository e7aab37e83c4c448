"""Runs that an experiment keeps: trained once, found again, resumed where they stopped.

A run is named by its settings, so another scale is another run. It trains through the
Flower strategy and ClientApp in this process, with every message counted
(`server.launch.measuring_grid`), and leaves the averaged generator of some rounds
in `snapshots/`, for curves over the iterations.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clients.client_app import app as client_app
from fedgs.app.commands.progress import Progress, say
from fedgs.app.commands.run_outcome import exit_if_stopped
from fedgs.config.run_config import RunConfig
from fedgs.config.settings import settings_with
from fedgs.errors import UserError
from fedgs.federation.preparation import check_capacity, resolve
from fedgs.federation.training import BudgetSpent, Report, Stop, stop_on_signal
from fedgs.files import read_json, read_tensors, write_tensors
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import load_generator
from server.launch.measuring_grid import FILE, MeasuringGrid
from server.strategy import GsWgan

# What names no other run. A checkpoint is a snapshot, so its rounds make another one.
NAMELESS = {*settings_with("machine")}
NUM_SNAPSHOTS = 4  # the last one is the run's generator
Train = Callable[[RunFolder], None]


class NotStored(UserError):
    """A run that a figure or a table needs was not trained yet."""


def run_name(title: str, config: RunConfig) -> str:
    """Returns the folder name of a run: its title, its seed and a hash of its settings.

    Only settings other than the defaults count, so that a setting added later renames
    no run.

    >>> from fedgs.config.run_config import RunConfig
    >>> run_name("a", RunConfig(seed=3)) == run_name("a", RunConfig(seed=3, output="b"))
    True
    >>> run_name("a", RunConfig(seed=3)) == run_name("a", RunConfig(seed=3, delta=0.1))
    False
    """
    defaults = RunConfig().to_flat()
    chosen = {
        name: value
        for name, value in config.to_flat().items()
        if value != defaults[name] and name not in NAMELESS
    }
    content = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode())
    return f"{title}-seed{config.seed}-{content.hexdigest()[:8]}"


def stored(
    root: Path, title: str, config: RunConfig, train: Train | None = None
) -> RunFolder:
    """Returns a stored run, trained first where it is missing or unfinished.

    Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

    Args:
        root: the folder of all runs of an experiment.
        title: what the run is called there.
        config: with a seed, so that it is the same run when called again.
        train: trains a folder from its last checkpoint on; None trains nothing.

    Raises:
        NotStored: it was not trained to its end, and is not to be.
        RunStopped: too few nodes answered, or it was told to stop.
        UserError: bad settings or data; nothing was written.
    """
    path = root / run_name(title, config)
    if (path / "generator.safetensors").exists():
        return RunFolder.open(path)
    if train is None:
        raise NotStored(
            f"{path}: is not trained to its end; run the command without --redraw"
        )
    is_new = not (path / "config.json").exists()
    folder = _create(path, config) if is_new else RunFolder.open(path)
    say(f"{path.name}: training {folder.config.num_rounds} rounds", is_error=True)
    with contextlib.suppress(BudgetSpent):  # is finished, a little earlier
        train(folder)
    return folder


@contextlib.contextmanager
def stopped_by_signal() -> Iterator[Stop]:
    """Lets Ctrl-C stop a command after a round, with a checkpoint and exit code 1."""
    with exit_if_stopped("continue with the same command"), stop_on_signal() as stop:
        yield stop


def _create(path: Path, config: RunConfig) -> RunFolder:
    every = config.checkpoint_every or max(1, config.num_rounds // NUM_SNAPSHOTS)
    output = str(path.absolute())
    config = dataclasses.replace(config, output=output, checkpoint_every=every)
    config, _ = resolve(config)
    check_capacity(config, path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    return RunFolder.create(config)


def train(folder: RunFolder, stop: Stop) -> None:
    """Trains a run folder through Flower's strategy, from its last checkpoint on.

    Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

    Raises:
        RunStopped: `stop` was set, or too few nodes answered.
    """
    torch.set_num_threads(1)
    grid = MeasuringGrid(client_app, folder.config, folder.path / FILE)
    with folder.locked(), Progress() as progress:
        report = progress.rounds(folder.config.num_rounds)
        GsWgan(folder, _Snapshots(folder, report), stop).start(grid)


class _Snapshots:
    """Keeps the averaged generator of every checkpoint, and reports the round."""

    def __init__(self, folder: RunFolder, report: Report) -> None:
        self.folder, self.report = folder, report

    def __call__(self, metrics: dict[str, Any]) -> None:
        name = f"round-{metrics['round'] - 1:07d}.safetensors"
        checkpoint = self.folder.path / "checkpoint" / name
        if checkpoint.exists():  # committed after the report of its own round
            tensors = read_tensors(checkpoint)[0]
            ema = {n[4:]: v for n, v in tensors.items() if n.startswith("ema.")}
            write_tensors(self.folder.path / "snapshots" / name, ema)
        self.report(metrics)


def snapshot_rounds(folder: RunFolder) -> list[int]:
    """Returns the rounds of which a generator is kept, the last one among them."""
    kept = (folder.path / "snapshots").glob("round-*.safetensors")
    return sorted({int(path.stem[6:]) for path in kept} | {last_round(folder)})


def last_round(folder: RunFolder) -> int:
    """Returns the round of the finished run's generator; a budget may end it early."""
    return int(read_json(folder.path / "checkpoint" / "checkpoint.json")["round"])


def generator_of(folder: RunFolder, round: int) -> nn.Module:
    """Returns the averaged generator after one of `snapshot_rounds`.

    Privacy: post-processing of DP output.
    """
    generator = load_generator(folder)
    if round != last_round(folder):
        path = folder.path / "snapshots" / f"round-{round:07d}.safetensors"
        generator.load_state_dict(read_tensors(path)[0])
    return generator
