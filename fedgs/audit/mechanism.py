"""Attack A: one round of the recorded mechanism, many times, with a worst-case client.

The other attacks are B, one run with canaries (`one_run`), and C, membership inference
on samples, which shows harm and never safety (`membership`). `bounds` turns counts into
epsilons that hold with a confidence.

The client answers every fake with the same gradient, a million times longer than C, so
that clipping matters: +10^6 C e ("inside") against -10^6 C e (replace-one) or 0
(zero-out). The release is that of `fedgs.round.answer` with the run's clip bound, B and
noise: it clips, sums over the node's clients and adds noise, and a bug in any of that
shows here. The test looks at <release, e>, summed over the B samples; for Gaussian
noise no other does better.

It is made twice. A million rounds have one coordinate: where noise is equal and
independent in all of them, which `noise` tests, that shows as much as all of them do,
and it takes seconds. Fewer rounds have the run's shape, in directions of all, of some
and of one of its coordinates; there the mean of <release, e> decides, which is the
sufficient statistic of Gaussian noise. Trials lie along the axis of the samples: one
call holds many rounds of B samples each.

Source: Jagielski, Ullman, Oprea, "Auditing differentially private machine learning",
NeurIPS 2020; Nasr et al., "Adversary instantiation", S&P 2021 (worst-case gradients).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedgs.audit import bounds
from fedgs.audit.bounds import ErrorRates, Scores
from fedgs.audit.canaries import INSIDE, OUTSIDE
from fedgs.audit.crafted_releases import directions, node_scores
from fedgs.audit.finding import OF_BOUNDS, Finding
from fedgs.config.rounds import rounds_alike, terms_at
from fedgs.config.run_config import ResolvedConfig
from fedgs.methods.schedule import EVERYONE, Clients, clients_of, select
from fedgs.privacy.accountant import statements
from fedgs.privacy.gaussian import epsilon_from_mu, fixed_law
from fedgs.privacy.ledger import Event
from fedgs.privacy.participation import COUNT_THEOREM, MIXTURE_THEOREM
from fedgs.privacy.plan import Plan, costs_of, relations_of
from fedgs.randomness import secret
from fedgs.round.run import new_event

CHOICE_SHARE = 0.2  # trials on which the threshold is chosen, on top of the others
MAX_DRAWS = 2e9  # of noise; with a large B or many nodes there are fewer trials
WHOLE_DRAWS = 1 / 12  # of them, for releases of the run's shape
MOST_WHOLE = 2000  # of these in a direction: the mean of more would be hardly sharper
# Of the chance that a bound is too large: other than the two bounds by counts, that of
# means is so as often as it may be.
WHOLE_SHARE = 0.002


class Claim(NamedTuple):
    """One epsilon for one round, and who would have to refute it.

    Attributes:
        adversary: a key of `fedgs.privacy.accountant.ADVERSARIES`.
        relation: a key of `fedgs.privacy.plan.SENSITIVITIES`.
        shares: nodes whose noise the adversary cannot take away.
        epsilon: of one round; None means unbounded.
        theorem: what it rests on.
        mu: of one round, where the claim is a Gaussian curve; else None.
        view: "asked" (the client takes part), "seen" (it is drawn, the adversary sees
            whether) or "hidden" (the adversary does not see it).
    """

    adversary: str
    relation: str
    shares: int
    epsilon: float | None
    theorem: str
    mu: float | None
    view: str


def weakest_rounds(config: ResolvedConfig, events: Sequence[Event]) -> dict[str, int]:
    """Returns for each kind of release a round with the least recorded noise ratio.

    Args:
        config: of the run.
        events: of its ledger; none: of all rounds as they are planned.
    """
    planned = [alike.first for alike in rounds_alike(config)]
    events = events or [new_event(config, round, EVERYONE, 1) for round in planned]
    by_cost = sorted(events, key=lambda event: costs_of(event, 0))
    # The last one of a kind has the highest cost.
    return {event.release: event.round for event in by_cost}


def recorded_plan(config: ResolvedConfig, events: Sequence[Event]) -> Plan:
    """Returns the plan of a run with the C, B and noise that its ledger records.

    Of the event with the least noise ratio, where they differ; a plan of such rounds
    only. What the code really does is decided by `config`; a difference between the
    two is a finding.

    Raises:
        UserError: the configuration is not resolved.
    """
    plan = Plan.from_config(config)
    if not events:
        return plan
    event = max(events, key=lambda event: costs_of(event, 0))
    return dataclasses.replace(
        plan,
        releases=(),
        noise_multiplier=event.noise_multiplier,
        clip_bound=event.clip_bound,
        batch_size=event.batch_size,
    )


def claims_of_one_round(plan: Plan, delta: float) -> list[Claim]:
    """Returns what the accountant says about one round of a plan.

    Given that the client takes part, for every adversary and relation; and, where the
    participants are drawn at random, with the draw counted in.

    Raises:
        UserError: delta is out of range, or the plan has no noise multiplier.
    """
    found: list[Claim] = []
    for adversary in plan.adversaries:
        shares = plan.shares(adversary, colluding=0)
        for relation in relations_of(plan.privacy_unit):
            ratio = plan.ratio(adversary, relation, colluding=0)
            mu = 1 / ratio if ratio else math.inf
            epsilon = fixed_law(1, ratio).epsilon(delta)
            stated = epsilon if epsilon < math.inf else None
            who = (adversary, relation, shares)
            found.append(Claim(*who, stated, COUNT_THEOREM, mu, "asked"))
    one_round = dataclasses.replace(plan, num_rounds=1)
    for row in statements(one_round, delta):
        if row.theorem != COUNT_THEOREM:
            shares = plan.shares(row.adversary, colluding=0)
            view = "seen" if row.theorem == MIXTURE_THEOREM else "hidden"
            who = (row.adversary, row.relation, shares)
            found.append(Claim(*who, row.epsilon, row.theorem, None, view))
    return found


def audit_rounds(
    config: ResolvedConfig,
    events: Sequence[Event],
    trials: int,
    max_draws: float = MAX_DRAWS,
    num_more: int = 0,
    is_wanted: Callable[[Claim], bool] = lambda claim: True,
) -> list[Finding]:
    """Attacks one round of each kind of release that a run has; see `audit_round`.

    Privacy: public; reads no data.

    Args:
        config: resolved.
        events: of the run's ledger.
        trials: of each test, at least 100.
        max_draws: of noise.
        num_more: audits whose bounds stand beside these.
        is_wanted: chooses among the claims.
    """
    weakest, found = weakest_rounds(config, events), list[Finding]()
    for kind, round in sorted(weakest.items()):
        own = [event for event in events if event.release == kind]
        own = own or [new_event(config, round, EVERYONE, 1)]
        claims = claims_of_one_round(recorded_plan(config, own), config.delta)
        asked = (config.delta, trials, max_draws, round, len(weakest) + num_more)
        found += audit_round(config, [*filter(is_wanted, claims)], *asked)
    return found


def audit_round(
    config: ResolvedConfig,
    claims: Sequence[Claim],
    delta: float,
    trials: int,
    max_draws: float = MAX_DRAWS,
    round: int = 1,
    num_audits: int = 1,
) -> list[Finding]:
    """Attacks one round and returns a lower bound for each claim.

    All bounds of all audits hold together with probability 0.95. With a Gaussian claim,
    which covers every delta at once, the bound is that of mu, as an epsilon at `delta`;
    the bound without that, from Eq. 1 of `bounds` alone, is
    `details["epsilon_any_curve"]`.

    Privacy: public; reads no data.

    Args:
        config: resolved; decides the mechanism that is run.
        claims: what to attack, from the *record* of the run; not empty.
        delta: of the claims.
        trials: of each test, at least 100.
        max_draws: of noise, for the attacked node and for the others; there are fewer
            trials where B is large or many nodes' noise is summed.
        round: a round of the kind that is attacked; see `weakest_rounds`.
        num_audits: this one and those whose bounds stand beside it.
    """
    # Draws by the run's own secret would be the same in every audit.
    config = dataclasses.replace(config, noise_seed=None, selection_key=secret())
    total = int(trials * (1 + CHOICE_SHARE))
    simulation = _Simulation(config, claims, total, max_draws, round)
    alpha = OF_BOUNDS / len(claims) / num_audits
    return [_attack(claim, simulation, delta, alpha) for claim in claims]


def _attack(
    claim: Claim, simulation: "_Simulation", delta: float, alpha: float
) -> Finding:
    outside, inside = simulation.scores(claim)
    split = int(len(inside) * CHOICE_SHARE / (1 + CHOICE_SHARE))
    of_whole = WHOLE_SHARE * alpha
    if claim.mu is not None:
        # Three bounds, of which the best one is reported.
        alpha = (alpha - of_whole) / 2
    any_curve = bound_epsilon(outside, inside, split, delta, alpha)
    details = {"trials": len(inside) - split, "epsilon_any_curve": any_curve[0]}
    bound, rates = any_curve
    if claim.mu is not None:
        threshold = bounds.best_threshold(
            outside[:split], inside[:split], bounds.mu_at_least, alpha
        )
        rates = bounds.error_rates(outside[split:], inside[split:], threshold, alpha)
        mu = bounds.mu_at_least(rates)
        if claim.mu < math.inf:
            whole = simulation.whole_mu(claim, of_whole)
            details |= {"mu": claim.mu, "mu_of_whole_releases": whole}
            details |= {"whole_releases": simulation.num_whole}
            mu = max(mu, whole)
            bound = max(bound, epsilon_from_mu(mu, delta))
        details |= {"mu_lower_bound": mu}
    where = {"asked": "takes part", "seen": "drawn", "hidden": "drawn, unseen"}
    kind = simulation.terms.release
    what = "" if kind == "gradient" else f", {kind}"
    return Finding(
        attack=f"A {where[claim.view]}{what}",
        adversary=claim.adversary,
        relation=claim.relation,
        rounds=1,
        delta=delta,
        lower_bound=bound,
        epsilon=claim.epsilon,
        theorem=claim.theorem,
        details=details | rates._asdict(),
    )


def bound_epsilon(
    outside: Scores, inside: Scores, split: int, delta: float, alpha: float
) -> tuple[float, ErrorRates]:
    """Returns a lower bound of epsilon by Eq. 1 of `bounds`, and its error rates.

    Args:
        outside: scores without the client's data, shape (n,).
        inside: scores with it, shape (n,).
        split: the first `split` trials choose the threshold, the others are counted.
        delta: at least 0 and below 1.
        alpha: the chance that the bound is wrong.
    """
    value = partial(bounds.epsilon_at_least, delta=delta)
    chosen_on = outside[:split], inside[:split]
    threshold = bounds.best_threshold(*chosen_on, value, alpha, slack=0.05)
    rates = bounds.error_rates(outside[split:], inside[split:], threshold, alpha)
    return value(rates), rates


# ------------------------------------------------------------------ trials


class _Simulation:
    """The releases of all trials: the attacked client's node and the other nodes."""

    def __init__(
        self,
        config: ResolvedConfig,
        claims: Sequence[Claim],
        total: int,
        max_draws: float,
        round: int,
    ) -> None:
        self.terms = terms = terms_at(config, round)
        views = {claim.view for claim in claims}
        signs = {INSIDE, *(OUTSIDE[claim.relation] for claim in claims)}
        if "hidden" in views:
            signs.add(-1.0)  # what the clients who are drawn instead answer
        total = min(total, int(max_draws / (terms.batch_size * len(signs))))
        self.own = {s: node_scores(config, np.full(total, s), 0, round) for s in signs}
        self.others: dict[int, Scores] = {}
        for shares in {claim.shares for claim in claims}:
            draws = terms.batch_size * max(shares - 1, 1)
            # Gradients of 0: the adversary knows what the clients beside it send.
            silent = np.zeros(min(total, int(max_draws / draws)))
            rest = (node_scores(config, silent, n, round) for n in range(1, shares))
            self.others[shares] = sum(rest, start=silent)
        if views != {"asked"}:
            self.is_asked = asked(config, total)
        # Of the run's shape, a few releases in each direction; at least one.
        self.whole: list[dict[float, Scores]] = []
        along = directions(terms.shape[1:])
        draws = math.prod(terms.shape) * len(signs) * len(along)
        most = min(total, MOST_WHOLE)
        self.num_whole = max(1, min(most, int(max_draws * WHOLE_DRAWS / draws)))
        if not any(claim.mu for claim in claims):
            return
        for e in along:
            each = {sign: np.full(self.num_whole, sign) for sign in signs}
            scores = {s: node_scores(config, x, 0, round, e) for s, x in each.items()}
            self.whole.append(scores)

    def whole_mu(self, claim: Claim, alpha: float) -> float:
        """Returns the least mu that releases of the run's shape show, by any direction.

        Of the other nodes' noise it takes what is claimed.
        """
        std = self.terms.noise_std * math.sqrt(self.terms.batch_size)
        if not std:
            return 0.0  # counts show it
        out, of_each = OUTSIDE[claim.relation], alpha / len(self.whole)
        found = [
            bounds.mu_of_means(scores[out], scores[INSIDE], std, of_each)
            for scores in self.whole
        ]
        return max(found) / math.sqrt(claim.shares)

    def scores(self, claim: Claim) -> tuple[Scores, Scores]:
        """Returns one score per trial, outside and inside."""
        others = self.others[claim.shares]
        count = len(others)
        inside = self.own[INSIDE][:count] + others
        outside = self.own[OUTSIDE[claim.relation]][:count] + others
        if claim.view == "asked":
            return outside, inside
        is_asked = self.is_asked[:count]
        instead = -np.inf  # told apart from every release, and worth no guess
        if claim.view == "hidden":
            instead = self.own[-1.0][:count] + others
        return np.where(is_asked, outside, instead), np.where(is_asked, inside, instead)


def asked(config: ResolvedConfig, total: int) -> npt.NDArray[np.bool_]:
    """Returns in which of `total` rounds client 0 is drawn, by the run's own rule.

    Args:
        config: with a seed; decides the selection, K and m.
        total: number of rounds, at least 1.
    """
    drawn: Iterator[Clients] = (select(config, r) for r in range(1, total + 1))
    return np.fromiter((bool(clients_of(x, [0])) for x in drawn), np.bool_, total)
