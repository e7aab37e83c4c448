"""One node: the clients it hosts, their discriminators, and its stored answer.

A node is a Flower SuperNode, a simulated one, or a share of the local engine's work.
The same request gets the same bytes: the answer is kept with the state under the
request's hash and is never made a second time with other noise. When the bytes are
gone, it is a new release, and counts again: every release is charged to its clients'
own durable count before it is computed, and refused beyond their limits.

With secure aggregation a round may be asked in several attempts, of different nodes.
Each is a release of its own, with fresh noise, masked under a key that this node draws
for it alone; the discriminators train once. Only the masked sum is kept as the answer.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedgs.config.method_settings import settings_with
from fedgs.config.rounds import terms_at
from fedgs.config.run_config import ResolvedConfig, of_gs_wgan
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError
from fedgs.files import make_folder, write_tensors
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.warm_start import warm_start
from fedgs.mechanism.integer_sums import IntegerSum
from fedgs.mechanism.masks import (
    KEY_BYTES,
    Announced,
    MaskContext,
    MaskedSum,
    MaskingKey,
    mask,
    received_masked,
)
from fedgs.mechanism.peers import Peers
from fedgs.mechanism.sanitizer import SanitizedGradients, received
from fedgs.methods import method_of
from fedgs.methods.base import Hosted, Request
from fedgs.methods.schedule import clients_of
from fedgs.privacy.client_ledger import ClientLedger, release_event
from fedgs.privacy.client_limits import ALLOW_ALL, ClientRefused, Limits
from fedgs.privacy.ledger import Event
from fedgs.round.answer import answer_of
from fedgs.round.messages import NEXT_KEY, Release, decode_request
from fedgs.runs.run_folder import (
    node_folder,
    old_states,
    read_state,
    sealed,
    state_path,
    state_rounds,
)
from fedgs.shapes import TensorDict

ASKED = "asked"  # in a state's metadata: what its round's attempts all ask


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
        peers: Peers | None = None,
    ) -> None:
        """Remembers what it needs; touches no data yet.

        Args:
            config: the resolved configuration.
            node_id: j.
            data: all data that the node can see.
            private: the folder of all nodes' states.
            limits: of the hosted clients; those of the run's settings when None.
            source: of the releases, as the clients' count is to say; see `source_of`.
            peers: whose masking keys are taken; None in a simulation: those of all.
        """
        self.config = config
        self.node_id = node_id
        self.hosted = config.hosting.hosted(node_id)
        self.data = data
        self.folder = node_folder(private, node_id)
        self.limits = limits or ALLOW_ALL
        self.source, self.peers = source, peers
        names = [data.client_names[client] for client in self.hosted]
        self.count = ClientLedger(self.limits.state_dir or self.folder, names)
        self.round = -1
        self.is_saved = True
        self._is_agreed = False  # whether the limits allow the run; neither changes
        self._discriminators: Discriminators | None = None
        self._digest = ""
        self._asked: str | None = None  # by every attempt of the round, with masks
        self._answer: Release | None = None

    def decode(self, payload: Mapping[str, object]) -> Request:
        """Decodes a request and checks it against the run's settings.

        Raises:
            UserError: as `fedgs.round.messages.decode_request`.
        """
        return decode_request(payload, self.config)

    def answer(self, request: Request) -> Release | None:
        """Trains, releases and remembers; a repeated request gets the stored answer.

        A method without discriminators needs no state of the rounds before. The local
        engine with secure aggregation gets integers: it is one curator.

        Privacy: releases (epsilon, delta)-DP output; event: as `answer_of`, counted
            before it is computed.

        Raises:
            ClientRefused: outside the clients' limits; nothing was trained or counted.
            UserError: the node's state is missing or is not that of the round before.
        """
        if request.round == 0:
            return self._prepare(request)
        digest = request.digest()
        if self._has_answered(request, digest):
            return self._answer
        asked = None if request.attempt is None else request.common_digest()
        is_again = asked is not None and asked == self._asked
        if self.round >= request.round and not is_again:
            raise UserError(
                f"node {self.node_id}: has already answered round {self.round}, "
                f"refuses another request for round {request.round}"
            )
        if method_of(self.config, request.round).has_discriminators:
            self._check_state(request.round)
        self._check_run()
        event, key = self._event(request), None
        if event is not None and self.config.is_masked:
            key = self._key_for(request)
            event = dataclasses.replace(event, context=key.public.hex())
        if event is not None:
            self.count.charge(event, self.limits)
        # Asked again, its discriminators have trained on these fakes.
        asks = dataclasses.replace(request, trainees=()) if is_again else request
        hosted = Hosted(self.data, self.hosted, self.node_id, self._discriminators)
        answer = answer_of(self.config, hosted, asks)
        if key is not None:
            answer = self._masked(answer, key, request)
        plain = IntegerSum if self.config.secure_aggregation else SanitizedGradients
        only = MaskedSum if self.config.is_masked else plain
        if not isinstance(answer, only | None):
            raise TypeError(f"only {only.__name__} may be kept as an answer")
        self.round, self._digest, self._answer = request.round, digest, answer
        self._asked, self.is_saved = asked, False
        return answer

    # -------------------------------------------------------------- masks

    def announce(self, round: int) -> bytes:
        """Returns the public key for this node's next attempt, signed; packed.

        Args:
            round: that it is meant for.

        Raises:
            ClientRefused: one more release would be outside the clients' limits, which
                is said before the others have released theirs in vain.
            UserError: the count is broken.
        """
        self._check_next(round)
        # The same key while it masked nothing: its announcement may be lost.
        if (stored := self._stored_key()) is not None:
            key, announced = stored
            if not self.count.is_masked_under(key.public.hex()):
                return announced.pack()
        return self._new_key()

    def _check_next(self, round: int) -> None:
        self._check_run()
        self.count.check(self._event_of(round, self.hosted), self.limits)

    @property
    def _key_path(self) -> Path:
        return self.folder / "masking.key"

    @property
    def _run(self) -> str:
        return self.source.partition("/")[0]

    def _new_key(self) -> bytes:
        """Draws the next key, over the last one, and returns what is announced."""
        key = MaskingKey.generate()
        announced = Announced(key.public, b"")
        if self.peers is not None:
            announced = self.peers.sign(key, self._run)
        make_folder(self.folder)
        # In place, over the last key. What a crash tears is a key that masked nothing.
        with open(self._key_path, "r+b" if self._key_path.exists() else "xb") as file:
            file.write(key.secret() + announced.pack())
            file.truncate()
            # A power cut must not bring back a key whose sum has left.
            os.fsync(file.fileno())
        return announced.pack()

    def _stored_key(self) -> tuple[MaskingKey, Announced] | None:
        """Returns the key that was announced last; None where there is none."""
        try:
            content = self._key_path.read_bytes()
            key = MaskingKey.read(content[:KEY_BYTES])
            return key, Announced.unpack(content[KEY_BYTES:])
        except (OSError, ValueError):  # UserError is one
            return None

    def _key_for(self, request: Request) -> MaskingKey:
        """Returns this node's key of an attempt, after a look at all of its list.

        Raises:
            ClientRefused: a key of nobody that is pinned, or too few of them.
            UserError: no list, or not with this node's last key; nothing is sent.
        """
        attempt = request.attempt
        if attempt is None:
            raise UserError(
                f"node {self.node_id}: asked without masks in a run with "
                "secure_aggregation = true: refused"
            )
        if len(attempt.keys) < (least := self.limits.shares(self.config)):
            raise ClientRefused(
                "min_honest_nodes",
                f"min_honest_nodes = {least}: the list has {len(attempt.keys)} nodes",
            )
        if self.peers is not None:
            names = self.config.node_names
            keys = {names[node]: each for node, each in attempt.keys.items()}
            self.peers.check(keys, self._run)
        listed = attempt.keys.get(self.node_id)
        stored = self._stored_key()
        if stored is None or listed is None or listed.public != stored[0].public:
            raise UserError(
                f"node {self.node_id}: the list of masking keys has not this node's "
                "last one: refused"
            )
        return stored[0]

    def _masked(self, node_sum: object, key: MaskingKey, request: Request) -> MaskedSum:
        if not isinstance(node_sum, IntegerSum) or request.attempt is None:
            raise TypeError("only an IntegerSum can be masked")
        config = self.config
        # Before the sum is masked, so that the last key is gone when the sum leaves.
        next_key = self._new_key()
        try:
            self._check_next(min(request.round + 1, config.num_rounds))
        except ClientRefused:
            next_key = b""  # `announce` says why
        return mask(node_sum, key, request.attempt, self._told(request), next_key)

    def _told(self, request: Request) -> MaskContext:
        """Returns what all listed nodes must have been told for their masks to cancel.

        The settings too: a server that asks the others for less noise than this node
        counts would open a sum with less.
        """
        own = settings_with("of_client")
        flat = self.config.to_flat()
        settings = {name: value for name, value in flat.items() if name not in own}
        text = json.dumps([settings, request.common_digest()])
        digest = hashlib.sha256(text.encode()).hexdigest()
        return MaskContext(self._run, request.round, digest, self.config.node_title)

    # -------------------------------------------------------------- state

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
        # No round counts without this node, so that an old state is wrong.
        needs_all = self.config.min_answers in (None, self.config.num_nodes)
        trains_all = self.config.discriminator_training == "every_round"
        if needs_all and trains_all and self.round < round - 1:
            raise UserError(
                f"node {self.node_id}: its state is of round {self.round}, not of the "
                f"one before round {round}; restore the newer {self.folder}"
            )

    def check(self, request: Request) -> None:
        """Refuses a request that `answer` would refuse by a limit; changes nothing.

        Raises:
            ClientRefused: outside the clients' limits.
        """
        try:
            self._check_run()
            if (event := self._event(request)) is not None:
                self.count.check(event, self.limits)
        except ClientRefused:
            # Stored bytes are no new release, so that no limit keeps them back.
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
        is_kept = not isinstance(self._answer, IntegerSum)  # of the local engine
        metadata = {"digest": self._digest if is_kept else ""}
        if is_kept and self._answer is not None:
            tensors["answer"] = self._answer.values
        if isinstance(self._answer, MaskedSum):
            metadata[NEXT_KEY] = self._answer.next_key.hex()
        if self._asked is not None:
            metadata[ASKED] = self._asked
        old = old_states(self.folder, keep_round)
        path = state_path(self.folder, self.round)
        spare = old.pop() if old else None
        write_tensors(path, sealed(tensors, metadata), metadata, spare, is_durable)
        for file in old[:-1]:  # one stays, for the next save to overwrite
            file.unlink(missing_ok=True)
        self.is_saved = True

    def _check_run(self) -> None:
        """Refuses a run outside the clients' limits; looks once."""
        if not self._is_agreed:
            self.limits.check_run(self.config)
            self._is_agreed = True

    def _event(self, request: Request) -> Event | None:
        """Returns the release that a request asks for, as the clients count it."""
        participants = clients_of(request.participants, self.hosted)
        if not participants:
            return None
        event = self._event_of(request.round, participants)
        return dataclasses.replace(event, source=self.source)

    def _event_of(self, round: int, participants: Sequence[int]) -> Event:
        positions = [client - self.hosted.start for client in participants]
        shares = self.limits.shares(self.config)
        return release_event(self.config, round, positions, len(self.hosted), shares)

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
        tensors, metadata = read_state(state_path(self.folder, newer[-1]))
        values = tensors.pop("answer", None)
        if tensors:  # none before the first gradient round
            self._load(tensors)
        self.round, self._digest = newer[-1], metadata["digest"]
        self._asked = metadata.get(ASKED)
        self._answer = None
        if values is not None:
            place, terms = (self.round, self.node_id), terms_at(self.config, self.round)
            if self.config.is_masked:
                next_key = bytes.fromhex(metadata[NEXT_KEY])
                self._answer = received_masked(values, *place, next_key)
            else:
                agreed = terms.noise_std, terms.clip_bound
                self._answer = received(values, *place, *agreed)
        self.is_saved = True

    def _load(self, tensors: TensorDict) -> None:
        if self._discriminators is None:
            self._discriminators = Discriminators(self.config, self.hosted)
        try:
            self._discriminators.load_state(tensors)
        except ValueError as error:
            raise UserError(f"{self.folder}: {error}") from error

    def _prepare(self, request: Request) -> None:
        """Makes and warm-starts the discriminators, once in the run."""
        if stages := self.config.num_stages:
            self._catch_up(stages)  # a state of a stage may lack them
        is_later = any(r > (stages or -1) for r in state_rounds(self.folder))
        if self._discriminators is not None or is_later:
            return
        self._check_run()
        config = of_gs_wgan(self.config)
        self._discriminators = Discriminators(config, self.hosted)
        is_public, fakes = config.is_warm_start_public, request.tensors
        warm_start(
            config,
            self._discriminators,
            self.data,
            self.hosted,
            (fakes["images"], fakes["labels"]) if is_public else None,
        )
        self.round, self.is_saved = stages, False
