"""Exact epsilon and delta of Gaussian releases, for a fixed or a random number of them.

One release has the noise ratio z = noise / sensitivity. The releases may depend on each
other's answers. Equations that the docstrings cite:

    (1)  mu = sqrt(n) / z                                           n releases
    (2)  delta_n(epsilon) = Phi(mu/2 - epsilon/mu)
                            - e^epsilon Phi(-mu/2 - epsilon/mu)     exact
    (3)  delta(epsilon) = sum_n P(n) delta_n(epsilon)               n is random
    (4)  n = sum_r a_r X_r,  X_r ~ Bernoulli(rate), independent     its law

(2) is 0 for n = 0 and 1 without noise. It is rounded up: what is returned is at least
the exact value, and at most that times 1 + 4e-11 + 4e-14 mu; for deltas of 1e-300 and
more. (3) is exact against an adversary that sees n, and a bound against all others. In
(4), a_r counts the attempts of round r, which all ask the same clients; with one
attempt each, n ~ Binomial(T, rate).

>>> round(epsilon_from_mu(1.0, 1e-5), 2)
4.38
>>> round(binomial_law({1: 30_000}, rate=1 / 866, ratio=0.18915).epsilon(1.15e-3))
774

Source:
    (2): Balle and Wang, "Improving the Gaussian mechanism for differential privacy",
    ICML 2018, Theorem 8.
    (1): Dong, Roth and Su, "Gaussian differential privacy", 2022, Corollary 3.3: mu^2
    adds up over releases.
    (3), (4): docs/privacy.md, "Which theorem may be used when", 1.
"""

# scipy has no type stubs:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import bisect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.special import bdtr, bdtrc, erfcx, ndtr
from scipy.stats import binom

from fedgs.errors import UserError

LEAST_DELTA = 1e-300  # smaller ones lose their digits, and then are 0
_TAIL = 1e-18  # largest probability that is cut off a binomial law on either side
_MOST_MU = 1e12  # the epsilon of more, 10^23, is too coarse a number to solve Eq. 2
_NARROW = 3e-3  # a mu below it: Simpson's rule is exact there to 1e-12
_FARTHEST = 100.0  # in standard deviations: no density is left
Floats = npt.NDArray[np.float64]


class Law(NamedTuple):
    """Law of a client's number of releases n, Eq. 4, and what they cost, Eq. 3.

    Attributes:
        counts: the values of n, at least 0, float64 of shape (values,). Any sum of
            1 / z^2 may stand for n / z^2: then z = 1.
        weights: their probabilities P(n), float64 of the same shape.
        tail: the probability left out; it is added to delta.
        ratio: z of one release, at least 0; 0 is no noise.
    """

    counts: Floats
    weights: Floats
    tail: float
    ratio: float

    def delta(self, epsilon: float) -> float:
        """Returns Eq. 3, rounded up.

        Without noise it is 1, however rarely a client takes part.

        Args:
            epsilon: finite, at least 0; of either sign, if n is never 0.
        """
        if self.ratio == 0:
            takes_part = self.counts.max() > 0
            return float(takes_part)
        with np.errstate(over="ignore"):
            mu = np.sqrt(self.counts) / self.ratio
        # A ratio so small that mu overflows is no noise.
        is_bare = mu == np.inf
        deltas = np.where(is_bare, 1.0, 0.0)
        is_proper = mu > 0
        is_proper &= ~is_bare
        proper = mu[is_proper]
        rounded_up = _deltas(proper, epsilon)
        # A delta is a probability, also where it was rounded up beyond 1.
        deltas[is_proper] = np.clip(rounded_up, 0.0, 1.0)
        mean = self.weights @ deltas
        # What was cut off the law may be lost with certainty: its delta is at most 1.
        return float(mean) + self.tail

    def epsilon(self, delta: float) -> float:
        """Returns the least epsilon at which Eq. 3 is at most delta, rounded up.

        inf if there is none: with next to no noise, or if delta is not above `tail`.

        Args:
            delta: above 0 and below 1.
        """
        if self.delta(0.0) <= delta:
            return 0.0
        if self.ratio == 0:
            return math.inf
        if delta <= self.tail:
            return math.inf
        most = self.counts.max()
        largest_mu = math.sqrt(most) / self.ratio
        if largest_mu > _MOST_MU:
            return math.inf
        # Phi(-x) <= exp(-x^2 / 2) / 2 bounds the root from above.
        left = delta - self.tail
        deviations = math.sqrt(-2 * math.log(left))
        mean_loss = largest_mu * largest_mu / 2
        high = mean_loss + largest_mu * deviations

        def excess(epsilon: float) -> float:
            return self.delta(epsilon) - delta

        return _root(excess, 0.0, high)

    def smallest_ratio(self, epsilon: float, delta: float) -> float:
        """Returns the least z at which Eq. 3 is at most delta, rounded up.

        The law's own z is not read.

        Args:
            epsilon: finite, at least 0.
            delta: above 0 and below 1.

        Raises:
            UserError: delta is not below the chance to take part at all, so that no
                noise is needed, or not above `tail`, so that none is enough.
        """
        is_never = self.counts == 0
        never = float(self.weights @ is_never)
        chance = 1.0 - never
        if not self.tail < delta < chance:
            raise UserError(
                f"delta = {delta}: give --delta below a client's chance to take part, "
                f"{chance:.3g}, and above {self.tail:.1g}"
            )

        def excess(ratio: float) -> float:
            law = self._replace(ratio=ratio)
            return law.delta(epsilon) - delta

        # delta falls as z grows: by doubling, the root is between two of them.
        low = 1.0
        while excess(low) <= 0:
            low /= 2
        high = 1.0
        while excess(high) > 0:
            high *= 2
        return _root(excess, low, high)


def _deltas(mu: Floats, epsilon: float) -> Floats:
    """Returns Eq. 2 for each mu, rounded up.

    With a = epsilon / mu - mu / 2, b = a + mu and R(x) = Phi(-x) / phi(x), Eq. 2 is
    phi(a) (R(a) - R(b)), because e^epsilon phi(b) = phi(a). For a small mu that would
    be a difference of nearly equal numbers. There it is phi(a) times the integral of
    -R'(x) = 1 - x R(x) from a to b, by Simpson's rule. The rule is never too small: R
    is completely monotone, so the fourth derivative of -R' is positive.

    Args:
        mu: above 0 and finite.
        epsilon: finite.
    """
    with np.errstate(over="ignore"):
        start = abs(epsilon) / mu - mu / 2
    # Farther out there is no density, but a square that overflows.
    start = np.clip(start, -_FARTHEST, _FARTHEST)
    end = start + mu
    unscaled = np.exp(-(start**2) / 2)
    density = unscaled / math.sqrt(2 * math.pi)
    # R overflows far below 0. There both terms differ by much, so that Phi itself,
    # which has fewer digits in its tail, is exact enough.
    positive = np.maximum(start, 0.0)
    from_tail = density * _mills(positive)
    is_below = start < 0
    first = np.where(is_below, ndtr(-start), from_tail)
    second = density * _mills(end)
    deltas = first - second
    is_narrow = mu < _NARROW
    width = mu[is_narrow]
    height = density[is_narrow]
    slope = _mean_slope(start[is_narrow], width)
    deltas[is_narrow] = height * width * slope
    if epsilon < 0:
        # The privacy loss has the same law in both directions, so that
        # delta(-e) = 1 - exp(-e) (1 - delta(e)).
        scaled = math.exp(epsilon) * deltas
        deltas = scaled - math.expm1(epsilon)
    # All steps above err by less than this, and more delta is the safe direction.
    margin = 1.0 + 1e-11 + 1e-14 * mu
    return deltas * margin


def _mean_slope(start: Floats, width: Floats) -> Floats:
    """Returns the mean of 1 - x R(x) over intervals, by Simpson's rule."""
    middle = start + 0.5 * width
    end = start + width
    slope_at_start = 1.0 - start * _mills(start)
    slope_in_middle = 1.0 - middle * _mills(middle)
    slope_at_end = 1.0 - end * _mills(end)
    weighted = slope_at_start + 4 * slope_in_middle + slope_at_end
    return weighted / 6


def _mills(x: Floats) -> Floats:
    """Returns Phi(-x) / phi(x)."""
    scaled = erfcx(x / math.sqrt(2))
    return math.sqrt(math.pi / 2) * scaled


def _root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Returns the root of a decreasing function, rounded up by 1e-12 relative.

    Up is the safe direction of an epsilon and of a noise ratio alike.
    """
    solve = cast(Any, optimize).brentq
    found = float(solve(excess, low, high, xtol=1e-14, rtol=1e-14))
    # The root may lie above what was found, by as much as the tolerances.
    return found * (1 + 1e-12) + 1e-14


def fixed_law(count: float, ratio: float = 1.0) -> Law:
    """Returns the law of a number of releases that is known; Eq. 3 is then Eq. 2.

    Args:
        count: n, at least 0, or a sum of 1 / z^2; see `Law`.
        ratio: z of one release.

    Source: Balle and Wang, Theorem 8.
    """
    counts = np.array([float(count)])
    weights = np.ones(1)
    return Law(counts, weights, tail=0.0, ratio=ratio)


def binomial_law(num_rounds: Mapping[int, int], rate: float, ratio: float = 1.0) -> Law:
    """Returns the law of Eq. 4: a sum of a * Bernoulli(rate) over all rounds.

    The attempts of a round ask the same clients: a tries are one draw, counted a times.
    Each binomial is cut where a tail is below 1e-18; `Law.tail` adds up what was cut.

    Args:
        num_rounds: how many rounds were tried a times, for every a: {1: T} if none
            was repeated.
        rate: a client's chance to take part in a round, m / K in [0, 1].
        ratio: z of one release.

    Source: docs/privacy.md, "Which theorem may be used when", 1.
    """
    weights = np.ones(1)
    start = 0  # the number of releases that the first weight is about
    tail = 0.0
    for attempts, count in num_rounds.items():
        low, high = _window(count, rate)
        values = np.arange(low, high + 1)
        chances = binom.pmf(values, count, rate)
        # A round that was tried a times counts 0 or a, and nothing between.
        span = (high - low) * attempts
        spread = np.zeros(span + 1)
        spread[::attempts] = chances
        # Rounds are drawn independently, so their laws are convolved.
        weights = np.convolve(weights, spread)
        start += low * attempts
        # The union bound: a window is left with at most the sum of the chances.
        above = bdtrc(high, count, rate)
        tail += float(above)
        if low > 0:
            below = bdtr(low - 1, count, rate)
            tail += float(below)
    num_values = float(len(weights))
    counts = start + np.arange(num_values)
    return Law(counts, weights, tail, ratio)


def _window(count: int, rate: float) -> tuple[int, int]:
    """Returns low, high with at most `_TAIL` of Binomial(count, rate) beyond each."""

    def has_mass_up_to(value: int) -> bool:
        up_to = float(bdtr(value, count, rate))
        return up_to > _TAIL

    def has_none_above(value: int) -> bool:
        above = float(bdtrc(value, count, rate))
        return above <= _TAIL

    values = range(count)
    low = bisect.bisect_left(values, True, key=has_mass_up_to)
    high = bisect.bisect_left(values, True, key=has_none_above)
    return low, high


def check_numbers(**numbers: float) -> None:
    """Checks numbers that several functions take, by their names.

    Args:
        **numbers: `delta` must be at least 1e-300 and below 1, `rate` from 0 to 1, and
            every other number finite and at least 0.

    Raises:
        UserError: a number is out of its range, or not a number.
    """
    for name, value in numbers.items():
        if name == "delta":
            is_valid = LEAST_DELTA <= value < 1
            wanted = f"give --delta at least {LEAST_DELTA:g} and below 1"
        elif name == "rate":
            is_valid = 0 <= value <= 1
            wanted = "give m / K, a number from 0 to 1"
        else:
            is_valid = 0 <= value < math.inf
            wanted = "give a finite number, at least 0"
        if not is_valid:
            raise UserError(f"{name} = {value}: {wanted}")


def delta_from_mu(mu: float, epsilon: float) -> float:
    """Returns the exact delta of Gaussian releases, Eq. 2.

    Args:
        mu: sqrt(n) / z of Eq. 1, at least 0; inf is no noise.
        epsilon: finite, at least 0.

    Returns:
        delta in [0, 1]; 0 for mu = 0 and 1 for mu = inf.

    Raises:
        UserError: mu or epsilon is out of range.

    Source: Balle and Wang, Theorem 8.
    """
    _check_mu(mu)
    check_numbers(epsilon=epsilon)
    if mu == 0:
        return 0.0
    law = fixed_law(1, ratio=1 / mu)
    return law.delta(epsilon)


def epsilon_from_mu(mu: float, delta: float) -> float:
    """Returns the least epsilon of Gaussian releases: Eq. 2 solved, rounded up.

    Args:
        mu: sqrt(n) / z of Eq. 1, at least 0; inf is no noise.
        delta: above 0 and below 1.

    Returns:
        epsilon at least 0; 0 for mu = 0 and inf for mu = inf.

    Raises:
        UserError: mu or delta is out of range.

    Source: inverse of `delta_from_mu`.
    """
    _check_mu(mu)
    check_numbers(delta=delta)
    if mu == 0:
        return 0.0
    law = fixed_law(1, ratio=1 / mu)
    return law.epsilon(delta)


def _check_mu(mu: float) -> None:
    # No noise has a meaning here, and no other number is infinite.
    if mu != math.inf:
        check_numbers(mu=mu)


def mu_from_epsilon(epsilon: float, delta: float) -> float:
    """Returns the largest mu that is (epsilon, delta)-DP: Eq. 2 solved, rounded down.

    Args:
        epsilon: finite, at least 0.
        delta: above 0 and below 1.

    Returns:
        mu = sqrt(n) / z of Eq. 1, above 0.

    Raises:
        UserError: epsilon or delta is out of range.

    Source: inverse of `delta_from_mu`.
    """
    check_numbers(epsilon=epsilon, delta=delta)
    one_release = fixed_law(1)
    return 1 / one_release.smallest_ratio(epsilon, delta)
