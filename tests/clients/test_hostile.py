"""Hostile messages: refused in one line without data and with little memory.

Named attacks, and a grammar of changes to an honest message: only `UserError` may come
out, and what is accepted is within the run's limits and encodes to itself. Attacks on a
whole run: test_hostile_run.py.
"""

import json
import math
import re
import struct
import tracemalloc
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
from fedgs.mechanism.answer_bounds import largest_norm
from fedgs.mechanism.quantization import release_step
from fedgs.methods.schedule import EVERYONE
from fedgs.round.messages import one_line
from hostile import (
    COMPACT,
    EXACT,
    RELEASE,
    Change,
    Payload,
    a_release,
    a_request,
    content,
    decoded,
    encoded,
    fields,
    honest,
)

SECRET = 4711  # in what is sent wherever it can be; must not be in a log line
MOST_MEMORY = 100_000  # bytes beside the message; an honest one takes half of that
MILLION = ",".join(str(number) for number in range(10**6))
AXES = "axes"  # of the feature network


def values(**named: Any) -> Change:
    """Sends other tensors, or other ones beside; None leaves one out."""

    def change(packed: bytes) -> bytes:
        tensors = load(packed) | named
        return save({n: v.contiguous() for n, v in tensors.items() if v is not None})

    return content(change)


def spoilt(name: str, value: float) -> Change:
    """Replaces the last number of a tensor."""

    def change(packed: bytes) -> bytes:
        tensors = load(packed)
        tensors[name].view(-1)[-1] = value
        return save(tensors)

    return content(change)


def inflated(make: Callable[[bytes], bytes]) -> Change:
    """Changes what is compressed."""
    return content(lambda packed: zlib.compress(make(zlib.decompress(packed))))


def header_of(**header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def bomb(size: int) -> bytes:
    """Zeros that inflate to `size` bytes; about a thousandth of it is sent."""
    deflate = zlib.compressobj(9)
    block = bytes(1 << 20)
    parts = [deflate.compress(block) for _ in range(size >> 20)]
    return b"".join(parts) + deflate.flush()


OLD = bytes.fromhex(a_request(EXACT, images=torch.zeros(8, 1, 16, 16)).digest())
CODE = b"cos\nsystem\n(S'echo 4711'\ntR."
LONG = 1e3 * a_release(RELEASE).values

# (who sends it, in which run) -> the refusal -> what meets it.
ATTACKS: dict[tuple[str, RunConfig], dict[str, list[Change]]] = {
    ("server", EXACT): {
        "round is no integer from 0 to 9": [fields(round=SECRET**272)],
        "has no tensors": [fields(tensors="4711")],
        "other fields than": [fields(send_me_client_4711=1)],
        "participants is no list of clients below 6": [
            *(fields(participants=sent) for sent in (MILLION, "2,4711", "2,2", [2, 4]))
        ],
        "trainees is no list of clients below 6": [
            *(fields(trainees=sent) for sent in ("\u0664", "+1", "01", "1_0", b"all")),
            *(fields(trainees=sent) for sent in (" 1", "1,", "1;2", None)),
        ],
        "more than 2 participants": [fields(participants=EVERYONE)],
        "more than 0 participants": [fields(round=0, keep_round=0)],  # the warm start
        r"fakes outside \[0, 1\]": [
            *(spoilt("images", value) for value in (SECRET, -1e-6))
        ],
        "not finite": [spoilt("images", value) for value in (math.nan, math.inf)],
        r"labels outside \[0, 3\)": [spoilt("labels", SECRET)],
        "a request's images: the shape is": [values(images=torch.zeros(7, 1, 16, 16))],
        "other tensors than": [values(secret_4711=torch.zeros(1))],
        "bytes and may have 9680": [
            values(images=torch.zeros(8, 1, 28, 28)),
            content(lambda packed: bytes(1 << 26)),
        ],
        "cannot be decoded": [content(lambda packed: bomb(1 << 22))],
    },
    ("server", COMPACT): {
        "exactly 2113": [
            content(lambda packed: bomb(1 << 21)),  # small enough for the first look
            content(lambda packed: packed + b"4711"),
        ],
        "cannot be decoded": [
            content(lambda packed: packed[:-1] + bytes([packed[-1] ^ 1]))  # checksum
        ],
        "another number of levels": [inflated(lambda data: b"\x01" + data[1:])],
        "fakes outside": [inflated(lambda data: b"\x02\x04" + data[2:])],
    },
    ("server", RELEASE): {
        "other tensors than the": [values(expected=None)],
        "a request's axes: the shape is": [values(**{AXES: torch.zeros(1, 4)})],
        "not finite": [spoilt(AXES, math.nan)],
        "cannot be decoded": [fields(tensors=CODE)],
        "that is not to all": [fields(participants="2"), fields(trainees="2")],
    },
    ("client", EXACT): {
        "not finite": [spoilt("gradients", math.nan)],
        "1 of 4 gradients have a norm above 22.33": [spoilt("gradients", 47.11)],
        "gradients: the shape is": [values(gradients=torch.zeros(3, 1, 16, 16))],
        "bytes and may have 5120": [values(gradients=torch.zeros(2, 4, 1, 16, 16))],
        "cannot be decoded": [
            fields(tensors=struct.pack("<Q", 2**40) + b"{}4711"),
            fields(tensors=b""),
        ],
        "other tensors than": [values(loss=torch.tensor(47.11))],
        "other fields than": [
            fields(num_examples=SECRET),
            lambda payload: {"is_empty": 1, "loss": 47.11},
        ],
        "its node_id is another": [fields(node_id=4)],
        "its round is another": [fields(round=2)],
        "its request is another": [fields(request=OLD)],  # under the new round's number
        "its noise_std is another": [fields(noise_std=0.4711)],
        "its clip_bound is another": [
            fields(clip_bound=47.11),
            fields(clip_bound=True),
        ],
        "empty, although its clients take part": [lambda payload: {"is_empty": 1}],
        "is_empty is no integer": [fields(is_empty=SECRET), lambda payload: {}],
    },
    ("client", COMPACT): {
        "4 of 4 gradients have a norm": [inflated(lambda data: b"\xff" * len(data))],
        "exactly 2048": [content(lambda packed: bomb(1 << 21))],
    },
    ("client", RELEASE): {
        "1 of 1 embeddings have a norm above .*, which 2 clients": [
            values(gradients=LONG)
        ]
    },
}
CASES = [
    pytest.param(*where, change, words, id=f"{where[0]}: {words}")
    for where, refusals in ATTACKS.items()
    for words, changes in refusals.items()
    for change in changes
]
RUNS = [
    (side, config)
    for side in ("server", "client")
    for config in (EXACT, COMPACT, RELEASE)
]


@pytest.mark.parametrize(("side", "config", "change", "words"), CASES)
def test_a_named_attack_is_refused_in_one_line_without_data(
    side, config, change, words
):
    sound = honest(side, config)
    assert decoded(side, config, sound) is not None  # imports what it needs, too
    payload = change(sound)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=words) as caught:
            decoded(side, config, payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < max(MOST_MEMORY, 2 * len(sound["tensors"]))
    assert str(caught.value).isprintable()
    assert not re.search(r"4\.?711", str(caught.value))
    # The traceback that a client keeps quotes no cause either.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_foreign_text_is_cut_to_one_line():
    assert one_line("node 3 failed\n2026 ERROR root: all is well\x1b[2J") == (
        "node 3 failed?2026 ERROR root: all is well?[2J"
    )
    assert len(one_line("x" * 10**7)) == 200


# ------------------------------------------------------------------ a grammar

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
    # Clients, as participants and trainees are written.
    st.just(EVERYONE),
    st.lists(st.integers(-1, 7), max_size=4).map(lambda c: ",".join(map(str, c))),
    st.text(alphabet="0123456,+-_ \u0664al", max_size=8),
)
HUGE = {"dtype": "F32", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}
HEADERS = st.dictionaries(
    st.sampled_from(["gradients", "images", "labels", "__metadata__", "x"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F64", "F32", "F16", "F4", "I64", "BOOL", ""]),
            "shape": st.lists(
                st.sampled_from([0, 1, 4, 8, 16, 2**40, 2**64 - 1, -1]), max_size=4
            ),
            "data_offsets": st.lists(st.sampled_from([0, 4, 64, 8192]), max_size=3),
        }
    ),
    max_size=3,
).map(lambda header: header_of(**header))


@st.composite
def _edited(draw: st.DrawFn, sound: bytes) -> bytes:
    """Bytes of which some are others, are missing or too many."""
    at = draw(st.integers(0, min(300, len(sound) - 1)) | st.integers(0, len(sound) - 1))
    return (
        sound[:at] + draw(st.binary(max_size=8)) + sound[at + draw(st.integers(0, 8)) :]
    )


@st.composite
def _renumbered(draw: st.DrawFn, sound: bytes) -> bytes:
    """The right tensors with some other numbers in them."""
    tensors = {name: value.clone() for name, value in load(sound).items()}
    tensor = tensors[draw(st.sampled_from(sorted(tensors)))]
    at = draw(st.integers(0, tensor.numel() - 1))
    is_float = tensor.is_floating_point()
    numbers = st.floats(width=32) | st.floats(0, 1, width=32)
    tensor.view(-1)[at] = draw(numbers if is_float else st.integers(-1, 4))
    return save(tensors)


def _messages(sound: Payload, config: RunConfig) -> st.SearchStrategy[Payload]:
    """An honest message with one to three changes."""
    packed = sound["tensors"]
    if config.message_precision == "compact":
        inside = _edited(zlib.decompress(packed)).map(zlib.compress)
    else:
        inside = _renumbered(packed)
    tensors = inside | _edited(packed) | st.builds(bytes.__add__, HEADERS, st.binary())
    names = st.sampled_from(sorted(sound))
    changes = st.one_of(
        tensors.map(lambda packed: {"tensors": packed}),
        st.builds(lambda name, value: {name: value}, names, SCALARS),
        st.builds(lambda name: {name: ...}, names),  # left out
        st.dictionaries(st.text(max_size=8), SCALARS, max_size=1),
    )

    def changed(changes: list[Payload]) -> Payload:
        payload = dict(sound)
        for change in changes:
            payload |= change
        return {name: value for name, value in payload.items() if value is not ...}

    return st.lists(changes, min_size=1, max_size=3).map(changed)


def check_accepted(side: str, config: RunConfig, payload: Payload) -> bool:
    """Decodes a message; returns whether it was accepted, rightly."""
    try:
        found = decoded(side, config, payload)
    except UserError as error:
        assert str(error).isprintable()  # noqa: PT017 some are accepted
        return False
    again = encoded(side, config, found)
    public = again.keys() - {"tensors"}
    assert payload.keys() - {"run_folder", "run_id"} == again.keys()
    assert [(type(payload[n]), payload[n]) for n in public] == [
        (type(again[n]), again[n]) for n in public
    ]
    sent = decoded(side, config, again)
    if side == "client":
        assert torch.equal(found.values, sent.values)
        assert found.values.shape == config.terms(found.round).shape
        norms = found.values.double().flatten(1).norm(dim=1)
        terms, hosted = config.terms(found.round), 2 if config is RELEASE else 1
        assert (norms <= largest_norm(config, hosted, terms=terms)).all()  # nor a NaN
        if step := release_step(config):
            whole = found.values.double() / step
            assert torch.allclose(whole, whole.round(), atol=1e-2)
        return True
    assert found.digest() == sent.digest()
    assert 0 <= found.keep_round <= found.round <= config.num_rounds
    if config is not RELEASE:
        images, labels = found.tensors["images"], found.tensors["labels"]
        assert images.shape == (8, 1, 16, 16)
        assert 0 <= images.min() <= images.max() <= 1  # False with a NaN
        assert 0 <= labels.min() <= labels.max() < 3
        assert len(found.participants) <= 2
        for clients in (found.participants, found.trainees):
            assert clients == EVERYONE or set(clients) <= set(range(6))
    return True


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize(("side", "config"), RUNS)
def test_no_message_is_accepted_wrongly(side, config):
    sound = honest(side, config)
    assert check_accepted(side, config, sound)
    outcomes: list[bool] = []
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]

    @settings(max_examples=150, suppress_health_check=slow)
    @given(payload=_messages(sound, config))
    @example(payload=sound | {"tensors": header_of(gradients={"dtype": "F4"})})
    @example(payload=sound | {"tensors": header_of(gradients=HUGE, images=HUGE)})
    def tried(payload: Payload) -> None:
        outcomes.append(check_accepted(side, config, payload))

    tried()
    assert {*outcomes} == {True, False}  # both kinds were among them
