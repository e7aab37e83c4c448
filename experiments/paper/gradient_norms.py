"""Gradient norms before and after clipping, on data that the user owns: NOT PRIVATE.

    python -m experiments.paper.gradient_norms --data mnist --data-dir DATA

Nobody may see these norms of other people's data: they are computed from it and no
noise covers them, so no run of fedgs writes them. A probe is a run of its own, in this
process, whose noise is absent or seeded, so that its ledger says that it guarantees
nothing; `NOT-PRIVATE.txt` in its folder says so too. Called again with the same
--output, the command goes on where it was stopped, and draws again.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Fig. 2 and A1.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from experiments.paper import figure_drawing
from fedgs.app.commands.run_outcome import exit_if_stopped
from fedgs.app.flags import RecipeOption, run_command, settings_flags
from fedgs.config.recipes import configure
from fedgs.config.run_config import RunConfig, of_gs_wgan
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data
from fedgs.errors import UserError
from fedgs.files import read_json_lines, write_atomically
from fedgs.mechanism.sanitizer import PerSampleGradients, clip
from fedgs.methods.base import Hosted, Request
from fedgs.round.answer import raw_answers
from fedgs.round.local import LocalNodes, train_nodes
from fedgs.round.messages import NodeRelease, SentRequest, content_of
from fedgs.round.node import Node
from fedgs.round.preparation import new_run
from fedgs.round.run import Stop, stop_on_signal
from fedgs.runs.run_folder import RunFolder

NORMS_FILE = "gradient_norms.jsonl"
WARNING_FILE = "NOT-PRIVATE.txt"
_WARNING_TEXT = (
    f"NOT PRIVATE. {NORMS_FILE} was computed from private images without any "
    "protection, and the noise of this run is absent or seeded: no epsilon holds. "
    "Show it to nobody but the owner of the data.\n"
)
MOST_NORMS = 256  # kept of a round, a random subset
HISTOGRAM_BINS = 40


class Norms(NamedTuple):
    """Norms of single fakes' gradients of one round, before and after clipping."""

    round: int
    before: NDArray[np.float64]
    after: NDArray[np.float64]


class ProbedNode(Node):
    """A node that remembers the norms of what it clipped for its last answer.

    A query changes no bit of a discriminator, so it is repeated after the answer,
    without training.

    Privacy: reads private data; output private.

    Attributes:
        norms: before and after clipping, shape (2, n * B); None without an answer.
    """

    norms: Tensor | None = None

    def answer(self, sent: SentRequest) -> NodeRelease | None:
        """Answers as every node does."""
        answer = super().answer(sent)
        self.norms = None
        if answer is not None:
            self.norms = self._measure(content_of(sent))
        return answer

    def _measure(self, request: Request) -> Tensor:
        config = of_gs_wgan(self.config)
        untrained = dataclasses.replace(request, trainees=())
        hosted = Hosted(
            self.data,
            self.hosted,
            self.node_id,
            self.state.discriminators,
        )
        parts: list[Tensor] = []
        for grads in raw_answers(config, hosted, untrained):
            clipped = clip(PerSampleGradients(grads), config.clip_bound)
            both = torch.stack([grads.double(), clipped.values])  # (2, n, B, C, k, k)
            norms = both.flatten(3).norm(dim=3)  # (2, n, B)
            parts.append(norms.flatten(1).cpu())
        return torch.cat(parts, dim=1)


class ProbedNodes(LocalNodes):
    """The local engine with `ProbedNode`s; writes one line of norms for each round.

    Privacy: reads private data; output private.
    """

    def __init__(self, folder: RunFolder, data: FederatedImages) -> None:
        """Makes no node yet."""
        super().__init__(folder.config, data, folder.private)
        self.path = folder.path / NORMS_FILE

    def answers(self, request: Request) -> Sequence[NodeRelease]:
        """Answers as `LocalNodes` does, then writes the norms."""
        answers = super().answers(request)
        if not answers:  # the clients refused
            return answers
        measured: list[Tensor] = []
        for answer in answers:
            node = self._node(answer.node_id)
            if isinstance(node, ProbedNode) and node.norms is not None:
                measured.append(node.norms)
        norms = torch.cat(measured, dim=1)
        num_norms = norms.shape[1]
        if num_norms > MOST_NORMS:
            # Of no run's seed: the probe must change nothing of the training.
            rng = np.random.default_rng(request.round)
            chosen = rng.choice(num_norms, MOST_NORMS, replace=False)
            norms = norms[:, chosen]
        line = {
            "round": request.round,
            "before": norms[0].tolist(),
            "after": norms[1].tolist(),
        }
        with open(self.path, "a") as lines:
            lines.write(json.dumps(line) + "\n")
        return answers

    def _node(self, node_id: int) -> Node:
        if node_id not in self.nodes:
            self.nodes[node_id] = ProbedNode(
                self.config, node_id, self.data, self.private
            )
        return self.nodes[node_id]


def probe(folder: RunFolder, stop: Stop) -> None:
    """Trains an `unprotected` run from its last checkpoint on, and keeps its norms.

    Privacy: reads private data; output private.

    Raises:
        RunStopped: `stop` was set.
    """
    data = load_data(folder.config)
    write_atomically(folder.path / WARNING_FILE, _WARNING_TEXT.encode())
    (folder.path / NORMS_FILE).touch(mode=0o600)  # private data: for the owner alone
    torch.set_num_threads(1)
    with folder.locked(), ProbedNodes(folder, data) as nodes:
        train_nodes(folder, nodes, lambda metrics: None, stop)


def read_norms(folder: RunFolder) -> list[Norms]:
    """Returns the norms of every round, of a repeated round the last ones.

    Privacy: reads private data; output private.

    Raises:
        UserError: the folder is no probe's.
    """
    if not (folder.path / WARNING_FILE).exists():
        raise UserError(
            f"{folder.path}: it is no probe ({WARNING_FILE} is missing); norms are "
            "only taken from runs that are marked as not private"
        )
    found: dict[int, Norms] = {}
    for line in read_json_lines(folder.path / NORMS_FILE):
        round = line["round"]
        found[round] = Norms(
            round=round,
            before=np.array(line["before"]),
            after=np.array(line["after"]),
        )
    return [found[number] for number in sorted(found)]


def unprotected(config: RunConfig) -> RunConfig:
    """Returns the configuration on the local engine, its noise absent or seeded."""
    config = dataclasses.replace(config, engine="local")
    # Norms without noise void any guarantee, so the run must not claim one.
    if config.noise_multiplier == 0 or config.noise_seed is not None:
        return config
    return dataclasses.replace(config, noise_seed=config.seed)


# ------------------------------------------------------------------ pictures


def norm_dynamics(norms: Sequence[Norms], clip_bound: float) -> Figure:
    """Returns the norms before clipping against the rounds (Fig. 2)."""
    figure = Figure((7, 4), layout="constrained")
    axes = figure.subplots()
    rounds = [found.round for found in norms]
    # Quantiles, because a few fakes have norms a thousand times larger.
    quantiles = [np.quantile(found.before, (0.05, 0.5, 0.95)) for found in norms]
    low, middle, high = np.array(quantiles).T
    axes.fill_between(rounds, low, high, alpha=0.3, label="5 % to 95 % of the fakes")
    axes.plot(rounds, middle, label="median")
    axes.axhline(clip_bound, color="black", linestyle="--", label="clip bound")
    axes.set(xlabel="round", ylabel="gradient norm before clipping", ylim=(0, None))
    axes.legend()
    return figure


def norm_histograms(norms: Sequence[Norms], clip_bound: float) -> Figure:
    """Returns the distribution of norms before and after clipping (Fig. A1)."""
    figure = Figure((8, 3.6), layout="constrained")
    before = np.concatenate([found.before for found in norms])
    after = np.concatenate([found.after for found in norms])
    both = {"before clipping": before, "after clipping": after}
    # A few outliers would leave no room for the others; they are in the last bin.
    highest = float(np.quantile(before, 0.999))
    top = max(clip_bound, highest)
    bins = np.linspace(0, 1.05 * top, HISTOGRAM_BINS + 1)
    parts: NDArray[np.object_] = figure.subplots(1, 2, sharex=True, squeeze=False)
    for axes, (title, values) in zip(parts[0], both.items(), strict=True):
        cut = np.minimum(values, bins[-1])
        axes.hist(cut, bins=bins)
        axes.axvline(clip_bound, color="black", linestyle="--")
        mean = values.mean()
        std = values.std()
        axes.set_title(f"{title}: mean {mean:.3g}, std {std:.2g}", fontsize=10)
        axes.set(xlabel="gradient norm", ylabel="fakes")
    return figure


@settings_flags("data", "data_dir", "num_rounds", "output", has_set=True)
def gradient_norms(
    recipe: RecipeOption = "algorithm-1",
    *,
    settings: dict[str, Any],
) -> None:
    """Draw norms of gradients before and after clipping: NOT PRIVATE."""
    given = {"output": "runs/norms", "seed": 0} | settings
    path = Path(given["output"])
    if (path / "config.json").exists():
        folder = RunFolder.open(path)
        read_norms(folder)  # refuses a run that is no probe
    else:
        config = unprotected(configure(recipe, None, given))
        folder, _ = new_run(config)
    if not folder.is_finished:
        go_on = "continue with the same command"
        with exit_if_stopped(go_on), stop_on_signal() as stop:
            probe(folder, stop)
    norms = read_norms(folder)
    config = folder.config
    scale = f"NOT PRIVATE. {config.num_clients} clients, {config.num_rounds} rounds"
    figures = {"norm-dynamics": norm_dynamics, "norm-histograms": norm_histograms}
    for name, figure_of in figures.items():
        picture = folder.path / f"{name}.png"
        figure = figure_of(norms, config.clip_bound)
        figure_drawing.save(picture, figure, scale)
        print(picture)


if __name__ == "__main__":
    sys.exit(run_command(gradient_norms))
