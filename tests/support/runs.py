"""Runs: trained, interrupted, and what they leave in their folders."""

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data.load import load_data
from fedgs.files import read_tensors
from fedgs.privacy.client_limits import ALLOW_ALL
from fedgs.privacy.ledger import Event, Ledger
from fedgs.round import local
from fedgs.round.run import new_event
from fedgs.runs.run_folder import RunFolder
from tiny import digest, tiny_config

Report = Callable[[dict], None]
TENSORS = {"generator.weight": torch.arange(6.0).view(2, 3)}


def ignore(metrics: dict) -> None:
    """Reports a round to nobody."""


def at_round(round: int, act: Callable[[], object]) -> Report:
    """Returns a report that does something once a round is over."""

    def report(metrics: dict) -> None:
        if metrics["round"] == round:
            act()

    return report


def interrupt() -> None:
    """Stands for a process that is killed."""
    raise KeyboardInterrupt


def interrupt_at(round: int) -> Report:
    return at_round(round, interrupt)


def train(folder: RunFolder, report: Report = ignore, data=None) -> None:
    """Trains with the local engine, from what is on the disk."""
    local.train(folder, data or load_data(folder.config), report, threading.Event())


def undisturbed(config: RunConfig, data: str, output: Path) -> str:
    """The generator that the local engine trains with the same settings."""
    own = {"engine": "local", "num_workers": 1, "nodes": None, "data": data}
    flat = own | {"output": str(output)}
    train(RunFolder.create(ResolvedConfig.from_flat(flat, config)))
    return generator(output)


def tiny_event(round: int) -> Event:
    """An event of a run of the tiny problem."""
    return new_event(tiny_config(), round, (0, 2), 1)


def events(folder: RunFolder) -> tuple[Event, ...]:
    return Ledger.read(folder.path / "ledger.jsonl").events


def attempts(folder: RunFolder) -> list[tuple[int, int]]:
    return [(event.round, event.attempt) for event in events(folder)]


def num_answers(folder: RunFolder) -> list[int]:
    return [line["num_answers"] for line in json_lines(folder.path / "metrics.jsonl")]


def json_lines(path: Path) -> list[dict]:
    """What a file's lines hold, each of which must be whole."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def rounds_done(path: Path) -> int:
    metrics = path / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def generator(path: Path, name: str = "generator") -> str:
    """A hash of a run's generator: tensors only, as the file also names the ledger.

    pytest takes half an hour to print how two files of 100 kB differ.
    """
    tensors, _ = read_tensors(path / f"{name}.safetensors")
    return digest(tensors)


def rewrite(folder: Path, events: Sequence[Event]) -> None:
    """Makes a run folder's ledger anew, for the settings that are in it now."""
    path = folder / "ledger.jsonl"
    content = (folder / "config.json").read_bytes()
    Ledger.create(path, {"config.json": hashlib.sha256(content).hexdigest()})
    with contextlib.closing(Ledger.open(path)) as ledger:
        ledger.append(*events)


def keep_lines(path: Path, count: int) -> None:
    """Cuts a file off after so many lines (events), or so many before its end."""
    lines = path.read_bytes().splitlines(keepends=True)
    if count >= 0:
        count += lines[0].startswith(b'{"bound"')
    path.write_bytes(b"".join(lines[:count]))


def limit_clients(monkeypatch, epsilon: float, relation: str = "replace-one") -> None:
    """Has simulated clients refuse releases beyond an epsilon, by their own count."""
    own = {"client_epsilon": epsilon, "relation": relation}
    limits = dataclasses.replace(ALLOW_ALL, **own)
    monkeypatch.setattr("fedgs.round.node.ALLOW_ALL", limits)
