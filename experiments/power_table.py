"""How much noise can a bug be found through? The table that `fedgs debug` looks up.

    python -m experiments.power_table --output power.jsonl

Both cohorts are digits of fonts, four groups of 64 pseudo-writers each, in other groups
for every trial. The bug is put into all images of one cohort, or of half of its
clients; each group releases its class means (recipe `class-means`) with the noise of
one level, and the samples are diagnosed. Every bug, share and trial is one line of the
output; the same command goes on. At the end they are added up in
fedgs/app/debug/power.json.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.store import Store
from fedgs.app.debug.bug_detection import outcome
from fedgs.app.debug.power import STORED
from fedgs.app.flags import OutputOption, run_command
from fedgs.config.recipes import CLASS_MEANS, configure
from fedgs.config.run_config import MomentConfig
from fedgs.data.federated import FederatedImages, to_float
from fedgs.data.load import load_data
from fedgs.data.transformations import TRANSFORMATIONS, Transformation
from fedgs.diagnosis.diagnosis import diagnose
from fedgs.evaluation.images import LabelledImages
from fedgs.files import write_json
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.methods import new_state, phases_of
from fedgs.methods.base import Hosted
from fedgs.randomness import derived_seed, stream
from fedgs.round.answer import answer_of, summed
from fedgs.round.preparation import resolve
from fedgs.runs import sample

SIGNALS = (10, 20, 40, 80, 160, 320, 640)  # of `recipes.signal_of`, of one group
GROUPS, CLIENTS = 4, 64
TRIALS = 2  # of every bug
ALL, HALF = 1.0, 0.5  # of the suspicious clients have the bug
SAMPLES = 10  # one of each class, for all of a class are alike


BUGS = {"none": None, **{entry.name: entry for entry in TRANSFORMATIONS}}


def main(output: OutputOption) -> None:
    """Fill the table; its lines are kept in OUTPUT."""
    store = Store(output)
    config, data = _setting()
    for trial in range(TRIALS):
        cells = {
            f"{trial}-{bug}-{share:g}": {"trial": trial, "bug": bug, "share": share}
            for bug in BUGS
            for share in ((ALL, HALF) if BUGS[bug] else (ALL,))
        }
        missing = {n: cell for n, cell in cells.items() if n not in store.lines}
        for name, verdicts in _trial(config, data, trial, missing):
            store.add(name, missing[name] | {"verdicts": verdicts})
    write_json(STORED, added_up([*store.lines.values()]))


def added_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns how often the verdict was right and wrong, by bug and signal.

    `of_half` has the same of bugs in half of the clients.
    """
    all_rows, half = ([r for r in rows if r["share"] == s] for s in (ALL, HALF))
    facts = {"signals": list(SIGNALS), "clients": CLIENTS, "groups": GROUPS}
    return {**facts, **_counts(all_rows), "of_half": _counts(half)}


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = {"trials": {}, "right": {}, "wrong": {}}
    for bug in [bug for bug in BUGS if any(row["bug"] == bug for row in rows)]:
        verdicts = [row["verdicts"] for row in rows if row["bug"] == bug]
        outcomes = [[outcome(text, bug) for text in own] for own in verdicts]
        by_signal = list(zip(*outcomes, strict=True))
        found["trials"][bug] = [len(own) for own in by_signal]
        for name in ("right", "wrong"):
            found[name][bug] = [own.count(name) for own in by_signal]
    return found


def _setting() -> tuple[MomentConfig, FederatedImages]:
    settings = {"data": "fonts", "noise_multiplier": 1.0, "output": "-", "seed": 0}
    settings |= {"clients_per_node": CLIENTS}
    config = configure(CLASS_MEANS, None, settings)
    resolved, data = resolve(config, load_data(config))
    return cast(MomentConfig, resolved), data


def _trial(
    config: MomentConfig,
    data: FederatedImages,
    trial: int,
    cells: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, list[str]]]:
    """Yields every cell with its verdicts at all levels of noise."""
    order = stream(trial, "power-table").permutation(data.num_clients)
    groups = order[: 2 * GROUPS * CLIENTS].reshape(2 * GROUPS, CLIENTS)

    def drawn(data: FederatedImages, signal: float, first: int) -> list[LabelledImages]:
        return [
            samples(config, data, groups[g], signal, derived_seed(trial, "group", g))
            for g in range(first, first + GROUPS)
        ]

    healthy = [drawn(data, signal, 0) for signal in SIGNALS] if cells else []
    sizes: dict[str, Any] = {"frequencies": config.moment_size}
    for name, cell in cells.items():
        chosen = groups[GROUPS:, : round(cell["share"] * CLIENTS)]
        other = spoilt(data, BUGS[cell["bug"]], chosen.ravel())
        yield (
            name,
            [
                diagnose(
                    own, drawn(other, signal, GROUPS), data.num_classes, **sizes
                ).verdict
                for own, signal in zip(healthy, SIGNALS, strict=True)
            ],
        )


def spoilt(
    data: FederatedImages, bug: Transformation | None, clients: NDArray[np.int64]
) -> FederatedImages:
    """Returns the data with a bug in all images of some clients."""
    if bug is None:
        return data
    images, labels = data.images.copy(), data.labels.copy()
    own = np.concatenate([data.client_records[c] for c in clients])
    changed = bug.apply(to_float(images[own]), labels[own], data.num_classes)
    images[own], labels[own] = np.round(255 * changed[0]), changed[1]
    return dataclasses.replace(data, images=images, labels=labels)


def samples(
    config: MomentConfig,
    data: FederatedImages,
    clients: NDArray[np.int64],
    signal: float,
    seed: int,
) -> LabelledImages:
    """Draws samples of one group's generator, trained as a run of one node trains it.

    Args:
        config: of a run of class means; its clients, noise and seeds are replaced.
        data: public.
        clients: of the group.
        signal: K / noise multiplier.
        seed: of the group.
    """
    count = len(clients)
    config = dataclasses.replace(
        config,
        **dict.fromkeys(
            ("num_clients", "clients_per_round", "clients_per_node"), count
        ),
        noise_multiplier=count / signal,
        seed=seed,
        noise_seed=seed,
    )
    server, hosted = new_state(config), Hosted(data, clients.tolist(), 0)
    for method, own in phases_of(config):
        request, pending = method.begin(own, server)
        answer = answer_of(config, hosted, request)
        assert isinstance(answer, SanitizedGradients)
        released = summed(config, request.round, [answer])
        method.finish(own, server, pending, released)
    labels = np.arange(SAMPLES, dtype=np.int64) % config.num_classes
    return LabelledImages(sample.draw(config, server.ema, labels, seed=0), labels)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_command(main))
