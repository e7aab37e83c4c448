"""Amplification by sampling: what is gained if nobody learns who was selected.

A round asks m of K clients, drawn anew; the B releases of the round come from the same
draw. So the whole round, with noise ratio z, is sampled once, and rounds are composed:

    (1)  r(epsilon) = q delta_1(log(1 + (e^epsilon - 1) / q)),  q = m / K
    (2)  h(epsilon) = r(epsilon),  h(-epsilon) = 1 - e^-epsilon (1 - r(epsilon))
    (3)  delta(epsilon) = the T-fold composition of h, for epsilon >= 0

with delta_1 of Eq. 2 in `fedgs.privacy.gaussian` at mu = 1 / z. z is that of
replace-one
whatever the relation: in the draws without the client, somebody else answers in its
place. (1) bounds one direction of a round; the larger of the two directions is no bound
after composition, the dominating pair (2) is. All of it needs
`fedgs.config.amplification_rules.why_not_amplified` to find nothing.

Numerics: h is rounded up to a grid by "connect the dots", so (3) is an upper bound on
any grid; `_grid_step` makes it exact to about 1e-4 of epsilon. The Fourier transform
errs by about 4e-17 T (measured); `ROUNDING` T is added to delta.

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
import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.special import log_ndtr, ndtr

from fedgs.errors import UserError

PLD_THEOREM = "amplification by sampling: dominating pair, PLD"
RDP_THEOREM = "amplification by sampling: RDP, second opinion"
MOST_KINDS = 32  # of different rounds; each costs one more transform
LEAST_RATIO = 1e-3  # less counts as no noise: one answer alone loses 500,000
ROUNDING = 1e-15
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
        pair: "dominating" for Eq. 2. "remove" and "add" are the two directions of one
            round: neither is a bound for all rounds, see `naive_epsilon`.
    """

    rounds: tuple[Sampled, ...]
    pair: str = "dominating"

    def delta(self, epsilon: float) -> float:
        """Returns Eq. 3, rounded up.

        Args:
            epsilon: finite; of either sign, if there are rounds.
        """
        if not self.rounds:
            return 0.0
        if min(kind.ratio for kind in self.rounds) < LEAST_RATIO:
            return 1.0
        found = float(_composed(self).get_delta_for_epsilon(epsilon))
        return min(max(found, 0.0) + self._rounding, 1.0)

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
        return _inverse(_composed(self), delta - self._rounding)

    @property
    def _rounding(self) -> float:
        return ROUNDING * sum(kind.rounds for kind in self.rounds)


class RenyiBound(NamedTuple):
    """The second opinion: dp-accounting's RDP of the same rounds, a looser bound.

    Its event divides the noise by the sensitivity under replace-one, as z does; it
    allows no order between 1 and 2 of its own, so a small z makes it useless.

    Attributes:
        rounds: all rounds, by kind; none costs nothing.

    Source: Wang, Balle and Kasiviswanathan, "Subsampled Renyi differential privacy and
        analytical moments accountant", AISTATS 2019, Theorem 27 of the full version.
    """

    rounds: tuple[Sampled, ...]

    def delta(self, epsilon: float) -> float:
        """Returns the bound on delta.

        Args:
            epsilon: finite, at least 0.
        """
        return float(_renyi(self.rounds).get_delta(epsilon)) if self.rounds else 0.0

    def epsilon(self, delta: float) -> float:
        """Returns the bound on epsilon; inf without noise.

        Args:
            delta: above 0 and below 1.
        """
        return float(_renyi(self.rounds).get_epsilon(delta)) if self.rounds else 0.0


def naive_epsilon(rounds: tuple[Sampled, ...], delta: float) -> float:
    """Returns the larger epsilon of the two directions: common, and not a bound.

    Privacy: public; for comparison only.

    Args:
        rounds: all rounds, by kind.
        delta: above 0 and below 1.

    Source: Lebeda, Regehr, Kamath and Steinke, "Avoiding pitfalls for privacy
        accounting of subsampled mechanisms under composition", 2024.
    """
    pairs = (SampledBound(rounds, pair) for pair in ("remove", "add"))
    return max(pair.epsilon(delta) for pair in pairs)


class AttainedBound(NamedTuple):
    """What clipped gradients do attain: no accountant can state less.

    One client always sends +C e and all others -C e, for one unit vector e. Losses
    are rounded down to the grid.

    Privacy: public; a lower bound, no guarantee.

    Attributes:
        kind: the rounds.
        step: of the grid, above 0.
    """

    kind: Sampled
    step: float = 1e-4

    def delta(self, epsilon: float) -> float:
        """Returns a lower bound on delta.

        Args:
            epsilon: finite, at least 0.
        """
        rounding = ROUNDING * self.kind.rounds
        return float(_attained(self).get_delta_for_epsilon(epsilon)) - rounding

    def epsilon(self, delta: float) -> float:
        """Returns a lower bound on epsilon.

        Args:
            delta: above 0 and below 1.
        """
        rounding = ROUNDING * self.kind.rounds
        return _inverse(_attained(self), delta + rounding)


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
    found: Any = optimize
    return float(found.brentq(excess, 0.0, top, xtol=1e-12)) * (1 + 1e-12)


def hockey_stick(kind: Sampled, epsilons: Floats, pair: str = "dominating") -> Floats:
    """Returns the delta of one round at each epsilon, of either sign: Eqs. 1 and 2.

    Args:
        kind: K, m and z; its number of rounds is not read.
        epsilons: float64 of any shape.
        pair: as in `SampledBound`.

    Returns:
        float64 in [0, 1] of the same shape.
    """
    size = np.abs(epsilons)
    there = _remove(kind, size)
    if pair == "dominating":
        back = there
    else:  # the other direction of the same pair
        back = _add(kind, size)
        there, back = (there, back) if pair == "remove" else (back, there)
    return np.where(epsilons >= 0, there, 1 - np.exp(-size) * (1 - back))


def _remove(kind: Sampled, epsilons: Floats) -> Floats:
    """Returns Eq. 1, of (1-q) N(0,1) + q N(mu,1) against N(0,1), epsilons >= 0."""
    rate, mu = kind.rate, 1 / kind.ratio
    # log(1 + (e^epsilon - 1) / q), in a form in which e^epsilon does not overflow.
    base = epsilons + np.log1p(-(1 - rate) * np.exp(-epsilons)) - math.log(rate)
    small = epsilons < 1  # there the line above cancels
    base[small] = np.log1p(np.expm1(epsilons[small]) / rate)
    upper = mu / 2 - base / mu
    return rate * np.maximum(ndtr(upper) - np.exp(base + log_ndtr(upper - mu)), 0.0)


def _add(kind: Sampled, epsilons: Floats) -> Floats:
    """Returns the other direction: N(0,1) against the mixture, epsilons >= 0, q < 1."""
    rate, mu = kind.rate, 1 / kind.ratio
    inside = np.maximum(np.expm1(-epsilons) / rate + 1, 0.0)
    with np.errstate(divide="ignore"):
        edge = np.log(inside) / mu + mu / 2  # the ratio is above epsilon below it
    lost = np.exp(epsilons + log_ndtr(edge - mu))
    gained = ndtr(edge) * -np.expm1(epsilons + math.log1p(-rate))
    return np.where(inside > 0, np.maximum(gained - rate * lost, 0.0), 0.0)


@lru_cache(maxsize=8)
def _composed(bound: SampledBound) -> Any:
    """Returns dp-accounting's PMF of the privacy loss of all rounds."""
    pld_pmf: Any = importlib.import_module("dp_accounting.pld.pld_pmf")
    if len(bound.rounds) > MOST_KINDS + 1:  # one more for the selection of a cohort
        raise UserError(f"{len(bound.rounds)} kinds of rounds; at most {MOST_KINDS}")
    total, result = sum(kind.rounds for kind in bound.rounds), None
    # What is cut off all rounds together is at most `_TAIL`.
    tops = [_largest_loss(kind, _TAIL / total) for kind in bound.rounds]
    # A coarser grid rounds up more and stays a bound, so memory may limit it.
    step = max(_grid_step(bound.rounds), max(tops) / _MOST_POINTS)
    with np.errstate(all="ignore"):  # far tails underflow
        for kind, top in zip(bound.rounds, tops, strict=True):
            last = math.ceil(top / step)
            grid = np.arange(-last, last + 1, dtype=np.float64) * step
            deltas = np.clip(hockey_stick(kind, grid, bound.pair), 0.0, 1.0)
            # dp-accounting refuses deltas that rise, if only by rounding.
            deltas = np.minimum.accumulate(deltas)  # last bits
            pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
                step, -last, last, deltas
            )
            pmf = pmf.to_dense_pmf().self_compose(kind.rounds, _TAIL)
            result = pmf if result is None else result.compose(pmf, _TAIL)
    return result


def _largest_loss(kind: Sampled, tail: float) -> float:
    """Returns an epsilon at which one round's delta is at most `tail`."""
    top = 1e-6
    while _remove(kind, np.array([top]))[0] > tail:
        # Too large by a fifth is no harm: the grid only becomes longer.
        top *= 1.2
    return top


def _grid_step(rounds: tuple[Sampled, ...]) -> float:
    """Returns `_RESOLUTION` of the standard deviation of the composed loss."""
    # A sum is exact enough: the width of the grid depends on it, the bound does not.
    normal = np.linspace(-9, 9, 2001)
    density = np.exp(-(normal**2) / 2)
    density /= density.sum()
    variance = 0.0
    for kind in rounds:
        mu, rate = 1 / kind.ratio, kind.rate
        for shift, weight in ((0.0, 1 - rate), (mu, rate)):
            exponent = mu * (normal + shift) - mu**2 / 2
            loss = np.logaddexp(
                np.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + exponent
            )
            variance += kind.rounds * weight * float(density @ loss**2)
    return _RESOLUTION * math.sqrt(variance)


@lru_cache(maxsize=2)
def _attained(bound: AttainedBound) -> Any:
    """Returns the PMF of the remove direction with losses rounded down."""
    pld_pmf: Any = importlib.import_module("dp_accounting.pld.pld_pmf")
    kind, step = bound.kind, bound.step
    rate, mu = kind.rate, 1 / kind.ratio
    # No loss is below log(1 - q), whatever the output.
    first = math.floor(math.log1p(-rate) / step)
    last = math.ceil(_largest_loss(kind, _TAIL / kind.rounds) / step)
    edges = np.expm1(np.arange(first, last + 1) * step) / rate + 1
    with np.errstate(all="ignore"):
        points = np.where(edges > 0, np.log(edges) / mu + mu / 2, -np.inf)
        above = (1 - rate) * ndtr(-points) + rate * ndtr(mu - points)
        # What lies between two points of the grid counts at the lower one.
        probs = np.append(above[:-1] - above[1:], above[-1])
        pmf = pld_pmf.DensePLDPmf(step, first, probs, 0.0, False)
        return pmf.self_compose(kind.rounds, _TAIL)


@lru_cache(maxsize=8)
def _renyi(rounds: tuple[Sampled, ...]) -> Any:
    """Returns dp-accounting's RDP accountant after all rounds."""
    dp: Any = importlib.import_module("dp_accounting")
    relation = dp.NeighboringRelation.REPLACE_ONE
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relation)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for kind in rounds:
            cohort = (kind.num_clients, kind.clients_per_round)
            gaussian = dp.GaussianDpEvent(kind.ratio)
            event = dp.SampledWithoutReplacementDpEvent(*cohort, gaussian)
            accountant.compose(event, kind.rounds)
    return accountant
