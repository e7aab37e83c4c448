"""Attack A on a baseline: one release of each kind, by the method's own worst case."""

from collections.abc import Callable, Sequence

import numpy as np

from experiments.baselines.baseline import AuditScores, StepEvent
from fedgs.audit.finding import CONFIDENCE, Finding
from fedgs.audit.mechanism import CHOICE_SHARE, bound_epsilon
from fedgs.privacy.accountant import Statement

ALIKE_IN = ("kind", "what", "sampling_rate", "noise_per_clip")

ClaimOf = Callable[[StepEvent], Statement]
ScoresOf = Callable[[StepEvent, str, int], AuditScores | None]


def attack_releases(
    events: Sequence[StepEvent],
    claim_of: ClaimOf,
    scores_of: ScoresOf,
    trials: int,
) -> list[Finding]:
    """Attacks the first release of each kind; nothing of a method without an attack.

    Args:
        events: what was released.
        claim_of: returns what one event alone is said to cost.
        scores_of: plays an event under a relation so many times: `audit_scores`.
        trials: for each of the two neighbours.
    """
    findings: list[Finding] = []
    attacked = distinct_events(events)
    for event in attacked:
        claim = claim_of(event)
        # Some trials choose the test, and only the others measure it.
        total = int(trials * (1 + CHOICE_SHARE))
        scores = scores_of(event, claim.relation, total)
        if scores is not None:
            alpha = (1 - CONFIDENCE) / len(attacked)  # all are right together
            findings.append(_finding(event, claim, scores, alpha))
    return findings


def distinct_events(events: Sequence[StepEvent]) -> list[StepEvent]:
    """Returns the first event of each kind; of a kind, one release is like another.

    An embedding and a gradient are both sums with noise, of other size and rate.
    """
    kinds: dict[tuple[str, ...], StepEvent] = {}
    for event in events:
        values = [str(event.get(name, "")) for name in ALIKE_IN]
        kind = tuple(values)
        kinds.setdefault(kind, event)
    return list(kinds.values())


def _finding(
    event: StepEvent,
    claim: Statement,
    scores: AuditScores,
    alpha: float,
) -> Finding:
    """Returns a lower bound of what one release costs beside what is claimed."""
    outside, inside = scores
    # Where a trial takes long, either side may have fewer of them than asked.
    count = min(len(outside), len(inside))
    chosen_by = int(count * CHOICE_SHARE / (1 + CHOICE_SHARE))
    bound, rates = bound_epsilon(
        np.asarray(outside[:count], np.float64),
        np.asarray(inside[:count], np.float64),
        chosen_by,
        claim.delta,
        alpha,
    )
    what = event.get("what", event.get("kind", "release"))
    return Finding(
        attack=f"A one release ({what}), one {claim.unit}",
        adversary=claim.adversary,
        relation=claim.relation,
        rounds=1,
        delta=claim.delta,
        lower_bound=bound,
        epsilon=claim.epsilon,
        theorem=claim.theorem,
        details={"trials": float(count - chosen_by), **rates._asdict()},
    )
