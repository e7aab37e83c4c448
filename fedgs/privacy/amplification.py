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
import numpy.typing as npt
from scipy import optimize
from scipy.special import log_ndtr, ndtr

from fedgs.errors import UserError

PLD_THEOREM = "amplification by sampling: dominating pair, PLD"
MOST_SAMPLED_KINDS = 32  # of different rounds; each costs one more transform
LEAST_RATIO = 1e-3  # less counts as no noise: one answer alone loses 500,000
PLD_ROUNDING = 1e-15  # of delta for each release; 25 times the measured error
_LARGEST = 1e12  # epsilon beyond which nothing is looked for
_TAIL = 1e-15  # probability of large losses that is moved to infinity
_RESOLUTION = 1e-4
_MOST_POINTS = 2**17  # of one round's grid, on either side of 0
Floats = npt.NDArray[np.float64]


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
        least = min(kind.ratio for kind in self.rounds)
        if least < LEAST_RATIO:
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
        least = min(kind.ratio for kind in self.rounds)
        if least < LEAST_RATIO or delta <= self._rounding:
            return math.inf
        composed = _composed(self.rounds)
        return _inverse(composed, delta - self._rounding)

    @property
    def _rounding(self) -> float:
        return PLD_ROUNDING * sum(kind.rounds for kind in self.rounds)


def _inverse(pmf: Any, delta: float) -> float:
    """Returns the epsilon at which a PMF of losses has this delta; 0 if it is lower."""

    def excess(epsilon: float) -> float:
        return float(pmf.get_delta_for_epsilon(epsilon)) - delta

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
    back = 1 - np.exp(-size) * (1 - there)
    return np.where(epsilons >= 0, there, back)


def _remove(kind: Sampled, epsilons: Floats) -> Floats:
    """Returns Eq. 1, of (1-q) N(0,1) + q N(mu,1) against N(0,1), epsilons >= 0."""
    rate = kind.rate
    mu = 1 / kind.ratio
    # log(1 + (e^epsilon - 1) / q), in a form in which e^epsilon does not overflow.
    base = epsilons + np.log1p(-(1 - rate) * np.exp(-epsilons)) - math.log(rate)
    small = epsilons < 1  # there the line above cancels
    base[small] = np.log1p(np.expm1(epsilons[small]) / rate)
    upper = mu / 2 - base / mu
    first = ndtr(upper)
    second = np.exp(base + log_ndtr(upper - mu))
    # Rounding may turn a difference of equal numbers negative.
    return rate * np.maximum(first - second, 0.0)


@lru_cache(maxsize=8)
def _composed(rounds: tuple[Sampled, ...]) -> Any:
    """Returns dp-accounting's PMF of the privacy loss of all rounds."""
    pld_pmf: Any = importlib.import_module("dp_accounting.pld.pld_pmf")
    if len(rounds) > MOST_SAMPLED_KINDS + 1:  # one more for the selection of a cohort
        raise UserError(f"{len(rounds)} kinds of rounds; at most {MOST_SAMPLED_KINDS}")
    total = sum(kind.rounds for kind in rounds)
    # What is cut off all rounds together is at most `_TAIL`.
    tops = [_largest_loss(kind, _TAIL / total) for kind in rounds]
    # A coarser grid rounds up more and stays a bound, so memory may limit it.
    step = max(grid_step(rounds), max(tops) / _MOST_POINTS)
    result = None
    with np.errstate(all="ignore"):  # far tails underflow
        for kind, top in zip(rounds, tops, strict=True):
            last = math.ceil(top / step)
            grid = np.arange(-last, last + 1, dtype=np.float64) * step
            deltas = hockey_stick(kind, grid)
            deltas = np.clip(deltas, 0.0, 1.0)
            # dp-accounting refuses deltas that rise, if only in their last bits.
            deltas = np.minimum.accumulate(deltas)
            one_round = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
                step, -last, last, deltas
            )
            # Only dense losses are composed by the Fourier transform.
            pmf = one_round.to_dense_pmf().self_compose(kind.rounds, _TAIL)
            if result is not None:
                pmf = result.compose(pmf, _TAIL)
            result = pmf
    return result


def _largest_loss(kind: Sampled, tail: float) -> float:
    """Returns an epsilon at which one round's delta is at most `tail`."""
    top = 1e-6
    while _remove(kind, np.array([top]))[0] > tail:
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
            exponent = mu * (normal + shift) - mu**2 / 2
            loss = np.logaddexp(log_absent, math.log(rate) + exponent)
            square = float(density @ loss**2)
            variance += kind.rounds * weight * square
    return _RESOLUTION * math.sqrt(variance)
