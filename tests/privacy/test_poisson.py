"""Epsilon of Poisson batches: published figures, group privacy, calibration."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from fedgs.errors import UserError
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.poisson import PoissonReleases, epsilon, smallest_noise

DELTA = 1e-5


@pytest.mark.parametrize(
    ("rate", "noise", "times", "expected"),
    [  # GS-WGAN's Table 1 by dp-accounting 0.6.0, grid 1e-4: DP-SGD GAN, DP-MERF, AE.
        (0.01, 2.1, 30_000, 3.767),
        (1 / 120, 0.588, 600, 5.709),
        (1 / 120, 0.686, 2040, 5.54),
    ],
)
def test_settings_of_the_papers_table_cost_less_than_published(
    rate, noise, times, expected
):
    found = epsilon((PoissonReleases(rate, noise, times),), DELTA)
    assert found == pytest.approx(expected, rel=2e-3)


def _delta_of_one_release(rate, noise, group, at):
    """Hockey-stick divergence of Eq. 1 by the trapezoid rule, in both directions."""
    x = np.linspace(-12 * noise, group + 12 * noise, 400_001)
    none = norm.pdf(x, 0, noise)
    some = sum(
        binom.pmf(j, group, rate) * norm.pdf(x, j, noise) for j in range(group + 1)
    )
    rows = (
        np.maximum(some - math.exp(at) * none, 0),
        np.maximum(none - math.exp(at) * some, 0),
    )
    return max(float(np.trapezoid(row, x)) for row in rows)


@pytest.mark.parametrize(
    ("rate", "noise", "group"), [(0.1, 1.0, 1), (0.1, 1.0, 6), (0.3, 2.0, 40)]
)
def test_one_release_costs_a_group_what_an_integral_says(rate, noise, group):
    found = epsilon((PoissonReleases(rate, noise, 1),), DELTA, group)
    assert _delta_of_one_release(rate, noise, group, found) <= DELTA
    assert _delta_of_one_release(rate, noise, group, 0.99 * found) > DELTA


def test_without_sampling_releases_are_gaussian():
    releases = (PoissonReleases(1.0, 4.0, 3), PoissonReleases(1.0, 2.0, 1))
    mu = math.sqrt(3 / 16 + 1 / 4)
    assert epsilon(releases, DELTA) == epsilon_from_mu(mu, DELTA)
    assert epsilon(releases, DELTA, 5) == epsilon_from_mu(5 * mu, DELTA)


def test_sampled_and_unsampled_releases_add_up():
    first, second = PoissonReleases(0.01, 1.0, 500), PoissonReleases(1.0, 2.0, 1)
    both = epsilon((first, second), DELTA)
    assert both > max(epsilon((first,), DELTA), epsilon((second,), DELTA))
    assert both < epsilon((first,), DELTA / 2) + epsilon((second,), DELTA / 2)


def test_no_release_is_free_and_no_noise_is_unbounded():
    assert epsilon((), DELTA) == 0
    assert epsilon((PoissonReleases(0.5, 0.0, 1),), DELTA) == math.inf


@pytest.mark.parametrize("delta", [0.0, 1.0, float("nan")])
def test_a_delta_out_of_range_is_refused(delta):
    with pytest.raises(UserError, match="delta"):
        epsilon((PoissonReleases(0.5, 1.0, 1),), delta)


@pytest.mark.parametrize("target", [0.5, 10.0])
def test_the_smallest_noise_meets_its_target_and_little_less_does_not(target):
    def releases(noise):
        return [PoissonReleases(0.05, noise, 200)]

    noise = smallest_noise(releases, target, DELTA)
    assert 0.995 * target < epsilon(releases(noise), DELTA) <= target
    assert epsilon(releases(0.995 * noise), DELTA) > target


def test_next_to_no_noise_is_unbounded_and_needs_no_gigabytes():
    for noise, group in ((1e-3, 1), (1e-100, 1), (0.1, 100)):
        assert epsilon([PoissonReleases(0.01, noise, 500)], 1e-5, group) == math.inf
