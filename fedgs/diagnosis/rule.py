"""What a verdict needs: error rate, size of a bug, and how many groups there are.

Imports no tensor library. A value out of range is refused with the name of its flag.
"""

from dataclasses import dataclass

from fedgs.config.fields import check_ranges, flag

INTERVAL_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Rule:
    """What a verdict needs.

    Attributes:
        alpha: largest probability to name any bug, or to see any difference, where the
            groups are exchangeable.
        min_effect: share of spoilt owners from which on a bug is one.

    Raises:
        UserError: a value that is not above 0 and below 1.
    """

    alpha: float = flag(
        0.05,
        "Largest probability that a bug is reported although there is none.",
        above=0,
        below=1,
    )
    min_effect: float = flag(
        0.25,
        "Smallest share of affected clients that is reported as a bug.",
        above=0,
        below=1,
    )

    def __post_init__(self) -> None:
        """Checks the ranges."""
        check_ranges(self)
