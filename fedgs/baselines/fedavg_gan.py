"""Fed-Avg GAN: clients train copies of one discriminator, the server the generator.

    server                                   node, for its clients
    both networks --------------------------> each client: n SGD steps of a copy of D
                                              update = D_client - D, clipped to C whole
    D += rate * sum / m   <------------------ sum over its clients + Gaussian noise
    n SGD steps of G against D                (one release, B = 1)

The sum of a round is one Gaussian release of sensitivity C (a client's slot is zeroed)
or 2C (its data are replaced). The generator only sees the noisy discriminator.

Networks are the project's discriminator without batch statistics and any generator of
the project: batch statistics of the published networks travel and are averaged with
their weights, and couple what one client sends to each of its images.

Differs from the reference: the nodes add the noise, in shares, and not the server; a
round of m < K clients takes them from a public balanced schedule, where the reference
draws uniformly, so that how often a client takes part is fixed in advance; conditional
by default, with fakes of the real batch's labels; a client with fewer images than a
batch draws them again.

Source: Augenstein et al., "Generative models for effective ML on private, decentralized
datasets", ICLR 2020, Algorithm 2; reference google-research/federated, gans/.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import vector_to_parameters

from fedgs.baselines.bayesian_accounting import log_moments
from fedgs.baselines.contract import AuditScores, Event, Facts, Guarantee
from fedgs.baselines.fedavg_messages import (
    UpdateRequest,
    new_networks,
    update_terms,
    weights_of,
)
from fedgs.config.fields import NOISE, Scalar, entry, flag
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.stages import Terms
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError
from fedgs.federation.checkpoint import load_tensors, tensors_of
from fedgs.federation.messages import clients_of
from fedgs.federation.round import select
from fedgs.federation.training import nodes_of
from fedgs.gan.discriminators import CHUNK_SIZE
from fedgs.gan.losses import discriminator_loss
from fedgs.gan.models import (
    Generator,
    advance_in_place,
    build_discriminator,
    sample_labels,
    sample_latents,
)
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.sanitizer import (
    PerSampleGradients,
    SanitizedGradients,
    clip,
    sanitize,
)
from fedgs.privacy.gaussian import epsilon_from_mu, mu_from_epsilon
from fedgs.privacy.plan import RELATIONS, noise_shares
from fedgs.randomness import stream
from fedgs.shapes import TensorDict

KIND = "discriminator-update"
OF_METHOD = "method."  # begins the names of the method's settings among a run's
WEIGHT_DECAY = 2.5e-5  # of both networks; Augenstein et al., their code's default
ORDERS = np.arange(2.0, 257)  # of the published accountant: whole numbers
SEES = {
    "release": "adversary: sees what is published, so the noise of all nodes counts; "
    "whoever adds up the nodes' answers is trusted",
    "server": "adversary: sees each node's answer, so the noise of one node counts",
}
SCHEDULE = "who takes part when is public and fixed in advance: nothing is amplified"
PUBLISHED = "RDP of Poisson sampling, whole orders from 2"
Answers = Callable[[UpdateRequest], Sequence[SanitizedGradients]]


@dataclass(frozen=True)
class Settings:
    """What fedavg-gan can be told; the rest are settings of `RunConfig`."""

    steps: int = flag(1000, "Rounds.", at_least=1)
    clients_per_round: int | None = flag(
        None, "m, clients of a round, each equally often; all when unset.", at_least=1
    )
    discriminator_steps: int = entry(6, at_least=1)  # of SGD, of a client in a round
    generator_steps: int = entry(6, at_least=1)  # of SGD, of the server in a round
    batch_size: int = entry(32, at_least=1)  # images of one step, real and fake
    discriminator_learning_rate: float = entry(5e-4, above=0)  # of clients' SGD
    generator_learning_rate: float = entry(5e-3, above=0)  # of the server's SGD
    clip_bound: float = flag(0.1, "C, largest norm of a client's update.", above=0)
    noise_per_clip: float = flag(
        0.01, "Noise of the sum (against whom it counts) / C.", **NOISE
    )
    relation: str = flag(
        "replace-one",
        "Neighbouring relation of target_epsilon, as in `fedgs train`.",
        choices=tuple(RELATIONS),
    )


@dataclass(frozen=True)
class UpdateConfig(ResolvedConfig):
    """The settings of a run as its nodes compute with them; made by `run_config`.

    Of GS-WGAN's settings, those of a release say what a node releases here: clip_bound,
    batch_size = 1, and as noise_multiplier the least that one node adds in any round.
    So a client's limits and its count read a round of this method as any other one.

    Attributes:
        method: settings of Fed-Avg GAN.
    """

    method: Settings = Settings()

    @property
    def baseline(self) -> str:
        """The method's name."""
        return METHOD.name

    def terms(self, round: int) -> Terms:
        """Returns what one node's release of a round is agreed to be.

        Args:
            round: from 1; 0 is a round of the most nodes, who add the least noise each.
        """
        nodes = min(self.num_nodes, self.clients_per_round)
        if round:
            nodes = len(nodes_of(self, select(self, round)))
        own, shares = self.method, noise_shares(self.adversary, nodes)
        noise_std = own.noise_per_clip * own.clip_bound / math.sqrt(shares)
        return update_terms(self._update_size, own.clip_bound, noise_std)

    @cached_property
    def _update_size(self) -> int:
        return weights_of(build_discriminator(self, self.seed)).numel()

    def to_flat(self) -> dict[str, Scalar]:
        """Returns all settings as flat scalars, the method's under "method.<name>"."""
        own = {"name": self.baseline} | dataclasses.asdict(self.method)
        return super().to_flat() | {
            f"{OF_METHOD}{name}": "" if value is None else value
            for name, value in own.items()
        }


def run_config(settings: Settings, config: ResolvedConfig) -> UpdateConfig:
    """Returns the configuration with who takes part when, and what is released then.

    Raises:
        UserError: more clients per round than there are, or spectral norm.
    """
    num, known = settings.clients_per_round, config.num_clients
    if num is not None and num > known:
        raise UserError(
            f"clients_per_round = {num}: there are {known} clients; give "
            f"--clients-per-round up to {known}"
        )
    if config.spectral_norm:
        raise UserError(
            "spectral_norm = True: its vectors are state beside the weights, which "
            "clients do not send; give --no-spectral-norm"
        )
    everybody = num is None or num == known
    names = [spec.name for spec in dataclasses.fields(ResolvedConfig)]
    own = {name: getattr(config, name) for name in names}
    own |= {
        "client_selection": "all" if everybody else "balanced",
        "clients_per_round": num or known,
        "num_rounds": settings.steps,
        "clip_bound": settings.clip_bound,
        "batch_size": 1,
        "relation": settings.relation,
        "fakes_per_round": 1,  # none are sent
    }
    made = UpdateConfig(**own, method=settings)
    least = made.terms(0).noise_multiplier
    return dataclasses.replace(made, noise_multiplier=least)


# ------------------------------------------------------------------ clients


def asked_clients(
    config: UpdateConfig, request: UpdateRequest, node_id: int
) -> list[int]:
    """Returns the clients of a node that a request asks, by the public schedule.

    Raises:
        UserError: other clients are asked than the schedule has, or none of the node.
    """
    hosted = config.hosting.hosted(node_id)
    clients = clients_of(request.participants, hosted)
    # A server could ask a client more often than is accounted.
    if not clients or clients != clients_of(select(config, request.round), hosted):
        raise UserError(
            f"round {request.round}: other clients are asked than the public schedule "
            "has: refused"
        )
    return clients


def node_update(
    config: UpdateConfig, data: FederatedImages, request: UpdateRequest, node_id: int
) -> SanitizedGradients:
    """Makes a node's one release of a round: the noisy sum of its clients' updates.

    Privacy: releases (epsilon, delta)-DP output; event: one Gaussian release of B = 1
    with the noise and the clip bound of the round's terms.

    Args:
        config: of `run_config`.
        data: all data that the node can see.
        request: of the server.
        node_id: the node's index; at least one of its clients takes part.

    Raises:
        UserError: as `asked_clients`.
    """
    terms = config.terms(request.round)
    clients = asked_clients(config, request, node_id)
    parts = [
        clip(PerSampleGradients(updates[:, None, None, None]), terms.clip_bound)
        for updates in client_updates(config, data, request, clients)
    ]
    noise = NoiseStream(config.noise_seed, node_id, request.round)
    return sanitize(parts, terms.noise_std, noise, request.round, node_id)


def client_updates(
    config: UpdateConfig,
    data: FederatedImages,
    request: UpdateRequest,
    clients: Sequence[int],
) -> Iterator[Tensor]:
    """Yields the updates (n, weights) of chunks of clients, in order.

    Privacy: reads private data; output private.
    """
    networks = new_networks(config)
    for name, module in networks.items():
        module.load_state_dict(getattr(request, name))
        module.to(config.device).requires_grad_(False)
    generator, template = networks["generator"], networks["discriminator"]
    start: TensorDict = {**dict(template.named_parameters())}

    def update(*batches: Tensor) -> Tensor:
        return _trained(config.method, template, start, *batches)

    size = CHUNK_SIZE if config.stacked else 1
    for first in range(0, len(clients), size):
        drawn = [
            _draw(config, data, generator, client, request.round)
            for client in clients[first : first + size]
        ]
        batches = [torch.stack(values) for values in zip(*drawn, strict=True)]
        if config.stacked:
            yield vmap(update)(*batches)
        else:
            yield update(*(values[0] for values in batches))[None]


def _draw(
    config: UpdateConfig,
    data: FederatedImages,
    generator: nn.Module,
    client: int,
    round: int,
) -> tuple[Tensor, ...]:
    """Draws a client's real images, their labels, fakes of these labels and mixes.

    Privacy: reads private data; output private.

    Returns:
        (steps, b, C, S, S) in [0, 1], (steps, b), like the first, (steps, b) in [0, 1).
    """
    rng = stream(config.seed, "fedavg-gan", client, round)
    shape = (config.method.discriminator_steps, config.method.batch_size)
    own = data.client_records[client]
    records = own[rng.integers(len(own), size=shape)]
    real = torch.from_numpy(data.images[records]).to(config.device).float().div_(255.0)
    labels = torch.from_numpy(data.labels[records]).to(config.device)
    z = sample_latents(config, rng, math.prod(shape)).to(config.device)
    fakes = generator(z, labels.flatten()).view_as(real)
    mix = torch.from_numpy(rng.random(shape, dtype=np.float32)).to(config.device)
    return real, labels, fakes, mix


def _trained(
    settings: Settings,
    template: nn.Module,
    start: TensorDict,
    real: Tensor,
    labels: Tensor,
    fakes: Tensor,
    mix: Tensor,
) -> Tensor:
    """Returns the change of one client's copy after its SGD steps, (weights,)."""

    def loss(params: TensorDict, step: int) -> Tensor:
        def score(images: Tensor, of: Tensor) -> Tensor:
            return functional_call(template, params, (images, of))

        seen = (real[step], labels[step], fakes[step], labels[step], mix[step])
        return discriminator_loss(score, *seen, drift_weight=0.0)

    params, rate = start, settings.discriminator_learning_rate
    for step in range(settings.discriminator_steps):
        grads = grad(loss)(params, step)
        params = {
            name: value - rate * (grads[name] + WEIGHT_DECAY * value)
            for name, value in params.items()
        }
    return torch.cat([(params[name] - start[name]).flatten() for name in start])


# ------------------------------------------------------------------ server


class FedAvgGan:
    """A training under way; see `fedgs.baselines.contract.Trainer`.

    Attributes:
        ask: brings a round's request to its nodes, and their releases back.
        is_ahead: whether the nodes release before the round is over, elsewhere.
    """

    def __init__(
        self,
        settings: Settings,
        config: ResolvedConfig,
        ask: Answers,
        is_ahead: bool = False,
    ) -> None:
        """Builds both networks; reads no data."""
        self.settings, self.config = settings, run_config(settings, config)
        self.num_steps = settings.steps
        self.ask, self.is_ahead = ask, is_ahead
        self.networks = new_networks(self.config)
        self._generator: Any = self.networks["generator"].to(config.device)
        self._discriminator = self.networks["discriminator"].requires_grad_(False)
        self._discriminator.to(config.device)

    @property
    def generator(self) -> Generator:
        """The generator as it is."""
        return self._generator

    def announced(self, index: int) -> dict[str, Any] | None:
        """Returns the event of a step whose nodes release elsewhere, before its end."""
        return self.event(index + 1) if self.is_ahead else None

    def step(self, index: int) -> dict[str, Any]:
        """Asks the clients of a round, then moves both networks."""
        request = self.request(index)
        answers = self.ask(request)
        self._average(answers)
        self._train_generator(index)
        return self.event(request.round)

    def request(self, index: int) -> UpdateRequest:
        """Returns what the nodes of a round are asked; changes nothing."""
        clients = select(self.config, index + 1)
        generator, discriminator = (
            {name: value.detach().cpu() for name, value in net.state_dict().items()}
            for net in (self._generator, self._discriminator)
        )
        networks = generator, discriminator
        return UpdateRequest(
            index + 1, *networks, participants=clients, trainees=clients
        )

    def event(self, round: int) -> dict[str, Any]:
        """Returns the ledger's event of a round, from 1."""
        clients = select(self.config, round)
        nodes = len(nodes_of(self.config, clients))
        return {
            "kind": KIND,
            "round": round,
            "participants": clients if isinstance(clients, str) else list(clients),
            "clip_bound": self.settings.clip_bound,
            "noise_std": self.config.terms(round).noise_std,
            "nodes": nodes,
            "adversary": self.config.adversary,
        }

    def _average(self, answers: Sequence[SanitizedGradients]) -> None:
        """Moves the discriminator by the mean of all updates (FedAvg)."""
        weights = weights_of(self._discriminator)
        total = torch.zeros(len(weights), dtype=torch.float64)
        for answer in sorted(answers, key=lambda answer: answer.node_id):
            total += answer.values.flatten().double()
        mean = (total / self.config.clients_per_round).to(weights)
        vector_to_parameters(weights + mean, self._discriminator.parameters())

    def _train_generator(self, index: int) -> None:
        """Takes the generator's SGD steps: post-processing of the discriminator."""
        optimizer = torch.optim.SGD(
            self._generator.parameters(),
            lr=self.settings.generator_learning_rate,
            weight_decay=WEIGHT_DECAY,
        )
        for step in range(self.settings.generator_steps):
            rng = stream(self.config.seed, "latent", index, step)
            count = self.settings.batch_size
            z = sample_latents(self.config, rng, count).to(self.config.device)
            labels = sample_labels(self.config, rng, count).to(self.config.device)
            advance_in_place(self._generator)
            loss = -self._discriminator(self._generator(z, labels), labels).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    def state(self) -> TensorDict:
        """Returns both networks."""
        return tensors_of(self.networks)

    def load(self, state: TensorDict) -> None:
        """Goes on from what `state` returned."""
        load_tensors(self.networks, state)


# ------------------------------------------------------------------ the method


class FedAvgGanMethod:
    """The method; see `fedgs.baselines.contract.Baseline`."""

    name = "fedavg-gan"
    title = "Fed-Avg GAN: averaged updates of one discriminator"
    unit = "user"
    central = False
    Settings = Settings
    adversaries = ("release", "server")
    trust = "who adds up the nodes' answers, unless run with --adversary server"
    more_settings = ("engine", "clients_per_node", "num_workers", "round_timeout")
    recipe: Mapping[str, Scalar] = MappingProxyType(
        {
            "generator": "upsample",
            "generator_dim": 32,
            "discriminator_dim": 32,
            "spectral_norm": False,
            "latent": "normal",
            "latent_dim": 128,
            "clients_per_node": 64,
        }
    )

    def calibrated(
        self, settings: Settings, facts: Facts, target_epsilon: float, delta: float
    ) -> Settings:
        """Returns settings with the noise for the client that is asked most often."""
        most = _most_rounds(settings, facts.num_clients)
        factor = RELATIONS[settings.relation] * math.sqrt(most)
        noise = factor / mu_from_epsilon(target_epsilon, delta)
        return dataclasses.replace(settings, noise_per_clip=noise)

    def guarantees(
        self, settings: Settings, facts: Facts, events: Sequence[Event], delta: float
    ) -> list[Guarantee]:
        """Returns what the releases so far cost the client that made most of them."""
        sees = {event["adversary"] for event in events}
        conditions = (SCHEDULE, *(SEES[name] for name in sorted(sees)))
        others = [name for name in RELATIONS if name != settings.relation]
        lines: list[Guarantee] = []
        for relation in (settings.relation, *others):
            mu = RELATIONS[relation] * math.sqrt(_squared_mu(facts, events))
            theorem = f"exact curve of Gaussian releases, mu = {mu:.4g}"
            values = (epsilon_from_mu(mu, delta), delta, theorem)
            lines.append(Guarantee("valid", "user", relation, *values, conditions))
        figure = (published_epsilon(facts, events, delta), delta, PUBLISHED)
        return [*lines, Guarantee("as published", "user", "add-or-remove", *figure)]

    def trainer(
        self, settings: Any, config: ResolvedConfig, data: FederatedImages, seed: int
    ) -> FedAvgGan:
        """Starts a training whose nodes are in this process."""
        own = run_config(settings, dataclasses.replace(config, seed=seed))

        def ask(request: UpdateRequest) -> list[SanitizedGradients]:
            nodes = nodes_of(own, request.participants)
            return [node_update(own, data, request, node) for node in nodes]

        return FedAvgGan(settings, own, ask)

    def bytes_per_client(
        self, settings: Settings, config: ResolvedConfig, facts: Facts
    ) -> int:
        """Returns both networks down and an update up, float32, as often as asked."""
        sizes = {n: weights_of(m).numel() for n, m in new_networks(config).items()}
        most = _most_rounds(settings, facts.num_clients)
        return 4 * most * (sum(sizes.values()) + sizes["discriminator"])

    def audit_scores(
        self, settings: Settings, facts: Facts, event: Event, relation: str, trials: int
    ) -> AuditScores:
        """Returns sums of one value, with a client of the largest update and without.

        Its neighbour sends nothing (zero-out) or the opposite (replace-one).
        """
        clip_bound, noise_std = event["clip_bound"], _counted_noise(event)
        scores: list[list[float]] = [[], []]
        for trial in range(trials):
            for found, sign in zip(scores, (1 - RELATIONS[relation], 1.0), strict=True):
                update = torch.full((1, 1, 1, 1, 1), sign * 10 * clip_bound)
                part = clip(PerSampleGradients(update), clip_bound)
                noise = NoiseStream(None, 0, trial)
                found.append(float(sanitize([part], noise_std, noise, 1, 0).values))
        return np.array(scores[0]), np.array(scores[1])


def _most_rounds(settings: Settings, num_clients: int) -> int:
    """Returns how many rounds the schedule asks a client at most."""
    share = (settings.clients_per_round or num_clients) / num_clients
    return math.ceil(min(share, 1.0) * settings.steps)


def published_epsilon(facts: Facts, events: Sequence[Event], delta: float) -> float:
    """Returns the epsilon of the published accounting: Poisson sampling, whole orders.

    The reference draws rounds of a fixed size without replacement, for which this is no
    bound; orders below 2 are left out, as there.

    Source: Mironov, Talwar and Zhang, "Renyi differential privacy of the sampled
    Gaussian mechanism", 2019, Eq. 3.3; Mironov, CSF 2017, Proposition 3.
    """
    if not events:
        return 0.0
    ratios = [_counted_noise(event) / event["clip_bound"] for event in events]
    if not min(ratios):
        return math.inf
    rates = [_num_asked(facts, event) / facts.num_clients for event in events]
    moments = sum(
        count * log_moments(np.array([1 / ratio]), rate, ORDERS - 1)[:, 0]
        for (rate, ratio), count in Counter(zip(rates, ratios, strict=True)).items()
    )
    return float(((moments - math.log(delta)) / (ORDERS - 1)).min())


def _counted_noise(event: Event) -> float:
    """Returns the standard deviation of the noise that the run's adversary faces."""
    return event["noise_std"] * math.sqrt(
        noise_shares(event["adversary"], event["nodes"])
    )


def _num_asked(facts: Facts, event: Event) -> int:
    asked = event["participants"]
    return facts.num_clients if asked == "all" else len(asked)


def _squared_mu(facts: Facts, events: Sequence[Event]) -> float:
    """Returns sum (C / noise)^2, zero-out, of the client whose releases cost most."""
    costs = np.zeros(facts.num_clients)
    for event in events:
        noise = _counted_noise(event)
        cost = (event["clip_bound"] / noise) ** 2 if noise else math.inf
        asked = event["participants"]
        costs[slice(None) if asked == "all" else asked] += cost
    return float(costs.max())


METHOD = FedAvgGanMethod()
