"""What a stored run reached after a round: quality of its images, and every epsilon.

The numbers are computed once, kept as JSON lines, and found again.
"""

import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.paper.stored_runs import generator_of
from experiments.store import Line, Store
from fedgs.app.evaluation import evaluate as evaluation
from fedgs.app.evaluation.request import EvaluationRequest
from fedgs.cohorts.files import selection_costs
from fedgs.privacy.accounting import Run, statements_of_runs
from fedgs.runs import sample
from fedgs.runs.run_folder import RunFolder

VERSION = 2  # raise it when the same images get other numbers
KEPT = ("adversary", "relation", "unit", "delta", "epsilon", "theorem", "guarantee")


def score(
    folder: RunFolder,
    round: int,
    protocol: EvaluationRequest,
    store: Store,
    stated: Sequence[Line] | None = None,
) -> Line:
    """Returns the numbers of a run after a round, from the store or computed.

    Privacy: reads private data; output private. Epsilons are public.

    Args:
        folder: a run of `experiments.paper.stored_runs`.
        round: one of its `snapshot_rounds`.
        protocol: how to compare its images.
        store: where the numbers are kept.
        stated: the run's epsilons, if it is not of GS-WGAN.

    Raises:
        UserError: the real data is missing or malformed.
    """
    data = "npz" if protocol.data.startswith("npz:") else protocol.data
    metrics = "+".join(protocol.metrics)
    how = f"{VERSION},{data},{protocol.count},{protocol.fast},{metrics}"
    name = f"{folder.path.name}@{round}|{how}"
    if name in store.lines:
        return store.lines[name]
    line = {
        "run": folder.path.name,
        "round": round,
        "seed": folder.config.seed,
        "noise_multiplier": folder.config.noise_multiplier,
        "epsilons": epsilons(folder, round) if stated is None else stated,
        "scores": _quality(folder, round, protocol),
    }
    return store.add(name, line)


def epsilons(folder: RunFolder, round: int) -> list[Line]:
    """Returns what a run released up to a round, for every adversary and relation.

    The round is one of `snapshot_rounds`: fixed in advance, as if no more were planned.
    """
    events = folder.read_ledger().events
    done = tuple(event for event in events if event.round <= round)
    config = dataclasses.replace(folder.config, num_rounds=round)
    run = Run(config, done, selection_costs([config]))
    stated = [row.to_json() for row in statements_of_runs([run], config.delta)]
    return [{name: row[name] for name in KEPT} for row in stated]


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


def _quality(
    folder: RunFolder, round: int, protocol: EvaluationRequest
) -> dict[str, Any]:
    assert protocol.count is not None
    labels = sample.uniform_labels(folder.config, protocol.count, seed=0)
    images = sample.draw(folder.config, generator_of(folder, round), labels, seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        drawn = Path(scratch) / "drawn.npz"
        np.savez(drawn, images=images, labels=labels)
        request = dataclasses.replace(protocol, source=str(drawn), output=Path(scratch))
        with contextlib.redirect_stdout(io.StringIO()):
            result = evaluation.evaluate(request, as_json=True)
    return {
        name: value
        for name, value in result.items()
        if isinstance(value, float | int) and name not in ("seed", "fast", "seconds")
    }


def metric(line: Line, prefix: str) -> tuple[str, float]:
    """Returns name and value of the score that starts so, without `_std`.

    Raises:
        KeyError: there is none.
    """
    for name, value in line["scores"].items():
        if name.startswith(prefix) and not name.endswith("_std"):
            return name, float(value)
    raise KeyError(prefix)
