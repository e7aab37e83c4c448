"""The Bayesian accountant against its formulas, and each repair by what it changes."""

import math
import warnings

import dp_accounting
import numpy as np
import pytest
from scipy.stats import t

from fedgs.baselines import bayesian_accounting as accounting

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


def test_eight_gradients_make_too_wide_an_estimate():
    quantiles = [t.ppf(1 - accounting.FAILURE, n - 1) for n in (28, 8)]
    assert quantiles == pytest.approx([17.7, 382], rel=2e-3)
    assert accounting.LEAST_RECORDS == 28
    with pytest.raises(ValueError, match="three records"):
        accounting.step_cost(np.zeros((5, 2)), 10)


def test_every_order_and_step_may_fail():
    """At f = delta nothing is left; the reference counts calls, and its delta none."""
    costs = np.full(5, 0.1)
    failure = DELTA / (5 * 1000)
    assert accounting.bayesian_epsilon(costs, 1001, DELTA, failure) == math.inf
    assert accounting.bayesian_epsilon(costs, 999, DELTA, failure) < math.inf
    one_call = accounting.published_epsilon(costs, 1, DELTA, failure)
    assert one_call < accounting.bayesian_epsilon(costs, 999, DELTA, failure)
    delta = accounting.bayesian_delta(costs, 1000, 1.0, failure)
    published = accounting.published_delta(costs, 1.0)
    assert delta == pytest.approx(published + DELTA)


def test_epsilon_and_delta_are_inverse():
    costs = 100 * costs_of(norms() / 20)
    epsilon = accounting.bayesian_epsilon(costs, 100, DELTA)
    assert 0 < epsilon < 20
    assert accounting.bayesian_delta(costs, 100, epsilon) == pytest.approx(DELTA)
    published = accounting.published_epsilon(costs, 100, DELTA)
    assert accounting.published_delta(costs, published) < DELTA


def test_one_outlier_in_the_sample_costs_as_much_as_if_all_were():
    """Hoelder's power makes the largest of the sampled distances decide."""
    typical = np.full(32, 0.05)
    with_one = typical.copy()
    with_one[0] = 1.0
    alone = costs_of(np.full(32, 1.0), steps=STEPS)
    found = costs_of(with_one, steps=STEPS)
    assert found == pytest.approx(alone, rel=0.05)
    assert (found > 100 * costs_of(typical, steps=STEPS)).all()
