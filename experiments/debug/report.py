"""What `fedgs debug` shows: the verdict in words, tables and a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.commands.progress import say
from experiments.debug.plan import BY_ACCURACY
from experiments.debug.tables import diagnosis_tables
from experiments.evaluation.report import rows_by_class
from fedgs.diagnosis.diagnosis import (
    DIFFERS,
    NAMED,
    OTHER,
    TITLES,
    Diagnosis,
    Suspect,
)
from fedgs.evaluation.images import LabelledImages
from fedgs.runs import sample

ROWS_PER_GROUP = 2
_DONE = {"invert": "inverted", "rotate": "rotated by 90 degrees"}
NOT_TESTED = (
    "Not tested: anything but inversion and rotation by 90 degrees, as mirrors, blur, "
    "contrast, blanked parts or wrong labels; look at the picture."
)


def sentence(diagnosis: Diagnosis) -> str:
    """Returns the verdict in words, with its error rate."""
    rate = (
        f"Where the cohorts are alike, a bug is named with probability at most "
        f"{diagnosis.false_positive_rate:.3g} (exact, 1 of {diagnosis.num_splits} "
        "splits of "
        f"the groups is {1 / diagnosis.num_splits:.3g})."
    )
    if diagnosis.bugs:
        shares = " and ".join(
            f"{_DONE[s.bug]} relative to the other ({_effect(s, diagnosis)})"
            for s in diagnosis.ranking
            if s.decision == NAMED
        )
        return f"The images of one cohort are {shares}. {rate} {NOT_TESTED}"
    limit = f"{diagnosis.rule.min_effect:.0%}"
    excluded = (
        f"Neither inversion nor rotation in {limit} of the images or more: with "
        f"confidence {diagnosis.rule.confidence:.0%} each of both shares is below that."
    )
    if diagnosis.verdict == "none":
        return (
            f"Nothing differs significantly. {excluded} {rate} A difference that these "
            f"samples are too few to show is not excluded. {NOT_TESTED}"
        )
    if diagnosis.verdict == OTHER:
        return (
            "The cohorts are different, but not by anything that is known here: "
            f"{where(diagnosis)}. {excluded} {rate} {NOT_TESTED}"
        )
    least = 1 / diagnosis.num_splits
    why = "the samples neither show nor exclude a bug"
    if diagnosis.rule.alpha < least:
        why = f"alpha = {diagnosis.rule.alpha:g} is below the attainable p, {least:.3g}"
    elif not diagnosis.has_learned:
        why += "; the generators have learned too little of the strokes"
    if any(s.bug == OTHER and s.decision == DIFFERS for s in diagnosis.ranking):
        why += f"; the cohorts differ, {where(diagnosis)}"
    return f"Undecided: {why}. {rate} {NOT_TESTED}"


def where(diagnosis: Diagnosis) -> str:
    """Returns the classes and features in which the cohorts differ most."""
    most = [
        ", ".join(d.name for d in [d for d in diagnosis.differences if d.of == of][:n])
        for of, n in (("feature", 2), ("class", 3))
    ]
    return f"most in {most[0]}, and in the classes {most[1]}"


def with_words(diagnosis: Diagnosis) -> dict[str, Any]:
    """Returns the diagnosis as JSON values, with a title and words for each suspect."""
    content = diagnosis.to_json()
    for row, suspect in zip(content["ranking"], diagnosis.ranking, strict=True):
        row["title"] = TITLES[suspect.bug]
        row["words"] = _words(suspect, diagnosis)
    return content


def _words(suspect: Suspect, diagnosis: Diagnosis) -> str:
    if suspect.bug == OTHER:
        return (
            "the cohorts' samples differ, by whatever: cohorts selected by accuracy do "
            "so without a bug"
            if suspect.decision == DIFFERS
            else "the samples show no difference beyond that of two groups"
        )
    if suspect.effect is None:
        return "not measurable: the samples have no such structure"
    return f"{_effect(suspect, diagnosis)} of the images"


def _effect(suspect: Suspect, diagnosis: Diagnosis) -> str:
    text = f"share {suspect.effect:.2f}"
    if suspect.interval is None:
        return text
    low, high = suspect.interval
    return f"{text}, {diagnosis.rule.confidence:.0%} interval {low:.2f} to {high:.2f}"


def conditions(plan: Mapping[str, Any]) -> list[str]:
    """Returns what a verdict rests on, in plain sentences."""
    selected = (
        "The cohorts were selected by accuracy, so their handwriting differs without "
        "a bug. The permutation test alone would notice that; a bug is named only if "
        "its share of the images is large as well, which rests on the interval and on "
        "the handwriting's effect being below the limit."
    )
    given = (
        "The user's own cohorts may differ in more than pre-processing. The "
        "permutation test alone would notice that; a bug is named only if its share "
        "of the images is large as well."
    )
    grouped = "as fedgs did here"
    if plan["request"]["runs"] is not None:
        grouped = "which only who trained these runs knows"
    return [
        "The null hypothesis of the exact test: the groups of both cohorts are "
        "exchangeable. That holds if the cohorts are one population, processed alike, "
        f"and clients were put into groups at random, {grouped}. All generators were "
        "trained with the same settings on equally many clients.",
        selected if plan["source"] == BY_ACCURACY else given,
        "Samples do not say which cohort is the spoilt one: look at the picture.",
        "Inversion is not named where the mean pixel is near 0.5, rotation where the "
        "strokes have no preferred direction, and rotation by 180 degrees never.",
        "A bug is excluded as far as the generators have learned the data: few rounds "
        "or much noise make it undecided, and may make it smaller.",
        "Everything is computed from released samples: it costs no privacy.",
    ]


# ------------------------------------------------------------------ tables


def show(path: Path, content: Mapping[str, Any]) -> None:
    """Prints the ranking, the effects and the verdict."""
    say(f"{path.name}, {content['groups']} groups per cohort")
    for table in diagnosis_tables(content):
        table.show()
    attainable = content["attainable_p"]
    lines = [
        f"attainable p  {attainable:.3g}, one of {content['num_splits']} splits; "
        f"alpha {content['alpha']:g}",
        f"verdict       {content['verdict']}",
        content["sentence"],
    ]
    if content["planted"] is not None:
        lines.append(f"planted: {content['planted']['bug']}; {content['outcome']}")
    say("\n".join(lines))


# ------------------------------------------------------------------ the picture


def draw(
    path: Path, samples: Mapping[str, list[LabelledImages]], num_classes: int
) -> None:
    """Writes both cohorts side by side: healthy left, suspicious right.

    Two rows per group, one column per class, and an empty column between.
    """
    shape = samples["healthy"][0].images.shape[1:]
    gap = np.full((ROWS_PER_GROUP, 1, *shape), 0.3, np.float32)
    rows: list[NDArray[np.float32]] = []
    for pair in zip(samples["healthy"], samples["suspicious"], strict=True):
        healthy, suspicious = (_by_class(group, num_classes) for group in pair)
        rows.append(np.concatenate([healthy, gap, suspicious], axis=1))
    images = np.concatenate(rows)
    sample.save_images(path, images.reshape(-1, *shape), images.shape[1])


def _by_class(group: LabelledImages, num_classes: int) -> NDArray[np.float32]:
    """Returns rows of one image per class; of a generator without labels any."""
    if not group.labels.any():
        num_classes = 10
        group = group._replace(labels=np.arange(len(group.labels)) % num_classes)
    return rows_by_class(group, num_classes, ROWS_PER_GROUP)
