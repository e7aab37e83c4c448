"""Attack A on a baseline: one release of each kind, by the method's own worst case."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedgs.audit.finding import CONFIDENCE, Finding
from fedgs.audit.mechanism import CHOICE_SHARE, bound_epsilon
from fedgs.baselines.frame import BaselineRun
from fedgs.privacy.accountant import VALID

# Releases that agree in these cost the same: one of them is attacked.
_KIND_FIELDS = ("kind", "what", "sampling_rate", "noise_per_clip")


def attack_releases(run: BaselineRun, trials: int) -> list[Finding]:
    """Attacks the first release of each kind; nothing of a method without an attack.

    Args:
        run: of a baseline.
        trials: for each of the two neighbours.
    """
    scores = getattr(run.method, "audit_scores", None)
    if scores is None:
        return []
    events = distinct_events(run)
    return [attack(run, event, scores, trials, len(events)) for event in events]


def distinct_events(run: BaselineRun) -> list[Mapping[str, Any]]:
    """Returns the first event of each kind; of a kind, one release is like another.

    An embedding and a gradient are both sums with noise, of other size and rate.
    """
    kinds: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for release in run.releases:
        kind = tuple(str(release.event.get(name, "")) for name in _KIND_FIELDS)
        kinds.setdefault(kind, release.event)
    return list(kinds.values())


def attack(
    run: BaselineRun, event: Mapping[str, Any], scores: Any, trials: int, attacks: int
) -> Finding:
    """Returns a lower bound of what one release costs beside what is claimed.

    Args:
        run: of a method with an attack.
        event: the release.
        scores: the method's `audit_scores`.
        trials: for each of the two neighbours.
        attacks: findings of the audit, which are right together with `CONFIDENCE`.
    """
    rows = run.method.guarantees(run.settings, run.facts, [event], run.config.delta)
    valid = [row for row in rows if row.label == VALID and row.unit == run.unit]
    claim = valid[0]
    total = int(trials * (1 + CHOICE_SHARE))
    outside, inside = scores(run.settings, run.facts, event, claim.relation, total)
    # A method may return fewer scores than it was asked for, of each neighbour.
    count = min(len(outside), len(inside))
    outside = np.asarray(outside, np.float64)[:count]
    inside = np.asarray(inside, np.float64)[:count]
    # The first part chooses the threshold, the rest is counted.
    split = int(count * CHOICE_SHARE / (1 + CHOICE_SHARE))
    # The union bound: all findings are right together.
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
        details={"trials": float(count - split)} | rates._asdict(),
    )
