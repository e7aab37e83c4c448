"""What an epsilon means, in sentences for people who have not read docs/privacy.md.

Privacy: public, as the privacy label that all of it is made of.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedgs.privacy.accountant import CHANGES
from fedgs.privacy.rounding import upper
from fedgs.runs.data_card import to_outsiders

ABSURD_EPSILON = 100.0  # a larger one protects nobody
MOST_EXPONENT = 100.0  # beyond it a factor is no number to print
# What an epsilon is about, by adversary.
SEEN_BY = {
    "release": "is computed from the published generators",
    "server": "the server computes from all that it receives",
    "secagg": "the server computes from the sums that it receives",
    "unmasked": "the server computes if the masks fail",
}
# Against whom an epsilon holds, to be read after "against".
AGAINST = {
    "release": "everybody who sees only what is published",
    "server": "a server that sees every answer",
    "secagg": "a server that sees only sums of answers",
    "unmasked": "a server that sees every answer because the masks failed",
}


def protection(label: Mapping[str, Any]) -> str:
    """Returns who is protected against whom, and how much, for a layman.

    Args:
        label: the label of the run; see `fedgs.privacy_label`.
    """
    epsilon = label["epsilon"]
    if epsilon is None:
        return f"none; {label['guarantee']}"
    against = AGAINST[label["adversary"]]
    unit = label["unit_of_privacy"]
    delta = upper(label["delta"], 6)
    text = (
        f"epsilon {upper(epsilon)} ({label['relation']}, delta {delta}) for {unit}, "
        f"against {against} (a smaller epsilon protects more)"
    )
    # Without its first part, which says only that there is a guarantee: so does `text`.
    caveats = label["guarantee"].split("; ")[1:]
    return "; ".join([text, *caveats])


def explained(label: Mapping[str, Any]) -> list[str]:
    """Returns what the one epsilon of a run means: a sentence an item.

    Args:
        label: the label of the run; see `fedgs.privacy_label`.
    """
    epsilon = label["epsilon"]
    if epsilon is None:
        return [f"This run has no epsilon to quote: {label['guarantee']}."]
    adversary = label["adversary"]
    relation = label["relation"]
    unit = label["unit_of_privacy"]
    delta = upper(label["delta"], 6)
    if epsilon < MOST_EXPONENT:
        factor = f"{upper(math.exp(epsilon), 3)} (e^epsilon)"
    else:
        factor = "e^epsilon"
    # A unit such as "one shard of the data, not a person" needs its second comma.
    subject = f"{unit}," if "," in unit.partition("(")[0] else unit
    lines = [
        f"epsilon {upper(epsilon)} (adversary {adversary}, {relation}, delta {delta}, "
        f"unit: {unit})",
        f"This means: whether {subject} {CHANGES[relation]} changes the probability of "
        f"anything that {SEEN_BY[adversary]} by a factor of at most {factor}, plus "
        f"{delta} (delta). A smaller epsilon protects more.",
        f"In public: {to_outsiders(label)}.",
    ]
    # Without its first part, which says only that there is a guarantee: so do these.
    caveats = label["guarantee"].split("; ")[1:]
    if caveats:
        lines.append(f"Please note: {'; '.join(caveats)}.")
    public = [without_public(text) for text in label["public"]]
    lines.append(f"Not protected, because public: {'; '.join(public)}.")
    return lines


def without_public(condition: str) -> str:
    """Returns a condition without the word that it begins with, to stand behind it."""
    return condition.removeprefix("public data: ").removeprefix("public: ")


def legend(adversaries: Iterable[str], relations: Iterable[str]) -> list[str]:
    """Returns a line on each adversary and relation of a table, each once."""
    lines = [f"{name}: {AGAINST[name]}" for name in dict.fromkeys(adversaries)]
    lines += [
        f"{name}: hides whether it {CHANGES[name]}" for name in dict.fromkeys(relations)
    ]
    return lines
