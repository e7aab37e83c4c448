"""From a target epsilon to the noise, the number of rounds, and the moment to stop.

The inverse of `fedgs.privacy.accountant`: `calibrate_noise` and `largest_num_rounds`
answer for a plan, and `Budget` stops a run before the release that would exceed the
target. Where the run asks for amplification by sampling, the better one of both
statements decides.

>>> plan = Plan(num_clients=539, clients_per_round=539, num_rounds=150, batch_size=32,
...             noise_multiplier=1.2, client_selection="all", engine="local")
>>> calibrate_noise(plan, 10.0, 1e-5, "release", "replace-one")
1.492
>>> largest_num_rounds(plan, Target(10.0, 1e-5, "release", "replace-one"))
97

Source: docs/privacy.md, "Which theorem may be used when", Calibration.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal
from typing import NamedTuple

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.privacy.amplification import MOST_SAMPLED_KINDS, SampledBound
from fedgs.privacy.gaussian import Law, check_numbers, fixed_law
from fedgs.privacy.ledger import Event, agreed_values
from fedgs.privacy.participation import mixture_of, sampled_of
from fedgs.privacy.plan import (
    ADVERSARY_COLUMNS,
    SENSITIVITIES,
    Plan,
    costs_of,
    relations_of,
)
from fedgs.privacy.selection_cost import SelectionCost, Target
from fedgs.privacy.spending import DrawKind, Spending

DrawKinds = Mapping[DrawKind, int]
_MOST_ROUNDS = 10**9


class _Cap(NamedTuple):
    """How many draws of one kind fit into the target beside the draws of others.

    Attributes:
        kind: of the draws that are counted.
        others: how many draws there are of each other kind.
        most: the largest number of draws of the kind.
    """

    kind: DrawKind
    others: DrawKinds
    most: int


def _checked(plan: Plan, target: Target, colluding: int) -> str:
    """Checks what is asked of a plan and returns the selection that it is for."""
    adversary = target.adversary
    relation = target.relation
    check_numbers(target_epsilon=target.epsilon)
    known = relations_of(plan.privacy_unit)
    if relation not in known:
        choices = " or ".join(known)
        raise UserError(f"relation = {relation!r}: give {choices}")
    if adversary not in plan.adversaries:
        adversaries = ", ".join(plan.adversaries)
        raise UserError(
            f"adversary = {adversary!r}: engine = {plan.engine} has only "
            f"{adversaries}; give --adversary, --engine or "
            "--secure-aggregation accordingly"
        )
    if plan.client_selection is None:
        raise UserError("client_selection is unknown: give --client-selection")
    if plan.amplification and adversary != "release":
        raise UserError(
            f"adversary = {adversary}: this adversary sees who takes part, so "
            "amplification does not hold against it; give --adversary release or "
            "leave out --amplification"
        )
    check_numbers(colluding=colluding, delta=target.delta)
    return plan.client_selection


def calibrate_noise(
    plan: Plan,
    target_epsilon: float,
    delta: float,
    adversary: str,
    relation: str,
    colluding: int = 0,
    selections: Sequence[SelectionCost] = (),
) -> float:
    """Returns the least noise multiplier for a target, rounded up to 4 digits.

    Args:
        plan: the run, with its client_selection; its noise_multiplier is not read.
        target_epsilon: for all of `plan.num_rounds`; finite, at least 0.
        delta: above 0 and below 1.
        adversary: one of `plan.adversaries`.
        relation: replace-one or zero-out.
        colluding: nodes that take their noise out of secagg's sum, at least 0.
        selections: private ones of the run's cohort, which the target includes.

    Returns:
        noise_std / (2 C) of one node, above 0.

    Raises:
        UserError: an argument is out of range, or no noise can reach the target.

    Source: inverse of `fedgs.privacy.accountant.statements`.
    """
    target = Target(target_epsilon, delta, adversary, relation, tuple(selections))
    selection = _checked(plan, target, colluding)
    if plan.shares(adversary, colluding) == 0:
        nodes = plan.counted_nodes
        raise UserError(f"colluding = {colluding}: give less than the {nodes} nodes")
    law, _, _ = plan.law(selection, ratio=1.0)
    wanted = target.least_ratio(law)
    # z is proportional to the multiplier, so that a quotient inverts it.
    unit = replace(plan, noise_multiplier=1.0)
    ratio_of_unit = unit.ratio(adversary, relation, colluding)
    exact = Decimal(wanted / ratio_of_unit)
    last_place = exact.adjusted() - 3
    last_digit = Decimal(1).scaleb(last_place)
    # Upwards only: a multiplier that was rounded down would exceed the target.
    noise = exact.quantize(last_digit, rounding=ROUND_CEILING)
    if plan.amplification:

        def holds(noise: Decimal) -> bool:
            noisy = replace(plan, noise_multiplier=float(noise))
            bound = SampledBound(noisy.sampled())
            return target.is_kept(bound)

        noise = _least(holds, noise)
    return float(noise)


def _least(holds: Callable[[Decimal], bool], most: Decimal) -> Decimal:
    """Returns the least noise of 4 digits for which `holds`, at most `most`."""

    def is_enough(code: int) -> bool:
        noise = _number_of(code)
        return holds(noise)

    power = most.adjusted()
    digits = int(most.scaleb(3 - power))
    high = (power + 1) * 9000 + digits
    # Downwards in growing steps: few questions, because each one composes all rounds.
    gap = 1
    while is_enough(high - gap):
        high -= gap
        gap *= 2
    too_low = high - gap
    codes = range(too_low + 1, high + 1)
    index = bisect.bisect_left(codes, True, key=is_enough)
    if index == len(codes):
        # None holds, where amplification gains nothing: `most` holds without it.
        return _number_of(high)
    return _number_of(codes[index])


def _number_of(code: int) -> Decimal:
    """Returns a number of 4 digits; codes count them, 9000 for each power of ten."""
    power, digits = divmod(code - 1000, 9000)
    return Decimal(digits + 1000).scaleb(power - 4)


def largest_num_rounds(plan: Plan, target: Target, colluding: int = 0) -> int:
    """Returns the most rounds whose epsilon is at most the target.

    Args:
        plan: the run, with its noise multiplier and client_selection; its num_rounds
            is not read.
        target: of all rounds together.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Returns:
        0 if one round is too many; no more than 2^30, about 1e9, is looked for.

    Raises:
        UserError: an argument is out of range, or there is no noise multiplier.

    Source: inverse of `fedgs.privacy.accountant.statements`.
    """
    selection = _checked(plan, target, colluding)
    target.check()
    ratio = plan.ratio(target.adversary, target.relation, colluding)

    def holds(rounds: int) -> bool:
        law, _, _ = plan.law(selection, ratio, rounds)
        return target.is_kept(law)

    def holds_amplified(rounds: int) -> bool:
        longer = replace(plan, num_rounds=rounds)
        bound = SampledBound(longer.sampled())
        return target.is_kept(bound)

    most = _largest(holds)
    if plan.amplification:
        # Both bounds are valid, so that the better one may decide.
        most = max(most, _largest(holds_amplified, start=most))
    return most


def _largest(holds: Callable[[int], bool], start: int = 1) -> int:
    """Returns the largest n >= 1 with holds(n), for a decreasing `holds`, or 0.

    The search is upwards from `start`.
    """

    def is_too_many(number: int) -> bool:
        return not holds(number)

    high = max(start, 1)
    while high < _MOST_ROUNDS and holds(high):
        high *= 2
    numbers = range(1, high + 1)
    # The index of the first that is too many is the number before it: they begin at 1.
    return bisect.bisect_left(numbers, True, key=is_too_many)


class Budget:
    """Stops a run before the release that would exceed a target epsilon.

    Agrees with `fedgs.privacy.accountant.statements_of_runs` on the same events.
    Uniform selection stops after a number of rounds fixed in advance, so that the
    Binomial mixture stays valid.

    Args:
        plan: the run, with its client_selection; its noise_multiplier is not read.
        target: of all events together.
        events: released before, also by other runs on the same clients.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Raises:
        UserError: an argument is out of range, the selections alone exceed the target,
            or the number of clients changes.

    Source: docs/privacy.md, "Which theorem may be used when", Calibration.
    """

    def __init__(
        self,
        plan: Plan,
        target: Target,
        events: Iterable[Event] = (),
        colluding: int = 0,
    ) -> None:
        """Counts the earlier events."""
        _checked(plan, target, colluding)
        self._target = target
        self._num_clients = plan.num_clients
        self._colluding = colluding
        self._row = ADVERSARY_COLUMNS.index(target.adversary)
        # Costs of events are those of replace-one; z of zero-out is twice as large.
        self._scale = 2 / SENSITIVITIES[target.relation]
        one_release = fixed_law(1)
        most_mu = 1 / target.least_ratio(one_release)
        # The cap on a client's sum of costs: what the selections leave of the target.
        self._most = (most_mu * self._scale) ** 2
        self._is_amplified = plan.amplification
        self._spending = Spending(
            largest_node=plan.hosting.largest, cohort=plan.clients_per_round
        )
        self._caps: dict[str, _Cap] = {}  # by theorem
        for event in events:
            self.add(event)

    def allows(self, event: Event) -> bool:
        """Tells whether epsilon stays within the target after this event.

        Takes microseconds; more after a repeated round, and once at the start.

        Raises:
            UserError: the event has another number of clients.
        """
        self._check_clients(event)
        spending = self._spending
        if spending.why_count(event):
            is_within = self._count_fits(event)
        else:
            is_within = self._draws_fit(event, "mixture", self._mixture)
        if is_within or not self._is_amplified:
            return is_within
        if spending.why_not_amplified(event):
            return False
        return self._draws_fit(event, "amplified", self._amplified)

    def _count_fits(self, event: Event) -> bool:
        costs = costs_of(event, self._colluding)
        cost = costs[self._row]
        if self._spending.first is None:
            return cost <= self._most
        spent = self._spending.mu_squared[self._row]
        asked = spent[event.positions]
        after = asked.max() + cost
        # All clients: under a mixture until now, one not asked may exceed the cap.
        largest = max(spent.max(), after)
        return bool(largest <= self._most)

    def _draws_fit(
        self,
        event: Event,
        theorem: str,
        bound_of: Callable[[DrawKinds], Law | SampledBound],
    ) -> bool:
        """Asks how many draws like this one fit beside the others, once for all."""
        spending = self._spending
        costs = costs_of(event, self._colluding)
        draw = spending.draw_with(event, costs)
        if event.round in spending.draws:
            # The draw of a repeated round becomes dearer: it is of another kind.
            kinds = spending.kinds_with(event, draw)
            return self._holds(bound_of(kinds))
        kind = draw.kind
        # Only what else was released moves the cap that draws are counted against.
        others = dict(spending.kinds)
        done = others.pop(kind, 0)
        cap = self._caps.get(theorem)
        if cap is None or cap.kind != kind or cap.others != others:

            def holds(number: int) -> bool:
                kinds = {**others, kind: number}
                return self._holds(bound_of(kinds))

            most = _largest(holds, start=done)
            cap = _Cap(kind, others, most)
            self._caps[theorem] = cap
        # A number that was fixed in advance, from what no draw decides: so the mixture
        # stays valid although the run ends early.
        return done < cap.most

    def _mixture(self, kinds: DrawKinds) -> Law:
        law = mixture_of(kinds, self._row)
        ratio = law.ratio * self._scale
        return law._replace(ratio=ratio)

    def _amplified(self, kinds: DrawKinds) -> SampledBound:
        rounds = sampled_of(kinds, self._row)
        return SampledBound(rounds)

    def _holds(self, rounds: Law | SampledBound) -> bool:
        # Of more kinds no such row would be stated after the run.
        is_sampled = isinstance(rounds, SampledBound)
        if is_sampled and len(rounds.rounds) > MOST_SAMPLED_KINDS:
            return False
        return self._target.is_kept(rounds)

    def add(self, event: Event) -> None:
        """Counts a release.

        Raises:
            UserError: the event has another number of clients.
        """
        self._check_clients(event)
        costs = costs_of(event, self._colluding)
        self._spending.add(event, costs)

    def _check_clients(self, event: Event) -> None:
        if event.num_clients != self._num_clients:
            raise UserError(
                f"num_clients = {event.num_clients}: this budget is for "
                f"{self._num_clients} clients; use another"
            )


def budget_of(
    config: RunConfig,
    events: Iterable[Event],
    selections: Sequence[SelectionCost] = (),
) -> Budget | None:
    """Returns the budget of a run, None where it has no target_epsilon.

    Args:
        config: resolved.
        events: of the run's ledger.
        selections: private ones of the run's cohort; see `fedgs.cohorts.cohort_file`.

    Raises:
        UserError: as `Budget`.
    """
    if config.target_epsilon is None:
        return None
    plan = Plan.from_config(config)
    target = Target.of(config, selections)
    return Budget(plan, target, events)


def is_spent(
    config: RunConfig,
    events: Sequence[Event],
    selections: Sequence[SelectionCost] = (),
) -> bool:
    """Tells whether a run has a target that allows no round after its last one.

    Args:
        config: resolved.
        events: of the run's ledger, at least one.
        selections: as in `budget_of`.

    Raises:
        UserError: as `Budget`.
    """
    budget = budget_of(config, events, selections)
    if budget is None:
        return False
    following = max(event.round for event in events) + 1
    next_event = replace(events[-1], round=following, attempt=1)
    # Its release may be of another kind, with a noise and a B of its own.
    if following <= config.num_rounds:
        next_event = replace(next_event, **agreed_values(config, following))
    return not budget.allows(next_event)
