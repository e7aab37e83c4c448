"""The card of what is published: its privacy label in words, and what a hub reads.

Source: https://huggingface.co/docs/hub/datasets-cards
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from fedgs.privacy.rounding import lower, upper

LABEL = "privacy_label.json"
CARD = "README.md"
NO_GUARANTEE = "NO GUARANTEE"  # begins the label of a run that guarantees nothing


def in_words(value: Any, name: str = "") -> str:
    """Returns a field of a privacy label: a list as one item a line.

    Args:
        value: the value of the field.
        name: the name of a number: that of a lower bound is rounded down, others up.
    """
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return ", ".join(
            f"{key} {in_words(inner, key)}" for key, inner in fields.items()
        )
    if isinstance(value, list):
        items = cast(list[Any], value)
        return "".join(f"\n  - {in_words(item)}" for item in items) or "none"
    if value is None:
        return "none"
    if not isinstance(value, float):
        return str(value)
    # Both say "at least": rounded up they would claim more than was shown.
    if name in ("lower_bound", "confidence"):
        return lower(value)
    if name == "delta":
        return upper(value, 6)
    return upper(value)


def to_outsiders(label: Mapping[str, Any]) -> str:
    """Returns the epsilon to quote to an outsider: the largest against the adversary.

    Of two relations it is that of replace-one: it holds whatever other data somebody
    might have had, and nobody has to know what zero-out compares with.

    Privacy: public, as the label.

    Args:
        label: see `fedgs.privacy_label`.
    """
    own: dict[str, float | None] = {}
    for row in label["who_sees_what"]:
        if row["adversary"] == label["adversary"]:
            own = row["epsilon"]
            break
    known = {epsilon: relation for relation, epsilon in own.items() if epsilon}
    if not known:
        return "there is no epsilon to quote"
    largest = max(known)
    return f"to an outsider quote {upper(largest)} ({known[largest]})"


def data_card(count: int, label: Mapping[str, Any]) -> str:
    """Returns the README of images and generator for Hugging Face, with its YAML head.

    Privacy: as the label; without a guarantee it has no tag that claims one.

    Args:
        count: the number of images, at least 1.
        label: of the run that they were drawn from; see `fedgs.privacy_label`.
    """
    tags = "- synthetic"
    # Hubs are searched by tag, where nobody sees a guarantee that is missing.
    if not label["guarantee"].startswith(NO_GUARANTEE):
        tags += "\n- differential-privacy"
    lines: list[str] = []
    for name, value in label.items():
        title = name.replace("_", " ")
        lines.append(f"- **{title}**: {in_words(value, name)}")
    template = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return template.format(
        count=count,
        tags=tags,
        guarantee=label["guarantee"],
        quote=to_outsiders(label),
        words="\n".join(lines),
    )
