"""What a hostile server sends: each message and the client's refusal."""

import math
import struct

import torch

from fedgs.config.run_config import RunConfig
from fedgs.federation.messages import EVERYONE
from hostile import (
    COMPACT,
    EXACT,
    SECRET,
    Case,
    Change,
    bomb,
    content,
    fakes_with,
    fields,
    inflated,
    spoilt,
    without,
)

NO_ROUND = "message whose round is no integer from 0 to 9: refused"
NO_CLIENTS = "message whose {} is no list of clients below 6: refused"
MILLION = ",".join(str(number) for number in range(10**6))


def _request(what: str, outcome: str, make: Change, config: RunConfig = EXACT) -> Case:
    return Case(what, "server", outcome, config, make)


REQUESTS = [
    _request("a negative round", NO_ROUND, fields(round=-SECRET)),
    _request("a round after the last", NO_ROUND, fields(round=SECRET)),
    _request("a round of 1000 digits", NO_ROUND, fields(round=SECRET**272)),
    _request("`true` for the round", NO_ROUND, fields(round=True)),
    _request("a round that is text", NO_ROUND, fields(round="3")),
    _request("a round that is a fraction", NO_ROUND, fields(round=3.0)),
    _request("no round", "message without round: refused", without("round")),
    _request("no tensors", "message without tensors: refused", without("tensors")),
    _request(
        "a committed round that is not over yet",
        "message whose keep_round is no integer from 0 to 2: refused",
        fields(keep_round=SECRET),
    ),
    _request(
        "an unknown field",
        "message with other fields than ['keep_round', 'participants', 'round', "
        "'tensors', 'trainees']: refused",
        fields(send_me_client_4711=1),
    ),
    _request(
        "a million participants",
        NO_CLIENTS.format("participants"),
        fields(participants=MILLION),
    ),
    _request(
        "participants that do not exist",
        NO_CLIENTS.format("participants"),
        fields(participants="2,4711"),
    ),
    _request(
        "a participant below 0",
        NO_CLIENTS.format("participants"),
        fields(participants="-1,2"),
    ),
    _request(
        "one participant twice",
        NO_CLIENTS.format("participants"),
        fields(participants="2,2"),
    ),
    _request(
        "one participant of 4000 digits",
        NO_CLIENTS.format("participants"),
        fields(participants="4711" * 1000),
    ),
    _request(
        "participants as a list",
        NO_CLIENTS.format("participants"),
        fields(participants=[2, 4]),
    ),
    _request(
        "trainees in Arabic digits",
        NO_CLIENTS.format("trainees"),
        fields(trainees="\u0664"),
    ),
    _request(
        "more participants than the run's clients_per_round",
        "request with more than 2 participants: refused",
        fields(participants="1,2,3"),
    ),
    _request(
        "everyone, where two are selected",
        "request with more than 2 participants: refused",
        fields(participants=EVERYONE),
    ),
    _request(
        "participants in the warm start, which would be a release",
        "request with more than 0 participants: refused",
        fields(round=0, keep_round=0),
    ),
    _request(
        "a fake with a pixel of 4711",
        "fakes outside [0, 1]: refused",
        fakes_with(images=spoilt(SECRET)),
    ),
    _request(
        "a fake with a pixel below 0",
        "fakes outside [0, 1]: refused",
        fakes_with(images=spoilt(-1e-6)),
    ),
    _request(
        "a fake with a NaN",
        "fakes outside [0, 1]: refused",
        fakes_with(images=spoilt(math.nan)),
    ),
    _request(
        "a fake with an infinite pixel",
        "fakes outside [0, 1]: refused",
        fakes_with(images=spoilt(math.inf)),
    ),
    _request(
        "fewer fakes than agreed",
        "fakes of shape (7, 1, 16, 16), torch.float32: expected (8, 1, 16, 16), "
        "torch.float32",
        fakes_with(images=torch.zeros(7, 1, 16, 16)),
    ),
    _request(
        "larger fakes than agreed",
        "message with 25296 bytes: at most 9280 expected",
        fakes_with(images=torch.zeros(8, 1, 28, 28)),
    ),
    _request(
        "fakes in float16",
        "fakes of shape (8, 1, 16, 16), torch.float16: expected (8, 1, 16, 16), "
        "torch.float32",
        fakes_with(images=torch.zeros(8, 1, 16, 16, dtype=torch.float16)),
    ),
    _request(
        "a label that does not exist",
        "labels outside [0, 3): refused",
        fakes_with(labels=torch.full((8,), SECRET)),
    ),
    _request(
        "a label below 0",
        "labels outside [0, 3): refused",
        fakes_with(labels=torch.full((8,), -1)),
    ),
    _request(
        "a third tensor",
        "message with other tensors than ['images', 'labels']: refused",
        fakes_with(secret_4711=torch.zeros(1)),
    ),
    _request(
        "64 MB of tensors",
        "message with 67108864 bytes: at most 9280 expected",
        content(lambda honest: bytes(1 << 26)),
    ),
    _request(
        "tensors as text",
        "message without tensors: refused",
        content(lambda honest: "4711"),
    ),
    _request(
        "a zlib bomb in place of exact tensors",
        "message that cannot be decoded: refused",
        content(lambda honest: bomb(1 << 22)),
    ),
    _request(
        "a zlib bomb of 2 MB, small enough for the first look",
        "message that does not hold exactly 2113 bytes: refused",
        content(lambda honest: bomb(1 << 21)),
        COMPACT,
    ),
    _request(
        "a zlib bomb of 64 MB",
        "message with 65238 bytes: at most 2441 expected",
        content(lambda honest: bomb(1 << 26)),
        COMPACT,
    ),
    _request(
        "bytes after the end of the compressed fakes",
        "message that does not hold exactly 2113 bytes: refused",
        content(lambda honest: honest + b"4711"),
        COMPACT,
    ),
    _request(
        "compressed fakes cut short",
        "message that does not hold exactly 2113 bytes: refused",
        content(lambda honest: honest[:-1]),
        COMPACT,
    ),
    _request(
        "compressed fakes with one pixel too many",
        "message that does not hold exactly 2113 bytes: refused",
        inflated(lambda data: data + b"\x00"),
        COMPACT,
    ),
    _request(
        "compressed fakes with a wrong checksum",
        "message that cannot be decoded: refused",
        content(lambda honest: honest[:-1] + bytes([honest[-1] ^ 1])),
        COMPACT,
    ),
    _request(
        "compressed fakes of one level",
        "fakes of other levels than (255, 127, 63, 31, 15, 7, 3, 2): refused",
        inflated(lambda data: b"\x01" + data[1:]),
        COMPACT,
    ),
    _request(
        "compressed fakes with a pixel above 1",
        "fakes outside [0, 1]: refused",
        inflated(lambda data: b"\x02\x04" + data[2:]),
        COMPACT,
    ),
    _request(
        "compressed labels that do not exist",
        "labels outside [0, 3): refused",
        inflated(lambda data: data[:-8] + struct.pack("<q", SECRET)),
        COMPACT,
    ),
    _request(
        "exact fakes in a compact run",
        "message with 8400 bytes: at most 2441 expected",
        fakes_with(),
        COMPACT,
    ),
]
