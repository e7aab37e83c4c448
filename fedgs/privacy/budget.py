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

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.privacy.amplification import MOST_KINDS, SampledBound
from fedgs.privacy.gaussian import Law, check_numbers, fixed_law
from fedgs.privacy.ledger import Event, agreed_values
from fedgs.privacy.participation import mixture_of, sampled_of
from fedgs.privacy.plan import COLUMNS, RELATIONS, Plan, costs_of, relations_of
from fedgs.privacy.selection_cost import SelectionCost, Target
from fedgs.privacy.spending import Kind, Spending, columns_of

Kinds = Mapping[Kind, int]
_MOST_ROUNDS = 10**9


def _checked(plan: Plan, target: Target, colluding: int) -> str:
    """Checks what is asked of a plan and returns the selection that it is for."""
    adversary, relation = target.adversary, target.relation
    check_numbers(target_epsilon=target.epsilon)
    if relation not in (known := relations_of(plan.privacy_unit)):
        raise UserError(f"relation = {relation!r}: give {' or '.join(known)}")
    if adversary not in plan.adversaries:
        raise UserError(
            f"adversary = {adversary!r}: engine = {plan.engine} has only "
            f"{', '.join(plan.adversaries)}; give --adversary, --engine or "
            "--secure-aggregation accordingly"
        )
    if plan.client_selection is None:
        raise UserError("client_selection is unknown: give --client-selection")
    if plan.amplification and adversary != "release":
        raise UserError(
            f"adversary = {adversary}: sees who takes part, so amplification is not "
            "for it; give --adversary release or leave out --amplification"
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
    ratio = target.least_ratio(plan.law(selection, ratio=1.0)[0])
    # z is proportional to the multiplier, so that a quotient inverts it.
    of_one = replace(plan, noise_multiplier=1.0).ratio(adversary, relation, colluding)
    exact = Decimal(ratio / of_one)
    digit = Decimal(1).scaleb(exact.adjusted() - 3)
    # Upwards only: a multiplier that was rounded down would exceed the target.
    noise = exact.quantize(digit, rounding=ROUND_CEILING)
    if plan.amplification:

        def holds(noise: Decimal) -> bool:
            rounds = replace(plan, noise_multiplier=float(noise)).sampled()
            return target.is_kept(SampledBound(rounds))

        noise = _least(holds, noise)
    return float(noise)


def _least(holds: Callable[[Decimal], bool], most: Decimal) -> Decimal:
    """Returns the least noise of 4 digits for which `holds`, at most `most`."""
    high = (most.adjusted() + 1) * 9000 + int(most.scaleb(3 - most.adjusted()))
    gap = 1  # codes count the numbers of 4 digits, 9000 for each power of ten
    while holds(_of_code(high - gap)):
        high, gap = high - gap, 2 * gap
    codes = range(high - gap + 1, high + 1)
    index = bisect.bisect_left(codes, True, key=lambda code: holds(_of_code(code)))
    # No code holds where amplification gains nothing: `most` holds without it.
    return _of_code(codes[min(index, len(codes) - 1)])


def _of_code(code: int) -> Decimal:
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
        return target.is_kept(plan.law(selection, ratio, rounds)[0])

    def holds_amplified(rounds: int) -> bool:
        sampled = replace(plan, num_rounds=rounds).sampled()
        return target.is_kept(SampledBound(sampled))

    most = _largest(holds)
    return max(most, _largest(holds_amplified, most)) if plan.amplification else most


def _largest(holds: Callable[[int], bool], start: int = 1) -> int:
    """Returns the largest n >= 1 with holds(n), for a decreasing `holds`, or 0.

    The search is upwards from `start`.
    """
    high = max(start, 1)
    while high < _MOST_ROUNDS and holds(high):
        high *= 2
    return bisect.bisect_left(range(1, high + 1), True, key=lambda n: not holds(n))


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
        self._num_clients, self._colluding = plan.num_clients, colluding
        self._row = COLUMNS.index(target.adversary)
        # Costs of events are those of replace-one; z of zero-out is twice as large.
        self._scale = 2 / RELATIONS[target.relation]
        mu = 1 / target.least_ratio(fixed_law(1))
        # The cap on a client's sum of costs: what the selections leave of the target.
        self._most = (mu * self._scale) ** 2
        self._is_amplified = plan.amplification
        self._exposure = Spending(
            largest_node=plan.hosting.largest, cohort=plan.clients_per_round
        )
        self._caps: dict[str, tuple[Kind, Kinds, int]] = {}
        for event in events:
            self.add(event)

    def allows(self, event: Event) -> bool:
        """Tells whether epsilon stays within the target after this event.

        Takes microseconds; more after a repeated round, and once at the start.

        Raises:
            UserError: the event has another number of clients.
        """
        self._check_clients(event)
        exposure = self._exposure
        if exposure.why_count(event):
            is_within = self._count_fits(event)
        else:
            is_within = self._draws_fit(event, "mixture", self._mixture)
        if is_within or not self._is_amplified or exposure.why_not_amplified(event):
            return is_within
        return self._draws_fit(event, "amplified", self._amplified)

    def _count_fits(self, event: Event) -> bool:
        cost = costs_of(event, self._colluding)[self._row]
        if self._exposure.first is None:
            return cost <= self._most
        # All clients: under a mixture until now, one not asked may exceed the cap.
        row = self._exposure.mu_squared[self._row]
        return bool(max(row.max(), row[columns_of(event)].max() + cost) <= self._most)

    def _draws_fit(
        self,
        event: Event,
        theorem: str,
        bound_of: Callable[[Kinds], Law | SampledBound],
    ) -> bool:
        """Asks how many draws like this one fit beside the others, once for all."""
        exposure = self._exposure
        draw = exposure.draw_with(event, costs_of(event, self._colluding))
        if event.round in exposure.draws:
            return self._holds(bound_of(exposure.kinds_with(event, draw)))
        # Only what else was released moves the cap that draws are counted against.
        others = {k: n for k, n in exposure.kinds.items() if n and k != draw.kind}
        cap = self._caps.get(theorem)
        if cap is None or cap[:2] != (draw.kind, others):
            most = _largest(
                lambda n: self._holds(bound_of({**others, draw.kind: n})),
                exposure.kinds[draw.kind],
            )
            cap = self._caps[theorem] = (draw.kind, others, most)
        return exposure.kinds[draw.kind] < cap[2]

    def _mixture(self, kinds: Kinds) -> Law:
        law = mixture_of(kinds, self._row)
        return law._replace(ratio=law.ratio * self._scale)

    def _amplified(self, kinds: Kinds) -> SampledBound:
        return SampledBound(sampled_of(kinds, self._row))

    def _holds(self, rounds: Law | SampledBound) -> bool:
        # Of more kinds no such row would be stated after the run.
        if isinstance(rounds, SampledBound) and len(rounds.rounds) > MOST_KINDS:
            return False
        return self._target.is_kept(rounds)

    def add(self, event: Event) -> None:
        """Counts a release.

        Raises:
            UserError: the event has another number of clients.
        """
        self._check_clients(event)
        self._exposure.add(event, costs_of(event, self._colluding))

    def _check_clients(self, event: Event) -> None:
        if event.num_clients != self._num_clients:
            problem = f"this budget is for {self._num_clients} clients; use another"
            raise UserError(f"num_clients = {event.num_clients}: {problem}")


def budget_of(
    config: RunConfig, events: Iterable[Event], selections: Sequence[SelectionCost] = ()
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
    return Budget(Plan.from_config(config), Target.of(config, selections), events)


def is_spent(
    config: RunConfig, events: Sequence[Event], selections: Sequence[SelectionCost] = ()
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
    event = replace(events[-1], round=following, attempt=1)
    # Its release may be of another kind, with a noise and a B of its own.
    if following <= config.num_rounds:
        event = replace(event, **agreed_values(config, following))
    return not budget.allows(event)
