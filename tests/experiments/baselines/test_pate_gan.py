"""PATE-GAN: noise as its accountant says, one vote a client, a student that learns."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from baselines import small_run, small_trainer
from experiments.baselines import pate_accounting as accounting
from experiments.baselines.baseline import Facts
from experiments.baselines.pate_gan import PateGan, PateGanSettings, label, laplace
from fedgs.randomness import stream

FACTS = Facts(10, 60_000, None, 10, (1, 28, 28))
DELTA = 1e-5


def events(settings, count=1):
    queries = settings.student_steps * settings.batch_size
    event = {"num_queries": queries, "noise_scale": 1 / settings.inverse_noise}
    return [event] * count


def fakes(training, count=64):
    return training.fakes(stream(3, "judged"), count)


# The mechanism


def test_noise_is_laplace_of_scale_one():
    noise = laplace(np.random.default_rng(0).standard_normal((2, 4, 10_000))).ravel()
    assert stats.kstest(noise, stats.laplace().cdf).pvalue > 0.01
    # Variance 2, kurtosis 6: 5 standard deviations are 5 sqrt((6 - 1) 4 / 2e4) = 0.16.
    assert abs(noise.var() - 2) < 0.16


def test_both_counts_get_noise_of_scale_one_over_lambda():
    zeros, ones = np.full(20_000, 40), np.full(20_000, 43)
    normal = np.random.default_rng(1).standard_normal((2, 4, 20_000))
    found = 1 - label(zeros, ones, laplace(normal), scale=4.0).mean()
    # q = (2 + lambda gap) / (4 e^(lambda gap)), lambda = 1/4, gap = 3; 5 deviations
    q = (2 + 0.75) / (4 * np.exp(0.75))
    assert abs(found - q) < 5 * np.sqrt(q * (1 - q) / 20_000)


def test_without_noise_a_majority_decides_and_a_tie_is_not_real():
    counts = np.array([[6, 5, 4], [4, 5, 6]])
    assert label(*counts, np.ones((2, 3)), 0.0).tolist() == [False, False, True]


def test_a_client_changes_one_vote_whatever_its_data_are(tmp_path):
    run, data = small_run("pate-gan", tmp_path / "data")
    images = data.images.copy()
    images[data.client_records[5]] = 255 - images[data.client_records[5]]
    other = dataclasses.replace(data, images=images)
    ones = []
    for each in (data, other):
        training = PateGan(run.settings, run.config, each)
        shown, labels = fakes(training)
        for index in range(30):
            training.teach(shown, labels, index)
        inverted = 1 - torch.from_numpy(data.images[:64]).float() / 255
        ones.append(training._votes(inverted, labels))
    moved = np.abs(ones[0] - ones[1])
    assert moved.max() == 1


def test_teachers_learn_each_on_its_own_part(tmp_path):
    training = small_trainer("pate-gan", tmp_path)
    shown, labels = fakes(training)
    real = torch.from_numpy(training.data.images[:64]).float() / 255
    for index in range(30):
        training.teach(shown, labels, index)
    assert training._votes(shown, labels).mean() < 1.5
    assert training._votes(real, labels).mean() > 10.5


def test_the_student_learns_from_labels_alone_and_the_generator_from_it(tmp_path):
    training = small_trainer("pate-gan", tmp_path, inverse_noise=1e9, batch_size=64)
    before = training.student(*fakes(training)).mean()
    for index in range(4):
        training.step(index)
    after = training.student(*fakes(training)).mean()
    assert after < before  # every fake was labelled as one
    old = copy.deepcopy(training.generator.state_dict())
    training.step(4)
    new = training.generator.state_dict()
    assert any(not torch.equal(old[name], new[name]) for name in old)


# What it costs


def test_valid_epsilon_is_of_bits_of_two_lambda():
    settings = PateGanSettings(inverse_noise=0.01)
    rows = PateGan.guarantees(settings, FACTS, events(settings, 10), DELTA)
    users, left_out = rows[0], rows[1]
    assert users.epsilon == accounting.pure_epsilon(0.02, 640, DELTA)
    assert left_out.relation == "zero-out"
    assert left_out.epsilon == accounting.pure_epsilon(0.01, 640, DELTA)


def test_published_settings_cost_far_more_than_the_published_epsilon():
    """Lambda 1, 64 fakes, all teachers agree: its code would stop after this step."""
    settings = PateGanSettings()
    gaps = np.full(64, 10)
    event = events(settings)[0] | {
        "moments_of_code": accounting.laplace_moments(gaps, 1.0, False).tolist(),
        "moments_of_votes": accounting.laplace_moments(gaps, 1.0, True).tolist(),
    }
    rows = PateGan.guarantees(settings, FACTS, [event], DELTA)
    published = [row for row in rows if row.label == "as published"]
    assert len(published) == 2
    assert all("itself private" in row.theorem for row in published)
    assert published[0].epsilon == pytest.approx(5.0288, abs=1e-4)
    assert rows[0].epsilon > 90  # at most 128
    assert "ledger is published" in rows[0].conditions[-1]


def test_every_label_is_in_the_ledger(tmp_path):
    training = small_trainer("pate-gan", tmp_path, student_steps=3, reveal_votes=True)
    event = training.step(0)
    assert event["num_queries"] == 3 * training.settings.batch_size
    assert len(event["moments_of_code"]) == 20
    hidden = dataclasses.replace(training.settings, reveal_votes=False)
    training.settings = hidden
    assert set(training.step(1)) == {"kind", "num_queries", "noise_scale"}
