"""What an audit found: lower bounds of epsilons, and checks of what they rest on."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

CONFIDENCE = 0.95  # of all rows together
OF_NOISE = 1e-4  # of what is left: that a test of noise refutes what is true
OF_BOUNDS = 1 - CONFIDENCE - OF_NOISE  # that a lower bound is too large
# Verdicts.
HOLDS = "holds"
REFUTED = "REFUTED"
NO_CLAIM = "nothing to refute"


def none_if_infinite(epsilon: float) -> float | None:
    """Returns a claimed epsilon as JSON can have it: None where there is no bound."""
    if epsilon < math.inf:
        return epsilon
    return None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of an audit.

    Privacy: public, where the attacked mechanism held worst-case clients only; a
    finding on private data is as private as the data.

    Attributes:
        attack: A and how the client comes to take part, or B and what was scored.
        adversary: one of `fedgs.privacy.plan.ADVERSARY_COLUMNS`.
        relation: a key of `fedgs.privacy.plan.SENSITIVITIES`.
        rounds: rounds that the claim covers.
        delta: the delta of both epsilons.
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
        if self.lower_bound > self.epsilon:
            return REFUTED
        return HOLDS

    def to_json(self) -> dict[str, Any]:
        """Returns the fields and the verdict as JSON values.

        Privacy: as the finding itself.
        """
        return {**asdict(self), "confidence": CONFIDENCE, "verdict": self.verdict}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One number that the code may not exceed, where every epsilon supposes that.

    Privacy: public; of made-up clients, of settings and of noise.

    Attributes:
        check: what is checked, in a word or two.
        tested: what was done, and what the numbers count.
        found: the largest number that was found.
        allowed: the largest one that agrees with what the ledger claims.
    """

    check: str
    tested: str
    found: float
    allowed: float

    @property
    def verdict(self) -> str:
        """Whether what was found contradicts the claim."""
        # In this order, so that NaN, which compares as false, is refuted.
        if self.found <= self.allowed:
            return HOLDS
        return REFUTED

    def to_json(self) -> dict[str, Any]:
        """Returns the fields and the verdict as JSON values.

        Privacy: public.
        """
        return {**asdict(self), "verdict": self.verdict}
