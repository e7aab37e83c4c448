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
    "mixture: uniform selection of {} of {} clients by a secret of the system's "
    "entropy, drawn when the run begins (with --noise-seed there is none): nobody knew "
    "the selection before, and whoever learns it later is counted in; {}, m, B and the "
    "noise are fixed in advance; selection or repeats by availability void it"
)
_MOST_VALUES = 2**17  # of a convolved law; more are rounded up to a grid
_MOST_MULTIPLE = 64


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
        why = f"count: every client takes part in all {num_rounds} rounds"
        return fixed_law(num_rounds, ratio), COUNT_THEOREM, why
    if selection == "balanced":
        # Every lap through the clients uses each of them once.
        most = math.ceil(clients_per_round * num_rounds / num_clients)
        why = f"count: a client takes part at most {most} times; repeats count again"
        return fixed_law(most, ratio), COUNT_THEOREM, why
    rate = clients_per_round / num_clients
    law = binomial_law({1: num_rounds}, rate, ratio)
    why = _MIXTURE.format(clients_per_round, num_clients, f"{num_rounds} rounds")
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
    counts: Counter[tuple[float, float]] = Counter()
    for ((num_clients, clients), costs), count in kinds.items():
        rate = clients / num_clients
        counts[rate, costs[row]] += count
    rates = {rate for rate, _ in counts}
    different = {cost for _, cost in counts}
    if math.inf in {fixed} | different:
        return fixed_law(1, ratio=0.0)
    if not counts:
        return fixed_law(fixed)
    least = min(different)
    multiples = _multiples_of(least, different)
    # Exact on whole numbers, of which a certain part need not be a multiple.
    if multiples and not fixed and len(rates) == 1:
        tries: Counter[int] = Counter()
        for (_, cost), count in counts.items():
            tries[multiples[cost]] += count
        return binomial_law(tries, rates.pop(), ratio=least**-0.5)
    total = fixed_law(fixed)
    for (rate, cost), count in counts.items():
        draws = binomial_law({1: count}, rate)
        total = _sum(total, draws._replace(counts=draws.counts * cost))
    return total


def _multiples_of(least: float, costs: Iterable[float]) -> dict[float, int]:
    """Returns how often the least cost goes into each; nothing if one is no multiple.

    A round that was tried twice costs twice as much, so that most costs are multiples.
    """
    multiples = {cost: round(cost / least) for cost in costs}
    for cost, multiple in multiples.items():
        if multiple > _MOST_MULTIPLE or not math.isclose(multiple * least, cost):
            return {}
    return multiples


def _sum(one: Law, other: Law) -> Law:
    """Returns the law of a sum; beyond `_MOST_VALUES` values, they are rounded up."""
    counts = np.add.outer(one.counts, other.counts).ravel()
    weights = np.multiply.outer(one.weights, other.weights).ravel()
    if len(counts) > _MOST_VALUES:
        step = counts.max() / _MOST_VALUES
        # Upwards: more mu^2 than there was keeps it a bound.
        index = np.ceil(counts / step).astype(np.int64)
        weights = np.bincount(index, weights).astype(np.float64)
        counts = np.arange(float(len(weights))) * step
    # The union bound, as in `binomial_law`.
    tail = one.tail + other.tail
    return Law(counts, weights, tail, ratio=1.0)


def sampled_of(kinds: Mapping[DrawKind, int], row: int) -> tuple[Sampled, ...]:
    """Returns the draws as `fedgs.privacy.amplification` counts them."""
    rounds: list[Sampled] = []
    for ((num_clients, clients), costs), count in kinds.items():
        if not count:
            continue
        cost = costs[row]
        ratio = 0.0  # no noise
        if cost < math.inf:
            ratio = cost**-0.5
        rounds.append(Sampled(num_clients, clients, ratio, count))
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
        sizes = {run.mu_squared.shape[1] for run in self.runs}
        if len(sizes) > 1:
            raise UserError(f"num_clients = {sorted(sizes)}: account the runs apart")
        # Each run is charged by the mixture, or by what its clients really did.
        self._mixed = [run for run in self.runs if not run.no_mixture]
        self._counted = [run for run in self.runs if run.no_mixture]
        self._draws, self.conflict = _joined(self._mixed)
        drawn = {
            run.selection_hash for run in self._counted if "uniform" in run.selections
        }
        # Realised counts tell what the same secret drew: no longer at random.
        if drawn & {run.selection_hash for run in self._mixed}:
            self.conflict = "run folders are copies of one, with one secret selection"
        if self.conflict:
            # The count is always valid, so it replaces every mixture.
            self._mixed = []
            self._counted = self.runs
            self._draws = Counter[DrawKind]()

    def law(self, row: int) -> tuple[Law, str, str]:
        """Returns what the events cost a client, without amplification.

        Args:
            row: of `Spending.mu_squared`, hence the adversary.

        Returns:
            The law, the name of the theorem, and the condition under which it applies.

        Source: docs/privacy.md, "Which theorem may be used when", 1.
        """
        counted = [run.mu_squared[row] for run in self._counted]
        worst = 0.0
        if self.is_reshuffled:
            # A record may have sat in the busiest shard of every run.
            worst = sum(float(mu_squared.max()) for mu_squared in counted)
        elif counted:
            by_client = sum(counted)
            worst = float(np.max(by_client, initial=0.0))
        law = mixture_of(self._draws, row, worst)
        theorem = COUNT_THEOREM
        why: list[str] = []
        if counted or not self._mixed:
            why.append(_why_counted(self._counted, self.conflict))
        if self._mixed:
            theorem = MIXTURE_THEOREM
            why.append(_why_mixed(self._mixed, self._draws))
        return law, theorem, "; and ".join(why)

    def why_not_amplified(self) -> str:
        """Returns why amplification does not hold for all runs together, or ""."""
        is_one = len(self.runs) == 1
        for number, run in enumerate(self.runs, start=1):
            if run.no_amplification:
                which = "" if is_one else f" (run {number})"
                return run.no_amplification + which
        draws, conflict = _joined(self.runs)
        if len(draws) > MOST_SAMPLED_KINDS:
            most = f"at most {MOST_SAMPLED_KINDS} are composed"
            return f"rounds of {len(draws)} kinds; {most}"
        return conflict

    def sampled(self, row: int) -> tuple[Sampled, ...]:
        """Returns the rounds as `fedgs.privacy.amplification` counts them."""
        draws, _ = _joined(self.runs)
        return sampled_of(draws, row)


def _joined(runs: Sequence[Spending]) -> tuple[Counter[DrawKind], str]:
    """Returns the draws of runs by kind, or why they are not independent draws."""
    if len(runs) == 1:
        return +runs[0].kinds, ""
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
                return Counter(), "copies of one run folder asked others in a round"
    return Counter(draw.kind for draw in draws.values()), ""


def _why_counted(runs: Sequence[Spending], conflict: str) -> str:
    why = "count: the client with the largest realised mu^2 decides"
    reasons = sorted({run.no_mixture or conflict for run in runs})
    if reasons:
        why += f" because {' and '.join(reasons)}"
    return why + "; schedule, noise and end were not chosen after seeing answers"


def _why_mixed(runs: Sequence[Spending], draws: Mapping[DrawKind, int]) -> str:
    cohorts = sorted({cohort for cohort, _ in draws})
    num_clients, _ = cohorts[0]  # the same of all runs, which have the same clients
    clients = " or ".join(str(clients) for _, clients in cohorts)
    num_events = sum(run.num_events for run in runs)
    num_draws = sum(draws.values())
    events = f"{num_events} events in {num_draws} "
    if len(runs) == 1:
        return _MIXTURE.format(clients, num_clients, events + "rounds")
    events += f"draws of {len(runs)} runs"
    why = _MIXTURE.format(clients, num_clients, events)
    return why + "; every run draws by a secret of its own"
