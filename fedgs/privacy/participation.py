"""How often a client takes part: which theorem applies, on which condition.

- Participation count: the count of the busiest client decides. Always valid.
- Binomial mixture: under uniform selection a client's count is random, Eqs. 3 and 4 of
  `fedgs.privacy.gaussian`. Valid while all events of a run are alike; see
  `Spending.why_count`.
- Amplification by sampling, only if asked for; see `fedgs.privacy.amplification`.

Several runs on the same clients: mu^2 adds up. Every run draws by a secret of its own,
so that their laws are convolved. Copies of one run folder have one secret: they ask the
same clients in the same round, which is one draw with both costs.

Source: docs/privacy.md, "Which theorem may be used when".
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedgs.errors import UserError
from fedgs.privacy.amplification import MOST_SAMPLED_KINDS, Sampled
from fedgs.privacy.gaussian import Law, binomial_law, fixed_law
from fedgs.privacy.spending import Draw, DrawKind, Spending

COUNT_THEOREM = "no amplification: participation count"
MIXTURE_THEOREM = "no amplification: Binomial mixture of participation counts"
_MIXTURE = (
    "mixture: {} of {} clients are selected uniformly, by a secret of the system's "
    "entropy that is drawn when the run begins (with --noise-seed there is none); "
    "nobody knew the selection before, and whoever learns it later is covered; {}, m, "
    "B and the noise were fixed in advance; selecting or repeating by availability "
    "voids it"
)
_MOST_VALUES = 2**17  # of a convolved law; more are rounded up to a grid
_MOST_MULTIPLE = 64
_RateAndCost = tuple[float, float]


def planned_law(
    selection: str,
    num_rounds: int,
    num_clients: int,
    clients_per_round: int,
    ratio: float,
) -> tuple[Law, str, str]:
    """Returns the law of a client's number of rounds in a run that is planned.

    all, or m = K: n = T. balanced: n = ceil(m T / K). uniform: n ~ Binomial(T, m / K).

    Args:
        selection: client_selection, as in `RunConfig`.
        num_rounds: T, at least 1.
        num_clients: K, at least 1.
        clients_per_round: m, from 1 to K.
        ratio: z of one release.

    Returns:
        The law, the name of the theorem, and the condition under which it applies.

    Source: docs/privacy.md, "Which theorem may be used when", 1 and 3.
    """
    if selection == "all" or clients_per_round == num_clients:
        law = fixed_law(num_rounds, ratio)
        if num_rounds == 1:
            taking_part = "the only round"
        else:
            taking_part = f"all {num_rounds} rounds"
        why = f"count: every client takes part in {taking_part}"
        return law, COUNT_THEOREM, why
    if selection == "balanced":
        # Every lap through the clients uses each of them once.
        num_answers = clients_per_round * num_rounds
        most = math.ceil(num_answers / num_clients)
        law = fixed_law(most, ratio)
        why = (
            f"count: a client takes part at most {most} times, and repeats count again"
        )
        return law, COUNT_THEOREM, why
    rate = clients_per_round / num_clients
    law = binomial_law({1: num_rounds}, rate, ratio)  # in a plan no round is repeated
    schedule = f"{num_rounds} rounds"
    why = _MIXTURE.format(clients_per_round, num_clients, schedule)
    return law, MIXTURE_THEOREM, why


def mixture_of(kinds: Mapping[DrawKind, int], row: int, fixed: float = 0.0) -> Law:
    """Returns the law of a client's mu^2 after independent draws.

    A draw of cost c at the rate q adds c with probability q. Costs that are multiples
    of one number give a Binomial law; others are convolved.

    Args:
        kinds: how many draws there are of each kind.
        row: which of the costs.
        fixed: mu^2 that is certain, at least 0.

    Source: docs/privacy.md, "Which theorem may be used when", 1.
    """
    counts: Counter[_RateAndCost] = Counter()
    rates: set[float] = set()
    different: set[float] = set()
    for (cohort, costs), count in kinds.items():
        num_clients, clients = cohort
        rate = clients / num_clients
        cost = costs[row]
        counts[rate, cost] += count
        rates.add(rate)
        different.add(cost)
    # A single release without noise tells all.
    if fixed == math.inf or math.inf in different:
        return fixed_law(1, ratio=0.0)
    if not counts:
        return fixed_law(fixed)
    least = min(different)
    multiples = _multiples_of(least, different)
    # Exact on whole numbers, of which a certain part need not be a multiple.
    if multiples and not fixed and len(rates) == 1:
        tries: Counter[int] = Counter()
        for (_, cost), count in counts.items():
            multiple = multiples[cost]
            tries[multiple] += count
        return binomial_law(tries, rates.pop(), ratio=least**-0.5)
    total = fixed_law(fixed)
    for (rate, cost), count in counts.items():
        draws = binomial_law({1: count}, rate)
        spent = draws._replace(counts=draws.counts * cost)
        total = _sum(total, spent)
    return total


def _multiples_of(least: float, costs: Iterable[float]) -> dict[float, int]:
    """Returns how often the least cost goes into each; nothing if one is no multiple.

    A round that was tried twice costs twice as much, so that most costs are multiples.
    """
    multiples: dict[float, int] = {}
    for cost in costs:
        multiple = round(cost / least)
        # The law of a large multiple is long, and nearly all of its weights are 0.
        if multiple > _MOST_MULTIPLE:
            return {}
        if not math.isclose(multiple * least, cost):
            return {}
        multiples[cost] = multiple
    return multiples


def _sum(one: Law, other: Law) -> Law:
    """Returns the law of a sum; beyond `_MOST_VALUES` values, they are rounded up."""
    # All pairs of a value of the one and a value of the other.
    sums = np.add.outer(one.counts, other.counts)
    products = np.multiply.outer(one.weights, other.weights)
    counts = sums.ravel()
    weights = products.ravel()
    if len(counts) > _MOST_VALUES:
        step = counts.max() / _MOST_VALUES
        # Upwards: more mu^2 than there was keeps it a bound.
        steps = np.ceil(counts / step)
        index = steps.astype(np.int64)
        on_grid = np.bincount(index, weights)
        weights = on_grid.astype(np.float64)
        num_values = float(len(weights))
        counts = np.arange(num_values) * step
    # The union bound, as in `binomial_law`.
    tail = one.tail + other.tail
    return Law(counts, weights, tail, ratio=1.0)


def sampled_of(kinds: Mapping[DrawKind, int], row: int) -> tuple[Sampled, ...]:
    """Returns the draws as `fedgs.privacy.amplification` counts them."""
    rounds: list[Sampled] = []
    for (cohort, costs), count in kinds.items():
        if count == 0:
            continue
        num_clients, clients = cohort
        cost = costs[row]
        ratio = 0.0  # no noise
        if cost < math.inf:
            ratio = cost**-0.5
        of_kind = Sampled(
            num_clients=num_clients,
            clients_per_round=clients,
            ratio=ratio,
            rounds=count,
        )
        rounds.append(of_kind)
    return tuple(rounds)


class RunsOnSameClients:
    """One or several runs on the same clients, ready to be charged.

    Args:
        runs: their exposures.
        is_reshuffled: whether records sit in other shards in every run, so that the
            worst shards of all runs may be one record's.

    Raises:
        UserError: the runs have different numbers of clients.
    """

    def __init__(self, runs: Sequence[Spending], is_reshuffled: bool = False) -> None:
        self.runs = [run for run in runs if run.first is not None]
        self.is_reshuffled = is_reshuffled
        sizes = {run.num_clients for run in self.runs}
        if len(sizes) > 1:
            raise UserError(
                f"num_clients = {sorted(sizes)}: runs of different numbers cannot be "
                "added; state them one by one"
            )
        # Each run is charged by the mixture, or by what its clients really did.
        self._mixed: list[Spending] = []
        self._counted: list[Spending] = []
        secrets_of_mixed: set[str] = set()
        secrets_of_counted: set[str] = set()
        for run in self.runs:
            if not run.no_mixture:
                self._mixed.append(run)
                secrets_of_mixed.add(run.selection_hash)
                continue
            self._counted.append(run)
            if "uniform" in run.selections:
                secrets_of_counted.add(run.selection_hash)
        draws, self.conflict = _joined(self._mixed)
        # Realised counts tell what the same secret drew: no longer at random.
        if secrets_of_counted & secrets_of_mixed:
            self.conflict = (
                "the run folders are copies of one, which share its secret selection"
            )
        if self.conflict:
            # The count is always valid, so it replaces every mixture.
            self._mixed = []
            self._counted = self.runs
            draws.clear()
        self._draws = draws

    def law(self, row: int) -> tuple[Law, str, str]:
        """Returns what the events cost a client, without amplification.

        Args:
            row: the row of `Spending.mu_squared`, hence the adversary.

        Returns:
            The law, the name of the theorem, and the condition under which it applies.

        Source: docs/privacy.md, "Which theorem may be used when", 1.
        """
        counted = [run.mu_squared[row] for run in self._counted]
        worst = 0.0
        if self.is_reshuffled:
            # A record may have sat in the busiest shard of every run.
            busiest = [float(mu_squared.max()) for mu_squared in counted]
            worst = sum(busiest)
        elif counted:
            by_client = sum(counted)
            worst = float(np.max(by_client, initial=0.0))
        law = mixture_of(self._draws, row, worst)
        theorem = COUNT_THEOREM
        why: list[str] = []
        # Without events there is nothing drawn, and a count of 0.
        if counted or not self._mixed:
            reason = _why_counted(self._counted, self.conflict)
            why.append(reason)
        if self._mixed:
            theorem = MIXTURE_THEOREM
            reason = _why_mixed(self._mixed, self._draws)
            why.append(reason)
        return law, theorem, "; and ".join(why)

    def why_not_amplified(self) -> str:
        """Returns why amplification does not hold for all runs together, or ""."""
        for number, run in enumerate(self.runs, start=1):
            why = run.no_amplification
            if not why:
                continue
            if len(self.runs) > 1:
                why += f" (run {number})"
            return why
        draws, conflict = _joined(self.runs)
        num_kinds = len(draws)
        if num_kinds > MOST_SAMPLED_KINDS:
            most = f"at most {MOST_SAMPLED_KINDS} kinds can be composed"
            return f"the rounds are of {num_kinds} kinds, and {most}"
        return conflict

    def sampled(self, row: int) -> tuple[Sampled, ...]:
        """Returns the rounds as `fedgs.privacy.amplification` counts them."""
        draws, _ = _joined(self.runs)
        return sampled_of(draws, row)


def _joined(runs: Sequence[Spending]) -> tuple[Counter[DrawKind], str]:
    """Returns the draws of runs by kind, or why they are not independent draws."""
    if len(runs) == 1:
        kinds = runs[0].kinds
        return kinds.copy(), ""
    draws: dict[tuple[str, int], Draw] = {}
    for run in runs:
        for number, draw in run.draws.items():
            # The same secret draws the same clients in the same round: one draw.
            key = (run.selection_hash, number)
            known = draws.get(key)
            if known is None:
                draws[key] = draw
            elif known.participants == draw.participants:
                draws[key] = known.plus(draw.costs)
            else:
                return Counter(), (
                    "copies of one run folder asked different clients in one round"
                )
    kinds = Counter(draw.kind for draw in draws.values())
    return kinds, ""


def _why_counted(runs: Sequence[Spending], conflict: str) -> str:
    why = "count: the client with the largest realised mu^2 decides"
    # A set, because several runs may have one reason.
    reasons = {run.no_mixture or conflict for run in runs}
    if reasons:
        all_reasons = " and ".join(sorted(reasons))
        why += f" because {all_reasons}"
    return why + (
        "; the schedule, the noise and the end were not chosen after a look at answers"
    )


def _why_mixed(runs: Sequence[Spending], draws: Mapping[DrawKind, int]) -> str:
    cohorts = sorted({cohort for cohort, _ in draws})
    num_clients, _ = cohorts[0]  # the same of all runs, which have the same clients
    clients = " or ".join(str(clients) for _, clients in cohorts)
    num_events = sum(run.num_events for run in runs)
    num_draws = sum(draws.values())
    events = f"{num_events} events in {num_draws} "
    if len(runs) == 1:
        events += "rounds"
        return _MIXTURE.format(clients, num_clients, events)
    events += f"draws of {len(runs)} runs"
    why = _MIXTURE.format(clients, num_clients, events)
    return why + "; every run draws by a secret of its own"
