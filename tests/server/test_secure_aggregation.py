"""Secure aggregation in Flower: the same sum, drop-outs, and what is refused."""

import dataclasses
import math
import os
import shutil

import pytest
import torch
from flwr.app import Message

from fedgs.data.load import load_data
from fedgs.mechanism.masks import KEY_BYTES, Announced, Attempt, MaskedSum, MaskingKey
from fedgs.mechanism.peers import Peers
from fedgs.mechanism.sanitizer import received
from fedgs.methods import new_state
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.round.messages import (
    MaskedRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from fedgs.round.node import Node
from fedgs.round.node_masks import NodeMasks
from fedgs.round.run import BudgetSpent, RunStopped
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from runs import attempts, events, limit_clients, train
from server.launch.certs import make_certificates
from simulated_grid import MODES, FakeGrid, product, spoil_at, start
from tiny import changed, next_request

MASKED = {"secure_aggregation": True, "noise_multiplier": 0.5}


def test_cheap_sums_under_masks_give_the_bits_of_the_local_engine(create):
    """A number takes the four bytes of a float32; each node is asked for a key once."""
    settings = MODES["with releases"] | MASKED | {"message_precision": "compact"}
    flower = create("flower", **settings)
    alone = create("local", **settings, engine="local")
    grid = FakeGrid(flower.config.num_nodes)
    start(flower, grid)
    train(alone)
    assert product(flower) == product(alone)
    assert events(flower) == events(alone)
    announced = [who for kind, who, _ in grid.replies if kind == "query.key"]
    assert sorted(announced) == list(range(flower.config.num_nodes))
    for kind, _, reply in grid.replies:
        record = reply.content["fedgs"]
        if kind == "train" and not record["is_empty"]:
            numbers = math.prod(flower.config.terms(record["round"]).shape)
            assert len(record["tensors"]) == 4 * numbers
            assert len(record["next_key"]) == 32  # unsigned in a simulation


# ------------------------------------------------------------------ drop-outs


def drop(request: Message, reply: Message) -> None:
    """Loses a reply."""


def test_too_few_nodes_end_the_run_and_their_attempt_counts(create):
    folder = create("run", **MODES["moments"], **MASKED)
    with pytest.raises(RunStopped, match=r"round 2: 2 of 3 nodes .* requires 3"):
        start(folder, FakeGrid(3, spoil_at({(1, 2): drop})))
    assert attempts(folder) == [(1, 1), (2, 1)]
    start(RunFolder.open(folder.path), FakeGrid(3))
    assert attempts(folder) == [(1, 1), (2, 1), (2, 2), (3, 1)]


def test_clients_whose_limit_is_reached_say_so_before_anybody_releases_in_vain(
    create, monkeypatch
):
    # Room for two and a half releases of share 1, which cost 1 / sigma^2 each.
    limit = epsilon_from_mu((2.5 / 0.5**2) ** 0.5, 1e-5)
    mode = MODES["moments"] | {"phases": "means:1,scatter:1,moments:1"}
    folder = create("run", **mode, **MASKED)
    limit_clients(monkeypatch, limit)
    reason = "refused the request: its own limit client_epsilon forbids it"
    with pytest.raises(RunStopped, match=rf"before round 3: 0 nodes .*\n.*{reason}"):
        start(folder, FakeGrid(3))
    assert attempts(folder) == [(1, 1), (2, 1)]


def test_the_budget_is_asked_before_a_repeat_with_its_smaller_noise(create):
    """Room for rounds 1 and 2, and for an attempt of three nodes, not one of two."""
    # A release of share w costs w (2 C / noise)^2 = w / (n sigma^2), with replace-one.
    weights, nodes, sigma = (0.5, 1.0, 1.0), 3, 0.5
    cost = (weights[0] + 2.1 * weights[1]) / (nodes * sigma**2)
    target = {"target_epsilon": epsilon_from_mu(cost**0.5, 1e-5)}
    folder = create("run", **MODES["moments"], **MASKED | target, min_answers=2)
    with pytest.raises(BudgetSpent, match="before round 2"):
        start(folder, FakeGrid(3, spoil_at({(1, 2): drop})))
    assert attempts(folder) == [(1, 1), (2, 1)]


# ------------------------------------------------------------------ one node


@pytest.fixture
def asked(create):
    """A node of a masked run, its request for round 1, and another listed key."""
    folder = create("run", **MODES["moments"], **MASKED)
    own = Node(folder.config, 0, load_data(folder.config), folder.private)
    other = Announced(MaskingKey.generate().public, b"")
    request = next_request(folder.config, new_state(folder.config))

    def ask(number: int = 1):
        keys = {0: Announced.unpack(own.announce(1)), 1: other}
        return MaskedRequest(request, Attempt(number, keys))

    return own, ask


def test_a_second_release_under_one_key_is_refused_whatever_is_restored(asked):
    """A copy of the whole state brings the key back; the count has seen it."""
    own, ask = asked
    request = ask()
    copy = own.state.folder.with_name("copy")
    shutil.copytree(own.state.folder, copy)
    first = own.answer(request)
    own.save(0)
    assert isinstance(first, MaskedSum)
    again = Node(own.config, 0, own.data, own.state.folder.parent)
    assert again.answer(request).values.equal(first.values)  # the stored bytes
    for path in own.state.folder.glob("round-*"):
        path.unlink()
    shutil.copy(copy / "masking.key", own.state.folder)
    restored = Node(own.config, 0, own.data, own.state.folder.parent)
    assert_refused("refuses a second one", restored.answer, request)
    assert restored.announce(1) != request.attempt.keys[0].pack()  # a new one instead


def test_the_key_of_a_sum_is_overwritten_on_the_disk_before_the_sum_is_given(
    asked, monkeypatch
):
    own, ask = asked
    request = ask()
    path, durable, fsync = own.state.folder / "masking.key", [], os.fsync
    used = path.read_bytes()

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            durable.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", recorded)
    own.answer(request)
    assert durable == [path.read_bytes()]
    assert used[:KEY_BYTES] not in durable[0]


def test_a_stored_answer_is_never_sent_under_another_key_list(asked):
    own, ask = asked
    first = own.answer(ask())
    second = own.answer(ask(2))
    assert not second.values.equal(first.values)
    counted_twice = 2 * 0.5 / 0.5**2
    assert own.limits.count.mu_squared[0] == pytest.approx(counted_twice)


def test_another_attempt_that_asks_something_else_is_refused(asked):
    own, ask = asked
    own.answer(ask())
    own.save(0)
    again = Node(own.config, 0, own.data, own.state.folder.parent)
    again_asked = ask(2)
    content = changed(again_asked.request, centre=torch.ones(1))
    other = dataclasses.replace(again_asked, request=content)
    for node in (own, again):
        assert_refused("answered round 1", node.answer, other)


def test_a_node_without_its_key_in_the_list_or_without_a_list_releases_nothing(asked):
    own, ask = asked
    stale = ask()
    assert_refused("secure_aggregation = true", own.answer, stale.request)
    own.answer(stale)
    own.state.digest = ""  # as if it had forgotten
    assert_refused("than its last one", own.answer, stale)
    assert own.limits.count.mu_squared[0] == pytest.approx(0.5 / 0.5**2)


def _with_a_tail(content: bytes) -> bytes:
    """The new key is shorter than the one before: its signature was."""
    return content + b"!"


def _of_two_keys(content: bytes) -> bytes:
    return MaskingKey.generate().secret() + content[KEY_BYTES:]


TORN = {
    "with a tail": _with_a_tail,
    "of two keys": _of_two_keys,
    "cut off": lambda content: content[: 2 * KEY_BYTES - 1],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("how", TORN)
def test_a_key_that_is_not_stored_whole_is_drawn_anew(create, tmp_path, how, is_signed):
    folder = create("run", **MODES["moments"], **MASKED)
    peers = None
    if is_signed:
        make_certificates(tmp_path / "keys", [], ["a", "b"])
        keys = tmp_path / "keys" / "clients"
        peers = Peers.read("a", keys / "a.key", keys, None)
    masks = NodeMasks(folder.config, 0, tmp_path / "node", "0" * 16, peers)
    announced = masks.new_key()
    key, again = masks.stored_key()
    assert (key.public, again) == (announced.public, announced)
    path = tmp_path / "node" / "masking.key"
    whole = path.read_bytes()
    path.write_bytes(TORN[how](whole))
    assert masks.stored_key() is None
    other = masks.new_key()
    assert masks.stored_key()[1] == other != announced


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_node_looks_at_all_listed_keys_before_it_counts_anything(asked, is_repeated):
    """The server may be the one that let them pass."""
    own, ask = asked
    request = ask()
    announced = request.attempt.keys[0]
    hostile = announced if is_repeated else Announced(bytes(32), b"")
    attempt = Attempt(1, {**request.attempt.keys, 1: hostile})
    stored = (own.state.folder / "masking.key").read_bytes()
    refused = dataclasses.replace(request, attempt=attempt)
    assert_refused("the masking key of node 1 is ", own.answer, refused)
    assert own.limits.count.mu_squared[0] == 0
    assert (own.state.folder / "masking.key").read_bytes() == stored
    own.answer(request)  # its key is as good as before


# ------------------------------------------------------------------ messages


@pytest.mark.parametrize("precision", ["exact", "compact"])
def test_only_a_masked_sum_of_the_right_size_with_a_key_is_taken(asked, precision):
    own, ask = asked
    config = dataclasses.replace(own.config, message_precision=precision)
    request = ask()
    masked = own.answer(request)
    sent = encode_answer(masked, config, request)
    got = decode_answer(sent, config, request, 0)
    assert isinstance(got, MaskedSum)
    assert got.values.equal(masked.values)
    for change, problem in (
        ({"tensors": sent["tensors"][:-4]}, "exactly"),
        ({"tensors": sent["tensors"] + b"more"}, "may have"),
        ({"tensors": "text"}, "has no tensors"),
        ({"next_key": b"short"}, "wrong size"),
        ({"next_key": 7}, "has no masking key"),
        ({"next_key": None}, "has no masking key"),
    ):
        assert_refused(problem, decode_answer, {**sent, **change}, config, request, 0)
    without = {name: value for name, value in sent.items() if name != "next_key"}
    assert_refused("other fields than", decode_answer, without, config, request, 0)


def test_nothing_but_a_masked_sum_is_encoded_in_a_masked_run(asked):
    own, ask = asked
    request = ask()
    terms = own.config.terms(1)
    alone = dataclasses.replace(own.config, engine="local")
    curator = Node(alone, 0, own.data, own.state.folder.parent / "local")
    integers = curator.answer(request.request)
    floats = received(integers.values.float(), 1, 0, terms.noise_std, terms.clip_bound)
    for release in (integers, floats):
        with pytest.raises(TypeError, match=r"must not leave a client.*MaskedSum"):
            encode_answer(release, own.config, request)


def test_a_request_of_a_masked_run_needs_a_list_of_keys(asked):
    own, ask = asked
    sent = encode_request(ask(), own.config)
    assert decode_request(sent, own.config).digest() == ask().digest()
    for name in ("attempt", "masking_keys"):
        without = {k: v for k, v in sent.items() if k != name}
        assert_refused("refused", decode_request, without, own.config)
    unmasked = dataclasses.replace(own.config, secure_aggregation=False)
    assert_refused("other fields", decode_request, sent, unmasked)
