"""Hostile messages, one by one: refused with one line, little memory, no data."""

import re
import tracemalloc

import pytest

from fedgs.errors import UserError
from fedgs.federation.messages import one_line
from hostile import COMPACT, EXACT, STAGE, Case
from hostile_answers import ANSWERS
from hostile_requests import REQUESTS

CASES = REQUESTS + ANSWERS
MOST_MEMORY = 100_000  # bytes beside the message; an honest one takes half of that


@pytest.mark.parametrize("config", [EXACT, COMPACT, STAGE])
@pytest.mark.parametrize("peer", ["server", "client"])
def test_the_honest_message_passes(peer, config):
    case = Case("", peer, "", config, lambda payload: payload)
    assert case.decode(case.payload()) is not None


@pytest.mark.parametrize("case", CASES, ids=[f"{c.peer}: {c.what}" for c in CASES])
def test_a_hostile_message_is_refused_in_one_line_without_data(case):
    payload = case.payload()
    honest = Case("", case.peer, "", case.config, lambda honest: honest).payload()
    assert _typed(payload) != _typed(honest)
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            case.decode(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value) == case.outcome
    assert peak < max(MOST_MEMORY, 2 * len(honest["tensors"]))
    assert "\n" not in case.outcome
    assert not re.search(r"4\.?711|4\.711", case.outcome)
    # The traceback that a client keeps quotes no cause either.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def _typed(payload: dict) -> dict:
    """The fields with their types, for 1, 1.0 and True are equal."""
    return {name: (type(value), value) for name, value in payload.items()}


def test_foreign_text_is_cut_to_one_line():
    assert one_line("node 3 failed\n2026 ERROR root: all is well\x1b[2J") == (
        "node 3 failed?2026 ERROR root: all is well?[2J"
    )
    assert len(one_line("x" * 10**7)) == 200


def test_there_are_many_and_no_two_are_the_same():
    assert len(CASES) >= 30
    for peer in ("server", "client"):
        names = [(case.what, case.config) for case in CASES if case.peer == peer]
        assert len(set(names)) == len(names)
