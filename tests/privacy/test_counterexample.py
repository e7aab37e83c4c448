"""Why "train the selected client only" voids amplification: an example, computed.

docs/counterexample.md tells the story and quotes the numbers. The discriminators here
are as bad as they may be: deterministic functions of their own data and of how often
they were trained, whose raw gradients go through the real sanitizer.
"""

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, sanitize
from fedgs.privacy.amplification import Sampled, SampledBound
from fedgs.privacy.gaussian import delta_from_mu

CLIP_BOUND = 1.0
NOISE_MULTIPLIER = 0.5  # noise_std = 2 C sigma = C; one release has z = sigma, B = 1
NOISE_STD = 2 * CLIP_BOUND * NOISE_MULTIPLIER
MU = 1 / NOISE_MULTIPLIER
EPSILON = 2.0
TARGET = 0
PAGE = Path(__file__).resolve().parents[2] / "docs" / "counterexample.md"
# K clients in round 1, rounds after it, and the least factor by which the claim fails.
RUNS = [(2, 1, 1.2), (2, 4, 1.35), (10, 4, 4), (100, 8, 50)]

Outcomes = list[tuple[float, tuple[float, float]]]  # probability, means of a release


def _gradient(client: int, round: int, trained: int, target_data: float) -> float:
    """The raw gradient of one fake of one pixel."""
    if client == TARGET:
        return 10.0 * target_data
    return 10.0 if round > 1 and trained == round else -10.0


def _mean_release(gradients: list[float], round: int) -> float:
    """What the sanitizer releases, without its noise."""
    raw = PerSampleGradients(torch.tensor(gradients).view(-1, 1, 1, 1, 1))
    noise = NoiseStream(0, 0, round)
    return sanitize([clip(raw, CLIP_BOUND)], 0.0, noise, round, 0).values.item()


def _outcomes(
    num_clients: int, num_later: int, trains_all: bool, target_data: float
) -> Outcomes:
    """Round 1 asks one of K clients; then the target leaves, and all others answer.

    The later releases are averaged, which loses nothing: their means are equal. All
    clients but the target are alike, so that one draw stands for all of theirs.
    """
    others = [client for client in range(num_clients) if client != TARGET]
    outcomes = []
    for selected, ways in ((TARGET, 1), (others[0], len(others))):
        trained = {c: int(trains_all or c == selected) for c in range(num_clients)}
        first = _gradient(selected, 1, trained[selected], target_data)
        releases = []
        for round in range(2, 2 + num_later):
            trained = {client: trained[client] + 1 for client in others}
            gradients = [_gradient(c, round, trained[c], target_data) for c in others]
            releases.append(_mean_release(gradients, round))
        means = (_mean_release([first], 1), float(np.mean(releases)))
        outcomes.append((ways / num_clients, means))
    return outcomes


def _density(
    outcomes: Outcomes, grid: tuple[npt.NDArray, npt.NDArray], stds: tuple[float, float]
) -> npt.NDArray[np.float64]:
    """The density of both releases on the grid, (n, n)."""
    total = np.zeros((len(grid[0]), len(grid[1])))
    for probability, means in outcomes:
        first, later = (
            np.exp(-(((x - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))
            for x, mean, std in zip(grid, means, stds, strict=True)
        )
        total += probability * first[:, None] * later[None, :]
    return total


def _true_delta(num_clients: int, num_later: int, trains_all: bool) -> float:
    """The hockey-stick divergence of the two data sets of the target, integrated."""
    neighbours = [
        _outcomes(num_clients, num_later, trains_all, data) for data in (1.0, -1.0)
    ]
    stds = (NOISE_STD, NOISE_STD / math.sqrt(num_later))
    means = np.array([m for outcomes in neighbours for _, m in outcomes])
    grid = tuple(
        np.linspace(mean.min() - 9 * std, mean.max() + 9 * std, 801)
        for mean, std in zip(means.T, stds, strict=True)
    )
    ours, theirs = (_density(outcomes, grid, stds) for outcomes in neighbours)
    cell = (grid[0][1] - grid[0][0]) * (grid[1][1] - grid[1][0])
    forward, backward = (
        float(np.maximum(p - math.exp(EPSILON) * q, 0).sum() * cell)
        for p, q in ((ours, theirs), (theirs, ours))
    )
    return max(forward, backward)


def _claimed_delta(num_clients: int) -> float:
    """What amplified composition claims: the target is in the draw of one round."""
    drawn = Sampled(num_clients, 1, NOISE_MULTIPLIER, 1)
    return SampledBound((drawn,)).delta(EPSILON)


# ------------------------------------------------------------------ the example


@pytest.mark.parametrize(("num_clients", "num_later", "factor"), RUNS)
def test_selected_only_training_breaks_the_amplified_claim(
    num_clients, num_later, factor
):
    claimed = _claimed_delta(num_clients)
    true = _true_delta(num_clients, num_later, trains_all=False)
    assert true > factor * claimed
    # No more is lost than the amplification: the target is drawn with probability q.
    assert true <= delta_from_mu(MU, EPSILON) / num_clients
    numbers = f"{claimed:.3g} | {true:.3g} | {true / claimed:.2g}"
    assert f"| {num_clients} | {num_later} | {numbers} |\n" in PAGE.read_text()
    # The claim is attained where everybody trains; both are rounded.
    true = _true_delta(num_clients, num_later, trains_all=True)
    assert true == pytest.approx(claimed, rel=1e-3)


# ------------------------------------------------------------------ the product
