"""The ledger: whatever is broken is an error, except a torn last line."""

import contextlib
import dataclasses
import hashlib
import json
import os
import time

import pytest

from fedgs.errors import UserError
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


def test_events_come_back_as_they_were_appended(tmp_path):
    everyone = event(2, participants="all", attempt=3, planned_nodes=4, counted_nodes=2)
    with contextlib.closing(Ledger.open(tmp_path / "ledger.jsonl")) as ledger:
        assert (ledger.length, ledger.head) == (0, GENESIS)
    ledger = append(ledger.path, event(1), everyone)
    again = Ledger.read(ledger.path)
    assert again.events == (event(1), everyone)
    assert (again.length, again.head) == (2, ledger.head)


def fields_of(event: Event) -> dict:
    """Returns what a line of a run's ledger has."""
    hidden = ("source", "context", "release")  # as long as they have their defaults
    return {k: v for k, v in dataclasses.asdict(event).items() if k not in hidden}


def test_the_file_is_the_documented_format(path):
    expected, head = "", GENESIS
    for round in (1, 2, 3):
        line, head = sealed(head, fields_of(event(round)))
        expected += line
    assert path.read_text() == expected
    assert Ledger.read(path).head == head


def test_who_asked_is_in_the_line_where_it_is_known(path):
    told = event(4, source="run/start/node")
    append(path, told)
    named = ['"source"' in line for line in path.read_text().splitlines()]
    assert named == [False, False, False, True]
    assert Ledger.read(path).events[3] == told


def test_a_release_is_in_the_line_where_it_is_an_embedding(path):
    told = event(4, release="embedding", batch_size=1)
    append(path, told)
    named = ['"release"' in line for line in path.read_text().splitlines()]
    assert named == [False, False, False, True]
    assert Ledger.read(path).events[3] == told
    assert Ledger.read(path).events[0].release == "gradient"


def test_an_unknown_release_is_refused_in_an_event_and_in_a_file(path):
    named = "release = 'median': give one of gradient, embedding"
    assert_refused(named, event, 4, release="median")
    line, _ = sealed(GENESIS, fields_of(event(1)) | {"release": "median"})
    path.write_text(line)
    assert_refused(f"line 1: .*{named}", Ledger.read, path)


def test_an_embedding_is_one_sample():
    told = {"release": "embedding", "batch_size": 2}
    assert_refused("batch_size = 2: of an embedding it is 1", event, 4, **told)


def test_noise_multiplier_is_in_units_of_two_clip_bounds():
    published = event(noise_std=2.14, clip_bound=1.0)  # GS-WGAN: 2 * C * 1.07
    assert published.noise_multiplier == pytest.approx(1.07)
    assert event(participants="all").num_participants == 10


def test_every_append_is_fsynced_before_it_returns(path, monkeypatch):
    synced = []
    with contextlib.closing(Ledger.open(path)) as ledger:
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path.read_bytes()))
        ledger.append(event(4))
    assert synced == [path.read_bytes()]


@pytest.mark.parametrize("torn", [b"{", b'{"attempt":1,"batch_size"', b"\0\0\0", b"}"])
def test_a_torn_last_line_is_dropped(path, torn):
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert Ledger.read(path).length == 3
    assert path.read_bytes() == whole + torn  # reading changes nothing
    append(path, event(4))
    assert path.read_bytes().startswith(whole + b'{"attempt":1,')
    assert Ledger.read(path).length == 4


def test_a_whole_event_without_its_line_feed_was_torn_too(path):
    path.write_bytes(path.read_bytes()[:-1])
    assert Ledger.read(path).length == 2


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda lines: [lines[0], lines[1].replace(b"40.0", b"9.99"), lines[2]], 2),
        (lambda lines: [lines[0].replace(b"os", b"so"), *lines[1:]], 1),
        (lambda lines: [lines[0], lines[2]], 2),
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[1], lines[0], lines[2]], 1),
        (lambda lines: [lines[0], lines[0], *lines[1:]], 2),
        (lambda lines: [*lines[:2], b"\n", lines[2]], 3),
        (lambda lines: [*lines, b"garbage\n"], 4),
        (lambda lines: [*lines[:2], lines[2][:-3] + b'0"}\n'], 3),
    ],
    ids=[
        *("altered", "first", "deleted", "beheaded", "swapped"),
        *("doubled", "blank", "garbage", "hash"),
    ],
)
@pytest.mark.parametrize("opener", [Ledger.open, Ledger.read])
def test_a_broken_line_is_an_error_that_names_it(path, opener, change, number):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))
    broken = path.read_bytes()
    assert_refused(rf"ledger.jsonl: line {number}: .*restore", opener, path)
    assert path.read_bytes() == broken


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "laplace"}, "kind = 'laplace'"),
        ({"colour": "red"}, "unknown or missing field colour"),
        ({"noise_std": None}, "noise_std = None"),
        ({"round": ""}, "round = ''"),
        ({"participants": [3, 1]}, "participants"),
        ({"participants": 7}, "not iterable"),
        ({"source": 7}, "source"),
    ],
)
def test_an_unknown_event_is_an_error_although_its_hash_is_right(path, change, message):
    head = Ledger.read(path).head
    line, _ = sealed(head, {**fields_of(event(4)), **change})
    path.write_text(path.read_text() + line)
    assert_refused(f"line 4: .*{message}", Ledger.read, path)


def test_a_missing_field_is_an_error(path):
    values = fields_of(event(4))
    del values["kind"]
    line, _ = sealed(Ledger.read(path).head, values)
    path.write_text(path.read_text() + line)
    assert_refused("line 4: unknown or missing field kind", Ledger.read, path)


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
    ],
)
def test_an_impossible_event_is_refused(name, values):
    for value in values:
        assert_refused(f"event: .*{name}", event, **{name: value})


def test_a_checkpoints_prefix_is_verified(path):
    ledger = Ledger.read(path)
    seen = (ledger.length, ledger.head)
    ledger.verify_prefix(0, GENESIS)
    ledger.verify_prefix(*seen)
    # Restoring never truncates: repeats count again.
    append(path, event(4)).verify_prefix(*seen)


def test_a_ledger_shorter_than_the_checkpoint_is_refused(path):
    seen = Ledger.read(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match="line 2 is the last, the checkpoint saw 3"):
        Ledger.read(path).verify_prefix(seen.length, seen.head)


def test_another_history_of_the_same_length_is_refused(path, tmp_path):
    other = append(tmp_path / "other.jsonl", *map(event, (1, 2, 4)))
    with pytest.raises(UserError, match="line 3 is not the one"):
        Ledger.read(path).verify_prefix(other.length, other.head)


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
    assert_refused("in use by another run", Ledger.open, path)
    assert Ledger.read(path).length == 3
    first.close()
    Ledger.open(path).close()


@pytest.mark.parametrize("opener", [Ledger.open, Ledger.read])
def test_a_missing_folder_is_a_user_error(tmp_path, opener):
    assert_refused("No such file", opener, tmp_path / "no-run" / "ledger.jsonl")


def test_thirty_thousand_events_open_quickly(tmp_path):
    lines, head = [], GENESIS
    for round in range(1, 30_001):  # Table 2 of the paper
        line, head = sealed(head, fields_of(event(round)))
        lines.append(line)
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(lines))
    start = time.process_time()
    ledger = Ledger.read(path)
    assert time.process_time() - start < 3.0  # about 0.5 s on one free core
    assert (ledger.length, ledger.head) == (30_000, head)
