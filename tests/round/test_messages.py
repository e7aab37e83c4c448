"""Messages: only what is sanitized leaves a node, only what is well-formed enters."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedgs.mechanism.masks import Announced, Attempt
from fedgs.mechanism.sanitizer import PerSampleGradients, SanitizedGradients, clip
from fedgs.methods.base import Request
from fedgs.methods.schedule import EVERYONE
from fedgs.round import messages
from hostile import NODE, a_release, a_request
from refusals import assert_refused
from tiny import tiny_config

CONFIG = tiny_config()
FAKES = (8, 1, 16, 16)  # n_dis * batch size = 2 * 4 fakes go down ...
RELEASE = (4, 1, 16, 16)  # ... and the last B = 4 of them are answered


def _batch(**changes: object) -> Request:
    return a_request(CONFIG, **{"trainees": EVERYONE} | changes)


def _decode(payload: dict, request: Request) -> SanitizedGradients | None:
    return messages.decode_answer(payload, CONFIG, request, NODE)


def _encode(answer: object) -> dict:
    return messages.encode_answer(answer, CONFIG, _batch())


# ---------------------------------------------------------------------- round trips


def test_a_node_without_participants_answers_nothing():
    empty, request = _encode(None), _batch(participants=(1, 4))
    assert empty == {"is_empty": 1}
    assert _decode(empty, request) is None
    assert_refused("empty, although its clients take part", _decode, empty, _batch())
    release = _encode(a_release(CONFIG))
    assert_refused("none of its clients takes part", _decode, release, request)


def test_an_answer_names_the_request_that_it_answers():
    answer = _encode(a_release(CONFIG))
    for other in (_batch(participants=(2, 5)), _batch(images=torch.zeros(FAKES))):
        assert_refused("its request is another", _decode, answer, other)
    # What the server says of its checkpoints is no part of the question.
    assert _decode(answer, _batch(keep_round=0)) is not None


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
        _encode(unsanitized)


# ------------------------------------------------------------- what cannot be decoded
# More of it is in tests/clients/test_hostile.py.


# --------------------------------------------------------------------------- digest


@pytest.mark.parametrize(
    "changes",
    [
        {"round": 4},
        {"participants": (2, 3)},
        {"participants": (24,)},
        {"participants": EVERYONE},
        {"trainees": (2, 4)},
        {"labels": (torch.arange(8) + 1) % 3},
        {"images": _batch().tensors["images"].roll(1, 0)},
        {"images": torch.nextafter(_batch().tensors["images"], torch.tensor(2.0))},
    ],
)
def test_another_request_has_another_digest(changes):
    assert _batch(**changes).digest() != _batch().digest()
    # The bookkeeping may differ between two copies of one request.
    assert _batch(keep_round=0).digest() == _batch().digest()


# -------------------------------------------------------------------------- clients


def test_an_envelope_hashes_the_request_the_nodes_and_their_keys():
    """By this hash nodes of one version know requests of another one."""
    tensors = {"images": torch.arange(6.0).view(2, 3), "labels": torch.tensor([1, 2])}
    request = Request(3, tensors, participants=(2, 4))
    keys = {0: Announced(b"a" * 32, b""), 2: Announced(b"b" * 32, b"sig")}
    sent = messages.MaskedRequest(request, Attempt(2, keys))
    assert request.digest()[:16] == "9b3d7f039a4d2671"
    assert sent.digest()[:16] == "8e4736baa118d346"
    others = (
        messages.MaskedRequest(request, Attempt(3, keys)),
        messages.MaskedRequest(request, Attempt(2, {**keys, 2: keys[0]})),
        messages.MaskedRequest(replace(request, participants=(2,)), sent.attempt),
    )
    assert sent.digest() not in {other.digest() for other in others}
    assert messages.content_of(sent) is messages.content_of(request) is request
