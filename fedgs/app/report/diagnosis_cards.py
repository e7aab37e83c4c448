"""The report's cards about a diagnosis: who differs, in what, and how surely."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from fedgs.app.debug.verdict import diagnosis_tables, next_step, sites_table
from fedgs.app.report.cards import Card, Picture
from fedgs.app.report.run import DiagnosisFacts, RunFacts
from fedgs.config.fields import shortened
from fedgs.diagnosis.conclusion import DIAGNOSIS
from fedgs.diagnosis.diagnosis import ONE_OF
from fedgs.errors import wrap_error

VERDICTS = {
    "none": ("No bug of the kinds tested", "good"),
    "other": ("Different, but not by a known bug", "unsure"),
    "undecided": ("Undecided", "unsure"),
}
KINDS = ("bad", "unsure", "good")  # what a reader has to see first


def verdict_cards(facts: RunFacts) -> list[Card]:
    """Returns a verdict for each comparison, and the pictures that were compared.

    Privacy: post-processing of DP output.

    Returns:
        No card of a run without a diagnosis.

    Raises:
        UserError: a diagnosis that lacks something, or has it of another kind.
    """
    if facts.diagnosis is None:
        return []
    with _readable(facts.diagnosis):
        content = facts.diagnosis.content
        comparisons = _comparisons(content)
        cards = [_verdict_card(facts, content, own) for own in comparisons]
        cards.sort(key=lambda card: KINDS.index(card.kind))
        rows = [shortened(str(name)) for name in content["rows"]]
        names = ", ".join(rows)
        alt = (
            f"Mean pictures that {facts.name} released: a row for each of {names}, a "
            "column for each class"
        )
        caption = (
            "Mean picture of each class, one column per class; rows from the top: "
            f"{names}"
        )
        picture = Picture(facts.diagnosis.picture, alt, caption)
        if len(comparisons) > 1:
            of_sites = sites_table({"comparisons": comparisons})
            cards.append(Card(tables=[of_sites]))
        pictures = Card(f"What {facts.name} compared", pictures=[picture])
        return [*cards, pictures]


def diagnosis_cards(facts: RunFacts) -> list[Card]:
    """Returns every comparison in numbers, and what the verdicts rest on.

    Privacy: post-processing of DP output.

    Returns:
        No card of a run without a diagnosis.

    Raises:
        UserError: as `verdict_cards`.
    """
    if facts.diagnosis is None:
        return []
    with _readable(facts.diagnosis):
        content = facts.diagnosis.content
        comparisons = _comparisons(content)
        has_others = len(comparisons) > 1
        cards: list[Card] = []
        for own in comparisons:
            card = Card(
                _title(facts, own),
                tables=diagnosis_tables(own),
                is_folded=has_others,
            )
            cards.append(card)
        conditions = [str(condition) for condition in content["conditions"]]
        cards.append(Card("What the verdict rests on", items=conditions))
        return cards


def verdict_of(comparison: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the answer in a few words, and what kind it is: good, bad or unsure.

    Args:
        comparison: the comparison of diagnosis.json.
    """
    verdict = str(comparison["verdict"])
    # The titles stand in the file, because a suspect of the user's own is code that
    # the report does not load.
    titles = {row["bug"]: str(row["title"]) for row in comparison["ranking"]}
    bugs = verdict.removeprefix(ONE_OF).split(", ")
    named = " or ".join(titles.get(bug, bug) for bug in bugs)
    answer, kind = VERDICTS.get(verdict, (f"Bug: {named}", "bad"))
    # Of a site, the comparison of all sites says whether it is the one that differs.
    is_accused = comparison.get("is_accused", True)
    if kind == "bad" and not is_accused:
        return f"Perhaps, or another site. {answer}", "unsure"
    return answer, kind


def _verdict_card(
    facts: RunFacts,
    content: Mapping[str, Any],
    comparison: Mapping[str, Any],
) -> Card:
    answer, kind = verdict_of(comparison)
    step = next_step(facts.config, comparison, facts.name)
    texts = [str(comparison["sentence"]), step]
    planted = content["planted"]
    # A verdict of an experiment. Without this sentence a reader would believe that
    # somebody's data have the bug.
    if planted is not None:
        where = shortened(str(planted["where"]))
        texts.append(f"This was a test: {planted['bug']} was planted in {where}.")
    shown = [text for text in texts if text]
    return Card(_title(facts, comparison), answer, texts=shown, kind=kind)


def _title(facts: RunFacts, comparison: Mapping[str, Any]) -> str:
    return f"{facts.name}: {comparison['suspicious']} against {comparison['healthy']}"


def _comparisons(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the comparisons; names of cohorts and sites are others', and cut."""
    comparisons: list[dict[str, Any]] = []
    for comparison in content["comparisons"]:
        names = {
            "suspicious": shortened(str(comparison["suspicious"])),
            "healthy": shortened(str(comparison["healthy"])),
        }
        comparisons.append({**comparison, **names})
    return comparisons


def _readable(diagnosis: DiagnosisFacts) -> AbstractContextManager[None]:
    """Makes whatever a changed file causes one error that names it."""
    problem = f"{diagnosis.run / DIAGNOSIS}: it is broken"
    remedy = f"`fedgs debug --output {diagnosis.run}` writes it again"
    return wrap_error(Exception, problem, remedy)
