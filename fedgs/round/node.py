"""One node: it answers the requests of a run for the clients that it hosts.

A node is a Flower SuperNode, a simulated one, or a share of the local engine's work. It
is put together from four parts, and does nothing but call them in the right order:

    what it permits     `fedgs.round.node_limits`: the clients' limits and their count
    what it keeps       `fedgs.round.node_state`: discriminators, the stored answer
    what it computes    `fedgs.round.answer`: a method's answers, clipped and noised
    what it masks       `fedgs.round.node_masks`: keys, and the sum under masks
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedgs.cohorts.client_groups import CohortOfClient, InGroup
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.warm_start import OnStep, nobody, warm_start
from fedgs.mechanism.peers import Peers
from fedgs.methods import phase_at
from fedgs.methods.base import Hosted, Request
from fedgs.privacy.client_ledger import ClientLedger
from fedgs.privacy.client_limits import ALLOW_ALL, ClientRefused, Limits
from fedgs.round.answer import answer_of
from fedgs.round.messages import (
    MaskedRequest,
    NodeRelease,
    SentRequest,
    content_of,
    decode_request,
)
from fedgs.round.node_limits import NodeLimits
from fedgs.round.node_masks import NodeMasks
from fedgs.round.node_state import NodeState, discriminators_config
from fedgs.runs.run_folder import node_folder


class Node:
    """Answers requests; the one of round 0, before gradients, makes discriminators.

    Attributes:
        node_id: j; `ResolvedConfig.hosting` says which clients it hosts.
        hosted: these clients.
        limits: what the clients permit, and the count of what they have released.
        state: what the node keeps between rounds.
        peers: the nodes whose masking keys are accepted. None, as in a simulation,
            means the keys of all nodes.
        on_step: called after each step of a warm start. What it raises ends the warm
            start, which goes on there when it is asked for again.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        node_id: int,
        data: FederatedImages,
        private: Path,
        limits: Limits | None = None,
        source: str = "",
        peers: Peers | None = None,
    ) -> None:
        """Puts the parts together; touches no data and no file yet.

        Args:
            config: the run's configuration, resolved.
            node_id: j, the node's index.
            data: all data that the node can see.
            private: the folder of all nodes' states.
            limits: the hosted clients' limits. None permits whatever the run's
                settings ask for.
            source: the name of run and node in the clients' count; see `source_of`.
            peers: as the attribute.
        """
        self.config = config
        self.node_id = node_id
        self.hosted = config.hosting.hosted(node_id)
        self.data = data
        self.peers = peers
        self.on_step: OnStep = nobody
        folder = node_folder(private, node_id)
        permitted = limits or ALLOW_ALL
        # Names, not numbers: the count goes on over runs that number clients anew.
        names = [data.client_names[client] for client in self.hosted]
        count = ClientLedger(permitted.state_dir or folder, names)
        run = source.partition("/")[0]
        self.limits = NodeLimits(config, self.hosted, permitted, count, source)
        self.state = NodeState(config, node_id, folder, names)
        self._masks = NodeMasks(config, node_id, folder, run, peers)

    def decode(self, payload: Mapping[str, object]) -> SentRequest:
        """Decodes a request and checks it against the run's settings.

        Raises:
            UserError: as `fedgs.round.messages.decode_request`.
        """
        return decode_request(payload, self.config)

    def answer(self, sent: SentRequest) -> NodeRelease | None:
        """Trains, releases and remembers; a repeated request gets the stored answer.

        A method without discriminators needs no state of earlier rounds. With secure
        aggregation the local engine gets integers without masks, because it is one
        curator that sees everything anyway.

        Privacy: releases (epsilon, delta)-DP output; event: as `answer_of`, counted
            before it is computed. If the stored bytes are lost, the same request is a
            new release, and counts again.

        Raises:
            ClientRefused: outside the clients' limits; nothing was trained or counted.
            UserError: the node's state is missing or is not that of the round before.
        """
        request = content_of(sent)
        if request.round == 0:
            self._prepare(request)
            return None
        digest = sent.digest()
        if self.state.has_answered(request.round, digest):
            return self.state.answer
        common_digest = None
        is_next_attempt = False
        # Under masks a void attempt is repeated with other nodes, and with fresh noise.
        if isinstance(sent, MaskedRequest):
            common_digest = request.common_digest()
            is_next_attempt = common_digest == self.state.common_digest
        if self.state.round >= request.round and not is_next_attempt:
            raise UserError(
                f"node {self.node_id}: it has already answered round "
                f"{self.state.round}, so it refuses a different request for round "
                f"{request.round}; resume the run, which asks anew and counts it"
            )
        if phase_at(self.config, request.round).method.has_discriminators:
            self.state.check_round(request.round)
        self.limits.check_run()
        if is_next_attempt:
            # The discriminators have trained on these fakes already.
            request = dataclasses.replace(request, trainees=())
        if self.config.is_masked:
            answer = self._masked(request, sent)
        else:
            answer = self._release(request)
        self.state.keep_answer(answer, request.round, digest, common_digest)
        return answer

    def check(self, request: Request) -> None:
        """Refuses a request that `answer` would refuse by a limit; changes nothing.

        Raises:
            ClientRefused: outside the clients' limits.
        """
        try:
            self.limits.check_request(request)
        except ClientRefused:
            # Stored bytes are no new release, so that no limit keeps them back.
            if not self.state.has_answered(request.round, request.digest()):
                raise

    def announce(self, round: int) -> bytes:
        """Returns the public key for this node's next attempt, signed; packed.

        Args:
            round: the round that the attempt is for.

        Raises:
            ClientRefused: one more release would be outside the clients' limits, which
                is said before the others have released theirs in vain.
            UserError: the count is broken.
        """
        self.limits.check_round(round)
        stored = self._masks.stored_key()
        if stored is not None:
            key, announced = stored
            # The same key as long as it masked nothing: its announcement may be lost.
            if not self.limits.count.is_masked_under(key.public.hex()):
                return announced.pack()
        return self._masks.new_key().pack()

    def save(self, keep_round: int, is_durable: bool = False) -> None:
        """Writes the state and the stored answer, if they changed; see `NodeState`."""
        self.state.save(keep_round, is_durable)

    def _release(self, request: Request) -> NodeRelease | None:
        """Counts a release, then computes it."""
        event = self.limits.event_of(request)
        if event is not None:
            self.limits.charge(event)
        return self._computed(request)

    def _masked(self, request: Request, sent: SentRequest) -> NodeRelease | None:
        """Counts a release under its key, then computes and masks it.

        Raises:
            ClientRefused: the listed nodes are not those that the clients agreed to.
            UserError: asked without masks, or not under this node's last key, or with a
                key that hides nothing; nothing was counted.
        """
        event = self.limits.event_of(request)
        if event is None:  # its clients train, and there is nothing to mask
            return self._computed(request)
        if not isinstance(sent, MaskedRequest):
            raise UserError(
                f"node {self.node_id}: secure_aggregation = true, and the server asks "
                "for an answer without masks, so it is refused; ask who runs the server"
            )
        key = self._masks.key_for(sent.attempt, self.limits.least_nodes)
        # With the key, so that the count refuses a second sum under it.
        self.limits.charge(dataclasses.replace(event, context=key.public.hex()))
        node_sum = self._computed(request)
        has_room = self._has_room_after(request.round)
        return self._masks.mask(node_sum, key, sent, has_room)

    def _computed(self, request: Request) -> NodeRelease | None:
        hosted = Hosted(
            data=self.data,
            clients=self.hosted,
            node_id=self.node_id,
            discriminators=self.state.discriminators,
            groups=self._groups(request.round),
        )
        return answer_of(self.config, hosted, request)

    def _groups(self, round: int) -> Sequence[InGroup | None]:
        """Returns the groups of the hosted clients, where a round compares groups."""
        method, own = phase_at(self.config, round)
        names = [self.data.client_names[client] for client in self.hosted]
        cohorts: list[CohortOfClient | None] = []
        if self.data.client_cohorts:  # empty without a file of cohorts
            cohorts = [self.data.client_cohorts[client] for client in self.hosted]
        return method.groups(
            own,
            names=names,
            cohorts=cohorts,
            least=self.limits.permitted.min_clients_per_group,
        )

    def _has_room_after(self, round: int) -> bool:
        """Tells whether the clients' limits permit a release in the next round."""
        following = min(round + 1, self.config.num_rounds)
        try:
            self.limits.check_round(following)
        except ClientRefused:
            return False  # `announce` says why
        return True

    def _prepare(self, request: Request) -> None:
        """Makes and warm-starts the discriminators, once in the run."""
        config = discriminators_config(self.config)
        if self.state.has_discriminators(config.rounds_before):
            return
        self.limits.check_run()
        made = Discriminators(config, self.hosted)
        public_fakes = None
        if config.is_warm_start_public:
            public_fakes = (request.tensors["images"], request.tensors["labels"])
        steps = self.state.kept_steps(request.digest(), self.on_step)
        warm_start(config, made, self.data, self.hosted, public_fakes, steps)
        self.state.keep_discriminators(made, config.rounds_before)
