"""What votes of teachers cost: bounds that hold, and the accountants as published.

A client's images are seen by one teacher only, so a client changes one vote of each
query, whatever its data are. What holds for every data set:

    (1)  mu^2 = N (1 / s_t^2 + d^2 / s_a^2)     N confident GNMax queries: the count at
                                                the top moves by 1, the histogram by d
    (2)  delta(epsilon) = sum_j B(j; N, p) max(0, 1 - e^(epsilon - (N - 2j) e0)),
         p = e^e0 / (1 + e^e0)                  N queries of pure e0-DP each
    d = sqrt 2 and e0 = 2 lambda where a vote is replaced, 1 and lambda where it is left
    out. (1) is exact for Gaussian noise, (2) is attained by the worst e0-DP queries; in
    both, each query may depend on the earlier answers.

What was published counts less for queries whose answer is clear, by a bound that reads
the votes: such an epsilon is itself private, and is no bound that may be printed.

    GNMax      RDP, with q = P(not the plurality) <= sum Phi(-gap / (s sqrt 2))
    Laplace    log E e^(l loss) <= log((1-q) ((1-q) / (1 - q e^(2 lambda)))^l
                                       + q e^(2 lambda l)),
               which needs q < (e^(2 lambda) - 1) / (e^(4 lambda) - 1)

Source:
    Papernot et al., "Scalable private learning with PATE", ICLR 2018, Algorithm 1,
    Theorem 6, Propositions 7, 8 and 10; as used by G-PATE, reference `rdp_utils.py`.
    Papernot et al., "Semi-supervised knowledge transfer", ICLR 2017, Theorem 3 and
    Lemma 4; as used by PATE-GAN, reference `alg/pategan/pate_gan.py`.
    (1): Dong, Roth and Su, "Gaussian differential privacy", 2022, Corollary 3.3.
    (2): Kairouz, Oh and Viswanath, "The composition theorem for differential privacy",
    ICML 2015, Theorem 3.3.
"""

# scipy has no type stubs:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.special import expit, log_ndtr, logsumexp
from scipy.stats import binom

Floats = npt.NDArray[np.float64]

GNMAX_ORDERS: Floats = np.array([1.1, *range(2, 200)], np.float64)  # G-PATE, main.py
NUM_MOMENTS = 20  # PATE-GAN, L
_ABOVE = 1 + 1e-9  # over a root that is found numerically


def confident_gnmax_mu(
    num_queries: int,
    threshold_std: float,
    answer_std: float,
    distance: float,
) -> float:
    """Returns mu of confident GNMax queries, Eq. 1: all of them count as answered.

    Privacy: public.

    Args:
        num_queries: N, at least 0; one for each coordinate of each image.
        threshold_std: s_t, in votes; 0 is no noise.
        answer_std: s_a, in votes.
        distance: d, how far one teacher moves a histogram: sqrt 2 or 1.
    """
    if num_queries == 0:
        return 0.0
    if threshold_std == 0 or answer_std == 0:
        return math.inf
    # A query that is not answered costs less, but which ones these are is private.
    of_check = threshold_std**-2
    of_answer = (distance / answer_std) ** 2
    squared = num_queries * (of_check + of_answer)
    return math.sqrt(squared)


def pure_delta(epsilon_0: float, num_queries: int, epsilon: float) -> float:
    """Returns the delta of queries of pure differential privacy, Eq. 2.

    Privacy: public.
    """
    if epsilon_0 == 0:
        return 0.0
    # Outcomes whose loss is below epsilon add nothing.
    highest = math.floor((num_queries - epsilon / epsilon_0) / 2)
    if highest < 0:
        return 0.0
    flips = np.arange(highest + 1)  # j
    loss = (num_queries - 2 * flips) * epsilon_0
    flip_probability = expit(-epsilon_0)  # 1 - p
    binomial: Any = binom
    # In logarithms, because single weights underflow for many queries.
    log_weights = binomial.logpmf(flips, num_queries, flip_probability)
    # expm1 is accurate where the loss is hardly above epsilon.
    exponents = np.minimum(0.0, epsilon - loss)
    excess = -np.expm1(exponents)
    weights = np.exp(log_weights)
    return float(weights @ excess)


def pure_epsilon(epsilon_0: float, num_queries: int, delta: float) -> float:
    """Returns the epsilon of queries of pure differential privacy: Eq. 2 solved.

    Privacy: public.

    Args:
        epsilon_0: e0 of one query, at least 0; inf is no noise.
        num_queries: N, at least 0.
        delta: above 0 and below 1.

    >>> round(pure_epsilon(0.1, 100, 1e-5), 3)
    4.307
    """
    if math.isinf(epsilon_0) and num_queries:
        return math.inf
    if num_queries == 0:
        return 0.0
    delta_at_zero = pure_delta(epsilon_0, num_queries, 0.0)
    if delta_at_zero <= delta:  # there is no root to find
        return 0.0

    def excess(epsilon: float) -> float:
        return pure_delta(epsilon_0, num_queries, epsilon) - delta

    by_basic_composition = num_queries * epsilon_0  # which no bound exceeds
    spent = _root(excess, 0.0, by_basic_composition)
    # A root may be found a little too low, and an epsilon is rounded up.
    return spent * _ABOVE


def pure_per_query(epsilon: float, num_queries: int, delta: float) -> float:
    """Returns the largest e0 with which all queries together stay within epsilon.

    Privacy: public.
    """
    # Basic composition is always allowed, so the root lies above.
    low = epsilon / num_queries
    high = 1.0
    while pure_epsilon(high, num_queries, delta) <= epsilon:
        high *= 2

    def left(epsilon_0: float) -> float:
        return epsilon - pure_epsilon(epsilon_0, num_queries, delta)

    # Rounded down, for the same reason as `pure_epsilon` is rounded up.
    return _root(left, low / 2, high) / _ABOVE


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Returns where a function is 0; it has other signs at the two ends."""
    solver: Any = optimize
    root = solver.brentq(function, low, high, rtol=1e-12)
    return float(root)


def confident_gnmax_rdp(
    counts: npt.NDArray[Any],
    is_answered: npt.NDArray[np.bool_],
    threshold: float,
    threshold_std: float,
    answer_std: float,
) -> Floats:
    """Returns what G-PATE's accountant charges for queries, at `GNMAX_ORDERS`.

    Privacy: reads private data (the votes); output private.

    Args:
        counts: votes for each bin, shape (queries, bins).
        is_answered: which queries passed the noisy threshold, shape (queries,).
        threshold: votes that the bin at the top needs.
        threshold_std: s_t.
        answer_std: s_a.

    Returns:
        RDP, shape (orders,), summed over the queries.

    Source: Papernot et al. 2018, Algorithm 1; G-PATE `gnmax_thresh_aggregator`.
    """
    highest = counts.max(axis=1)
    above = (highest - threshold) / threshold_std
    log_passed = log_ndtr(above)
    log_failed = log_one_minus_exp(log_passed)
    log_rarer = np.minimum(log_passed, log_failed)
    # The count at the top moves by 1 where a histogram moves by sqrt 2.
    checked = gnmax_rdp(log_rarer, math.sqrt(2) * threshold_std)
    log_q = log_pr_not_plurality(counts[is_answered], answer_std)
    answered = gnmax_rdp(log_q, answer_std)
    return checked.sum(axis=0) + answered.sum(axis=0)


def log_pr_not_plurality(counts: npt.NDArray[Any], noise_std: float) -> Floats:
    """Bounds log q, the chance that GNMax answers not the plurality.

    Privacy: reads private data; output private.

    Args:
        counts: shape (queries, bins), at least two bins.
        noise_std: the standard deviation of the noise in each count.

    Source: Papernot et al. 2018, Proposition 7.
    """
    ordered = np.sort(counts, axis=1)
    top = ordered[:, -1:]
    others = ordered[:, :-1]
    gaps = top - others
    # The difference of two noisy counts has sqrt 2 times the noise of one.
    gap_std = math.sqrt(2) * noise_std
    log_beaten = log_ndtr(-gaps / gap_std)
    # A union bound over the other bins.
    log_q = np.asarray(logsumexp(log_beaten, axis=1), np.float64)
    # The plurality is answered at least as often as any other bin.
    num_bins = counts.shape[1]
    largest = math.log1p(-1 / num_bins)
    return np.minimum(log_q, largest)


def gnmax_rdp(log_q: Floats, noise_std: float) -> Floats:
    """Returns the data-dependent RDP of GNMax, never above order / noise_std^2.

    Privacy: reads private data (through q); output private.

    Args:
        log_q: shape (queries,), below 0.
        noise_std: the standard deviation of the noise in each count.

    Returns:
        Shape (queries, orders), at `GNMAX_ORDERS`.

    Source: Papernot et al. 2018, Theorem 6, with the orders of Proposition 10.
    """
    log_q = log_q[:, None]
    orders = GNMAX_ORDERS  # lambda
    variance = noise_std**2
    order_2 = noise_std * np.sqrt(-log_q)  # mu_2
    order_1 = order_2 + 1  # mu_1
    rdp_1 = order_1 / variance  # epsilon_1
    rdp_2 = order_2 / variance  # epsilon_2
    less_1 = order_1 - 1
    less_2 = order_2 - 1
    with np.errstate(all="ignore"):  # what the conditions exclude
        factor_1 = np.log(order_1 / less_1)
        factor_2 = np.log(order_2 / less_2)
        factors = factor_1 + factor_2
        highest_log_q = less_2 * rdp_2 - order_2 * factors
        applies = order_1 > orders
        applies = applies & (order_2 > 1)
        applies &= -log_q > rdp_2
        applies &= log_q <= highest_log_q
        # Theorem 6, with A and B by their logarithms.
        log_p = log_one_minus_exp(log_q)
        exponent = (log_q + rdp_2) * (1 - 1 / order_2)
        below = log_one_minus_exp(exponent)
        power = orders - 1
        log_a = power * (log_p - below)
        log_b = power * (rdp_1 - log_q / less_1)
        log_moment = np.logaddexp(log_p + log_a, log_q + log_b)
        dependent = log_moment / power
    independent = np.broadcast_to(orders / variance, applies.shape)
    smaller = np.minimum(dependent, independent)
    return np.where(applies, smaller, independent)


def log_one_minus_exp(log_p: Floats) -> Floats:
    """Returns log(1 - e^x) for x <= 0, accurate at both ends."""
    is_small = log_p < -math.log(2)
    with np.errstate(divide="ignore", invalid="ignore"):
        where_small = np.log1p(-np.exp(log_p))
        where_large = np.log(-np.expm1(log_p))
    return np.where(is_small, where_small, where_large)


def rdp_epsilon(rdp: Floats, delta: float) -> float:
    """Returns epsilon as G-PATE's accountant does: min rdp + log(1/delta)/(order - 1).

    Source: Mironov, "Renyi differential privacy", CSF 2017, Proposition 3.
    """
    log_delta = math.log(delta)
    by_order = rdp - log_delta / (GNMAX_ORDERS - 1)
    return float(by_order.min())


def laplace_moments(
    gaps: npt.NDArray[Any],
    inverse_scale: float,
    needs_condition: bool,
) -> Floats:
    """Returns what PATE-GAN's accountant charges for queries, at moments 1 to 20.

    Privacy: reads private data (the votes); output private. Of no queries, and of
    `gaps` = 0 with the condition, it is public.

    Args:
        gaps: |n0 - n1| of each query, shape (queries,).
        inverse_scale: lambda; both counts get noise of scale 1 / lambda.
        needs_condition: the data-dependent branch is taken only where its theorem
            allows it; else as the public code does, which never asks: at lambda = 1
            it charges 1.28 for the first moment of a tie, where 4 is what holds; 0.43
            at a gap of one vote, where 0.70 is lost; and at a gap of two it divides
            by zero.

    Returns:
        Shape (20,), summed over the queries.

    Source: Papernot et al. 2017, Theorem 3 and Lemma 4; Jordon et al., "PATE-GAN",
        ICLR 2019, Algorithm 1; reference `pate_gan.py`.
    """
    moments = np.arange(1.0, NUM_MOMENTS + 1)  # l
    gaps = np.asarray(gaps, np.float64)[:, None]
    scaled = inverse_scale * gaps
    # The chance that noise makes the smaller count the larger one.
    q = (2 + scaled) * np.exp(-scaled) / 4
    p = 1 - q
    independent = 2 * inverse_scale**2 * moments * (moments + 1)
    # Where the theorem does not hold its formula may be no number: that is not used.
    with np.errstate(all="ignore"):
        growth = np.exp(2 * inverse_scale)  # e^(2 lambda)
        ratio = p / (1 - q * growth)
        kept = p * ratio**moments
        flipped = q * growth**moments
        dependent = np.log(kept + flipped)
    applies = np.isfinite(dependent)
    if needs_condition:
        applies &= q < 1 / (growth + 1)  # (g - 1) / (g^2 - 1)
    smaller = np.minimum(dependent, independent)
    charged = np.where(applies, smaller, independent)
    return charged.sum(axis=0)


def moments_epsilon(moments: Floats, delta: float) -> float:
    """Returns epsilon as PATE-GAN's accountant does: min (moment + log(1/delta)) / l.

    Source: Abadi et al., "Deep learning with differential privacy", 2016, Theorem 2.
    """
    orders = np.arange(1.0, NUM_MOMENTS + 1)
    log_delta = math.log(delta)
    by_order = (moments - log_delta) / orders
    return float(by_order.min())
