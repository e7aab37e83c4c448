"""Our epsilons against other accountants and against a direct numerical integral.

Every comparison has its tolerance beside it. RDP is a bound, so it may only be larger.
"""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedgs.privacy.amplification import Sampled, SampledBound
from fedgs.privacy.gaussian import delta_from_mu, epsilon_from_mu
from fedgs.privacy.oracle import (
    autodp_epsilon,
    poisson_rdp_epsilon,
    sampled_rdp_epsilon,
    two_directions,
)

DELTA = 1e-5
ORDERS = np.geomspace(1e-3, 60, 400) + 1  # of RDP; no optimum lies at an end
RELEASES = [(1, 0.5), (150, 4.0), (20_000, 60.0)]
each_gaussian = pytest.mark.parametrize(("count", "ratio"), RELEASES)


def exact(count, ratio):
    return epsilon_from_mu(math.sqrt(count) / ratio, DELTA)


# ------------------------------------------------------------------ Gaussian releases


def of_autodp(count, ratio):
    pytest.importorskip("autodp")
    return autodp_epsilon(ratio, count, None, DELTA)


def of_dp_accounting(count, ratio):
    dp = pytest.importorskip("dp_accounting")
    accountant = dp.rdp.RdpAccountant(ORDERS)
    return accountant.compose(dp.GaussianDpEvent(ratio), count).get_epsilon(DELTA)


@each_gaussian
@pytest.mark.parametrize("accountant", [of_autodp, of_dp_accounting])
def test_rdp_of_others_is_a_little_above(accountant, count, ratio):
    # Conversion from RDP costs up to 20 %, most where epsilon is small.
    found = accountant(count, ratio)
    assert exact(count, ratio) <= found <= 1.2 * exact(count, ratio)


@each_gaussian
def test_dp_accounting_pld_agrees(count, ratio):
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    mu = math.sqrt(count) / ratio
    step = max(1e-4, mu * 1e-4)
    one = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=step)
    # Its grid rounds up: 0.1 % and a step.
    tolerance = 1e-3 * exact(count, ratio) + step
    assert one.get_epsilon_for_delta(DELTA) == pytest.approx(
        exact(count, ratio), abs=tolerance
    )


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("mu", [0.1, 1.0, 2.5, 6.0])
def test_an_integral_of_two_gaussians_agrees(mu, epsilon):
    def excess(x):
        return max(0.0, norm.pdf(x - mu) - math.exp(epsilon) * norm.pdf(x))

    start = mu / 2 + epsilon / mu  # below it the integrand is 0
    found, _ = quad(excess, start, start + 40, epsabs=0, epsrel=1e-10, limit=500)
    assert delta_from_mu(mu, epsilon) == pytest.approx(found, rel=1e-8, abs=1e-300)


# ------------------------------------------------------------------ sampled rounds

ROUNDS = [(1000, 1, 1.0, 500_000), (20, 4, 3.0, 60), (50, 25, 8.0, 200)]
each_sampled = pytest.mark.parametrize("kind", [Sampled(*kind) for kind in ROUNDS])


@each_sampled
def test_rdp_of_sampling_without_replacement_is_above(kind):
    ours = SampledBound((kind,)).epsilon(DELTA)
    # Both implement one theorem, with other orders and refinements.
    theirs = sampled_rdp_epsilon(kind, DELTA)
    assert ours <= theirs <= 3 * ours
    pytest.importorskip("autodp")
    other = autodp_epsilon(kind.ratio, kind.rounds, kind.rate, DELTA)
    assert theirs <= other * 1.001 <= 1.5 * theirs


@each_sampled
def test_our_bound_is_above_both_directions_and_near_what_is_attained(kind):
    ours = SampledBound((kind,)).epsilon(DELTA)
    larger = two_directions(kind).get_epsilon_for_delta(DELTA)
    # Two grids, both rounded up: 0.3 %.
    assert larger <= ours * 1.003
    # Add-or-remove with Poisson draws has these two directions, and no dominating pair
    # of both at once: RDP of the larger one is above their PLD, within 40 %.
    theirs = poisson_rdp_epsilon(kind.ratio, kind.rate, kind.rounds, DELTA)
    assert larger <= theirs <= 1.4 * larger
    if kind.rounds < 1000:  # of the first, the grid is too fine
        attained = two_directions(kind, is_attained=True).get_epsilon_for_delta(DELTA)
        assert attained <= ours <= 1.5 * attained
