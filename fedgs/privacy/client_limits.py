"""What a client agrees to, whatever a server asks; the client itself checks it.

A TOML file on the client's side; simulated clients, all of one machine, have none.
Every key may be left out; an unknown one is an error:

    client_epsilon = 10.0         # no release beyond this, over all runs in state_dir;
    delta = 1e-5                  #   needs delta and relation
    relation = "replace-one"      #   or "zero-out"; docs/privacy.md
    max_batch_size = 32           # B, fakes answered by a release
    min_noise_multiplier = 1.0    # noise_std / (2 * clip_bound); unset: above 0;
                                  #   0 allows a run without noise
    clip_bound = 1.0              # exactly this C, of whatever is released
    allow_embeddings = false      # true: releases of class means of features, too
    allow_updates = false         # true: releases of updates of a shared network, too
                                  #   (Fed-Avg GAN)
    allow_groups = false          # true: releases that tell groups of clients apart,
                                  #   to compare them
    allow_one_cohort = false      # true: runs on the owners of one cohort alone, whose
                                  #   number is then public
    min_clients_per_group = 5     # on this node; nothing of a smaller group is told
    allow_selection = false       # true: counts of clients below an accuracy, too; the
                                  #   updates of their classifier need allow_updates
    image_size = 28               # exactly this side of the square fakes
    image_channels = 1            # exactly this
    num_classes = 10              # exactly this; labels lie in [0, num_classes)
    num_clients = 3               # exactly so many of the run's clients on this node
    max_fakes = 160               # fakes of one request
    allow_seeded_noise = false    # true: noise that others can draw again
    min_honest_nodes = 5          # trusts secure aggregation: of a round's nodes, so
                                  #   many are honest; unset: only the own noise counts
    state_dir = "counts"          # where the count of releases is kept across runs,
                                  #   relative to this file; unset: in the run's folder

The numbers come from this file and from what the client is about to compute, never from
what a request claims. `fedgs.privacy.client_ledger` keeps the count.

Source: docs/privacy.md, "A client that limits itself".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from fedgs.config.amplification_rules import REFUSAL_TELLS
from fedgs.config.fields import coerce_fields, entry
from fedgs.config.integers import proven_multiplier
from fedgs.config.rounds import rounds_alike
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.terms import Terms
from fedgs.errors import UserError
from fedgs.files import read_toml
from fedgs.privacy.amplification import LEAST_RATIO
from fedgs.privacy.gaussian import epsilon_from_mu, mu_from_epsilon
from fedgs.privacy.plan import SENSITIVITIES, Plan, cost_of_ratio, noise_ratio


class ClientRefused(UserError):
    """A client refuses, by one of its own limits; nothing was trained or released.

    Attributes:
        setting: the limit's name. It is public: limits and counts depend on no data.
            With a `state_dir` it can tell this server that the client has answered
            others before.
    """

    def __init__(self, setting: str, problem: str) -> None:
        """Is raised with the limit's name and the whole text."""
        super().__init__(problem)
        self.setting = setting


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A client's limits; None is no limit.

    Attributes:
        client_epsilon: of all releases of a client together, against the server
            adversary: only the noise of the client's own node counts, unless
            min_honest_nodes says more.
        delta, relation: of `client_epsilon`, as in `RunConfig`.
        max_batch_size, min_noise_multiplier, max_fakes: bounds; see the module.
            Without a min_noise_multiplier there must be some noise.
        clip_bound, image_size, image_channels, num_classes: the only value allowed.
        num_clients: of a deployed node's own, the only number allowed.
        allow_seeded_noise: whether a run may set `noise_seed`.
        allow_embeddings: whether a run may have phases of mean features; all other
            limits of a release hold for theirs as well.
        allow_updates: whether a run may be one of Fed-Avg GAN; likewise.
        allow_groups: whether a run may compare groups of clients.
        min_clients_per_group: clients of each group of a node, at least; where cohorts
            are compared, nothing of a smaller group is told, and of a larger one the
            less the smaller it is; the server does not learn its size. Of a run on one
            cohort, all of its clients.
        allow_one_cohort: whether a run may be on the clients of one cohort alone.
        allow_selection: whether a run may count clients by their accuracy; likewise.
        min_honest_nodes: how many nodes of every secure aggregation add their noise and
            tell it to nobody, this client's own included; None: aggregation is not
            trusted.
        state_dir: absolute folder of the count; None: the run's private folder.

    Raises:
        UserError: a value of the wrong type or outside its range.
    """

    client_epsilon: float | None = entry(None, above=0)
    delta: float = entry(1e-5, at_least=1e-300, below=1)
    relation: str = entry("replace-one", choices=tuple(SENSITIVITIES))
    max_batch_size: int | None = entry(None, at_least=1)
    min_noise_multiplier: float | None = entry(None, at_least=0)
    clip_bound: float | None = entry(None, above=0)
    image_size: int | None = entry(None, at_least=1)
    image_channels: int | None = entry(None, at_least=1)
    num_classes: int | None = entry(None, at_least=1)
    num_clients: int | None = entry(None, at_least=1)
    max_fakes: int | None = entry(None, at_least=1)
    allow_seeded_noise: bool = False
    allow_embeddings: bool = False
    allow_updates: bool = False
    allow_groups: bool = False
    allow_one_cohort: bool = False
    min_clients_per_group: int = entry(5, at_least=1)
    allow_selection: bool = False
    min_honest_nodes: int | None = entry(None, at_least=2)
    state_dir: Path | None = None

    def __post_init__(self) -> None:
        """Checks every value by itself."""
        coerce_fields(self)

    @classmethod
    def read(cls, path: str | Path) -> "Limits":
        """Reads a client's file; see the module for its keys.

        Raises:
            UserError: the file is missing or malformed, a key is unknown or has a wrong
                value, or `state_dir` is no folder.
        """
        path = Path(path).expanduser().absolute()
        where = f"limits = {path}"
        values = read_toml("limits", path)
        known = [spec.name for spec in fields(cls)]
        unknown = values.keys() - set(known)
        if unknown:
            choices = ", ".join(known)
            raise UserError(f"{where}: unknown {min(unknown)}; give {choices}")
        # An epsilon without its delta and its relation says nothing.
        together = {"client_epsilon", "delta", "relation"}
        given = together & values.keys()
        if given and given != together:
            names = ", ".join(sorted(given))
            raise UserError(
                f"{where}: {names} cannot be given alone; give client_epsilon, delta "
                "and relation together"
            )
        folder = values.get("state_dir")
        if isinstance(folder, str):
            # A relative one is beside the file; an absolute one stays as it is.
            values["state_dir"] = path.parent / Path(folder).expanduser()
        try:
            limits = cls(**values)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        state_dir = limits.state_dir
        if state_dir is not None and not state_dir.is_dir():
            raise UserError(
                f"{where}: state_dir = {folder!r}: there is no such folder; make it"
            )
        return limits

    @property
    def most_mu_squared(self) -> float:
        """The largest sum of `release_cost` within client_epsilon; inf without it."""
        if self.client_epsilon is None:
            return float("inf")
        return _most_mu_squared(self.client_epsilon, self.delta, self.relation)

    def epsilon_of(self, mu_squared: float) -> float:
        """Returns the epsilon of a sum of `release_cost`, for delta and relation."""
        # Costs are those of replace-one. Under zero-out a client moves the answer half
        # as far, so that the same noise makes half of mu.
        factor = SENSITIVITIES[self.relation] / SENSITIVITIES["replace-one"]
        mu = factor * mu_squared**0.5
        return epsilon_from_mu(mu, self.delta)

    def shares(self, config: ResolvedConfig) -> int:
        """Returns the nodes of a round whose noise protects this client, it believes.

        Source: docs/privacy.md, "A client that limits itself".
        """
        if config.is_masked and self.min_honest_nodes is not None:
            return self.min_honest_nodes
        # The server sees this node's own release, under this node's noise alone.
        return 1

    def cost_of(self, config: ResolvedConfig, terms: Terms) -> float:
        """Returns `release_cost` of a round of a run."""
        multiplier = proven_multiplier(
            terms.noise_multiplier, config.secure_aggregation
        )
        shares = self.shares(config)
        return release_cost(multiplier, terms.batch_size, shares)

    def check_run(self, config: ResolvedConfig) -> None:
        """Refuses a run whose settings are outside these limits.

        Raises:
            ClientRefused: names the setting, its value and the remedy.
        """
        for limit, setting, holds, remedy in self._demands(config):
            if holds:
                continue
            own = getattr(self, limit)
            found = getattr(config, setting)
            if setting == "phases":
                found = config.methods
            if own is None:
                own = "unset"
            raise ClientRefused(
                limit,
                f"{setting} = {found}: this client's limit {limit} = {own} forbids it; "
                f"give {remedy}",
            )

    def _demands(self, config: ResolvedConfig) -> Iterator[tuple[str, str, bool, str]]:
        """Yields each limit, the setting it is about, whether it holds, a remedy."""
        yield from self._demands_of_terms(config)
        for name in ("image_size", "image_channels", "num_classes"):
            only = getattr(self, name)
            if only is not None:
                holds = getattr(config, name) == only
                yield name, name, holds, f"{only}"
        if self.max_fakes is not None:
            holds = config.fakes_sent <= self.max_fakes
            yield "max_fakes", "fakes_sent", holds, "fewer --fakes-per-round"
        if not self.allow_seeded_noise:
            holds = config.noise_seed is None
            remedy = f"no --noise-seed, or {_ALLOW_SEEDED}"
            yield "allow_seeded_noise", "noise_seed", holds, remedy
        # A record that is left out moves the answer of its shard like one that is
        # replaced: the half of zero-out is a bound for whole clients only.
        is_of_record = config.privacy_unit == "record" and self.relation == "zero-out"
        holds = self.client_epsilon is None or not is_of_record
        remedy = f"client, or {_REPLACE_ONE}"
        yield "relation", "privacy_unit", holds, remedy
        # A round of fewer nodes than are trusted would bear less noise than is counted.
        plan = Plan.from_config(config)
        nodes = plan.counted_nodes
        holds = self.shares(config) <= nodes
        remedy = f"more, because a round may be of {nodes} nodes only"
        yield "min_honest_nodes", "min_answers", holds, remedy
        # A client refuses once it has spent its epsilon, which tells that it was drawn.
        holds = self.client_epsilon is None or not config.amplification
        remedy = f"False, because {REFUSAL_TELLS}"
        yield "client_epsilon", "amplification", holds, remedy

    def _demands_of_terms(
        self,
        config: ResolvedConfig,
    ) -> Iterator[tuple[str, str, bool, str]]:
        """Yields the same of what the releases of all rounds are agreed to be."""
        all_terms = [alike.terms for alike in rounds_alike(config)]
        most = self.max_batch_size
        if most is not None:
            largest = max(terms.batch_size for terms in all_terms)
            holds = largest <= most
            remedy = f"at most {most}, because a round answers {largest} fakes"
            yield "max_batch_size", "batch_size", holds, remedy
        kinds = {terms.release for terms in all_terms}
        if not self.allow_embeddings:
            holds = "embedding" not in kinds
            remedy = f"other phases, or {_ALLOW_EMBEDDINGS}"
            yield "allow_embeddings", "phases", holds, remedy
        if not self.allow_updates:
            holds = "update" not in kinds
            remedy = f"gs-wgan, or {_ALLOW_UPDATES}"
            yield "allow_updates", "phases", holds, remedy
        yield from self._demands_of_groups(config, all_terms)
        if not self.allow_selection:
            holds = "count" not in kinds
            remedy = f"other phases, or {_ALLOW_SELECTION}"
            yield "allow_selection", "phases", holds, remedy
        only = self.clip_bound
        if only is not None:
            clip_bounds = {terms.clip_bound for terms in all_terms}
            holds = clip_bounds == {only}
            remedy = f"{only}, in every round"
            yield "clip_bound", "clip_bound", holds, remedy
        costs = [self.cost_of(config, terms) for terms in all_terms]
        dearest = max(costs)
        least = self.min_noise_multiplier
        if least is None:
            # There must be noise at all: a ratio below LEAST_RATIO is none.
            holds = dearest <= 1 / LEAST_RATIO**2
            remedy = f"more, or {_ALLOW_NO_NOISE}"
        else:
            lowest = min(terms.noise_multiplier for terms in all_terms)
            holds = lowest >= least
            remedy = f"at least {least}"
            if lowest < config.noise_multiplier:
                remedy += f" in every round: one has {lowest:.4g}"
        yield "min_noise_multiplier", "noise_multiplier", holds, remedy
        # Not even the first release would fit: better said before than in the run.
        holds = dearest <= self.most_mu_squared
        yield (
            "client_epsilon",
            "noise_multiplier",
            holds,
            "more noise, because not even one release fits",
        )

    def _demands_of_groups(
        self,
        config: ResolvedConfig,
        all_terms: Sequence[Terms],
    ) -> Iterator[tuple[str, str, bool, str]]:
        """Yields the same of groups of clients, by what is public of them."""
        if not self.allow_groups:
            most = max(terms.num_groups for terms in all_terms)
            holds = most == 1
            remedy = f"other phases, or {_ALLOW_GROUPS}"
            yield "allow_groups", "phases", holds, remedy
        if not self.allow_one_cohort:
            holds = config.cohort_value is None
            remedy = f"none, or {_ALLOW_ONE_COHORT}"
            yield "allow_one_cohort", "cohort_value", holds, remedy
        # Where the sizes of groups are not public, the node tells less of small ones.
        least = self.min_clients_per_group
        holds = True
        for terms in all_terms:
            size = terms.clients_per_group
            if size is not None and size < least:
                holds = False
        remedy = f"groups of {least} clients"
        yield "min_clients_per_group", "groups", holds, remedy

    def check_num_clients(self, number: int, cohort_value: str | None) -> None:
        """Refuses a run that gives a deployed node an unsuitable number of clients.

        Args:
            number: the number of the node's clients in the run.
            cohort_value: as in `Settings`: the one that all of them have, if any.

        Raises:
            ClientRefused: names both numbers.
        """
        least = self.min_clients_per_group
        if cohort_value is not None and number < least:
            raise ClientRefused(
                "min_clients_per_group",
                f"cohort_value = {cohort_value}: the run asks for {number} clients of "
                f"this node, and its limit min_clients_per_group = {least} forbids it; "
                "have the run ask for a larger cohort",
            )
        if self.num_clients is not None and self.num_clients != number:
            raise ClientRefused(
                "num_clients",
                f"node_sizes: the run asks for {number} clients of this node, and its "
                f"limit num_clients = {self.num_clients} forbids it; have the run set "
                "node_sizes so",
            )


def release_cost(noise_multiplier: float, batch_size: int, shares: int = 1) -> float:
    """Returns mu^2 = 1 / z^2 of one release, with replace-one.

    Args:
        noise_multiplier: noise_std / (2 C) of one node, at least 0.
        batch_size: B, at least 1.
        shares: nodes whose noise counts: the client's own, or more by `Limits.shares`.

    Source: docs/privacy.md, "Relation and sensitivity".
    """
    ratio = noise_ratio(noise_multiplier, batch_size, "replace-one", shares)
    return cost_of_ratio(ratio)


@lru_cache
def _most_mu_squared(epsilon: float, delta: float, relation: str) -> float:
    scale = SENSITIVITIES["replace-one"] / SENSITIVITIES[relation]
    mu = mu_from_epsilon(epsilon, delta) * scale
    return mu**2


# One machine has all simulated clients: they allow everything.
ALLOW_ALL = Limits(
    allow_seeded_noise=True,
    allow_embeddings=True,
    allow_updates=True,
    allow_groups=True,
    allow_one_cohort=True,
    min_clients_per_group=1,
    allow_selection=True,
    min_noise_multiplier=0,
)
_FILE = "in the client's limits file"
_REPLACE_ONE = f'set relation = "replace-one" {_FILE}'
_ALLOW_NO_NOISE = f"set min_noise_multiplier = 0 {_FILE} to allow less"
_ALLOW_SEEDED = f"set allow_seeded_noise = true {_FILE} to allow it"
_ALLOW_EMBEDDINGS = f"set allow_embeddings = true {_FILE} to allow them"
_ALLOW_GROUPS = f"set allow_groups = true {_FILE} to allow groups of clients"
_ALLOW_ONE_COHORT = f"set allow_one_cohort = true {_FILE} to allow one cohort alone"
_ALLOW_UPDATES = f"set allow_updates = true {_FILE} to allow its updates"
_ALLOW_SELECTION = f"set allow_selection = true {_FILE} to allow counts of clients"
