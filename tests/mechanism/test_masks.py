"""Pairwise masks: they cancel in the whole sum only, hide one part, fit one context."""

import dataclasses
import hmac

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from scipy import stats
from torch import Tensor

from fedgs.mechanism.integer_sums import IntegerSum, from_integers, sanitize_integers
from fedgs.mechanism.masks import (
    Announced,
    Attempt,
    MaskContext,
    MaskedSum,
    MaskingKey,
    mask,
    unmask,
)
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.sanitizer import PerSampleGradients, clip
from refusals import assert_refused

SHAPE = (4, 1, 14, 14)
ASKED = MaskContext("0" * 16, 3, "a" * 64, "node {}".format)


def node_sum(node: int, std: float = 1.0) -> IntegerSum:
    rng = torch.Generator().manual_seed(node)
    part = clip(PerSampleGradients(torch.randn(2, *SHAPE, generator=rng)), 1.0)
    return sanitize_integers([part], 2**16, std, NoiseStream(7, node, 3), 3, node)


def keys_of(*nodes: int) -> dict[int, MaskingKey]:
    return {node: MaskingKey.generate() for node in nodes}


def attempt_of(keys: dict[int, MaskingKey], number: int = 1) -> Attempt:
    return Attempt(number, {n: Announced(key.public, b"") for n, key in keys.items()})


def masked(
    node: int, keys: dict[int, MaskingKey], asked: MaskContext = ASKED, number: int = 1
) -> MaskedSum:
    return mask(node_sum(node), keys[node], attempt_of(keys, number), asked, b"")


def bits(values: Tensor) -> np.ndarray:
    return values.numpy().view(np.uint32)


@pytest.mark.parametrize("count", [2, 11])
def test_masks_cancel_bit_for_bit_in_the_sum_of_all_listed_nodes(count):
    keys = keys_of(*range(count))
    total = unmask([masked(node, keys) for node in keys])
    plain = torch.stack([node_sum(node).values for node in keys]).sum(0)
    assert torch.equal(total, plain % 2**32)
    assert torch.equal(from_integers(total, 2.0**16), plain.double() / 2**16)


def test_masked_sum_of_one_node_is_indistinguishable_from_uniform():
    """Without noise, and of zeros: whatever varies is the mask."""
    zeros, keys = node_sum(0), keys_of(0, 1)
    zeros.values = torch.zeros(128, 1, 14, 14, dtype=torch.int64)
    part = mask(zeros, keys[0], attempt_of(keys), ASKED, b"")
    assert_uniform(part.values)
    # Nor do two masks, of attempts with other keys, have to do with each other.
    again = keys_of(0, 1)
    other = mask(zeros, again[0], attempt_of(again), ASKED, b"")
    assert_uniform(part.values - other.values)


def assert_uniform(values: Tensor) -> None:
    """Bytes and single bits at p > 1e-6: one honest test in a million fails."""
    content = np.frombuffer(bits(values.to(torch.int32)).tobytes(), np.uint8)
    assert stats.chisquare(np.bincount(content, minlength=256)).pvalue > 1e-6
    ones = np.unpackbits(content.reshape(-1, 4), axis=1).sum(0)
    for count in ones:
        assert stats.binomtest(int(count), len(content) // 4).pvalue > 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "1" * 16},
        {"round": 4},
        {"digest": "b" * 64},
        {"name_of": "silo {}".format},
        {},  # another attempt
    ],
)
def test_masks_of_another_context_do_not_cancel(changes):
    keys, other = keys_of(0, 1), dataclasses.replace(ASKED, **changes)
    second = masked(1, keys, other, number=1 if changes else 2)
    assert_uniform(unmask([masked(0, keys), second]))


def test_masks_of_another_key_list_or_without_a_listed_node_do_not_cancel():
    keys = keys_of(0, 1, 2)
    parts = [masked(node, keys) for node in keys]
    assert_uniform(unmask(parts[:2]))
    listed = attempt_of({node: keys[node] for node in (0, 1)})
    second = mask(node_sum(1), keys[1], listed, ASKED, b"")
    assert_uniform(unmask([parts[0], second, parts[2]]))


def test_masks_of_two_nodes_that_saw_two_keys_of_a_third_one_do_not_cancel():
    """The third one is the server's: it can take off every mask but their own."""
    keys, other = keys_of(0, 1, 2), MaskingKey.generate()
    lists = attempt_of(keys), attempt_of({**keys, 2: other})
    rest = torch.zeros(SHAPE, dtype=torch.int64)
    for node, (attempt, own) in enumerate(zip(lists, (keys[2], other), strict=True)):
        rest += mask(node_sum(node), keys[node], attempt, ASKED, b"").values
        info = ASKED.info(attempt, node, 2)
        shared = own.pair_mask(keys[node].public, info, rest.numel())
        rest -= torch.from_numpy(shared.astype(np.int64)).view(SHAPE)
    assert_uniform(rest)


def test_pair_mask_is_that_of_the_standards():
    """Written a second time: RFC 5869 by hmac, RFC 8439 by its authenticated form."""
    own, other = MaskingKey.generate(), MaskingKey.generate()
    peer = X25519PublicKey.from_public_bytes(other.public)
    secret = X25519PrivateKey.from_private_bytes(own.secret()).exchange(peer)
    extracted = hmac.digest(bytes(32), secret, "sha256")
    key = hmac.digest(extracted, b"info\x01", "sha256")
    # The authenticated form encrypts from the second block of 16 numbers on.
    stream = ChaCha20Poly1305(key).encrypt(bytes(12), bytes(64), None)[:64]
    mask = own.pair_mask(other.public, b"info", 32)
    assert np.array_equal(mask[16:], np.frombuffer(stream, "<u4"))


STRANGER, KEYS = MaskingKey.generate(), keys_of(0, 1)
SMALL = {0: Announced(KEYS[0].public, b""), 1: Announced(bytes(32), b"")}


@pytest.mark.parametrize(
    ("node", "key", "attempt", "message"),
    [
        (0, STRANGER, attempt_of(KEYS), "another key"),
        (2, KEYS[0], attempt_of(KEYS), "another key"),
        (0, KEYS[0], attempt_of({0: KEYS[0]}), "no other node"),
        (0, KEYS[0], Attempt(1, SMALL), "no secret"),  # of small order: all know it
    ],
)
def test_node_masks_nothing_under_keys_that_hide_nothing(node, key, attempt, message):
    assert_refused(message, mask, node_sum(node), key, attempt, ASKED, b"")


def test_key_lists_travel_unchanged():
    keys = keys_of(0, 3, 7)
    signed = {n: Announced(key.public, b"s" * n) for n, key in keys.items()}
    sent = Attempt(5, signed)
    assert Attempt.unpack(5, sent.packed, 8) == sent
    assert Attempt.unpack(6, sent.packed, 8).digest != sent.digest


def _entry(node: int, content: bytes) -> bytes:
    return node.to_bytes(4) + bytes([len(content)]) + content


TWO = _entry(0, b"a" * 32) + _entry(1, b"b" * 32)
WRONG_LISTS = {
    "no bytes": "text",
    "empty": b"",
    "one node": _entry(0, b"a" * 32),
    "a node twice": TWO + _entry(1, b"c" * 32),
    "an unknown node": TWO + _entry(2, b"c" * 32),
    "a short key": TWO[:-6] + _entry(1, b"c" * 31),
    "a long signature": _entry(0, b"a" * 32) + _entry(1, b"b" * 161),
    "torn": TWO[:-1],
}


@pytest.mark.parametrize("what", WRONG_LISTS)
def test_malformed_key_list_is_refused(what):
    assert_refused("refused", Attempt.unpack, 1, WRONG_LISTS[what], 2)


PRIME = 2**255 - 19
# All u coordinates of points of order 2, 4 and 8, on the curve and on its twist.
# From https://cr.yp.to/ecdh.html, "How do I validate Curve25519 public keys?".
SMALL_ORDER = [
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    PRIME - 1,
]
# The same points, and an honest one, as numbers that X25519 reads like the first.
HONEST = 9  # the base point
OTHER_FORMS = [PRIME, PRIME + 1, 2**255, 2**255 + 1, 2 * PRIME - 1, HONEST + 2**255]


@pytest.mark.parametrize("number", SMALL_ORDER + OTHER_FORMS)
def test_key_that_hides_nothing_or_has_another_form_is_refused_by_name(number):
    public = number.to_bytes(32, "little")
    own = KEYS[0].public
    for keys in ({0: own, 1: public}, {0: public, 1: own}):
        listed = Attempt(1, {n: Announced(key, b"") for n, key in keys.items()})
        (hostile,) = [node for node, key in keys.items() if key == public]
        words = f"^the masking key of node {hostile} is none .*; ask who runs "
        assert_refused(words, listed.check, "node {}".format)


def test_key_of_two_nodes_is_refused_by_both_names_and_honest_keys_pass():
    keys = keys_of(*range(50))
    attempt_of(keys).check("node {}".format)
    listed = attempt_of({**keys, 33: keys[5]})
    words = "^the masking key of node 33 is that of node 5 too.*; ask who runs "
    assert_refused(words, listed.check, "node {}".format)


def test_nothing_else_makes_a_masked_sum():
    with pytest.raises(TypeError):
        MaskedSum(torch.zeros(1, dtype=torch.int32), 1, 0, b"", object())
