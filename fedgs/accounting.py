"""What a run's releases cost: epsilon for every adversary and relation.

A client that took part in n rounds suffered n Gaussian releases with the noise ratio
z = noise / sensitivity, whoever trained when; nothing is claimed for sampling:

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu),
    mu = sqrt(n) / z;  uniform selection: its mean over n ~ Binomial(T, m/K)

>>> plan = Plan(num_clients=539, clients_per_round=539, num_rounds=150, batch_size=32,
...             noise_multiplier=1.2, client_selection="all", engine="local")
>>> for s in statements(plan, delta=1e-5):
...     print(s.adversary, s.relation, s.unit, s.delta, round(s.epsilon or 0, 2))
release replace-one client 1e-05 13.12
release zero-out client 1e-05 5.64
>>> calibrate_noise(plan, 10.0, 1e-5, "release", "replace-one")
1.492
>>> largest_num_rounds(plan, 10.0, 1e-5, "release", "replace-one")
97

Source: Balle and Wang, "Improving the Gaussian mechanism for differential privacy",
ICML 2018, Theorem 8; Dong, Roth, Su, "Gaussian differential privacy", 2022, Corollary
3.3 (mu^2 adds up). Section names in docstrings are those of docs/privacy.md.
"""

# scipy has no type stubs:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import bisect
import contextlib
import importlib
import io
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from decimal import ROUND_CEILING, Decimal
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.special import bdtr, bdtrc, log_ndtr, ndtr
from scipy.stats import binom

from fedgs.config import RunConfig, UserError
from fedgs.ledger import Event

ADVERSARIES = {
    "release": "adversary: sees every published generator, so the noise of {nodes} "
    "nodes counts",
    "server": "adversary: honest but curious, sees who took part and each node's "
    "release, so the noise of one node counts",
    "secagg": "adversary: sees who took part and only the sum over at least {nodes} "
    "nodes, {colluding} colluding; not malicious, no Sybils",
}
RELATIONS = {"replace-one": 2.0, "zero-out": 1.0}  # sensitivity of one fake / C
COUNT_THEOREM = "no amplification: participation count"
MIXTURE_THEOREM = "no amplification: Binomial mixture of participation counts"
SEEDED = "seeded: not private"
_MEANINGS = {
    "replace-one": "relation: a client's whole data set is replaced",
    "zero-out": "relation: a client contributes the zero vector, its slot stays",
}
_MIXTURE = (
    "mixture: uniform selection of {} of {} clients, independent of data; {}, m, B and "
    "the noise are fixed in advance; selection by availability, or a stop because of a "
    "client's count, voids it"
)
_TABLE_1 = (
    "T*B independently subsampled releases are composed, but one client is drawn per "
    "round and answers all B fakes; and a discriminator that trains only when selected "
    "remembers the selection"
)
_TABLE_2 = "a client's average of {:.2f} rounds is composed, and many exceed it"
_TAIL, _MOST_ROUNDS = 1e-18, 10**9


class _Law(NamedTuple):
    """Law of a client's number of releases; `tail` is the probability left out."""

    counts: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    tail: float

    def delta(self, ratio: float, epsilon: float) -> float:
        if ratio == 0:  # no noise: unbounded, however rarely a client takes part
            return float(self.counts.max() > 0)
        with np.errstate(over="ignore"):
            mu = np.sqrt(self.counts) / ratio
            deltas = np.where(mu == np.inf, 1.0, 0.0)
            proper = (mu > 0) & (mu < np.inf)
            upper = mu[proper] / 2 - epsilon / mu[proper]
        second = np.exp(epsilon + log_ndtr(upper - mu[proper]))
        deltas[proper] = np.clip(ndtr(upper) - second, 0.0, 1.0)
        return float(self.weights @ deltas) + self.tail

    def epsilon(self, ratio: float, delta: float) -> float:
        if self.delta(ratio, 0.0) <= delta:
            return 0.0
        top = math.sqrt(self.counts.max()) / ratio if ratio else math.inf
        if delta <= self.tail or top * top == math.inf:
            return math.inf
        # Phi(-x) <= exp(-x^2 / 2) / 2 bounds the root from above.
        high = top * top / 2 + top * math.sqrt(-2 * math.log(delta - self.tail))
        return _root(lambda epsilon: self.delta(ratio, epsilon) - delta, 0.0, high)

    def smallest_ratio(self, epsilon: float, delta: float) -> float:
        chance = 1.0 - float(self.weights @ (self.counts == 0))
        if not self.tail < delta < chance:
            remedy = f"give --delta below a client's chance to take part, {chance:.3g}"
            raise UserError(f"delta = {delta}: {remedy}, and above {self.tail:.1g}")
        low = high = 1.0
        while self.delta(low, epsilon) <= delta:
            low /= 2
        while self.delta(high, epsilon) > delta:
            high *= 2
        return _root(lambda ratio: self.delta(ratio, epsilon) - delta, low, high)


def _root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Returns the root of a decreasing function, rounded up by 1e-12 relative."""
    found = cast(Any, optimize).brentq(excess, low, high, xtol=1e-14, rtol=1e-14)
    return float(found) * (1 + 1e-12) + 1e-14


def _fixed(count: float) -> _Law:
    return _Law(np.array([float(count)]), np.ones(1), 0.0)


def _window(count: int, rate: float) -> tuple[int, int]:
    """Returns low, high with at most `_TAIL` of Binomial(count, rate) beyond each."""

    def below(k: int) -> float:
        return float(bdtr(k, count, rate))

    def above(k: int) -> float:
        return float(bdtrc(k, count, rate))

    low = bisect.bisect_left(range(count), True, key=lambda k: below(k) > _TAIL)
    return low, bisect.bisect_left(range(count), True, key=lambda k: above(k) <= _TAIL)


def _binomial(num_rounds: Mapping[int, int], rate: float) -> _Law:
    """Law of the sum of a * Bernoulli(rate) over `num_rounds[a]` rounds for every a.

    All attempts of a round ask the same clients: a tries are one draw counted a times.
    """
    weights, start, tail = np.ones(1), 0, 0.0
    for attempts, count in num_rounds.items():
        low, high = _window(count, rate)
        spread = np.zeros((high - low) * attempts + 1)
        spread[::attempts] = binom.pmf(np.arange(low, high + 1), count, rate)
        tail += float(bdtrc(high, count, rate))
        tail += float(bdtr(low - 1, count, rate)) if low else 0.0
        weights, start = np.convolve(weights, spread), start + low * attempts
    return _Law(start + np.arange(float(len(weights))), weights, tail)


def _check(at_least_0: float = 0.0, delta: float = 0.5, rate: float = 0.5) -> None:
    if not 0 <= at_least_0 < math.inf:
        raise UserError(f"{at_least_0}: give a finite number, at least 0")
    if not 0 < delta < 1:
        raise UserError(f"delta = {delta}: give --delta a number above 0 and below 1")
    if not 0 <= rate <= 1:
        raise UserError(f"rate = {rate}: give m / K, a number from 0 to 1")


def delta_from_mu(mu: float, epsilon: float) -> float:
    """Returns the exact delta, at finite epsilon >= 0, of Gaussian releases.

    mu = sqrt(n) / z >= 0; 0 gives 0 and inf gives 1. Raises UserError otherwise.
    Privacy: public. Source: the module's equation, as exp(epsilon + log Phi).
    """
    _check(0.0 if mu == math.inf else mu)
    _check(epsilon)
    return _fixed(1).delta(1 / mu, epsilon) if mu else 0.0


def epsilon_from_mu(mu: float, delta: float) -> float:
    """Returns the least epsilon, at delta in (0, 1), of Gaussian releases.

    mu = sqrt(n) / z >= 0; 0 gives 0 and inf gives inf. Raises UserError otherwise.
    Privacy: public. Source: inverse of `delta_from_mu`, rounded up.
    """
    _check(0.0 if mu == math.inf else mu, delta)
    return _fixed(1).epsilon(1 / mu, delta) if mu else 0.0


def mu_from_epsilon(epsilon: float, delta: float) -> float:
    """Returns the largest mu that is (epsilon, delta)-DP.

    epsilon is finite and >= 0, delta in (0, 1). Raises UserError otherwise.
    Privacy: public. Source: inverse of `delta_from_mu`, rounded down.
    """
    _check(epsilon, delta)
    return 1 / _fixed(1).smallest_ratio(epsilon, delta)


def binomial_delta(num_rounds: int, rate: float, ratio: float, epsilon: float) -> float:
    """Returns E_n[delta_n(epsilon)], n ~ Binomial(num_rounds, rate), uniform selection.

    rate = m / K in [0, 1]; z = ratio >= 0 of one release; finite epsilon >= 0. Tails of
    the law beyond 1e-18 are added to delta. Raises UserError for other values.
    Privacy: public. Source: "Which theorem may be used when", 1.
    """
    _check(ratio, rate=rate)
    _check(epsilon)
    return _binomial({1: num_rounds}, rate).delta(ratio, epsilon)


def binomial_epsilon(num_rounds: int, rate: float, ratio: float, delta: float) -> float:
    """Returns the epsilon at which `binomial_delta` is delta in (0, 1); see there.

    inf without noise. Raises UserError for values out of range.
    Privacy: public. Source: "Which theorem may be used when", 1.
    """
    _check(ratio, delta, rate)
    return _binomial({1: num_rounds}, rate).epsilon(ratio, delta)


def noise_shares(adversary: str, counted_nodes: int, colluding: int = 0) -> int:
    """Returns how many nodes' noise the adversary cannot take away.

    All of the sum (release), one (server), all but the colluding ones (secagg).
    Privacy: public. Source: "Three adversaries, three columns".
    """
    if adversary == "secagg":
        return max(counted_nodes - colluding, 0)
    return counted_nodes if adversary == "release" else 1


def noise_ratio(
    multiplier: float, batch_size: int, relation: str, shares: int
) -> float:
    """Returns z = noise / sensitivity of one round's release of B fakes.

    Computes sqrt(shares) * 2 C multiplier / (f C sqrt(B)), f = 2 for replace-one and 1
    for zero-out; multiplier = noise_std / (2 C) of one node, shares: `noise_shares`.
    Privacy: public. Source: "Relation and sensitivity".
    """
    return math.sqrt(shares / batch_size) * 2 * multiplier / RELATIONS[relation]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What decides a run's epsilons in advance; names and ranges as in `RunConfig`.

    noise_multiplier is one node's noise_std / (2 C), None if not chosen yet;
    client_selection None means unknown: uniform and balanced are both reported.
    Raises UserError for contradicting values. Privacy: public.
    """

    num_clients: int
    clients_per_round: int
    num_rounds: int
    batch_size: int
    clip_bound: float = 1.0
    noise_multiplier: float | None = None
    clients_per_node: int = 1
    client_selection: str | None = "uniform"
    discriminator_training: str = "selected"
    min_nodes: int | None = None
    engine: str = "flower"
    privacy_unit: str = "client"
    noise_source: str = "os"

    def __post_init__(self) -> None:
        """Checks the values with the rules of `RunConfig`."""
        values: dict[str, Any] = asdict(self)
        values["client_selection"] = self.client_selection or "uniform"
        if values.pop("noise_source") not in ("os", "seeded"):
            raise UserError(f"noise_source = {self.noise_source!r}: give os or seeded")
        RunConfig(**values).validate()

    @classmethod
    def from_config(cls, config: RunConfig) -> "Plan":
        """Returns the plan of a run. Raises UserError if num_clients is unset."""
        if config.num_clients is None:
            raise UserError("num_clients is unset: give --num-clients")
        names = {field.name for field in fields(cls)} - {"noise_source"}
        values = {name: getattr(config, name) for name in names}
        if config.client_selection == "all":
            values["clients_per_round"] = config.num_clients
        return cls(
            noise_source="os" if config.noise_seed is None else "seeded", **values
        )

    @property
    def adversaries(self) -> tuple[str, ...]:
        """The columns of a report; a local run is one trusted curator."""
        return ("release",) if self.engine == "local" else tuple(ADVERSARIES)

    @property
    def counted_nodes(self) -> int:
        """Nodes of any round whose noise counts: the fewest that m clients live on."""
        fewest = math.ceil(self.clients_per_round / self.clients_per_node)
        return min(fewest, self.min_nodes or fewest)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One epsilon with all that it depends on; None means unbounded.

    `guarantee` False: a figure for comparison, not a bound. Privacy: public.
    """

    adversary: str
    relation: str
    unit: str
    delta: float
    epsilon: float | None
    theorem: str
    conditions: tuple[str, ...]
    guarantee: bool
    client_selection: str

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values. Privacy: public."""
        return {**asdict(self), "conditions": list(self.conditions)}


def _law(plan: Plan, selection: str) -> tuple[_Law, str, str]:
    """Returns the law of a client's participations, its theorem and its condition."""
    rounds, clients = plan.num_rounds, plan.num_clients
    per_round = plan.clients_per_round
    if selection == "all" or per_round == clients:
        why = f"count: every client takes part in all {rounds} rounds"
        return _fixed(rounds), COUNT_THEOREM, why
    if selection == "balanced":
        most = math.ceil(per_round * rounds / clients)
        why = f"count: a client takes part at most {most} times; repeats count again"
        return _fixed(most), COUNT_THEOREM, why
    why = _MIXTURE.format(per_round, clients, f"{rounds} rounds")
    return _binomial({1: rounds}, per_round / clients), MIXTURE_THEOREM, why


class _Basis(NamedTuple):
    """What all statements of one law share; `why` says which theorem applies."""

    law: _Law
    theorem: str
    why: str
    client_selection: str
    unit: str
    delta: float
    nodes: int
    colluding: int
    is_seeded: bool

    def state(self, adversary: str, relation: str, ratio: float) -> Statement:
        conditions = [
            self.why,
            ADVERSARIES[adversary].format(nodes=self.nodes, colluding=self.colluding),
            _MEANINGS[relation],
            "drop-out is independent of data; the nodes enforce B, C and the noise",
        ]
        if self.unit == "record" and relation == "zero-out":
            conditions.append("of the record's whole shard, not of the record alone")
        if self.is_seeded:
            conditions.append(SEEDED)
        epsilon = self.law.epsilon(ratio, self.delta)
        return Statement(
            adversary=adversary,
            relation=relation,
            unit=self.unit,
            delta=self.delta,
            epsilon=epsilon if epsilon < math.inf else None,
            theorem=self.theorem,
            conditions=tuple(conditions),
            guarantee=epsilon < math.inf and not self.is_seeded,
            client_selection=self.client_selection,
        )


def statements(plan: Plan, delta: float, colluding: int = 0) -> tuple[Statement, ...]:
    """Returns the guarantee of a plan for every selection, adversary and relation.

    delta in (0, 1); `colluding` nodes take their noise out of secagg's sum. Raises
    UserError for other values and without a noise multiplier.
    Privacy: public. Source: "Which theorem may be used when", 1 and 3.
    """
    _check(colluding, delta)
    result: list[Statement] = []
    is_seeded, nodes = plan.noise_source == "seeded", plan.counted_nodes
    unknown = ("uniform", "balanced")
    for selection in (plan.client_selection,) if plan.client_selection else unknown:
        shared = (selection, plan.privacy_unit, delta, nodes, colluding, is_seeded)
        basis = _Basis(*_law(plan, selection), *shared)
        for adversary in plan.adversaries:
            for relation in RELATIONS:
                ratio = _planned_ratio(plan, adversary, relation, colluding)
                result.append(basis.state(adversary, relation, ratio))
    return tuple(result)


def _planned_ratio(plan: Plan, adversary: str, relation: str, colluding: int) -> float:
    if plan.noise_multiplier is None:
        raise UserError("noise_multiplier is unset: give --noise-multiplier")
    shares = noise_shares(adversary, plan.counted_nodes, colluding)
    return noise_ratio(plan.noise_multiplier, plan.batch_size, relation, shares)


class _Exposure:
    """What a sequence of events has cost: mu^2 by client and the law of the counts.

    `mu_squared` has a row for each adversary, a column for each client, and is in
    units of replace-one. `no_mixture` says why the Binomial mixture does not hold.
    """

    def __init__(self, colluding: int) -> None:
        self.colluding = colluding
        self.mu_squared = np.zeros((len(ADVERSARIES), 0))
        self.first: Event | None = None
        self.selections: set[str] = set()
        self.is_seeded, self.nodes, self.no_mixture = False, 0, ""
        self.participants: dict[int, Any] = {}
        self.attempts: Counter[int] = Counter()

    def cost(self, event: Event) -> npt.NDArray[np.float64]:
        ratios = (
            noise_ratio(event.noise_multiplier, event.batch_size, "replace-one", shares)
            for name in ADVERSARIES
            for shares in [noise_shares(name, event.counted_nodes, self.colluding)]
        )
        return np.array([1 / z**2 if z**2 else np.inf for z in ratios])

    def why_count(self, event: Event) -> str:
        """Returns why this event ends the Binomial mixture, or nothing."""
        if self.no_mixture:
            return self.no_mixture
        if event.client_selection != "uniform":
            return f"the selection is {event.client_selection}"
        if _constants(self.first or event) != _constants(event):
            return "noise, C, B, the cohort or the nodes changed"
        known = self.participants.get(event.round, event.participants)
        return "" if known == event.participants else "a repeated round asked others"

    def add(self, event: Event) -> None:
        self.no_mixture = self.why_count(event)
        if self.first is None:
            self.first, self.nodes = event, event.counted_nodes
            self.mu_squared = np.zeros((len(ADVERSARIES), event.num_clients))
        if event.num_clients != self.first.num_clients:
            problem = f"earlier events have {self.first.num_clients}; account apart"
            raise UserError(f"num_clients = {event.num_clients}: {problem}")
        self.mu_squared[:, _columns(event)] += self.cost(event)[:, None]
        self.nodes = min(self.nodes, event.counted_nodes)
        self.selections.add(event.client_selection)
        self.is_seeded |= event.noise_source == "seeded"
        self.participants.setdefault(event.round, event.participants)
        self.attempts[event.round] += 1

    def law(self, adversary: str) -> tuple[_Law, float, str, str]:
        """Returns the law, z of it for replace-one, the theorem and its condition."""
        first, total = self.first, sum(self.attempts.values())
        if first is None or self.no_mixture:
            row = self.mu_squared[list(ADVERSARIES).index(adversary)]
            worst = row.max(initial=0.0)
            because = f" because {self.no_mixture}" if first else ""
            why = f"count: the client with the largest realised mu^2 decides{because}"
            why += "; schedule and noise were not chosen after seeing answers"
            return _fixed(worst), 1.0, COUNT_THEOREM, why
        rate = first.num_participants / first.num_clients
        law = _binomial(Counter(self.attempts.values()), rate)
        ratio = self.cost(first)[list(ADVERSARIES).index(adversary)] ** -0.5
        events = f"{total} events in {len(self.attempts)} rounds"
        why = _MIXTURE.format(first.num_participants, first.num_clients, events)
        return law, ratio, MIXTURE_THEOREM, why


def _columns(event: Event) -> Any:
    return slice(None) if event.participants == "all" else list(event.participants)


def _constants(event: Event) -> tuple[float, ...]:
    cohort = (event.num_participants, event.num_clients, event.counted_nodes)
    return (event.noise_std, event.clip_bound, event.batch_size, *cohort)


def statements_from_ledger(
    events: Iterable[Event],
    delta: float,
    *,
    engine: str = "flower",
    privacy_unit: str = "client",
    colluding: int = 0,
) -> tuple[Statement, ...]:
    """Returns the guarantee of what was released, for every adversary and relation.

    Every event counts, repeated rounds again. Several runs on the same clients: pass
    all their events; then the realised count decides. delta in (0, 1). Raises UserError
    when the number of clients changes.
    Privacy: public. Source: "Which theorem may be used when", 1.
    """
    _check(colluding, delta)
    exposure = _Exposure(colluding)
    for event in events:
        exposure.add(event)
    result: list[Statement] = []
    selection = "+".join(sorted(exposure.selections)) or "none"
    shared = (selection, privacy_unit, delta, exposure.nodes, colluding)
    for adversary in ("release",) if engine == "local" else ADVERSARIES:
        law, ratio, theorem, why = exposure.law(adversary)
        basis = _Basis(law, theorem, why, *shared, exposure.is_seeded)
        for relation, factor in RELATIONS.items():
            result.append(basis.state(adversary, relation, ratio * 2 / factor))
    return tuple(result)


def as_published(plan: Plan, delta: float) -> tuple[Statement, ...]:
    """Returns the paper's figures, Table 1's and (with nodes) Table 2's: no bounds.

    Empty unless m = 1 and the selection is uniform or unknown. delta in (0, 1).
    Privacy: public. Source: GS-WGAN, Tables 1 and 2; `privacy_analysis.py`; "Why 'as
    published' is not a bound".
    """
    _check(delta=delta)
    if plan.clients_per_round != 1 or plan.client_selection not in ("uniform", None):
        return ()
    _planned_ratio(plan, "release", "replace-one", 0)
    multiplier, rate = plan.noise_multiplier or 0.0, 1 / plan.num_clients
    releases = plan.num_rounds * plan.batch_size
    table_1 = _autodp(multiplier, releases, rate, delta)
    table_2 = _autodp(multiplier, releases * rate, None, delta)
    average = _TABLE_2.format(plan.num_rounds * rate)
    rows = (("release", table_1, "1", _TABLE_1), ("server", table_2, "2", average))
    return tuple(
        Statement(
            adversary=adversary,
            relation="replace-one",
            unit=plan.privacy_unit,
            delta=delta,
            epsilon=epsilon,
            theorem=f"as published: RDP, Table {table}",
            conditions=(f"not a bound: {why}",),
            guarantee=False,
            client_selection="uniform",
        )
        for adversary, epsilon, table, why in rows
        if adversary in plan.adversaries
    )


def _autodp(
    multiplier: float, count: float, prob: float | None, delta: float
) -> float | None:
    """Returns the paper's accountant's epsilon for (subsampled) Gaussian releases."""
    if multiplier == 0:
        return None
    rdp_acct: Any = importlib.import_module("autodp.rdp_acct")  # its one use
    rdp_bank: Any = importlib.import_module("autodp.rdp_bank")

    def rdp(order: float) -> float:
        return rdp_bank.RDP_gaussian({"sigma": multiplier}, order)

    accountant: Any = rdp_acct.anaRDPacct()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if prob is None:
            accountant.compose_mechanism(rdp, coeff=count)
        else:
            accountant.compose_subsampled_mechanism(rdp, prob, coeff=count)
        return float(accountant.get_eps(delta))


def _check_target(plan: Plan, target: float, adversary: str, relation: str) -> str:
    """Checks a request and returns the selection it is for."""
    _check(target)
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
    """Returns the least noise_multiplier, rounded up to 4 digits, for a target.

    target_epsilon >= 0 for all of `plan.num_rounds`, delta in (0, 1). Raises UserError
    where no noise can do it. Privacy: public. Source: inverse of `statements`.
    """
    selection = _check_target(plan, target_epsilon, adversary, relation)
    _check(colluding, delta)
    shares = noise_shares(adversary, plan.counted_nodes, colluding)
    if shares == 0:
        nodes = plan.counted_nodes
        raise UserError(f"colluding = {colluding}: give less than the {nodes} nodes")
    ratio = _law(plan, selection)[0].smallest_ratio(target_epsilon, delta)
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
    """Returns the most rounds with epsilon <= target_epsilon; 0 if one is too many.

    Arguments and errors as `calibrate_noise`; looks no further than 1e9 rounds.
    Privacy: public. Source: inverse of `statements`.
    """
    selection = _check_target(plan, target_epsilon, adversary, relation)
    _check(colluding, delta)
    ratio = _planned_ratio(plan, adversary, relation, colluding)

    def holds(rounds: int) -> bool:
        law = _law(replace(plan, num_rounds=rounds), selection)[0]
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

    Agrees with `statements_from_ledger` on the same events. Uniform selection stops
    after a number of rounds fixed in advance, so that the mixture stays valid.
    Arguments and errors as `calibrate_noise`; `events` were released before, also by
    other runs on the same clients.

    Privacy: public. Source: "Noise, crashes and the ledger".
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
        _check(colluding, delta)
        self._num_clients = plan.num_clients
        self._target, self._delta = target_epsilon, delta
        self._row = list(ADVERSARIES).index(adversary)
        self._scale = 2 / RELATIONS[relation]
        self._most = (mu_from_epsilon(target_epsilon, delta) * self._scale) ** 2
        self._exposure = _Exposure(colluding)
        self._repeats: Counter[int] = Counter()
        self._cap: tuple[tuple[float, ...], int] | None = None
        for event in events:
            self.add(event)

    def allows(self, event: Event) -> bool:
        """Tells whether epsilon stays within the target after this event.

        Microseconds; milliseconds after a repeated round. Privacy: public.
        """
        exposure = self._exposure
        self._check_clients(event)
        if exposure.why_count(event):
            cost = exposure.cost(event)[self._row]
            row = exposure.mu_squared[self._row]
            if not len(row):
                return bool(cost <= self._most)
            after = max(row.max(), row[_columns(event)].max() + cost)
            return bool(after <= self._most)
        if event.round in exposure.attempts:
            tries = exposure.attempts + Counter({event.round: 1})
            return self._holds(event, Counter(tries.values()))
        if self._cap is None or self._cap[0] != _constants(event):
            most = _largest(lambda n: self._holds(event, {**self._repeats, 1: n}))
            self._cap = (_constants(event), most)
        once = len(exposure.attempts) - sum(self._repeats.values())
        return once < self._cap[1]

    def _holds(self, event: Event, rounds: Mapping[int, int]) -> bool:
        law = _binomial(rounds, event.num_participants / event.num_clients)
        ratio = self._exposure.cost(event)[self._row] ** -0.5 * self._scale
        return law.delta(float(ratio), self._target) <= self._delta

    def add(self, event: Event) -> None:
        """Counts a release. Raises UserError for another number of clients."""
        self._check_clients(event)
        self._exposure.add(event)
        if self._exposure.attempts[event.round] > 1:
            tries = Counter(self._exposure.attempts.values())
            self._repeats = Counter({a: n for a, n in tries.items() if a > 1})
            self._cap = None

    def _check_clients(self, event: Event) -> None:
        if event.num_clients != self._num_clients:
            problem = f"this budget is for {self._num_clients} clients; use another"
            raise UserError(f"num_clients = {event.num_clients}: {problem}")
