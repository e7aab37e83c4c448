"""How large the differences between two cohorts' samples are, whatever their cause."""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedgs.diagnosis import group_features, permutation

Array = NDArray[np.float64]
Groups = NDArray[np.int64]  # their numbers


@dataclass(frozen=True)
class Effect:
    """A measured difference of the cohorts, in its own unit, and its interval."""

    name: str
    unit: str
    healthy: float | None
    suspicious: float | None
    difference: float
    interval: tuple[float, float] | None
    per_group: dict[str, list[float]] | None


@dataclass(frozen=True)
class TwoSample:
    """A two-sample statistic between the cohorts; p of the permutation of groups."""

    name: str
    value: float
    p: float
    words: str


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


def differences(features: dict[str, Array]) -> tuple[Difference, ...]:
    """Returns where the cohorts differ: classes, then features, largest first.

    Privacy: post-processing of DP output.

    Args:
        features: name to the class means of all 2G groups, scaled, shape (2G, number
            of classes, d); healthy groups first.
    """
    by_feature = {name: _by_class(values) for name, values in features.items()}
    by_class = np.sum(list(by_feature.values()), axis=0)
    rows = [("class", str(k), value) for k, value in enumerate(by_class)]
    rows += [("feature", name, v.mean()) for name, v in by_feature.items()]
    found = [Difference(of, n, math.sqrt(max(0.0, float(v)))) for of, n, v in rows]
    return tuple(sorted(found, key=lambda d: (d.of, -d.distance)))


def _by_class(values: Array) -> Array:
    """Returns the squared distance of the cohorts' means in every class."""
    return np.array(
        [
            _squared_distance(one @ one.T, *np.split(np.arange(len(one)), 2))
            for one in np.swapaxes(values, 0, 1)
        ]
    )


def effects(
    intensity: list[Array],
    orientation: list[Array],
    class_shares: Array,
    confidence: float,
) -> tuple[Effect, ...]:
    """Returns the effects on pixel intensity, orientation and class balance.

    Privacy: post-processing of DP output.

    Args:
        intensity: `group_features.intensity` of each of 2G groups, healthy ones first.
        orientation: likewise.
        class_shares: `group_features.class_shares` of all groups.
        confidence: of the intervals.
    """
    means = np.array([(1 - v[0]) / 2 for v in intensity])
    direction = np.stack(orientation)
    count = len(means) // 2
    healthy = np.arange(count)
    along = np.array([_projected(direction, i, healthy) for i in range(2 * count)])
    measured: list[tuple[str, str, Array | None, permutation.Statistic]] = [
        ("pixel intensity", "mean pixel, 0 to 1", means, partial(_difference, means)),
        (
            "orientation",
            "strokes along the healthy cohort's direction, -1 to 1",
            along,
            partial(_difference_along, direction),
        ),
        (
            "class balance",
            "squared distance of the shares of images that look like each class, "
            "less what noise alone makes",
            None,
            partial(_squared_distance, class_shares @ class_shares.T),
        ),
    ]
    rows: list[Effect] = []
    for name, unit, values, statistic in measured:
        cohorts = [] if values is None else values.reshape(2, count).tolist()
        names = list[str](("healthy", "suspicious"))
        per_group = dict(zip(names, cohorts, strict=False))
        one, other = [float(np.mean(groups)) for groups in cohorts] or [None, None]
        gap, interval = permutation.jackknife(statistic, count, confidence)
        rows.append(Effect(name, unit, one, other, gap, interval, per_group or None))
    return tuple(rows)


def _difference(values: Array, healthy: Groups, suspicious: Groups) -> float:
    return float(values[suspicious].mean() - values[healthy].mean())


def _difference_along(direction: Array, healthy: Groups, suspicious: Groups) -> float:
    """Returns the difference along the axis of the healthy groups that are given."""
    one, other = (
        np.mean([_projected(direction, int(i), healthy) for i in groups])
        for groups in (suspicious, healthy)
    )
    return float(one - other)


def _squared_distance(gram: Array, healthy: Groups, suspicious: Groups) -> float:
    """Returns the squared distance of the cohorts' means, without bias.

    Inner products of different groups only: 0 on average where the cohorts are alike.
    """
    within = sum(permutation.within(gram, g) for g in (healthy, suspicious))
    return float(within - 2 * gram[np.ix_(healthy, suspicious)].mean())


def _projected(direction: Array, group: int, healthy: Groups) -> float:
    """Returns a group's strokes along the mean of the healthy groups but itself."""
    axis = direction[healthy[healthy != group]].mean(0)
    return float(direction[group] @ axis / max(float(np.linalg.norm(axis)), 1e-12))


def two_sample(
    distances: Array, components: list[Array], rows: NDArray[np.bool_]
) -> tuple[TwoSample, ...]:
    """Returns MMD and the classifier two-sample test, with p-values of the splits.

    Privacy: post-processing of DP output.

    Args:
        distances: of the mean kernels, for every split.
        components: `group_features.principal_components` of all groups.
        rows: of `permutation.splits`.
    """
    accuracies = group_features.classifier_accuracies(components, rows)
    return (
        TwoSample(
            "MMD",
            float(distances[0]),
            permutation.p_value(distances),
            "Gaussian kernel, between the cohorts less within; 0 is no difference",
        ),
        TwoSample(
            "classifier two-sample test",
            float(accuracies[0]),
            permutation.p_value(accuracies),
            "accuracy of a linear classifier on groups that it did not see; 0.5 is no "
            "difference",
        ),
    )
