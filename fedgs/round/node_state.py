"""What one node keeps between rounds: its discriminators and its stored answer.

The same request gets the same bytes: the answer is kept with the state under the
request's hash, and is never made a second time with other noise. With secure
aggregation only the masked sum is kept.

A state on the disk counts as newer than the one in memory, because another worker
process may have hosted this node in between.

A state is of certain clients, in their order. If another owner came into the place of
one, a discriminator that was trained on somebody would answer for somebody else, and
one owner could be in two places of a release.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from fedgs.config.rounds import terms_at
from fedgs.config.run_config import GsWganConfig, ResolvedConfig
from fedgs.errors import UserError
from fedgs.files import read_metadata, write_tensors
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.warm_start import OnStep
from fedgs.mechanism.integer_sums import IntegerSum
from fedgs.mechanism.masks import MaskedSum, received_masked
from fedgs.mechanism.sanitizer import SanitizedGradients, received
from fedgs.methods import phase_with_discriminators
from fedgs.round.kept_warm_start import KeptSteps
from fedgs.round.messages import NEXT_KEY, NodeRelease
from fedgs.runs.run_folder import (
    old_states,
    read_state,
    sealed,
    state_path,
    state_rounds,
    warm_start_path,
)
from fedgs.shapes import Release, TensorDict

_DIGEST = "digest"  # in a state's metadata: the hash of what was answered
CLIENTS = "clients"  # there too: the hash of the clients' names
_COMMON_DIGEST = "asked"  # there too: what all masked attempts of the round ask alike


class NodeState:
    """The state of one node, in memory and on the disk.

    Attributes:
        folder: the folder of the states, in the run's private folder.
        round: the last round that this state has seen, -1 without a state.
        discriminators: those of the hosted clients; None before they are made.
        answer: to the last request; None if none of its clients took part.
        digest: the hash of that request.
        common_digest: with masks, the hash of what every attempt of the round asks.
        is_saved: whether the disk has all of it.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        node_id: int,
        folder: Path,
        client_names: Sequence[str],
    ) -> None:
        """Reads nothing yet.

        Args:
            config: the run's configuration.
            node_id: j, the node's index.
            folder: the folder of the states.
            client_names: the hosted clients, in their order.
        """
        self.folder = folder
        self.round = -1
        self.discriminators: Discriminators | None = None
        self.answer: NodeRelease | None = None
        self.digest = ""
        self.common_digest: str | None = None
        self.is_saved = True
        self._config = config
        self._node_id = node_id
        self._hosted = config.hosting.hosted(node_id)
        self._clients_hash = clients_hash(client_names)

    def kept_steps(self, digest: str, on_step: OnStep) -> KeptSteps:
        """Returns the steps of the warm start, which are kept beside the states.

        Args:
            digest: the hash of the request that asks for it, with what it begins from.
            on_step: as of `KeptSteps`.
        """
        of = {_DIGEST: digest, CLIENTS: self._clients_hash}
        return KeptSteps(self.folder, of, on_step)

    def check_clients(self) -> None:
        """Refuses other clients than those that the states on disk are of.

        Raises:
            UserError: the data name other owners now, or name them in another order.
        """
        check_states(self.folder, self._clients_hash, f"node {self._node_id}")

    def has_answered(self, round: int, digest: str) -> bool:
        """Tells whether the stored answer is to this request; looks on disk too."""
        if digest != self.digest:
            self._catch_up(round)
        return digest == self.digest

    def has_discriminators(self, rounds_before: int) -> bool:
        """Tells whether the node has made its discriminators; looks on disk too.

        Args:
            rounds_before: the rounds of the phases before the one that needs them. A
                state of those rounds lacks them.
        """
        if rounds_before:
            self._catch_up(rounds_before)
        if self.discriminators is not None:
            return True
        latest_without = rounds_before or -1
        return any(round > latest_without for round in state_rounds(self.folder))

    def check_round(self, round: int) -> None:
        """Refuses a gradient round without the discriminators of the round before.

        Raises:
            UserError: what is missing, and the remedy.
        """
        if self.discriminators is None:
            raise UserError(
                f"node {self._node_id}: what it keeps of earlier rounds is missing "
                f"from {self.folder}; restore that folder, or start a new run"
            )
        # If no round counts without this node, an older state must be a wrong one.
        needs_all = self._config.min_answers in (None, self._config.num_nodes)
        trains_all = self._config.discriminator_training == "every_round"
        if needs_all and trains_all and self.round < round - 1:
            raise UserError(
                f"node {self._node_id}: what it keeps is of round {self.round}, and it "
                f"is asked for round {round}; restore the newest copy of {self.folder}"
            )

    def keep_discriminators(self, made: Discriminators, round: int) -> None:
        """Takes new discriminators over.

        Args:
            made: the discriminators of the hosted clients.
            round: the last round before they were made.
        """
        self.discriminators = made
        self.round = round
        self.is_saved = False

    def keep_answer(
        self,
        answer: NodeRelease | None,
        round: int,
        digest: str,
        common_digest: str | None,
    ) -> None:
        """Remembers an answer, and that the discriminators have seen its round.

        Privacy: only a sanitized answer is taken, because it is sent again on request
        without another look at it.

        Raises:
            TypeError: an answer of another type than this run's.
        """
        only: type[NodeRelease] = SanitizedGradients
        if self._config.is_masked:
            only = MaskedSum
        elif self._config.secure_aggregation:
            only = IntegerSum
        if not isinstance(answer, only | None):
            raise TypeError(f"only {only.__name__} may be kept as an answer")
        self.answer = answer
        self.round = round
        self.digest = digest
        self.common_digest = common_digest
        self.is_saved = False

    def save(self, keep_round: int, is_durable: bool = False) -> None:
        """Writes the state and the stored answer, if they changed.

        Privacy: reads private data; output private (the run's private folder).

        Args:
            keep_round: the last committed checkpoint, whose state is kept.
            is_durable: have them on the disk when this returns.
        """
        if self.is_saved or self.round < 0:
            return
        tensors: TensorDict = {}
        if self.discriminators is not None:
            tensors = self.discriminators.state()
        metadata = {_DIGEST: self.digest, CLIENTS: self._clients_hash}
        # What is kept here is what the same request gets again, from any process.
        if isinstance(self.answer, IntegerSum):
            metadata[_DIGEST] = ""  # the local engine is never asked again for it
        elif self.answer is not None:
            tensors["answer"] = self.answer.values
        if isinstance(self.answer, MaskedSum):
            metadata[NEXT_KEY] = self.answer.next_key.hex()
        if self.common_digest is not None:
            metadata[_COMMON_DIGEST] = self.common_digest
        # An old file is written over: new pages of the disk cost three times as much.
        old = old_states(self.folder, keep_round)
        path = state_path(self.folder, self.round)
        spare = old.pop() if old else None
        write_tensors(path, sealed(tensors, metadata), metadata, spare, is_durable)
        for file in old[:-1]:  # one stays, for the next save to overwrite
            file.unlink(missing_ok=True)
        warm_start_path(self.folder).unlink(missing_ok=True)  # the state has its end
        self.is_saved = True

    def _catch_up(self, round: int) -> None:
        """Loads the newest state on disk up to this round, if it is newer than ours."""
        oldest = self.round
        if self.discriminators is not None:
            oldest += 1
        # Without discriminators a state of the same round counts too: another process
        # may have made them after an earlier phase.
        newer = [each for each in state_rounds(self.folder) if oldest <= each <= round]
        if not newer:
            return
        self.check_clients()
        newest = newer[-1]
        tensors, metadata = read_state(state_path(self.folder, newest))
        values = tensors.pop("answer", None)
        if tensors:  # none before the first gradient round
            self._load(tensors)
        self.round = newest
        self.digest = metadata[_DIGEST]
        self.common_digest = metadata.get(_COMMON_DIGEST)
        self.answer = None
        if values is not None:
            self.answer = self._stored(values, metadata.get(NEXT_KEY, ""))
        self.is_saved = True

    def _stored(self, values: Release, next_key: str) -> NodeRelease:
        """Returns a stored answer of the state's round."""
        if self._config.is_masked:
            packed_key = bytes.fromhex(next_key)
            return received_masked(values, self.round, self._node_id, packed_key)
        terms = terms_at(self._config, self.round)
        return received(
            values, self.round, self._node_id, terms.noise_std, terms.clip_bound
        )

    def _load(self, tensors: TensorDict) -> None:
        if self.discriminators is None:
            config = discriminators_config(self._config)
            self.discriminators = Discriminators(config, self._hosted)
        try:
            self.discriminators.load_state(tensors)
        except ValueError as error:
            raise UserError(f"{self.folder}: {error}") from error


def clients_hash(names: Sequence[str]) -> str:
    """Returns what a private state says of whose it is: a hash of names, in order.

    Privacy: reads private data; output private.
    """
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


def check_states(folder: Path, expected: str, who: str) -> None:
    """Refuses to go on from the newest state of a folder if it is of other clients.

    Args:
        folder: of the states.
        expected: `clients_hash` of the clients that the data have now.
        who: begins the error.

    Raises:
        UserError: the data name other owners now, or name them in another order.
    """
    rounds = state_rounds(folder)
    if not rounds:
        return
    metadata = read_metadata(state_path(folder, rounds[-1]))
    # States of earlier versions do not say whose they are.
    if metadata.get(CLIENTS, expected) != expected:
        raise UserError(
            f"{who}: the data have other clients than those that this run began with, "
            "or have them in another order; restore the data, or start a new run"
        )


def discriminators_config(config: ResolvedConfig) -> GsWganConfig:
    """Returns the settings of the phase whose clients keep discriminators.

    Raises:
        UserError: no phase of the run does.
    """
    phase = phase_with_discriminators(config)
    if phase is None:
        raise UserError(f"phases = {config.methods}: have no discriminators")
    return phase.config
