"""Exact epsilon and delta: literal figures, independent oracles, limits, properties."""

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgs.privacy.gaussian import (
    binomial_law,
    delta_from_mu,
    epsilon_from_mu,
    fixed_law,
    mu_from_epsilon,
)
from refusals import assert_refused

Z = 1.07 / math.sqrt(32)  # one release of the paper's federated run, replace-one


# ----------------------------------------------------------- figures of docs/privacy.md


@pytest.mark.parametrize(
    ("epsilon", "delta", "mu"),
    [  # privacy.md, "Targets in mu"; then section 2: the prototype, zero-out
        (10, 1e-5, 2.0004),
        (10, 1 / 866, 2.4827),
        (10, 1 / 539, 2.5521),
        (3, 1e-5, 0.7191),
        (1, 1e-5, 0.2681),
        (4.3772, 1e-5, 1.0),
        (13.556, 1e-5, 2.552095),
        # Table 2 with the average participation: [578.03] zero-out.
        (578.03, 1.15e-3, math.sqrt(30_000 / 866) / Z),
        # Phi(-eps/mu + mu/2) = delta to first order: eps = mu^2/2 + mu * 4.2649.
        (504_265, 1e-5, 1000.0),
    ],
)
def test_epsilon_and_mu_are_those_of_the_page(epsilon, delta, mu):
    assert mu_from_epsilon(epsilon, delta) == pytest.approx(mu, rel=3e-4)
    assert epsilon_from_mu(mu, delta) == pytest.approx(epsilon, rel=3e-4)


# --------------------------------------------------------------------- tiny and huge mu


def exact_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """Eq. 2 in 60 digits."""
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        upper = mpmath.ncdf(mu / 2 - epsilon / mu)
        return upper - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


# How far epsilon lies from the middle of the privacy loss, in standard deviations.
PLACES = (-40.0, -5.0, -1.0, -1e-3, 0.0, 1e-3, 0.3, 1.0, 3.0, 8.0, 20.0, 37.0)


@pytest.mark.parametrize("power", [n / 4 for n in range(-48, 9)])
def test_delta_is_an_upper_bound_and_next_to_the_exact_one(power):
    mu = 10.0**power
    for place in PLACES:
        epsilon = max(0.0, mu * (mu / 2 + place))
        exact = exact_delta(mu, epsilon)
        found = fixed_law(1.0, 1 / mu).delta(epsilon)
        assert exact <= found <= exact * (1 + 4e-11 + 4e-14 * mu)
        below = fixed_law(1.0, 1 / mu).delta(-epsilon)
        assert below >= exact_delta(mu, -epsilon)
        assert below == pytest.approx(float(exact_delta(mu, -epsilon)), rel=1e-9)


@pytest.mark.parametrize("mu", [1e-12, 1e-9, 1e-6, 1e-4, 1e-2])
def test_epsilon_of_a_tiny_mu_is_an_upper_bound(mu):
    for delta in (mu / 1e2, mu / 1e6, mu * 1e-12):
        epsilon = epsilon_from_mu(mu, delta)
        assert 0 < epsilon < 10 * mu
        assert exact_delta(mu, epsilon) <= delta
        assert exact_delta(mu, epsilon * 0.98) > delta
        within = mu_from_epsilon(epsilon, delta)
        assert exact_delta(within, epsilon) <= delta
        assert within == pytest.approx(mu, rel=0.02)


# ------------------------------------------------------------------------- mixture


@pytest.mark.parametrize(
    ("rounds", "rate"),
    [(30_000, 1 / 866), (1, 0.1), (7, 1.0), (7, 0.0), (10**6, 0.5), (2000, 0.999)],
)
def test_truncation_keeps_the_law_but_not_its_tails(rounds, rate):
    law = binomial_law({1: rounds}, rate)
    assert 0 <= law.tail < 2e-18
    assert law.weights.sum() == pytest.approx(1.0, abs=1e-9)
    assert law.weights @ law.counts == pytest.approx(rounds * rate, rel=1e-9)
    spread = math.sqrt(rounds * rate * (1 - rate))
    assert len(law.counts) < 30 * spread + 30  # fast: not all of 0..T


# ------------------------------------------------------------------------------- limits


def test_limits_of_mu():
    assert epsilon_from_mu(0.0, 1e-5) == 0.0
    assert epsilon_from_mu(math.inf, 1e-5) == math.inf
    assert (delta_from_mu(0.0, 1.0), delta_from_mu(math.inf, 1.0)) == (0.0, 1.0)
    assert epsilon_from_mu(1e-9, 1e-5) == 0.0
    assert delta_from_mu(1e-310, 1.0) == 0.0  # no overflow warning
    # However rare the client: delta = 1e-5 > 1 / K.
    assert binomial_law({1: 1}, 1e-6, 0.0).epsilon(1e-5) == math.inf
    whole = binomial_law({1: 50}, 1.0, 9.0).epsilon(1e-5)
    assert whole == pytest.approx(epsilon_from_mu(math.sqrt(50) / 9.0, 1e-5))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (delta_from_mu, (-1.0, 1.0)),
        (delta_from_mu, (math.nan, 1.0)),
        (delta_from_mu, (1.0, -1.0)),
        (delta_from_mu, (1.0, math.inf)),
        (epsilon_from_mu, (1.0, 0.0)),
        (epsilon_from_mu, (1.0, 1.0)),
        (mu_from_epsilon, (math.inf, 1e-5)),
    ],
)
def test_impossible_arguments_are_user_errors(function, arguments):
    assert_refused("= ", function, *arguments)


# --------------------------------------------------------------------------- properties

MUS = st.floats(0.01, 50.0)
DELTAS = st.floats(1e-9, 0.5)


@settings(max_examples=60)
@given(mu=MUS, delta=DELTAS)
def test_epsilon_and_delta_are_inverse(mu, delta):
    found = epsilon_from_mu(mu, delta)
    assert delta_from_mu(mu, found) <= delta
    if found > 0:
        assert delta_from_mu(mu, found) == pytest.approx(delta, rel=1e-6)
