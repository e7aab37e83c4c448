"""What `fedgs audit` does with a baseline: its own release against its own claim."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedgs.app.commands.audit_report import conclude
from fedgs.app.commands.audit_request import AuditRequest
from fedgs.app.commands.terminal import Progress
from fedgs.app.tables import epsilon
from fedgs.audit.finding import CONFIDENCE, Finding
from fedgs.audit.mechanism import CHOICE_SHARE, bound_epsilon
from fedgs.baselines.contract import Guarantee
from fedgs.baselines.frame import BaselineRun, open_run
from fedgs.errors import UserError

ALIKE = ("kind", "what", "sampling_rate", "noise_per_clip")


def audit(request: AuditRequest, as_json: bool) -> bool:
    """Attacks one release of each kind and returns whether the claims hold.

    The worst-case unit is the method's own `audit_scores`. Everything goes to
    RUN/audit/.

    Raises:
        UserError: the method has no such attack, or released nothing.
    """
    run = open_run(request.run)
    if request.full:
        raise UserError("full: is for runs of `fedgs train`; leave out --full")
    if not (run.releases and hasattr(run.method, "audit_scores")):
        what = "has no audit yet" if run.unit != "none" else "claims no epsilon"
        raise UserError(
            f"RUN = {request.run}: {run.method.name} {what}; "
            "`fedgs privacy RUN` states its epsilons"
        )
    started = time.monotonic()
    with Progress() as progress:
        progress.doing(f"A: {request.trials} releases of each kind")
        findings = attack_releases(run, request.trials)
    seconds = round(time.monotonic() - started, 1)
    report = {"method": run.method.name, "seconds": seconds}
    whole = [epsilon(row.epsilon) for row in run.guarantees()[:1]]
    notes = [f"one release each; the whole run claims {', '.join(whole)}"]
    return conclude(run.folder.path, report, findings, notes, as_json)


def attack_releases(run: BaselineRun, trials: int) -> list[Finding]:
    """Attacks the first release of each kind; nothing of a method without an attack.

    Args:
        run: of a baseline.
        trials: for each of the two neighbours.
    """
    scores = getattr(run.method, "audit_scores", None)
    events = distinct_events(run) if scores else []
    return [attack(run, event, scores, trials, len(events)) for event in events]


def distinct_events(run: BaselineRun) -> list[Mapping[str, Any]]:
    """Returns the first event of each kind; of a kind, one release is like another.

    An embedding and a gradient are both sums with noise, of other size and rate.
    """
    kinds: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for release in run.releases:
        kind = tuple(str(release.event.get(name, "")) for name in ALIKE)
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
    claim = _claim(run, event)
    total = int(trials * (1 + CHOICE_SHARE))
    outside, inside = scores(run.settings, run.facts, event, claim.relation, total)
    outside, inside = (np.asarray(x, np.float64) for x in (outside, inside))
    count = min(len(outside), len(inside))
    outside, inside = outside[:count], inside[:count]
    split = int(count * CHOICE_SHARE / (1 + CHOICE_SHARE))
    alpha = (1 - CONFIDENCE) / attacks
    bound, rates = bound_epsilon(outside, inside, split, claim.delta, alpha)
    return Finding(
        attack=f"A one release ({_what(event)}), one {claim.unit}",
        adversary="release",
        relation=claim.relation,
        rounds=1,
        delta=claim.delta,
        lower_bound=bound,
        epsilon=claim.epsilon,
        theorem=claim.theorem,
        details={"trials": float(count - split), **rates._asdict()},
    )


def _what(event: Mapping[str, Any]) -> str:
    return str(event.get("what", event.get("kind", "release")))


def _claim(run: BaselineRun, event: Mapping[str, Any]) -> Guarantee:
    asked = (run.settings, run.facts, [event], run.config.delta)
    rows = run.method.guarantees(*asked)
    return next(row for row in rows if (row.label, row.unit) == ("valid", run.unit))
