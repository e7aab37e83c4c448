"""The Bayesian accountant against its formulas, and each repair by what it changes."""

import math
import warnings

import dp_accounting
import numpy as np
import pytest
from scipy.stats import t

from experiments.baselines import bayesian_accounting as accounting

DELTA = 1e-10
RATE = 1024 / 60_000
STEPS = 23_437  # 400 epochs of 60,000 in batches of 1024


def norms(seed=0, count=32):
    return np.random.default_rng(seed).uniform(0.2, 0.6, count)


def costs_of(distances, rate=RATE, steps=100):
    moments = accounting.log_moments(distances, rate)
    return accounting.step_cost(moments, steps)


def test_a_moment_is_that_of_the_sampled_gaussian():
    """Of dp-accounting's RDP at order l + 1: c = l times it."""
    found = accounting.log_moments(np.array([0.5]), 0.01)[:, 0]
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(2))
    accountant = dp_accounting.rdp.RdpAccountant(orders=accounting.ORDERS + 1)
    rdp = accountant.compose(event)._rdp
    assert found == pytest.approx(accounting.ORDERS * rdp, rel=1e-9)


def test_a_step_costs_mean_and_quantile_times_deviation():
    moments = accounting.log_moments(norms() / 20, RATE)
    values = np.exp(20 * moments)
    bound = values.mean(1) + t.isf(1e-16, 31) * values.std(1) / math.sqrt(31)
    expected = np.log(bound) / 20
    assert accounting.step_cost(moments, 20) == pytest.approx(expected, rel=1e-9)


def test_large_exponents_do_not_overflow():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moments = accounting.log_moments(np.linspace(1, 50, 32), 1.0)
        found = accounting.step_cost(moments, 10_000)
    assert np.isfinite(found).all()
    assert (found >= moments.mean(axis=1)).all()
    assert found == pytest.approx(moments.max(axis=1), rel=1e-3)


def test_every_order_and_step_may_fail(monkeypatch):
    """At f = delta nothing is left; the reference counts calls, not its orders."""
    costs = np.full(5, 0.1)
    monkeypatch.setattr(accounting, "FAILURE", DELTA / (5 * 1000))
    assert accounting.bayesian_epsilon(costs, 1001, DELTA) == math.inf
    spent = accounting.bayesian_epsilon(costs, 999, DELTA)
    assert accounting.published_epsilon(costs, 1, DELTA) < spent < math.inf


def test_without_failures_both_epsilons_are_that_of_the_costs():
    costs = 100 * costs_of(norms() / 20)
    expected = ((costs - math.log(DELTA)) / accounting.ORDERS).min()
    for found in (accounting.bayesian_epsilon, accounting.published_epsilon):
        assert found(costs, 100, DELTA) == pytest.approx(expected, rel=1e-4)
