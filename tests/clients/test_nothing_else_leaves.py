"""Nothing but sanitized gradients and public identifiers leaves a client.

Every message that clients send in a run is walked, value by value: roll call, warm
start, answers, empty replies and errors, with their metadata, and what Flower keeps for
a client between messages. Private values were planted in the data and in the errors
that clients raise; none may occur in a message, a log or a public file of the run.

What is not covered: when a reply leaves. A message's `created_at` and `ttl` tell how
long a client took; steps and shapes are the same for every client, whatever its data.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.common.serde import context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto
from google.protobuf.message import Message as Proto
from safetensors.torch import save

import fedgs.round.answer
import fedgs.round.node
from fedgs.config.run_config import RunConfig
from fedgs.privacy.ledger import Ledger
from fedgs.round.codec import pack_release
from fedgs.round.messages import decode_request
from fedgs.runs.run_folder import RunFolder
from loading import write_npz
from runs import at_round
from simulated_grid import FakeGrid, start
from tiny import NUM_CLASSES, SIDE, SIZES, tiny_config

pytestmark = pytest.mark.usefixtures("server_process", "clock")
ERROR = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
METADATA = {
    "metadata.run_id": int,
    "metadata.message_id": str,
    "metadata.src_node_id": int,
    "metadata.dst_node_id": int,
    "metadata.reply_to_message_id": str,
    "metadata.message_type": str,
    "metadata.src_task_id": int,
    "metadata.dst_task_id": int,
    "metadata.created_at": float,  # see the module
    "metadata.ttl": float,
}
CONTENT = {
    "content.items.key": str,
    "content.items.config_record.items.key": str,
    "content.items.config_record.items.value.sint64": int,
    "content.items.config_record.items.value.double": float,
    "content.items.config_record.items.value.bytes": bytes,
}
FAILURE = {"error.code": int, "error.reason": str}
NODE_CONFIG = {"partition-id", "num-partitions"}
Asked = set[tuple[int, str]]  # by address: the hash of every request
Made = dict[tuple[int, int], torch.Tensor]  # what was sanitized, by node and round


# ------------------------------------------------------------------ private values
# They must never be found again. One client has pixels, sizes and label counts that
# occur nowhere else.

VICTIM = 0
NUM_IMAGES = 10_007  # of the victim
NUM_RARE = 9_973  # of its images with the label 2; the others have label 0
PIXELS = bytes(range(173, 173 + SIDE))  # a row of each of its images
WORDS = "ward-4711-chemotherapy"  # in error texts, a type's name and the data's path


class ward_4711_chemotherapy(Exception):
    """An error whose very name tells."""


def planted_data(folder: Path) -> str:
    """Writes data with the private values and returns that value of `data`."""
    folder = folder / WORDS
    folder.mkdir()
    sizes = [NUM_IMAGES if client == VICTIM else n for client, n in enumerate(SIZES)]
    owners = np.repeat(np.arange(len(sizes)), sizes)
    images = np.random.default_rng(0).integers(
        256, size=(len(owners), 1, SIDE, SIDE), dtype=np.uint8
    )
    labels = np.arange(len(owners)) % NUM_CLASSES
    images[owners == VICTIM] = np.frombuffer(PIXELS, np.uint8)
    labels[:NUM_IMAGES] = np.where(np.arange(NUM_IMAGES) < NUM_RARE, 2, 0)
    return write_npz(folder / "x.npz", images=images, labels=labels, clients=owners)


def canaries() -> dict[str, bytes]:
    """The private values in every form in which they might leave, as patterns."""
    row = np.frombuffer(PIXELS, np.uint8)
    found = {
        "pixels": re.escape(PIXELS),
        "pixels, float32": re.escape((row.astype(np.float32) / 255)[:4].tobytes()),
        "pixels, printed": b",? ".join(b"%d" % value for value in row[:3]),
        "words": WORDS.replace("-", ".").encode(),
        "a word": WORDS.rpartition("-")[2].encode(),
    }
    for name, number in (("size", NUM_IMAGES), ("label count", NUM_RARE)):
        # Not within a hash, a decimal fraction or a longer number.
        found[f"{name}, printed"] = rb"(?<![\w.])%d(?!\w|\.\d)" % number
        for kind in (np.int64, np.float32, np.float64):
            found[f"{name}, {kind.__name__}"] = re.escape(kind(number).tobytes())
    return found


def canaries_in(content: bytes) -> set[str]:
    """Returns the names of the private values in some bytes."""
    return {n for n, each in canaries().items() if re.search(each, content, re.DOTALL)}


def leaves(proto: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value that is set in a protobuf message, however deep."""
    for field, value in proto.ListFields():
        below = f"{path}.{field.name}".lstrip(".")
        is_single = isinstance(value, str | bytes | int | float | Proto)
        for item in [value] if is_single else value:
            if isinstance(item, Proto):
                yield from leaves(item, below)
            else:
                yield below, item


# ------------------------------------------------------------------ failing clients
# They raise errors that quote the private values.


QUOTED = f"{WORDS}: {NUM_IMAGES} images, {NUM_RARE} of label 2, {[*PIXELS]}"
LOGS_NOTHING = 5  # the round in which the failure's text cannot be written either
FAILURES: dict[int, Exception | None] = {
    1: LookupError(QUOTED),
    2: None,  # an error of torch's
    3: ward_4711_chemotherapy(),
    4: ValueError(f"{WORDS} \udcff"),  # as in the name of a file that is not UTF-8
    LOGS_NOTHING: LookupError(QUOTED),
}


def failing(answer_of: Callable[..., Any], marks: Path) -> Callable[..., Any]:
    """Returns `answer_of`, failing when a node is asked first in each round."""

    def fail_first(config: Any, hosted: Any, request: Any) -> Any:
        node_id = hosted.node_id
        mark = marks / f"failed-{node_id}-{request.round}"
        if mark.exists():
            return answer_of(config, hosted, request)
        mark.touch()
        if request.round == LOGS_NOTHING:
            log = Path(config.output) / "private" / f"node-{node_id:05d}" / "error.log"
            log.unlink(missing_ok=True)
            log.mkdir(parents=True)
        if (error := FAILURES[request.round]) is not None:
            raise error
        return torch.zeros(NUM_IMAGES) + torch.zeros(NUM_RARE)

    return fail_first


# ------------------------------------------------------------------ runs


def _config(tmp_path: Path, **settings: object) -> RunConfig:
    """Three nodes of two clients; at least one node answers nothing in each round."""
    data, output = planted_data(tmp_path), str(tmp_path / "run")
    rule = {"discriminator_training": "every_round", "client_selection": "balanced"}
    sizes = {"clients_per_round": 2, "clients_per_node": 2}
    sizes |= {"warm_start_rounds": 1, "discriminator_steps": 1}
    sizes |= {"num_rounds": len(FAILURES), "engine": "flower"}
    return tiny_config(data=data, output=output, **rule | sizes | settings)


# ------------------------------------------------------------------ the walk


def _check_message(sent: bytes, config: RunConfig, asked: Asked, made: Made) -> str:
    """Checks every value of a message that a client sent; returns what kind it is."""
    proto = MessageProto.FromString(sent)
    found = list(leaves(proto))
    allowed = METADATA | (FAILURE if proto.HasField("error") else CONTENT)
    for path, value in found:
        assert type(value) is allowed.get(path), path
    assert not canaries_in(sent)
    message = message_from_proto(proto)
    metadata = message.metadata
    assert metadata.message_type in ("query", "train")
    assert metadata.group_id == ""
    if message.has_error():
        assert message.error.code == ERROR
        nodes = range(config.num_nodes)
        assert message.error.reason in [
            f"node {node} failed; its own error.log says why" for node in nodes
        ]
        return "error"
    record = message.content["fedgs"]
    assert list(message.content) == ["fedgs"]
    if metadata.message_type == "query":
        assert sorted(record) == ["has_run_folder", "node_id", "num_partitions"]
        assert record["node_id"] in range(config.num_nodes)
        assert record["num_partitions"] == config.num_nodes
        assert record["has_run_folder"] == 1
        return "roll call"
    if record["is_empty"]:
        assert dict(record) == {"is_empty": 1}
        return "empty"
    answer = dict(record)
    # What it repeats of its request is the hash of what the node was sent.
    assert (metadata.src_node_id, answer.pop("request").hex()) in asked
    _check_answer(answer, config, made)
    return "answer"


def _check_answer(record: dict[str, object], config: RunConfig, made: Made) -> None:
    """Compares an answer with what the sanitizer made, byte by byte."""
    content, where = record.pop("tensors"), (record["node_id"], record["round"])
    expected = {"is_empty": 0, "node_id": where[0], "round": where[1]}
    expected |= {"noise_std": config.noise_std, "clip_bound": config.clip_bound}
    assert record == expected
    if config.message_precision == "compact":
        assert content == pack_release(made[where], config)
        return
    values = made[where]
    assert (tuple(values.shape), values.dtype) == (config.release_shape, torch.float32)
    assert content == save({"gradients": values})  # and not a byte more


def _check_context(sent: bytes) -> None:
    """Flower takes a client's context back after each message: nothing is put in it."""
    proto = ContextProto.FromString(sent)
    assert not proto.state.items
    assert set(proto.node_config) == NODE_CONFIG
    assert set(proto.run_config) <= {"run_folder"}
    assert not canaries_in(sent)


def _check_files(folder: Path, but: Iterable[str]) -> list[str]:
    """No public file of the run holds a private value; returns which were read."""
    read = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not name.startswith("private/"):
            read.append(name)
            if name not in but:
                assert not canaries_in(path.read_bytes()), name
    return read


def _check_run(folder: RunFolder, sent: list[bytes], asked: Asked, made: Made) -> None:
    """Checks all messages of a run, and how many of each kind there are."""
    kinds = [_check_message(content, folder.config, asked, made) for content in sent]
    # Three nodes: a roll call, a warm start, and five rounds that all first fail in.
    empty = 3 + 5 * 3 - len(made)
    expected = {"roll call": 3, "error": 15, "empty": empty, "answer": len(made)}
    assert {kind: kinds.count(kind) for kind in expected} == expected
    assert empty >= 3 + 5
    assert made
    events = Ledger.read(folder.path / "ledger.jsonl").events
    assert {event.round for event in events} == set(FAILURES)
    assert any(VICTIM in event.participants for event in events)


@pytest.fixture
def upstream() -> Iterable[list[str]]:
    """All that is logged where the server runs, with tracebacks."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))
    logging.getLogger().addHandler(handler)
    yield lines
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize(("dct_size", "precision"), [(5, "exact"), (None, "compact")])
def test_every_message_of_a_run_holds_public_values_only(
    tmp_path, monkeypatch, upstream, capfd, dct_size, precision
):
    config = _config(tmp_path, message_precision=precision, dct_size=dct_size)
    asked: Asked = set()

    def arrives(node: int, request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            batch = decode_request(request.content["fedgs"], config)
            asked.add((request.metadata.dst_node_id, batch.digest()))
        return reply

    folder, grid, made = RunFolder.create(config), FakeGrid(3, arrives), {}
    sanitize = fedgs.round.answer.sanitize

    def kept(*args: object):
        release = sanitize(*args)
        made[release.node_id, release.round] = release.values.clone()
        return release

    monkeypatch.setattr(fedgs.round.answer, "sanitize", kept)
    fails = failing(fedgs.round.node.answer_of, tmp_path)
    monkeypatch.setattr(fedgs.round.node, "answer_of", fails)
    logs: list[bytes] = []

    def read_logs() -> None:  # until round 5, in which no error can be logged
        logs.extend(path.read_bytes() for path in folder.private.glob("*/error.log"))

    start(folder, grid, at_round(4, read_logs))
    assert len(logs) == 3
    for text in logs:  # their owner sees what the walk looks for
        assert {"words", "size, printed", "label count, printed"} <= canaries_in(text)
        assert "pixels, printed" in canaries_in(text)
        assert b"RuntimeError: The size of tensor a (10007)" in text
    sent = [message_to_proto(reply).SerializeToString() for *_, reply in grid.replies]
    _check_run(folder, sent, asked, made)
    for context in grid.contexts.values():
        _check_context(context_to_proto(context).SerializeToString())
    assert len([line for line in upstream if "failed" in line]) == 15
    printed = "".join(capfd.readouterr())
    assert not canaries_in("\n".join([printed, *upstream]).encode())
    # Where the data lie is a setting of this simulation, which its owner chose.
    read = _check_files(folder.path, but=["config.json"])
    assert {"ledger.jsonl", "metrics.jsonl", "generator.safetensors"} <= set(read)


def test_no_message_holds_the_secret_of_who_takes_part(tmp_path, upstream, capfd):
    config = _config(tmp_path, noise_seed=None)
    sent: list[bytes] = []

    def arrives(node: int, request: Message, reply: Message) -> Message:
        both = message_to_proto(request), message_to_proto(reply)
        sent.extend(each.SerializeToString() for each in both)
        return reply

    folder, grid = RunFolder.create(config), FakeGrid(3, arrives)
    start(folder, grid)
    contexts = map(context_to_proto, grid.contexts.values())
    sent += [context.SerializeToString() for context in contexts]
    sent.append("".join([*capfd.readouterr(), *upstream]).encode())
    key = folder.config.selection_key
    assert len(sent) > 3 * 5
    assert not any(key.encode() in each or bytes.fromhex(key) in each for each in sent)


def test_the_canaries_are_found_where_they_are(tmp_path):
    path = Path(planted_data(tmp_path).removeprefix("npz:"))
    assert {"pixels"} <= canaries_in(path.read_bytes())
    assert canaries_in(str(path).encode()) == {"words", "a word"}
    values = torch.tensor(list(PIXELS)).float() / 255
    assert canaries_in(values.numpy().tobytes()) == {"pixels, float32"}
    row = list(PIXELS)
    for printed in (str(row), str(np.array(row))):
        assert canaries_in(printed.encode()) == {"pixels, printed"}
    for text in (b"num-examples: 10007", b'{"num": 10007}', b"There are 10007."):
        assert canaries_in(text) == {"size, printed"}
    assert canaries_in(np.array([9973]).tobytes()) == {"label count, int64"}
    assert canaries_in(np.array([9973.0]).tobytes()) == {"label count, float64"}
    assert canaries_in(b"public") == set()
