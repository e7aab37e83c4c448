"""A method: what a round asks of clients, what they answer, what the server learns.

    server                                        node, for its clients
    state                                           (prepare: before the first round)
    begin ---------- named tensors ------------>  check
                                                  train, then answer, each client
                                                    alone: gradients, PRIVATE
                                                  *check, clip, sum, add noise once*
    finish <-------- their sanitized sum -------
    settle           (repeatable work on it)

The frame (`fedgs.round`) does all the rest, once for every method: the ledger has
a round's event before its request is sent; limits, counts, budget, masks, checkpoints,
resume, samples. The frame asks a method client by client, with that client's
data alone. *Whatever `answer` returns, the frame checks its shape, clips, sums and
noises* (`fedgs.round.answer`), so the guarantee of a method is that of its `terms`, as
long as it keeps nothing of one client for the next one: a condition that no frame can
see, and that `fedgs audit` tests.

Whatever a method draws at random comes from `fedgs.randomness.stream`, so that a
resumed run has the same bits.
"""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedgs.cohorts.client_groups import CohortOfClient, InGroup
from fedgs.config.fields import Scalar
from fedgs.config.placement import Placement
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.settings import Settings as PlainSettings
from fedgs.config.terms import Terms
from fedgs.data.federated import ClientImages, FederatedImages, to_float
from fedgs.errors import UserError
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.fit import Fit
from fedgs.gan.models import Generator
from fedgs.methods.schedule import EVERYONE, Clients, clients_of, select
from fedgs.shapes import Images, Labels, TensorDict

ConfigT = TypeVar("ConfigT", bound=ResolvedConfig)


class Declared(NamedTuple):
    """The shape and type of one tensor of a request."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Request:
    """What a node is asked: tensors, of which clients, and when.

    Attributes:
        round: the number of the round; 0 stands for what comes before the first one.
        tensors: what the nodes compute with, by name. All of it is DP output or public.
        participants: the clients that answer, or "all".
        trainees: the clients of the nodes that are asked, or "all".
        keep_round: the round of the last committed checkpoint, whose state a node
            keeps.
    """

    round: int
    tensors: TensorDict
    _: KW_ONLY
    participants: Clients = EVERYONE
    trainees: Clients = EVERYONE
    keep_round: int = 0

    def digest(self) -> str:
        """Returns the hash of what is asked: the same request, the same answer."""
        return self._digest

    def common_digest(self) -> str:
        """Returns the hash of what all nodes are asked with, whoever takes part."""
        return self._common_digest

    def per_node(self, hosting: Placement, nodes: Iterable[int]) -> dict[int, Self]:
        """Returns each node's request, in the given order; it names no other's clients.

        "all" stays, for the run's settings say that everybody is meant. Nodes with the
        same content share one request, and with it its digest.
        """
        distinct: dict[tuple[Clients, Clients], Self] = {}
        requests: dict[int, Self] = {}
        for node in nodes:
            hosted = hosting.hosted(node)
            taking_part = _of_node(self.participants, hosted)
            training = _of_node(self.trainees, hosted)
            key = (taking_part, training)
            if key not in distinct:
                distinct[key] = replace(
                    self,
                    participants=taking_part,
                    trainees=training,
                )
            requests[node] = distinct[key]
        return requests

    # Hashed once: the tensors are megabytes, and the digest is asked for by each node.
    @cached_property
    def _digest(self) -> str:
        # Without keep_round: a checkpoint between two sendings makes no new question.
        fields = (self.round, joined(self.participants), joined(self.trainees))
        return self._hash(fields)

    @cached_property
    def _common_digest(self) -> str:
        return self._hash((self.round,))

    def _hash(self, fields: tuple[int | str, ...]) -> str:
        content = hashlib.sha256(repr(fields).encode())
        # By name, so that the order in which they were drawn or decoded does not count.
        for _, tensor in sorted(self.tensors.items()):
            content.update(tensor.numpy().tobytes())
        return content.hexdigest()


def asked(config: ResolvedConfig, state: "State", tensors: TensorDict) -> Request:
    """Returns the next round's request to its participants, by the schedule."""
    clients = select(config, state.round + 1)
    return Request(state.round + 1, tensors, participants=clients, trainees=clients)


def _of_node(clients: Clients, hosted: Sequence[int]) -> Clients:
    # A node learns only which of its own clients are meant: who else takes part is
    # nobody's business, and amplification rests on that.
    if clients == EVERYONE:
        return EVERYONE
    return tuple(clients_of(clients, hosted))


def joined(clients: Clients) -> str:
    """Returns clients as they stand in a message: "all", or numbers with commas."""
    if isinstance(clients, str):
        return clients
    return ",".join(map(str, clients))


@dataclass
class State:
    """What the server keeps between rounds; all of it is DP output or public.

    Attributes:
        parts: networks and optimizers by name; `generator`, `ema`, the average of it
            that samples are drawn from, and what else a method keeps in a checkpoint.
        round: the last finished round, 0 before the first.
        released: for each phase that hands something on, its method, and the tensors
            that later phases may need.
    """

    parts: dict[str, nn.Module | Optimizer]
    round: int = 0
    released: list[tuple[str, TensorDict]] = field(
        default_factory=list[tuple[str, TensorDict]]
    )

    @classmethod
    def of(cls, generator: nn.Module, **others: nn.Module | Optimizer) -> Self:
        """Returns the start of a run, with the generator as its average."""
        # Nothing trains the average: it is moved towards the generator by `update_ema`.
        average = copy.deepcopy(generator).eval().requires_grad_(False)
        return cls({"generator": generator, "ema": average, **others})

    @property
    def generator(self) -> Generator:
        """G, as the next round needs it."""
        return cast(Generator, self.parts["generator"])

    @property
    def ema(self) -> Generator:
        """The average of G: what is released."""
        return cast(Generator, self.parts["ema"])


@dataclass(frozen=True, eq=False)
class OneClient(ClientImages):
    """One client as a method sees it: its own images, and nothing of any other client.

    Privacy: reads private data; output private.

    Attributes:
        discriminators: a stack that holds its discriminator; None where a method has
            none. A method that is not of fedgs gets a stack of this one alone.
        position: the place of its discriminator in that stack.
        group: the number of its group, where groups are compared. None means that it
            is in none, or in one that is too small to be told. How much of its answer
            is told is decided by the frame.
    """

    discriminators: Discriminators | None = None
    position: int = 0
    group: int | None = None

    def tensors(self, device: str) -> tuple[Images, Labels]:
        """Returns the images (n, C, S, S), float32 in [0, 1], and labels (n,).

        Privacy: reads private data; output private.
        """
        images = torch.from_numpy(to_float(self.images)).to(device)
        return images, torch.from_numpy(self.labels).to(device)


class Hosted(NamedTuple):
    """What a node answers with; the frame hands a method one client of it at a time.

    Attributes:
        data: all data that the node can see.
        clients: the numbers of the clients that it hosts.
        node_id: the node's index.
        discriminators: its clients' discriminators, in the clients' order; None where a
            method has none.
        groups: its clients' groups, in the clients' order; empty where none are
            compared.
    """

    data: FederatedImages
    clients: Sequence[int]
    node_id: int
    discriminators: Discriminators | None = None
    groups: Sequence[InGroup | None] = ()

    def only(self, client: int, is_alone: bool) -> OneClient:
        """Returns one of the hosted clients, with its own data.

        Privacy: reads private data; output private.

        Args:
            client: its number.
            is_alone: its discriminator is in a stack of its own, which shares memory
                with the node's.
        """
        position = self.clients.index(client)
        nets = self.discriminators
        # Code that is not of fedgs must not reach the discriminators of other clients.
        if nets is not None and is_alone:
            nets = nets.only(position)
            position = 0
        own = self.data.of(client)
        own_group = self._group_of(client)
        return OneClient(
            number=own.number,
            name=own.name,
            images=own.images,
            labels=own.labels,
            discriminators=nets,
            position=position,
            group=own_group.number if own_group else None,
        )

    def weight_of(self, client: int) -> float:
        """Returns what the frame multiplies a client's clipped answer by, in [0, 1].

        It is 1 unless groups are compared, and then 0 of a client that is in none.

        Privacy: reads private data; output private.
        """
        if not self.groups:
            return 1.0
        group = self._group_of(client)
        return group.weight if group else 0.0

    def _group_of(self, client: int) -> InGroup | None:
        if not self.groups:
            return None
        return self.groups[self.clients.index(client)]


class Released(NamedTuple):
    """What a round released, DP output.

    Attributes:
        total: the sanitized sum over all participants, (B, ...), float64.
        noise_std: the standard deviation of the noise in each number of it.
        by_node: the releases that were added up, by node. It is empty unless the terms
            say `is_by_node`, because only then the privacy of each one is accounted.
    """

    total: Tensor
    noise_std: float
    by_node: Mapping[int, Tensor] = MappingProxyType({})

    @property
    def signal_to_noise(self) -> float | None:
        """Estimates the signal's power over that of the noise; None without noise.

        Of n numbers E |total|^2 = |signal|^2 + n noise_std^2. Where the noise hides the
        signal the estimate is 0, or about sqrt(2 / n) by chance.

        Privacy: post-processing of DP output: of a sum that has its noise, and of the
        noise's scale, which is a setting. Clipping and clients are not looked at.
        """
        noise = self.total.numel() * self.noise_std**2
        if not noise:
            return None
        power = float(self.total.square().sum())
        # By chance the estimate may be below 0, which no power is.
        return round(max(0.0, power / noise - 1.0), 6)


class Method(ABC, Generic[ConfigT]):
    """One method of federated training; an object without state of its own.

    A run is a list of phases, each of one method. `config` is always that of the phase:
    the settings of the run and the method's own, with the noise of the phase's share.
    The `round` of `terms` and `declared` counts from 1 in the phase; `state.round` and
    `request.round` count over the run.

    Attributes:
        Settings: declares its settings, beside those of all runs.
        recipe: values of a run's settings that it starts from.
        has_generator: whether what it trains draws images.
        has_discriminators: whether each client keeps a discriminator, which `prepare`
            has the nodes make before their first round.
        commits_every_round: whether each release is checkpointed at once, because it
            is a large part of the run's privacy.
        hides_duration: whether no duration of a round is published, because a client
            with more images takes longer.
    """

    Settings: type = PlainSettings
    recipe: Mapping[str, Scalar] = MappingProxyType({})
    has_generator = True
    has_discriminators = False
    commits_every_round = False
    hides_duration = False

    @abstractmethod
    def terms(self, config: ConfigT, round: int) -> Terms:
        """Returns what one node's release of a round is agreed to be: C, noise, shape.

        Privacy: public; it is all that accounting, limits and audits ask a method.
        """

    @abstractmethod
    def state(self, config: ConfigT) -> State:
        """Returns the server before the first round, from the run's seed.

        Only the first phase's method is asked; all phases share its generator.
        """

    def join(self, config: ConfigT, state: State) -> None:
        """Adds what the method keeps to a run that another method begins; here nothing.

        Called before the first round, for each phase in its order.

        Args:
            config: the phase's configuration.
            state: the run's state, which is changed in place.
        """

    @abstractmethod
    def declared(self, config: ConfigT, round: int) -> Mapping[str, Declared]:
        """Returns the tensors of a round's request by name: nothing else is decoded."""

    @abstractmethod
    def begin(self, config: ConfigT, state: State) -> tuple[Request, Any]:
        """Returns the next round's request, and what `finish` needs beside answers.

        Privacy: post-processing of DP output.
        """

    def check(self, config: ConfigT, request: Request) -> None:
        """Refuses values that no honest server sends; shapes were checked before.

        Raises:
            UserError: the text quotes nothing of the request.
        """

    def groups(
        self,
        config: ConfigT,
        names: Sequence[str],
        cohorts: Sequence[CohortOfClient | None],
        least: int,
    ) -> Sequence[InGroup | None]:
        """Returns the group of each client of a node, where groups are compared.

        Privacy: reads private data; output private.

        Args:
            config: the phase's configuration.
            names: the public names of the node's clients, in their order.
            cohorts: what the node's own file says of each client; empty if there is
                no such file.
            least: nothing is told of a group with fewer clients than this.
        """
        return ()

    def train(
        self,
        config: ConfigT,
        clients: Sequence[OneClient],
        request: Request,
    ) -> None:
        """Trains discriminators in place, before anybody answers; here it does nothing.

        Privacy: reads private data; output private.

        Args:
            config: the phase's configuration, resolved.
            clients: at most `stack_size` trainees; one, if the method is not of fedgs.
            request: what the server asks.
        """

    @abstractmethod
    def answer(self, config: ConfigT, client: OneClient, request: Request) -> Tensor:
        """Returns what one client answers; its shape is that of the round's terms.

        It must be a function of the arguments alone: what it kept of one client and
        used for another one would be charged to nobody.

        Privacy: reads private data; output private. The frame sanitizes it.
        """

    def answer_stacked(
        self,
        config: ConfigT,
        clients: Sequence[OneClient],
        request: Request,
    ) -> Tensor:
        """Returns what several clients answer, a row (B, ...) for each, in their order.

        Only a method of fedgs is asked so, where a test compares every row with
        `answer`: whose data a row is made of cannot be seen from outside.

        Privacy: reads private data; output private. The frame sanitizes it.
        """
        return torch.stack([self.answer(config, one, request) for one in clients])

    def stack_size(self, config: ConfigT) -> int:
        """Returns how many clients `train` and `answer_stacked` get at most."""
        return 1

    @abstractmethod
    def finish(
        self,
        config: ConfigT,
        state: State,
        pending: Any,
        released: Released,
    ) -> None:
        """Learns from a round's answers, and counts it: `state.round` grows by 1.

        Privacy: post-processing of DP output.

        Args:
            config: the phase's configuration, resolved.
            state: updated in place.
            pending: what `begin` returned beside the request.
            released: the sum over all participants.
        """

    def settle(
        self,
        config: ConfigT,
        state: State,
        fit: Fit,
    ) -> bool:
        """Does long work on what a round released, once its checkpoint is written.

        After a stop or a crash it goes on from where `fit` has kept it, or begins anew
        from the checkpoint, to the same bytes.

        Privacy: post-processing of DP output.

        Args:
            config: the phase's configuration, resolved.
            state: updated in place.
            fit: to begin by, with all that a step changes, and to tell of each step.

        Returns:
            Whether there was any.
        """
        return False

    def prepare(self, config: ConfigT, state: State) -> Request:
        """Returns the request of round 0, by which nodes make discriminators."""
        raise UserError(f"phases: {config.method} has no discriminators to prepare")
