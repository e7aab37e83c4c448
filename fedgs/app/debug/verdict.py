"""What `fedgs debug` shows: the verdict in words, tables and a picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.app.commands.run_outcome import near
from fedgs.app.commands.terminal import say
from fedgs.app.debug.debug_folder import BY_ACCURACY, config_of
from fedgs.app.evaluation.report import rows_by_class
from fedgs.app.tables import Table, cell
from fedgs.data.transformations import TRANSFORMATIONS
from fedgs.diagnosis.diagnosis import (
    CLEARED,
    DIFFERS,
    LEAST_FIT,
    MORE_THAN_ONE,
    NAMED,
    OTHER,
    PART,
    POSSIBLE,
    UNDECIDED,
    Diagnosis,
    Suspect,
)
from fedgs.diagnosis.rule import INTERVAL_CONFIDENCE
from fedgs.evaluation.images import LabelledImages
from fedgs.runs import sample_files

MOST_SHOWN = 6  # of some twenty suspects
ROWS_PER_GROUP = 2
TITLES = {OTHER: "any difference", **{t.name: t.words for t in TRANSFORMATIONS}}
FOUND = (NAMED, POSSIBLE, PART)


def sentence(diagnosis: Diagnosis) -> str:
    """Returns the verdict in words, with its error rate and what was not tested."""
    rate = (
        "Where the cohorts are alike, any bug is named with probability at most "
        f"{diagnosis.false_positive_rate:.3g} (exact, 1 of {diagnosis.num_splits} "
        f"splits of the groups is {1 / diagnosis.num_splits:.3g})."
    )
    return f"{_verdict(diagnosis)} {rate} {_not_tested(diagnosis)}"


def _verdict(diagnosis: Diagnosis) -> str:
    found = [s for s in diagnosis.ranking if s.decision in FOUND]
    cleared = [title(s.bug) for s in diagnosis.ranking if s.decision == CLEARED]
    # In an average of images nobody can see how many of them were spoilt. There a bug
    # is looked for in parts of the clients, so its share is one of clients.
    if diagnosis.draws_averages:
        unit = "clients"
    else:
        unit = "images"
    limit = f"{diagnosis.rule.min_effect:.0%} of the {unit} or more"
    excluded = f"Excluded, each in {limit}: {', '.join(cleared) or 'nothing'}."
    # This verdict is the only one in which two bugs are found and both are true. In all
    # others several that are found are alternatives, hence "or" below.
    if diagnosis.verdict == MORE_THAN_ONE:
        names = " and ".join(title(s.bug) for s in found)
        return f"More than one bug: no single one explains the difference, {names} do."
    if found:
        words = " or ".join(
            f"{title(s.bug)} ({_degree(s)}{_effect(s, diagnosis)})" for s in found
        )
        whose = "one cohort are, relative to the other's,"
        # A cohort is accused only if every candidate accuses the same one. Inversion
        # and turns accuse none, because the opposite change undoes them.
        spoilt = found[0].spoilt
        if spoilt and all(suspect.spoilt == spoilt for suspect in found):
            whose = f"the {spoilt} cohort are, relative to the other's,"
        return f"The images of {whose} {words}."
    # "None" must not be read as proof that the cohorts are alike, so it says what was
    # excluded and what was not.
    if diagnosis.verdict == "none":
        return (
            f"Nothing differs significantly. {excluded} A difference that these "
            "samples are too few to show is not excluded."
        )
    if diagnosis.verdict == OTHER:
        return (
            "The cohorts are different, but not by anything that is known here: "
            f"{where(diagnosis)}.{_closest(diagnosis)} {excluded}"
        )
    return f"Undecided: {_why(diagnosis)}."


def _why(diagnosis: Diagnosis) -> str:
    # No data could have been significant then, so nothing else needs to be explained.
    least = 1 / diagnosis.num_splits
    if diagnosis.rule.alpha < least:
        return (
            f"alpha = {diagnosis.rule.alpha:g} is below the attainable p, {least:.3g}"
        )
    why = "the samples neither show nor exclude a bug"
    if not diagnosis.has_learned:
        why += "; the generators have learned too little of the pictures"
    if any(s.decision == DIFFERS for s in diagnosis.ranking):
        why += f"; the cohorts differ, {where(diagnosis)}.{_closest(diagnosis)}"
    return why.rstrip(".")


def next_step(diagnosis: Diagnosis, path: Path, plan: dict[str, Any]) -> str:
    """Returns what may decide an undecided verdict, with the command; "" of others.

    Args:
        diagnosis: the verdict and what it rests on.
        path: the folder.
        plan: content of its debug.json.
    """
    if diagnosis.verdict != UNDECIDED:
        return ""
    best = diagnosis.ranking[0]
    least = diagnosis.rule.min_effect
    if best.interval:
        low = best.interval[0]
    else:
        low = 0.0
    is_significant = best.adjusted_p <= diagnosis.rule.alpha
    is_seen = is_significant and (best.fit or 0) >= LEAST_FIT
    # A smaller share is not advised if accuracy selected the cohorts: a difference of
    # handwriting alone may then look like a bug in few images, and would be named.
    if is_seen and 0 < low < least and plan["source"] != BY_ACCURACY:
        # A round number below the interval, in steps of 0.05.
        less = math.floor(20 * low) / 20
        if less == 0:
            less = low / 2
        return (
            f"Next step: {title(best.bug)} is significant, but not surely in "
            f"{least:.0%}. The same samples may name it in fewer, at no epsilon and at "
            f"the same error rate: fedgs debug --output {near(path)} --min-effect "
            f"{less:.2g}"
        )
    epsilon = config_of(plan).target_epsilon
    more = "--noise-multiplier LESS"
    if epsilon:
        more = f"--target-epsilon {2 * epsilon:g}"
    return (
        "Next step: cohorts of more clients, or in which more are suspected; or again "
        f"with less noise, whose epsilon comes on top: {plan['command']} {more} "
        f"--output {near(path)}-again"
    )


def _closest(diagnosis: Diagnosis) -> str:
    """Returns the entry that explains most of a difference, though not enough."""
    best = diagnosis.ranking[0]
    if best.fit is None or best.effect is None:
        return ""
    return (
        f" The closest entry is {title(best.bug)} ({_effect(best, diagnosis)}): it "
        f"explains {min(1.0, best.fit):.0%} of the squared distance."
    )


def _not_tested(diagnosis: Diagnosis) -> str:
    """Returns what the verdict does not speak about."""
    open_ones = [title(s.bug) for s in diagnosis.ranking if s.decision == UNDECIDED]
    # Without this, a reader would take a verdict for a statement about every bug.
    text = "Not tested: anything that is not in the catalogue"
    if any(s.decision == NAMED for s in diagnosis.ranking):
        text += ", and a smaller bug beside this one"
    if open_ones and diagnosis.verdict in ("none", OTHER):
        text += f"; not excluded, as these samples cannot tell: {', '.join(open_ones)}"
    return f"{text}. Look at the picture."


def title(bug: str) -> str:
    """Returns a bug in words; a function of the user's by its name."""
    return TITLES.get(bug, f"changed as by {bug}")


def where(diagnosis: Diagnosis) -> str:
    """Returns the classes and features in which the cohorts differ most."""
    # The differences are sorted, the largest first.
    features = [found.name for found in diagnosis.differences if found.of == "feature"]
    classes = [found.name for found in diagnosis.differences if found.of == "class"]
    return (
        f"most in {', '.join(features[:2])}, and in the classes "
        f"{', '.join(classes[:3])}"
    )


def with_titles(diagnosis: Diagnosis) -> dict[str, Any]:
    """Returns the diagnosis as JSON values, with a title for each suspect."""
    content = diagnosis.to_json()
    for row, suspect in zip(content["ranking"], diagnosis.ranking, strict=True):
        row["title"] = title(suspect.bug)
    return content


def _degree(suspect: Suspect) -> str:
    if suspect.degree is None:
        return ""
    return f"about {suspect.degree}, "


def _effect(suspect: Suspect, diagnosis: Diagnosis) -> str:
    # In averages, noise makes the strength of a bug smaller by an unknown amount. So it
    # is no share, and its interval must not be read as one of 95 %.
    if diagnosis.draws_averages:
        word = "strength as drawn"
        level = ""
    else:
        word = "share"
        level = f"{INTERVAL_CONFIDENCE:.0%} "
    text = f"{word} unknown"
    if suspect.effect is not None:
        text = f"{word} {suspect.effect:.2f}"
    if suspect.interval is None:
        return text
    low, high = suspect.interval
    return f"{text}, {level}interval {low:.2f} to {high:.2f}"


def conditions(plan: Mapping[str, Any]) -> list[str]:
    """Returns what a verdict rests on, in plain sentences."""
    differ = "The user's own cohorts may differ in more than pre-processing."
    if plan["source"] == BY_ACCURACY:
        differ = (
            "The cohorts were selected by accuracy, so their handwriting differs "
            "without a bug, and a bolder or a smaller hand looks like another gamma, "
            "brightness or scale."
        )
    return [
        "The null hypothesis of the exact test: the groups of both cohorts are "
        "exchangeable. That holds if the cohorts are one population, processed alike. "
        "Clients were put into groups at random, and all generators were trained with "
        "the same settings on equally many clients.",
        f"{differ} The permutation test alone would notice that; a bug is named only "
        "if it explains most of the difference and its share of the images is large.",
        "Which cohort is spoilt the samples say only of a bug that nothing undoes: an "
        "inverted or turned cohort may be the healthy one. Look at the picture.",
        "A bug is excluded as far as the generators have learned the data: few rounds "
        "or much noise make it undecided, and may make it smaller.",
    ]


# ------------------------------------------------------------------ tables


def diagnosis_tables(diagnosis: Mapping[str, Any]) -> list[Table]:
    """Returns the suspected bugs, and where the cohorts differ, as tables.

    Privacy: post-processing of DP output.

    Args:
        diagnosis: content of diagnosis.json.
    """
    return [_suspects(diagnosis), _differences(diagnosis["differences"])]


def _suspects(diagnosis: Mapping[str, Any]) -> Table:
    # The last entry, any difference, is always shown: it says whether anything at all
    # differs, whatever the catalogue explains.
    ranking = diagnosis["ranking"]
    first = ranking[:MOST_SHOWN]
    others = ranking[MOST_SHOWN:]
    shown = [*first, *others[-1:]]
    hidden = others[:-1]
    rows = [
        [
            row["title"],
            row["decision"],
            cell(row["fit"]),
            _with_interval(row["effect"], row["interval"]),
            cell(row["adjusted_p"]),
        ]
        for row in shown
    ]
    note = ""
    if hidden:
        excluded = sum(row["decision"] == "excluded" for row in hidden)
        note = f"{len(hidden)} more explain less, {excluded} of them are excluded."
    share = f"share [{INTERVAL_CONFIDENCE:.0%}]"
    if diagnosis["draws_averages"]:
        share = "strength as drawn"
    head = ["suspected", "decision", "explains", share, "adjusted p"]
    return Table("Suspected bugs, strongest first", head, rows, note)


def _differences(found: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the classes and features in which the cohorts differ most."""
    features = [row for row in found if row["of"] == "feature"]
    classes = [row for row in found if row["of"] == "class"]
    rows = [
        [row["of"], row["name"], cell(row["distance"])]
        for row in (*features[:3], *classes[:5])
    ]
    note = (
        "Distance of the cohorts' means; 1 is that of an image from its group's mean."
    )
    head = ["of", "which", "distance"]
    return Table("Where do they differ most?", head, rows, note)


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    if interval is None:
        return cell(value)
    low, high = interval
    return f"{cell(value)} [{cell(low)}, {cell(high)}]"


def show(path: Path, content: Mapping[str, Any]) -> None:
    """Prints the ranking, the effects and the verdict."""
    say(f"{path.name}, {content['groups']} groups per cohort")
    for table in diagnosis_tables(content):
        table.show()
    lines = [f"verdict       {content['verdict']}", content["sentence"]]
    if content["planted"] is not None:
        lines.append(f"planted: {content['planted']['bug']}; {content['outcome']}")
    if content["next_step"]:
        lines.append(content["next_step"])
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
    for left, right in zip(samples["healthy"], samples["suspicious"], strict=True):
        healthy = _by_class(left, num_classes)
        suspicious = _by_class(right, num_classes)
        rows.append(np.concatenate([healthy, gap, suspicious], axis=1))
    images = np.concatenate(rows)
    columns = images.shape[1]
    in_order = images.reshape(-1, *shape)
    sample_files.save_images(path, in_order, columns)


def _by_class(group: LabelledImages, num_classes: int) -> NDArray[np.float32]:
    """Returns rows of one image per class; of a generator without labels any."""
    # All labels are 0 then, and the picture would be one column of images beside black.
    if not group.labels.any():
        num_classes = 10
        labels = np.arange(len(group.labels)) % num_classes
        group = group._replace(labels=labels)
    return rows_by_class(group, num_classes, ROWS_PER_GROUP)
