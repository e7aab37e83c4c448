"""A diagnosis in words: who differs, in what, how surely, and what was not tested."""

from collections.abc import Sequence
from typing import Any

from fedgs.config.run_config import GroupMeansConfig, RunConfig
from fedgs.data.transformations import TRANSFORMATIONS
from fedgs.diagnosis.catalogue import HEALTHY, SUSPICIOUS
from fedgs.diagnosis.diagnosis import (
    CLEARED,
    DIFFERS,
    NAMED,
    OTHER,
    POSSIBLE,
    UNDECIDED,
    Diagnosis,
    Suspect,
)
from fedgs.diagnosis.sites import SiteVerdict
from fedgs.errors import first_n

TITLES = {OTHER: "any difference", **{t.name: t.words for t in TRANSFORMATIONS}}
FOUND = (NAMED, POSSIBLE)


def sentence(diagnosis: Diagnosis, suspicious: str, healthy: str) -> str:
    """Returns the verdict in words, with its error rate and what was not tested.

    Args:
        diagnosis: of the two.
        suspicious: what the suspicious cohort is called.
        healthy: what the other one is called.
    """
    rate = (
        "If both are alike, a bug is named with probability at most "
        f"{diagnosis.false_positive_rate:.3g} (exact; the test compares "
        f"{diagnosis.num_splits} splits of the groups)."
    )
    verdict = _verdict(diagnosis, suspicious, healthy)
    return f"{verdict} {rate} {_not_tested(diagnosis)}"


def sentence_of_site(verdict: SiteVerdict, others: str) -> str:
    """Returns what a comparison of all sites says of one of them, in words.

    Args:
        verdict: of the site.
        others: what those that it was compared with are called.
    """
    diagnosis = verdict.diagnosis
    if verdict.is_accused:
        text = _verdict(diagnosis, verdict.site, others, accused=verdict.site)
    elif verdict.rivals:
        text = _verdict(diagnosis, verdict.site, others)
        text += f" Or another site differs: {' or '.join(verdict.rivals)}."
    elif diagnosis.verdict in ("none", UNDECIDED):
        text = _verdict(diagnosis, verdict.site, others)
    else:
        # It may be another site's fault that it lies apart from all others together.
        text = "Not accused: that it differs is not significant for all sites together."
    rate = (
        f"If {verdict.site} and {others} are alike, any of them is named, or said to "
        f"differ, with probability at most {diagnosis.rule.alpha:.3g}."
    )
    return f"{text} {rate} {_not_tested(diagnosis)}"


def unseen(absent: Sequence[str]) -> str:
    """Returns why there is no verdict where the release shows no client of some."""
    names = first_n(map(repr, absent))
    return (
        f"Undecided: the release shows no client of {names} above its noise, so "
        "there is nothing to compare. Either there is no client, or there are too few "
        "for this noise."
    )


def _verdict(
    diagnosis: Diagnosis,
    suspicious: str,
    healthy: str,
    accused: str = "",
) -> str:
    found = [s for s in diagnosis.ranking if s.decision in FOUND]
    if found:
        words = " or ".join(f"{title(s.bug)} ({_degree(s)}{_effect(s)})" for s in found)
        whose = accused or _whose(found, suspicious, healthy)
        compared = f"those of {healthy}"
        if whose == healthy:
            compared = f"those of {suspicious}"
        elif whose != suspicious:
            compared = "the other's"
        return f"The images of {whose} are, relative to {compared}, {words}."
    # "None" must not be read as proof that the cohorts are alike, so it says what was
    # excluded and what was not.
    if diagnosis.verdict == "none":
        return (
            f"Nothing differs significantly. {_excluded(diagnosis)} A difference that "
            "these samples are too few to show is not excluded."
        )
    if diagnosis.verdict == OTHER:
        return (
            f"{suspicious} and {healthy} differ, but not by a bug of the "
            f"catalogue: {where(diagnosis)}.{_closest(diagnosis)} "
            f"{_excluded(diagnosis)}"
        )
    return f"Undecided: {_why(diagnosis)}."


def _whose(found: Sequence[Suspect], suspicious: str, healthy: str) -> str:
    """Returns who has the bug, as far as the pictures tell."""
    # One is accused only if every candidate accuses the same one. Inversion and turns
    # accuse none, because the opposite change undoes them.
    spoilt = found[0].spoilt
    if spoilt and all(suspect.spoilt == spoilt for suspect in found):
        return {SUSPICIOUS: suspicious, HEALTHY: healthy}[spoilt]
    return f"{suspicious} or of {healthy}"


def _excluded(diagnosis: Diagnosis) -> str:
    # In an average of images nobody can see how many of them were spoilt. So a bug is
    # looked for in parts of the clients, and its share is one of clients.
    cleared: list[str] = []
    for suspect in diagnosis.ranking:
        if suspect.decision == CLEARED:
            cleared.append(title(suspect.bug))
    limit = f"{diagnosis.rule.min_effect:.0%} of the clients or more"
    # Some titles have a comma.
    listed = "; ".join(cleared) or "nothing"
    return f"Excluded are, each in {limit}: {listed}."


def _why(diagnosis: Diagnosis) -> str:
    # No data could have been significant then, so nothing else needs to be explained.
    least = 1 / diagnosis.num_splits
    if diagnosis.rule.alpha < least:
        return (
            f"alpha = {diagnosis.rule.alpha:g} is below the least p that is possible, "
            f"{least:.3g}"
        )
    if not _compared(diagnosis):
        return "they have no class in common"
    why = "the samples neither show nor exclude a bug"
    if not diagnosis.shows_data:
        why += "; the pictures show little but noise"
    if any(s.decision == DIFFERS for s in diagnosis.ranking):
        why += f"; the cohorts differ, {where(diagnosis)}.{_closest(diagnosis)}"
    return why.rstrip(".")


def _closest(diagnosis: Diagnosis) -> str:
    """Returns the entry that explains most of a difference, though not enough."""
    best = diagnosis.ranking[0]
    if best.fit is None or best.effect is None:
        return ""
    # What may be no effect at all is near to nothing.
    if best.interval is not None and best.interval[0] <= 0:
        return ""
    return (
        f" The closest entry is {title(best.bug)} ({_effect(best)}): it "
        f"explains {min(1.0, best.fit):.0%} of the squared distance."
    )


def _not_tested(diagnosis: Diagnosis) -> str:
    """Returns what the verdict does not speak about."""
    open_ones = [title(s.bug) for s in diagnosis.ranking if s.decision == UNDECIDED]
    # Without this, a reader would take a verdict for a statement about every bug.
    text = f"{_not_compared(diagnosis)}Not tested: bugs that are not in the catalogue"
    if any(s.decision == NAMED for s in diagnosis.ranking):
        text += ", and a smaller bug beside this one"
    if open_ones and diagnosis.verdict in ("none", OTHER):
        text += f". Not excluded, as these samples cannot tell: {'; '.join(open_ones)}"
    return f"{text}. Look at the picture."


def _not_compared(diagnosis: Diagnosis) -> str:
    """Returns which classes say nothing, because one of the cohorts lacks them."""
    everything = {own.label for own in diagnosis.differences}
    labels = everything - {*_compared(diagnosis)}
    if not labels:
        return ""
    listed = ", ".join(map(str, sorted(labels)))
    return (
        f"Not compared, because one side has hardly any images of it: class {listed}. "
    )


def title(bug: str) -> str:
    """Returns a bug in words; a function of the user's by its name."""
    return TITLES.get(bug, f"changed as by {bug}")


def where(diagnosis: Diagnosis) -> str:
    """Returns the classes in which the cohorts differ most."""
    # The differences are sorted, the largest first.
    classes = map(str, _compared(diagnosis)[:3])
    return f"most in the classes {', '.join(classes)}"


def _compared(diagnosis: Diagnosis) -> list[int]:
    """Returns the classes that both cohorts have, those that differ most first."""
    return [own.label for own in diagnosis.differences if own.distance is not None]


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


def _effect(suspect: Suspect) -> str:
    # In averages, noise makes the strength of a bug smaller by an unknown amount. So it
    # is no share, and its interval must not be read as one of 95 %.
    if suspect.effect is None:
        return "measured strength unknown"
    text = f"measured strength {suspect.effect:.2f}"
    if suspect.interval is None:
        return text
    low, high = suspect.interval
    return f"{text}, interval {low:.2f} to {high:.2f}"


def conditions(config: RunConfig, own: GroupMeansConfig) -> list[str]:
    """Returns what a verdict rests on, in plain sentences.

    Args:
        config: of the run.
        own: of its phase.
    """
    alike = "are one population, processed alike"
    if own.compares_nodes:
        exchangeable = (
            f"All groups have {own.group_size} clients and the same noise, so they are "
            f"exchangeable where the nodes {alike}. Once a node that differs is taken "
            "out, the same holds for those that are left; that the right one is taken "
            "out first is a model and no theorem."
        )
    else:
        exchangeable = (
            f"The groups of both cohorts are exchangeable where the cohorts {alike} "
            "and equally large. Clients were put into groups by a hash of their names."
        )
    return [
        f"The null hypothesis of the exact test: {exchangeable}",
        "Cohorts and sites may differ in more than pre-processing. The permutation "
        "test alone would notice that; a bug is named only if it explains most of the "
        "difference and its share of the clients is large.",
        "Which one is spoilt the pictures say only of a bug that nothing undoes: an "
        "inverted or turned cohort may be the healthy one. Look at the picture.",
        "A bug is excluded as far as the pictures show the data: much noise makes it "
        "undecided, and may make it smaller.",
    ]
