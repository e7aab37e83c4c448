"""Messages: only what is sanitized leaves a node, only what is well-formed enters."""

import dataclasses
import json
import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from fedgs.config import RunConfig, UserError
from fedgs.messages import (
    EVERYONE,
    FakeBatch,
    clients_of,
    decode_answer,
    decode_batch,
    encode_answer,
    encode_batch,
)
from fedgs.noise import NoiseStream
from fedgs.sanitizer import (
    PerSampleGradients,
    SanitizedGradients,
    clip,
    received,
    sanitize,
)
from tiny import tiny_config

CONFIG = tiny_config()
ROUND, NODE = 3, 2
FAKES = (8, 1, 16, 16)  # n_dis * batch size = 2 * 4 fakes go down ...
RELEASE = (4, 1, 16, 16)  # ... and the last B = 4 of them are answered
SECRET = 0.12345  # a value that must not be quoted; its digits are searched for


def _batch(**changes: object) -> FakeBatch:
    rng = torch.Generator().manual_seed(0)
    fields = {
        "round": ROUND,
        "images": torch.rand(FAKES, generator=rng),
        "labels": torch.arange(8) % 3,
        "participants": (1, 4),
        "trainees": EVERYONE,
        "keep_round": 2,
    }
    return FakeBatch(**(fields | changes))


def _release(values: Tensor | None = None) -> SanitizedGradients:
    if values is None:
        values = torch.randn(RELEASE, generator=torch.Generator().manual_seed(1))
    return received(values, ROUND, NODE, CONFIG.noise_std, CONFIG.clip_bound)


def _decode(payload: dict, config: RunConfig = CONFIG) -> SanitizedGradients | None:
    return decode_answer(payload, config, ROUND, NODE)


def _header(**tensors: object) -> bytes:
    """The bytes of a safetensors file with a header of one's own."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


# ---------------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    ("participants", "trainees"),
    [((1, 4), EVERYONE), (EVERYONE, EVERYONE), ((), EVERYONE), ((5,), (5,))],
)
def test_a_request_survives_the_way_to_a_node(participants, trainees):
    sent = _batch(participants=participants, trainees=trainees)
    got = decode_batch(encode_batch(sent), CONFIG)
    for field in ("round", "participants", "trainees", "keep_round"):
        assert getattr(got, field) == getattr(sent, field)
    assert torch.equal(got.images, sent.images)
    assert torch.equal(got.labels, sent.labels)
    assert got.digest() == sent.digest()


def test_an_answer_survives_the_way_to_the_server():
    clipped = clip(PerSampleGradients(torch.ones(2, *RELEASE)), CONFIG.clip_bound)
    noise = NoiseStream(7, NODE, ROUND)
    sent = sanitize([clipped], CONFIG.noise_std, noise, ROUND, NODE)
    got = _decode(encode_answer(sent))
    assert type(got) is SanitizedGradients
    assert torch.equal(got.values, sent.values)
    assert (got.round, got.node_id) == (ROUND, NODE)
    assert (got.noise_std, got.clip_bound) == (1.0, 1.0)  # 2 * C * sigma = 2 * 1 * 0.5


def test_an_answer_in_the_dct_basis_survives():
    config = tiny_config(gradient_basis="dct", dct_size=5)
    sent = _release(torch.ones(4, 1, 5, 5))
    assert torch.equal(_decode(encode_answer(sent), config).values, sent.values)


def test_a_node_without_participants_answers_nothing():
    assert encode_answer(None) == {"is_empty": 1}
    assert _decode(encode_answer(None)) is None


def test_a_reply_carries_the_release_and_public_identifiers_only():
    # privacy.md section 5: no loss, no norm, no number of examples, no duration.
    payload = encode_answer(_release())
    assert set(payload) == {
        "is_empty",
        "round",
        "node_id",
        "noise_std",
        "clip_bound",
        "tensors",
    }
    assert set(load(payload["tensors"])) == {"gradients"}


def test_messages_hold_scalars_and_bytes_only():
    for payload in (encode_batch(_batch()), encode_answer(_release())):
        assert {type(value) for value in payload.values()} <= {str, int, float, bytes}


# ------------------------------------------------------------ what cannot be encoded


class _Disguised(SanitizedGradients):
    """A subclass that skips the check of its maker."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


@pytest.mark.parametrize(
    "unsanitized",
    [
        PerSampleGradients(torch.zeros(1, *RELEASE)),
        clip(PerSampleGradients(torch.zeros(1, *RELEASE)), 1.0),
        torch.zeros(RELEASE),
        {"gradients": torch.zeros(RELEASE)},
        _Disguised(torch.zeros(RELEASE)),
        0.5,
        "loss",
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_sanitized_cannot_be_encoded(unsanitized):
    with pytest.raises(TypeError, match="must not leave a client"):
        encode_answer(unsanitized)


# ------------------------------------------------------------- what cannot be decoded

BAD_VALUES = {
    "shape": torch.full((4, 1, 16, 15), SECRET),
    "fewer fakes": torch.full((3, 1, 16, 16), SECRET),
    "one client each": torch.full((1, 4, 1, 16, 16), SECRET),
    "float64": torch.full(RELEASE, SECRET, dtype=torch.float64),
    "float16": torch.full(RELEASE, SECRET, dtype=torch.float16),
    "int64": torch.full(RELEASE, 12345),
    "NaN": torch.full(RELEASE, SECRET).index_fill(0, torch.tensor([1]), math.nan),
    "infinite": torch.full(RELEASE, SECRET).index_fill(0, torch.tensor([1]), math.inf),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_an_answer_of_wrong_values_is_refused_without_quoting_them(name):
    with pytest.raises(UserError) as caught:
        _decode(encode_answer(_release(BAD_VALUES[name])))
    assert "answer of node 2 to round 3" in str(caught.value)
    assert "1234" not in str(caught.value)
    assert "nan" not in str(caught.value).lower().split()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("round", 4, "another round or node"),
        ("node_id", 1, "another round or node"),
        ("noise_std", 0.99, "another noise"),
        ("noise_std", math.nan, "another noise"),
        ("noise_std", None, "another noise"),
        ("clip_bound", 2.0, "another noise"),
        ("round", "3", "integer round"),
        ("node_id", 2.0, "integer node_id"),
        ("tensors", "text", "without tensors"),
        ("tensors", b"", "cannot be decoded"),
        ("tensors", b"\x00" * 64, "cannot be decoded"),
        ("tensors", save({"other": torch.ones(RELEASE)}), "other tensors"),
        (
            "tensors",
            save({"gradients": torch.ones(RELEASE), "loss": torch.ones(1)}),
            "other tensors",
        ),
    ],
)
def test_an_answer_that_does_not_fit_the_round_is_refused(field, value, words):
    payload = encode_answer(_release())
    with pytest.raises(UserError, match=words):
        _decode(payload | {field: value})


@pytest.mark.parametrize("field", ["round", "node_id", "noise_std", "tensors"])
def test_an_answer_with_a_missing_field_is_refused(field):
    payload = encode_answer(_release())
    del payload[field]
    with pytest.raises(UserError):
        _decode(payload)


def test_a_truncated_answer_is_refused():
    payload = encode_answer(_release())
    with pytest.raises(UserError, match="cannot be decoded"):
        _decode(payload | {"tensors": payload["tensors"][:-1]})


def test_a_malformed_answer_is_not_quoted():
    for content in (
        _header(gradients={"dtype": str(SECRET), "shape": [], "data_offsets": [0, 0]}),
        _header(gradients=str(SECRET)),
        _header(**{str(SECRET): "x"}),
        struct.pack("<Q", 7) + str(SECRET).encode(),
        save({str(SECRET): torch.ones(1)}),
    ):
        with pytest.raises(UserError) as caught:
            _decode(encode_answer(_release()) | {"tensors": content})
        assert "1234" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": torch.rand(7, 1, 16, 16)}, "shape"),
        ({"images": torch.rand(8, 1, 28, 28)}, "shape"),
        ({"images": torch.rand(8, 3, 16, 16)}, "shape"),
        ({"images": torch.zeros(FAKES, dtype=torch.float64)}, "fakes"),
        ({"images": torch.full(FAKES, 1.01)}, "outside"),
        ({"images": torch.full(FAKES, -0.01)}, "outside"),
        ({"images": torch.full(FAKES, math.nan)}, "outside"),
        ({"labels": torch.full((8,), 3)}, "labels outside"),
        ({"labels": torch.full((8,), -1)}, "labels outside"),
        ({"labels": torch.zeros(7, dtype=torch.int64)}, "labels of shape"),
        ({"labels": torch.zeros(8)}, "labels"),
    ],
)
def test_a_request_that_does_not_fit_the_run_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        decode_batch(encode_batch(_batch(**changes)), CONFIG)


FIELDS = ("round", "participants", "trainees", "keep_round", "tensors")


@pytest.mark.parametrize("field", FIELDS)
def test_a_request_with_a_missing_field_is_refused(field):
    payload = encode_batch(_batch())
    del payload[field]
    with pytest.raises(UserError):
        decode_batch(payload, CONFIG)


@pytest.mark.parametrize("clients", ["1;2", "everyone", "1.5", "9" * 5000, None])
def test_a_request_for_malformed_clients_is_refused(clients):
    payload = encode_batch(_batch()) | {"participants": clients}
    with pytest.raises(UserError, match="list of clients"):
        decode_batch(payload, CONFIG)


# -------------------------------------------------------------------------- fuzzing

HEADERS = st.dictionaries(
    st.sampled_from(["gradients", "images", "labels", "__metadata__", "x"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(
                ["F64", "F32", "F16", "BF16", "F8_E4M3", "F4", "C64", "I64", "BOOL", ""]
            ),
            "shape": st.lists(st.sampled_from([0, 1, 4, 8, 16, 2**40, -1]), max_size=4),
            "data_offsets": st.lists(st.sampled_from([0, 4, 64, 8192]), max_size=3),
        }
    ),
    max_size=3,
).map(lambda header: _header(**header))
CONTENT = st.one_of(
    st.binary(max_size=80),
    st.builds(lambda header, data: header + data, HEADERS, st.binary(max_size=80)),
    st.builds(
        lambda content, at, byte: content[:at] + bytes([byte]) + content[at + 1 :],
        st.sampled_from(
            [encode_answer(_release())["tensors"], encode_batch(_batch())["tensors"]]
        ),
        st.integers(0, 300),
        st.integers(0, 255),
    ),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
)


def _changed(valid: dict) -> st.SearchStrategy[dict]:
    """A valid payload, of which any fields are missing or hold something else."""
    fields = {name: st.one_of(st.just(value), SCALARS) for name, value in valid.items()}
    fields["tensors"] = st.one_of(st.just(valid["tensors"]), CONTENT, SCALARS)
    return st.fixed_dictionaries({}, optional=fields)


@given(payload=_changed(encode_answer(_release())))
@example(payload={"tensors": _header(gradients={"dtype": "F4"})})
@settings(deadline=None, max_examples=400)
def test_no_reply_raises_anything_but_a_user_error(payload):
    try:
        answer = _decode(payload)
    except UserError:
        return
    assert answer is None or answer.values.shape == RELEASE


@given(payload=_changed(encode_batch(_batch())))
@settings(deadline=None, max_examples=400)
def test_no_request_raises_anything_but_a_user_error(payload):
    try:
        batch = decode_batch(payload, CONFIG)
    except UserError:
        return
    assert batch.images.shape == FAKES
    assert 0 <= batch.images.min() <= batch.images.max() <= 1


@pytest.mark.parametrize(
    "dtype", ["F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3", "C64", "U16", "?"]
)
def test_a_tensor_of_an_exotic_type_is_refused(dtype):
    tensor = {"dtype": dtype, "shape": [64], "data_offsets": [0, 64]}
    for size in (32, 48, 64, 128, 512):
        tensor["data_offsets"] = [0, size]
        content = _header(gradients=tensor) + b"\x01" * size
        with pytest.raises(UserError):
            _decode(encode_answer(_release()) | {"tensors": content})


# --------------------------------------------------------------------------- digest


def test_the_digest_is_a_function_of_what_is_asked():
    assert _batch().digest() == _batch().digest()
    # The bookkeeping may differ between two copies of one request.
    assert _batch(keep_round=0).digest() == _batch().digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"round": 4},
        {"participants": (1, 3)},
        {"participants": (14,)},
        {"participants": EVERYONE},
        {"trainees": (1, 4)},
        {"labels": (torch.arange(8) + 1) % 3},
        {"images": _batch().images.roll(1, 0)},
    ],
)
def test_another_request_has_another_digest(changes):
    assert _batch(**changes).digest() != _batch().digest()


def test_one_bit_of_one_pixel_changes_the_digest():
    images = _batch().images.clone()
    images[7, 0, 15, 15] = torch.nextafter(images[7, 0, 15, 15], torch.tensor(2.0))
    assert _batch(images=images).digest() != _batch().digest()


# -------------------------------------------------------------------------- clients


def test_a_node_finds_its_clients_in_its_own_order():
    assert clients_of(EVERYONE, range(3, 6)) == [3, 4, 5]
    assert clients_of((5, 0, 3), range(3, 6)) == [3, 5]
    assert clients_of((0, 99, -1), range(3, 6)) == []
    assert clients_of((), range(3, 6)) == []


def test_a_request_cannot_be_changed_after_it_was_hashed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        _batch().round = 9
