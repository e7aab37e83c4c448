"""What an attack found: a lower bound beside the epsilon that is claimed."""

from dataclasses import asdict, dataclass, field
from typing import Any

CONFIDENCE = 0.95
HOLDS, REFUTED, NO_CLAIM = "holds", "REFUTED", "nothing to refute"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of an audit.

    Privacy: public, where the attacked mechanism held worst-case clients only; a
    finding on private data is as private as the data.

    Attributes:
        attack: A and how the client comes to take part, or B and what was scored.
        adversary: a key of `fedgs.privacy.accountant.ADVERSARIES`.
        relation: a key of `fedgs.privacy.accountant.RELATIONS`.
        rounds: rounds that the claim covers.
        delta: of both epsilons.
        lower_bound: at least 0; the mechanism has no smaller epsilon, with confidence
            0.95 for all rows of an audit together.
        epsilon: the claim, at least 0; None means unbounded.
        theorem: what the claim rests on.
        details: further numbers: trials, error rates, mu, guesses.
    """

    attack: str
    adversary: str
    relation: str
    rounds: int
    delta: float
    lower_bound: float
    epsilon: float | None
    theorem: str
    details: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def verdict(self) -> str:
        """Whether the lower bound contradicts the claim."""
        if self.epsilon is None:
            return NO_CLAIM
        return REFUTED if self.lower_bound > self.epsilon else HOLDS

    def to_json(self) -> dict[str, Any]:
        """Returns the fields and the verdict as JSON values.

        Privacy: as the finding itself.
        """
        return {**asdict(self), "confidence": CONFIDENCE, "verdict": self.verdict}
