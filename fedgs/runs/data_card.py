"""The card of what is published: its privacy label in words, and what a hub reads.

Source: https://huggingface.co/docs/hub/datasets-cards
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgs.privacy.rounding import lower, upper

LABEL, CARD = "privacy_label.json", "README.md"
NO_GUARANTEE = "NO GUARANTEE"  # begins the label of a run that guarantees nothing


def in_words(value: Any, name: str = "") -> str:
    """Returns a field of a privacy label: a list as one item a line.

    Args:
        value: of the field.
        name: of a number: that of a lower bound is rounded down, others up.
    """
    if isinstance(value, dict):
        return ", ".join(f"{n} {in_words(inner, n)}" for n, inner in value.items())
    if isinstance(value, list):
        return "".join(f"\n  - {in_words(item)}" for item in value) or "none"
    if value is None:
        return "none"
    if not isinstance(value, float):
        return str(value)
    is_least = name in ("lower_bound", "confidence")
    return lower(value) if is_least else upper(value, 6 if name == "delta" else 4)


def to_outsiders(label: Mapping[str, Any]) -> str:
    """Returns the epsilon to quote to an outsider: the largest against the adversary.

    Of two relations it is that of replace-one: it holds whatever other data somebody
    might have had, and nobody has to know what zero-out compares with.

    Privacy: public, as the label.

    Args:
        label: see `fedgs.privacy_label`.
    """
    seen = label["who_sees_what"]
    own = [row["epsilon"] for row in seen if row["adversary"] == label["adversary"]]
    known = {n: relation for row in own[:1] for relation, n in row.items() if n}
    if not known:
        return "there is no epsilon to quote"
    return f"to an outsider quote {upper(max(known))} ({known[max(known)]})"


def data_card(count: int, label: Mapping[str, Any]) -> str:
    """Returns the README of images and generator for Hugging Face, with its YAML head.

    Privacy: as the label; without a guarantee it has no tag that claims one.

    Args:
        count: of images, at least 1.
        label: of the run that they were drawn from; see `fedgs.privacy_label`.
    """
    is_private = not label["guarantee"].startswith(NO_GUARANTEE)
    words = (f"- **{n.replace('_', ' ')}**: {in_words(v, n)}" for n, v in label.items())
    template = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return template.format(
        count=count,
        tags="- synthetic" + "\n- differential-privacy" * is_private,
        guarantee=label["guarantee"],
        quote=to_outsiders(label),
        words="\n".join(words),
    )
