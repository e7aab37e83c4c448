"""The hostile inputs that were tried, each with what becomes of it.

`hostile_requests` and `hostile_answers` list the messages, which `test_hostile.py`
sends; `hostile_table` names the tests of other files and makes the table of
docs/security.md.
"""

import json
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedgs.config.run_config import RunConfig
from fedgs.federation.codec import pack_stage, round_fakes
from fedgs.federation.messages import (
    FakeBatch,
    StageRequest,
    decode_answer,
    decode_batch,
    encode_answer,
    encode_batch,
)
from fedgs.gan.features import KINDS
from fedgs.mechanism.quantization import release_step, to_grid
from fedgs.mechanism.sanitizer import SanitizedGradients, received
from tiny import MOMENTS, tiny_config

ROUND, NODE = 3, 2
EXACT = tiny_config(num_rounds=9)
COMPACT = tiny_config(num_rounds=9, transport="compact")
STAGE = tiny_config(**MOMENTS | {"num_rounds": 9})
SECRET = 4711  # in what is sent wherever it can be; must not be in a log line

Payload = dict[str, Any]
Change = Callable[[Payload], Payload]
Refusals = dict[str, dict[str, Change]]  # outcome -> what is sent -> how it is made


@dataclass(frozen=True)
class Case:
    """One hostile message.

    Attributes:
        what: what is sent, in words.
        peer: who is hostile: "server" or "client".
        outcome: the text of the refusal, exactly.
        config: of the run, as the honest side knows it.
        make: the payload, from the honest one.
    """

    what: str
    peer: str
    outcome: str
    config: RunConfig
    make: Change

    def decode(self, payload: Payload) -> object:
        """Does what the honest side does with the payload."""
        if self.peer == "server":
            return decode_batch(payload, self.config)
        return decode_answer(payload, self.config, _request_to(self.config), NODE)

    def payload(self) -> Payload:
        """Returns what is sent."""
        request = _request_to(self.config)
        if self.peer == "server":
            return self.make(encode_batch(request, self.config))
        return self.make(encode_answer(a_release(self.config), self.config, request))


def listed(
    peer: str, config: RunConfig, refusals: Refusals, where: str = ""
) -> list[Case]:
    """Returns the cases of one transport, in the order of their outcomes."""
    return [
        Case(what, peer, where + outcome, config, make)
        for outcome, sent in refusals.items()
        for what, make in sent.items()
    ]


def a_request(config: RunConfig, **changes: object) -> FakeBatch:
    """An honest request of round 3 to clients 2 and 4."""
    rng = torch.Generator().manual_seed(0)
    fields = {
        "round": ROUND,
        "images": round_fakes(torch.rand(8, 1, 16, 16, generator=rng), config),
        "labels": torch.arange(8) % 3,
        "participants": (2, 4),
        "trainees": (2, 4),
        "keep_round": 2,
    }
    return FakeBatch(**(fields | changes))


def a_stage(config: RunConfig) -> StageRequest:
    """An honest request of stage 3."""
    rng = torch.Generator().manual_seed(0)
    shapes = KINDS["moments"].shapes(config)
    network = {name: torch.rand(shape, generator=rng) for name, shape in shapes.items()}
    count, groups, columns = config.terms(ROUND).shape[1:]
    centre = torch.rand(count, groups, columns - 1, generator=rng)
    return StageRequest(ROUND, (network,), centre, keep_round=2)


@cache
def _request_to(config: RunConfig) -> FakeBatch | StageRequest:
    return a_stage(config) if config.stages else a_request(config)


def a_release(config: RunConfig, values: Tensor | None = None) -> SanitizedGradients:
    """An honest release of node 2."""
    if values is None:
        rng = torch.Generator().manual_seed(1)
        values = torch.randn(config.terms(ROUND).shape, generator=rng)
        if step := release_step(config):
            values = to_grid(values, step).float()
    terms = config.terms(ROUND)
    return received(values, ROUND, NODE, terms.noise_std, terms.clip_bound)


# ------------------------------------------------------------------ how it is made


def fields(**values: object) -> Change:
    """Replaces fields by others."""
    return lambda payload: payload | values


def without(name: str) -> Change:
    """Leaves a field out."""
    return lambda payload: {n: v for n, v in payload.items() if n != name}


def tensors(**named: Tensor) -> Change:
    """Sends other tensors."""
    return sent(save(named))


def grads(values: Tensor) -> Change:
    """Sends other gradients."""
    return tensors(gradients=values)


def sent(content: bytes) -> Change:
    """Sends other bytes for the tensors."""
    return fields(tensors=content)


def content(make: Callable[[bytes], object]) -> Change:
    """Changes the bytes of the tensors."""
    return lambda payload: payload | {"tensors": make(payload["tensors"])}


def inflated(make: Callable[[bytes], bytes]) -> Change:
    """Changes what is compressed."""
    return content(lambda packed: zlib.compress(make(zlib.decompress(packed))))


def fakes_with(**changes: Tensor) -> Change:
    request = a_request(EXACT)
    return tensors(**({"images": request.images, "labels": request.labels} | changes))


def stage_with(**changes: Tensor | None) -> Change:
    """Replaces tensors of a stage's networks, or leaves them out."""
    honest = load(pack_stage(a_stage(STAGE).networks, a_stage(STAGE).centre))
    return tensors(**{n: v for n, v in (honest | changes).items() if v is not None})


def spoilt(value: float) -> Tensor:
    values = a_request(EXACT).images.clone()
    values[7, 0, 15, 15] = value
    return values


def gradients_with(value: float) -> Tensor:
    values = a_release(EXACT).values.clone()
    values[3, 0, 15, 15] = value
    return values


def header_of(**header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def bomb(size: int) -> bytes:
    """Zeros that inflate to `size` bytes; about a thousandth of it is sent."""
    deflate = zlib.compressobj(9)
    block = bytes(1 << 20)
    parts = [deflate.compress(block) for _ in range(size >> 20)]
    return b"".join(parts) + deflate.flush()


def claims(shape: list[int]) -> bytes:
    end = 4 * math.prod(shape)
    return header_of(
        gradients={"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
    )
