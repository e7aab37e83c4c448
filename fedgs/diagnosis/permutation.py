"""Exact permutation tests and jackknife intervals for a few groups of two cohorts.

2 G groups, G of each cohort. If their statistics are exchangeable, every way to call G
of them suspicious is equally probable. A statistic that does not tell the cohorts apart
takes C(2G, G) / 2 values, one for each split, and p is the share of splits whose value
is at least that of the true one. There is no approximation: p is never below
2 / C(2G, G), 1/35 for G = 4.

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
from scipy import stats

Array = NDArray[np.float64]
Rows = NDArray[np.bool_]  # which groups are in a cohort, shape (n, 2G)
Statistic = Callable[[Rows, Rows], Array]  # of n pairs of cohorts, shape (n,)
_TIE = 1e-12  # sums of the same numbers in another order


def splits(num_groups: int) -> NDArray[np.bool_]:
    """Returns all ways to split 2 G groups into two cohorts of G.

    Args:
        num_groups: G, at least 2.

    Returns:
        Shape (C(2G, G) / 2, 2G): True is suspicious. Group 0 never is, so that a split
        and its mirror image count once. The first row is the true one: groups G to
        2G - 1.

    >>> splits(2).astype(int)
    array([[0, 0, 1, 1],
           [0, 1, 0, 1],
           [0, 1, 1, 0]])
    """
    chosen = list(itertools.combinations(range(1, 2 * num_groups), num_groups))
    found = np.zeros((len(chosen), 2 * num_groups), bool)
    # In reverse, so that the last groups, which are suspicious, come first.
    for row, groups in zip(found, reversed(chosen), strict=True):
        row[list(groups)] = True
    return found


def attainable_p(num_groups: int) -> float:
    """Returns the least p-value that G groups per cohort can give.

    >>> [round(attainable_p(g), 4) for g in (3, 4, 5)]
    [0.1, 0.0286, 0.0079]
    """
    return 2 / math.comb(2 * num_groups, num_groups)


def distances(gram: Array, rows: NDArray[np.bool_]) -> Array:
    """Returns the distance of the two cohorts' means for every split.

    The square is the mean inner product within the cohorts less that between them,
    twice, over pairs of different groups. So it estimates |mean - mean|^2 without the
    bias from how much groups vary; where that is below 0, the distance is 0.

    Privacy: post-processing of DP output.

    Args:
        gram: inner products of the groups' features, shape (2G, 2G); the diagonal is
            not read.
        rows: of `splits`.

    Returns:
        Shape (number of splits,), at least 0.
    """
    count = len(gram) // 2
    pairs = gram - np.diag(np.diag(gram))
    # With a sign of each cohort, pairs of one cohort add up and others are subtracted.
    signs = np.where(rows, 1.0, -1.0)
    difference = np.einsum("si,ij,sj->s", signs, pairs, signs)
    total = pairs.sum()
    within = (total + difference) / 2 / (2 * count * (count - 1))
    between = (total - difference) / 2 / (2 * count**2)
    squared = 2 * (within - between)
    return np.sqrt(np.maximum(0.0, squared))


def p_value(values: Array) -> float:
    """Returns the share of splits whose statistic is at least the first one's.

    Privacy: post-processing of DP output.

    >>> p_value(np.array([3.0, 1.0, 3.0, 2.0]))
    0.5
    """
    true_one = values[0]
    is_tied_or_above = values >= true_one - _TIE * max(1.0, abs(true_one))
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
            p = p_value(np.max([statistics[name] for name in names], axis=0))
            for name in names:
                found[name] = max(found[name], p)
    return found


def jackknife(
    statistic: Statistic, num_groups: int, confidence: float
) -> tuple[float, tuple[float, float] | None]:
    """Returns a statistic of two cohorts and its confidence interval.

    Leaves out one group at a time; the variances of both cohorts add up. Student's t
    with Welch's degrees of freedom: G - 1 where one cohort alone varies, 2 G - 2 where
    both vary alike.

    Privacy: post-processing of DP output.

    Args:
        statistic: of the healthy and of the suspicious groups; NaN where it is not
            defined.
        num_groups: G, at least 3.
        confidence: above 0 and below 1.

    Returns:
        The statistic of all groups, and the interval; None if it is not defined
        everywhere.

    >>> values = np.array([1.0, 2, 3, 11, 12, 13])
    >>> def mean(rows):
    ...     return rows @ values / rows.sum(1)
    >>> found = jackknife(lambda h, s: mean(s) - mean(h), 3, 0.95)
    >>> found[0], [round(limit, 2) for limit in found[1]]
    (10.0, [7.73, 12.27])
    """
    is_healthy = np.arange(2 * num_groups) < num_groups
    everyone = np.ones(2 * num_groups, bool)
    without_one = ~np.eye(2 * num_groups, dtype=bool)
    kept = np.vstack([everyone, without_one])
    estimate, *less = statistic(kept & is_healthy, kept & ~is_healthy).tolist()
    of_cohorts = [less[:num_groups], less[num_groups:]]
    parts = np.var(of_cohorts, axis=1) * (num_groups - 1)
    variance = float(parts.sum())
    if not math.isfinite(estimate + variance):
        return estimate, None
    # Welch: between G - 1, if one cohort alone varies, and 2 G - 2.
    squares = max(float(np.square(parts).sum()), np.finfo(float).tiny)
    freedom = max(1.0, variance**2 / squares) * (num_groups - 1)
    width = stats.t.ppf((1 + confidence) / 2, freedom) * math.sqrt(variance)
    return estimate, (float(estimate - width), float(estimate + width))
