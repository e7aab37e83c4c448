"""Whose masking keys a deployed node takes: its peers' registered keys, pinned by it.

A server that could invent nodes would be the partner of every mask. So a node takes a
key only with the signature of a peer whose public key lies in a folder of its own, as
NAME.pub, and only in a list of at least as many nodes as it was told. The files come
out of band (docs/deployment.md), never from the server.

The signature is ECDSA with SHA-384 by the key that the node is registered with at the
server, of the JSON of [label, run, name, public key]. It needs no round: a node uses
each of its keys once, so an old key of a peer gives a mask that does not cancel, and
tells nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384

from fedgs.deployment import private_key, public_key
from fedgs.errors import UserError
from fedgs.mechanism.masks import LEAST_NODES, Announced, MaskingKey
from fedgs.privacy.client_limits import ClientRefused

# What Flower has the same key sign can then never pass for a masking key.
_LABEL = "fedgs masking key, version 1"
_ECDSA = ec.ECDSA(SHA384())


@dataclass(frozen=True)
class Peers:
    """A node's own registered key, and those that it trusts to be other nodes'.

    Attributes:
        name: the name of the node.
        key: its own.
        pinned: name -> public key of every other node.
        least: nodes that a list must have, this one included.
    """

    name: str
    key: ec.EllipticCurvePrivateKey
    pinned: Mapping[str, ec.EllipticCurvePublicKey]
    least: int

    @classmethod
    def read(cls, name: str, key: Path, folder: Path, least: int | None) -> "Peers":
        """Reads the node's own key, and NAME.pub of each peer in a folder.

        Args:
            name: the name of the node, whose own NAME.pub is passed over.
            key: file of its private key.
            folder: the folder of the public keys.
            least: as in `Peers`; None: all of them and this node.

        Raises:
            UserError: a file is missing or is no such key, or `least` cannot be.
        """
        own = private_key(f"key = {key}", key)
        pinned: dict[str, ec.EllipticCurvePublicKey] = {}
        for file in sorted(folder.glob("*.pub")):
            peer = file.stem
            if peer != name:
                pinned[peer] = public_key(f"peers: {file}", file)
        most = len(pinned) + 1
        if most < LEAST_NODES:
            raise UserError(
                f"peers = {folder}: it has no public key of another client; put their "
                "NAME.pub there"
            )
        # One key under two names would count as two nodes in `least`.
        points: set[tuple[int, int]] = set()
        all_keys = [own.public_key(), *pinned.values()]
        for public in all_keys:
            point = public.public_numbers()
            points.add((point.x, point.y))
        if len(points) < most:
            raise UserError(
                f"peers = {folder}: two clients have the same key; ask each of them "
                "for its own NAME.pub"
            )
        if least is None:
            least = most
        if not LEAST_NODES <= least <= most:
            raise UserError(
                f"min_peers = {least}: peers = {folder} and this client are {most} in "
                f"all; give {LEAST_NODES} to {most}"
            )
        return cls(name, own, pinned, least)

    def sign(self, key: MaskingKey, run: str) -> Announced:
        """Returns a public key of this node, signed."""
        text = _signed_text(run, self.name, key.public)
        signature = self.key.sign(text, _ECDSA)
        return Announced(key.public, signature)

    def has_signed(self, announced: Announced, run: str) -> bool:
        """Tells whether this node's own key has signed a masking key for a run."""
        return is_signed(self.key.public_key(), run, self.name, announced)

    def check_names(self, names: tuple[str, ...]) -> None:
        """Refuses a run with nodes that are not pinned, or too few of them.

        Raises:
            ClientRefused: names the setting and the remedy.
        """
        known = {*self.pinned, self.name}
        unknown = set(names) - known
        if unknown:
            who = ", ".join(sorted(unknown))
            raise ClientRefused(
                "peers",
                f"peers: {who} takes part in the run, and this client has no public "
                "key of that name; put NAME.pub into the folder, if you know who it is",
            )
        if len(names) < self.least:
            raise ClientRefused(
                "min_peers",
                f"min_peers = {self.least}: the run has only {len(names)} clients; "
                "start this client with a smaller --min-peers, or do not take part",
            )

    def check(self, keys: Mapping[str, Announced], run: str) -> None:
        """Refuses a list of keys with one that no pinned peer has signed.

        Args:
            keys: by the nodes' names, this node's among them.
            run: the run of the server.

        Raises:
            ClientRefused: names the setting.
        """
        if len(keys) < self.least:
            problem = (
                f"min_peers = {self.least}: only {len(keys)} clients would answer this "
                "round together; wait for the others, or give a smaller --min-peers"
            )
            raise ClientRefused("min_peers", problem)
        # Its own, too: a server could list this node under a key of the server's.
        known = {**self.pinned, self.name: self.key.public_key()}
        for name, announced in keys.items():
            peer_key = known.get(name)
            if peer_key is None or not is_signed(peer_key, run, name, announced):
                problem = (
                    f"peers: the masking key of {name} is not signed with the key that "
                    f"this client knows; ask {name} for its {name}.pub, and who runs "
                    "the server"
                )
                raise ClientRefused("peers", problem)


def is_signed(
    key: ec.EllipticCurvePublicKey,
    run: str,
    name: str,
    announced: Announced,
) -> bool:
    """Tells whether a node's registered key has signed its masking key for a run."""
    try:
        text = _signed_text(run, name, announced.public)
        key.verify(announced.signature, text, _ECDSA)
    except InvalidSignature:
        return False
    return True


def _signed_text(run: str, name: str, public: bytes) -> bytes:
    # A list in JSON has one reading: no name can run over into another part.
    parts = [_LABEL, run, name, public.hex()]
    text = json.dumps(parts)
    return text.encode()
