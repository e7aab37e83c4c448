"""Which bug do the samples of two cohorts' generators show? With error rates.

Each cohort is split into G groups with a generator of its own; everything here is
computed from their samples. A bug is *named* if three checks agree:

1. **Exchangeability.** The cohorts' groups differ in the vector of this bug, by an
   exact permutation test, adjusted over all suspected bugs (`permutation.closed_test`).
2. **Size.** The share of spoilt images that would explain the difference is at least
   `min_effect`, with confidence: the lower limit of its interval is. Cohorts that were
   selected by accuracy differ in handwriting without any bug, so a significant
   difference alone says little. At 0.5 the vector has to point the other way: a cohort
   that merely shows less structure, for its generators learned less, never gets there.
3. **Distance.** The cohorts' vectors are as far apart as such a share of spoilt images
   moves a vector of `LEAST_LENGTH`. Where the vectors are shorter, as that of a mean
   pixel near 0.5, a little more ink would point them the other way.

A bug is *excluded* if the upper limit is below `min_effect` and the generators have
learned something from their data: the cohorts' strokes agree in direction, or oppose
each other, although their random starts have nothing in common. All else is
*undecided*.

The verdict is `none` only if all bugs are excluded and "any difference" is not
significant. `other` says that the cohorts differ although all bugs are excluded: not by
anything that is tested here.

Privacy: post-processing of DP output.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.diagnosis import group_features as features
from fedgs.diagnosis import permutation
from fedgs.diagnosis.effects import (
    Difference,
    Effect,
    TwoSample,
    differences,
    effects,
    two_sample,
)
from fedgs.diagnosis.rule import FEWEST_GROUPS, MOST_GROUPS, Rule
from fedgs.errors import raise_first
from fedgs.evaluation.images import LabelledImages
from fedgs.files import without_nan

Array = NDArray[np.float64]
INVERT, ROTATE, OTHER = "invert", "rotate", "other"
TITLES = {
    INVERT: "pixel inversion",
    ROTATE: "rotation by 90 degrees",
    OTHER: "any difference",
}
# Inverted and healthy digits have 0.7, rotated ones 0.2 to 0.3.
LEAST_LENGTH = {INVERT: 0.4, ROTATE: 0.2}
ONE_DATA_SET = "compare runs of one data set"
NAMED, EXCLUDED, UNDECIDED = "named", "excluded", "undecided"
DIFFERS, SAME = "differs", "no difference seen"


@dataclass(frozen=True)
class Suspect:
    """One suspected bug, or `other`.

    Attributes:
        bug: invert, rotate or other.
        p: of the exact permutation test.
        adjusted_p: for all suspects together.
        statistic: distance of the cohorts in this bug's vector, from 0 to about 1.
        effect: share of spoilt images; None for `other`, or not measurable.
        interval: of the effect.
        decision: named, excluded or undecided; of `other` differs or no difference
            seen.
    """

    bug: str
    p: float
    adjusted_p: float
    statistic: float
    effect: float | None
    interval: tuple[float, float] | None
    decision: str


@dataclass(frozen=True)
class Diagnosis:
    """A verdict and what it rests on; see the module.

    Attributes:
        verdict: invert, rotate, "invert and rotate", none, other or undecided.
        ranking: the suspects, likeliest first.
        effects: pixel intensity, orientation, class balance.
        two_sample: MMD and the classifier two-sample test.
        has_learned: whether the generators show structure of the data; see the module.
        num_splits: of the permutation test.
        rule: as asked for.
        differences: classes and features in which the cohorts differ most.
    """

    verdict: str
    ranking: tuple[Suspect, ...]
    effects: tuple[Effect, ...]
    two_sample: tuple[TwoSample, ...]
    has_learned: bool
    num_splits: int
    rule: Rule
    differences: tuple[Difference, ...] = ()

    @property
    def bugs(self) -> tuple[str, ...]:
        """The named bugs, likeliest first."""
        return tuple(s.bug for s in self.ranking if s.decision == NAMED)

    @property
    def false_positive_rate(self) -> float:
        """Probability to name any bug, at most, if the groups are exchangeable."""
        return math.floor(self.rule.alpha * self.num_splits + 1e-9) / self.num_splits

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, numbers that are not defined as null."""
        found = {"bugs": list(self.bugs), **dataclasses.asdict(self)}
        found |= found.pop("rule")
        found["attainable_p"] = 1 / self.num_splits
        found["false_positive_rate"] = self.false_positive_rate
        return without_nan(found)


def diagnose(
    healthy: Sequence[LabelledImages],
    suspicious: Sequence[LabelledImages],
    num_classes: int,
    rule: Rule | None = None,
) -> Diagnosis:
    """Compares the samples of two cohorts' generators.

    Privacy: post-processing of DP output.

    Args:
        healthy: samples of each of the G generators, G from 4 to 6; all groups have the
            same number of images, of one shape.
        suspicious: likewise.
        num_classes: of the labels.
        rule: the default rule if None.

    Raises:
        UserError: groups that cannot be compared.
    """
    rule = rule or Rule()
    groups = [*healthy, *suspicious]
    sizes = len(healthy), len(suspicious)
    raise_first("samples", _problems(*sizes, groups, num_classes))
    vectors = {
        INVERT: [features.intensity(g.images) for g in groups],
        ROTATE: [features.orientation(g.images, g.labels, num_classes) for g in groups],
    }
    grams = {bug: features.gram(own) for bug, own in vectors.items()}
    grams[OTHER] = features.kernel_means([g.images for g in groups])
    rows = permutation.splits(len(healthy))
    # Every statistic is 1 where all images are spoilt and the vector has norm 1.
    statistics = {
        bug: permutation.distances(own, rows) / 2 for bug, own in grams.items()
    }
    has_learned = _has_learned(grams[ROTATE], rule)
    adjusted = permutation.closed_test(statistics)
    suspects = [
        _suspect(bug, values, adjusted[bug], grams[bug], has_learned, rule)
        for bug, values in statistics.items()
    ]
    ranking = sorted(suspects, key=_rank)
    components = features.principal_components([g.images for g in groups])
    shares = features.class_shares(components, [g.labels for g in groups], num_classes)
    means = features.scaled_means(
        [features.image_features(g.images) for g in groups],
        [g.labels for g in groups],
        num_classes,
    )
    return Diagnosis(
        verdict=_verdict(ranking, rule) if rule.alpha >= 1 / len(rows) else UNDECIDED,
        ranking=tuple(ranking),
        effects=effects(vectors[INVERT], vectors[ROTATE], shares, rule.confidence),
        two_sample=two_sample(2 * statistics[OTHER], components, rows),
        has_learned=has_learned,
        num_splits=len(rows),
        rule=rule,
        differences=differences(means),
    )


def _problems(
    num_healthy: int, num_suspicious: int, groups: list[LabelledImages], classes: int
) -> Iterator[str]:
    if num_healthy != num_suspicious or not (
        FEWEST_GROUPS <= num_healthy <= MOST_GROUPS
    ):
        yield (
            f"groups = {num_healthy} and {num_suspicious}: give each cohort the same "
            f"number, from {FEWEST_GROUPS} to {MOST_GROUPS}"
        )
    shape = groups[0].images.shape
    for number, (images, labels) in enumerate(groups):
        where = f"group {number}: "
        if images.shape != shape or labels.shape != shape[:1] or images.ndim != 4:
            shapes = f"{images.shape} images and {labels.shape} labels"
            yield f"{where}{shapes}, group 0 has {shape}: other data; {ONE_DATA_SET}"
        if not np.isfinite(images).all() or images.min() < 0 or images.max() > 1:
            yield (
                f"{where}pixels outside [0, 1]; its generator diverged, train it with "
                "more noise or a smaller learning rate"
            )
        if labels.min() < 0 or labels.max() >= classes:
            yield f"{where}labels outside [0, {classes}); {ONE_DATA_SET}"


# ------------------------------------------------------------------ decisions


def share(gram: Array) -> permutation.Statistic:
    """Returns the share of spoilt images as a function of the groups.

    A bug in a share f of the images multiplies its vector v by 1 - 2 f. With inner
    products of different groups, so that their noise does not count: within the cohort
    of the longer vector |v|^2, between the cohorts (1 - 2 f) |v|^2, and

        f = (1 - between / within) / 2.

    A vector that turned a little, by another slant of the handwriting, hardly changes
    it: by 10 degrees 0.03. Which cohort is spoilt it does not say.

    Privacy: post-processing of DP output.

    >>> v = features.gram([np.array([x]) for x in (1.0, 1, 1, 0.5, 0.5, 0.5)])
    >>> share(v)(np.arange(3), np.arange(3, 6))
    0.25
    """

    def of(healthy: NDArray[np.int64], suspicious: NDArray[np.int64]) -> float:
        within = max(permutation.within(gram, g) for g in (healthy, suspicious))
        between = float(gram[np.ix_(healthy, suspicious)].mean())
        return (1 - between / within) / 2 if within > 0 else math.nan

    return of


def _has_learned(gram: Array, rule: Rule) -> bool:
    """Tells whether the cohorts' strokes have a common axis, with confidence.

    Their inner product is 0 on average if either cohort's direction is that of its
    random starts, and the share then 0.5.
    """
    _, interval = permutation.jackknife(share(gram), len(gram) // 2, rule.confidence)
    return interval is not None and not interval[0] <= 0.5 <= interval[1]


def _suspect(
    bug: str,
    values: Array,
    adjusted_p: float,
    gram: Array,
    has_learned: bool,
    rule: Rule,
) -> Suspect:
    is_significant = adjusted_p <= rule.alpha
    common = (bug, permutation.p_value(values), adjusted_p, float(values[0]))
    if bug == OTHER:
        return Suspect(*common, None, None, DIFFERS if is_significant else SAME)
    effect, interval = permutation.jackknife(
        share(gram), len(gram) // 2, rule.confidence
    )
    decision = UNDECIDED
    is_far = values[0] >= rule.min_effect * LEAST_LENGTH[bug]
    is_large = interval is not None and interval[0] >= rule.min_effect
    if is_significant and is_large and is_far:
        decision = NAMED
    elif interval is not None and has_learned and interval[1] < rule.min_effect:
        decision = EXCLUDED
    is_defined = math.isfinite(effect)
    return Suspect(*common, effect if is_defined else None, interval, decision)


def _rank(suspect: Suspect) -> tuple[bool, bool, float, float]:
    """Named bugs first, then by p and size; `other` is no bug by itself."""
    return (
        suspect.bug == OTHER,
        suspect.decision != NAMED,
        suspect.adjusted_p,
        -(suspect.effect or 0.0),
    )


def _verdict(ranking: Sequence[Suspect], rule: Rule) -> str:
    bugs = [suspect for suspect in ranking if suspect.bug != OTHER]
    (other,) = [suspect for suspect in ranking if suspect.bug == OTHER]
    if named := sorted(s.bug for s in bugs if s.decision == NAMED):
        return " and ".join(named)
    if any(suspect.decision != EXCLUDED for suspect in bugs):
        return UNDECIDED
    if other.decision == DIFFERS:
        return OTHER
    # Not adjusted: an adjustment would make it easier to say that all is well.
    return "none" if other.p > rule.alpha else UNDECIDED
