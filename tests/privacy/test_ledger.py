"""The ledger: whatever is broken is an error, except a torn last line."""

import contextlib
import dataclasses
import hashlib
import json
import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedgs.privacy.ledger import GENESIS, Event, Ledger
from plans import event
from refusals import assert_refused


@pytest.fixture
def path(tmp_path):
    return append(tmp_path / "ledger.jsonl", *map(event, (1, 2, 3))).path


def append(path, *events):
    with contextlib.closing(Ledger.open(path)) as ledger:
        for new in events:
            ledger.append(new)
    return ledger


def sealed(previous, values):
    """One line by the format's description, independent of the writer."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256((previous + text).encode()).hexdigest()
    return f'{text[:-1]},"hash":"{digest}"}}\n', digest


def fields_of(event: Event) -> dict:
    """Returns what a line of a run's ledger has."""
    hidden = {"source": "", "context": "", "release": "gradient"}  # unless others
    values = dataclasses.asdict(event)
    return {k: v for k, v in values.items() if hidden.get(k) != v}


EVENTS = (
    event(1),
    event(2, participants="all", attempt=3, planned_nodes=4, counted_nodes=2),
    event(3, source="run/start/node"),
    event(4, release="embedding", batch_size=1),
)


def test_the_file_is_the_documented_format_and_comes_back(tmp_path):
    path, expected, head = tmp_path / "ledger.jsonl", "", GENESIS
    with contextlib.closing(Ledger.open(path)) as ledger:
        assert (ledger.length, ledger.head) == (0, GENESIS)
    for new in EVENTS:
        values = fields_of(new)
        values["participants"] = list(p) if (p := new.participants) != "all" else p
        line, head = sealed(head, values)
        expected += line
    assert append(path, *EVENTS).head == head
    assert path.read_text() == expected
    again = Ledger.read(path)
    assert (again.events, again.length, again.head) == (EVENTS, 4, head)


def test_every_append_is_fsynced_before_it_returns(path, monkeypatch):
    synced = []
    with contextlib.closing(Ledger.open(path)) as ledger:
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path.read_bytes()))
        ledger.append(event(4))
    assert synced == [path.read_bytes()]


# ------------------------------------------------------------------ damage

LINES = st.permutations([0, 1, 2]) | st.lists(st.integers(0, 2), max_size=5)


@given(
    order=LINES,
    start=st.integers(0, 999),
    cut=st.integers(0, 400) | st.just(0),
    put=st.binary(max_size=2),
)
@example(order=[0, 1, 2], start=0, cut=0, put=b"")
@example(order=[0, 1, 2], start=999, cut=1, put=b"")  # the last line feed
@example(order=[0, 1, 2], start=999, cut=0, put=b"\n")
def test_damaged_ledgers_are_refused_but_for_a_torn_last_line(
    tmp_path_factory, order, start, cut, put
):
    """Lines are mixed up; then bytes are cut out and others put in their place."""
    path = append(tmp_path_factory.mktemp("l") / "ledger.jsonl", *EVENTS[:3]).path
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    mixed = b"".join(lines[number] for number in order)
    start = start * len(mixed) // 1000 if start < 999 else max(len(mixed) - cut, 0)
    damaged = mixed[:start] + put + mixed[start + cut :]
    path.write_bytes(damaged)
    intact = damaged[: damaged.rfind(b"\n") + 1]
    count = intact.count(b"\n")
    if intact == b"".join(lines[:count]):
        assert Ledger.read(path).events == EVENTS[:count]
        assert path.read_bytes() == damaged  # reading changes nothing
        assert append(path, event(9)).length == count + 1
        assert path.read_bytes().startswith(intact + b'{"attempt":1,')
        return
    for opener in (Ledger.open, Ledger.read):
        assert_refused(r"ledger.jsonl: line \d+: .*restore", opener, path)
        assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "laplace"}, "kind = 'laplace'"),
        ({"colour": "red"}, "unknown or missing field colour"),
        ({"kind": ...}, "unknown or missing field kind"),
        ({"noise_std": None}, "noise_std = None"),
        ({"round": ""}, "round = ''"),
        ({"participants": [3, 1]}, "participants"),
        ({"participants": 7}, "participants = 7:"),
        ({"source": 7}, "source"),
        ({"release": "median"}, "'median': give one of gradient, embedding"),
    ],
)
def test_an_unknown_event_is_an_error_although_its_hash_is_right(
    path, changes, message
):
    values = {**fields_of(event(4)), **changes}
    values = {name: value for name, value in values.items() if value is not ...}
    line, _ = sealed(Ledger.read(path).head, values)
    path.write_text(path.read_text() + line)
    assert_refused(f"line 4: .*{message}", Ledger.read, path)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("round", [0]),
        ("attempt", [1.0]),
        ("num_clients", [True]),
        ("counted_nodes", [2]),
        ("noise_std", [-0.1, float("nan")]),
        ("clip_bound", [0, float("inf")]),
        ("batch_size", [0]),
        ("participants", [(), (10,), (-1,), (2, 2), (True,), "everyone"]),
        ("client_selection", ["poisson"]),
        ("discriminator_training", ["never"]),
        ("noise_source", ["dice"]),
        ("release", ["median", "embedding"]),  # an embedding is one sample, B = 1
    ],
)
def test_an_impossible_event_is_refused(name, values):
    for value in values:
        assert_refused(f"{name}|batch_size", event, **{name: value})


# ------------------------------------------------------------------ prefixes, use


def test_a_checkpoints_prefix_is_verified(path, tmp_path):
    seen = Ledger.read(path)
    seen.verify_prefix(0, GENESIS)
    seen.verify_prefix(seen.length, seen.head)
    # Restoring never truncates: repeats count again.
    append(path, event(4)).verify_prefix(seen.length, seen.head)
    other = append(tmp_path / "other.jsonl", *map(event, (1, 2, 4)))
    words, given = "line 3 is not the one", (other.length, other.head)
    assert_refused(words, Ledger.read(path).verify_prefix, *given)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    words, given = "line 2 is the last, the checkpoint saw 3", (seen.length, seen.head)
    assert_refused(words, Ledger.read(path).verify_prefix, *given)


def test_a_ledger_for_reading_cannot_be_appended_to(path):
    assert_refused("not open for appending", Ledger.read(path).append, event(4))


def test_a_failed_write_leaves_no_event_and_closes_the_ledger(path, monkeypatch):
    whole = path.read_bytes()
    ledger = Ledger.open(path)

    def full_disk(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    assert_refused(r"line 4 could not be written.*No space", ledger.append, event(4))
    monkeypatch.undo()
    assert path.read_bytes() == whole
    assert ledger.length == 3
    assert_refused("not open for appending", ledger.append, event(4))


def test_two_runs_cannot_append_to_one_ledger(path):
    first = Ledger.open(path)
    assert_refused("another run uses it", Ledger.open, path)
    assert Ledger.read(path).length == 3
    first.close()
    Ledger.open(path).close()
