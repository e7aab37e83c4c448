"""From counted errors to bounds: against scipy, known mechanisms, many repeats."""

import math

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import binom, binomtest

from fedgs.audit.bounds import (
    ErrorRates,
    best_threshold,
    epsilon_at_least,
    error_rates,
    mu_at_least,
    mu_of_means,
    one_run_epsilon,
    one_run_p_value,
    rate_at_most,
)
from fedgs.privacy.gaussian import delta_from_mu

ALPHA = 0.05


@pytest.mark.parametrize(("count", "trials"), [(0, 50), (3, 50), (49, 50), (50, 50)])
def test_clopper_pearson_equals_scipy(count, trials):
    exact = binomtest(count, trials, alternative="less")
    expected = exact.proportion_ci(1 - ALPHA, method="exact").high
    assert rate_at_most(count, trials, ALPHA) == pytest.approx(expected, rel=1e-9)


def test_randomized_response_has_its_epsilon():
    error = 1 / (1 + math.exp(2.0))
    assert epsilon_at_least(ErrorRates(error, error), 0.0) == pytest.approx(2.0)


def test_gaussian_test_has_its_mu_at_every_threshold():
    for threshold in (-1.0, 0.3, 2.0):
        rates = ErrorRates(float(ndtr(-threshold)), float(ndtr(threshold - 1.5)))
        assert mu_at_least(rates) == pytest.approx(1.5)
        epsilon = epsilon_at_least(rates, 1e-2)  # never above the curve
        assert epsilon == 0 or delta_from_mu(1.5, epsilon) >= 0.99999e-2
    useless = ErrorRates(1.0, 1.0)
    assert (mu_at_least(useless), epsilon_at_least(useless, 1e-5)) == (0, 0)


def test_both_roles_of_the_two_worlds_count():
    rates = ErrorRates(0.5, 0.01)  # says "inside" too often, but "outside" surely
    assert epsilon_at_least(rates, 0.0) == pytest.approx(math.log(0.5 / 0.01))
    assert epsilon_at_least(ErrorRates(0.01, 0.5), 0.0) == epsilon_at_least(rates, 0.0)


def test_bounds_are_wrong_no_more_often_than_stated():
    rng, wrong, found = np.random.default_rng(0), 0, []
    for _ in range(400):
        outside, inside = rng.standard_normal(2000), rng.standard_normal(2000) + 1
        mu = mu_at_least(error_rates(outside, inside, 0.5, ALPHA))
        wrong += mu > 1
        found.append(mu)
    assert binom.sf(wrong - 1, 400, ALPHA) > 1e-3
    assert np.mean(found) > 0.85  # and not vacuous


@pytest.mark.parametrize("count", [1, 8])
def test_means_of_few_scores_bound_mu_as_often_as_stated(count):
    rng, std = np.random.default_rng(0), 3.0
    outside = rng.normal(0, std, (4000, count))
    inside = rng.normal(2 * std, std, (4000, count))
    each = zip(outside, inside, strict=True)
    found = np.array([mu_of_means(*scores, std, ALPHA) for scores in each])
    wrong = int((found > 2).sum())
    assert 1e-3 < binom.cdf(wrong, 4000, ALPHA) < 1 - 1e-3
    assert found.min() >= 0
    assert mu_of_means(outside[0], outside[0] + 100 * std, std, ALPHA) > 90


def test_threshold_lies_where_the_bound_is_best():
    rng = np.random.default_rng(0)
    outside, inside = rng.standard_normal(20_000), rng.standard_normal(20_000) + 2
    threshold = best_threshold(outside, inside, mu_at_least, ALPHA)
    best = mu_at_least(error_rates(outside, inside, threshold, ALPHA))
    for other in np.linspace(-1, 3, 30):
        assert best > mu_at_least(error_rates(outside, inside, other, ALPHA)) - 0.02


# ------------------------------------------------------------------ one run


def test_delta_term_equals_the_theorem_written_out():
    m, r, v, epsilon, delta = 200, 60, 55, 2.0, 1e-4
    chance = 1 / (1 + math.exp(-epsilon))
    pmf = [math.comb(r, k) * chance**k * (1 - chance) ** (r - k) for k in range(r + 1)]
    beta = sum(pmf[v:])
    alpha = max(sum(pmf[max(v - i, 0) : v]) * 2 / i for i in range(1, m + 1))
    expected = beta + m * delta * alpha
    assert one_run_p_value(m, r, v, epsilon, delta) == pytest.approx(expected)
    assert one_run_p_value(m, r, v, epsilon, 0.0) == pytest.approx(beta)
    assert one_run_epsilon(100, 100, 55, 1e-5, ALPHA) == 0


@pytest.mark.parametrize(("epsilon", "guesses"), [(1.0, 200), (3.0, 200), (3.0, 50)])
def test_randomized_response_is_bounded_and_not_vacuously(epsilon, guesses):
    rng, chance = np.random.default_rng(0), 1 / (1 + math.exp(-epsilon))
    drawn = rng.binomial(guesses, chance, size=300)
    correct, repeats = np.unique(drawn, return_counts=True)
    bounds = [one_run_epsilon(200, guesses, int(v), 1e-5, ALPHA) for v in correct]
    found = np.repeat(bounds, repeats)
    assert binom.sf((found > epsilon).sum() - 1, 300, ALPHA) > 1e-3
    assert found.mean() > 0.45 * epsilon
