"""Hostile peers of a whole run: what a node, and what a server does about them."""

import dataclasses
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
from refusals import assert_refused
from runs import attempts, num_answers
from simulated_grid import FakeGrid, Make, Spoil, product, round_of, spoil_at, start
from tiny import request_of, tiny_config, tiny_data

SECRET = 4711  # must not be in the log

# ------------------------------------------------------------------ a hostile server


def _node(tmp_path: Path) -> Node:
    config = tiny_config(client_selection="all", clients_per_node=6, noise_seed=None)
    return Node(config, 0, tiny_data(config), tmp_path)


def _request(config: RunConfig, round: int, seed: int = 5) -> FakeBatch:
    """A request of a round; another seed draws other fakes."""
    return request_of(dataclasses.replace(config, seed=seed), round)


def _kept(node: Node) -> dict[str, bytes]:
    """Every file of a node: its states, its count."""
    files = [path for path in sorted(node.folder.rglob("*")) if path.is_file()]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_node_answers_a_round_once_and_nothing_else_changes_it(
    tmp_path, is_restarted
):
    """Not an old round, nor other fakes for the last one, nor a second warm start."""
    node = _node(tmp_path)
    assert_refused("its state is missing", node.answer, _request(node.config, 1))
    assert not node.folder.exists()
    node.answer(public_fakes(node.config))
    for round in (1, 2):
        answer = node.answer(_request(node.config, round))
    node.save(0)
    before, same = _kept(node), _request(node.config, 2)
    if is_restarted:
        node = _node(tmp_path)
    words = "answered round 2, refuses another request for round 2"
    for other in (
        _request(node.config, 2, seed=6),
        dataclasses.replace(same, participants=(0, 1, 2)),
        dataclasses.replace(same, trainees=()),
    ):
        assert_refused(words, node.answer, other)
    words = "answered round 2, refuses another request for round 1"
    assert_refused(words, node.answer, _request(node.config, 1))
    assert node.answer(public_fakes(node.config)) is None
    assert torch.equal(node.answer(same).values, answer.values)
    node.save(0)
    assert _kept(node) == before


# ------------------------------------------------------------------ a hostile client


def victim(makes: dict[int, Make]) -> Spoil:
    """Spoils what the first node that is asked in a round replies in it."""
    victims: dict[int, int] = {}

    def spoil(node: int, request: Message, reply: Message) -> Message | None:
        round = round_of(request)
        if round not in makes or victims.setdefault(round, node) != node:
            return reply
        return makes[round](request, reply)

    return spoil


def lose(request: Message, reply: Message) -> None:
    """Loses a reply."""


def _reply(request: Message, record: dict) -> Message:
    return Message(RecordDict({"fedgs": ConfigRecord(record)}), reply_to=request)


def changed(**values: object) -> Make:
    return lambda request, reply: _reply(request, dict(reply.content["fedgs"]) | values)


def poisoned(factor: float) -> Make:
    """Gradients that much longer than the bound without noise."""

    def make(request: Message, reply: Message) -> Message:
        record = dict(reply.content["fedgs"])
        grads = load(record["tensors"])["gradients"]
        rows = grads.flatten(1).norm(dim=1).clamp_min(1e-3).view(-1, 1, 1, 1)
        tensors = save({"gradients": grads / rows * 22 * factor})
        return _reply(request, record | {"tensors": tensors})

    return make


def failed(request: Message, reply: Message) -> Message:
    text = "all is well\n2026-01-01 INFO the run is complete\x1b[2J" * 200_000
    return Message(FlowerError(2, text), reply_to=request)


def with_more_records(request: Message, reply: Message) -> Message:
    content = RecordDict({"fedgs": ConfigRecord(dict(reply.content["fedgs"]))})
    content[f"loss-{SECRET}"] = ConfigRecord({"loss": 47.11})
    return Message(content, reply_to=request)


def without_record(request: Message, reply: Message) -> Message:
    content = RecordDict({"other": ConfigRecord({"loss": float(SECRET)})})
    return Message(content, reply_to=request)


def of_another_sender(request: Message, reply: Message) -> Message:
    reply.metadata.__dict__["_src_node_id"] = SECRET
    return reply


SPOILT: list[tuple[Make, str]] = [
    (poisoned(5.0), "gradients with a norm above"),
    (changed(noise_std=0.1), "another noise_std than"),
    (changed(tensors=b"4711 \x80"), "cannot be decoded"),
    (failed, "says: all is well?2026-01-01 INFO the run"),  # an error of 10 MB
    (with_more_records, "answered with other records too"),
    (without_record, "answered without a record"),
    (of_another_sender, "a reply of another sender"),
]


def test_a_spoilt_reply_is_a_failed_answer(create, log):
    """Asked twice, logged in a line without data; the run is one without that node."""
    last = len(SPOILT)
    settings = {"min_answers": 1, "num_rounds": last}
    folder, silent = create("hostile", **settings), create("silent", **settings)
    makes = {number: make for number, (make, _) in enumerate(SPOILT, 1)}
    start(folder, FakeGrid(6, victim(makes)))
    assert attempts(folder) == [(number, 1) for number in makes]
    assert num_answers(folder) == last * [1]
    for number, (_, words) in enumerate(SPOILT, 1):
        of_round = (f"round {number}:", "answer of node")
        lines = [line for line in log if line.startswith(of_round)]
        assert sum(words in line for line in lines) == 2
        assert all(line.isprintable() and len(line) < 300 for line in lines)
        assert any(line.startswith(f"round {number}: no answer of ") for line in log)
    assert str(SECRET) not in "".join(log)
    start(silent, FakeGrid(6, victim(dict.fromkeys(makes, lose))))
    assert product(folder) == product(silent)


def test_a_replayed_reply_is_a_failed_answer(create, log):
    """Round 1's answer for round 2, also with its number; or that of another run."""
    old: list[dict] = []

    def keep(request: Message, reply: Message) -> Message:
        old.append(dict(reply.content["fedgs"]))
        return reply

    def replay(request: Message, reply: Message) -> Message:
        first, round = old[1], round_of(request)
        return _reply(request, {2: first, 3: first | {"round": 3}, 4: old[0]}[round])

    every = {"min_answers": 1, "client_selection": "all", "num_rounds": 4}
    start(create("old", seed=6, **every), FakeGrid(6, spoil_at({(3, 4): keep})))
    spoil = {(3, 1): keep} | {(3, round): replay for round in (2, 3, 4)}
    start(create("run", seed=5, **every), FakeGrid(6, spoil_at(spoil)))
    words = ((2, "round"), (3, "request"), (4, "request"))
    assert {line for line in log if line.startswith("answer of node 3")} == {
        f"answer of node 3 to round {round}: another {word} than this run and round "
        "have"
        for round, word in words
    }
