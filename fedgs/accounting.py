"""What a run's releases cost: epsilon for every adversary and relation.

For a plan, or for the ledger of what was released. Each figure comes with all that it
depends on. One node's release has the noise ratio z = noise / sensitivity; how many
releases count is decided by `fedgs.participation`, and what they cost by the exact
equations of `fedgs.gaussian`. No amplification by sampling is claimed.

>>> plan = Plan(num_clients=539, clients_per_round=539, num_rounds=150, batch_size=32,
...             noise_multiplier=1.2, client_selection="all", engine="local")
>>> for s in statements(plan, delta=1e-5):
...     print(s.adversary, s.relation, s.unit, s.delta, round(s.epsilon or 0, 2))
release replace-one client 1e-05 13.12
release zero-out client 1e-05 5.64

Source: docs/privacy.md; its section names are those that docstrings cite.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgs.config import RunConfig, UserError
from fedgs.gaussian import Law, check_ranges
from fedgs.ledger import Event
from fedgs.oracle import autodp_epsilon
from fedgs.participation import Exposure, planned_law

ADVERSARIES = {
    "release": "adversary: sees every published generator, so the noise of {nodes} "
    "nodes counts",
    "server": "adversary: honest but curious, sees who took part and each node's "
    "release, so the noise of one node counts",
    "secagg": "adversary: sees who took part and only the sum over at least {nodes} "
    "nodes, {colluding} colluding; not malicious, no Sybils",
}
RELATIONS = {"replace-one": 2.0, "zero-out": 1.0}  # sensitivity of one fake / C
SEEDED = "seeded: not private"
_MEANINGS = {
    "replace-one": "relation: a client's whole data set is replaced",
    "zero-out": "relation: a client contributes the zero vector, its slot stays",
}
_TABLE_1 = (
    "T*B independently subsampled releases are composed, but one client is drawn per "
    "round and answers all B fakes; and a discriminator that trains only when selected "
    "remembers the selection"
)
_TABLE_2 = "a client's average of {:.2f} rounds is composed, and many exceed it"


def noise_shares(adversary: str, counted_nodes: int, colluding: int = 0) -> int:
    """Returns how many nodes' noise the adversary cannot take away.

    Privacy: public.

    Args:
        adversary: a key of `ADVERSARIES`.
        counted_nodes: nodes that must answer, at least 1.
        colluding: how many of them tell the adversary their noise, at least 0.

    Returns:
        All nodes (release), one (server), all but the colluding ones (secagg).

    Source: docs/privacy.md, "Three adversaries, three columns".
    """
    if adversary == "secagg":
        return max(counted_nodes - colluding, 0)
    return counted_nodes if adversary == "release" else 1


def noise_ratio(
    multiplier: float, batch_size: int, relation: str, shares: int
) -> float:
    """Returns z = noise / sensitivity of one round's release of B fakes.

    Computes sqrt(shares) * 2 C multiplier / (f C sqrt(B)), f = 2 for replace-one and 1
    for zero-out.

    Privacy: public.

    Args:
        multiplier: noise_std / (2 C) of one node, at least 0. Opacus divides by C.
        batch_size: B, at least 1.
        relation: a key of `RELATIONS`.
        shares: nodes whose noise counts; see `noise_shares`.

    Returns:
        z, at least 0; 0 is no noise.

    Source: docs/privacy.md, "Relation and sensitivity".
    """
    return math.sqrt(shares / batch_size) * 2 * multiplier / RELATIONS[relation]


def costs_of(event: Event, colluding: int) -> npt.NDArray[np.float64]:
    """Returns 1 / z^2 of one event for each adversary, with replace-one.

    Privacy: public.

    Args:
        event: the releases of one attempt of a round.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Returns:
        float64 of shape (adversaries,), in the order of `ADVERSARIES`; inf is no noise.

    Source: docs/privacy.md, "Relation and sensitivity".
    """
    ratios = (
        noise_ratio(event.noise_multiplier, event.batch_size, "replace-one", shares)
        for name in ADVERSARIES
        for shares in [noise_shares(name, event.counted_nodes, colluding)]
    )
    return np.array([1 / z**2 if z**2 else np.inf for z in ratios])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What decides a run's epsilons in advance; names and ranges as in `RunConfig`.

    Privacy: public.

    Attributes:
        noise_multiplier: noise_std / (2 C) of one node; None if not chosen yet.
        client_selection: None means unknown: uniform and balanced are both reported.
        noise_source: "os" (operating system's entropy) or "seeded" (not private).

    Raises:
        UserError: values that are out of range or contradict each other.
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
        """Returns the plan of a run.

        Privacy: public.

        Raises:
            UserError: num_clients is unset, or values contradict each other.
        """
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

    def law(self, selection: str) -> tuple[Law, str, str]:
        """Returns `fedgs.participation.planned_law` for a client_selection."""
        clients = (self.num_clients, self.clients_per_round)
        return planned_law(selection, self.num_rounds, *clients)

    def ratio(self, adversary: str, relation: str, colluding: int) -> float:
        """Returns `noise_ratio` of one round's release, as an adversary sees it.

        Privacy: public.

        Raises:
            UserError: the plan has no noise multiplier.
        """
        if self.noise_multiplier is None:
            raise UserError("noise_multiplier is unset: give --noise-multiplier")
        shares = noise_shares(adversary, self.counted_nodes, colluding)
        return noise_ratio(self.noise_multiplier, self.batch_size, relation, shares)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One epsilon with all that it depends on.

    Privacy: public.

    Attributes:
        adversary: who looks; a key of `ADVERSARIES`.
        relation: what two neighbouring data sets differ in; a key of `RELATIONS`.
        unit: what one client stands for, "client" or "record".
        delta: above 0 and below 1.
        epsilon: at least 0; None means unbounded.
        theorem: what epsilon was computed with.
        conditions: without each of them epsilon is not valid.
        guarantee: False for a figure that is no bound, for no noise or seeded noise.
        client_selection: uniform, balanced or all; several of a ledger are joined by +.
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
        """Returns the fields as JSON values.

        Privacy: public.
        """
        return {**asdict(self), "conditions": list(self.conditions)}


class _Basis(NamedTuple):
    """What all statements of one law share; `why` says which theorem applies."""

    law: Law
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

    Privacy: public.

    Args:
        plan: the run; needs a noise multiplier.
        delta: above 0 and below 1.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Raises:
        UserError: delta or colluding is out of range, or there is no noise multiplier.

    Source: docs/privacy.md, "Which theorem may be used when", 1 and 3.
    """
    check_ranges(colluding, delta)
    result: list[Statement] = []
    is_seeded, nodes = plan.noise_source == "seeded", plan.counted_nodes
    unknown = ("uniform", "balanced")
    for selection in (plan.client_selection,) if plan.client_selection else unknown:
        shared = (selection, plan.privacy_unit, delta, nodes, colluding, is_seeded)
        basis = _Basis(*plan.law(selection), *shared)
        for adversary in plan.adversaries:
            for relation in RELATIONS:
                ratio = plan.ratio(adversary, relation, colluding)
                result.append(basis.state(adversary, relation, ratio))
    return tuple(result)


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
    all their events; then the realised count decides.

    Privacy: public.

    Args:
        events: the ledger's, in order; none gives epsilon 0.
        delta: above 0 and below 1.
        engine: as in `RunConfig`; local has the adversary `release` only.
        privacy_unit: as in `RunConfig`.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Raises:
        UserError: delta or colluding is out of range, or the number of clients changes.

    Source: docs/privacy.md, "Which theorem may be used when", 1.
    """
    check_ranges(colluding, delta)
    exposure = Exposure()
    for event in events:
        exposure.add(event, costs_of(event, colluding))
    result: list[Statement] = []
    selection = "+".join(sorted(exposure.selections)) or "none"
    shared = (selection, privacy_unit, delta, exposure.nodes, colluding)
    for row, adversary in enumerate(ADVERSARIES):
        if engine == "local" and adversary != "release":
            continue
        law, ratio, theorem, why = exposure.law(row)
        basis = _Basis(law, theorem, why, *shared, exposure.is_seeded)
        for relation, factor in RELATIONS.items():
            result.append(basis.state(adversary, relation, ratio * 2 / factor))
    return tuple(result)


def as_published(plan: Plan, delta: float) -> tuple[Statement, ...]:
    """Returns the paper's figures, Table 1's and (with nodes) Table 2's: no bounds.

    Privacy: public.

    Args:
        plan: the run; needs a noise multiplier.
        delta: above 0 and below 1.

    Returns:
        Nothing unless m = 1 and the selection is uniform or unknown.

    Raises:
        AutodpMissing: the paper's accountant is not installed.
        UserError: delta is out of range, or there is no noise multiplier.

    Source: GS-WGAN, Tables 1 and 2; reference `privacy_analysis.py`; docs/privacy.md,
        "Why 'as published' is not a bound".
    """
    check_ranges(delta=delta)
    if plan.clients_per_round != 1 or plan.client_selection not in ("uniform", None):
        return ()
    plan.ratio("release", "replace-one", 0)  # refuses a plan without noise multiplier
    multiplier, rate = plan.noise_multiplier or 0.0, 1 / plan.num_clients
    releases = plan.num_rounds * plan.batch_size
    table_1 = autodp_epsilon(multiplier, releases, rate, delta)
    table_2 = autodp_epsilon(multiplier, releases * rate, None, delta)
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
