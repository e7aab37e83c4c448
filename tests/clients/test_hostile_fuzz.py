"""Both decoders against generated messages: refused, or exactly what they say.

Only `UserError` may come out. Whatever is accepted must be in canonical form, within
the run's limits, and encode to the same message again. `make test` tries 500 messages
of each kind in each transport, `make test-all` 5,000: ten thousand for each decoder.
"""

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.federation.messages import (
    EVERYONE,
    decode_answer,
    decode_batch,
    encode_answer,
    encode_batch,
)
from fedgs.mechanism.norm_check import largest_norm
from fedgs.mechanism.quantization import release_step
from hostile import COMPACT, EXACT, NODE, a_release, a_request, header_of

CONFIGS = [EXACT, COMPACT]
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
each_config = pytest.mark.parametrize("config", CONFIGS, ids=["exact", "compact"])
each_count = pytest.mark.parametrize(  # messages of each kind, in each transport
    "count", [500, pytest.param(5_000, marks=pytest.mark.slow)]
)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


HUGE = {"dtype": "F32", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}
HEADERS = st.dictionaries(
    st.sampled_from(["gradients", "images", "labels", "__metadata__", "x"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(
                ["F64", "F32", "F16", "BF16", "F8_E4M3", "F4", "C64", "I64", "BOOL", ""]
            ),
            "shape": st.lists(
                st.sampled_from([0, 1, 4, 8, 16, 2**40, 2**64 - 1, -1]), max_size=4
            ),
            "data_offsets": st.lists(st.sampled_from([0, 4, 64, 8192]), max_size=3),
        }
    ),
    max_size=3,
).map(lambda header: header_of(**header))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 10),
    st.floats(),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.text(max_size=20),
    st.binary(max_size=40),
    st.lists(st.integers(0, 6), max_size=4),
)
CLIENTS = st.one_of(
    st.just(EVERYONE),
    st.lists(st.integers(-1, 7), max_size=4).map(lambda c: ",".join(map(str, c))),
    st.text(alphabet="0123456,+-_ \u0664all", max_size=8),
)
FLOATS = st.floats(width=32) | st.floats(-2, 2, width=32)


@st.composite
def _edited(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes of which some are others, are missing or too many."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(
            st.integers(0, min(len(content) - 1, 300)) | st.integers(0, len(valid))
        )
        if (kind := draw(st.sampled_from("sdi"))) == "s" and at < len(content):
            content[at] = draw(st.integers(0, 255))
        elif kind == "d":
            del content[at : at + draw(st.integers(1, 8))]
        else:
            content[at:at] = draw(st.binary(min_size=1, max_size=8))
        if not content:
            break
    return bytes(content)


@st.composite
def _values(draw: st.DrawFn, honest: dict[str, torch.Tensor]) -> bytes:
    """The right tensors with some other values in them."""
    tensors = {name: value.clone() for name, value in honest.items()}
    for value in tensors.values():
        for _ in range(draw(st.integers(0, 3))):
            at = draw(st.integers(0, value.numel() - 1))
            numbers = FLOATS if value.is_floating_point() else st.integers(-2, 5)
            value.view(-1)[at] = draw(numbers)
    return save(tensors)


def _contents(valid: bytes, config: RunConfig) -> st.SearchStrategy[bytes]:
    """What may stand where the tensors do."""
    some = st.binary(max_size=80)
    kinds = [some, st.builds(lambda h, data: h + data, HEADERS, some), _edited(valid)]
    if config.transport == "exact":
        kinds.append(_values(load(valid)))
    else:
        data = zlib.decompress(valid)
        kinds.append(_edited(data).map(zlib.compress))
        kinds.append(
            st.binary(min_size=len(data) // 256, max_size=len(data) // 256).map(
                lambda block: zlib.compress((block * 256)[: len(data)])
            )
        )
    return st.one_of(kinds)


def _changed(valid: dict, config: RunConfig) -> st.SearchStrategy[dict]:
    """A valid message, of which any fields are missing, more, or something else."""
    fields = {name: st.just(value) | SCALARS for name, value in valid.items()}
    tensors = st.just(valid["tensors"]) | _contents(valid["tensors"], config)
    fields["tensors"] = tensors | SCALARS
    for name in {"participants", "trainees"} & valid.keys():
        fields[name] = st.just(valid[name]) | CLIENTS | SCALARS
    # Nearly all fields as they are, so that what is looked at last is reached as well.
    one = st.sampled_from(sorted(fields)).flatmap(
        lambda name: fields[name].map(lambda value: valid | {name: value})
    )
    missing = st.sampled_from(sorted(fields)).map(
        lambda name: {n: v for n, v in valid.items() if n != name}
    )
    extra = st.dictionaries(st.text(max_size=8), SCALARS, min_size=1, max_size=2)
    more = extra.map(lambda extra: extra | valid)
    most = {**{n: st.just(v) | fields[n] for n, v in valid.items()}, "tensors": tensors}
    wild = st.fixed_dictionaries({}, optional=fields)
    return st.one_of(one, one, st.fixed_dictionaries(most), missing, more, wild)


def _request_messages(config: RunConfig) -> st.SearchStrategy[dict]:
    return _changed(encode_batch(a_request(config), config), config)


def _answer_messages(config: RunConfig) -> st.SearchStrategy[dict]:
    honest = encode_answer(a_release(config), config, a_request(config))
    return _changed(honest, config)


# ------------------------------------------------------------------ what must hold


def accepted(decode: Callable[[], Any]) -> Any:
    """Returns what was decoded, None where it was refused in one line."""
    try:
        return decode()
    except UserError as error:
        text = str(error)
    assert text.isprintable()
    return None


def check_request(payload: dict, config: RunConfig) -> bool:
    """Decodes a request; returns whether it was accepted, rightly."""
    batch = accepted(lambda: decode_batch(payload, config))
    if batch is None:
        return False
    again = encode_batch(batch, config)
    assert {type(value) for value in again.values()} <= {int, str, bytes}
    for name in ("round", "participants", "trainees", "keep_round"):
        assert type(again[name]) is type(payload[name])
        assert again[name] == payload[name]
    assert set(payload) <= {*again, "run_folder", "run_id"}
    assert tuple(batch.images.shape) == (8, 1, 16, 16)
    assert batch.images.dtype == torch.float32
    assert 0 <= batch.images.min() <= batch.images.max() <= 1  # False with a NaN
    assert batch.labels.dtype == torch.int64
    assert 0 <= batch.labels.min() <= batch.labels.max() < 3
    assert 0 <= batch.keep_round <= batch.round <= config.num_rounds
    assert len(batch.participants) <= 2
    for clients in (batch.participants, batch.trainees):
        assert clients == EVERYONE or set(clients) <= set(range(6))
    sent = decode_batch(again, config)
    assert torch.equal(sent.images, batch.images)
    assert torch.equal(sent.labels, batch.labels)
    return True


def check_answer(payload: dict, config: RunConfig) -> bool:
    """Decodes an answer; returns whether it was accepted, rightly."""
    request = a_request(config)
    answer = accepted(lambda: decode_answer(payload, config, request, NODE))
    if answer is None:  # node 2 takes part: it is no empty reply that was accepted
        return False
    honest = encode_answer(a_release(config), config, request)
    for name in set(honest) - {"tensors"}:
        assert type(payload[name]) is type(honest[name])
        assert payload[name] == honest[name]
    assert set(payload) == set(honest)
    assert tuple(answer.values.shape) == config.release_shape
    assert answer.values.dtype == torch.float32
    norms = answer.values.double().flatten(1).norm(dim=1)
    assert bool((norms <= largest_norm(config, 1)).all())  # False with a NaN
    if step := release_step(config):
        whole = answer.values.double() / step
        assert torch.allclose(whole, whole.round(), atol=1e-2)
    return True


# ------------------------------------------------------------------ fuzzing


def fuzz(messages: st.SearchStrategy[dict], check, config: RunConfig, count: int):
    """Tries `count` messages; returns how many were tried and how many accepted."""
    outcomes: list[bool] = []

    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=SLOW
    )
    @given(payload=messages)
    @example(payload={"tensors": header_of(gradients={"dtype": "F4"})})
    @example(payload={"tensors": header_of(gradients=HUGE, images=HUGE)})
    def tried(payload: dict) -> None:
        outcomes.append(check(payload, config))

    tried()
    return len(outcomes), sum(outcomes)


@each_config
@each_count
def test_no_request_is_accepted_wrongly(config, count):
    tried, accepted = fuzz(_request_messages(config), check_request, config, count)
    assert tried >= count
    assert 0 < accepted < tried  # both kinds were among them


@each_config
@each_count
def test_no_answer_is_accepted_wrongly(config, count):
    tried, accepted = fuzz(_answer_messages(config), check_answer, config, count)
    assert tried >= count
    assert 0 < accepted < tried
