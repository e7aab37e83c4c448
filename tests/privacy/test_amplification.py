"""Amplification by sampling: literal values, quadrature, order of the bounds."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedgs.privacy.amplification import (
    LEAST_RATIO,
    MOST_KINDS,
    AttainedBound,
    RenyiBound,
    Sampled,
    SampledBound,
    hockey_stick,
    naive_epsilon,
)
from fedgs.privacy.gaussian import binomial_epsilon, delta_from_mu
from refusals import assert_refused

# The paper's central run: one draw per round, and a draw for every fake.
SHARED = Sampled(1000, 1, 1.07 / math.sqrt(32), 20_000)
OWN = Sampled(1000, 1, 1.07, 640_000)
kinds = st.builds(
    Sampled, st.just(20), st.integers(1, 19), st.floats(0.3, 8.0), st.integers(1, 300)
)


# ------------------------------------------------------------ values of docs/privacy.md


@pytest.mark.parametrize(
    ("kind", "dominating", "naive", "renyi"),
    [(SHARED, 346.66, 329.4, 296563.65), (OWN, 5.51, 4.117, 9.243)],
)
def test_published_values(kind, dominating, naive, renyi):
    bound = SampledBound((kind,))
    assert round(bound.epsilon(1e-5), 2) == dominating
    assert naive_epsilon((kind,), 1e-5) == pytest.approx(naive, rel=2e-4)
    assert RenyiBound((kind,)).epsilon(1e-5) == pytest.approx(renyi, rel=1e-4)


def test_attained_values_leave_little_room_above():
    # On a grid of 1e-3; on 1e-4 it is 327.6 (`fedgs privacy --reproduce`).
    lower = AttainedBound(SHARED, 1e-3)
    assert 311 < lower.epsilon(1e-5) < 329.4 < SampledBound((SHARED,)).epsilon(1e-5)
    assert lower.delta(10) > 0.998


# ------------------------------------------------------------------- one round, exactly


def quadrature(rate, ratio, epsilon):
    """The integral of max(0, P - e^epsilon Q), for both directions of one round."""
    mu, factor = 1 / ratio, math.exp(epsilon)

    def sampled(x):
        return (1 - rate) * norm.pdf(x) + rate * norm.pdf(x - mu)

    def remove(x):
        return max(0.0, sampled(x) - factor * norm.pdf(x))

    def add(x):
        return max(0.0, norm.pdf(x) - factor * sampled(x))

    ends = np.linspace(-12, mu + 12, 49)
    options = {"limit": 200, "epsabs": 1e-15, "epsrel": 1e-9}
    return [
        sum(quad(f, *span, **options)[0] for span in pairwise(ends))
        for f in (remove, add)
    ]


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.3, 2.0])
@pytest.mark.parametrize(("clients", "ratio"), [(1, 0.5), (3, 2.0), (9, 1.0)])
def test_one_round_is_the_integral_of_its_densities(clients, ratio, epsilon):
    kind = Sampled(10, clients, ratio, 1)
    remove, add = quadrature(kind.rate, ratio, epsilon)
    at = np.array([epsilon])
    tolerance = {"rel": 1e-6, "abs": 1e-14}
    assert hockey_stick(kind, at)[0] == pytest.approx(remove, **tolerance)
    assert hockey_stick(kind, at, "remove")[0] == pytest.approx(remove, **tolerance)
    assert hockey_stick(kind, at, "add")[0] == pytest.approx(add, **tolerance)
    assert SampledBound((kind,)).delta(epsilon) == pytest.approx(remove, rel=1e-4)


@given(kind=kinds)
def test_dominating_pair_is_convex_and_above_both_directions(kind):
    grid = np.linspace(-6, 6, 241)
    found = hockey_stick(kind, grid)
    for pair in ("remove", "add"):
        assert (found >= hockey_stick(kind, grid, pair) - 1e-12).all()
    assert (np.diff(found) <= 1e-12).all()
    slopes = np.diff(found) / np.diff(np.exp(grid))  # convex in e^epsilon
    assert (np.diff(slopes) >= -1e-9).all()


# --------------------------------------------------------------------------- all rounds


@settings(max_examples=2, deadline=None)
@given(kind=kinds)
def test_bounds_are_in_their_order(kind):
    rounds = (kind,)
    attained = AttainedBound(kind, 5e-3).epsilon(1e-4)
    found = SampledBound(rounds).epsilon(1e-4)
    assert attained <= found * (1 + 1e-9)
    assert naive_epsilon(rounds, 1e-4) <= found * (1 + 1e-3) + 1e-4
    assert found <= RenyiBound(rounds).epsilon(1e-4)
    # An adversary that sees the selection sees more.
    seen = binomial_epsilon(kind.rounds, kind.rate, kind.ratio, 1e-4)
    assert found <= seen * (1 + 1e-3) + 1e-4


@pytest.mark.parametrize("rounds", [1, 50, 2000])
def test_sampling_everybody_is_the_gaussian_mechanism(rounds):
    bound = SampledBound((Sampled(7, 7, math.sqrt(rounds), rounds),))
    for epsilon in (0.5, 2.0, 4.0):
        exact = delta_from_mu(1.0, epsilon)
        assert exact <= bound.delta(epsilon) <= exact * 1.001 + 1e-12


def test_kinds_of_rounds_compose(coarse_grid):
    whole = SampledBound((SHARED._replace(rounds=300),))
    parts = SampledBound((SHARED._replace(rounds=100), SHARED._replace(rounds=200)))
    assert parts.epsilon(1e-5) == pytest.approx(whole.epsilon(1e-5), rel=1e-6)
    quieter = SampledBound((SHARED._replace(rounds=100), SHARED._replace(ratio=0.15)))
    louder = SampledBound((SHARED._replace(rounds=100), SHARED._replace(ratio=0.3)))
    assert louder.epsilon(1e-5) < quieter.epsilon(1e-5)


def test_limits():
    assert SampledBound(()).epsilon(1e-5) == SampledBound(()).delta(1.0) == 0.0
    assert RenyiBound(()).epsilon(1e-5) == RenyiBound(()).delta(1.0) == 0.0
    silent = SampledBound((OWN, OWN._replace(ratio=0.0)))
    assert (silent.epsilon(1e-5), silent.delta(9.0)) == (math.inf, 1.0)
    hopeless = SampledBound((OWN._replace(ratio=LEAST_RATIO / 2),))
    assert hopeless.epsilon(1e-5) == math.inf
    assert SampledBound((OWN,)).epsilon(1e-12) == math.inf  # below the rounding
    assert SampledBound((Sampled(10**6, 1, 50.0, 30_000),)).epsilon(0.5) == 0.0


def test_too_many_kinds_are_refused():
    # One more than the limit is left for the selection of a cohort.
    rounds = tuple(OWN._replace(ratio=1.0 + n, rounds=1) for n in range(MOST_KINDS + 2))
    assert_refused("34 kinds of rounds; at most 32", SampledBound(rounds).epsilon, 1e-5)
