"""How large the differences between two cohorts' samples are, whatever their cause."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgs.diagnosis import group_features, permutation

Array = NDArray[np.float64]


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
    return (
        _mean_effect("pixel intensity", "mean pixel, 0 to 1", means, confidence),
        _mean_effect(
            "orientation",
            "strokes along the healthy cohort's direction, -1 to 1",
            along,
            confidence,
            _orientation_difference(direction),
        ),
        Effect(
            "class balance",
            "squared distance of the shares of images that look like each class, "
            "less what noise alone makes",
            None,
            None,
            *permutation.jackknife(_squared_distance(class_shares), count, confidence),
            None,
        ),
    )


def _orientation_difference(direction: Array) -> permutation.Statistic:
    """Returns the difference along the axis of the healthy groups that are given."""

    def of(healthy: NDArray[np.int64], suspicious: NDArray[np.int64]) -> float:
        one, other = (
            np.mean([_projected(direction, int(i), healthy) for i in groups])
            for groups in (suspicious, healthy)
        )
        return float(one - other)

    return of


def _squared_distance(features: Array) -> permutation.Statistic:
    """Returns the squared distance of the cohorts' means, without bias.

    Inner products of different groups only: 0 on average where the cohorts are alike.
    """
    gram = features @ features.T

    def of(healthy: NDArray[np.int64], suspicious: NDArray[np.int64]) -> float:
        within = sum(permutation.within(gram, g) for g in (healthy, suspicious))
        return float(within - 2 * gram[np.ix_(healthy, suspicious)].mean())

    return of


def _projected(direction: Array, group: int, healthy: NDArray[np.int64]) -> float:
    """Returns a group's strokes along the mean of the healthy groups but itself."""
    axis = direction[healthy[healthy != group]].mean(0)
    return float(direction[group] @ axis / max(float(np.linalg.norm(axis)), 1e-12))


def _mean_effect(
    name: str,
    unit: str,
    values: Array,
    confidence: float,
    statistic: permutation.Statistic | None = None,
) -> Effect:
    """Returns the effect on a number of each group; by default of their means."""
    count = len(values) // 2
    statistic = statistic or (lambda h, s: float(values[s].mean() - values[h].mean()))
    difference, interval = permutation.jackknife(statistic, count, confidence)
    healthy, suspicious = values[:count], values[count:]
    return Effect(
        name,
        unit,
        float(healthy.mean()),
        float(suspicious.mean()),
        difference,
        interval,
        {"healthy": healthy.tolist(), "suspicious": suspicious.tolist()},
    )


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
