"""One node: the clients it hosts, their discriminators, and its stored answer.

A node is a Flower SuperNode, a simulated one, or a share of the local engine's work.
The same request gets the same bytes: the answer is kept with the state under the
request's hash and is never made a second time with other noise. When the bytes are
gone, it is a new release, and counts again: every release is charged to its clients'
own durable count before it is computed, and refused beyond their limits.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError
from fedgs.federation.messages import (
    FakeBatch,
    Request,
    StageRequest,
    clients_of,
    fakes_of,
)
from fedgs.federation.round import client_round, embedding_round
from fedgs.files import read_tensors, write_tensors
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.warm_start import warm_start
from fedgs.mechanism.sanitizer import SanitizedGradients, received
from fedgs.privacy.client_count import Mark, ReleaseCount, release_event
from fedgs.privacy.client_limits import ClientRefused, Limits
from fedgs.privacy.ledger import Event
from fedgs.runs.run_folder import (
    forget_aside,
    node_folder,
    old_states,
    state_path,
    state_rounds,
)
from fedgs.shapes import TensorDict

MARK = "count"  # in a state's metadata: where the clients' count was with it


def mark_of(metadata: Mapping[str, str]) -> Mark | None:
    """Returns where the clients' count was; None for a state without a release.

    Raises:
        UserError: malformed.
    """
    if MARK not in metadata:
        return None
    try:
        return Mark(*json.loads(metadata[MARK]))
    except (TypeError, ValueError) as error:
        raise UserError(f"a node's state: its {MARK} cannot be read") from error


class Node:
    """Answers requests; the one of round 0, before gradients, makes discriminators.

    Attributes:
        node_id: j; `ResolvedConfig.hosting` says which clients it hosts.
        round: the last round that this node's state has seen, -1 without a state.
        limits: what the clients agree to, from their own file.
        count: what they have released.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        node_id: int,
        data: FederatedImages,
        private: Path,
        limits: Limits | None = None,
        source: str = "",
    ) -> None:
        """Remembers what it needs; touches no data yet.

        Args:
            config: the resolved configuration.
            node_id: j.
            data: all data that the node can see.
            private: the folder of all nodes' states.
            limits: of the hosted clients; those of the run's settings when None.
            source: of the releases, as the clients' count is to say; see `source_of`.

        Raises:
            UserError: the clients' limits cannot be read.
        """
        self.config = config
        self.node_id = node_id
        self.hosted = config.hosting.hosted(node_id)
        self.data = data
        self.folder = node_folder(private, node_id)
        self.limits = limits or Limits.of_run(config)
        self.source = source
        names = [data.client_names[client] for client in self.hosted]
        self.count = ReleaseCount(self.limits.state_dir or self.folder, names)
        self.round = -1
        self.is_saved = True
        self._discriminators: Discriminators | None = None
        self._digest = ""
        self._mark: Mark | None = None  # a deployed node's count, with its last release
        self._answer: SanitizedGradients | None = None

    def answer(self, request: Request) -> SanitizedGradients | None:
        """Trains, releases and remembers; a repeated request gets the stored answer.

        A stage needs no discriminators, and no state of the rounds before it.

        Privacy: releases (epsilon, delta)-DP output; event: as `client_round` or
            `embedding_round`, counted before it is computed.

        Raises:
            ClientRefused: outside the clients' limits; nothing was trained or counted.
            UserError: the node's state is missing or is not that of the round before.
        """
        if isinstance(request, FakeBatch) and request.round == 0:
            return self._prepare(request)
        digest = request.digest()
        if self._has_answered(request, digest):
            return self._answer
        if self.round >= request.round:
            raise UserError(
                f"node {self.node_id}: has already answered round {self.round}, "
                f"refuses another request for round {request.round}"
            )
        if isinstance(request, FakeBatch):
            self._check_state(request.round)
        self._check(request)
        if (event := self._event(request)) is not None:
            mark = self.count.charge(event, self.limits)
            # A simulated node's state has the same bytes however often it was tried.
            self._mark = mark if self.source else None
        answer = self._release(request)
        if not isinstance(answer, SanitizedGradients | None):
            raise TypeError("only SanitizedGradients may be kept as an answer")
        self.round, self._digest, self._answer = request.round, digest, answer
        self.is_saved = False
        return answer

    def _release(self, request: Request) -> SanitizedGradients | None:
        own = (self.data, self.hosted)
        if isinstance(request, StageRequest):
            return embedding_round(self.config, *own, request, self.node_id)
        nets = self._made()
        return client_round(self.config, nets, *own, fakes_of(request), self.node_id)

    def _made(self) -> Discriminators:
        if self._discriminators is None:
            raise UserError(
                f"node {self.node_id}: its state is missing from {self.folder}; "
                "restore it, or start the run again"
            )
        return self._discriminators

    def _check_state(self, round: int) -> None:
        """Refuses a gradient round without the discriminators of the round before.

        Raises:
            UserError: what is missing, and the remedy.
        """
        self._made()
        if self._must_see_every_round and self.round < round - 1:
            raise UserError(
                f"node {self.node_id}: its state is of round {self.round}, not of the "
                f"one before round {round}; restore the newer {self.folder}"
            )

    @property
    def _must_see_every_round(self) -> bool:
        """Whether no round counts without this node, so that an old state is wrong."""
        needs_all = self.config.min_nodes in (None, self.config.num_nodes)
        return needs_all and self.config.discriminator_training == "every_round"

    def check(self, request: Request) -> None:
        """Refuses a request that `answer` would refuse by a limit; changes nothing.

        Raises:
            ClientRefused: outside the clients' limits.
        """
        try:
            self._check(request)
            if (event := self._event(request)) is not None:
                self.count.check(event, self.limits)
        except ClientRefused:
            if not self._has_answered(request, request.digest()):
                raise

    def save(self, keep_round: int, is_durable: bool = False) -> None:
        """Writes the state and the stored answer, if they changed.

        Privacy: reads private data; output private (the run's private folder).

        Args:
            keep_round: the last committed checkpoint, whose state is kept.
            is_durable: have them on the disk when this returns.
        """
        if self.is_saved or self.round < 0:
            return
        made = self._discriminators
        tensors = {} if made is None else made.state()
        metadata = {"digest": self._digest}
        if self._mark is not None:
            metadata[MARK] = json.dumps(self._mark)
        if self._answer is not None:
            tensors["answer"] = self._answer.values
        old = old_states(self.folder, keep_round)
        path = state_path(self.folder, self.round)
        spare = old.pop() if old else None
        write_tensors(path, tensors, metadata, spare, is_durable)
        for file in old[:-1]:  # one stays, for the next save to overwrite
            file.unlink(missing_ok=True)
        forget_aside(self.folder, keep_round)
        self.is_saved = True

    def _check(self, request: Request) -> None:
        self.limits.check_run(self.config)
        if isinstance(request, FakeBatch):
            self.limits.check_fakes(request.images.shape, request.labels.tolist())

    def _event(self, request: Request) -> Event | None:
        """Returns the release that a request asks for, as the clients count it."""
        participants = clients_of(request.participants, self.hosted)
        if not participants:
            return None
        positions = [client - self.hosted.start for client in participants]
        num_clients = len(self.hosted)
        shares = self.limits.shares(self.config)
        event = release_event(
            self.config, request.round, positions, num_clients, shares
        )
        return dataclasses.replace(event, source=self.source)

    def _has_answered(self, request: Request, digest: str) -> bool:
        """Tells whether the stored answer is to this request; looks on disk too."""
        if digest != self._digest:
            self._catch_up(request.round)
        return digest == self._digest

    def _catch_up(self, round: int) -> None:
        """Loads the newest state on disk up to this round, if it is newer than ours.

        Another worker process may have hosted this node since.
        """
        # Of the same round: made after a stage, in another process.
        least = self.round + (self._discriminators is not None)
        newer = [r for r in state_rounds(self.folder) if least <= r <= round]
        if not newer:
            return
        tensors, metadata = read_tensors(state_path(self.folder, newer[-1]))
        values = tensors.pop("answer", None)
        if tensors:  # none before the first gradient round
            self._load(tensors)
        self.round, self._digest = newer[-1], metadata["digest"]
        self._mark, self._answer = mark_of(metadata), None
        if values is not None:
            terms = self.config.terms(self.round)
            noise = (terms.noise_std, terms.clip_bound)
            self._answer = received(values, self.round, self.node_id, *noise)
        self.is_saved = True

    def _load(self, tensors: TensorDict) -> None:
        if self._discriminators is None:
            self._discriminators = Discriminators(self.config, self.hosted)
        try:
            self._discriminators.load_state(tensors)
        except ValueError as error:
            raise UserError(f"{self.folder}: {error}") from error

    def _prepare(self, request: FakeBatch) -> None:
        """Makes and warm-starts the discriminators, once in the run."""
        if stages := self.config.num_stages:
            self._catch_up(stages)  # a state of a stage may lack them
        is_later = any(r > (stages or -1) for r in state_rounds(self.folder))
        if self._discriminators is not None or is_later:
            return
        self._check(request)
        self._discriminators = Discriminators(self.config, self.hosted)
        is_public = self.config.warm_start == "public"
        warm_start(
            self.config,
            self._discriminators,
            self.data,
            self.hosted,
            (request.images, request.labels) if is_public else None,
        )
        self.round, self.is_saved = stages, False
