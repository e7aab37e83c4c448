"""Which bug do the mean pictures of two cohorts show? With error rates.

Each cohort is split into groups, the suspicious one into G and the healthy one into H;
everything here is computed from their mean pictures of each class. All groups hold
equally many owners and have the same noise, so where the cohorts are alike all H + G
groups are exchangeable, whatever H and G are. What each bug of the catalogue explains
of the difference between the cohorts says `catalogue`. A bug is *named* if all of these
agree:

1. **Exchangeability.** What the best bug explains is larger than for any other split
   of the groups into cohorts, by an exact permutation test of the maximum over its
   family, closed together with the other families and the test for any difference.
   Families are inversion; turns and mirrors; and the rest.
2. **Fit.** It explains at least `LEAST_FIT` of the squared distance of the cohorts.
   Cohorts that were selected by accuracy differ in handwriting without any bug; such a
   difference looks like no bug, or like one in few images.
3. **Size.** The share of clients that have it is at least `min_effect`, with
   confidence: the lower limit of its interval is.
4. **No rival.** It explains more than every other entry, with confidence: each one is
   tested at the full level, for all have to be rejected (Berger, "Multiparameter
   hypothesis testing", 1982). Where up to `MOST_RIVALS` others may explain as much,
   the verdict is "one of" them. Where a second bug on top of it explains clearly more,
   none is named: an average of intact and spoilt images looks like two bugs.

A bug is *excluded* if the upper limit of its share is below what `min_effect` of the
clients shows at least (`catalogue.CohortSamples.shown`), at every degree, in either
cohort, and the pictures show the data: turning them moves all groups alike, although
their noise has nothing in common. All else is *undecided*.

The verdict is `none` only if inversion and all turns and mirrors are excluded and
nothing differs significantly. `other` says that the cohorts differ although those are
excluded: not by anything in the catalogue.

Privacy: post-processing of DP output.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config.feature_settings import FEWEST_GROUPS, MOST_GROUPS
from fedgs.data.transformations import (
    TRANSFORMATIONS,
    TURNS,
    VEIL,
    Degree,
    Transformation,
)
from fedgs.diagnosis import permutation
from fedgs.diagnosis.catalogue import (
    HEALTHY,
    SUSPICIOUS,
    Candidate,
    CohortSamples,
    size_within,
)
from fedgs.diagnosis.differences import Difference, differences
from fedgs.diagnosis.products import over_classes
from fedgs.diagnosis.rule import INTERVAL_CONFIDENCE, Rule
from fedgs.errors import raise_if_any
from fedgs.evaluation.images import LabelledImages
from fedgs.files import without_nan

Array = NDArray[np.float64]
Rows = NDArray[np.bool_]
Interval = tuple[float, float]
OTHER = "other"
# Of the squared distance: on real images the right bug explains 0.74 to 1 at degrees
# that are not the catalogue's, any other at most 0.7.
LEAST_FIT = 0.7
MOST_RIVALS = 2
MOST_TURNS = 3  # a quarter turn has three others for rivals
VEIL_FIT = 0.5  # an inversion of most images explains noise no better, and is no veil
CLOSE_FIT = 0.05  # of a bug with a degree, which is coarse: a fit so near is no less
GOOD_FIT = 0.95  # a second bug is looked for where the best one explains less
MORE_FIT = 0.1  # by which a second bug has to improve the fit
# Verdicts that name no single bug.
ONE_OF = "one of "
ONE_DATA_SET = "compare runs of one data set"
# Decisions on one suspect.
NAMED = "named"
POSSIBLE = "possible"
CLEARED = "excluded"
UNDECIDED = "undecided"
_LEAST_SQUARED = 1e-12
_ROTATION = next(entry for entry in TRANSFORMATIONS if entry.name == "rotate")
# Decisions on `other`: whether the cohorts differ at all.
DIFFERS = "differs"
SAME = "no difference seen"


@dataclass(frozen=True)
class Suspect:
    """One suspected bug, or `other`.

    Attributes:
        bug: name of the catalogue's entry, or other.
        adjusted_p: of the exact permutation test, for all suspects together.
        fit: what it explains of the cohorts' squared distance; None for `other`.
        effect: share of spoilt clients, as strongly as it is drawn; None for `other`,
            or not measurable.
        interval: of the effect.
        decision: named, possible, excluded or undecided; of `other` differs or no
            difference seen.
        degree: of the transformation, the likeliest of the catalogue's.
        spoilt: the cohort that would have it; None where a turn undoes it.
    """

    bug: str
    adjusted_p: float
    fit: float | None
    effect: float | None
    interval: tuple[float, float] | None
    decision: str
    degree: Degree = None
    spoilt: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """A verdict and what it rests on; see the module.

    Attributes:
        verdict: the name of a bug, "one of A, B", none, other or undecided.
        ranking: the suspects, likeliest first.
        shows_data: whether the pictures show more than noise; see the module.
        num_splits: of the permutation test: all, or `permutation.MOST_SPLITS`, of which
            all but the true one are random.
        rule: as asked for.
        differences: how far the cohorts are apart in every class, largest first; those
            that one of them lacks come last.
    """

    verdict: str
    ranking: tuple[Suspect, ...]
    shows_data: bool
    num_splits: int
    rule: Rule
    differences: tuple[Difference, ...] = ()

    @property
    def p(self) -> float:
        """The least adjusted p: that of the hypothesis that the cohorts are alike."""
        return min(suspect.adjusted_p for suspect in self.ranking)

    @property
    def false_positive_rate(self) -> float:
        """Probability to name any bug, at most, if the groups are exchangeable."""
        # Only multiples of 1 / num_splits are attained; a product of floats may lie a
        # last bit below a whole number.
        attained = math.floor(self.rule.alpha * self.num_splits + 1e-9)
        return attained / self.num_splits

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, numbers that are not defined as null."""
        found = dataclasses.asdict(self)
        found |= found.pop("rule")  # alpha and min_effect stand beside the others
        found["false_positive_rate"] = self.false_positive_rate
        return without_nan(found)


def diagnose(
    healthy: Sequence[LabelledImages],
    suspicious: Sequence[LabelledImages],
    num_classes: int,
    num_frequencies: int,
    rule: Rule | None = None,
    entries: Sequence[Transformation] = TRANSFORMATIONS,
) -> Diagnosis:
    """Compares the mean pictures of two cohorts' groups.

    Privacy: post-processing of DP output.

    Args:
        healthy: of each of its groups, at least 4, one picture of each class, not cut
            off at black and white; all of one shape. A group may lack a class.
        suspicious: likewise, from 4 to 6, as many as healthy ones or another number.
        num_classes: of the labels.
        num_frequencies: how many low ones the pictures have along each side, at most
            as many as pixels.
        rule: the default rule if None.
        entries: the catalogue.

    Raises:
        UserError: groups that cannot be compared.
    """
    samples = samples_of(healthy, suspicious, num_classes, num_frequencies)
    candidates = samples.candidates(entries)
    return judge(samples, candidates, entries, rule or Rule())


def samples_of(
    healthy: Sequence[LabelledImages],
    suspicious: Sequence[LabelledImages],
    num_classes: int,
    num_frequencies: int,
) -> CohortSamples:
    """Returns the samples of two cohorts; see `diagnose`.

    Privacy: post-processing of DP output.

    Raises:
        UserError: groups that cannot be compared.
    """
    groups = [*healthy, *suspicious]
    num_suspicious = len(suspicious)
    raise_if_any("samples", _problems(len(healthy), num_suspicious, groups))
    raise_if_any("samples", _label_problems(groups, num_classes))
    return CohortSamples(
        groups,
        num_classes=num_classes,
        num_frequencies=num_frequencies,
        num_suspicious=num_suspicious,
    )


def judge(
    samples: CohortSamples,
    candidates: Sequence[Candidate],
    entries: Sequence[Transformation],
    rule: Rule,
) -> Diagnosis:
    """Returns the diagnosis of the cohorts of `samples`; see `diagnose`.

    Privacy: post-processing of DP output.

    Args:
        samples: of all groups, and which of them are suspicious.
        candidates: of `samples`, for `entries`; they do not depend on the cohorts.
        entries: the catalogue.
        rule: error rate and size of a bug.
    """
    rows = samples.rows
    any_difference = differences_of_splits(samples)
    found = _explanations(samples, candidates, rule)
    most = _most(found)
    adjusted = permutation.closed_test({**most, OTHER: any_difference})
    is_different = adjusted[OTHER] <= rule.alpha
    shows_data = _shows_data(samples)
    decisions = _decisions(found, adjusted, shows_data, samples, entries, rule)
    suspects = [
        _suspect(
            own,
            most=most[own.best.family],
            gate=adjusted[own.best.family],
            decision=decisions[own.name],
        )
        for own in found
    ]
    suspects.append(
        Suspect(
            bug=OTHER,
            adjusted_p=adjusted[OTHER],
            fit=None,
            effect=None,
            interval=None,
            decision=DIFFERS if is_different else SAME,
        )
    )
    # Not adjusted: an adjustment would make it easier to say that all is well.
    p_other = permutation.p_value(any_difference)
    p_any_bug = permutation.p_value(np.max([*most.values()], axis=0))
    is_clear = min(p_other, p_any_bug) > rule.alpha
    verdict = _verdict(suspects, entries, is_different, is_clear)
    if rule.alpha < 1 / len(rows):  # no split could be significant
        verdict = UNDECIDED
    return Diagnosis(
        verdict=verdict,
        ranking=tuple(sorted(suspects, key=_rank)),
        shows_data=shows_data,
        num_splits=len(rows),
        rule=rule,
        differences=differences(samples.means, samples.is_known, rows),
    )


def differences_of_splits(samples: CohortSamples) -> Array:
    """Returns the test for any difference: squared distances over their mean.

    Privacy: post-processing of DP output.
    """
    squared = samples.squared_distances()
    return squared / max(float(squared.mean()), _LEAST_SQUARED)


def _problems(
    num_healthy: int,
    num_suspicious: int,
    groups: Sequence[LabelledImages],
) -> Iterator[str]:
    """Yields what is wrong with the number of groups, or with their images."""
    is_number = FEWEST_GROUPS <= num_suspicious <= MOST_GROUPS
    if num_healthy < FEWEST_GROUPS or not is_number:
        yield (
            f"groups = {num_healthy} and {num_suspicious}: give the suspicious cohort "
            f"from {FEWEST_GROUPS} to {MOST_GROUPS}, and the healthy one the same "
            f"number or any other from {FEWEST_GROUPS}"
        )
    shape = groups[0].images.shape
    for number, (images, labels) in enumerate(groups):
        where = f"group {number}: "
        is_other = images.shape[1:] != shape[1:] or labels.shape != images.shape[:1]
        if is_other or images.ndim != 4:
            shapes = f"{images.shape} images and {labels.shape} labels"
            yield f"{where}{shapes}, group 0 has {shape}: other data; {ONE_DATA_SET}"
        if not np.isfinite(images).all():
            yield f"{where}pixels that are not finite; make another release"


def _label_problems(
    groups: Sequence[LabelledImages],
    num_classes: int,
) -> Iterator[str]:
    for number, group in enumerate(groups):
        least = group.labels.min()
        largest = group.labels.max()
        if least < 0 or largest >= num_classes:
            problem = f"labels outside [0, {num_classes})"
            yield f"group {number}: {problem}; {ONE_DATA_SET}"


# ------------------------------------------------------------------ decisions


@dataclass(frozen=True)
class _Explanation:
    """What the best candidate of one entry explains.

    Attributes:
        best: degree and spoilt cohort that explain most.
        values: what the entry explains for every split, either way, in units of the
            splits' mean squared distance.
        fit: share of the cohorts' squared distance that the best explains.
        share: of clients, by the best; NaN where it cannot be measured.
        interval: of the share.
        is_excluded: whether it is below the limit for every candidate.
    """

    best: Candidate
    values: Array
    fit: float
    share: float
    interval: tuple[float, float] | None
    is_excluded: bool

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.best.name


def _explanations(
    samples: CohortSamples,
    candidates: Sequence[Candidate],
    rule: Rule,
) -> list[_Explanation]:
    """Returns an explanation for every entry, the best first."""
    by_name = dict[str, list[Candidate]]()
    for candidate in candidates:
        by_name.setdefault(candidate.name, []).append(candidate)
    found: list[_Explanation] = []
    for of_entry in by_name.values():
        found.append(_explanation(of_entry, samples, rule))
    found.sort(key=lambda explanation: -explanation.fit)
    return found


def _most(found: Sequence[_Explanation]) -> dict[str, Array]:
    """Returns what the best entry of each family explains, for every split."""
    of_family = dict[str, list[Array]]()
    for own in found:
        family = own.best.family
        of_family.setdefault(family, []).append(own.values)
    most: dict[str, Array] = {}
    for family, values in of_family.items():
        most[family] = np.max(values, axis=0)
    return most


def _explanation(
    own: Sequence[Candidate],
    samples: CohortSamples,
    rule: Rule,
) -> _Explanation:
    """Returns what one entry explains, by its best degree and spoilt cohort.

    Args:
        own: the candidates of the entry.
        samples: of all groups.
        rule: uses `min_effect`.
    """
    rows = samples.rows
    squared = samples.squared_distances()
    unit = max(float(squared.mean()), _LEAST_SQUARED)
    # A bug in the healthy cohort forth is one in the suspicious cohort back.
    one_way = [candidate for candidate in own if candidate.spoilt == SUSPICIOUS]
    forth = np.array([candidate.explained(~rows, rows) for candidate in one_way])
    back = np.array([candidate.explained(rows, ~rows) for candidate in one_way])
    most = np.maximum(forth, back).max(0)
    shares = [_share(candidate, samples) for candidate in own]
    fits = [_fit(candidate, samples) for candidate in own]
    best = int(np.argmax(fits))
    share, interval = shares[best]
    return _Explanation(
        best=own[best],
        # No bug explains more than there is; an estimate may, where halves are alike.
        values=np.minimum(most, squared) / unit,
        fit=fits[best],
        share=share,
        interval=interval,
        is_excluded=_is_excluded(own, shares, samples, rule),
    )


def _share(
    candidate: Candidate,
    samples: CohortSamples,
) -> tuple[float, Interval | None]:
    """Returns the share of spoilt clients, and its confidence interval."""
    cohorts = samples.cohorts
    return permutation.jackknife(candidate.share, cohorts, INTERVAL_CONFIDENCE)


def _is_excluded(
    own: Sequence[Candidate],
    shares: Sequence[tuple[float, Interval | None]],
    samples: CohortSamples,
    rule: Rule,
) -> bool:
    """Tells whether every candidate of an entry has a share that is below the limit."""
    limit = rule.min_effect * samples.shown(own[0].entry)

    asked = list(shares)
    # The healthy cohort may be the spoilt one: a turn is asked the other way as well.
    for candidate in own:
        if candidate.is_turn:
            back = dataclasses.replace(candidate, spoilt=HEALTHY)
            asked.append(_share(back, samples))
    for _, interval in asked:
        if interval is None:
            return False
        _, upper_limit = interval
        if upper_limit >= limit:
            return False
    return True


def _fit(candidate: Candidate, samples: CohortSamples) -> float:
    """Returns what a candidate explains of the true cohorts' squared distance."""
    suspicious = samples.rows[:1]
    squared = samples.squared_distance(~suspicious, suspicious)
    if squared[0] <= 0:
        return 0.0
    explained = candidate.explained(~suspicious, suspicious)
    return float(explained[0] / squared[0])


def _shows_data(samples: CohortSamples) -> bool:
    """Tells whether a turn moves the pictures of each cohort alike, with confidence.

    Noise has nothing in common: the mean inner product of what the turn does to that of
    two groups is 0 on average.
    """
    turn, *_ = samples.candidates([_ROTATION])
    for cohort in (0, 1):

        def size(*rows: Rows, cohort: int = cohort) -> Array:
            own = rows[cohort]
            return over_classes(turn.sizes, rows[1 - cohort], own, size_within)

        if not permutation.is_above_zero(size, samples.cohorts):
            return False
    return True


def _decisions(
    found: Sequence[_Explanation],
    adjusted: Mapping[str, float],
    shows_data: bool,
    samples: CohortSamples,
    entries: Sequence[Transformation],
    rule: Rule,
) -> dict[str, str]:
    """Returns the decision on every entry, by its name."""
    decisions: dict[str, str] = {}
    for own in found:
        decisions[own.name] = UNDECIDED
        if shows_data and own.is_excluded:
            decisions[own.name] = CLEARED
    significant = [own for own in found if adjusted[own.best.family] <= rule.alpha]
    if significant:
        first = significant[0]
        others = [own for own in found if own is not first]
        decisions |= _named(first, others, samples, entries, rule)
    return decisions


def _named(
    first: _Explanation,
    others: Sequence[_Explanation],
    samples: CohortSamples,
    entries: Sequence[Transformation],
    rule: Rule,
) -> dict[str, str]:
    """Returns the decisions on the best entry and its rivals; none if it is weak."""
    if first.interval is None or first.interval[0] < rule.min_effect:
        return {}  # it may fit, and be rare
    if first.fit < LEAST_FIT or _has_second(first, samples, entries):
        return {}  # an average of intact and spoilt images looks like two bugs
    rivals = [own.name for own in others if _is_rival(first, own, samples)]
    most = MOST_TURNS if first.best.family == TURNS else MOST_RIVALS
    if len(rivals) > most:
        return {}
    if not rivals:
        return {first.name: NAMED}
    return dict.fromkeys([first.name, *rivals], POSSIBLE)


def _is_rival(first: _Explanation, other: _Explanation, samples: CohortSamples) -> bool:
    """Tells whether another entry may be what the first looks like."""
    if other.is_excluded:
        return False
    kin = first.best.entry.kin
    # Averages do not tell kin apart.
    if kin and kin == other.best.entry.kin:
        return kin != VEIL or other.fit >= VEIL_FIT
    if not samples.shown(first.best.entry):
        # Which averages tell only roughly: it is not clearly more than anything else.
        return other.fit >= LEAST_FIT
    are_turns = first.best.family == other.best.family == TURNS
    # What noise hides altogether explains nothing, and may be the bug.
    is_hidden = not math.isfinite(other.share)
    if other.fit < LEAST_FIT and not are_turns and not is_hidden:
        return False
    _, degree = first.best.steps[-1]
    # The catalogue's degrees are not that of the bug, so its fit is less than it could.
    is_coarse = degree is not None
    if is_coarse and first.fit - other.fit < CLOSE_FIT:
        return True
    return not _is_clearly_more(first.best, other.best, samples)


def _is_clearly_more(one: Candidate, other: Candidate, samples: CohortSamples) -> bool:
    """Tells whether one explains more than the other, with confidence."""

    def gap(healthy: Rows, suspicious: Rows) -> Array:
        by_one = one.explained(healthy, suspicious)
        by_other = other.explained(healthy, suspicious)
        return by_one - by_other

    return permutation.is_above_zero(gap, samples.cohorts)


def _has_second(
    first: _Explanation,
    samples: CohortSamples,
    entries: Sequence[Transformation],
) -> bool:
    """Tells whether another entry explains clearly more on top of the first."""
    if first.fit >= GOOD_FIT:
        return False
    rest = [entry for entry in entries if entry.name != first.name]
    both: list[Candidate] = []
    for candidate in samples.candidates(rest, after=first.best):
        if candidate.spoilt == first.best.spoilt:
            both.append(candidate)
    if not both:
        return False
    best = max(both, key=lambda candidate: _fit(candidate, samples))
    fit = _fit(best, samples)
    if fit < LEAST_FIT or fit - first.fit < MORE_FIT:
        return False
    return _is_clearly_more(best, first.best, samples)


def _suspect(own: _Explanation, most: Array, gate: float, decision: str) -> Suspect:
    """Returns a suspect, whose p-value is adjusted for its family and the others.

    Args:
        own: what the entry explains.
        most: what the best entry of its family explains, for every split.
        gate: p-value of the family.
        decision: on the entry.
    """
    # The same numbers, summed in another order, differ in their last bits.
    of_true_split = own.values[0] * (1 - 1e-9)
    single_step = float(np.mean(most >= of_true_split))
    entry, degree = own.best.steps[-1]
    return Suspect(
        bug=own.name,
        adjusted_p=max(gate, single_step),
        fit=min(1.0, own.fit),
        effect=own.share if math.isfinite(own.share) else None,
        interval=own.interval,
        decision=decision,
        degree=degree,
        spoilt=None if entry.is_turn else own.best.spoilt,
    )


def _rank(suspect: Suspect) -> tuple[bool, bool, float]:
    """Named bugs first, then by what they explain; `other` is no bug by itself."""
    is_other = suspect.bug == OTHER
    is_found = suspect.decision in (NAMED, POSSIBLE)
    explained = suspect.fit or 0.0
    return is_other, not is_found, -explained


def _verdict(
    suspects: Sequence[Suspect],
    entries: Sequence[Transformation],
    is_different: bool,
    is_clear: bool,
) -> str:
    """Returns the verdict; see the module.

    Args:
        suspects: the best entry first, `other` last.
        entries: the catalogue.
        is_different: whether the cohorts differ significantly.
        is_clear: whether neither a difference nor any bug is near to be seen.
    """
    bugs = dict[str, list[str]]()
    for suspect in suspects:
        bugs.setdefault(suspect.decision, []).append(suspect.bug)
    if POSSIBLE in bugs:
        return ONE_OF + ", ".join(bugs[POSSIBLE])
    if NAMED in bugs:
        return bugs[NAMED][0]
    is_open = {suspect.bug: suspect.decision != CLEARED for suspect in suspects}
    if any(is_open[entry.name] for entry in entries if entry.is_picture_turn):
        return UNDECIDED  # any picture of data shows them, so they come first
    best = suspects[0]
    if is_different and is_open[best.bug] and (best.fit or 0) >= LEAST_FIT:
        return UNDECIDED
    if is_different:
        return OTHER
    if is_clear and not any(map(_is_hint, suspects)):
        return "none"
    return UNDECIDED


def _is_hint(suspect: Suspect) -> bool:
    """Tells whether a bug that is not excluded has a share that is surely not 0."""
    return (
        suspect.decision != CLEARED
        and suspect.interval is not None
        and suspect.interval[0] > 0
    )
