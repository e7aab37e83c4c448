"""DP-SGD and the GANs trained by it: sensitivity, sampling, published figures."""

import dataclasses

import numpy as np
import pytest
import torch

from baselines import small_trainer
from experiments.baselines import dp_sgd
from experiments.baselines.baseline import Facts
from experiments.baselines.dp_sgd_gan import (
    DPSGDGan,
    DPSGDGanSettings,
    LayeredDiscriminator,
)
from fedgs.gan.models import Discriminator, build
from fedgs.randomness import stream
from tiny import run_config

CONFIG = run_config(
    num_classes=3,
    image_size=16,
    image_channels=1,
    discriminator_dim=2,
    spectral_norm=False,
)
FACTS = Facts(540, 60_000, 111, 10, (1, 28, 28))
DELTA = 1e-5


@pytest.fixture
def network():
    return dp_sgd.per_sample(build(LayeredDiscriminator, CONFIG, 0))


def records(count):
    rng = torch.Generator().manual_seed(0)
    images = torch.rand((count, 1, 16, 16), generator=rng)
    return images, torch.arange(count) % 3


def losses_of(network, images, labels):
    return lambda rows: torch.nn.functional.softplus(
        -network(images[rows], labels[rows])
    )


def by_loop(images, labels, clip):
    """Clips gradients one image after the other, by autograd, in the plain network."""
    plain = build(Discriminator, CONFIG, 0)
    total = 0
    for row in range(len(labels)):
        score = plain(images[row : row + 1], labels[row : row + 1])
        loss = torch.nn.functional.softplus(-score).sum()
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        vector = torch.cat([grad.flatten() for grad in grads])
        total = total + vector * min(1.0, clip / float(vector.norm()))
    return total


# ------------------------------------------------------------------ DP-SGD


@pytest.mark.parametrize(("clip", "at_once"), [(1e-3, 100), (1e3, 3)])
def test_a_clipped_sum_is_that_of_a_plain_loop(network, monkeypatch, at_once, clip):
    monkeypatch.setattr(dp_sgd, "SAMPLES_AT_ONCE", at_once)
    images, labels = records(7)
    losses = losses_of(network, images, labels)
    found = dp_sgd.clipped_sum(network, losses, torch.arange(7), clip)
    expected = by_loop(images, labels, clip)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    assert not dp_sgd.clipped_sum(network, losses, torch.arange(0), clip).any()


def test_one_record_more_moves_the_sum_by_the_clip_bound_at_most(network):
    images, labels = records(7)
    images[-1] *= 1e4  # an outlier, whose gradient is large
    losses = losses_of(network, images, labels)
    more = dp_sgd.clipped_sum(network, losses, torch.arange(7), 0.5).double()
    less = dp_sgd.clipped_sum(network, losses, torch.arange(6), 0.5).double()
    assert 0.49 < float((more - less).norm()) <= 0.5


def test_a_gradient_that_is_not_finite_counts_as_none():
    grads = torch.tensor([[float("nan"), 1.0], [float("inf"), 0.0], [0.3, 0.4]])
    assert dp_sgd.clipped(grads, 1.0).tolist() == [
        [0, 0],
        [0, 0],
        pytest.approx([0.3, 0.4]),
    ]


def test_records_join_a_poisson_batch_each_by_itself():
    batches = [dp_sgd.poisson_batch(None, 0, 200, 0.3) for _ in range(500)]
    sizes = np.array([len(batch) for batch in batches])
    assert abs(sizes.mean() - 60) < 5 * np.sqrt(42 / 500)
    assert 30 < sizes.var() < 56  # 200 * 0.3 * 0.7 = 42; a fixed size has 0
    assert len({tuple(batch.tolist()) for batch in batches}) == 500
    assert len(dp_sgd.poisson_batch(None, 0, 200, 1.0)) == 200
    first, again, other = (dp_sgd.poisson_batch(4, n, 100, 0.5) for n in (2, 2, 3))
    assert first.equal(again)  # the seed of the noise repeats a step's batch
    assert not first.equal(other)


# ------------------------------------------------------------------ the GANs


def test_the_epsilons_of_dp_cgan_and_of_its_users_who_have_one_by_the_cap():
    """GS-WGAN's Table 1 says 10; DP-CGAN's code accounts sigma C = 2.31."""
    pytest.importorskip("autodp")
    settings, rate = DPSGDGanSettings(noise_per_clip=2.1), 600 / 60_000
    events = [dp_sgd.event(rate, settings.noise_per_clip) | {"count": 30_000}]
    rows = DPSGDGan.guarantees(settings, FACTS, events, DELTA)
    assert [(r.label, r.unit) for r in rows] == [
        ("valid", "record"),
        ("valid", "user"),
        ("as published", "record"),
        ("as published", "record"),
    ]
    expected = [3.77, 5076, 10.10, 3.62]
    assert [row.epsilon for row in rows] == pytest.approx(expected, rel=0.003)
    assert "autodp" in rows[2].theorem
    assert "sigma C" in rows[3].theorem
    uncapped = dataclasses.replace(FACTS, max_images_per_user=None)
    assert dp_sgd.add_or_remove(uncapped, events, DELTA) == rows[:1]
    assert dp_sgd.published(2.1, [], DELTA, "nothing released") == []


def test_without_noise_the_discriminator_learns_to_tell_fakes(tmp_path):
    settings = {"noise_per_clip": 0.0, "expected_batch": 50, "steps": 20}
    settings |= {"steps_per_generator_step": 100}
    trainer = small_trainer("dp-sgd-gan-strong", tmp_path, **settings)

    def gap():
        with torch.no_grad():
            real = trainer.discriminator(trainer.images, trainer.labels).mean()
            fakes, labels = trainer.fakes(stream(3, "test"), 50)
            return float(real - trainer.discriminator(fakes, labels).mean())

    before = gap()
    for index in range(20):
        trainer.step(index)
    assert gap() > before + 0.1
