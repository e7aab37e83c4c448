"""In which classes the pictures of two cohorts differ most, whatever the cause."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgs.diagnosis import permutation
from fedgs.diagnosis.products import alike, are_seen, over_classes, products


@dataclass(frozen=True)
class Difference:
    """How far the cohorts are apart in one class.

    Attributes:
        label: of the class.
        distance: of the cohorts' means; 1 is as far as the pictures of one group are
            from their mean. None where one of the cohorts lacks the class.
    """

    label: int
    distance: float | None


def differences(
    means: NDArray[np.float64],
    is_known: NDArray[np.bool_],
    rows: NDArray[np.bool_],
) -> tuple[Difference, ...]:
    """Returns how far the cohorts are apart in every class, largest first.

    Privacy: post-processing of DP output.

    Args:
        means: of all groups, shape (number of groups, number of classes, d); see
            `fedgs.diagnosis.catalogue.CohortSamples`.
        is_known: which classes each group has, shape (number of groups, number of
            classes).
        rows: the first one tells which groups are suspicious.
    """
    suspicious = rows[:1]
    healthy = ~suspicious
    found: list[Difference] = []
    for label, known in enumerate(is_known.T):
        distance = None
        if are_seen(healthy & known).all() and are_seen(suspicious & known).all():
            own = means[:, [label]]
            gram = products(own, own, alike(known[:, None]))
            (squared,) = over_classes(
                gram, healthy, suspicious, permutation.squared_distance
            )
            # An estimate without bias: below 0 where the cohorts are alike.
            distance = math.sqrt(max(0.0, squared))
        found.append(Difference(label, distance))
    return tuple(sorted(found, key=_nearest_last))


def _nearest_last(difference: Difference) -> float:
    if difference.distance is None:
        return math.inf
    return -difference.distance
