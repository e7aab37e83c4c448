"""The attacked clients of attack B: worst-case clients in the slots of real ones.

A canary answers every fake with the same gradient, whatever it is trained on; all other
clients train on their own records and answer as always.

Source: Andrew et al., "One-shot empirical privacy estimation for federated learning",
ICLR 2024 (canary clients).
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgs.config.run_config import GsWganConfig, of_gs_wgan
from fedgs.data.federated import FederatedImages
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.warm_start import OnStep, Steps, warm_start
from fedgs.mechanism.integer_sums import real_values
from fedgs.mechanism.masks import MaskedSum
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, from_dct
from fedgs.methods.base import Hosted, Request
from fedgs.methods.schedule import clients_of, select
from fedgs.round.answer import answer_of, raw_answers
from fedgs.round.local import LocalNodes
from fedgs.round.messages import NodeRelease
from fedgs.shapes import PerSampleGrads

LENGTH = 10.0  # of a canary's gradient, in units of C: clipping has to do something
# Signs of the gradient of a client that is in, and of one that is out, by relation.
INSIDE_SIGN = 1.0
OUTSIDE_SIGNS = {"replace-one": -1.0, "zero-out": 0.0}


@dataclasses.dataclass(frozen=True)
class Canaries:
    """The attacked clients, their coins and their directions.

    Attributes:
        clients: their numbers, shape (m,).
        is_in: their coins, shape (m,), bool.
        directions: e_i in the gradient basis, shape (m, C, k, k), norm 1, float64.
        counts: in how many rounds each is asked, shape (m,).
        relation: what "out" means.
    """

    clients: Sequence[int]
    is_in: Any
    directions: Tensor
    counts: Any
    relation: str

    @classmethod
    def draw(
        cls,
        config: GsWganConfig,
        num_canaries: int,
        relation: str,
        rng: np.random.Generator,
    ) -> "Canaries":
        """Draws some of the clients; those that are asked at all come first.

        Privacy: public; independent of data.
        """
        num_clients = config.num_clients
        counts = np.zeros(num_clients, np.int64)
        everybody = range(num_clients)
        for round in range(1, config.num_rounds + 1):
            participants = select(config, round)
            asked = clients_of(participants, everybody)
            counts[asked] += 1
        order = rng.permutation(num_clients)
        # A client that is never asked shows nothing, so those come last.
        is_never_asked = counts[order] == 0
        order = order[np.argsort(is_never_asked, kind="stable")]
        chosen = order[:num_canaries]
        shape = config.release_shape[1:]
        vectors = rng.standard_normal((math.prod(shape), num_canaries))
        # Orthonormal where there are as many coordinates: no canary hides another.
        if num_canaries <= len(vectors):
            vectors, _ = np.linalg.qr(vectors)
        vectors = vectors / np.linalg.norm(vectors, axis=0)
        rows = torch.from_numpy(vectors.T.copy())
        coins = rng.integers(2, size=num_canaries)
        return cls(
            clients=chosen.tolist(),
            is_in=coins.astype(bool),
            directions=rows.view(num_canaries, *shape),
            counts=counts[chosen],
            relation=relation,
        )

    def images(self, config: GsWganConfig) -> Tensor:
        """Returns e_i as images (m, C, S, S)."""
        if config.dct_size is not None:
            return from_dct(self.directions, config.image_size)
        return self.directions

    def gradients(self, config: GsWganConfig) -> dict[int, Tensor]:
        """Returns what each client answers to every fake, float32 (C, S, S)."""
        outside = OUTSIDE_SIGNS[self.relation]
        signs = np.where(self.is_in, INSIDE_SIGN, outside)
        images = self.images(config) * LENGTH * config.clip_bound
        found: dict[int, Tensor] = {}
        for client, sign, image in zip(self.clients, signs, images, strict=True):
            gradient = sign * image
            found[client] = gradient.float()
        return found


class CanaryDiscriminators(Discriminators):
    """A node's discriminators, of which some answer with a fixed gradient."""

    def __init__(
        self,
        config: GsWganConfig,
        hosted: Sequence[int],
        fixed: Mapping[int, Tensor],
    ) -> None:
        """Initialises all; `fixed` holds the gradients (C, S, S) by client."""
        super().__init__(config, hosted)
        # A query names clients by their place in the node, and not by their number.
        self.fixed: dict[int, Tensor] = {}
        for index, client in enumerate(hosted):
            if client in fixed:
                self.fixed[index] = fixed[client]

    def query(self, indices: Tensor, images: Tensor, labels: Tensor) -> PerSampleGrads:
        """Returns every listed client's gradients, as `Discriminators.query`."""
        grads = super().query(indices, images, labels)
        for row, index in enumerate(indices.tolist()):
            if index in self.fixed:
                grads[row] = self.fixed[index].to(grads.device)
        return grads


class CanaryNodes(LocalNodes):
    """All nodes in this process; keeps what the adversaries see of each canary.

    Attributes:
        releases: <release of the canary's node - known, e_i>, so far, shape (m,).
        sums: the same of the sum over nodes.
    """

    def __init__(
        self,
        config: GsWganConfig,
        data: FederatedImages,
        canaries: Canaries,
    ) -> None:
        """Starts the worker threads."""
        super().__init__(config, data, Path(config.output))  # saves nothing
        self.canaries = canaries
        self.fixed = canaries.gradients(config)
        self.stacks: dict[int, CanaryDiscriminators] = {}
        self.releases = np.zeros(len(canaries.clients))
        self.sums = np.zeros(len(canaries.clients))

    def answers(self, request: Request) -> Sequence[NodeRelease]:
        """Answers a request with all nodes concerned and keeps the scores."""
        answers = super().answers(request)
        nodes = [answer.node_id for answer in answers]
        known = list(self.pool.map(self._known, nodes, itertools.repeat(request)))
        self._watch(request, answers, known)
        return answers

    def save(self, keep_round: int) -> None:
        """Writes nothing: this run is not resumed."""

    def _refusal(self, node_id: int, request: Request) -> str:
        return ""  # a client's own count has no part in this

    def _answer(self, node_id: int, request: Request) -> NodeRelease | None:
        config = of_gs_wgan(self.config)
        own = Hosted(
            data=self.data,
            clients=config.hosting.hosted(node_id),
            node_id=node_id,
            discriminators=self.stacks[node_id],
        )
        return answer_of(config, own, request)

    def _prepare(self, node_id: int, request: Request, on_step: OnStep) -> None:
        config = of_gs_wgan(self.config)
        hosted = config.hosting.hosted(node_id)
        stack = CanaryDiscriminators(config, hosted, self.fixed)
        fakes = None
        if config.is_warm_start_public:
            fakes = (request.tensors["images"], request.tensors["labels"])
        warm_start(config, stack, self.data, hosted, fakes, Steps(on_step))
        self.stacks[node_id] = stack

    def _known(self, node: int, request: Request) -> Tensor:
        """Returns what the node's other clients contributed, summed over the fakes."""
        config = of_gs_wgan(self.config)
        clients = config.hosting.hosted(node)
        hosted = Hosted(
            data=self.data,
            clients=clients,
            node_id=node,
            discriminators=self.stacks[node],
        )
        asked = clients_of(request.participants, clients)
        others = [client for client in asked if client not in self.fixed]
        # Again, without training: a query changes no bit of a discriminator.
        request = dataclasses.replace(request, participants=others, trainees=())
        total = torch.zeros(config.release_shape[1:], dtype=torch.float64)
        for grads in raw_answers(config, hosted, request):
            clipped = clip(PerSampleGradients(grads), config.clip_bound)
            of_batch = clipped.values.sum((0, 1))
            total += of_batch.cpu()
        return total

    def _watch(
        self,
        request: Request,
        answers: Sequence[NodeRelease],
        known: Sequence[Tensor],
    ) -> None:
        # The adversary knows all data but the canary's, so that it takes off what the
        # other clients contributed.
        by_node: dict[int, Tensor] = {}
        for answer, others in zip(answers, known, strict=True):
            if isinstance(answer, MaskedSum):  # none is, in this engine
                continue
            over_fakes = real_values(answer).sum(0)
            by_node[answer.node_id] = over_fakes - others
        total = torch.stack(list(by_node.values())).sum(0)
        asked = set(clients_of(request.participants, self.canaries.clients))
        for row, client in enumerate(self.canaries.clients):
            if client not in asked:
                continue
            direction = self.canaries.directions[row]
            node = self.config.hosting.node_of(client)
            along_release = by_node[node] * direction
            along_sum = total * direction
            self.releases[row] += float(along_release.sum())
            self.sums[row] += float(along_sum.sum())
