"""Hostile peers of a whole run: what a node, and what a server does about them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app import Error as FlowerError
from safetensors.torch import load, save

from fedgs.config.run_config import RunConfig
from fedgs.federation.messages import FakeBatch
from fedgs.federation.node import Node
from fedgs.federation.round import public_fakes
from fedgs.files import read_tensors
from fedgs.privacy.client_limits import ClientRefused, Limits
from refusals import assert_refused
from runs import attempts
from simulated_grid import FakeGrid, Make, Spoil, product, round_of, spoil_at, start
from tiny import request_of, tiny_config, tiny_data

# ------------------------------------------------------------------ a hostile server


def _node(tmp_path: Path, limits: Limits | None = None, **settings: object) -> Node:
    config = tiny_config(client_selection="all", clients_per_node=6, **settings)
    return Node(config, 0, tiny_data(config), tmp_path, limits)


def _request(config: RunConfig, round: int, seed: int = 5) -> FakeBatch:
    """A request of a round; another seed draws other fakes."""
    return request_of(dataclasses.replace(config, seed=seed), round)


def _trained(tmp_path: Path, rounds: int = 2, **settings: object) -> Node:
    """A node that has answered rounds 1 .. `rounds`, with its state on disk."""
    node = _node(tmp_path, **settings)
    node.answer(public_fakes(node.config))
    for round in range(1, rounds + 1):
        node.answer(_request(node.config, round))
    node.save(0)
    return node


def _kept(node: Node) -> dict[str, bytes]:
    """Every file of a node: its states, its count."""
    return {
        str(path.relative_to(node.folder)): path.read_bytes()
        for path in sorted(node.folder.rglob("*"))
        if path.is_file()
    }


def _refuses(node: Node, request: FakeBatch, words: str) -> None:
    """The node refuses, and no bit of it changes."""
    before = _kept(node)
    assert_refused(words, node.answer, request)
    node.save(0)
    assert _kept(node) == before


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_old_round_is_not_answered_again(tmp_path, is_restarted):
    node = _trained(tmp_path)
    words = "answered round 2, refuses another request for round 1"
    if is_restarted:  # the state of round 1 is gone from the disk
        node, words = _node(tmp_path), "its state is missing"
    _refuses(node, _request(node.config, 1), words)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_other_fakes_for_an_answered_round_are_refused(tmp_path, is_restarted):
    node = _trained(tmp_path, noise_seed=None)
    first = node.answer(same := _request(node.config, 2))
    if is_restarted:
        node = _node(tmp_path, noise_seed=None)
    for other in (
        _request(node.config, 2, seed=6),
        dataclasses.replace(same, images=same.images.flip(0)),
        dataclasses.replace(same, participants=(0, 1, 2)),
        dataclasses.replace(same, trainees=()),
    ):
        _refuses(node, other, "answered round 2, refuses another request for round 2")
    assert torch.equal(node.answer(same).values, first.values)


def test_a_second_warm_start_changes_nothing(tmp_path):
    node = _trained(tmp_path)
    before = _kept(node)
    assert node.answer(public_fakes(node.config)) is None
    assert _node(tmp_path).answer(public_fakes(node.config)) is None
    node.save(0)
    assert _kept(node) == before


@pytest.mark.parametrize("fakes", [None, 8])
def test_a_round_without_a_warm_start_is_refused(tmp_path, fakes):
    node = _node(tmp_path, fakes_per_round=fakes)
    assert_refused("its state is missing", node.answer, _request(node.config, 1))
    assert not node.folder.exists()


@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch_size": 3},
        {"min_noise_multiplier": 0.6},
        {"clip_bound": 0.5},
        {"image_size": 28},
        {"max_fakes": 4},
        {"num_classes": 2},
        {"allow_seeded_noise": False},
    ],
)
def test_a_run_outside_a_clients_limits_is_refused(tmp_path, limits):
    """Its own limits decide, not those that the run's settings name."""
    node = _node(tmp_path, Limits(**{"allow_seeded_noise": True} | limits))
    (setting,) = limits
    for _ in range(2):
        with pytest.raises(ClientRefused, match=setting):
            node.answer(public_fakes(node.config))
    assert node.round == -1
    assert not node.folder.exists()


# ------------------------------------------------------------------ a hostile client


def _victim(make: Make, round: int = 2) -> Spoil:
    """Spoils what the first node that is asked in a round replies in it."""
    victims: list[int] = []

    def spoil(node: int, request: Message, reply: Message) -> Message | None:
        if round_of(request) != round:
            return reply
        victims.append(node)
        return make(request, reply) if node == victims[0] else reply

    return spoil


def _run_with(create: Callable, log: list[str], make: Make, **settings: object):
    """Trains against the node; the round must count, and be one without it.

    Returns:
        What was logged of the node, the two times that it was asked.
    """
    folder = create("hostile", min_nodes=1, **settings)
    start(folder, FakeGrid(6, _victim(make)))
    assert attempts(folder) == [(1, 1), (2, 1), (3, 1)]
    lines = [line for line in log if "no answer of " not in line]
    lines = [line for line in lines if line.startswith(("round 2", "answer of node"))]
    silent = create("silent", min_nodes=1, **settings)
    start(silent, FakeGrid(6, _victim(lambda request, reply: None)))
    assert product(folder) == product(silent)
    assert lines
    assert all("\n" not in line and len(line) < 300 for line in lines)
    return lines


@pytest.mark.parametrize("factor", [5.0, 1e6, 1e30])
@pytest.mark.parametrize("noise_multiplier", [0.0, 0.5])
def test_a_poisoned_reply_is_a_failed_answer(create, log, factor, noise_multiplier):
    def poison(request: Message, reply: Message) -> Message:
        record = dict(reply.content["fedgs"])
        grads = load(record["tensors"])["gradients"]
        rows = grads.flatten(1).norm(dim=1).clamp_min(1e-3).view(-1, 1, 1, 1)
        record["tensors"] = save({"gradients": grads / rows * 22 * factor})
        return _reply(request, record)

    lines = _run_with(create, log, poison, noise_multiplier=noise_multiplier)
    assert len(lines) == 2  # asked twice
    assert all("gradients with a norm above" in line for line in lines)


def _reply(request: Message, record: dict) -> Message:
    return Message(RecordDict({"fedgs": ConfigRecord(record)}), reply_to=request)


@pytest.mark.parametrize(("number", "word"), [(1, "round"), (2, "request")])
def test_a_replayed_reply_is_a_failed_answer(create, log, number, word):
    """Round 1's answer for round 2, as it was and with the new round's number."""
    old: list[dict] = []

    def keep(request: Message, reply: Message) -> Message:
        old.append(dict(reply.content["fedgs"]))
        return reply

    def replay(request: Message, reply: Message) -> Message:
        return _reply(request, old[0] | {"round": number})

    folder = create("run", min_nodes=1, client_selection="all", noise_seed=None)
    start(folder, FakeGrid(6, spoil_at({(3, 1): keep, (3, 2): replay})))
    assert {line for line in log if line.startswith("answer of node 3")} == {
        f"answer of node 3 to round 2: another {word} than this run and round have"
    }


def test_a_reply_of_another_run_is_a_failed_answer(create, log):
    """The same node, round and settings; only the server's seed is another."""
    others: list[dict] = []

    def keep(request: Message, reply: Message) -> Message:
        others.append(dict(reply.content["fedgs"]))
        return reply

    def foreign(request: Message, reply: Message) -> Message:
        return _reply(request, others[0])

    settings = {"client_selection": "all", "min_nodes": 1}
    start(create("other", seed=6, **settings), FakeGrid(6, spoil_at({(3, 2): keep})))
    start(create("run", seed=5, **settings), FakeGrid(6, spoil_at({(3, 2): foreign})))
    words = "answer of node 3 to round 2: another request than this run and round have"
    assert words in log


def test_a_long_error_is_one_line_of_the_log(create, log):
    text = "all is well\n2026-01-01 INFO the run is complete\x1b[2J" * 200_000

    def fail(request: Message, reply: Message) -> Message:
        return Message(FlowerError(2, text), reply_to=request)

    lines = _run_with(create, log, fail)
    assert all(len(line) <= 200 + len("round 2: node 1 says: ") for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_reply_with_other_records_is_a_failed_answer(create, log):
    def more(request: Message, reply: Message) -> Message:
        content = RecordDict({"fedgs": ConfigRecord(dict(reply.content["fedgs"]))})
        content["loss-4711"] = ConfigRecord({"loss": 47.11})
        return Message(content, reply_to=request)

    lines = _run_with(create, log, more)
    assert all("answered with other records too" in line for line in lines)
    assert "4711" not in "".join(lines)


def test_a_reply_of_another_sender_is_a_failed_answer(create, log):
    def moved(request: Message, reply: Message) -> Message:
        reply.metadata.__dict__["_src_node_id"] = 4711
        return reply

    lines = _run_with(create, log, moved)
    assert all("a reply of another sender" in line for line in lines)
    assert "4711" not in "".join(lines)


def test_an_honest_run_of_many_answers_loses_none(create, log):
    folder = create("run", num_rounds=10, client_selection="all", noise_seed=None)
    start(folder, FakeGrid(6))
    assert not [line for line in log if "answer of" in line]
    assert len(attempts(folder)) == 10
    assert read_tensors(folder.path / "generator.safetensors")
