"""What a hostile server sends: the client's refusals, each with what meets it."""

import math
import struct

import torch

from fedgs.federation.messages import EVERYONE
from hostile import (
    COMPACT,
    EXACT,
    SECRET,
    STAGE,
    Refusals,
    bomb,
    content,
    fakes_with,
    fields,
    inflated,
    listed,
    spoilt,
    stage_with,
    without,
)

MILLION = ",".join(str(number) for number in range(10**6))
SMALL = {"images": torch.zeros(7, 1, 16, 16)}
HALF = {"images": torch.zeros(8, 1, 16, 16, dtype=torch.float16)}

_EXACT: Refusals = {
    "message whose round is no integer from 0 to 9: refused": {
        "a negative round": fields(round=-SECRET),
        "a round after the last": fields(round=SECRET),
        "a round of 1000 digits": fields(round=SECRET**272),
        "`true` for the round": fields(round=True),
        "a round that is text": fields(round="3"),
        "a round that is a fraction": fields(round=3.0),
    },
    **{
        f"message without {name}: refused": {f"no {name}": without(name)}
        for name in ("round", "participants", "trainees", "keep_round")
    },
    "message without tensors: refused": {
        "no tensors": without("tensors"),
        "tensors as text": content(lambda honest: "4711"),
    },
    "message whose keep_round is no integer from 0 to 2: refused": {
        "a committed round that is not over yet": fields(keep_round=SECRET),
        "a committed round below 0": fields(keep_round=-1),
    },
    "message with other fields than ['keep_round', 'participants', 'round', 'tensors', "
    "'trainees']: refused": {"an unknown field": fields(send_me_client_4711=1)},
    "message whose participants is no list of clients below 6: refused": {
        "a million participants": fields(participants=MILLION),
        "participants that do not exist": fields(participants="2,4711"),
        "a participant below 0": fields(participants="-1,2"),
        "one participant twice": fields(participants="2,2"),
        "one participant of 4000 digits": fields(participants="4711" * 1000),
        "participants out of order": fields(participants="4,1"),
        "participants as a list": fields(participants=[2, 4]),
    },
    "message whose trainees is no list of clients below 6: refused": {
        "trainees in Arabic digits": fields(trainees="\u0664"),
        "trainees that do not exist": fields(trainees="5,6"),
    },
    "request with more than 2 participants: refused": {
        "more participants than the run's clients_per_round": (
            fields(participants="1,2,3")
        ),
        "everyone, where two are selected": fields(participants=EVERYONE),
    },
    "request with more than 0 participants: refused": {
        "participants in the warm start, which would be a release": (
            fields(round=0, keep_round=0)
        ),
    },
    "fakes outside [0, 1]: refused": {
        "a fake with a pixel of 4711": fakes_with(images=spoilt(SECRET)),
        "a fake with a pixel below 0": fakes_with(images=spoilt(-1e-6)),
        "a fake with a NaN": fakes_with(images=spoilt(math.nan)),
        "a fake with an infinite pixel": fakes_with(images=spoilt(math.inf)),
    },
    "fakes of shape (7, 1, 16, 16), torch.float32: expected (8, 1, 16, 16), "
    "torch.float32": {"fewer fakes than agreed": fakes_with(**SMALL)},
    "message with 25296 bytes: at most 9280 expected": {
        "larger fakes than agreed": fakes_with(images=torch.zeros(8, 1, 28, 28)),
    },
    "message with 24784 bytes: at most 9280 expected": {
        "fakes in colour": fakes_with(images=torch.zeros(8, 3, 16, 16)),
    },
    "message with 16592 bytes: at most 9280 expected": {
        "fakes in float64": fakes_with(images=torch.zeros(8, 1, 16, 16).double()),
    },
    "labels of shape (7,), torch.int64: expected (8,), torch.int64": {
        "fewer labels than agreed": fakes_with(labels=torch.zeros(7).long()),
    },
    "labels of shape (8,), torch.float32: expected (8,), torch.int64": {
        "labels that are fractions": fakes_with(labels=torch.zeros(8)),
    },
    "fakes of shape (8, 1, 16, 16), torch.float16: expected (8, 1, 16, 16), "
    "torch.float32": {"fakes in float16": fakes_with(**HALF)},
    "labels outside [0, 3): refused": {
        "a label that does not exist": fakes_with(labels=torch.full((8,), SECRET)),
        "a label below 0": fakes_with(labels=torch.full((8,), -1)),
    },
    "message with other tensors than ['images', 'labels']: refused": {
        "a third tensor": fakes_with(secret_4711=torch.zeros(1)),
    },
    "message with 67108864 bytes: at most 9280 expected": {
        "64 MB of tensors": content(lambda honest: bytes(1 << 26)),
    },
    "message that cannot be decoded: refused": {
        "a zlib bomb in place of exact tensors": content(lambda honest: bomb(1 << 22)),
    },
}
_COMPACT: Refusals = {
    "message that does not hold exactly 2113 bytes: refused": {
        "a zlib bomb of 2 MB, small enough for the first look": (
            content(lambda honest: bomb(1 << 21))
        ),
        "bytes after the end of the compressed fakes": (
            content(lambda honest: honest + b"4711")
        ),
        "compressed fakes cut short": content(lambda honest: honest[:-1]),
        "compressed fakes with one pixel too many": (
            inflated(lambda data: data + b"\x00")
        ),
    },
    "message with 65238 bytes: at most 2441 expected": {
        "a zlib bomb of 64 MB": content(lambda honest: bomb(1 << 26)),
    },
    "message that cannot be decoded: refused": {
        "compressed fakes with a wrong checksum": (
            content(lambda honest: honest[:-1] + bytes([honest[-1] ^ 1]))
        ),
    },
    "fakes of other levels than (255, 127, 63, 31, 15, 7, 3, 2): refused": {
        "compressed fakes of one level": inflated(lambda data: b"\x01" + data[1:]),
    },
    "fakes outside [0, 1]: refused": {
        "compressed fakes with a pixel above 1": (
            inflated(lambda data: b"\x02\x04" + data[2:])
        ),
    },
    "labels outside [0, 3): refused": {
        "compressed labels that do not exist": (
            inflated(lambda data: data[:-8] + struct.pack("<q", SECRET))
        ),
    },
    "message with 8400 bytes: at most 2441 expected": {
        "exact fakes in a compact run": fakes_with(),
    },
}
AXES, CENTRE = "0.axes", torch.zeros(1, 3, 14)
_STAGE: Refusals = {
    "message with other tensors than those of this stage: refused": {
        "a stage without its centre": stage_with(centre=None),
        "a stage with a tensor too many": (
            stage_with(**{"1.axes": torch.zeros(16, 4)})
        ),
        "a stage with a tensor of another name": (
            stage_with(**{AXES: None, "0.axes_4711": torch.zeros(16, 4)})
        ),
    },
    "message with 8400 bytes: at most 2488 expected": {
        "fakes in place of a stage": fakes_with(),
    },
    "a stage's tensor of shape (4, 16), torch.float32: expected (16, 4), "
    "torch.float32": {
        "a network of another shape": stage_with(**{AXES: torch.zeros(4, 16)}),
    },
    "a stage's tensor of shape (16, 4), torch.float16: expected (16, 4), "
    "torch.float32": {
        "a network in float16": (
            stage_with(**{AXES: torch.zeros(16, 4, dtype=torch.float16)})
        ),
    },
    "non-finite values in a stage's tensors: refused": {
        "a network with a NaN": (stage_with(**{AXES: torch.full((16, 4), math.nan)})),
        "a centre with an infinite value": stage_with(centre=CENTRE + math.inf),
    },
    "message with 6064 bytes: at most 2488 expected": {
        "a stage with a network too many": stage_with(
            **{"1.mean": torch.zeros(3, 16), "1.centre": torch.zeros(30, 40)},
        ),
    },
    "message with 67108864 bytes: at most 2488 expected": {
        "64 MB in place of a stage": content(lambda honest: bytes(1 << 26)),
    },
    "message that cannot be decoded: refused": {
        "code in place of a stage's networks": (
            content(lambda honest: b"cos\nsystem\n(S'echo 4711'\ntR.")
        ),
    },
    "request for a stage that is not to everyone: refused": {
        "a stage for some clients only": fields(participants="2"),
        "a stage for everyone, that some are to train for": fields(trainees="2"),
    },
}
REQUESTS = listed("server", EXACT, _EXACT) + listed("server", COMPACT, _COMPACT)
REQUESTS += listed("server", STAGE, _STAGE)
