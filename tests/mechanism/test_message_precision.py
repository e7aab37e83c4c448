"""Exact and compact precision: what is rounded, that encoding loses nothing, sizes."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgs.config.run_config import RunConfig
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.quantization import LARGEST, release_step, to_grid
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, received, sanitize
from fedgs.methods import new_state
from fedgs.methods.base import Request
from fedgs.methods.gs_wgan import METHOD
from fedgs.round import codec
from fedgs.round.messages import (
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from runs import events, train
from simulated_grid import FakeGrid, product, start
from tiny import draw_fakes, public_fakes, tiny_config

EXACT, COMPACT = tiny_config(), tiny_config(message_precision="compact")
# Algorithm 2 of the paper: 5 batches of 32 fakes down, 32 gradients up.
PAPER = tiny_config(
    message_precision="compact",
    image_size=28,
    num_classes=10,
    batch_size=32,
    discriminator_batch_size=32,
    discriminator_steps=5,
    noise_multiplier=1.07,
    num_rounds=30_000,
)
TARGET = 50_000  # bytes per client and generator update


def _release(config: RunConfig, values: Tensor):
    return received(values, 1, 0, config.noise_std, config.clip_bound)


def _noisy(config: RunConfig, seed: int = 0) -> Tensor:
    """What a client releases: gradients of norm C, noise, and the precision's grid."""
    raw = torch.randn(1, *config.release_shape, generator=_rng(seed))
    parts = [clip(PerSampleGradients(raw), config.clip_bound)]
    noise, step = NoiseStream(seed, 0, 1), release_step(config)
    return sanitize(parts, config.noise_std, noise, 1, 0, step).values


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------ rounding


def _sparse(config: RunConfig, share: float, seed: int = 0) -> Tensor:
    """Fakes of which a share of the pixels is not black, at random places."""
    declared = METHOD.declared(config, 1)["images"]
    images = torch.rand(declared.shape, generator=_rng(seed))
    return images * (torch.rand(images.shape, generator=_rng(seed + 1)) < share)


def _request(images: Tensor) -> Request:
    labels = torch.zeros(len(images), dtype=torch.int64)
    return Request(1, {"images": images, "labels": labels})


@pytest.mark.parametrize(("share", "levels"), [(0.1, 255), (0.2, 31), (1.0, 2)])
def test_fakes_have_as_many_levels_as_fit(share, levels):
    images = _sparse(PAPER, share)
    request = codec.rounded(_request(images), PAPER)
    rounded = request.tensors["images"]
    assert torch.equal(rounded, (images * levels).round() / levels)
    assert (rounded - images).abs().max() <= 1 / (2 * levels) + 1e-6
    packed = codec.pack_request(request.tensors, PAPER)
    assert len(packed) <= codec.FAKE_BYTES * images.numel() + 100
    sent = codec.unpack_request(packed, METHOD.declared(PAPER, 1), PAPER)
    assert torch.equal(sent["images"], rounded)


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        # noise_std = 2 * 0.5 = 1, d = 256: sqrt(1 + 1 / 256) / 8
        ({}, math.sqrt(1 + 1 / 256) / 8),
        ({"noise_multiplier": 0.0}, (1 / 16) / 8),
        ({"noise_multiplier": 0.0, "clip_bound": 3.0}, (3 / 16) / 8),
        ({"dct_size": 5}, math.sqrt(1 + 1 / 25) / 8),
    ],
)
def test_the_step_is_an_eighth_of_a_coordinate(settings, step):
    config = tiny_config(message_precision="compact", **settings)
    assert release_step(config) == pytest.approx(step)


def test_a_compact_release_is_the_exact_one_rounded_after_the_noise():
    exact, compact = _noisy(EXACT), _noisy(COMPACT)
    step = release_step(COMPACT)
    assert torch.allclose(compact, to_grid(exact, step).float())
    error = (compact - exact).double()
    assert error.abs().max() <= step / 2 * (1 + 1e-5)
    assert abs(error.mean()) < step / 20  # no bias
    # A uniform error of variance step^2 / 12, 0.13 % of the noise's.
    assert error.var() == pytest.approx(step**2 / 12, rel=0.1)
    assert error.var() < 1.5e-3 * EXACT.noise_std**2


# ------------------------------------------------------------------ lossless


@given(
    st.lists(st.integers(-LARGEST, LARGEST), min_size=1024, max_size=1024),
    st.sampled_from([0.0, 1e-4, 0.5, 1.07, 300.0]),
)
@settings(max_examples=20)
def test_a_compact_release_survives_the_way_to_the_server(integers, multiplier):
    config = dataclasses.replace(COMPACT, noise_multiplier=multiplier)
    whole = torch.tensor(integers, dtype=torch.float64).view(config.release_shape)
    values = (whole * release_step(config)).float()
    for sent in (values, to_grid(1e9 * values, release_step(config)).float()):
        packed = codec.pack_release(sent, config)
        assert torch.equal(codec.unpack_release(packed, config), sent)


@pytest.mark.parametrize("config", [EXACT, COMPACT], ids=["exact", "compact"])
def test_requests_and_answers_survive_both_transports(config):
    request, _ = draw_fakes(config, new_state(config))
    request = dataclasses.replace(request, participants=(0, 3))
    got = decode_request(encode_request(request, config), config)
    assert torch.equal(got.tensors["images"], request.tensors["images"])
    assert torch.equal(got.tensors["labels"], request.tensors["labels"])
    assert got.digest() == request.digest()
    sent = _release(config, _noisy(config))
    answer = decode_answer(encode_answer(sent, config, got), config, request, 0)
    assert torch.equal(answer.values, sent.values)


def test_fakes_are_rounded_before_anybody_sees_them():
    config = tiny_config(message_precision="compact", fakes_per_round=8)
    drawn, answered = draw_fakes(config, new_state(config))
    for request in (drawn, public_fakes(config)):
        codec.pack_request(request.tensors, config)  # or it would raise
    # The server's own images keep every bit: the graph goes on from them.
    kept, sent = answered.detach(), drawn.tensors["images"][-config.batch_size :]
    assert not torch.equal(kept, sent)
    assert (kept - sent).abs().max() <= 1 / 4  # L is at least 2


# ------------------------------------------------------------------ engines


def test_compact_flower_trains_bit_for_bit_as_the_local_engine(create):
    """And otherwise than exact precision does, on the same ledger."""
    names = {"flower": "compact", "local": "compact", "exact": "exact"}
    flower, *others = (
        create(name, num_rounds=2, message_precision=precision, clients_per_round=1)
        for name, precision in names.items()
    )
    start(flower, FakeGrid(flower.config.num_nodes, num_workers=2))
    for folder in others:
        train(folder)
    local, exact = others
    assert product(flower) == product(local) != product(exact)
    assert events(local) == events(exact)


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_the_papers_round_stays_within_its_target(share):
    """Whatever the generator draws, noise over the whole image included."""
    images = codec.rounded(_request(_sparse(PAPER, share)), PAPER).tensors["images"]
    labels = torch.randint(0, 10, (160,), generator=_rng(0))
    asked = {"participants": (5,), "trainees": (5,), "keep_round": 29_999}
    request = Request(30_000, {"images": images, "labels": labels}, **asked)
    answer = _release(PAPER, _noisy(PAPER))
    messages = (encode_request(request, PAPER), encode_answer(answer, PAPER, request))
    parts = [part for message in messages for item in message.items() for part in item]
    count = sum(len(p if isinstance(p, bytes) else str(p)) for p in parts)
    assert count <= TARGET
    # log2(sqrt(2 pi e) * 8) = 5.05 bits per value, 25,088 values: 15,830 bytes.
    assert 15_800 < len(codec.pack_release(_noisy(PAPER), PAPER)) < 16_400
