"""Exact epsilon and delta: literal figures, independent oracles, limits, properties."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgs.privacy.gaussian import (
    binomial_law,
    delta_from_mu,
    epsilon_from_mu,
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
