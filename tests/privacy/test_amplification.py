"""Amplification by sampling: literal values, quadrature, order of the bounds."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedgs.privacy.amplification import (
    LEAST_RATIO,
    MOST_SAMPLED_KINDS,
    Sampled,
    SampledBound,
    hockey_stick,
)
from fedgs.privacy.gaussian import delta_from_mu
from fedgs.privacy.oracle import sampled_rdp_epsilon, two_directions
from refusals import assert_refused

# The paper's central run: one draw per round, and a draw for every fake.
SHARED = Sampled(1000, 1, 1.07 / math.sqrt(32), 20_000)
OWN = Sampled(1000, 1, 1.07, 640_000)


# ------------------------------------------------------------ values of docs/privacy.md


@pytest.mark.parametrize(
    ("kind", "dominating", "naive", "renyi"),
    [(SHARED, 346.66, 329.4, 296563.65), (OWN, 5.51, 4.117, 9.243)],
)
def test_published_values(kind, dominating, naive, renyi):
    assert round(SampledBound((kind,)).epsilon(1e-5), 2) == dominating
    larger = two_directions(kind).get_epsilon_for_delta(1e-5)
    assert larger == pytest.approx(naive, rel=2e-4)
    assert sampled_rdp_epsilon(kind, 1e-5) == pytest.approx(renyi, rel=1e-4)


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
    found = hockey_stick(kind, np.array([epsilon]))[0]
    assert found == pytest.approx(remove, rel=1e-6, abs=1e-14)
    assert add <= found + 1e-12
    assert SampledBound((kind,)).delta(epsilon) == pytest.approx(remove, rel=1e-4)


# --------------------------------------------------------------------------- all rounds


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
    silent = SampledBound((OWN, OWN._replace(ratio=0.0)))
    assert (silent.epsilon(1e-5), silent.delta(9.0)) == (math.inf, 1.0)
    hopeless = SampledBound((OWN._replace(ratio=LEAST_RATIO / 2),))
    assert hopeless.epsilon(1e-5) == math.inf
    assert SampledBound((OWN,)).epsilon(1e-12) == math.inf  # below the rounding
    assert SampledBound((Sampled(10**6, 1, 50.0, 30_000),)).epsilon(0.5) == 0.0


def test_too_many_kinds_are_refused():
    # One more than the limit is left for the selection of a cohort.
    rounds = tuple(
        OWN._replace(ratio=1.0 + n, rounds=1) for n in range(MOST_SAMPLED_KINDS + 2)
    )
    assert_refused("of 34 kinds, and at most 32", SampledBound(rounds).epsilon, 1e-5)
