"""What a stored run reached after a round: quality of its images, and every epsilon.

The numbers are computed once, kept as JSON lines, and found again.
"""

import contextlib
import dataclasses
import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.evaluation import evaluate as evaluation
from experiments.evaluation.request import EvaluationRequest
from experiments.paper.stored_runs import generator_of
from fedgs.baselines.fedavg_gan import FedAvgGanMethod
from fedgs.baselines.run import BaselineRun
from fedgs.cohorts.files import selection_costs
from fedgs.files import read_json_lines, write_atomically
from fedgs.privacy.accounting import Run, statements_of_runs
from fedgs.runs import sample
from fedgs.runs.run_folder import RunFolder

VERSION = 2  # raise it when the same images get other numbers
SAME_IMAGES = {"mnist-by-writer": "mnist"}  # one network for both
Line = dict[str, Any]
KEPT = ("adversary", "relation", "unit", "delta", "epsilon", "theorem", "guarantee")


class ResultLines:
    """A file of results; each is found again by its key.

    Attributes:
        path: the file; made with the first result.
    """

    def __init__(self, path: Path) -> None:
        """Reads what is there.

        Raises:
            UserError: the file is damaged.
        """
        self.path = path
        self.found = {line.get("key", ""): line for line in read_json_lines(path)}

    def get(self, key: str) -> Line | None:
        """Returns the last result of that key."""
        return self.found.get(key)

    def add(self, key: str, result: Line) -> Line:
        """Keeps a result under a key, durably, and returns it."""
        self.found[key] = {"key": key, **result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{json.dumps(line)}\n" for line in self.found.values())
        write_atomically(self.path, text.encode())
        return self.found[key]


@dataclass(frozen=True)
class Protocol:
    """How images are compared with real ones; part of every number's key.

    Attributes:
        data: the real data, as `--data` of `fedgs evaluate`.
        reading: how it is read, as of `EvaluationRequest`.
        count: synthetic images; what `fast` says when None.
        fast: the protocol of `fedgs evaluate --fast`, whose network is called
            `..._fast`.
        metrics: groups of `fedgs evaluate`.
    """

    data: str
    reading: Mapping[str, Any] = field(default_factory=dict)
    count: int | None = None
    fast: bool = True
    metrics: tuple[str, ...] = ("images", "cnn")

    @property
    def key(self) -> str:
        """What tells its results from others."""
        data = self.data if not self.data.startswith("npz:") else "npz"
        metrics = "+".join(self.metrics)
        return f"{VERSION},{data},{self.count},{self.fast},{metrics}"


def score(
    folder: RunFolder,
    round: int,
    protocol: Protocol,
    results: ResultLines,
    baseline: BaselineRun | None = None,
) -> Line:
    """Returns the numbers of a run after a round, from the file or computed.

    Privacy: reads private data; output private. Epsilons are public.

    Args:
        folder: a run of `experiments.paper.stored_runs`.
        round: one of its `snapshot_rounds`.
        protocol: how to compare.
        results: where the numbers are kept.
        baseline: what the folder is a run of, if not of GS-WGAN.

    Raises:
        UserError: the real data is missing or malformed.
    """
    key = f"{folder.path.name}@{round}|{protocol.key}"
    if (found := results.get(key)) is not None:
        return found
    line = {
        "run": folder.path.name,
        "round": round,
        "seed": folder.config.seed,
        "noise_multiplier": folder.config.noise_multiplier,
        "epsilons": (
            epsilons(folder, round) if baseline is None else user_epsilons(baseline)
        ),
        "scores": _quality(folder, round, protocol),
    }
    return results.add(key, line)


def epsilons(folder: RunFolder, round: int) -> list[dict[str, Any]]:
    """Returns what a run released up to a round, for every adversary and relation.

    The round is one of `snapshot_rounds`: fixed in advance, as if no more were planned.
    """
    events = folder.read_ledger().events
    done = tuple(event for event in events if event.round <= round)
    config = dataclasses.replace(folder.config, num_rounds=round)
    run = Run(config, done, selection_costs([config]))
    stated = [row.to_json() for row in statements_of_runs([run], config.delta)]
    return [{name: row[name] for name in KEPT} for row in stated]


def user_epsilons(run: BaselineRun) -> list[dict[str, Any]]:
    """Returns the epsilons of a user of all that a run of Fed-Avg GAN released."""
    rows: list[dict[str, Any]] = []
    for adversary in FedAvgGanMethod.adversaries:
        events = [{**release.event, "adversary": adversary} for release in run.releases]
        asked = run.settings, run.facts, events, run.config.delta
        for row in run.method.guarantees(*asked):
            if (row.label, row.unit) == ("valid", "user"):
                known = dataclasses.asdict(row) | {"adversary": adversary}
                known |= {"unit": "client", "guarantee": True}
                rows.append({name: known[name] for name in KEPT})
    return rows


def epsilon_of(line: Line, adversary: str, relation: str) -> float | None:
    """Returns a line's epsilon without amplification; None is unbounded.

    Raises:
        KeyError: the run has no such adversary.
    """
    for row in line["epsilons"]:
        is_amplified = row["theorem"].startswith("amplification")
        is_asked = (row["adversary"], row["relation"]) == (adversary, relation)
        if is_asked and not is_amplified:
            return row["epsilon"]
    raise KeyError(adversary)


def _quality(folder: RunFolder, round: int, protocol: Protocol) -> dict[str, Any]:
    count = protocol.count or (evaluation.FAST if protocol.fast else evaluation.FULL)
    count = count if isinstance(count, int) else count.synthetic
    labels = sample.uniform_labels(folder.config, count, seed=0)
    generator = generator_of(folder, round)
    images = sample.draw(folder.config, generator, labels, seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        drawn = Path(scratch) / "drawn.npz"
        np.savez(drawn, images=images, labels=labels)
        request = EvaluationRequest(
            source=str(drawn),
            data=protocol.data,
            reading=protocol.reading,
            count=count,
            metrics=protocol.metrics,
            fast=protocol.fast,
            output=Path(scratch),
        )
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation.evaluate(request, as_json=True)
        result = read_json_lines(Path(scratch) / "evaluations.jsonl")[-1]
    kept = {n: v for n, v in result.items() if isinstance(v, float | int)}
    for name in ("seed", "fast", "seconds"):
        kept.pop(name, None)
    return kept


def metric(line: Line, prefix: str) -> tuple[str, float]:
    """Returns name and value of the score that starts so, without `_std`.

    Raises:
        KeyError: there is none.
    """
    for name, value in line["scores"].items():
        if name.startswith(prefix) and not name.endswith("_std"):
            return name, float(value)
    raise KeyError(prefix)
