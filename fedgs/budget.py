"""From a target epsilon to the noise, the number of rounds, and the moment to stop.

The inverse of `fedgs.accounting`: `calibrate_noise` and `largest_num_rounds` answer for
a plan, and `Budget` stops a run before the release that would exceed the target.

>>> plan = Plan(num_clients=539, clients_per_round=539, num_rounds=150, batch_size=32,
...             noise_multiplier=1.2, client_selection="all", engine="local")
>>> calibrate_noise(plan, 10.0, 1e-5, "release", "replace-one")
1.492
>>> largest_num_rounds(plan, 10.0, 1e-5, "release", "replace-one")
97

Source: docs/privacy.md, "Which theorem may be used when", Calibration.
"""

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal

from fedgs.accounting import (
    ADVERSARIES,
    RELATIONS,
    Plan,
    costs_of,
    noise_ratio,
    noise_shares,
)
from fedgs.config import RunConfig, UserError
from fedgs.gaussian import binomial_law, check_ranges, mu_from_epsilon
from fedgs.ledger import Event
from fedgs.participation import Exposure, columns_of, constants_of

_MOST_ROUNDS = 10**9


def _check_target(plan: Plan, target: float, adversary: str, relation: str) -> str:
    """Checks a request and returns the selection it is for."""
    check_ranges(target)
    if relation not in RELATIONS:
        raise UserError(f"relation = {relation!r}: give one of {list(RELATIONS)}")
    if adversary not in plan.adversaries:
        raise UserError(
            f"adversary = {adversary!r}: engine = {plan.engine} has only "
            f"{', '.join(plan.adversaries)}; give --adversary or --engine accordingly"
        )
    if plan.client_selection is None:
        raise UserError("client_selection is unknown: give --client-selection")
    return plan.client_selection


def calibrate_noise(
    plan: Plan,
    target_epsilon: float,
    delta: float,
    adversary: str,
    relation: str,
    colluding: int = 0,
) -> float:
    """Returns the least noise multiplier for a target, rounded up to 4 digits.

    Privacy: public.

    Args:
        plan: the run, with its client_selection; its noise_multiplier is not read.
        target_epsilon: for all of `plan.num_rounds`; finite, at least 0.
        delta: above 0 and below 1.
        adversary: one of `plan.adversaries`.
        relation: replace-one or zero-out.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Returns:
        noise_std / (2 C) of one node, above 0.

    Raises:
        UserError: an argument is out of range, or no noise can reach the target.

    Source: inverse of `fedgs.accounting.statements`.
    """
    selection = _check_target(plan, target_epsilon, adversary, relation)
    check_ranges(colluding, delta)
    shares = noise_shares(adversary, plan.counted_nodes, colluding)
    if shares == 0:
        nodes = plan.counted_nodes
        raise UserError(f"colluding = {colluding}: give less than the {nodes} nodes")
    ratio = plan.law(selection)[0].smallest_ratio(target_epsilon, delta)
    exact = Decimal(ratio / noise_ratio(1.0, plan.batch_size, relation, shares))
    digit = Decimal(1).scaleb(exact.adjusted() - 3)
    return float(exact.quantize(digit, rounding=ROUND_CEILING))


def largest_num_rounds(
    plan: Plan,
    target_epsilon: float,
    delta: float,
    adversary: str,
    relation: str,
    colluding: int = 0,
) -> int:
    """Returns the most rounds whose epsilon is at most the target.

    Privacy: public.

    Args:
        plan: the run, with its noise multiplier and client_selection; its num_rounds
            is not read.
        target_epsilon: finite, at least 0.
        delta: above 0 and below 1.
        adversary: one of `plan.adversaries`.
        relation: replace-one or zero-out.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Returns:
        0 if one round is too many; no more than 2^30, about 1e9, is looked for.

    Raises:
        UserError: an argument is out of range, or there is no noise multiplier.

    Source: inverse of `fedgs.accounting.statements`.
    """
    selection = _check_target(plan, target_epsilon, adversary, relation)
    check_ranges(colluding, delta)
    ratio = plan.ratio(adversary, relation, colluding)

    def holds(rounds: int) -> bool:
        law = replace(plan, num_rounds=rounds).law(selection)[0]
        return law.delta(ratio, target_epsilon) <= delta

    return _largest(holds)


def _largest(holds: Callable[[int], bool]) -> int:
    """Returns the largest n >= 1 with holds(n), for a decreasing `holds`, or 0."""
    high = 1
    while high < _MOST_ROUNDS and holds(high):
        high *= 2
    return bisect.bisect_left(range(1, high + 1), True, key=lambda n: not holds(n))


class Budget:
    """Stops a run before the release that would exceed a target epsilon.

    Agrees with `fedgs.accounting.statements_from_ledger` on the same events. Uniform
    selection stops after a number of rounds fixed in advance, so that the Binomial
    mixture stays valid.

    Privacy: public.

    Args:
        plan: the run, with its client_selection; its noise_multiplier is not read.
        target_epsilon: for all events together; finite, at least 0.
        delta: above 0 and below 1.
        adversary: one of `plan.adversaries`.
        relation: replace-one or zero-out.
        events: released before, also by other runs on the same clients.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Raises:
        UserError: an argument is out of range, or the number of clients changes.

    Source: docs/privacy.md, "Which theorem may be used when", Calibration.
    """

    def __init__(
        self,
        plan: Plan | RunConfig,
        target_epsilon: float,
        delta: float,
        adversary: str,
        relation: str,
        events: Iterable[Event] = (),
        colluding: int = 0,
    ) -> None:
        """Counts the earlier events; see the class."""
        plan = plan if isinstance(plan, Plan) else Plan.from_config(plan)
        _check_target(plan, target_epsilon, adversary, relation)
        check_ranges(colluding, delta)
        self._num_clients, self._colluding = plan.num_clients, colluding
        self._target, self._delta = target_epsilon, delta
        self._row = list(ADVERSARIES).index(adversary)
        self._scale = 2 / RELATIONS[relation]
        self._most = (mu_from_epsilon(target_epsilon, delta) * self._scale) ** 2
        self._exposure = Exposure()
        self._repeats: Counter[int] = Counter()
        self._cap: tuple[tuple[float, ...], int] | None = None
        for event in events:
            self.add(event)

    def allows(self, event: Event) -> bool:
        """Tells whether epsilon stays within the target after this event.

        Takes microseconds; milliseconds after a repeated round.

        Privacy: public.

        Raises:
            UserError: the event has another number of clients.
        """
        exposure = self._exposure
        self._check_clients(event)
        if exposure.why_count(event):
            cost = costs_of(event, self._colluding)[self._row]
            if exposure.first is None:
                return bool(cost <= self._most)
            row = exposure.mu_squared[self._row]
            after = max(row.max(), row[columns_of(event)].max() + cost)
            return bool(after <= self._most)
        if event.round in exposure.attempts:
            tries = exposure.attempts + Counter({event.round: 1})
            return self._holds(event, Counter(tries.values()))
        if self._cap is None or self._cap[0] != constants_of(event):
            most = _largest(lambda n: self._holds(event, {**self._repeats, 1: n}))
            self._cap = (constants_of(event), most)
        once = len(exposure.attempts) - sum(self._repeats.values())
        return once < self._cap[1]

    def _holds(self, event: Event, rounds: Mapping[int, int]) -> bool:
        law = binomial_law(rounds, event.num_participants / event.num_clients)
        ratio = costs_of(event, self._colluding)[self._row] ** -0.5 * self._scale
        return law.delta(float(ratio), self._target) <= self._delta

    def add(self, event: Event) -> None:
        """Counts a release.

        Privacy: public.

        Raises:
            UserError: the event has another number of clients.
        """
        self._check_clients(event)
        self._exposure.add(event, costs_of(event, self._colluding))
        if self._exposure.attempts[event.round] > 1:
            tries = Counter(self._exposure.attempts.values())
            self._repeats = Counter({a: n for a, n in tries.items() if a > 1})
            self._cap = None

    def _check_clients(self, event: Event) -> None:
        if event.num_clients != self._num_clients:
            problem = f"this budget is for {self._num_clients} clients; use another"
            raise UserError(f"num_clients = {event.num_clients}: {problem}")
