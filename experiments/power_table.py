"""How much noise can a bug be found through? The table that `fedgs debug` looks up.

    python -m experiments.power_table --output power.jsonl

Both cohorts are digits of fonts, four groups of 64 pseudo-writers each, in other groups
for every trial. The bug is put into all images of one cohort, or of half of its
clients; each group releases its class means, as in the recipe `group-means`, with the
noise of one level, and the samples are diagnosed. Every bug, share and trial is one
line of the output; the same command goes on. At the end they are added up in
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
from fedgs.app.debug.power import POWER_FILE
from fedgs.app.flags import OutputOption, run_command
from fedgs.config.recipes import configure
from fedgs.config.run_config import MomentConfig
from fedgs.data.federated import FederatedImages, to_float
from fedgs.data.load import load_data
from fedgs.data.transformations import TRANSFORMATIONS, Transformation
from fedgs.diagnosis.diagnosis import ONE_OF, OTHER, UNDECIDED, diagnose
from fedgs.evaluation.images import LabelledImages
from fedgs.files import write_json
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.methods import new_state, phases_of
from fedgs.methods.base import Hosted
from fedgs.randomness import derived_seed, stream
from fedgs.round.answer import answer_of, summed
from fedgs.round.preparation import resolve
from fedgs.runs import sample

_SIGNALS = (10, 20, 40, 80, 160, 320, 640)  # K / noise multiplier, of one group
_GROUPS = 4  # of a cohort
_CLIENTS = 64  # of a group
_TRIALS = 2  # of every bug
_ALL = 1.0  # of the suspicious clients have the bug
_HALF = 0.5
_MOMENT_SIZE = 6  # of the recipe group-means
_SAMPLES = 10  # of a group: one of each class, for all of a class are alike
_BUGS = {"none": None, **{entry.name: entry for entry in TRANSFORMATIONS}}


def main(output: OutputOption) -> None:
    """Fill the table; its lines are kept in OUTPUT."""
    store = Store(output)
    config, data = _setting()
    for trial in range(_TRIALS):
        missing = {n: c for n, c in _cells(trial).items() if n not in store.lines}
        for name, verdicts in _trial(config, data, trial, missing):
            store.add(name, missing[name] | {"verdicts": verdicts})
    write_json(POWER_FILE, added_up([*store.lines.values()]))


def _cells(trial: int) -> dict[str, dict[str, Any]]:
    """Returns the cells of a trial by their names."""
    cells: dict[str, dict[str, Any]] = {}
    for bug, transformation in _BUGS.items():
        # Without a bug it makes no difference how many clients have it.
        shares = (_ALL, _HALF) if transformation else (_ALL,)
        for share in shares:
            cell = {"trial": trial, "bug": bug, "share": share}
            cells[f"{trial}-{bug}-{share:g}"] = cell
    return cells


def added_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns how often the verdict was right and wrong, by bug and signal.

    `of_half` has the same of bugs in half of the clients.
    """
    of_all = [row for row in rows if row["share"] == _ALL]
    of_half = [row for row in rows if row["share"] == _HALF]
    facts = {"signals": list(_SIGNALS), "clients": _CLIENTS, "groups": _GROUPS}
    return {**facts, **_counts(of_all), "of_half": _counts(of_half)}


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = {"trials": {}, "right": {}, "wrong": {}}
    for bug in _BUGS:
        verdicts = [row["verdicts"] for row in rows if row["bug"] == bug]
        if not verdicts:
            continue
        outcomes = [[outcome(text, bug) for text in own] for own in verdicts]
        # A row has an outcome for each signal; they are counted signal by signal.
        by_signal = list(zip(*outcomes, strict=True))
        found["trials"][bug] = [len(own) for own in by_signal]
        found["right"][bug] = [own.count("right") for own in by_signal]
        found["wrong"][bug] = [own.count("wrong") for own in by_signal]
    return found


def outcome(verdict: str, bug: str) -> str:
    """Returns right, undecided or wrong; more than one bug for one planted is wrong.

    `other` names no bug and clears none. It is undecided without a planted bug too:
    cohorts that accuracy selected do differ. "One of" is undecided if the bug is there.
    """
    if verdict in (UNDECIDED, OTHER):
        return "undecided"
    if verdict.startswith(ONE_OF):
        possible = verdict.removeprefix(ONE_OF).split(", ")
        if bug in possible:
            return "undecided"
        return "wrong"
    if verdict == bug:
        return "right"
    return "wrong"


def _setting() -> tuple[MomentConfig, FederatedImages]:
    settings = {"data": "fonts", "noise_multiplier": 1.0, "output": "-", "seed": 0}
    # The release of one group of `group-means`, as a run of its clients alone.
    settings |= {"phases": "means", "num_rounds": 1, "moment_size": _MOMENT_SIZE}
    settings |= {"clients_per_node": _CLIENTS}
    config = configure("moments", None, settings)
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
    # The first half of the groups is the healthy cohort, the other the suspicious one.
    groups = order[: 2 * _GROUPS * _CLIENTS].reshape(2 * _GROUPS, _CLIENTS)

    def drawn(data: FederatedImages, signal: float, first: int) -> list[LabelledImages]:
        found: list[LabelledImages] = []
        for group in range(first, first + _GROUPS):
            seed = derived_seed(trial, "group", group)
            found.append(samples(config, data, groups[group], signal, seed))
        return found

    if not cells:
        return
    healthy = [drawn(data, signal, 0) for signal in _SIGNALS]
    for name, cell in cells.items():
        chosen = groups[_GROUPS:, : round(cell["share"] * _CLIENTS)]
        other = spoilt(data, _BUGS[cell["bug"]], chosen.ravel())
        verdicts: list[str] = []
        for own, signal in zip(healthy, _SIGNALS, strict=True):
            suspicious = drawn(other, signal, _GROUPS)
            diagnosis = diagnose(
                own, suspicious, data.num_classes, frequencies=config.moment_size
            )
            verdicts.append(diagnosis.verdict)
        yield name, verdicts


def spoilt(
    data: FederatedImages, bug: Transformation | None, clients: NDArray[np.int64]
) -> FederatedImages:
    """Returns the data with a bug in all images of some clients."""
    if bug is None:
        return data
    images = data.images.copy()
    labels = data.labels.copy()
    own = np.concatenate([data.client_records[c] for c in clients])
    changed, told = bug.apply(to_float(images[own]), labels[own], data.num_classes)
    images[own] = np.round(255 * changed)
    labels[own] = told
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
        num_clients=count,
        clients_per_round=count,
        clients_per_node=count,
        noise_multiplier=count / signal,
        seed=seed,
        noise_seed=seed,
    )
    server = new_state(config)
    hosted = Hosted(data, clients.tolist(), 0)
    for method, own in phases_of(config):
        request, pending = method.begin(own, server)
        answer = answer_of(config, hosted, request)
        assert isinstance(answer, SanitizedGradients)
        released = summed(config, request.round, [answer])
        method.finish(own, server, pending, released)
    labels = np.arange(_SAMPLES, dtype=np.int64) % config.num_classes
    return LabelledImages(sample.draw(config, server.ema, labels, seed=0), labels)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_command(main))
