"""What one node masks its sums with: its keys, and what it announces of them.

With secure aggregation a round may be asked in several attempts, of different nodes.
Each is a release of its own, with fresh noise, masked under a key that this node draws
for it alone. The key lies in one file, which each new key overwrites.
"""

import hashlib
import json
import os
from pathlib import Path

from fedgs.config.method_settings import settings_with
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.files import make_folder
from fedgs.mechanism.integer_sums import IntegerSum
from fedgs.mechanism.masks import (
    KEY_BYTES,
    Announced,
    Attempt,
    MaskContext,
    MaskedSum,
    MaskingKey,
    mask,
)
from fedgs.mechanism.peers import Peers
from fedgs.methods.base import Request
from fedgs.privacy.client_limits import ClientRefused
from fedgs.round.messages import MaskedRequest


class NodeMasks:
    """The masking keys of one node; each masks one sum."""

    def __init__(
        self,
        config: ResolvedConfig,
        node_id: int,
        folder: Path,
        run: str,
        peers: Peers | None,
    ) -> None:
        """Draws no key yet.

        Args:
            config: the resolved configuration.
            node_id: the node's index.
            folder: the folder of the key, in the run's private folder.
            run: names the run in what is signed and masked; empty in a simulation.
            peers: whose keys are taken; None in a simulation, where all are.
        """
        self._config = config
        self._node_id = node_id
        self._path = folder / "masking.key"
        self._run = run
        self._peers = peers

    def stored_key(self) -> tuple[MaskingKey, Announced] | None:
        """Returns the key that was announced last; None if there is none.

        What is not stored whole is none, so that another key is drawn in its place.
        """
        try:
            content = self._path.read_bytes()
            key = MaskingKey.read(content[:KEY_BYTES])
            announced = Announced.unpack(content[KEY_BYTES:])
        except (OSError, ValueError):  # UserError is one
            return None
        # A crash in `new_key` may have left the end of the key before.
        if self._peers is None:
            is_whole = announced.signature == b""
        else:
            is_whole = self._peers.has_signed(announced, self._run)
        if announced.public != key.public or not is_whole:
            return None
        return key, announced

    def new_key(self) -> Announced:
        """Draws the next key, over the last one, and returns what is announced."""
        key = MaskingKey.generate()
        announced = Announced(key.public, b"")
        if self._peers is not None:
            announced = self._peers.sign(key, self._run)
        make_folder(self._path.parent)
        # In place, because another file would leave the last key on the disk. A crash
        # can only tear a key that masked nothing, which `stored_key` passes over.
        mode = "r+b" if self._path.exists() else "xb"
        with open(self._path, mode) as file:
            file.write(key.secret() + announced.pack())
            file.truncate()
            # A power cut must not bring back a key whose sum has left.
            os.fsync(file.fileno())
        return announced

    def key_for(self, attempt: Attempt, least_nodes: int) -> MaskingKey:
        """Returns this node's key of an attempt, after a look at all of its list.

        Args:
            attempt: the listed nodes and their keys.
            least_nodes: how many of them the clients ask for.

        Raises:
            ClientRefused: a key of nobody that is pinned, or too few of them.
            UserError: a key hides nothing or is there twice, or this node's last key
                is not in the list; nothing is sent.
        """
        if len(attempt.keys) < least_nodes:
            raise ClientRefused(
                "min_honest_nodes",
                f"min_honest_nodes = {least_nodes}: only {len(attempt.keys)} nodes "
                "would answer this round together; wait for the others, or give a "
                "smaller limit",
            )
        # A server could list keys of its own in the place of the other nodes'.
        if self._peers is not None:
            names = self._config.node_names
            keys = {names[node]: each for node, each in attempt.keys.items()}
            self._peers.check(keys, self._run)
        # A server could let such keys pass, and this node would count in vain.
        attempt.check(self._config.node_title)
        listed = attempt.keys.get(self._node_id)
        stored = self.stored_key()
        is_own = False
        if stored is not None and listed is not None:
            key, _ = stored
            is_own = listed.public == key.public
        if stored is None or not is_own:
            raise UserError(
                f"node {self._node_id}: the list of masking keys has another key for "
                "it than its last one, so it refuses; resume the run, and ask who runs "
                "the server if it happens again"
            )
        return stored[0]

    def mask(
        self,
        node_sum: object,
        key: MaskingKey,
        sent: MaskedRequest,
        may_release_again: bool,
    ) -> MaskedSum:
        """Returns a sum under masks; its key is gone from the disk by then.

        Args:
            node_sum: the sum of the node, an `IntegerSum`.
            key: the key that `key_for` returned.
            sent: what the sum answers, and the listed nodes with their keys.
            may_release_again: whether the clients' limits have room for one more
                release. Without it no next key is announced.

        Raises:
            TypeError: another sum than one of integers.
        """
        if not isinstance(node_sum, IntegerSum):
            raise TypeError("only an IntegerSum can be masked")
        # Before the sum is masked, so that the last key is gone when the sum leaves.
        announced = self.new_key()
        next_key = b""
        if may_release_again:
            next_key = announced.pack()
        context = self._context(sent.request)
        return mask(node_sum, key, sent.attempt, context, next_key)

    def _context(self, request: Request) -> MaskContext:
        """Returns what all listed nodes must have been told for their masks to cancel.

        The settings too: a server that asks the others for less noise than this node
        counts would open a sum with less.
        """
        own = settings_with("of_client")
        flat = self._config.to_flat()
        settings = {name: value for name, value in flat.items() if name not in own}
        text = json.dumps([settings, request.common_digest()])
        digest = hashlib.sha256(text.encode()).hexdigest()
        return MaskContext(self._run, request.round, digest, self._config.node_title)
