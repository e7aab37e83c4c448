"""The clients' own count: ahead of the release, durable, by name, never beyond."""

import json
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import printed, refused
from fedgs.errors import UserError
from fedgs.privacy.client_ledger import (
    SHARDED_DATASET,
    ClientLedger,
    Spent,
    read_spent,
    release_event,
    source_of,
)
from fedgs.privacy.client_limits import ClientRefused, Limits, release_cost
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Event
from fedgs.privacy.rounding import upper
from refusals import assert_refused
from runs import keep_lines
from tiny import tiny_config

NAMES = ("ann", "bob", "cy")
NONE = Limits()
COST = release_cost(0.5, 4)  # of every event here


def _event(round: int = 1, positions=(0, 1, 2), num_clients: int = 3) -> Event:
    return release_event(tiny_config(), round, positions, num_clients)


def _room_for(releases: int) -> Limits:
    """Limits with room for so many releases, and a half more."""
    epsilon = epsilon_from_mu(((releases + 0.5) * COST) ** 0.5, 1e-5)
    return Limits(client_epsilon=epsilon)


def _lines(folder: Path) -> list[dict]:
    text = "".join(p.read_text() for p in sorted(folder.glob("releases-*.jsonl")))
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if "bound" not in line]


# ------------------------------------------------------------------ counting


def test_a_charge_is_one_line_on_the_disk_when_it_returns(tmp_path, monkeypatch):
    count, order, fsync = ClientLedger(tmp_path, NAMES), [], os.fsync
    count.charge(_event(1), NONE)

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        order.append(len(_lines(tmp_path)))

    monkeypatch.setattr(os, "fsync", watched)
    count.charge(_event(2, positions=(0, 2)), NONE)
    assert order == [2]
    first, second = _lines(tmp_path)
    assert (first["round"], first["participants"]) == (1, "all")
    assert (second["round"], second["participants"]) == (2, [0, 2])
    assert first["planned_nodes"] == first["counted_nodes"] == 1
    assert json.loads((tmp_path / "clients.json").read_text()) == {
        "releases-00000.jsonl": list(NAMES),
        "format": 2,
    }


def test_a_key_is_used_once_whoever_the_clients_are_by_then(tmp_path):
    """A data file of which all names changed, and an older masking.key."""
    masked = replace(_event(1), context="ab" * 32)
    ClientLedger(tmp_path, NAMES).charge(masked, NONE)
    for names in (NAMES[1:], ["others"], [SHARDED_DATASET]):
        count = ClientLedger(tmp_path, names)
        assert count.is_masked_under("ab" * 32)
        event = replace(masked, num_clients=len(names))
        assert_refused("under this key before", count.charge, event, NONE)
    assert ClientLedger(tmp_path, ["others"]).largest() == 0.0


STARTS = st.sampled_from(["a" * 16, "b" * 16])  # of the server
IS_MASKED, HAS_ARRIVED = st.booleans(), st.booleans()
RELEASE = st.tuples(STARTS, st.integers(1, 3), IS_MASKED, HAS_ARRIVED)
RELEASES = st.lists(RELEASE, min_size=1, max_size=6)


@settings(max_examples=40)
@given(releases=RELEASES, kept=st.integers(0, 6), is_known=st.booleans())
def test_a_count_is_refused_unless_it_has_all_up_to_the_last_that_arrived(
    tmp_path_factory, releases, kept, is_known
):
    """Each is charged, lost or not; then the file goes back to an earlier length."""
    folder, received, last = tmp_path_factory.mktemp("count"), None, 0
    for number, (start, round, is_masked, arrived) in enumerate(releases, start=1):
        key = f"{number:064x}" if is_masked else ""
        source = source_of("run", start, "a-clinic")
        asked = replace(_event(round), source=source, context=key)
        ClientLedger(folder, NAMES).charge(asked, NONE)
        if arrived:
            received, last = (start, round, key if is_known else ""), number
    keep_lines(folder / "releases-00000.jsonl", kept)
    count = ClientLedger(folder, NAMES)
    charged = [
        (s, r, f"{n:064x}" if m else "") for n, (s, r, m, _) in enumerate(releases, 1)
    ]
    has_it = received is None or any(
        (start, round) == received[:2] and received[2] in ("", key)
        for start, round, key in charged[:kept]
    )
    if has_it:
        count.check_received("run", "a-clinic", received)
    else:
        words = "lacks the release of round"
        assert_refused(words, count.check_received, "run", "a-clinic", received)
    if kept >= last:
        assert has_it  # a count that is ahead is right
    elif is_known and len({(s, r) for s, r, *_ in releases}) == len(releases):
        assert not has_it
    for run, node in (("other", "a-clinic"), ("run", "b-clinic")):
        if received is not None:
            assert_refused(
                "lacks the release", count.check_received, run, node, received
            )


def test_repeated_rounds_count_as_further_attempts_also_after_a_restart(tmp_path):
    for round in (1, 2, 2):
        ClientLedger(tmp_path, NAMES).charge(_event(round), NONE)
    count = ClientLedger(tmp_path, NAMES)
    for round in (2, 3):
        count.charge(_event(round), NONE)
    tries = [(line["round"], line["attempt"]) for line in _lines(tmp_path)]
    assert tries == [(1, 1), (2, 1), (2, 2), (2, 3), (3, 1)]
    assert count.mu_squared.tolist() == pytest.approx([5 * COST] * 3, rel=1e-12)


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_the_release_that_would_exceed_epsilon_is_refused(tmp_path, relation):
    limits = Limits(client_epsilon=60.0, delta=1e-5, relation=relation)
    # The oracle: one release has mu = 2 C sqrt(B) / s, and half of it with zero-out.
    mu = 2 * 4**0.5 / 1.0 / (2 if relation == "zero-out" else 1)
    most = sum(epsilon_from_mu(mu * n**0.5, 1e-5) <= 60 for n in range(1, 99))
    assert 1 <= most < 98
    for round in range(1, most + 1):
        count = ClientLedger(tmp_path, NAMES)  # as after a restart
        count.check(_event(round), limits)  # which counts nothing
        count.charge(_event(round), limits)
    for refuses in (count.check, count.charge):
        words = r"client_epsilon = 60 .*, delta 1e-05"
        assert_refused(words, refuses, _event(most + 1), limits)
    assert len(_lines(tmp_path)) == most


def test_only_participants_are_charged_and_only_they_are_refused(tmp_path):
    count, limits = ClientLedger(tmp_path, NAMES), _room_for(2)
    for round in (1, 2):  # without a limit, which counts once there is one
        count.charge(_event(round, positions=(1,)), NONE)
    assert count.mu_squared.tolist() == [0, 2 * COST, 0]
    assert_refused("client bob has released", count.charge, _event(3), limits)
    count.charge(_event(3, positions=(0, 2)), limits)
    assert count.mu_squared.tolist() == [COST, 2 * COST, COST]


# ------------------------------------------------------------------ other packings


def test_any_history_of_packings_adds_up_by_name(tmp_path):
    """Against a plain dictionary, with nodes that stay open beside each other."""
    rng, oracle = np.random.default_rng(3), Counter()
    groups = [("a", "b", "c"), ("c", "b"), ("d",), ("a", "d"), ("b", "a", "c", "d")]
    open_counts = [ClientLedger(tmp_path, group) for group in groups]
    for round in range(1, 30):
        number = int(rng.integers(len(groups)))
        group = groups[number]
        if rng.random() < 0.3:
            open_counts[number] = ClientLedger(tmp_path, group)
        size = int(rng.integers(1, len(group) + 1))
        asked = sorted(rng.choice(len(group), size, replace=False).tolist())
        count = open_counts[number]
        count.charge(_event(round, asked, len(group)), NONE)
        oracle.update(group[position] for position in asked)
        expected = [oracle[name] * COST for name in group]
        assert count.mu_squared.tolist() == pytest.approx(expected, rel=1e-12)
    assert len(_lines(tmp_path)) == 29


def test_nodes_that_charge_at_once_never_pass_the_limit(tmp_path):
    limits, refused = _room_for(10), []
    groups = [("ann",), ("bob", "ann"), ("ann", "cy")]

    def charge(group: tuple[str, ...]) -> None:
        count = ClientLedger(tmp_path, group)
        for round in range(1, 9):
            try:
                count.charge(_event(round, range(len(group)), len(group)), limits)
            except ClientRefused:
                refused.append(group)

    with ThreadPoolExecutor(len(groups)) as threads:
        list(threads.map(charge, groups))
    assert len(_lines(tmp_path)) == 10  # of 24 that were asked for, all with ann
    assert len(refused) == 14


def test_clients_with_the_same_name_are_refused(tmp_path):
    assert_refused("same name", ClientLedger, tmp_path, ("ann", "ann"))


# ------------------------------------------------------------------ broken files


@pytest.fixture
def counted(tmp_path) -> Path:
    """A folder with two counted rounds."""
    count = ClientLedger(tmp_path, NAMES)
    for round in (1, 2):
        count.charge(_event(round), NONE)
    return tmp_path


@pytest.mark.parametrize("is_open", [False, True])
def test_damaged_files_are_refused_every_time(counted, is_open):
    path, count = counted / "releases-00000.jsonl", ClientLedger(counted, NAMES)
    if is_open:
        count.charge(_event(3), NONE)
        keep_lines(path, 2)
        words = "lost lines"
    else:
        path.write_bytes(path.read_bytes().replace(b'"round":1', b'"round":7'))
        words = "was altered"
    before = path.read_bytes()
    for _ in range(2):
        assert_refused(words, count.charge, _event(3), NONE)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("names", "words"),
    [  # before format 2 shards were counted by their names
        ('{"releases-00000.jsonl": ["0", "1"]}', "clients.json: .* another format"),
        ("", "does not say whose releases"),
        ('{"format": 2}', "does not say whose releases"),
        ('{"releases-00000.jsonl": ["eve"], "format": 2}', "clients.json names other"),
        ('{"releases-00000.jsonl": ["an', "clients.json: it cannot be read"),
    ],
)
def test_a_count_without_the_names_of_this_format_is_refused(counted, names, words):
    (counted / "clients.json").unlink()
    if names:
        (counted / "clients.json").write_text(names)
    count = ClientLedger(counted, NAMES)
    assert_refused(words, count.charge, _event(3), NONE)
    assert_refused(words, count.largest)
    assert_refused(words, count.check, _event(3), _room_for(9))
    assert len(_lines(counted)) == 2


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("content", [None, b"", b'{"bound":{'])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_ledger_that_is_named_and_lost_does_not_restart_the_count(
    counted, content, is_first, is_open
):
    count, path = ClientLedger(counted, NAMES), counted / "releases-00000.jsonl"
    if is_open:
        assert count.largest() > 0
    if not is_first:  # of other clients, and the lost one has ann's releases
        ClientLedger(counted, ("ann", "dee")).charge(_event(3, (0, 1), 2), NONE)
        count = ClientLedger(counted, ("ann", "dee")) if not is_open else count
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    words = "is missing|lost its first line|lost lines"
    for ask in (count.largest, lambda: count.charge(_event(3), NONE)):
        for _ in range(2):
            with pytest.raises(UserError, match=f"(?s){words}.*record of the privacy"):
                ask()
    assert path.exists() == (content is not None)


def test_a_crash_before_the_first_release_is_no_loss(tmp_path, monkeypatch):
    """The file is made, then named, then written to; any of them may be the last."""
    for name in ("write_json", "Ledger.append"):
        folder = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(f"fedgs.privacy.client_ledger.{name}", killed)
            with pytest.raises(KeyboardInterrupt):
                ClientLedger(folder, NAMES).charge(_event(1), NONE)
        for names in (("dee", "eve", "flo"), NAMES):
            count = ClientLedger(folder, names)
            count.charge(_event(2), NONE)
            assert count.largest() == pytest.approx(COST)


def killed(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("names", [[SHARDED_DATASET] * 3, [SHARDED_DATASET]])
def test_zero_out_is_no_limit_of_shards_nor_beside_them(tmp_path, names):
    limits = replace(_room_for(50), relation="zero-out")
    shards = ClientLedger(tmp_path, names)
    positions = range(len(names))
    event = _event(1, positions, len(names))
    for ask in (shards.check, shards.charge):
        with pytest.raises(ClientRefused, match="relation = zero-out") as refused:
            ask(event, limits)
        assert refused.value.setting == "relation"
    shards.charge(event, replace(limits, relation="replace-one"))
    # Whose data were in the shards nobody knows, so names are no better now.
    with pytest.raises(ClientRefused, match="relation = zero-out"):
        ClientLedger(tmp_path, NAMES).charge(_event(2), limits)
    ClientLedger(tmp_path / "other", NAMES).charge(_event(2), limits)


def test_a_count_that_cannot_be_written_refuses_and_forgets_nothing(
    counted, monkeypatch
):
    count = ClientLedger(counted, NAMES)

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises((UserError, OSError), match="no space left"):
            count.charge(_event(3), NONE)
    assert len(_lines(counted)) == 2
    count.charge(_event(3), NONE)
    assert len(_lines(counted)) == 3
    assert count.mu_squared.tolist() == pytest.approx([3 * COST] * 3, rel=1e-12)


# ------------------------------------------------------------------ reading it


def test_what_a_folder_counts_is_that_of_the_client_that_spent_most(tmp_path):
    ClientLedger(tmp_path, NAMES).charge(
        replace(_event(1), source=source_of("first", "s", "node")), NONE
    )
    later = replace(_event(1, (0,), 2), source=source_of("second", "s", "node"))
    ClientLedger(tmp_path, ["dan", "ann"]).charge(later, NONE)
    both = Spent(4, {"first": 1, "second": 1}, COST, is_sharded=False)
    assert read_spent(tmp_path) == both
    ClientLedger(tmp_path, ["ann"]).charge(_event(2, (0,), 1), NONE)
    assert read_spent(tmp_path).largest == 2 * COST  # of ann
    ClientLedger(tmp_path, [SHARDED_DATASET]).charge(_event(3), NONE)
    assert read_spent(tmp_path) == Spent(
        4, {"first": 1, "second": 1, "": 2}, 3 * COST, is_sharded=True
    )


def test_a_client_reads_its_own_count_by_its_state_directory(tmp_path, fedgs):
    folder = tmp_path / "client-state" / "releases"
    first = replace(_event(1), source=source_of("first", "s", "node"))
    ClientLedger(folder, NAMES).charge(first, NONE)
    epsilon = epsilon_from_mu(COST**0.5, 1e-5)
    for place in (folder, folder.parent):
        text = printed(fedgs("privacy", "of", place))
        assert re.search(rf"replace-one │ +{re.escape(upper(epsilon))} │", text)
        assert "the count of 3 clients, with 1 releases: 1 in first." in text
    found = json.loads(
        printed(fedgs("privacy", "of", folder, "--json", "--delta", 1e-6))
    )
    assert found["epsilons"] == {
        "replace-one": epsilon_from_mu(COST**0.5, 1e-6),
        "zero-out": epsilon_from_mu(COST**0.5 / 2, 1e-6),
    }
    for wrong, words in (
        (["--csv"], "leave out --csv"),
        (["--same-clients"], "leave out --same-clients"),
        (["--at-epsilon", 3], "leave out --at-epsilon"),
        ([tmp_path], "is a client's own count; give it alone"),
        (["--delta", 3], "delta = 3"),
    ):
        refused(fedgs("privacy", "of", folder, *wrong), words)
    ClientLedger(folder, [SHARDED_DATASET]).charge(_event(2), NONE)
    text = printed(fedgs("privacy", "of", folder))
    assert re.search("zero-out +│ +not counted │", text)
    assert "no owner's part is counted" in text
    (folder / "clients.json").write_text("{")
    refused(fedgs("privacy", "of", folder), "clients.json")
