"""What is known of a run before it starts, and the noise that each adversary faces.

One node's release has the noise ratio z = noise / sensitivity. A `Plan` is the part of
a configuration that decides its epsilons; `fedgs.privacy.accountant` states them.

>>> plan = Plan(num_clients=539, clients_per_round=539, num_rounds=150, batch_size=32,
...             noise_multiplier=1.2, client_selection="all", engine="local")
>>> round(plan.ratio("release", "replace-one", colluding=0), 3)
4.925

Source: docs/privacy.md, "Relation and sensitivity", "Three adversaries, three columns".
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from fedgs.config.amplification_rules import why_not_amplified
from fedgs.config.checks import OF_PLANS
from fedgs.config.fields import refuse
from fedgs.config.integers import proven_multiplier
from fedgs.config.method_settings import GsWganSettings, release_problems, settings_with
from fedgs.config.placement import Placement, hosting
from fedgs.config.run_config import RunConfig, class_of
from fedgs.config.stages import read_stages, written
from fedgs.errors import UserError
from fedgs.privacy.amplification import Sampled
from fedgs.privacy.gaussian import Law, fixed_law
from fedgs.privacy.ledger import Event
from fedgs.privacy.participation import COUNT_THEOREM, planned_law

ADVERSARIES = ("release", "server", "secagg")
UNMASKED = "unmasked"  # the server of a secure aggregation, if masking fails
COLUMNS = (*ADVERSARIES, UNMASKED)  # of the costs of an event
RELATIONS = {"replace-one": 2.0, "zero-out": 1.0}  # sensitivity of one fake / C


def relations_of(unit: str) -> tuple[str, ...]:
    """Returns the relations that are stated of a unit of privacy.

    A record that contributes nothing moves the answer of its shard as far as one that
    is replaced: up to 2 C. The half of it is a bound for whole clients only.
    """
    return ("replace-one",) if unit == "record" else tuple(RELATIONS)


def noise_shares(
    adversary: str, counted_nodes: int, colluding: int = 0, is_masked: bool = False
) -> int:
    """Returns how many nodes' noise the adversary cannot take away.

    Args:
        adversary: one of `COLUMNS`.
        counted_nodes: nodes that must answer, at least 1.
        colluding: how many of them tell the adversary their noise, at least 0.
        is_masked: whether the server sees only the sum, as secagg does.

    Returns:
        All nodes (release), one (server, unmasked), all but the colluding ones (secagg,
        and a server that sees the sum).

    Source: docs/privacy.md, "Three adversaries, three columns".
    """
    if adversary == "secagg" or (adversary == "server" and is_masked):
        return max(counted_nodes - colluding, 0)
    return counted_nodes if adversary == "release" else 1


def noise_ratio(
    multiplier: float, batch_size: int, relation: str, shares: int
) -> float:
    """Returns z = noise / sensitivity of one round's release of B fakes.

    Computes sqrt(shares) * 2 C multiplier / (f C sqrt(B)), f = 2 for replace-one and 1
    for zero-out.

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


def costs_of(event: Event, colluding: int) -> tuple[float, ...]:
    """Returns 1 / z^2 of one event for each adversary, with replace-one.

    Args:
        event: the releases of one attempt of a round.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Returns:
        One cost for each of `COLUMNS`; inf is no noise.

    Source: docs/privacy.md, "Relation and sensitivity".
    """
    constants = (event.proven_multiplier, event.batch_size, event.counted_nodes)
    return _costs(*constants, colluding, event.is_discrete)


# Rounds of a run have the same numbers, and a ledger has thousands of them.
@lru_cache(maxsize=128)
def _costs(
    multiplier: float, batch_size: int, nodes: int, colluding: int, is_masked: bool
) -> tuple[float, ...]:
    shares = (noise_shares(name, nodes, colluding, is_masked) for name in COLUMNS)
    ratios = (noise_ratio(multiplier, batch_size, "replace-one", n) for n in shares)
    return tuple(1 / z**2 if z**2 else math.inf for z in ratios)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What decides a run's epsilons in advance; names and ranges as in `RunConfig`.

    Attributes:
        noise_multiplier: noise_std / (2 C) of one node; None if not chosen yet.
        client_selection: None means unknown: uniform and balanced are both reported.
        amplification: whether the selection may count as protection; the promise that
            nobody outside the server learns it.
        noise_source: "os" (operating system's entropy) or "seeded" (not private).
        public_conditions: as in `RunConfig`, after what one unit is.

    Raises:
        UserError: values that are out of range or contradict each other.
    """

    num_clients: int
    clients_per_round: int
    num_rounds: int
    batch_size: int = 1
    clip_bound: float = 1.0
    noise_multiplier: float | None = None
    clients_per_node: int = 1
    node_sizes: str | None = None
    client_selection: str | None = "uniform"
    discriminator_training: str = "selected"
    min_answers: int | None = None
    engine: str = "flower"
    privacy_unit: str = "client"
    amplification: bool = False
    stages: str | None = None
    secure_aggregation: bool = False
    noise_source: str = "os"
    public_conditions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks the values with the rules of `RunConfig`."""
        values: dict[str, Any] = asdict(self)
        del values["public_conditions"]
        values["client_selection"] = self.client_selection or "uniform"
        if values.pop("noise_source") not in ("os", "seeded"):
            raise UserError(f"noise_source = {self.noise_source!r}: give os or seeded")
        config = class_of(RunConfig, GsWganSettings)(**values)
        for problems in (*OF_PLANS, release_problems):
            refuse(config, problems(config))

    @classmethod
    def from_config(cls, config: RunConfig) -> "Plan":
        """Returns the plan of a run.

        Raises:
            UserError: num_clients is unset, or values contradict each other.
        """
        if config.num_clients is None:
            raise UserError("num_clients is unset: give --num-clients")
        has = {spec.name for spec in fields(config)} & {*settings_with("mechanism")}
        values = {name: getattr(config, name) for name in has}
        if config.client_selection == "all":
            values["clients_per_round"] = config.num_clients
        return cls(
            noise_source="os" if config.noise_seed is None else "seeded",
            public_conditions=(config.unit_condition, *config.public_conditions),
            **values,
        )

    @property
    def adversaries(self) -> tuple[str, ...]:
        """The columns of a report; a local run is one trusted curator."""
        if self.engine == "local":
            return ("release",)
        return COLUMNS if self.secure_aggregation else ADVERSARIES

    @property
    def hosting(self) -> Placement:
        """Which clients live on which node."""
        return hosting(self.num_clients, self.clients_per_node, self.node_sizes)

    @property
    def counted_nodes(self) -> int:
        """Nodes of any round whose noise counts: the fewest that m clients live on."""
        fewest = self.hosting.fewest_nodes(self.clients_per_round)
        return min(fewest, self.min_answers or fewest)

    def law(
        self, selection: str, ratio: float, num_rounds: int | None = None
    ) -> tuple[Law, str, str]:
        """Returns `fedgs.privacy.participation.planned_law` for a client_selection.

        With stages it counts in gradient releases: a stage of weight w costs w / B.

        Args:
            selection: client_selection.
            ratio: z of a gradient release.
            num_rounds: at least 1; None: the plan's.

        Source: docs/privacy.md, "Embedding releases".
        """
        stages, num_rounds = read_stages(self.stages), num_rounds or self.num_rounds
        if not stages:
            clients = (self.num_clients, self.clients_per_round)
            return planned_law(selection, num_rounds, *clients, ratio)
        # A run with stages asks all clients in every round (a check), so n is known.
        weight = sum(stage.weight for stage in stages[:num_rounds])
        gradients = max(num_rounds - len(stages), 0)
        why = (
            f"count: every client takes part in all {num_rounds} rounds, of which "
            f"{num_rounds - gradients} release embeddings"
        )
        law = fixed_law(gradients + weight / self.batch_size, ratio)
        return law, COUNT_THEOREM, why

    def ended_after(self, num_rounds: int) -> "Plan":
        """Returns the plan of the first rounds only, at least one, stages first."""
        kept = read_stages(self.stages)[:num_rounds]
        return replace(self, num_rounds=num_rounds, stages=written(kept))

    def why_not_amplified(self, selection: str) -> str:
        """Returns what `amplification_rules` says of a client_selection."""
        return why_not_amplified(
            selection,
            self.discriminator_training,
            self.hosting.largest,
            self.clients_per_round,
            self.num_clients,
        )

    def sampled(self) -> tuple[Sampled, ...]:
        """Returns the rounds as `fedgs.privacy.amplification` counts them.

        Raises:
            UserError: the plan has no noise multiplier.
        """
        clients = (self.num_clients, self.clients_per_round)
        ratio = self.ratio("release", "replace-one", 0)
        return (Sampled(*clients, ratio, self.num_rounds),)

    def ratio(self, adversary: str, relation: str, colluding: int) -> float:
        """Returns `noise_ratio` of a gradient round, as an adversary sees it.

        Raises:
            UserError: the plan has no noise multiplier.
        """
        if self.noise_multiplier is None:
            raise UserError("noise_multiplier is unset: give --noise-multiplier")
        shares = self.shares(adversary, colluding)
        multiplier = proven_multiplier(self.noise_multiplier, self.secure_aggregation)
        return noise_ratio(multiplier, self.batch_size, relation, shares)

    def shares(self, adversary: str, colluding: int) -> int:
        """Returns `noise_shares` of a round."""
        nodes, is_masked = self.counted_nodes, self.secure_aggregation
        return noise_shares(adversary, nodes, colluding, is_masked)
