"""DP-SGD and the GANs trained by it: sensitivity, sampling, published figures."""

import dataclasses

import numpy as np
import pytest
import torch

from baselines import small_run
from fedgs.baselines import dp_sgd
from fedgs.baselines.contract import Facts
from fedgs.baselines.dp_sgd_gan import (
    LayeredDiscriminator,
    Settings,
    StrongSettings,
    dp_sgd_gan,
    dp_sgd_gan_strong,
)
from fedgs.baselines.run import Asked
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.gan.models import Discriminator, build
from fedgs.mechanism.noise import NoiseStream

CONFIG = RunConfig(
    num_classes=3,
    image_size=16,
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


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_a_clipped_sum_is_that_of_a_plain_loop(network, clip):
    images, labels = records(7)
    found = dp_sgd.clipped_sum(network, losses_of(network, images, labels), 7, clip)
    torch.testing.assert_close(
        found, by_loop(images, labels, clip), rtol=1e-4, atol=1e-7
    )


def test_chunks_of_a_batch_add_up(network, monkeypatch):
    images, labels = records(7)
    losses = losses_of(network, images, labels)
    whole = dp_sgd.clipped_sum(network, losses, 7, 0.1)
    monkeypatch.setattr(dp_sgd, "SAMPLES_AT_ONCE", 3)
    torch.testing.assert_close(dp_sgd.clipped_sum(network, losses, 7, 0.1), whole)


def test_one_record_more_moves_the_sum_by_the_clip_bound_at_most(network):
    images, labels = records(7)
    images[-1] *= 1e4  # an outlier, whose gradient is large
    losses = losses_of(network, images, labels)
    more = dp_sgd.clipped_sum(network, losses, 7, 0.5).double()
    less = dp_sgd.clipped_sum(network, losses, 6, 0.5).double()
    assert 0.49 < float((more - less).norm()) <= 0.5


def test_an_empty_batch_has_no_gradient(network):
    images, labels = records(1)
    found = dp_sgd.clipped_sum(network, losses_of(network, images, labels), 0, 1.0)
    assert not found.any()


def test_a_gradient_that_is_not_finite_counts_as_none():
    grads = torch.tensor([[float("nan"), 1.0], [float("inf"), 0.0], [0.3, 0.4]])
    assert dp_sgd.clipped(grads, 1.0).tolist() == [
        [0, 0],
        [0, 0],
        pytest.approx([0.3, 0.4]),
    ]


def test_no_row_is_clipped_above_the_bound():
    rows = torch.randn(1000, 50, generator=torch.Generator().manual_seed(1)) * 100
    assert float(dp_sgd.clipped(rows, 0.7).double().norm(dim=1).max()) <= 0.7


def test_records_join_a_poisson_batch_each_by_itself():
    batches = [dp_sgd.poisson_batch(None, 0, 200, 0.3) for _ in range(500)]
    sizes = np.array([len(batch) for batch in batches])
    assert abs(sizes.mean() - 60) < 5 * np.sqrt(42 / 500)
    assert 30 < sizes.var() < 56  # 200 * 0.3 * 0.7 = 42; a fixed size has 0
    assert len({tuple(batch.tolist()) for batch in batches}) == 500
    assert len(dp_sgd.poisson_batch(None, 0, 200, 1.0)) == 200


def test_only_the_noises_seed_repeats_a_batch():
    first, again = (dp_sgd.poisson_batch(4, 2, 100, 0.5) for _ in range(2))
    assert first.equal(again)
    assert not first.equal(dp_sgd.poisson_batch(4, 3, 100, 0.5))


def test_noise_has_the_spread_that_was_asked_for():
    noisy = dp_sgd.noisy(torch.zeros(20_000), 3.0, NoiseStream(None, 0, 0))
    assert float(noisy.std()) == pytest.approx(3.0, rel=0.03)


def test_an_audit_plays_a_sampled_release_of_norm_one():
    event = dp_sgd.event(0.4, 0.1)
    outside, inside = dp_sgd.audit_scores(None, FACTS, event, "add-or-remove", 2000)
    assert abs(outside.mean()) < 0.02
    assert (inside > 0.5).mean() == pytest.approx(0.4, abs=0.06)
    assert inside[inside > 0.5].mean() == pytest.approx(1.0, abs=0.03)


# ------------------------------------------------------------------ the GANs


def test_the_watched_discriminator_is_the_projects():
    images, labels = records(5)
    watched = build(LayeredDiscriminator, CONFIG, 0)
    plain = build(Discriminator, CONFIG, 0)
    torch.testing.assert_close(watched(images, labels), plain(images, labels))


def lines(method, settings, times, facts=FACTS):
    rate = settings.expected_batch / facts.num_records
    events = [dp_sgd.event(rate, settings.noise_per_clip) | {"count": times}]
    return method.guarantees(settings, facts, events, DELTA)


def test_the_published_epsilons_of_dp_cgan_come_from_their_calls():
    pytest.importorskip("autodp")
    rows = lines(dp_sgd_gan, Settings(noise_per_clip=2.1), 30_000)
    found = {(row.label, row.unit, row.theorem): row.epsilon for row in rows}
    expected = {  # GS-WGAN, Table 1: 10; DP-CGAN's code with sigma C = 2.31
        ("valid", "record", "PLD of Poisson-sampled Gaussian releases"): 3.77,
        ("as published", "record", "autodp: GS-WGAN, Table 1"): 10.10,
        ("as published", "record", "RDP of Poisson batches with sigma C"): 3.62,
    }
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=0.01)


def test_a_user_of_111_images_is_another_matter_and_none_without_a_cap():
    settings = Settings(noise_per_clip=2.1)
    users = [row for row in lines(dp_sgd_gan, settings, 30_000) if row.unit == "user"]
    assert [round(row.epsilon or 0) for row in users] == [5076]
    uncapped = dataclasses.replace(FACTS, max_images_per_user=None)
    rows = lines(dp_sgd_gan, settings, 30_000, uncapped)
    assert {row.unit for row in rows} == {"record"}


def test_the_strong_recipe_is_the_one_of_later_work():
    settings, recipe = StrongSettings(), dp_sgd_gan_strong.recipe
    assert settings.steps_per_generator_step == 5
    assert (settings.expected_batch, settings.clip) == (4096, 1e-3)
    assert (settings.beta1, recipe["ema_decay"]) == (0, 0.999)
    assert recipe["discriminator_learning_rate"] == 5e-4
    assert recipe["generator_learning_rate"] == 2e-4


def test_one_image_moves_the_discriminators_gradient_by_the_clip_bound(tmp_path):
    moved = []
    for is_changed in (False, True):
        folder = tmp_path / str(is_changed)
        run, data = small_run("dp-sgd-gan", folder, noise_seed=5)
        settings = Settings(
            noise_per_clip=0.0, expected_batch=run.facts.num_records, clip=0.25
        )
        if is_changed:  # the first client loses an image
            owned = (data.client_records[0][1:], *data.client_records[1:])
            data = dataclasses.replace(data, client_records=owned)
            settings = dataclasses.replace(
                settings, expected_batch=run.facts.num_records - 1
            )
        trainer = dp_sgd_gan.trainer(settings, run.config, data, 3)
        images, labels = trainer.images, trainer.labels
        network = trainer.discriminator
        losses = losses_of(network, images, labels)
        moved.append(dp_sgd.clipped_sum(network, losses, len(labels), 0.25).double())
    assert 0 < float((moved[0] - moved[1]).norm()) <= 0.25 * (1 + 1e-4)


def test_without_noise_the_discriminator_learns_to_tell_fakes(tmp_path):
    run, data = small_run("dp-sgd-gan-strong", tmp_path / "run")
    settings = dataclasses.replace(
        run.settings, noise_per_clip=0.0, expected_batch=100, steps=30
    )
    settings = dataclasses.replace(settings, steps_per_generator_step=100)
    trainer = dp_sgd_gan_strong.trainer(settings, run.config, data, 3)

    def gap():
        with torch.no_grad():
            real = trainer.discriminator(trainer.images, trainer.labels).mean()
            fakes, labels = trainer._fakes(0, "test")
            return float(real - trainer.discriminator(fakes, labels).mean())

    before = gap()
    for index in range(30):
        trainer.step(index)
    assert gap() > before + 0.1


@pytest.mark.parametrize(
    ("asked", "given", "message"),
    [
        (
            {"unit": "user"},
            {},
            "unit = user: dp-sgd-gan guarantees epsilons of one rec",
        ),
        ({}, {"adversary": "server"}, "adversary = server: dp-sgd-gan: is central"),
    ],
)
def test_what_a_record_level_method_cannot_give_is_refused(
    tmp_path, asked, given, message
):
    with pytest.raises(UserError, match=message):
        small_run("dp-sgd-gan", tmp_path / "run", Asked(**asked), **given)
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data_is_refused():
    settings = Settings(expected_batch=70_000)
    with pytest.raises(
        UserError, match=r"expected_batch = 70000: give .* at most 60000"
    ):
        dp_sgd_gan.calibrated(settings, FACTS, 10.0, DELTA)


def test_a_training_without_noise_or_target_is_refused(tmp_path):
    run, data = small_run("dp-sgd-gan", tmp_path / "run")
    with pytest.raises(UserError, match=r"noise_per_clip is unset: give .*--target"):
        dp_sgd_gan.trainer(Settings(expected_batch=9), run.config, data, 0)
