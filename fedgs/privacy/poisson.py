"""Epsilon of Gaussian releases of Poisson batches: of a record, and of all of a user.

    release   sum over the batch of vectors of norm at most 1, plus N(0, z^2)
    batch     each record by itself with chance q, and nobody learns who is in it

Relation: add-or-remove. Of the k records of one user, j take part, so one release is

    (1)  N(0, z^2)  against  sum_j Binomial(k, q)(j) N(j, z^2)

at worst, in both directions; k = 1 is a record. Releases are composed, as are different
ones, by their privacy loss distributions (PLD) on a grid that rounds up. Without
sampling, q = 1, releases are Gaussian: mu = k sqrt(count) / z.

>>> paper = (PoissonReleases(0.01, 2.1, 30_000),)  # GS-WGAN's row of DP-SGD GAN
>>> round(epsilon(paper, 1e-5), 2)
3.77
>>> round(epsilon(paper, 1e-5, group=111))
5076

Source:
    (1): Ganesh, "Tight group-level DP guarantees for DP-SGD with sampling via mixture
    of Gaussians mechanisms", 2024, Theorem 1; k = 1: Zhu, Dong, Wang, AISTATS 2022.
    Grid: Doroshenko et al., "Connect the dots", PETS 2022; library dp-accounting.
"""

import importlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom

from fedgs.errors import UserError
from fedgs.privacy.amplification import PLD_ROUNDING
from fedgs.privacy.gaussian import check_numbers, epsilon_from_mu

_THEOREM = "PLD of Poisson-sampled Gaussian releases"
_GROUP_THEOREM = "PLD of a mixture of Gaussians, one for each count of a user's records"
GAUSSIAN_THEOREM = "Gaussian, exact"
_RESOLUTION = 3e-4  # of epsilon, relative
_TAIL = 1e-18  # largest chance of more of a user's records in a batch that is left out
_TOLERANCE = 1e-4  # relative, of a noise multiplier that is looked for
_MOST_NOISE = 1e6
_MOST_LOSS = 500.0  # k / z; one release then costs 10^5


class PoissonReleases(NamedTuple):
    """Equal releases, one after the other.

    Attributes:
        rate: q, chance of a record to be in a batch, above 0; 1: no sampling.
        noise_per_clip: z, noise / norm of one record; 0 is no noise.
        times: how many, at least 1.
    """

    rate: float
    noise_per_clip: float
    times: int


def epsilon(releases: Sequence[PoissonReleases], delta: float, group: int = 1) -> float:
    """Returns epsilon of all releases together, an upper bound.

    inf without noise, and where the noise is so small that no bound is computed.

    Args:
        releases: as they were made; those that are alike may stand apart.
        delta: above 0 and below 1.
        group: k, the most records that a user has, at least 1.

    Raises:
        UserError: a number is out of its range.
    """
    check_numbers(delta=delta)
    counts: Counter[tuple[float, float]] = Counter()
    for rate, multiplier, count in releases:
        check_numbers(rate=rate, noise_per_clip=multiplier)
        counts[rate, multiplier] += count
    if not counts:
        return 0.0
    least = min(multiplier for _, multiplier in counts)
    if least * _MOST_LOSS < group:
        return math.inf  # no bound worth the gigabytes of its grid
    # Sorted, so that equal questions find the same entry of the cache.
    merged: list[PoissonReleases] = []
    for (rate, multiplier), count in sorted(counts.items()):
        merged.append(PoissonReleases(rate, multiplier, count))
    if all(kind.rate == 1 for kind in merged):
        costs = [kind.times / kind.noise_per_clip**2 for kind in merged]
        mu_squared = sum(costs)
        mu = group * math.sqrt(mu_squared)
        return epsilon_from_mu(mu, delta)
    return _composed_epsilon(tuple(merged), delta, group)


def theorem(releases: Sequence[PoissonReleases], group: int = 1) -> str:
    """Returns what `epsilon` rests on, in a few words."""
    if all(release.rate == 1 for release in releases):
        return GAUSSIAN_THEOREM
    if group == 1:
        return _THEOREM
    return _GROUP_THEOREM


def smallest_noise(
    releases: Callable[[float], Sequence[PoissonReleases]],
    target: float,
    delta: float,
) -> float:
    """Returns the least noise multiplier that meets an epsilon, rounded up by 1e-4.

    Args:
        releases: returns what is released at a noise multiplier.
        target: epsilon, above 0.
        delta: above 0 and below 1.

    Raises:
        UserError: no noise is enough.
    """

    def is_enough(noise: float) -> bool:
        return epsilon(releases(noise), delta) <= target

    low = 0.0
    high = 1.0
    while not is_enough(high):
        low = high
        high = 2 * high
        if high > _MOST_NOISE:
            raise UserError(
                f"target_epsilon = {target}: no noise is enough at delta {delta}; give "
                "a larger target or delta"
            )
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    # The upper end was found to be enough; the root may lie anywhere below it.
    return high


@lru_cache(maxsize=256)
def _composed_epsilon(
    releases: tuple[PoissonReleases, ...],
    delta: float,
    group: int,
) -> float:
    step = _grid_step(releases, group)
    pld: Any = importlib.import_module("dp_accounting.pld.pld_privacy_accountant")
    accountant = pld.PLDAccountant(value_discretization_interval=step)
    for kind in releases:
        event = _event(kind.rate, kind.noise_per_clip, group)
        accountant.compose(event, kind.times)
    times = sum(kind.times for kind in releases)
    # What `_event` leaves out costs delta in one direction and epsilon in the other:
    # the mixture is below (rest + tail), and above (1 - tail) times the rest. The
    # transform's error costs delta, too.
    lost = (PLD_ROUNDING + _TAIL) * times
    found = float(accountant.get_epsilon(delta - lost))
    return found + 2 * _TAIL * times


def _grid_step(releases: tuple[PoissonReleases, ...], group: int) -> float:
    """Returns a step whose rounding, about T step^2 / 2, is little beside epsilon."""
    square = 0
    for kind in releases:
        mu = group * kind.rate / kind.noise_per_clip
        square += kind.times * mu**2
    about = square / 2 + 4 * math.sqrt(square)  # epsilon by the central limit theorem
    times = sum(kind.times for kind in releases)
    # Any step gives a bound; this one is chosen for its exactness alone.
    step = math.sqrt(2 * _RESOLUTION * about / times)
    return min(0.1, max(1e-4, step))


def _event(rate: float, multiplier: float, group: int) -> Any:
    """Returns one release, Eq. 1, as dp-accounting writes it."""
    events: Any = importlib.import_module("dp_accounting.dp_event")
    if rate == 1:
        return events.GaussianDpEvent(multiplier / group)
    if group == 1:
        gaussian = events.GaussianDpEvent(multiplier)
        return events.PoissonSampledDpEvent(rate, gaussian)
    counts = np.arange(group + 1)
    is_likely = binom.sf(counts - 1, group, rate) > _TAIL  # so many or more
    counts = counts[is_likely]
    chances = binom.pmf(counts, group, rate)
    # dp-accounting asks for a sum of 1; `_composed_epsilon` charges for what is cut.
    chances /= chances.sum()
    return events.MixtureOfGaussiansDpEvent(
        standard_deviation=multiplier,
        sensitivities=counts.astype(float).tolist(),
        sampling_probs=chances.tolist(),
    )
