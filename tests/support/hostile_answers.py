"""What a hostile client sends: each answer and the server's refusal."""

import math
import struct

import torch

from fedgs.config.run_config import RunConfig
from hostile import (
    COMPACT,
    EXACT,
    NODE,
    ROUND,
    SECRET,
    Case,
    Change,
    a_release,
    a_request,
    bomb,
    claims,
    content,
    fields,
    gradients_with,
    header_of,
    inflated,
    tensors,
)


def _answer(what: str, outcome: str, make: Change, config: RunConfig = EXACT) -> Case:
    where = f"answer of node {NODE} to round {ROUND}: "
    return Case(what, "client", where + outcome, config, make)


ANSWERS = [
    _answer(
        "a NaN",
        "non-finite values",
        tensors(gradients=gradients_with(math.nan)),
    ),
    _answer(
        "an infinite value",
        "non-finite values",
        tensors(gradients=gradients_with(-math.inf)),
    ),
    _answer(
        "the largest float32",
        "1 of 4 gradients with a norm above 22.33, which 1 clients with clip_bound = 1 "
        "and the run's noise do not reach",
        tensors(gradients=gradients_with(3.4e38)),
    ),
    _answer(
        "a gradient of 47.11 times the clip bound",
        "1 of 4 gradients with a norm above 22.33, which 1 clients with clip_bound = 1 "
        "and the run's noise do not reach",
        tensors(gradients=gradients_with(47.11)),
    ),
    _answer(
        "a thousandfold answer",
        "4 of 4 gradients with a norm above 22.33, which 1 clients with clip_bound = 1 "
        "and the run's noise do not reach",
        tensors(gradients=1e3 * a_release(EXACT).values),
    ),
    _answer(
        "compact integers as large as they go",
        "4 of 4 gradients with a norm above 23.33, which 1 clients with clip_bound = 1 "
        "and the run's noise do not reach",
        inflated(lambda data: b"\xff" * len(data)),
        COMPACT,
    ),
    _answer(
        "a row too few",
        "gradients of shape (3, 1, 16, 16), torch.float32: expected (4, 1, 16, 16), "
        "torch.float32",
        tensors(gradients=torch.zeros(3, 1, 16, 16)),
    ),
    _answer(
        "one row for each client",
        "message with 8280 bytes: at most 5120 expected",
        tensors(gradients=torch.zeros(2, 4, 1, 16, 16)),
    ),
    _answer(
        "float64",
        "message with 8280 bytes: at most 5120 expected",
        tensors(gradients=torch.zeros(4, 1, 16, 16, dtype=torch.float64)),
    ),
    _answer(
        "integers",
        "gradients of shape (4, 1, 16, 16), torch.int32: expected (4, 1, 16, 16), "
        "torch.float32",
        tensors(gradients=torch.full((4, 1, 16, 16), SECRET, dtype=torch.int32)),
    ),
    _answer(
        "a header that declares a terabyte",
        "message that cannot be decoded: refused",
        fields(tensors=claims([2**38, 1])),
    ),
    _answer(
        "a header of a terabyte",
        "message that cannot be decoded: refused",
        fields(tensors=struct.pack("<Q", 2**40) + b"{}4711"),
    ),
    _answer(
        "a header with a negative size",
        "message that cannot be decoded: refused",
        fields(tensors=claims([-4711, 4])),
    ),
    _answer(
        "a header with an unknown type",
        "message that cannot be decoded: refused",
        fields(
            tensors=header_of(
                gradients={"dtype": "F4711", "shape": [0], "data_offsets": [0, 0]}
            )
        ),
    ),
    _answer(
        "a header with a size beyond 64 bits",
        "message that cannot be decoded: refused",
        fields(tensors=claims([0, 2**64 - 1])),
    ),
    _answer(
        "the training loss beside the gradients",
        "message with other tensors than ['gradients']: refused",
        tensors(gradients=a_release(EXACT).values, loss=torch.tensor(47.11)),
    ),
    _answer(
        "the number of examples beside the gradients",
        "message with other fields than ['clip_bound', 'is_empty', 'node_id', "
        "'noise_std', 'request', 'round', 'tensors']: refused",
        fields(num_examples=SECRET),
    ),
    _answer(
        "64 MB of gradients",
        "message with 67108864 bytes: at most 5120 expected",
        content(lambda honest: bytes(1 << 26)),
    ),
    _answer(
        "a zlib bomb of 64 MB",
        "message with 65238 bytes: at most 2368 expected",
        content(lambda honest: bomb(1 << 26)),
        COMPACT,
    ),
    _answer(
        "a zlib bomb of 2 MB, small enough for the first look",
        "message that does not hold exactly 2048 bytes: refused",
        content(lambda honest: bomb(1 << 21)),
        COMPACT,
    ),
    _answer(
        "no zlib at all",
        "message that cannot be decoded: refused",
        content(lambda honest: b"4711" * 100),
        COMPACT,
    ),
    _answer(
        "another node's name",
        "another node_id than this run and round have",
        fields(node_id=4),
    ),
    _answer(
        "`true` for the node",
        "another node_id than this run and round have",
        fields(node_id=True),
    ),
    _answer(
        "an old round",
        "another round than this run and round have",
        fields(round=2),
    ),
    _answer(
        "an old answer under the new round's number",
        "another request than this run and round have",
        fields(
            request=bytes.fromhex(
                a_request(EXACT, images=torch.zeros(8, 1, 16, 16)).digest()
            )
        ),
    ),
    _answer(
        "less noise than agreed",
        "another noise_std than this run and round have",
        fields(noise_std=0.4711),
    ),
    _answer(
        "a NaN for the noise",
        "another noise_std than this run and round have",
        fields(noise_std=math.nan),
    ),
    _answer(
        "a larger clip bound than agreed",
        "another clip_bound than this run and round have",
        fields(clip_bound=47.11),
    ),
    _answer(
        "`true` for the clip bound of 1",
        "another clip_bound than this run and round have",
        fields(clip_bound=True),
    ),
    _answer(
        "nothing, from a participant",
        "empty, though its clients take part",
        lambda honest: {"is_empty": 1},
    ),
    _answer(
        "an empty reply with the loss in it",
        "message with other fields than ['is_empty']: refused",
        lambda honest: {"is_empty": 1, "loss": 47.11},
    ),
    _answer(
        "neither empty nor not",
        "message whose is_empty is no integer from 0 to 1: refused",
        fields(is_empty=SECRET),
    ),
    _answer(
        "no field at all",
        "message whose is_empty is no integer from 0 to 1: refused",
        lambda honest: {},
    ),
]
