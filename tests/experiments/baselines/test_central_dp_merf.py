"""DP-MERF: what a record moves, what that costs, the fit."""

import dataclasses

import numpy as np
import pytest
import torch

from baselines import small_run, small_trainer
from experiments.baselines import dp_sgd
from experiments.baselines.baseline import Facts
from experiments.baselines.central_dp_merf import (
    AutoencoderDPMerf,
    AutoencoderDPMerfSettings,
    CentralDPMerf,
    CentralDPMerfSettings,
)
from experiments.baselines.one_release import distinct_events
from fedgs.privacy.gaussian import epsilon_from_mu

FACTS = Facts(540, 60_000, 111, 10, (1, 28, 28))
DELTA = 1e-5


def test_an_audit_attacks_autoencoder_and_embeddings(monkeypatch):
    events = [
        dp_sgd.event(0.01, noise, what=what)
        for what, noise in (("autoencoder", 0.5), ("mean embedding", 0.6)) * 2
    ]
    assert distinct_events(events) == events[:2]


@pytest.mark.parametrize(
    ("records", "least", "most"),
    [
        (1, 0.5, 2),
        (None, 10, 1e9),  # a user of a record-level method moves far more
    ],
)
def test_a_replaced_record_moves_the_released_sum_by_two_at_most(
    tmp_path, records, least, most
):
    run, data = small_run("dp-merf", tmp_path / "run")
    settings = dataclasses.replace(run.settings, noise_multiplier=0.0)
    images = data.images.copy()
    images[data.client_records[0][:records]] = 255
    sums = []
    for each in (data, dataclasses.replace(data, images=images)):
        trainer = CentralDPMerf(settings, run.config, each)
        trainer.step(0)
        sums.append(trainer.embedding.target.double() * run.facts.num_records)
    assert least < float((sums[0] - sums[1]).norm()) <= most


# ------------------------------------------------------------------ accounting


def test_an_unsampled_release_costs_by_what_a_unit_moves():
    """The paper: sigma 5 is "epsilon < 1", 25 is "< 0.2"; exactly .726 and .125."""
    moved = {"record": 1, "user": 111}  # by the cap
    for sigma, of_one in ((5.0, 0.726), (25.0, 0.125)):
        settings = CentralDPMerfSettings(noise_multiplier=sigma)
        event = dp_sgd.event(1.0, settings.noise_std)
        rows = CentralDPMerf.guarantees(settings, FACTS, [event], DELTA)
        valid = [row for row in rows if row.label == "valid"]
        assert (valid[0].unit, valid[0].relation) == ("record", "replace-one")
        found = {(row.unit, row.relation): row.epsilon for row in valid}
        assert len(found) == 2 * len(moved)
        for unit, times in moved.items():
            for relation, size in (("zero-out", times), ("replace-one", 2 * times)):
                expected = epsilon_from_mu(size / (2 * sigma), DELTA)
                assert found[unit, relation] == pytest.approx(expected)
        assert found["record", "replace-one"] == pytest.approx(of_one, abs=2e-3)


@pytest.mark.parametrize(
    ("method", "settings", "published", "valid"),
    [
        # Noise 2 sigma, and one image more or less moves the sum by 1, not 2.
        (
            CentralDPMerf,
            CentralDPMerfSettings(
                noise_multiplier=0.588, release="batches", generator_steps=600
            ),
            10.017,
            0.854,
        ),
        pytest.param(
            AutoencoderDPMerf,
            AutoencoderDPMerfSettings(noise_multiplier=0.686),
            9.999,
            4.536,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_rows_of_gs_wgans_table_come_from_its_call(
    method, settings, published, valid
):
    pytest.importorskip("autodp")
    released = [(settings.noise_std, settings.generator_steps)]
    if method is AutoencoderDPMerf:
        released += [(settings.encoder_noise, settings.autoencoder_steps)]
    events = [dp_sgd.event(1 / 120, noise) | {"count": n} for noise, n in released]
    facts = dataclasses.replace(FACTS, max_images_per_user=None)
    rows = method.guarantees(settings, facts, events, DELTA)
    found = {(row.label, row.relation): row.epsilon for row in rows}
    assert found["as published", "replace-one"] == pytest.approx(published, abs=1e-3)
    assert found["valid", "add-or-remove"] == pytest.approx(valid, abs=5e-3)


@pytest.mark.usefixtures("coarse_poisson")
def test_the_autoencoder_gets_its_share_of_the_budget():
    settings = AutoencoderDPMerfSettings(autoencoder_steps=10, generator_steps=10)
    found = AutoencoderDPMerf.calibrated(settings, FACTS, 4.0, DELTA)
    facts = dataclasses.replace(FACTS, max_images_per_user=None)
    first = dp_sgd.event(1 / 120, found.encoder_noise) | {"count": 10}
    second = dp_sgd.event(1 / 120, found.noise_std) | {"count": 10}
    for events, spent in (([first], 2.0), ([first, second], 4.0)):
        (row,) = AutoencoderDPMerf.guarantees(found, facts, events, DELTA)
        assert row.epsilon == pytest.approx(spent, rel=0.02)


# ------------------------------------------------------------------ training


def test_one_release_is_made_and_then_the_generator_nears_it(tmp_path):
    settings = {"noise_multiplier": 0.0, "generator_steps": 100, "num_features": 400}
    trainer = small_trainer("dp-merf", tmp_path, **settings)
    assert trainer.step(0) is not None

    def loss():
        labels = torch.arange(200) % 10
        rng = np.random.default_rng(0)
        z = torch.from_numpy(rng.standard_normal((200, 5), dtype=np.float32))
        with torch.no_grad():
            fakes = trainer.embedding.sum(trainer.net(z, labels).flatten(1), labels)
        return float((trainer.embedding.target - fakes / 200).square().sum())

    before = loss()
    assert [trainer.step(index) for index in range(1, trainer.num_steps)] == [None] * 10
    assert loss() < 0.7 * before


@pytest.mark.slow
def test_the_autoencoder_learns_without_noise_and_gives_its_decoder(tmp_path):
    settings = {"noise_multiplier": 0.0, "sampling_rate": 0.3, "autoencoder_steps": 20}
    settings |= {"autoencoder_learning_rate": 0.01}
    trainer = small_trainer("dp-merf-ae", tmp_path, **settings)

    def loss():
        pixels = trainer.images.flatten(1)
        with torch.no_grad():
            made = torch.sigmoid(trainer.autoencoder(pixels))
        return float((made - pixels).square().mean())

    before = loss()
    for index in range(20):
        event = trainer.step(index)
        assert event is not None
        assert event["what"] == "autoencoder"
    assert loss() < 0.8 * before
    own = trainer.autoencoder.decoder.state_dict()
    for name, value in trainer.net.decoder.state_dict().items():
        assert torch.equal(value, own[name])
    assert trainer.step(20)["what"] == "mean embedding"
