"""Where the samples of two cohorts differ most, whatever the cause."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgs.diagnosis import permutation


@dataclass(frozen=True)
class Difference:
    """How far the cohorts are apart in one class, or in one feature of the images.

    Attributes:
        of: class or feature.
        name: the label, or the feature of `group_features.image_features`.
        distance: of the cohorts' means; 1 is as far as two images of one group are
            from their mean.
    """

    of: str
    name: str
    distance: float


def differences(
    features: dict[str, NDArray[np.float64]], rows: NDArray[np.bool_]
) -> tuple[Difference, ...]:
    """Returns where the cohorts differ: classes, then features, largest first.

    Privacy: post-processing of DP output.

    Args:
        features: name to the class means of all groups, scaled, shape (number of
            groups, number of classes, d).
        rows: the first one tells which groups are suspicious.
    """
    grams = {
        name: np.einsum("gkd,hkd->kgh", means, means)
        for name, means in features.items()
    }
    by_class = np.sum(list(grams.values()), axis=0)
    truth = rows[:1]

    def distance(gram: NDArray[np.float64]) -> float:
        return float(permutation.distances(gram, truth)[0])

    found = [
        Difference(of="class", name=str(label), distance=distance(gram))
        for label, gram in enumerate(by_class)
    ]
    found += [
        Difference(of="feature", name=name, distance=distance(gram.mean(0)))
        for name, gram in grams.items()
    ]
    return tuple(sorted(found, key=lambda d: (d.of, -d.distance)))
