"""Pairwise masks: the server learns the sum of the listed nodes and no node's own.

In one attempt of a round every listed node i sends, modulo 2^32 and coordinate by
coordinate,

    y_i = x_i + sum_{j > i} m_ij - sum_{j < i} m_ij          x_i an `IntegerSum`

so that the masks cancel in the sum of all y_i, and in no smaller one. The mask of a
pair is a ChaCha20 keystream (nonce 0, for its key is used once), read as little-endian
uint32:

    m_ij = ChaCha20(HKDF-SHA256(X25519(i, j), info))
    info = JSON of [label, run, round, attempt, request, key list, name_i, name_j]

where request is the SHA-256 of the run's settings and of what is asked, key list that
of all keys. The X25519 keys are drawn anew for each attempt from the operating system,
signed by who made them (`fedgs.mechanism.peers`), and mask one sum: the clients' own
durable count refuses a second one (`fedgs.privacy.client_ledger`). There are no shares
of a key: where one node is missing, nobody can open the sum, and the attempt is void.

Source:
    Bonawitz et al., "Practical secure aggregation for privacy-preserving machine
    learning", CCS 2017, section 4 (masks), without its recovery of drop-outs.
    RFC 7748 (X25519), RFC 5869 (HKDF), RFC 8439 (ChaCha20).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from fedgs.errors import UserError, malformed
from fedgs.mechanism.integer_sums import IntegerSum

LEAST_NODES = 2  # of a list: one alone has nobody to share a mask with
KEY_BYTES = 32  # of X25519
MOST_SIGNATURE = 128  # ECDSA on P-384 takes at most 104
_LABEL = "fedgs masks, version 1"
_NODE_BYTES = 4
_PRIME = 2**255 - 19  # of the field of X25519
_TRIAL_KEY = X25519PrivateKey.generate()  # tries keys, and masks nothing
_MADE_HERE = object()
Uint32s = npt.NDArray[np.uint32]


class Announced(NamedTuple):
    """A node's public key for its next attempt.

    Attributes:
        public: X25519, 32 bytes.
        signature: the signature of the node's registered key; empty in a simulation.
    """

    public: bytes
    signature: bytes

    def pack(self) -> bytes:
        """Returns both as bytes."""
        return self.public + self.signature

    def check(self, title: str) -> None:
        """Refuses a key whose masks may hide nothing, or that is not in its one form.

        Privacy: with a point of small order the masks would be known to everybody.

        Args:
            title: what the node that announced it is called.

        Raises:
            UserError: names the node.
        """
        try:
            point = X25519PublicKey.from_public_bytes(self.public)
            # Raises for zeros, which points of small order give with any private key,
            # and no other points do.
            _TRIAL_KEY.exchange(point)
        except ValueError:
            is_strong = False
        else:
            is_strong = True
        # X25519 also reads larger numbers, so that one key could look like two.
        is_one_form = int.from_bytes(self.public, "little") < _PRIME
        if not (is_strong and is_one_form):
            raise UserError(
                f"the masking key of {title} is none that fedgs draws, and might hide "
                f"nothing, so it is not taken; ask who runs {title} which program made "
                "it"
            )

    @classmethod
    def unpack(cls, content: object) -> Self:
        """Reads what `pack` wrote; neither key nor signature is checked.

        Raises:
            UserError: of another type or size.
        """
        if type(content) is not bytes:
            raise malformed("the message has no masking key")
        if not KEY_BYTES <= len(content) <= KEY_BYTES + MOST_SIGNATURE:
            raise malformed("the message has a masking key of a wrong size")
        return cls(content[:KEY_BYTES], content[KEY_BYTES:])


@dataclass(frozen=True)
class Attempt:
    """Which nodes' sums are added up, and the keys of their masks.

    Attributes:
        number: the number of the attempt at its round, from 1.
        keys: node -> what it announced, in increasing order of nodes.
    """

    number: int
    keys: Mapping[int, Announced]

    @cached_property
    def packed(self) -> bytes:
        """The key list as bytes: node, length of what follows, announced."""
        parts: list[bytes] = []
        for node, announced in self.keys.items():
            content = announced.pack()
            # With a length, because signatures of ECDSA (DER) differ in size.
            length = bytes([len(content)])
            parts += [node.to_bytes(_NODE_BYTES), length, content]
        return b"".join(parts)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the number and the key list."""
        return hashlib.sha256(b"%d:" % self.number + self.packed).hexdigest()

    def check(self, title_of: Callable[[int], str]) -> None:
        """Refuses a list with a key as `Announced.check` refuses, or with a key twice.

        Privacy: of two nodes with one key, each could take off all the other one's
            masks.

        Args:
            title_of: node -> what it is called.

        Raises:
            UserError: names the node, or both.
        """
        owners: dict[bytes, int] = {}
        for node, announced in self.keys.items():
            announced.check(title_of(node))
            owner = owners.setdefault(announced.public, node)
            if owner != node:
                raise repeated_key(title_of(node), title_of(owner))

    @classmethod
    def unpack(cls, number: int, content: object, num_nodes: int) -> Self:
        """Reads a number and what `packed` has; the keys are not checked.

        Raises:
            UserError: malformed, or of fewer than two nodes.
        """
        if type(content) is not bytes:
            raise malformed("the request has no list of masking keys")
        keys: dict[int, Announced] = {}
        last = -1
        for node, announced in _entries(content):
            # Increasing: no node twice, and one form, whose hash is in every mask.
            if not last < node < num_nodes:
                raise malformed(
                    "the list of masking keys names a node that is not asked"
                )
            keys[node] = Announced.unpack(announced)
            last = node
        if len(keys) < LEAST_NODES:
            raise malformed(
                f"the list of masking keys has fewer than {LEAST_NODES} nodes"
            )
        return cls(number, keys)


def repeated_key(title: str, other: str) -> UserError:
    """Returns the refusal of a key that two nodes have announced.

    Args:
        title: what the node is called whose key is refused.
        other: what the other one is called.
    """
    return UserError(
        f"the masking key of {title} is that of {other} too, and every node draws its "
        f"own, so it is not taken; ask who runs {title} and who runs {other} which "
        "program made it"
    )


def _entries(content: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start < len(content):
        begin = start + _NODE_BYTES + 1
        head = content[start:begin]  # the node, and the length of what follows
        end = begin + head[-1]
        # A cut-off head makes both ends lie beyond the content.
        if begin > len(content) or end > len(content):
            raise malformed("the list of masking keys cannot be decoded")
        node = int.from_bytes(head[:-1])
        yield node, content[begin:end]
        start = end


@dataclass(frozen=True)
class MaskContext:
    """What a sum is asked for: all that a mask depends on besides the keys.

    Two sums that are asked for differently have other masks, even under equal keys.

    Attributes:
        run: the run of the server; empty in a simulation.
        round: the number of the round.
        digest: hash of what all nodes are told: the run's settings, the request.
        name_of: node -> its public name.
    """

    run: str
    round: int
    digest: str
    name_of: Callable[[int], str]

    def info(self, attempt: Attempt, low: int, high: int) -> bytes:
        """Returns the context of a pair's mask, the same for both of them."""
        content = [
            _LABEL,
            self.run,
            self.round,
            attempt.number,
            self.digest,
            attempt.digest,
            self.name_of(low),
            self.name_of(high),
        ]
        return json.dumps(content).encode()


class MaskingKey:
    """One node's ephemeral key: it masks one sum.

    Privacy: private; who has it and the other nodes' public keys can unmask the sum.
    """

    def __init__(self, private: X25519PrivateKey) -> None:
        """Is called by `generate` and `read`."""
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        """Draws a key from the operating system's entropy."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def read(cls, content: bytes) -> Self:
        """Returns the key that `secret` wrote."""
        return cls(X25519PrivateKey.from_private_bytes(content))

    def secret(self) -> bytes:
        """Returns the private key, 32 bytes; it must not leave the node."""
        return self._private.private_bytes_raw()

    def pair_mask(self, public: bytes, info: bytes, size: int) -> Uint32s:
        """Returns the mask of a pair, the same from both sides.

        Args:
            public: the other one's key.
            info: what `MaskContext.info` returns.
            size: numbers in it.

        Raises:
            UserError: the other key is no point that gives a secret.
        """
        try:
            other = X25519PublicKey.from_public_bytes(public)
            secret = self._private.exchange(other)
        except ValueError:  # of small order: the secret would be known to everybody
            raise malformed("a masking key gives no secret") from None
        # The context is hashed in, so that no two sums share a keystream.
        key = HKDF(SHA256(), 32, salt=None, info=info).derive(secret)
        # These 16 bytes are the block counter and the nonce in one.
        stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        return np.frombuffer(stream.update(bytes(4 * size)), "<u4")


class MaskedSum:
    """One node's masked sum of one attempt: all that may leave it in such a run.

    Attributes:
        values: shape (B, C, k, k), int32: the bits of numbers modulo 2^32.
        round, node_id: as in `IntegerSum`.
        next_key: what the node announces for its next attempt, packed.
    """

    def __init__(
        self,
        values: Tensor,
        round: int,
        node_id: int,
        next_key: bytes,
        made_by: Any,
    ) -> None:
        """Is called by `mask` and `received_masked` only."""
        if made_by is not _MADE_HERE:
            raise TypeError("MaskedSum is made by fedgs.mechanism.masks only")
        self.values = values
        self.round = round
        self.node_id = node_id
        self.next_key = next_key


def mask(
    node_sum: IntegerSum,
    key: MaskingKey,
    attempt: Attempt,
    context: MaskContext,
    next_key: bytes,
) -> MaskedSum:
    """Adds the masks that a node shares with all other listed ones.

    Privacy: output indistinguishable from uniform for whoever knows neither this node's
        key nor any other one that it was masked with; the sum over all listed nodes is
        that of the `IntegerSum`s.

    Args:
        node_sum: the sum of the node.
        key: the node's own; never used again, which the caller sees to.
        attempt: the listed nodes, this one among them under this very key.
        context: what the sum is asked for.
        next_key: as in `MaskedSum`.

    Raises:
        UserError: the node is not listed under this key, or is alone.
    """
    own = node_sum.node_id
    listed = attempt.keys.get(own)
    if listed is None or listed.public != key.public:
        raise UserError(
            f"node {own}: the list of masking keys has another key for it than its "
            "own, so it refuses; ask who runs the server"
        )
    if len(attempt.keys) < LEAST_NODES:
        raise UserError(
            f"node {own}: no other node is in the list of masking keys, so its sum "
            "would be in the open and it refuses; ask at least two nodes in a round"
        )
    shape = tuple(node_sum.values.shape)
    total = node_sum.values.numpy().astype(np.uint32).ravel()  # modulo 2^32
    for other, announced in attempt.keys.items():
        if other == own:
            continue
        # Both of the pair name it alike.
        first = min(own, other)
        second = max(own, other)
        info = context.info(attempt, first, second)
        shared = key.pair_mask(announced.public, info, total.size)
        # One of the pair adds what the other one takes off: it cancels in the sum.
        if own < other:
            total += shared
        else:
            total -= shared
    signed = total.view(np.int32)
    values = torch.from_numpy(signed.reshape(shape))
    return MaskedSum(values, node_sum.round, own, next_key, _MADE_HERE)


def received_masked(
    values: Tensor,
    round: int,
    node_id: int,
    next_key: bytes,
) -> MaskedSum:
    """Wraps a masked sum that arrived in a message, or that was stored.

    Privacy: of masked values only, as `fedgs.mechanism.sanitizer.received`.
    """
    return MaskedSum(values, round, node_id, next_key, _MADE_HERE)


def unmask(answers: Sequence[MaskedSum]) -> Tensor:
    """Returns the sum of all listed nodes' integers modulo 2^32, int64.

    Privacy: post-processing of DP output where every listed node is there; otherwise
        the result is noise without meaning.

    Args:
        answers: the answers of every listed node, once.
    """
    parts = [answer.values.numpy().view(np.uint32) for answer in answers]
    total = np.add.reduce(parts, dtype=np.uint32)
    return torch.from_numpy(total.astype(np.int64))
