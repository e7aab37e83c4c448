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
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from fedgs.config.amplification_rules import why_not_amplified
from fedgs.config.checks import OF_PLANS
from fedgs.config.fields import refuse
from fedgs.config.integers import proven_multiplier
from fedgs.config.placement import Placement, hosting
from fedgs.config.plugins import GS_WGAN
from fedgs.config.rounds import rounds_alike, with_open_settings
from fedgs.config.run_config import RunConfig, class_of
from fedgs.errors import UserError
from fedgs.privacy.amplification import Sampled
from fedgs.privacy.gaussian import Law, fixed_law
from fedgs.privacy.ledger import Event
from fedgs.privacy.participation import (
    COUNT_THEOREM,
    MIXTURE_THEOREM,
    planned_law,
)

# In the order of the columns of a report, and of the costs of an event.
ADVERSARIES = ("release", "server", "secagg")
UNMASKED = "unmasked"  # the server of a secure aggregation, if masking fails
ADVERSARY_COLUMNS = (*ADVERSARIES, UNMASKED)  # of the costs of an event
SENSITIVITIES = {"replace-one": 2.0, "zero-out": 1.0}  # sensitivity of one fake / C


def relations_of(unit: str) -> tuple[str, ...]:
    """Returns the relations that are stated of a unit of privacy.

    A record that contributes nothing moves the answer of its shard as far as one that
    is replaced: up to 2 C. The half of it is a bound for whole clients only.
    """
    if unit == "record":
        return ("replace-one",)
    return tuple(SENSITIVITIES)


def noise_shares(
    adversary: str,
    counted_nodes: int,
    asked_nodes: int,
    colluding: int = 0,
    is_masked: bool = False,
) -> int:
    """Returns how many nodes' noise the adversary cannot take away.

    Args:
        adversary: one of `ADVERSARY_COLUMNS`.
        counted_nodes: nodes that must answer, at least 1; 1 where each node's own
            release is published.
        asked_nodes: nodes that are asked, at least counted_nodes.
        colluding: the number of nodes that tell the adversary their noise, at least 0.
        is_masked: whether the server sees only the sum, as secagg does.

    Returns:
        All nodes (release), one (server, unmasked), all but the colluding ones (secagg,
        and a server that sees the sum). The node that hosts a client is none of those,
        for nobody is protected against it; so where any node is honest, its own noise
        counts. 0 where all nodes collude.

    Source: docs/privacy.md, "Three adversaries, three columns".
    """
    if adversary == "secagg" or (adversary == "server" and is_masked):
        if colluding >= asked_nodes:
            return 0
        return max(counted_nodes - colluding, 1)
    if adversary == "release":
        return counted_nodes
    # Whoever sees each node's release by itself sees it under that node's noise alone.
    return 1


def noise_ratio(
    multiplier: float,
    batch_size: int,
    relation: str,
    shares: int,
) -> float:
    """Returns z = noise / sensitivity of one round's release of B fakes.

    Computes sqrt(shares) * 2 C multiplier / (f C sqrt(B)), f = 2 for replace-one and 1
    for zero-out.

    Args:
        multiplier: noise_std / (2 C) of one node, at least 0. Opacus divides by C.
        batch_size: B, at least 1.
        relation: a key of `SENSITIVITIES`.
        shares: nodes whose noise counts; see `noise_shares`.

    Returns:
        z, at least 0; 0 is no noise.

    Source: docs/privacy.md, "Relation and sensitivity".
    """
    return math.sqrt(shares / batch_size) * 2 * multiplier / SENSITIVITIES[relation]


def cost_of_ratio(ratio: float) -> float:
    """Returns mu^2 = 1 / z^2 of one release; inf without noise."""
    square = ratio**2  # may underflow to 0: so little noise is none
    return 1 / square if square else math.inf


def costs_of(event: Event, colluding: int) -> tuple[float, ...]:
    """Returns 1 / z^2 of one event for each adversary, with replace-one.

    Args:
        event: the releases of one attempt of a round.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Returns:
        One cost for each of `ADVERSARY_COLUMNS`; inf is no noise.

    Source: docs/privacy.md, "Relation and sensitivity".
    """
    return _costs(
        event.proven_multiplier,
        event.batch_size,
        event.counted_nodes,
        event.planned_nodes,
        colluding,
        event.is_discrete,
    )


# Rounds of a run have the same numbers, and a ledger has thousands of them.
@lru_cache(maxsize=128)
def _costs(
    multiplier: float,
    batch_size: int,
    counted: int,
    asked: int,
    colluding: int,
    is_masked: bool,
) -> tuple[float, ...]:
    costs: list[float] = []
    for adversary in ADVERSARY_COLUMNS:
        shares = noise_shares(adversary, counted, asked, colluding, is_masked)
        ratio = noise_ratio(multiplier, batch_size, "replace-one", shares)
        costs.append(cost_of_ratio(ratio))
    return tuple(costs)


def counted_nodes(
    hosting: Placement,
    clients_per_round: int,
    min_answers: int | None,
    is_by_node: bool,
) -> int:
    """Returns the nodes of any round whose noise counts, whoever is selected.

    Args:
        hosting: says which clients live on which node.
        clients_per_round: m.
        min_answers: as in `RunConfig`.
        is_by_node: as in `Terms`: a node's own release is published, which has its
            noise alone.
    """
    if is_by_node:
        return 1
    fewest = hosting.fewest_nodes(clients_per_round)
    if min_answers is None:
        return fewest
    # A round may be complete with fewer answers, which bear less noise together.
    return min(fewest, min_answers)


class Releases(NamedTuple):
    """Consecutive rounds of a plan whose releases cost the same.

    Attributes:
        kind: the kind of release, as `Terms.release`.
        factor: the noise multiplier of their terms over the plan's, at least 0.
        batch_size: B of their terms.
        num_rounds: the number of rounds.
    """

    kind: str
    factor: float
    batch_size: int
    num_rounds: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What decides a run's epsilons in advance; names and ranges as in `RunConfig`.

    Attributes:
        batch_size: B of the releases; where rounds differ, of the last one.
        noise_multiplier: noise_std / (2 C) of one node; None if not chosen yet.
        client_selection: None means unknown: uniform and balanced are both reported.
        amplification: whether the selection may count as protection; the promise that
            nobody outside the server learns it.
        noise_source: "os" (operating system's entropy) or "seeded" (not private).
        public_conditions: as in `RunConfig`, after what one unit is.
        releases: of all rounds in their order, from the terms of the run's method;
            empty where all rounds are alike.
        is_by_node: whether a release of one node is published by itself.

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
    secure_aggregation: bool = False
    noise_source: str = "os"
    public_conditions: tuple[str, ...] = ()
    releases: tuple[Releases, ...] = ()
    is_by_node: bool = False

    def __post_init__(self) -> None:
        """Checks the values with the rules of `RunConfig`."""
        values: dict[str, Any] = asdict(self)
        # No settings of a run: they follow from the others.
        del values["public_conditions"]
        del values["releases"]
        del values["is_by_node"]
        values["client_selection"] = self.client_selection or "uniform"
        if values.pop("noise_source") not in ("os", "seeded"):
            raise UserError(f"noise_source = {self.noise_source!r}: give os or seeded")
        config = class_of(RunConfig, (GS_WGAN,))(**values)
        for problems in OF_PLANS:
            refuse(config, problems(config))

    @classmethod
    def from_config(cls, config: RunConfig) -> "Plan":
        """Returns the plan of a run.

        Raises:
            UserError: num_clients is unset, or values contradict each other.
        """
        if config.num_clients is None:
            raise UserError("num_clients is unset: give --num-clients")
        of_plan = {spec.name for spec in fields(cls)}
        shared = [spec.name for spec in fields(config) if spec.name in of_plan]
        values = {name: getattr(config, name) for name in shared}
        if config.client_selection == "all":
            values["clients_per_round"] = config.num_clients
        values["noise_source"] = "seeded"
        if config.noise_seed is None:
            values["noise_source"] = "os"
        releases = _releases(config)
        values["batch_size"] = releases[-1].batch_size
        all_terms = [alike.terms for alike in rounds_alike(with_open_settings(config))]
        return cls(
            public_conditions=(config.unit_condition, *config.public_conditions),
            releases=releases,
            is_by_node=any(terms.is_by_node for terms in all_terms),
            **values,
        )

    @property
    def adversaries(self) -> tuple[str, ...]:
        """The columns of a report; a local run is one trusted curator."""
        if self.engine == "local":
            return ("release",)
        if self.secure_aggregation:
            return ADVERSARY_COLUMNS
        return ADVERSARIES

    @property
    def hosting(self) -> Placement:
        """Which clients live on which node."""
        return hosting(self.num_clients, self.clients_per_node, self.node_sizes)

    @property
    def asked_nodes(self) -> int:
        """Nodes that are asked in any round: the fewest that m clients live on."""
        return self.hosting.fewest_nodes(self.clients_per_round)

    @property
    def counted_nodes(self) -> int:
        """Nodes of any round whose noise counts; see `counted_nodes`."""
        return counted_nodes(
            self.hosting,
            clients_per_round=self.clients_per_round,
            min_answers=self.min_answers,
            is_by_node=self.is_by_node,
        )

    def law(
        self,
        selection: str,
        ratio: float,
        num_rounds: int | None = None,
    ) -> tuple[Law, str, str]:
        """Returns `fedgs.privacy.participation.planned_law` for a client_selection.

        Rounds of other terms than the plan's own count by what they cost: one whose
        noise multiplier is f times the plan's, with B_f fakes, costs B_f / (f^2 B).

        Args:
            selection: client_selection.
            ratio: z of a release with the plan's own noise multiplier and B.
            num_rounds: at least 1; None: the plan's. Rounds beyond the planned ones
                are like the last of these.

        Source: docs/privacy.md, "Embedding releases".
        """
        num_rounds = num_rounds or self.num_rounds
        costs = [
            (self._cost_of(releases), releases.num_rounds)
            for releases in self.first_releases(num_rounds)
        ]
        # One round without noise tells everything, whatever the others add.
        if any(cost == math.inf for cost, _ in costs):
            no_noise = fixed_law(1, ratio=0.0)
            return no_noise, COUNT_THEOREM, "count: one round has no noise at all"
        law, theorem, why = planned_law(
            selection,
            num_rounds=num_rounds,
            num_clients=self.num_clients,
            clients_per_round=self.clients_per_round,
            ratio=ratio,
        )
        if all(cost == 1.0 for cost, _ in costs):
            return law, theorem, why
        # Rounds differ, so that a number of rounds alone does not say what they cost.
        most = int(law.counts.max())
        if theorem == MIXTURE_THEOREM:
            # As its run is charged: by the client that was drawn most often.
            most = num_rounds
            why = (
                "count: the noise or B changes, and a client may take part in all "
                f"{most} rounds"
            )
        # Of so many rounds, at worst the dearest.
        law = fixed_law(_dearest(costs, most), ratio)
        return law, COUNT_THEOREM, why + self._of_kinds(num_rounds)

    def first_releases(self, num_rounds: int) -> list[Releases]:
        """Returns the releases of the first rounds, in their order."""
        alike = Releases(
            kind="gradient",
            factor=1.0,
            batch_size=self.batch_size,
            num_rounds=self.num_rounds,
        )
        planned = self.releases or (alike,)
        found: list[Releases] = []
        left = num_rounds
        for releases in planned:
            if left > 0:
                count = min(left, releases.num_rounds)
                found.append(releases._replace(num_rounds=count))
                left -= count
        # More rounds than were planned are like the last ones.
        if left > 0:
            last = found.pop()
            found.append(last._replace(num_rounds=last.num_rounds + left))
        return found

    def _cost_of(self, releases: Releases) -> float:
        """Returns what one of these releases costs, in units of the plan's own."""
        if releases.factor == 0:
            return math.inf
        # mu^2 is proportional to B (the sensitivity is sqrt(B) that of a fake), and to
        # the inverse square of the noise.
        return releases.batch_size / self.batch_size / releases.factor**2

    def _of_kinds(self, num_rounds: int) -> str:
        """Returns how many rounds release something else than gradients, in words."""
        counts = Counter[str]()
        for releases in self.first_releases(num_rounds):
            if releases.kind != "gradient":
                counts[releases.kind] += releases.num_rounds
        if not counts:
            return ""
        texts = [f"{count} release {kind}s" for kind, count in counts.items()]
        return f", of which {' and '.join(texts)}"

    def ended_after(self, num_rounds: int) -> "Plan":
        """Returns the plan of the first rounds only, at least one."""
        releases: tuple[Releases, ...] = ()
        if self.releases:
            releases = tuple(self.first_releases(num_rounds))
        return replace(self, num_rounds=num_rounds, releases=releases)

    def why_not_amplified(self, selection: str) -> str:
        """Returns what `amplification_rules` says of a client_selection."""
        return why_not_amplified(
            selection,
            self.discriminator_training,
            self.hosting.largest,
            self.clients_per_round,
            self.num_clients,
            is_seeded=self.noise_source == "seeded",
        )

    def sampled(self) -> tuple[Sampled, ...]:
        """Returns the rounds as `fedgs.privacy.amplification` counts them.

        Raises:
            UserError: the plan has no noise multiplier.
        """
        ratio = self.ratio("release", "replace-one", colluding=0)
        # By cost: each kind of round takes one more transform, so equal ones are one.
        rounds = Counter[float]()
        for releases in self.first_releases(self.num_rounds):
            rounds[self._cost_of(releases)] += releases.num_rounds
        return tuple(
            Sampled(
                num_clients=self.num_clients,
                clients_per_round=self.clients_per_round,
                ratio=ratio * cost**-0.5,
                rounds=count,
            )
            for cost, count in rounds.items()
        )

    def ratio(self, adversary: str, relation: str, colluding: int) -> float:
        """Returns `noise_ratio` of the plan's own release, as an adversary sees it.

        Raises:
            UserError: the plan has no noise multiplier.
        """
        if self.noise_multiplier is None:
            raise UserError("noise_multiplier is unset: give --noise-multiplier")
        shares = self.shares(adversary, colluding)
        # Discrete noise is accounted as slightly less Gaussian noise, which is proved.
        multiplier = proven_multiplier(self.noise_multiplier, self.secure_aggregation)
        return noise_ratio(multiplier, self.batch_size, relation, shares)

    def shares(self, adversary: str, colluding: int) -> int:
        """Returns `noise_shares` of a round."""
        return noise_shares(
            adversary,
            counted_nodes=self.counted_nodes,
            asked_nodes=self.asked_nodes,
            colluding=colluding,
            is_masked=self.secure_aggregation,
        )


def _releases(config: RunConfig) -> tuple[Releases, ...]:
    """Returns what the rounds of a run release, as a plan counts it.

    A noise multiplier that is not known yet is compared with 1: the noise of a method's
    terms is proportional to it, which `fedgs.round.preparation.with_noise` checks.
    """
    known = with_open_settings(config)
    return tuple(
        Releases(
            kind=alike.terms.release,
            factor=alike.terms.noise_multiplier / known.known_noise,
            batch_size=alike.terms.batch_size,
            num_rounds=alike.num_rounds,
        )
        for alike in rounds_alike(known)
    )


def _dearest(costs: Sequence[tuple[float, int]], num_rounds: int) -> float:
    """Returns the sum of the largest costs of so many rounds."""
    total = 0.0
    left = num_rounds
    for cost, count in sorted(costs, reverse=True):
        taken = min(left, count)
        total += cost * taken
        left -= taken
    return total
