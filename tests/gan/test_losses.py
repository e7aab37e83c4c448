"""The losses against formulas written out by hand in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgs.gan.losses import discriminator_loss

BATCH, SIDE = 5, 4
LABEL_WEIGHTS = np.array([0.5, -2.0, 1.5])


def _score(curvature: Tensor):
    """D(x, y) = 1/2 sum(a x^2) + w_y sum(x), whose image gradient is a x + w_y."""
    weights = torch.from_numpy(LABEL_WEIGHTS)

    def score(images: Tensor, labels: Tensor) -> Tensor:
        flat = images.flatten(1)
        return 0.5 * (flat.square() @ curvature) + weights[labels] * flat.sum(1)

    return score


def _problem(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (BATCH, 1, SIDE, SIDE)
    return {
        "real": rng.random(shape),
        "real_labels": rng.integers(3, size=BATCH),
        "fake": rng.random(shape),
        "fake_labels": rng.integers(3, size=BATCH),
        "mix_weight": rng.random(BATCH),
    }


def _by_hand(
    parts: dict[str, np.ndarray],
    curvature: np.ndarray,
    drift_weight: float,
) -> float:
    def score(image: np.ndarray, label: int) -> float:
        x = image.ravel()
        return float(0.5 * np.sum(curvature * x * x) + LABEL_WEIGHTS[label] * x.sum())

    total = 0.0
    for i in range(BATCH):
        real, fake, a = parts["real"][i], parts["fake"][i], parts["mix_weight"][i]
        real_label, fake_label = parts["real_labels"][i], parts["fake_labels"][i]
        mix = (a * real + (1 - a) * fake).ravel()
        norm = np.sqrt(np.sum((curvature * mix + LABEL_WEIGHTS[real_label]) ** 2))
        total += score(fake, fake_label) - score(real, real_label)
        total += 10.0 * (norm - 1) ** 2
        total += drift_weight * score(real, real_label) ** 2
    return total / BATCH


@given(seed=st.integers(0, 2**32), drift_weight=st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_the_loss_is_the_formula_in_the_docstring(seed, drift_weight):
    parts = _problem(seed)
    curvature = np.random.default_rng(seed + 1).normal(size=SIDE * SIDE)
    loss = discriminator_loss(
        _score(torch.from_numpy(curvature)),
        *(torch.from_numpy(part) for part in parts.values()),
        drift_weight,
    )
    expected = _by_hand(parts, curvature, drift_weight)
    assert loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_a_zero_image_gradient_has_a_finite_penalty_gradient():
    scale = torch.zeros((), dtype=torch.float64)
    real = torch.ones(2, 1, 2, 2, dtype=torch.float64)
    labels = torch.zeros(2, dtype=torch.int64)

    def loss(scale: Tensor) -> Tensor:
        return discriminator_loss(
            lambda images, _: scale * images.flatten(1).sum(1),
            real,
            labels,
            0 * real,
            labels,
            torch.full((2,), 0.5, dtype=torch.float64),
            0.0,
        )

    # d/ds (0 - 4 s) = -4; the penalty's own gradient is smoothed to 0 at s = 0.
    assert torch.func.grad(loss)(scale).item() == pytest.approx(-4.0)
