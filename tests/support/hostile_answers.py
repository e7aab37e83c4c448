"""What a hostile client sends: the server's refusals, each with what meets it."""

import math
import struct

import torch

from hostile import (
    COMPACT,
    EXACT,
    NODE,
    ROUND,
    SECRET,
    STAGE,
    Refusals,
    a_release,
    a_request,
    bomb,
    claims,
    content,
    fields,
    gradients_with,
    grads,
    header_of,
    inflated,
    listed,
    sent,
    tensors,
    without,
)

HONEST = a_release(EXACT).values
OLD = a_request(EXACT, images=torch.zeros(8, 1, 16, 16)).digest()
UNKNOWN_TYPE = {"dtype": "F4711", "shape": [0], "data_offsets": [0, 0]}
NORMS = (
    "{} of 4 gradients with a norm above {}.33, which 1 clients with clip_bound = 1 "
    "and the run's noise do not reach"
)
SHAPE = "gradients of shape {}: expected (4, 1, 16, 16), torch.float32"
OTHER = "another {} than this run and round have"

_EXACT: Refusals = {
    "non-finite values": {
        "a NaN": grads(gradients_with(math.nan)),
        "an infinite value": grads(gradients_with(-math.inf)),
    },
    NORMS.format(1, 22): {
        "the largest float32": grads(gradients_with(3.4e38)),
        "a gradient of 47.11 times the clip bound": (grads(gradients_with(47.11))),
    },
    NORMS.format(4, 22): {"a thousandfold answer": grads(1e3 * HONEST)},
    SHAPE.format("(3, 1, 16, 16), torch.float32"): {
        "a row too few": grads(torch.zeros(3, 1, 16, 16)),
    },
    SHAPE.format("(4, 1, 16, 15), torch.float32"): {
        "a column too few": grads(HONEST[..., :-1].contiguous()),
    },
    SHAPE.format("(4, 1, 16, 16), torch.float16"): {
        "float16": grads(HONEST.half()),
    },
    SHAPE.format("(4, 1, 16, 16), torch.int32"): {
        "integers": tensors(
            gradients=torch.full((4, 1, 16, 16), SECRET, dtype=torch.int32)
        ),
    },
    "message with 8280 bytes: at most 5120 expected": {
        "one row for each client": grads(torch.zeros(2, 4, 1, 16, 16)),
        "float64": grads(torch.zeros(4, 1, 16, 16, dtype=torch.float64)),
    },
    "message that cannot be decoded: refused": {
        "a header that declares a terabyte": sent(claims([2**38, 1])),
        "a header of a terabyte": (sent(struct.pack("<Q", 2**40) + b"{}4711")),
        "a header with a negative size": sent(claims([-4711, 4])),
        "a header with text for a tensor": (sent(header_of(gradients=str(SECRET)))),
        "a header with text for an unknown tensor": (sent(header_of(secret_4711="x"))),
        "a header that is text": sent(struct.pack("<Q", 4) + b"4711"),
        "no bytes at all": sent(b""),
        "zeros": sent(bytes(64)),
        "gradients cut short": content(lambda honest: honest[:-1]),
        "a header with an unknown type": (sent(header_of(gradients=UNKNOWN_TYPE))),
        "a header with a size beyond 64 bits": (sent(claims([0, 2**64 - 1]))),
    },
    "message with other tensors than ['gradients']: refused": {
        "the training loss beside the gradients": (
            tensors(gradients=HONEST, loss=torch.tensor(47.11))
        ),
        "another tensor than the gradients": tensors(secret_4711=HONEST),
    },
    "message with other fields than ['clip_bound', 'is_empty', 'node_id', 'noise_std', "
    "'request', 'round', 'tensors']: refused": {
        "the number of examples beside the gradients": fields(num_examples=SECRET),
    },
    "message with 67108864 bytes: at most 5120 expected": {
        "64 MB of gradients": content(lambda honest: bytes(1 << 26)),
    },
    OTHER.format("node_id"): {
        "another node's name": fields(node_id=4),
        "`true` for the node": fields(node_id=True),
        "a node that is a fraction": fields(node_id=2.0),
    },
    OTHER.format("round"): {
        "an old round": fields(round=2),
        "a round that is text": fields(round="3"),
    },
    OTHER.format("request"): {
        "an old answer under the new round's number": (
            fields(request=bytes.fromhex(OLD))
        ),
        "an answer to no request": fields(request=b""),
        "a request's hash as text": fields(request=a_request(EXACT).digest()),
    },
    OTHER.format("noise_std"): {
        "less noise than agreed": fields(noise_std=0.4711),
        "a NaN for the noise": fields(noise_std=math.nan),
        "nothing for the noise": fields(noise_std=None),
    },
    OTHER.format("clip_bound"): {
        "a larger clip bound than agreed": fields(clip_bound=47.11),
        "`true` for the clip bound of 1": fields(clip_bound=True),
        "an integer for the clip bound of 1": fields(clip_bound=1),
    },
    **{
        f"message without {name}: refused": {f"no {name}": without(name)}
        for name in ("round", "node_id", "noise_std", "clip_bound", "request")
    },
    "message without tensors: refused": {
        "no tensors": without("tensors"),
        "gradients as text": sent("4711"),
    },
    "empty, though its clients take part": {
        "nothing, from a participant": lambda honest: {"is_empty": 1},
    },
    "message with other fields than ['is_empty']: refused": {
        "an empty reply with the loss in it": (
            lambda honest: {"is_empty": 1, "loss": 47.11}
        ),
    },
    "message whose is_empty is no integer from 0 to 1: refused": {
        "neither empty nor not": fields(is_empty=SECRET),
        "`false` for not empty": fields(is_empty=False),
        "no field at all": lambda honest: {},
    },
}
_COMPACT: Refusals = {
    NORMS.format(4, 23): {
        "compact integers as large as they go": (
            inflated(lambda data: b"\xff" * len(data))
        ),
    },
    "message with 65238 bytes: at most 2368 expected": {
        "a zlib bomb of 64 MB": content(lambda honest: bomb(1 << 26)),
    },
    "message that does not hold exactly 2048 bytes: refused": {
        "a zlib bomb of 2 MB, small enough for the first look": (
            content(lambda honest: bomb(1 << 21))
        ),
    },
    "message that cannot be decoded: refused": {
        "no zlib at all": content(lambda honest: b"4711" * 100),
    },
}
_WHERE = f"answer of node {NODE} to round {ROUND}: "
_EMBEDDING = a_release(STAGE).values
_STAGE: Refusals = {
    "1 of 1 embeddings with a norm above 10.57, which 2 clients with clip_bound = 1 "
    "and the run's noise do not reach": {
        "an embedding a thousand times too long": (tensors(gradients=1e3 * _EMBEDDING)),
    },
    "gradients of shape (1, 1, 3, 14), torch.float32: expected (1, 1, 3, 15), "
    "torch.float32": {
        "an embedding with a feature too few": (
            tensors(gradients=_EMBEDDING[..., :-1].contiguous())
        ),
    },
    OTHER.format("clip_bound"): {
        "an embedding with another clip bound than the run's": fields(clip_bound=20.0),
    },
}
ANSWERS = listed("client", EXACT, _EXACT, _WHERE)
ANSWERS += listed("client", COMPACT, _COMPACT, _WHERE)
ANSWERS += listed("client", STAGE, _STAGE, _WHERE)
