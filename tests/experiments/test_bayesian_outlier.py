"""The experiment in which an outlier exceeds a Bayesian epsilon."""

import numpy as np
import pytest

from experiments.paper import bayesian_outlier as outlier
from fedgs.app.flags import run_command


@pytest.fixture(autouse=True)
def _few_trials(monkeypatch):
    monkeypatch.setattr(outlier, "TRIALS", 600)


def test_an_attack_on_an_outlier_attains_more_than_the_bayesian_epsilon():
    result = outlier.measure()
    assert result.bayesian < 1
    assert result.attained > 4 * result.bayesian
    assert result.attained < result.classical
    # mu = sqrt(10) at delta 1e-5
    assert result.classical == pytest.approx(17.857, abs=1e-3)


def test_the_same_attack_finds_no_digit():
    digits = outlier.vectors("digits", outlier.RECORDS + 1)
    found = outlier.attained(digits[1:], digits[0], outlier.public_start())
    assert found < 0.3


def test_a_critic_releases_clipped_gradients_of_its_own_loss():
    images = outlier.with_constant(np.random.default_rng(0).random((5, 256)))
    start = np.random.default_rng(1).normal(0, 0.01, 257)
    critic = outlier.Critic(images, start, 1)
    released = critic.step(np.zeros((1, 257)))[0]
    expected = np.zeros(257)
    for image in images:
        gradient = image / (1 + np.exp(image @ start))  # -d log(1 + e^-wx) / d w
        expected += gradient / max(1.0, np.linalg.norm(gradient))
    assert released == pytest.approx(expected, rel=1e-9)
    norms = outlier.gradient_norms(start, images)
    assert norms == pytest.approx(np.ones(5))


def test_the_command_prints_its_result(monkeypatch, capsys):
    fixed = outlier.Result(0.5, 17.0, 5.0)
    monkeypatch.setattr(outlier, "measure", lambda: fixed)
    assert run_command(outlier.command, []) == 0
    assert "a white image" in capsys.readouterr().out
