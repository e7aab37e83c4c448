"""Inner products of groups, of which some may lack classes.

What is compared of two cohorts is a sum over classes. A class counts if both cohorts
have it: of a class that one of them lacks, nothing says how its images look there. So a
matrix of inner products is kept in parts, one for all classes that the same groups
have; where no group lacks a class there is one part.

Privacy: post-processing of DP output.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = NDArray[np.bool_]
Statistic = Callable[[Array, Rows, Rows], Array]
FEWEST = 2  # groups of a cohort that have a class: products are of different groups


class Part(NamedTuple):
    """Some classes' share of the inner products.

    Attributes:
        is_known: which groups have these classes, shape (number of groups,).
        is_told: which of them tell how these classes would look with a bug.
        matrix: the products, shape (number of groups, number of groups).
    """

    is_known: NDArray[np.bool_]
    is_told: NDArray[np.bool_]
    matrix: Array


Products = tuple[Part, ...]


class Alike(NamedTuple):
    """Classes that the same groups have, and that the same groups tell of.

    Attributes:
        is_known: as of `Part`.
        is_told: likewise.
        classes: which classes, shape (number of classes,).
    """

    is_known: NDArray[np.bool_]
    is_told: NDArray[np.bool_]
    classes: NDArray[np.bool_]


def alike(
    is_known: NDArray[np.bool_],
    is_told: NDArray[np.bool_] | None = None,
) -> list[Alike]:
    """Returns the classes in sets of which each is known to the same groups.

    Privacy: post-processing of DP output.

    Args:
        is_known: which classes each group has, shape (groups, classes).
        is_told: of which of them it tells how they would look with a bug; of all if
            None.
    """
    if is_told is None:
        is_told = is_known
    both = np.concatenate([is_known, is_told])
    found: list[Alike] = []
    for pattern in np.unique(both, axis=1).T:
        classes = (both == pattern[:, None]).all(axis=0)
        known, told = np.split(pattern, 2)
        found.append(Alike(known, told, classes))
    return found


def products(one: Array, other: Array, sets: Sequence[Alike]) -> Products:
    """Returns the inner products of groups, a part for each set of classes.

    Privacy: post-processing of DP output.

    Args:
        one: a vector for each group and class, shape (groups, classes, d).
        other: likewise.
        sets: what `alike` returned.
    """
    parts: list[Part] = []
    for own in sets:
        rows = one[:, own.classes].reshape(len(one), -1)
        columns = other[:, own.classes].reshape(len(other), -1)
        parts.append(Part(own.is_known, own.is_told, rows @ columns.T))
    return tuple(parts)


def over_classes(
    parts: Products,
    rows: Rows,
    others: Rows,
    statistic: Statistic,
) -> Array:
    """Returns the sum of a statistic over the classes that both cohorts have.

    Whether a class counts is asked of every split anew, so all splits are treated
    alike, and a permutation test stays exact.

    Privacy: post-processing of DP output.

    Args:
        parts: what `products` returned.
        rows: the groups of one cohort, for every split, shape (n, groups).
        others: likewise of the other one, which tells how a bug would look.
        statistic: of a part's matrix, and of the groups of either cohort that have its
            classes; shape (n,).

    Returns:
        Shape (n,): 0 where the cohorts have no class in common.
    """
    total = np.zeros(len(rows))
    for part in parts:
        own = rows & part.is_known
        of_others = others & part.is_told
        is_compared = are_seen(own) & are_seen(of_others)
        found = statistic(part.matrix, own[is_compared], of_others[is_compared])
        total[is_compared] += found
    return total


def are_seen(rows: Rows) -> NDArray[np.bool_]:
    """Tells for every split whether enough groups of a cohort have some classes."""
    return rows.sum(1) >= FEWEST
