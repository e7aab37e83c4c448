"""Honest messages of one round, what decodes them, and ways to spoil them."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fedgs.config.run_config import RunConfig
from fedgs.mechanism.quantization import release_step, to_grid
from fedgs.mechanism.sanitizer import SanitizedGradients, received
from fedgs.methods import new_state
from fedgs.methods.base import Request
from fedgs.round.messages import (
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from tiny import MOMENTS, next_request, request_of, server_round, tiny_config

ROUND, NODE = 3, 2
EXACT = tiny_config(num_rounds=9)
COMPACT = tiny_config(num_rounds=9, message_precision="compact")
RELEASE = tiny_config(**MOMENTS)

Payload = dict[str, Any]
Change = Callable[[Payload], Payload]


def a_request(config: RunConfig, **changes: object) -> Request:
    """An honest request of round 3 to clients 2 and 4."""
    asked = {"participants": (2, 4), "trainees": (2, 4), "keep_round": 2}
    return request_of(config, ROUND, **asked | changes)


def a_request_of_means(config: RunConfig) -> Request:
    """An honest request of round 3, where that releases mean features."""
    server = new_state(config)
    for round in range(1, ROUND):
        server_round(
            config, server, next_request(config, server), [a_release(config, round)]
        )
    return replace(next_request(config, server), keep_round=2)


def a_release(config: RunConfig, round: int = ROUND) -> SanitizedGradients:
    """An honest release of node 2."""
    terms, rng = config.terms(round), torch.Generator().manual_seed(1)
    values = torch.randn(terms.shape, generator=rng)
    if step := release_step(config):
        values = to_grid(values, step).float()
    return received(values, round, NODE, terms.noise_std, terms.clip_bound)


@cache
def _request_of(config: RunConfig) -> Request:
    if config.at_round(ROUND).releases_once:
        return a_request_of_means(config)
    return a_request(config)


def honest(side: str, config: RunConfig) -> Payload:
    """What an honest server or client sends."""
    sent = _request_of(config) if side == "server" else a_release(config)
    return encoded(side, config, sent)


def decoded(side: str, config: RunConfig, payload: Payload) -> Any:
    """Does what the other side does with a payload."""
    if side == "server":
        return decode_request(payload, config)
    return decode_answer(payload, config, _request_of(config), NODE)


def encoded(side: str, config: RunConfig, content: Any) -> Payload:
    """Sends on what was decoded."""
    if side == "server":
        return encode_request(content, config)
    return encode_answer(content, config, _request_of(config))


# ------------------------------------------------------------------ how it is spoilt


def fields(**values: object) -> Change:
    """Replaces fields by others."""
    return lambda payload: payload | values


def content(make: Callable[[bytes], object]) -> Change:
    """Changes the bytes of the tensors."""
    return lambda payload: payload | {"tensors": make(payload["tensors"])}
