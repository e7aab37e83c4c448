"""Amplification by sampling: what is gained if nobody learns who was selected.

A round asks m of K clients, drawn anew; the B releases of the round come from the same
draw. So the whole round, with noise ratio z, is sampled once, and rounds are composed:

    (1)  r(epsilon) = q delta_1(log(1 + (e^epsilon - 1) / q)),  q = m / K
    (2)  h(epsilon) = r(epsilon),  h(-epsilon) = 1 - e^-epsilon (1 - r(epsilon))
    (3)  delta(epsilon) = the T-fold composition of h, for epsilon >= 0

with delta_1 of Eq. 2 in `fedgs.privacy.gaussian` at mu = 1 / z. z is that of
replace-one whatever the relation: in the draws without the client, somebody else
answers in its place. (1) bounds one direction of a round. The larger of the two
directions is no bound after composition; the dominating pair (2) is. All of it needs
`fedgs.config.amplification_rules.why_not_amplified` to find nothing.

Numerics: h is rounded up to a grid by "connect the dots", so (3) is an upper bound on
any grid; `grid_step` makes it exact to about 1e-4 of epsilon. The Fourier transform
errs by about 4e-17 T (measured); `PLD_ROUNDING` T is added to delta.

>>> rounds = (Sampled(1000, 1, 1.07 / 32**0.5, 20_000),)
>>> round(SampledBound(rounds).epsilon(1e-5), 2)
346.66

Source:
    (1), (2): Zhu, Dong and Wang, "Optimal accounting of differential privacy via
    characteristic function", AISTATS 2022 (dominating pairs under subsampling); (1)
    also Balle, Barthe and Gaboardi, "Privacy amplification by subsampling", NeurIPS
    2018 (advanced joint convexity).
    Grid: Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the dots", PETS
    2022, Algorithm 1; library dp-accounting.
    Attempts between which other rounds happen: Vadhan and Zhang, "Concurrent
    composition theorems for differential privacy", STOC 2023.
"""

# dp-accounting and scipy have no type stubs:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import importlib
import math
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from scipy import optimize
from scipy.special import log_ndtr, ndtr

from fedgs.errors import UserError
from fedgs.privacy.gaussian import Floats

PLD_THEOREM = "amplification by sampling: dominating pair, PLD"
MOST_SAMPLED_KINDS = 32  # of different rounds; each costs one more transform
LEAST_RATIO = 1e-3  # less counts as no noise: one answer alone loses 500,000
PLD_ROUNDING = 1e-15  # of delta for each release; 25 times the measured error
_LARGEST = 1e12  # epsilon beyond which nothing is looked for
_TAIL = 1e-15  # probability of large losses that is moved to infinity
_RESOLUTION = 1e-4
_MOST_POINTS = 2**17  # of one round's grid, on either side of 0


class Sampled(NamedTuple):
    """Rounds of one kind, each with a draw of its own.

    Attributes:
        num_clients: K, at least 1.
        clients_per_round: m, from 1 to K.
        ratio: z of the whole round under replace-one, at least 0; z / sqrt(a) if the
            round was tried a times, which asks the same clients.
        rounds: how many, at least 1.
    """

    num_clients: int
    clients_per_round: int
    ratio: float
    rounds: int

    @property
    def rate(self) -> float:
        """q, a client's chance to be drawn in a round."""
        return self.clients_per_round / self.num_clients


class SampledBound(NamedTuple):
    """The epsilon and delta of Eq. 3, under either relation.

    Attributes:
        rounds: all rounds, by kind; none costs nothing.
    """

    rounds: tuple[Sampled, ...]

    def delta(self, epsilon: float) -> float:
        """Returns Eq. 3, rounded up.

        Args:
            epsilon: finite; of either sign, if there are rounds.
        """
        if not self.rounds:
            return 0.0
        if self._is_bare:
            return 1.0
        composed = _composed(self.rounds)
        found = float(composed.get_delta_for_epsilon(epsilon))
        # The transform's error may be of either sign, so it is added.
        rounded_up = max(found, 0.0) + self._rounding
        return min(rounded_up, 1.0)

    def epsilon(self, delta: float) -> float:
        """Returns the least epsilon at which Eq. 3 is at most delta, rounded up.

        inf if there is none: without noise, or if delta is below the rounding.

        Args:
            delta: above 0 and below 1.
        """
        if not self.rounds:
            return 0.0
        if self._is_bare:
            return math.inf
        left = delta - self._rounding
        if left <= 0:
            return math.inf
        composed = _composed(self.rounds)
        return _inverse(composed, left)

    @property
    def _is_bare(self) -> bool:
        """Whether some round has next to no noise."""
        least = min(kind.ratio for kind in self.rounds)
        return least < LEAST_RATIO

    @property
    def _rounding(self) -> float:
        """What the transform's errors add to delta."""
        return PLD_ROUNDING * _number_of(self.rounds)


def _number_of(rounds: tuple[Sampled, ...]) -> int:
    return sum(kind.rounds for kind in rounds)


def _inverse(pmf: Any, delta: float) -> float:
    """Returns the epsilon at which a PMF of losses has this delta; 0 if it is lower."""

    def excess(epsilon: float) -> float:
        found = float(pmf.get_delta_for_epsilon(epsilon))
        return found - delta

    # Sizes and losses of a PMF are not public; its delta at a large epsilon is.
    top = 1.0
    while excess(top) > 0:
        if top > _LARGEST:
            return math.inf
        top *= 2
    if excess(0.0) <= 0:
        return 0.0
    solve: Any = cast(Any, optimize).brentq
    found = float(solve(excess, 0.0, top, xtol=1e-12))
    # The root may lie above what was found, by as much as the tolerance.
    return found * (1 + 1e-12)


def hockey_stick(kind: Sampled, epsilons: Floats) -> Floats:
    """Returns the delta of one round at each epsilon, of either sign: Eqs. 1 and 2.

    Args:
        kind: K, m and z; its number of rounds is not read.
        epsilons: float64 of any shape.

    Returns:
        float64 in [0, 1] of the same shape.
    """
    size = np.abs(epsilons)
    there = _remove(kind, size)
    kept = np.exp(-size) * (1 - there)
    back = 1 - kept
    is_positive = epsilons >= 0
    return np.where(is_positive, there, back)


def _remove(kind: Sampled, epsilons: Floats) -> Floats:
    """Returns Eq. 1, of (1-q) N(0,1) + q N(mu,1) against N(0,1), epsilons >= 0."""
    rate = kind.rate
    mu = 1 / kind.ratio
    # log(1 + (e^epsilon - 1) / q), in a form in which e^epsilon does not overflow.
    share = -(1 - rate) * np.exp(-epsilons)
    log_kept = np.log1p(share)
    base = epsilons + log_kept - math.log(rate)
    is_small = epsilons < 1  # there the lines above cancel
    grown = np.expm1(epsilons[is_small])
    base[is_small] = np.log1p(grown / rate)
    upper = mu / 2 - base / mu
    first = ndtr(upper)
    log_lower = log_ndtr(upper - mu)
    second = np.exp(base + log_lower)
    # Rounding may turn a difference of equal numbers negative.
    gap = np.maximum(first - second, 0.0)
    return rate * gap


@lru_cache(maxsize=8)
def _composed(rounds: tuple[Sampled, ...]) -> Any:
    """Returns dp-accounting's PMF of the privacy loss of all rounds."""
    pld_pmf: Any = importlib.import_module("dp_accounting.pld.pld_pmf")
    if len(rounds) > MOST_SAMPLED_KINDS + 1:  # one more for the selection of a cohort
        raise UserError(
            f"amplification: the rounds are of {len(rounds)} kinds, and at most "
            f"{MOST_SAMPLED_KINDS} kinds can be composed; leave it out"
        )
    # What is cut off all rounds together is at most `_TAIL`.
    tail = _TAIL / _number_of(rounds)
    tops = [_largest_loss(kind, tail) for kind in rounds]
    # A coarser grid rounds up more and stays a bound, so memory may limit it.
    coarsest = max(tops) / _MOST_POINTS
    step = max(grid_step(rounds), coarsest)
    result = None
    with np.errstate(all="ignore"):  # far tails underflow
        for kind, top in zip(rounds, tops, strict=True):
            last = math.ceil(top / step)
            points = np.arange(-last, last + 1, dtype=np.float64)
            deltas = hockey_stick(kind, points * step)
            deltas = np.clip(deltas, 0.0, 1.0)
            # dp-accounting refuses deltas that rise, if only in their last bits.
            deltas = np.minimum.accumulate(deltas)
            one_round = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
                step,
                -last,
                last,
                deltas,
            )
            # Only dense losses are composed by the Fourier transform.
            dense = one_round.to_dense_pmf()
            all_rounds = dense.self_compose(kind.rounds, _TAIL)
            if result is None:
                result = all_rounds
            else:
                result = result.compose(all_rounds, _TAIL)
    return result


def _largest_loss(kind: Sampled, tail: float) -> float:
    """Returns an epsilon at which one round's delta is at most `tail`."""

    def delta(epsilon: float) -> float:
        (found,) = _remove(kind, np.array([epsilon]))
        return found

    top = 1e-6
    while delta(top) > tail:
        # Too large by a fifth is no harm: the grid only becomes longer.
        top *= 1.2
    return top


def grid_step(rounds: tuple[Sampled, ...]) -> float:
    """Returns `_RESOLUTION` of the standard deviation of the composed loss."""
    # A sum is exact enough: the width of the grid depends on it, the bound does not.
    normal = np.linspace(-9, 9, 2001)
    density = np.exp(-(normal**2) / 2)
    density /= density.sum()
    variance = 0.0
    for kind in rounds:
        mu = 1 / kind.ratio
        rate = kind.rate
        log_absent = -np.inf
        if rate < 1:
            log_absent = np.log1p(-rate)
        # The loss of the mixture (1-q) N(0,1) + q N(mu,1), under each of its parts.
        for shift, weight in ((0.0, 1 - rate), (mu, rate)):
            answer = normal + shift
            log_ratio = mu * answer - mu**2 / 2
            loss = np.logaddexp(log_absent, math.log(rate) + log_ratio)
            square = float(density @ loss**2)
            variance += kind.rounds * weight * square
    deviation = math.sqrt(variance)
    return _RESOLUTION * deviation
