"""In which classes the pictures of two cohorts differ most, whatever the cause."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgs.diagnosis import permutation


@dataclass(frozen=True)
class Difference:
    """How far the cohorts are apart in one class.

    Attributes:
        label: of the class.
        distance: of the cohorts' means; 1 is as far as the pictures of one group are
            from their mean.
    """

    label: int
    distance: float


def differences(
    means: NDArray[np.float64],
    rows: NDArray[np.bool_],
) -> tuple[Difference, ...]:
    """Returns how far the cohorts are apart in every class, largest first.

    Privacy: post-processing of DP output.

    Args:
        means: of all groups, shape (number of groups, number of classes, d); see
            `fedgs.diagnosis.catalogue.CohortSamples`.
        rows: the first one tells which groups are suspicious.
    """
    grams = np.einsum("gkd,hkd->kgh", means, means)
    found = [
        Difference(label, float(permutation.distances(gram, rows[:1])[0]))
        for label, gram in enumerate(grams)
    ]
    return tuple(sorted(found, key=lambda difference: -difference.distance))
