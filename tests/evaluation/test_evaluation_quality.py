"""Scores on features: known values, loops as oracles, too few images."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from fedgs.evaluation.quality import fid, inception_score, manifold_scores, memorisation
from refusals import assert_refused


def normal(count: int, dim: int, seed: int, shift: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(count, dim)) * (1 + np.arange(dim))
    return (values + shift).astype(np.float32)


# ------------------------------------------------------------------ Inception Score


def test_score_is_that_of_torchmetrics_on_the_same_splits():
    from torchmetrics.image.inception import InceptionScore

    logits = normal(500, 6, seed=1)
    rows = np.random.default_rng(3).permutation(500)
    with pytest.warns(UserWarning, match="will save all extracted features"):
        metric = InceptionScore(feature=torch.nn.Identity(), splits=10)
    metric.update(torch.from_numpy(logits[rows]).double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", torch.arange)
        mean, std = metric.compute()
    assert inception_score(logits, 3) == pytest.approx((float(mean), float(std)))


def test_too_few_images_for_their_neighbours_are_refused():
    given = [np.zeros(shape, "f4") for shape in ((50, 2), (5, 2))]
    assert_refused("count = 5:", manifold_scores, *given)


# ------------------------------------------------------------------ FID


def test_fid_is_the_formula_with_a_matrix_root():
    a, b = normal(300, 5, 0), normal(200, 5, 1, shift=0.7) ** 2
    covs = [np.cov(x.astype(np.float64), rowvar=False) for x in (a, b)]
    root = np.trace(sqrtm(covs[0] @ covs[1]).real)
    means = a.mean(0, dtype=np.float64) - b.mean(0, dtype=np.float64)
    expected = means @ means + np.trace(covs[0]) + np.trace(covs[1]) - 2 * root
    assert fid(a, b) == pytest.approx(expected, rel=1e-6)
    assert fid(a, a) == pytest.approx(0, abs=1e-6)


def test_fid_does_not_lose_small_differences_beside_a_large_mean():
    a = normal(1000, 3, 0).astype(np.float32)
    far = np.float32(3000)
    assert fid(a + far, a + far + 0.5) == pytest.approx(3 * 0.25, rel=1e-2)


# ------------------------------------------------------------------ neighbours


def loops(real: np.ndarray, synthetic: np.ndarray, k: int) -> dict[str, float]:
    """The four definitions, point by point."""

    def radius(points: np.ndarray, i: int) -> float:
        return sorted(np.linalg.norm(points - points[i], axis=1))[k]

    def inside(point: np.ndarray, points: np.ndarray) -> list[bool]:
        return [
            np.linalg.norm(point - other) <= radius(points, i)
            for i, other in enumerate(points)
        ]

    balls = np.array([inside(point, real) for point in synthetic])
    return {
        "precision": balls.any(1).mean(),
        "recall": np.mean([any(inside(point, synthetic)) for point in real]),
        "density": balls.sum(1).mean() / k,
        "coverage": balls.any(0).mean(),
    }


def test_neighbour_scores_are_those_of_their_definitions(monkeypatch):
    real, synthetic = normal(60, 2, 0), normal(40, 2, 1, shift=0.8)
    found = manifold_scores(real, synthetic, num_neighbours=3)
    assert found == pytest.approx(loops(real, synthetic, 3))
    assert len({round(value, 6) for value in found.values()}) == 4
    monkeypatch.setattr("fedgs.evaluation.quality.CHUNK", 7)
    again = manifold_scores(real, synthetic, num_neighbours=3)
    assert again == pytest.approx(found)


# ------------------------------------------------------------------ memorisation


def test_share_counts_the_copies_among_fresh_images():
    train, test = normal(300, 8, 0), normal(100, 8, 1)
    mixed = np.concatenate([normal(75, 8, 2), train[:25] + 1e-3])
    assert memorisation(train, test, mixed)["memorised_share"] == 0.25
    copies = memorisation(train, test, train[:50])
    assert copies == {"memorisation_ratio": 0, "memorised_share": 1}


def test_ratio_is_of_the_medians_of_nearest_distances():
    train, test, synthetic = normal(50, 3, 0), normal(31, 3, 1), normal(21, 3, 2) * 2

    def median(points: np.ndarray) -> float:
        nearest = [np.linalg.norm(train - point, axis=1).min() for point in points]
        return float(np.median(nearest))

    found = memorisation(train, test, synthetic)["memorisation_ratio"]
    assert found == pytest.approx(median(synthetic) / median(test), rel=1e-5)
    assert found != pytest.approx(1, abs=0.1)
