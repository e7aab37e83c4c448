"""Exact epsilon and delta: literal figures, independent oracles, limits, properties."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from fedgs.errors import UserError
from fedgs.privacy.gaussian import (
    binomial_delta,
    binomial_epsilon,
    binomial_law,
    delta_from_mu,
    epsilon_from_mu,
    mu_from_epsilon,
)

Z = 1.07 / math.sqrt(32)  # one release of the paper's federated run, replace-one


# ----------------------------------------------------------- figures of docs/privacy.md


@pytest.mark.parametrize(
    ("target", "delta", "mu"),
    [  # privacy.md, "Targets in mu"
        (10, 1e-5, 2.0004),
        (10, 1 / 866, 2.4827),
        (10, 1 / 539, 2.5521),
        (3, 1e-5, 0.7191),
        (1, 1e-5, 0.2681),
        (4.3772, 1e-5, 1.0),
    ],
)
def test_mu_of_an_epsilon(target, delta, mu):
    assert mu_from_epsilon(target, delta) == pytest.approx(mu, abs=6e-5)


@pytest.mark.parametrize(
    ("mu", "expected"),
    [  # privacy.md section 2: the prototype, zero-out then replace-one, delta 1e-5
        (2.552095, 13.56),
        (2 * 2.552095, 34.07),
        (0.5, 1.99),
        (1.0, 4.38),
    ],
)
def test_epsilon_of_a_mu(mu, expected):
    assert epsilon_from_mu(mu, 1e-5) == pytest.approx(expected, abs=0.006)


def test_table_2_with_the_average_participation_exactly():
    # privacy.md: [578.03] and [167.55] zero-out; no bounds, so no statement has them.
    mu = math.sqrt(30_000 / 866) / Z
    assert epsilon_from_mu(mu, 1.15e-3) == pytest.approx(578.03, abs=0.006)
    assert epsilon_from_mu(mu / 2, 1.15e-3) == pytest.approx(167.55, abs=0.006)


# ------------------------------------------------------------------------------ oracles


def test_the_mixture_is_the_sum_over_participation_counts():
    total, rate, ratio = 40, 0.3, 1.7
    expected = sum(
        binom.pmf(n, total, rate) * delta_from_mu(math.sqrt(n) / ratio, 2.0)
        for n in range(total + 1)
    )
    assert binomial_delta(total, rate, ratio, 2.0) == pytest.approx(expected, rel=1e-9)
    found = binomial_epsilon(total, rate, ratio, expected)
    assert found == pytest.approx(2.0, abs=1e-8)


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


def test_large_epsilons_are_stable():
    # Phi(-eps/mu + mu/2) = delta to first order: eps = mu^2/2 + mu * 4.2649 (1e-5).
    assert epsilon_from_mu(1000.0, 1e-5) == pytest.approx(504_264, rel=1e-4)


def test_certain_selection_is_no_selection():
    assert binomial_epsilon(50, 1.0, 9.0, 1e-5) == pytest.approx(
        epsilon_from_mu(math.sqrt(50) / 9.0, 1e-5)
    )


def test_without_noise_epsilon_is_unbounded_however_rare_the_client():
    assert binomial_epsilon(1, 1e-6, 0.0, 1e-5) == math.inf  # delta = 1e-5 > 1/K


@pytest.mark.parametrize(
    "call",
    [
        lambda: delta_from_mu(-1.0, 1.0),
        lambda: delta_from_mu(math.nan, 1.0),
        lambda: delta_from_mu(1.0, -1.0),
        lambda: delta_from_mu(1.0, math.inf),
        lambda: epsilon_from_mu(1.0, 0.0),
        lambda: epsilon_from_mu(1.0, 1.0),
        lambda: mu_from_epsilon(math.inf, 1e-5),
        lambda: binomial_epsilon(10, 1.5, 1.0, 1e-5),
    ],
)
def test_impossible_arguments_are_user_errors(call):
    with pytest.raises(UserError):
        call()


# --------------------------------------------------------------------------- properties

MUS = st.floats(0.01, 50.0)
DELTAS = st.floats(1e-9, 0.5)


@settings(max_examples=60, deadline=None)
@given(mu=MUS, delta=DELTAS)
def test_epsilon_and_delta_are_inverse(mu, delta):
    found = epsilon_from_mu(mu, delta)
    assert delta_from_mu(mu, found) <= delta
    if found > 0:
        assert delta_from_mu(mu, found) == pytest.approx(delta, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(mu=MUS, factor=st.floats(1.01, 5.0), delta=DELTAS)
def test_epsilon_grows_with_mu_and_falls_with_delta(mu, factor, delta):
    assert epsilon_from_mu(mu * factor, delta) >= epsilon_from_mu(mu, delta)
    assert epsilon_from_mu(mu, delta / factor) >= epsilon_from_mu(mu, delta)


@settings(max_examples=40, deadline=None)
@given(
    rounds=st.integers(1, 2000),
    rate=st.floats(0.001, 1.0),
    ratio=st.floats(0.2, 20.0),
    delta=st.floats(1e-8, 0.1),
)
def test_the_mixture_grows_with_rounds_and_lies_below_full_participation(
    rounds, rate, ratio, delta
):
    found = binomial_epsilon(rounds, rate, ratio, delta)
    slack = 1e-9 * (1 + found)
    assert found <= binomial_epsilon(rounds + 1, rate, ratio, delta) + slack
    assert found <= binomial_epsilon(rounds, rate, ratio * 0.9, delta) + slack
    assert found <= epsilon_from_mu(math.sqrt(rounds) / ratio, delta) + slack
