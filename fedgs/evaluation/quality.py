"""How synthetic images compare with real ones, on features; no network is chosen here.

Every function takes arrays of features or logits; the caller's name for the number
says which network they come from.

Source:
    Salimans et al., "Improved techniques for training GANs", NeurIPS 2016.
    Heusel et al., "GANs trained by a two time-scale update rule", NeurIPS 2017.
    Kynkaanniemi et al., "Improved precision and recall metric", NeurIPS 2019.
    Naeem et al., "Reliable fidelity and diversity metrics", ICML 2020.
    Yoon et al., "Diffusion probabilistic models generalize when they fail to memorize",
    ICML workshop SPIGM 2023 (the ratio 1/3).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedgs.errors import UserError

NUM_SPLITS = 10  # of the Inception Score
NUM_NEIGHBOURS = 5
MEMORISED_RATIO = 1 / 3  # of the nearest distance to the second nearest
CHUNK = 500  # rows of a distance matrix at a time

Features = NDArray[np.float32]


def inception_score(
    logits: Features,
    seed: int,
    num_splits: int = NUM_SPLITS,
) -> tuple[float, float]:
    """Returns mean and standard deviation of exp(E_x KL(p(y|x) || p(y))) over splits.

    Privacy: post-processing of DP output and of the network.

    Args:
        logits: shape (n, num_classes), n at least the number of parts.
        seed: the seed of the shuffling before the split.
        num_splits: number of equal parts.

    Returns:
        Two numbers; the score lies in [1, num_classes].
    """
    rng = np.random.default_rng(seed)
    shuffled = logits[rng.permutation(len(logits))]
    log_p = torch.from_numpy(shuffled).double().log_softmax(1)  # log p(y|x)
    scores: list[float] = []
    for part in torch.tensor_split(log_p, num_splits):
        log_marginal = part.logsumexp(0) - np.log(len(part))  # log p(y)
        log_ratio = part - log_marginal
        kl = (part.exp() * log_ratio).sum(1)
        score = kl.mean().exp()
        scores.append(float(score))
    mean = float(np.mean(scores))
    deviation = float(np.std(scores, ddof=1))
    return mean, deviation


def fid(real: Features, synthetic: Features) -> float:
    """Returns the Frechet distance of two Gaussians fitted to features.

    ||mean_r - mean_s||^2 + tr(cov_r + cov_s - 2 (cov_r cov_s)^(1/2)), by torchmetrics.

    Privacy: reads private data; output private.

    Args:
        real: shape (n, F), n at least 2.
        synthetic: shape (m, F), m at least 2.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    features: Any = nn.Identity()  # in the place of a network
    features.num_features = real.shape[1]
    metric = FrechetInceptionDistance(feature=features)
    metric.update(torch.from_numpy(real), real=True)  # it sums in double
    metric.update(torch.from_numpy(synthetic), real=False)
    distance = float(metric.compute())
    if distance < 0:  # rounding can leave -1e-5
        return 0.0
    return distance


def manifold_scores(
    real: Features,
    synthetic: Features,
    num_neighbours: int = NUM_NEIGHBOURS,
) -> dict[str, float]:
    """Returns precision, recall, density and coverage by k nearest neighbours.

    The ball of a point reaches to its k-th nearest other point of the same set.
    Precision: share of synthetic points inside a real ball. Recall: share of real
    points inside a synthetic ball. Density: real balls around a synthetic point,
    divided by k. Coverage: share of real balls that hold a synthetic point.

    Privacy: reads private data; output private.

    Args:
        real: shape (n, F), n above num_neighbours.
        synthetic: shape (m, F), m above num_neighbours.
        num_neighbours: k.

    Raises:
        UserError: too few images.
    """
    smallest = min(len(real), len(synthetic))
    if smallest <= num_neighbours:
        raise UserError(
            f"count = {smallest}: precision and recall compare {num_neighbours} "
            f"neighbours; give more than {num_neighbours} images"
        )
    real_points = torch.from_numpy(real)
    points = torch.from_numpy(synthetic)
    real_radii = _radii(real_points, num_neighbours)
    radii = _radii(points, num_neighbours)
    balls = torch.zeros(len(points))  # real balls around each synthetic point
    recalled = 0
    covered = 0
    # In parts: all distances at once would not fit into memory.
    for rows, distances in _distances(real_points, points):
        is_in_real_ball = distances <= real_radii[rows, None]
        balls += is_in_real_ball.sum(0)
        covered += int(is_in_real_ball.any(1).sum())
        is_in_synthetic_ball = distances <= radii
        recalled += int(is_in_synthetic_ball.any(1).sum())
    is_precise = balls > 0
    return {
        "precision": float(is_precise.float().mean()),
        "recall": recalled / len(real_points),
        "density": float(balls.mean()) / num_neighbours,
        "coverage": covered / len(real_points),
    }


def _radii(points: torch.Tensor, num_neighbours: int) -> torch.Tensor:
    """Returns how far each point's ball reaches, shape (n,)."""
    # Of all points of its own set, each one is the nearest to itself.
    smallest = nearest(points, points, num_neighbours + 1)
    return smallest[:, -1]


def memorisation(
    train: Features,
    test: Features,
    synthetic: Features,
) -> dict[str, float]:
    """Returns how close synthetic images come to real training images.

    `memorisation_ratio`: median distance of a synthetic image to its nearest training
    image, divided by the same median of test images. 1 is as far as fresh real images,
    0 is a copy; infinite or NaN where most test images are training images.
    `memorised_share`: share of synthetic images whose nearest training
    image is nearer than a third of the distance to the second nearest.

    Privacy: reads private data; output private.

    Args:
        train: shape (n, D), n at least 2, pixels of flat images.
        test: shape (k, D), of the same distribution, not trained on.
        synthetic: shape (m, D).
    """
    trained_on = torch.from_numpy(train)
    near = nearest(torch.from_numpy(synthetic), trained_on, count=2)
    fresh = nearest(torch.from_numpy(test), trained_on, count=2)
    first = near[:, 0]
    second = near[:, 1]
    of_synthetic = first.median()
    of_test = fresh[:, 0].median()
    ratio = of_synthetic / of_test
    is_copy = first <= MEMORISED_RATIO * second
    return {
        "memorisation_ratio": float(ratio),
        "memorised_share": float(is_copy.float().mean()),
    }


def nearest(points: torch.Tensor, others: torch.Tensor, count: int) -> torch.Tensor:
    """Returns each point's smallest distances to others, rising, shape (n, count).

    Privacy: reads private data; output private.
    """
    parts: list[torch.Tensor] = []
    for _, distances in _distances(points, others):
        found = distances.topk(count, dim=1, largest=False)
        parts.append(found.values)
    return torch.cat(parts)


def _distances(
    points: torch.Tensor,
    others: torch.Tensor,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields parts of the Euclidean distance matrix and which rows they are."""
    for start in range(0, len(points), CHUNK):
        rows = slice(start, start + CHUNK)
        yield rows, torch.cdist(points[rows], others)
