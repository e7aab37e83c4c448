"""How much noise can a bug be found through? The table that `fedgs debug` looks up.

    python -m experiments.power_table --data-dir DATA --output power.jsonl

Two sites of four groups of 64 pseudo-owners each, in other groups for every trial. The
bug is put into all images of one site, or of half of its owners; a run of group means
compares the sites, at the noise of each level. Owners have ten images: digits of a
font, or clothes of Fashion-MNIST. Every bug, kind of data, share and trial is one line
of the output; the same command goes on. At the end they are added up, both kinds of
data together, in fedgs/app/debug/power.json.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.store import Store
from fedgs.app.debug.power import POWER_FILE
from fedgs.app.flags import DataDirOption, OutputOption, run_command
from fedgs.config.recipes import configure
from fedgs.config.run_config import GroupMeansConfig, ResolvedConfig, RunConfig
from fedgs.data.federated import FederatedImages, to_float
from fedgs.data.load import load_data
from fedgs.data.transformations import TRANSFORMATIONS, Transformation
from fedgs.diagnosis.conclusion import samples_of
from fedgs.diagnosis.diagnosis import ONE_OF, OTHER, UNDECIDED, diagnose
from fedgs.files import write_json
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.methods import new_state
from fedgs.methods.base import Hosted, Released, Request
from fedgs.methods.group_means import METHOD, groups_released
from fedgs.randomness import stream
from fedgs.round.answer import answer_of

_SIGNALS = (10, 20, 40, 80, 160, 320, 640)  # K / noise multiplier, of one group
_GROUPS = 4  # of a site
_CLIENTS = 64  # of a group
_TRIALS = 2  # of every bug and kind of data
_ALL = 1.0  # of the suspicious clients have the bug
_HALF = 0.5
_BUGS = {"none": None, **{entry.name: entry for entry in TRANSFORMATIONS}}
_HEALTHY = 0  # nodes
_SUSPICIOUS = 1
# Kinds of data, all with ten classes, and owners of ten images.
_KINDS: dict[str, dict[str, Any]] = {
    "fonts": {"data": "fonts"},
    "clothes": {"data": "fashion-mnist", "partition": "iid", "num_clients": 6000},
}


def main(
    output: OutputOption,
    data_dir: DataDirOption,
) -> None:
    """Fill the table; its lines are kept in OUTPUT."""
    store = Store(output)
    config = _setting()
    for kind, settings in _KINDS.items():
        data = load_data(RunConfig(**settings, data_dir=data_dir, seed=0))
        for trial in range(_TRIALS):
            missing: dict[str, dict[str, Any]] = {}
            for name, cell in _cells(kind, trial).items():
                if name not in store.lines:
                    missing[name] = cell
            for name, verdicts in _trial(config, data, trial, missing):
                store.add(name, missing[name] | {"verdicts": verdicts})
    rows = list(store.lines.values())
    write_json(POWER_FILE, added_up(rows))


def _cells(kind: str, trial: int) -> dict[str, dict[str, Any]]:
    """Returns the cells of a trial by their names."""
    cells: dict[str, dict[str, Any]] = {}
    for bug, transformation in _BUGS.items():
        shares = [_ALL]
        # Without a bug it makes no difference how many clients have it.
        if transformation is not None:
            shares.append(_HALF)
        for share in shares:
            cells[f"{kind}-{trial}-{bug}-{share:g}"] = {
                "data": kind,
                "trial": trial,
                "bug": bug,
                "share": share,
            }
    return cells


def added_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns how often the verdict was right and wrong, by bug and signal.

    `of_half` has the same of bugs in half of the clients.
    """
    of_all = [row for row in rows if row["share"] == _ALL]
    of_half = [row for row in rows if row["share"] == _HALF]
    table: dict[str, Any] = {
        "signals": list(_SIGNALS),
        "clients": _CLIENTS,
        "groups": _GROUPS,
    }
    table |= _counts(of_all)
    table["of_half"] = _counts(of_half)
    return table


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Returns the numbers of trials and of outcomes, by bug, at each signal."""
    trials: dict[str, list[int]] = {}
    found: dict[str, dict[str, list[int]]] = {"trials": trials}
    for what in ("right", "narrowed", "wrong"):
        found[what] = {}
    for bug in _BUGS:
        of_bug = [row for row in rows if row["bug"] == bug]
        if not of_bug:
            continue
        trials[bug] = [len(of_bug)] * len(_SIGNALS)
        for what, counts in found.items():
            if what != "trials":
                counts[bug] = [0] * len(_SIGNALS)
        for row in of_bug:
            # A row has a verdict for each signal.
            for level, verdict in enumerate(row["verdicts"]):
                what = outcome(verdict, bug)
                if what in found:  # undecided ones are the rest of the trials
                    found[what][bug][level] += 1
    return found


def outcome(verdict: str, bug: str) -> str:
    """Returns right, narrowed, undecided or wrong.

    Narrowed is "one of" some, if the bug is among them. `other` names no bug and clears
    none, so it is undecided without a planted bug too.
    """
    if verdict in (UNDECIDED, OTHER):
        return "undecided"
    if verdict.startswith(ONE_OF):
        possible = verdict.removeprefix(ONE_OF).split(", ")
        if bug in possible:
            return "narrowed"
        return "wrong"
    if verdict == bug:
        return "right"
    return "wrong"


def _setting() -> GroupMeansConfig:
    """Returns the settings of a run that compares two sites, without noise."""
    # No noise, because it is added at every level to the same sums.
    count = _GROUPS * _CLIENTS
    settings = {
        "num_clients": 2 * count,
        "clients_per_node": count,
        "groups": _GROUPS,
        "image_size": 28,
        "image_channels": 1,
        "num_classes": 10,
        "noise_multiplier": 0.0,
        "output": "-",
        "seed": 0,
    }
    config = configure("group-means", None, settings)
    flat = config.to_flat()
    flat["clients_per_round"] = 2 * count
    own = ResolvedConfig.from_flat(flat).at_phase(0)
    assert isinstance(own, GroupMeansConfig)
    return own


def _trial(
    config: GroupMeansConfig,
    data: FederatedImages,
    trial: int,
    cells: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, list[str]]]:
    """Yields every cell with its verdicts at all levels of noise."""
    if not cells:
        return
    # Other owners in every trial, the same at all levels of noise and for all bugs.
    rng = stream(trial, "power-table")
    order = rng.permutation(data.num_clients)
    owners = order[: config.num_clients].reshape(config.num_nodes, -1)
    healthy = _sums(config, data, owners[_HEALTHY], _HEALTHY)
    suspects = owners[_SUSPICIOUS]
    for name, cell in cells.items():
        num_chosen = round(cell["share"] * len(suspects))
        other = spoilt(data, _BUGS[cell["bug"]], suspects[:num_chosen])
        suspicious = _sums(config, other, suspects, _SUSPICIOUS)
        sums = {_HEALTHY: healthy, _SUSPICIOUS: suspicious}
        verdicts: list[str] = []
        for signal in _SIGNALS:
            verdicts.append(_verdict(config, sums, signal, trial))
        yield name, verdicts


def spoilt(
    data: FederatedImages,
    bug: Transformation | None,
    clients: NDArray[np.int64],
) -> FederatedImages:
    """Returns the data with a bug in all images of some clients."""
    if bug is None:
        return data
    images = data.images.copy()
    labels = data.labels.copy()
    # Of these clients alone: the others share the arrays, which are copies.
    own = np.concatenate([data.client_records[client] for client in clients])
    pictures = to_float(images[own])
    changed, told = bug.apply(pictures, labels[own], data.num_classes)
    images[own] = np.round(255 * changed)
    labels[own] = told
    return dataclasses.replace(data, images=images, labels=labels)


def _sums(
    config: GroupMeansConfig,
    data: FederatedImages,
    owners: NDArray[np.int64],
    node: int,
) -> Tensor:
    """Returns what a node of these owners releases, but for the noise."""
    # The run's numbers of clients are not those of the data.
    names = [data.client_names[owner] for owner in owners]
    hosted = Hosted(
        data=data,
        clients=owners.tolist(),
        node_id=node,
        groups=METHOD.groups(config, names, (), least=1),
    )
    answer = answer_of(config, hosted, Request(1, {}))
    assert isinstance(answer, SanitizedGradients)
    return answer.values.double()


def _verdict(
    config: GroupMeansConfig,
    sums: Mapping[int, Tensor],
    signal: float,
    trial: int,
) -> str:
    """Returns the verdict on two nodes' sums at one level of noise."""
    # Noise is added here, and not by the nodes, whose sums serve all levels.
    noisy = dataclasses.replace(config, noise_multiplier=_CLIENTS / signal)
    noise_std = noisy.phase_terms(1).noise_std
    rng = torch.Generator().manual_seed(trial)
    by_node: dict[int, Tensor] = {}
    for node, own in sums.items():
        noise = noise_std * torch.randn(own.shape, generator=rng)
        by_node[node] = own + noise
    total = sum(by_node.values(), start=torch.zeros(()))
    state = new_state(noisy)
    std_of_total = noise_std * len(sums) ** 0.5
    released = Released(total, std_of_total, by_node)
    METHOD.finish(noisy, state, None, released)
    groups = groups_released(noisy, state.released)
    healthy, suspicious = samples_of(groups).values()
    diagnosis = diagnose(
        healthy,
        suspicious,
        num_classes=noisy.num_classes,
        num_frequencies=noisy.moment_size,
    )
    return diagnosis.verdict


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_command(main))
