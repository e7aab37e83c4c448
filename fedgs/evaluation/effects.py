"""How large the differences between two cohorts' samples are, whatever their cause."""

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgs.evaluation import group_features, permutation

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
    # One number per group: its strokes along the mean direction of the healthy groups,
    # leaving out itself.
    along = np.array(
        [
            _projected(direction, i, [j for j in range(count) if j != i])
            for i in range(2 * count)
        ]
    )
    return (
        _mean_effect("pixel intensity", "mean pixel, 0 to 1", means, confidence),
        _mean_effect(
            "orientation",
            "strokes along the healthy cohort's direction, -1 to 1",
            along,
            confidence,
        ),
        _effect(
            "class balance",
            "share of images that look like another class's, total variation",
            lambda h, s: float(
                np.abs(class_shares[s].mean(0) - class_shares[h].mean(0)).sum() / 2
            ),
            count,
            confidence,
        ),
    )


def _projected(direction: Array, group: int, healthy: list[int]) -> float:
    axis = direction[healthy].mean(0)
    return float(direction[group] @ axis / max(float(np.linalg.norm(axis)), 1e-12))


def _mean_effect(name: str, unit: str, values: Array, confidence: float) -> Effect:
    count = len(values) // 2
    found = _effect(
        name,
        unit,
        lambda h, s: float(values[s].mean() - values[h].mean()),
        count,
        confidence,
    )
    return dataclasses.replace(
        found,
        healthy=float(values[:count].mean()),
        suspicious=float(values[count:].mean()),
        per_group={
            "healthy": values[:count].tolist(),
            "suspicious": values[count:].tolist(),
        },
    )


def _effect(
    name: str,
    unit: str,
    statistic: permutation.Statistic,
    count: int,
    confidence: float,
) -> Effect:
    difference, interval = permutation.jackknife(statistic, count, confidence)
    return Effect(name, unit, None, None, difference, interval, None)


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
