"""Attack A on a baseline: one release of each kind, by the method's own worst case."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.baselines.contract import Baseline, Facts
from fedgs.audit.finding import CONFIDENCE, Finding
from fedgs.audit.mechanism import CHOICE_SHARE, bound_epsilon
from fedgs.privacy.accountant import VALID

ALIKE_IN = ("kind", "what", "sampling_rate", "noise_per_clip")


@dataclass(frozen=True)
class Attacked:
    """What an attack needs of a run of a baseline.

    Attributes:
        method: of the run.
        settings: of the method.
        facts: the public numbers of the data.
        events: what was released.
        unit: of the valid guarantee.
        delta: of the claim.
    """

    method: Baseline
    settings: Any
    facts: Facts
    events: Sequence[Mapping[str, Any]]
    unit: str
    delta: float


def attack_releases(run: Attacked, trials: int) -> list[Finding]:
    """Attacks the first release of each kind; nothing of a method without an attack.

    Args:
        run: of a baseline.
        trials: for each of the two neighbours.
    """
    scores = getattr(run.method, "audit_scores", None)
    if scores is None:
        return []
    events = distinct_events(run.events)
    return [attack(run, event, scores, trials, len(events)) for event in events]


def distinct_events(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the first event of each kind; of a kind, one release is like another.

    An embedding and a gradient are both sums with noise, of other size and rate.
    """
    kinds: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for event in events:
        kind = tuple(str(event.get(name, "")) for name in ALIKE_IN)
        kinds.setdefault(kind, event)
    return list(kinds.values())


def attack(
    run: Attacked, event: Mapping[str, Any], scores: Any, trials: int, attacks: int
) -> Finding:
    """Returns a lower bound of what one release costs beside what is claimed.

    Args:
        run: of a method with an attack.
        event: the release.
        scores: the method's `audit_scores`.
        trials: for each of the two neighbours.
        attacks: findings of the audit, which are right together with `CONFIDENCE`.
    """
    rows = run.method.guarantees(run.settings, run.facts, [event], run.delta)
    claim = next(r for r in rows if (r.label, r.unit) == (VALID, run.unit))
    total = int(trials * (1 + CHOICE_SHARE))
    outside, inside = scores(run.settings, run.facts, event, claim.relation, total)
    outside, inside = (np.asarray(x, np.float64) for x in (outside, inside))
    count = min(len(outside), len(inside))
    outside, inside = outside[:count], inside[:count]
    split = int(count * CHOICE_SHARE / (1 + CHOICE_SHARE))
    alpha = (1 - CONFIDENCE) / attacks
    bound, rates = bound_epsilon(outside, inside, split, claim.delta, alpha)
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
        details={"trials": float(count - split), **rates._asdict()},
    )
