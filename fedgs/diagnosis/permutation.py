"""Exact permutation tests and jackknife intervals for a few groups of two cohorts.

G groups are suspicious and H are healthy. If their statistics are exchangeable, every
way to call G of them suspicious is equally probable. A statistic takes C(H + G, G)
values, one for each split, and p is the share of splits whose value is at least that of
the true one. There is no approximation: p is never below 1 / C(H + G, G), 1/495 for 4
against 8 groups. Of two cohorts of G a statistic does not tell which is which, so a
split and its mirror image count once: 1/35 for G = 4.

Where there are more than `MOST_SPLITS`, the true one and random ones are compared (a
Monte Carlo test). That is exact too, over the draw of the splits, because the true one
counts; the draw does not look at the samples.

Source: Phipson and Smyth, "Permutation p-values should never be zero", 2010; Marcus,
Peritz and Gabriel, "On closed testing procedures", Biometrika 1976; Efron and Stein,
"The jackknife estimate of variance", 1981; Welch, "The generalization of Student's
problem when several different population variances are involved", Biometrika 1947.
"""

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import special

from fedgs.diagnosis.rule import INTERVAL_CONFIDENCE
from fedgs.randomness import stream

Array = NDArray[np.float64]
Rows = NDArray[np.bool_]  # which groups are in a cohort, shape (n, number of groups)
Statistic = Callable[..., Array]  # of the rows of every cohort, shape (n,)
MOST_SPLITS = 5000
_TIE = 1e-12  # sums of the same numbers in another order


def splits(num_suspicious: int, num_healthy: int | None = None) -> Rows:
    """Returns all ways to split groups into two cohorts; of very many random ones.

    Args:
        num_suspicious: G, at least 2.
        num_healthy: H, at least 2; G if None.

    Returns:
        Shape (number of splits, H + G): True is suspicious. The first row is the true
        one: the last G groups. Of two cohorts of G group 0 never is suspicious, so that
        a split and its mirror image count once. Of more than `MOST_SPLITS` the true one
        and random ones, always the same; a random one may be there twice.

    >>> splits(2).astype(int)
    array([[0, 0, 1, 1],
           [0, 1, 0, 1],
           [0, 1, 1, 0]])
    >>> splits(4, 8).shape, splits(4, 16).shape
    ((495, 12), (4845, 20))
    """
    num_healthy = num_healthy or num_suspicious
    total = num_healthy + num_suspicious
    if _count(num_suspicious, num_healthy) > MOST_SPLITS:
        # Whose place in a random order is below G is suspicious.
        found = _random_orders(total) < num_suspicious
        # The true one counts, so p is never 0.
        found[0] = np.arange(total) >= num_healthy
        return found
    first = 0
    if num_healthy == num_suspicious:
        first = 1  # else a split and its mirror image would be two
    chosen = list(itertools.combinations(range(first, total), num_suspicious))
    found = np.zeros((len(chosen), total), bool)
    # In reverse, so that the last groups, which are suspicious, come first.
    for row, groups in zip(found, reversed(chosen), strict=True):
        row[list(groups)] = True
    return found


def arrangements(num_sites: int, num_groups: int) -> NDArray[np.int64]:
    """Returns ways to put all groups into sites of G; of more than two random ones.

    Args:
        num_sites: R, at least 2.
        num_groups: G of each site, at least 2.

    Returns:
        The site of every group, shape (number of arrangements, R G). The first row is
        the true one, site by site. Of two sites all `splits`; else `MOST_SPLITS`.

    >>> arrangements(2, 2)[0], arrangements(3, 4).shape
    (array([0, 0, 1, 1]), (5000, 12))
    """
    if num_sites == 2:
        return splits(num_groups).astype(np.int64)
    found = _random_orders(num_sites * num_groups) // num_groups
    found[0] = np.repeat(np.arange(num_sites), num_groups)
    return found


def _random_orders(num_groups: int) -> NDArray[np.int64]:
    """Returns `MOST_SPLITS` random orders of all groups, always the same."""
    rng = stream(0, "permutation/splits")
    # The order of random numbers is a random order of the groups.
    return rng.random((MOST_SPLITS, num_groups)).argsort(axis=1)


def _count(num_suspicious: int, num_healthy: int) -> int:
    """Returns the number of all splits, mirror images once."""
    every_way = math.comb(num_healthy + num_suspicious, num_suspicious)
    if num_healthy == num_suspicious:
        return every_way // 2
    return every_way


def attainable_p(num_suspicious: int, num_healthy: int | None = None) -> float:
    """Returns the least p-value that so many groups can give; see `splits`.

    >>> [round(attainable_p(g), 4) for g in (3, 4, 5)]
    [0.1, 0.0286, 0.0079]
    >>> round(attainable_p(4, 8), 4)
    0.002
    """
    count = _count(num_suspicious, num_healthy or num_suspicious)
    return 1 / min(count, MOST_SPLITS)


def between(gram: Array, rows: Rows, others: Rows) -> Array:
    """Returns the mean of a matrix over the pairs of a group of each cohort.

    Privacy: post-processing of DP output.

    Args:
        gram: shape (number of groups, number of groups).
        rows: the groups that are the first of a pair.
        others: likewise the second; no group is in both.

    Returns:
        Shape (number of rows,).
    """
    over_rows = _mean(rows) @ gram
    return np.einsum("si,si->s", over_rows, _mean(others))


def _mean(rows: Rows) -> Array:
    """Returns the weights by which each row takes the mean of its groups."""
    return rows / rows.sum(1, keepdims=True)


def within(gram: Array, rows: Rows) -> Array:
    """Returns the mean of a matrix over the pairs of different groups of each row.

    Privacy: post-processing of DP output.
    """
    chosen = rows.astype(np.float64)
    of_all_pairs = np.einsum("si,si->s", chosen @ gram, chosen)
    of_same_groups = chosen @ np.diag(gram)
    total = of_all_pairs - of_same_groups
    count = rows.sum(1)
    num_pairs = count * (count - 1)
    return total / num_pairs


def squared_distance(gram: Array, healthy: Rows, suspicious: Rows) -> Array:
    """Returns |mean - mean|^2 of two cohorts, without bias: it may be below 0.

    The mean inner product within the cohorts less that between them, twice, over pairs
    of different groups: how much groups vary adds nothing.

    Privacy: post-processing of DP output.

    Args:
        gram: inner products of the groups' features; the diagonal does not count.
        healthy: the groups of one cohort, at least 2 of each row.
        suspicious: likewise; a group can be in neither.

    Returns:
        Shape (number of rows,).
    """
    of_healthy = within(gram, healthy)
    of_suspicious = within(gram, suspicious)
    of_both = between(gram, healthy, suspicious)
    return of_healthy + of_suspicious - 2 * of_both


def p_value(values: Array) -> float:
    """Returns the share of splits whose statistic is at least the first one's.

    Privacy: post-processing of DP output.

    >>> p_value(np.array([3.0, 1.0, 3.0, 2.0]))
    0.5
    """
    true_one = values[0]
    tolerance = _TIE * max(1.0, abs(true_one))
    is_tied_or_above = values >= true_one - tolerance
    return float(np.mean(is_tied_or_above))


def closed_test(statistics: Mapping[str, Array]) -> dict[str, float]:
    """Returns p-values adjusted for the number of hypotheses, by closed testing.

    Every set of hypotheses is tested by the maximum of its statistics; a hypothesis is
    rejected if all sets with it are. So the probability to reject any true hypothesis
    is at most alpha, whichever of them are true, if the groups are exchangeable in all
    features together whose hypotheses are true (not only in each). One omnibus test at
    1/35 is enough where a correction by Holm would ask for 1/70 of G = 4.

    Privacy: post-processing of DP output.

    Args:
        statistics: name to the statistic of every split, on one common scale.

    >>> closed_test({"a": np.array([9.0, 1, 2]), "b": np.array([1.0, 4, 0])})
    {'a': 0.3333333333333333, 'b': 0.6666666666666666}
    """
    found = dict.fromkeys(statistics, 0.0)
    for size in range(1, len(statistics) + 1):
        for names in itertools.combinations(statistics, size):
            own = [statistics[name] for name in names]
            largest = np.max(own, axis=0)
            p = p_value(largest)
            for name in names:
                found[name] = max(found[name], p)
    return found


def jackknife(
    statistic: Statistic,
    cohorts: NDArray[np.int64],
    confidence: float,
) -> tuple[float, tuple[float, float] | None]:
    """Returns a statistic of two cohorts or more and its confidence interval.

    Leaves out one group at a time; the variances of the cohorts add up. Student's t
    with Welch's degrees of freedom: of two cohorts of G groups G - 1 where one alone
    varies, 2 G - 2 where both vary alike.

    Privacy: post-processing of DP output.

    Args:
        statistic: of the rows of each cohort, in order; NaN where it is not defined.
        cohorts: the cohort of every group, from 0, shape (number of groups,); each has
            at least 3.
        confidence: above 0 and below 1.

    Returns:
        The statistic of all groups, and the interval; None if it is not defined
        everywhere.

    >>> values = np.array([1.0, 2, 3, 11, 12, 13])
    >>> def mean(rows):
    ...     return rows @ values / rows.sum(1)
    >>> cohorts = np.array([0, 0, 0, 1, 1, 1])
    >>> found = jackknife(lambda h, s: mean(s) - mean(h), cohorts, 0.95)
    >>> found[0], [round(limit, 2) for limit in found[1]]
    (10.0, [7.73, 12.27])
    """
    everyone = np.ones(len(cohorts), bool)
    without_one = ~np.eye(len(cohorts), dtype=bool)
    kept = np.vstack([everyone, without_one])
    sizes = np.bincount(cohorts)
    members = [cohorts == number for number in range(len(sizes))]
    of_cohorts = [kept & own for own in members]
    values = statistic(*of_cohorts)
    estimate = float(values[0])
    without = values[1:]  # each group
    spread = np.array([np.var(without[own]) for own in members])
    degrees = sizes - 1  # of freedom, of each cohort
    # Efron and Stein: (G - 1) / G times the sum of squares, for each cohort.
    variances = spread * degrees
    variance = float(variances.sum())
    if not math.isfinite(estimate + variance):
        return estimate, None
    # Welch: (sum of variances)^2 / sum of (variance^2 / degrees).
    squares = float((variances**2 / degrees).sum())
    squares = max(squares, np.finfo(float).tiny)
    # Not less than if the smallest cohort alone varied.
    freedom = max(float(degrees.min()), variance**2 / squares)
    quantile = special.stdtrit(freedom, (1 + confidence) / 2)
    width = quantile * math.sqrt(variance)
    low = float(estimate - width)
    high = float(estimate + width)
    return estimate, (low, high)


def is_above_zero(statistic: Statistic, cohorts: NDArray[np.int64]) -> bool:
    """Tells whether a statistic is above 0, with confidence; see `jackknife`.

    Privacy: post-processing of DP output.
    """
    # Only the lower limit is asked for, so the whole error may be on that side.
    confidence = 2 * INTERVAL_CONFIDENCE - 1
    _, interval = jackknife(statistic, cohorts, confidence)
    return interval is not None and interval[0] > 0
