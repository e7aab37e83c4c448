"""What the report calls things: numbers, and what an epsilon is worth."""

from collections.abc import Iterable

from markupsafe import Markup

from fedgs.cohorts.cohort_file import EXCLUDED
from fedgs.privacy.accountant import CAVEATS
from fedgs.privacy.rounding import upper


def stated(value: float | None) -> str:
    """Returns an epsilon with its name."""
    if value is None:
        return f"ε {upper(value)}"
    return f"ε = {upper(value)}"


def number(value: float) -> str:
    """Returns a number for the reader, at least three digits."""
    size = abs(value)
    is_readable = value == 0 or 0.001 <= size < 1e6
    if not is_readable:
        return f"{value:.3g}"
    if size < 10:
        return f"{value:.3f}"
    if size < 100:
        return f"{value:.2f}"
    return f"{value:.1f}"


def num_bytes(value: float) -> str:
    """Returns a number of bytes with a unit of 1000s."""
    for power, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= power:
            return f"{value / power:.3g} {name}"
    return f"{value:.0f} bytes"


def badge(text: str, kind: str) -> Markup:
    """Returns a few words in the colour of their kind: good, unsure or bad."""
    # `Markup.format` escapes its arguments: the words may come from a run's files.
    return Markup('<span class="badge {}">{}</span>').format(kind, text)


def reading(epsilon: float | None, conditions: Iterable[str]) -> tuple[str, str]:
    """Returns what an epsilon is worth, and its kind: good, unsure or bad.

    Source: docs/privacy.md, "For a data-protection assessment", 4.

    Args:
        epsilon: None without a guarantee.
        conditions: that it stands under.
    """
    text, kind = _worth(epsilon)
    # A small epsilon under an assumption that may fail must not look good.
    for mark in (EXCLUDED, *CAVEATS):
        if any(mark in condition for condition in conditions):
            caveat = mark.partition(":")[0]
            text = f"{text}; {caveat}"
            if kind == "good":
                kind = "unsure"
    return text, kind


def _worth(epsilon: float | None) -> tuple[str, str]:
    if epsilon is None:
        return "no guarantee", "bad"
    if epsilon <= 1:
        return "strong", "good"
    if epsilon <= 10:
        return "limits a typical attack", "good"
    if epsilon <= 100:
        return "weak", "unsure"
    return "no protection in itself", "bad"
