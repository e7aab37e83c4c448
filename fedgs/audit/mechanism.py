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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedgs.audit import bounds
from fedgs.audit.bounds import ErrorRates, Scores
from fedgs.audit.canaries import INSIDE_SIGN, OUTSIDE_SIGNS
from fedgs.audit.crafted_releases import directions, node_scores
from fedgs.audit.finding import OF_BOUNDS, Finding, none_if_infinite
from fedgs.config.rounds import rounds_alike, terms_at
from fedgs.config.run_config import ResolvedConfig
from fedgs.methods.schedule import EVERYONE, clients_of, select
from fedgs.privacy.accountant import statements
from fedgs.privacy.gaussian import epsilon_from_mu, fixed_law
from fedgs.privacy.ledger import Event
from fedgs.privacy.participation import COUNT_THEOREM, MIXTURE_THEOREM
from fedgs.privacy.plan import Plan, costs_of, relations_of
from fedgs.randomness import secret
from fedgs.round.run import new_event

CHOICE_SHARE = 0.2  # trials on which the threshold is chosen, on top of the others
MOST_DRAWS = 2e9  # of noise; with a large B or many nodes there are fewer trials
WHOLE_DRAWS = 1 / 12  # of them, for releases of the run's shape
MOST_WHOLE = 2000  # of these in a direction: the mean of more would be hardly sharper
# Of the chance that a bound is too large: other than the two bounds by counts, that of
# means is so as often as it may be.
WHOLE_SHARE = 0.002


class Claim(NamedTuple):
    """One epsilon for one round, and who would have to refute it.

    Attributes:
        adversary: one of `fedgs.privacy.plan.ADVERSARY_COLUMNS`.
        relation: a key of `fedgs.privacy.plan.SENSITIVITIES`.
        shares: nodes whose noise the adversary cannot take away.
        epsilon: the epsilon of one round; None means unbounded.
        theorem: what it rests on.
        mu: the mu of one round, where the claim is a Gaussian curve; else None.
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
        config: the run's configuration.
        events: the events of its ledger; none means all rounds as planned.
    """
    if not events:
        planned = [alike.first for alike in rounds_alike(config)]
        events = [new_event(config, round, EVERYONE, 1) for round in planned]
    by_cost = sorted(events, key=_cost_of)
    # The last one of a kind has the highest cost.
    return {event.release: event.round for event in by_cost}


def _cost_of(event: Event) -> tuple[float, ...]:
    """Returns what an event costs: the more, the less its noise ratio is."""
    return costs_of(event, colluding=0)


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
    event = max(events, key=_cost_of)
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
        for relation in relations_of(plan.privacy_unit):
            ratio = plan.ratio(adversary, relation, colluding=0)
            epsilon = fixed_law(1, ratio).epsilon(delta)
            mu = math.inf  # without noise
            if ratio:
                mu = 1 / ratio
            claim = Claim(
                adversary=adversary,
                relation=relation,
                shares=plan.shares(adversary, colluding=0),
                epsilon=none_if_infinite(epsilon),
                theorem=COUNT_THEOREM,
                mu=mu,
                view="asked",
            )
            found.append(claim)
    one_round = dataclasses.replace(plan, num_rounds=1)
    for row in statements(one_round, delta):
        if row.theorem == COUNT_THEOREM:
            continue
        view = "hidden"
        if row.theorem == MIXTURE_THEOREM:
            view = "seen"
        claim = Claim(
            adversary=row.adversary,
            relation=row.relation,
            shares=plan.shares(row.adversary, colluding=0),
            epsilon=row.epsilon,
            theorem=row.theorem,
            # A mixture is no Gaussian curve.
            mu=None,
            view=view,
        )
        found.append(claim)
    return found


def audit_rounds(
    config: ResolvedConfig,
    events: Sequence[Event],
    trials: int,
    max_draws: float = MOST_DRAWS,
    num_more: int = 0,
    is_wanted: Callable[[Claim], bool] = lambda claim: True,
) -> list[Finding]:
    """Attacks one round of each kind of release that a run has; see `audit_round`.

    Privacy: public; reads no data.

    Args:
        config: resolved.
        events: the events of the run's ledger.
        trials: the number of trials of each test, at least 100.
        max_draws: the number of draws of noise.
        num_more: audits whose bounds stand beside these.
        is_wanted: chooses among the claims.
    """
    weakest = weakest_rounds(config, events)
    found: list[Finding] = []
    for kind, round in sorted(weakest.items()):
        own = [event for event in events if event.release == kind]
        if not own:  # nothing was released yet
            own = [new_event(config, round, EVERYONE, 1)]
        plan = recorded_plan(config, own)
        claims = claims_of_one_round(plan, config.delta)
        wanted = [claim for claim in claims if is_wanted(claim)]
        found += audit_round(
            config,
            wanted,
            delta=config.delta,
            trials=trials,
            max_draws=max_draws,
            round=round,
            num_audits=len(weakest) + num_more,
        )
    return found


def audit_round(
    config: ResolvedConfig,
    claims: Sequence[Claim],
    delta: float,
    trials: int,
    max_draws: float = MOST_DRAWS,
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
        delta: the claims' delta.
        trials: the number of trials of each test, at least 100.
        max_draws: of noise, for the attacked node and for the others; there are fewer
            trials where B is large or many nodes' noise is summed.
        round: a round of the kind that is attacked; see `weakest_rounds`.
        num_audits: this one and those whose bounds stand beside it.
    """
    # Draws by the run's own secret would be the same in every audit.
    config = dataclasses.replace(config, noise_seed=None, selection_key=secret())
    total = int(trials * (1 + CHOICE_SHARE))
    simulation = Simulation(
        config,
        claims,
        total=total,
        max_draws=max_draws,
        round=round,
    )
    # The union bound: together, all bounds are wrong with chance OF_BOUNDS at most.
    alpha = OF_BOUNDS / len(claims) / num_audits
    return [attack_claim(claim, simulation, delta, alpha) for claim in claims]


_IN_WORDS = {"asked": "takes part", "seen": "drawn", "hidden": "drawn, unseen"}


def attack_claim(
    claim: Claim,
    simulation: "Simulation",
    delta: float,
    alpha: float,
) -> Finding:
    """Returns a lower bound for a claim, from the trials of a simulation.

    Privacy: public; reads no data.

    Args:
        claim: what is attacked.
        simulation: the simulation of the round that the claim is about.
        delta: the claim's delta.
        alpha: the chance that the bound is wrong.
    """
    outside, inside = simulation.scores(claim)
    split = int(len(inside) * CHOICE_SHARE / (1 + CHOICE_SHARE))
    of_whole = WHOLE_SHARE * alpha
    if claim.mu is not None:
        # Three bounds, of which the best one is reported.
        alpha = (alpha - of_whole) / 2
    bound, rates = bound_epsilon(outside, inside, split, delta, alpha)
    details = {"trials": len(inside) - split, "epsilon_any_curve": bound}
    if claim.mu is not None:
        threshold = bounds.best_threshold(
            outside[:split],
            inside[:split],
            value=bounds.mu_at_least,
            alpha=alpha,
        )
        # On the other trials, for a threshold that is measured by its own is luck.
        rates = bounds.error_rates(
            outside[split:],
            inside[split:],
            threshold,
            alpha,
        )
        mu = bounds.mu_at_least(rates)
        if claim.mu < math.inf:
            whole = simulation.whole_mu(claim, of_whole)
            details["mu"] = claim.mu
            details["mu_of_whole_releases"] = whole
            details["whole_releases"] = simulation.num_whole
            mu = max(mu, whole)
            bound = max(bound, epsilon_from_mu(mu, delta))
        details["mu_lower_bound"] = mu
    kind = simulation.terms.release
    attack = f"A {_IN_WORDS[claim.view]}"
    if kind != "gradient":
        attack += f", {kind}"
    return Finding(
        attack=attack,
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
    outside: Scores,
    inside: Scores,
    split: int,
    delta: float,
    alpha: float,
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
    # On other trials than those that are counted: else the best one would be luck.
    threshold = bounds.best_threshold(
        outside[:split],
        inside[:split],
        value=value,
        alpha=alpha,
        slack=0.05,
    )
    rates = bounds.error_rates(
        outside[split:],
        inside[split:],
        threshold,
        alpha,
    )
    return value(rates), rates


# ------------------------------------------------------------------ trials


class Simulation:
    """The releases of all trials: the attacked client's node and the other nodes."""

    def __init__(
        self,
        config: ResolvedConfig,
        claims: Sequence[Claim],
        total: int,
        max_draws: float,
        round: int,
    ) -> None:
        """Makes the releases; the arguments are those of `audit_round`."""
        terms = terms_at(config, round)
        self.terms = terms
        views = {claim.view for claim in claims}
        signs = {INSIDE_SIGN}
        signs |= {OUTSIDE_SIGNS[claim.relation] for claim in claims}
        if "hidden" in views:
            signs.add(-1.0)  # what the clients who are drawn instead answer
        draws = terms.batch_size * len(signs)
        total = min(total, int(max_draws / draws))
        self.own: dict[float, Scores] = {}
        for sign in signs:
            trials = np.full(total, sign)
            self.own[sign] = node_scores(config, trials, round=round)
        self.others: dict[int, Scores] = {}
        for shares in {claim.shares for claim in claims}:
            draws = terms.batch_size * max(shares - 1, 1)
            # Gradients of 0: the adversary knows what the clients beside it send.
            affordable = int(max_draws / draws)
            silent = np.zeros(min(total, affordable))
            noise = silent
            for node_id in range(1, shares):
                noise = noise + node_scores(config, silent, node_id, round)
            self.others[shares] = noise
        if views != {"asked"}:
            self.is_asked = asked(config, total)
        # Of the run's shape, a few releases in each direction; at least one.
        self.whole: list[dict[float, Scores]] = []
        along = directions(terms.shape[1:])
        draws = math.prod(terms.shape) * len(signs) * len(along)
        affordable = int(max_draws * WHOLE_DRAWS / draws)
        self.num_whole = max(1, min(total, MOST_WHOLE, affordable))
        # Their mean is compared with a claimed mu; other claims have none.
        if any(claim.mu for claim in claims):
            for direction in along:
                self.whole.append(self._of_whole(config, signs, round, direction))

    def _of_whole(
        self,
        config: ResolvedConfig,
        signs: Iterable[float],
        round: int,
        direction: Tensor,
    ) -> dict[float, Scores]:
        scores: dict[float, Scores] = {}
        for sign in signs:
            trials = np.full(self.num_whole, sign)
            scores[sign] = node_scores(
                config,
                trials,
                node_id=0,
                round=round,
                direction=direction,
            )
        return scores

    def whole_mu(self, claim: Claim, alpha: float) -> float:
        """Returns the least mu that releases of the run's shape show, by any direction.

        Of the other nodes' noise it takes what is claimed.
        """
        std = self.terms.noise_std * math.sqrt(self.terms.batch_size)
        if not std:
            return 0.0  # counts show it
        sign = OUTSIDE_SIGNS[claim.relation]
        # The largest of several bounds is reported, so that they share alpha.
        of_each = alpha / len(self.whole)
        largest = 0.0  # no bound is below it
        for scores in self.whole:
            outside = scores[sign]
            inside = scores[INSIDE_SIGN]
            mu = bounds.mu_of_means(outside, inside, std, of_each)
            largest = max(largest, mu)
        return largest / math.sqrt(claim.shares)

    def scores(self, claim: Claim) -> tuple[Scores, Scores]:
        """Returns one score per trial, outside and inside."""
        others = self.others[claim.shares]
        count = len(others)
        sign = OUTSIDE_SIGNS[claim.relation]
        inside = self.own[INSIDE_SIGN][:count] + others
        outside = self.own[sign][:count] + others
        if claim.view == "asked":
            return outside, inside
        is_asked = self.is_asked[:count]
        instead = -np.inf  # told apart from every release, and worth no guess
        if claim.view == "hidden":
            instead = self.own[-1.0][:count] + others
        outside = np.where(is_asked, outside, instead)
        inside = np.where(is_asked, inside, instead)
        return outside, inside


def asked(config: ResolvedConfig, total: int) -> npt.NDArray[np.bool_]:
    """Returns in which of `total` rounds client 0 is drawn, by the run's own rule.

    Args:
        config: with a seed; decides the selection, K and m.
        total: number of rounds, at least 1.
    """
    is_drawn = np.zeros(total, np.bool_)
    for index in range(total):
        participants = select(config, index + 1)  # rounds count from 1
        is_drawn[index] = bool(clients_of(participants, [0]))
    return is_drawn
