"""A deployment of which a part was restored from a backup: nothing lost, all counted.

The server's older state, then its newest again; a client's count; joining by itself.
"""

import contextlib
import json
import re
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Message

from clients import history
from clients.history import enter, start_of
from clients.site import DeployedPlace, Site, settings_of
from deployed_grid import LIMITS, NAMES, Client, Deployment
from fedgs.errors import UserError
from fedgs.federation import node as node_module
from fedgs.federation import round as round_module
from fedgs.federation.round import select
from fedgs.federation.training import RunStopped, new_event
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.accounting import Run, statements_from_ledger, statements_of_runs
from fedgs.privacy.ledger import Ledger
from fedgs.runs.run_folder import forget_aside, state_path, state_rounds
from plans import epsilon
from refusals import assert_refused
from runs import at_round, interrupt_at, keep_lines
from server import roll_call
from server.progress import Progress
from server.restored import cost_text, lost_rounds, missing_events
from tiny import tiny_config


@pytest.fixture(autouse=True, name="impatient")
def fixture_impatient(monkeypatch):
    """The roll call gives a node up after one refusal."""
    monkeypatch.setattr(roll_call, "TIMEOUT", 5.0)


A, B, C = ("a" * 16, "b" * 16, "c" * 16)


def stop_after(run: Deployment, round: int) -> None:
    """Runs on to a round, which is then committed."""
    with pytest.raises(RunStopped, match=f"stopped after round {round}"):
        run.start(at_round(round, run.stop.set))
    run.stop.clear()


def kill_after(run: Deployment, round: int, **how: bool) -> None:
    """Runs on to a round, whose end is not committed."""
    with pytest.raises(KeyboardInterrupt):
        run.start(interrupt_at(round), **how)


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def restart_all(run: Deployment) -> None:
    for client in run.clients:
        client.restart()


def restored(backup: Path, place: Path) -> None:
    shutil.rmtree(place)
    shutil.copytree(backup, place)


def other_noise(monkeypatch) -> None:
    """What is repeated from now on has other noise, as it has without noise_seed."""

    def stream(seed, *place):
        return NoiseStream(seed + 1, *place)

    monkeypatch.setattr(round_module, "NoiseStream", stream)


@pytest.fixture(name="twice")
def fixture_twice(deploy, tmp_path):
    """A run that is at round 4, the server's backups of rounds 2 and 4."""

    def twice(mode: str = "full participation", **settings) -> Deployment:
        settings = {"num_rounds": 5, "checkpoint_every": 2} | settings
        settings = {"round_timeout": 5.0} | settings
        run = deploy(mode=mode, **settings)
        for round in (2, 4):
            stop_after(run, round)
            run.backups = getattr(run, "backups", {})
            run.backups[round] = copied(run.folder.path, tmp_path / f"at-{round}")
        return run

    return twice


# ------------------------------------------------------------------ states


def test_the_newest_server_state_works_after_an_older_one_was_tried(
    twice, undisturbed, monkeypatch, log
):
    """Neither joining nor rounds that are repeated lose a state or a release."""
    run = twice()
    restored(run.backups[2], run.folder.path)
    asked: list[str] = []

    def arrives(name: str, request: Message) -> bool:
        asked.append(request.metadata.message_type)
        if asked[-1] == "train":  # the ledger is whole before anything is asked
            assert [event[0] for event in run.attempts()][:4] == [1, 2, 3, 4]
        return True

    run.grid.on_push = arrives
    words = (
        r"released 2 times more than the ledger says \(rounds 3 to 4\): this server "
        r"was restored from a backup. Epsilon so far is (\S+) with these releases, "
        r"(\S+) without \(release adversary, replace-one, delta 1e-05\).*"
        r"--accept-restore"
    )
    with pytest.raises(RunStopped, match=words) as stopped:
        run.start()  # all have joined
    assert "train" not in asked
    assert [round for round, _ in run.attempts()] == [1, 2]
    found = re.search(words, str(stopped.value))
    assert found is not None
    epsilons = [epsilon_of(run.folder.path, rounds) for rounds in (4, 2)]
    assert list(found.groups()) == [f"{value:.4g}" for value in epsilons]
    with monkeypatch.context() as patch:
        other_noise(patch)
        kill_after(run, 4, accept_restore=True)
    assert any("they are added to the ledger" in line for line in log)
    assert run.attempts() == [*((r, 1) for r in (1, 2, 3, 4)), (3, 2), (4, 2)]
    events = Ledger.read(run.folder.path / "ledger.jsonl").events
    assert replace(events[2], attempt=2) == events[4]
    restored(run.backups[4], run.folder.path)
    run.start(accept_restore=True)
    assert run.product() == undisturbed(run)
    assert run.counted(0) == [1, 2, 3, 4, 3, 4, 5]
    assert_all_counted(run)
    for index in range(3):  # what was set aside is of no use any more
        assert not list(run.states(index).glob("aside-*/*"))


def assert_all_counted(run: Deployment) -> None:
    """The ledger has no round less often than a client has."""
    attempts = Counter(round for round, _ in run.attempts())
    for index in range(len(run.clients)):
        assert Counter(run.counted(index)) <= attempts


def all_states(run: Deployment) -> set[tuple[str, bytes]]:
    """Every state of the clients, also what was set aside."""
    paths = [path for index in range(3) for path in run.states(index).rglob("round-*")]
    return {(path.name, path.read_bytes()) for path in paths}


def test_missing_releases_are_named_while_the_roll_call_waits(twice, log):
    """Whoever waits for the last client for ten minutes learns of them at once."""
    run = twice()
    restored(run.backups[2], run.folder.path)
    run.clients[2].is_online = False
    named: list[list[str]] = []
    run.grid.on_look = lambda: named.append([x for x in log if "more often" in x])
    with pytest.raises(RunStopped, match="c-clinic did not join"):
        run.start()
    assert named[-1] == [
        f"roll call: {name} has released rounds 3 to 4 more often than the ledger says"
        for name in NAMES[:2]
    ]


def test_a_server_older_than_all_states_destroys_none(twice, undisturbed):
    run = twice(checkpoint_every=1)
    restored(run.backups[2], run.folder.path)
    before = all_states(run)
    words = (
        r"(?s)a-clinic \(its state is of round 4, this server goes on from round 2; "
        r"put the newest server state back, or restore the client's [0-9a-f]{16}/ of "
        r"round 2 only, never an older releases/.*released 2 times more than the ledger"
    )
    with pytest.raises(RunStopped, match=words):
        run.start()
    assert all_states(run) == before
    assert [round for round, _ in run.attempts()] == [1, 2]  # nobody accepted
    with pytest.raises(RunStopped, match="its state is of round 4"):
        run.start(accept_restore=True)
    assert_all_counted(run)  # an end at the roll call is no reason to print too little
    restored(run.backups[4], run.folder.path)
    run.start()
    assert run.product() == undisturbed(run)
    assert run.attempts() == [(round, 1) for round in range(1, 6)]


# ------------------------------------------------------------------ ledger


def epsilon_of(run: Path, rounds: int) -> float:
    """The release adversary's epsilon of so many rounds of the run."""
    first = Ledger.read(run / "ledger.jsonl").events[0]
    events = [replace(first, round=round) for round in range(1, rounds + 1)]
    stated = statements_from_ledger(events, 1e-5)
    return epsilon(stated, adversary="release", relation="replace-one")


def test_a_clients_own_crash_is_no_restore(deploy, monkeypatch):
    """It counts a release twice, of which one left: the server's ledger is right."""
    run = deploy(num_rounds=2, round_timeout=600.0)
    killed: list[str] = []
    computed = node_module.client_round

    def crash_once(*given):
        if given[-2].round == 2 and not killed:  # the request
            killed.append("b-clinic")
            raise SystemExit
        return computed(*given)

    monkeypatch.setattr(node_module, "client_round", crash_once)
    run.restart_killed()
    kill_after(run, 2)
    assert [run.counted(index) for index in range(3)].count([1, 2, 2]) == 1
    run.start()
    assert run.attempts() == [(1, 1), (2, 1), (1, 2), (2, 2)]


def test_what_a_late_client_tells_is_added_while_the_run_goes_on(twice):
    """The others are of a version whose count does not say which run asked."""
    run = twice(min_nodes=2, num_rounds=6, round_timeout=20.0)
    restored(run.backups[2], run.folder.path)

    def spoil(name: str, request: Message, reply: Message) -> Message:
        if name != "c-clinic" and request.metadata.message_type == "query.join":
            reply.content["fedgs"]["released"] = []
        return reply

    run.grid.spoil = spoil
    run.clients[2].is_online = False
    run.start(at_round(3, run.clients[2].restart), accept_restore=True)
    first = [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert run.attempts() == [*first, (3, 2), (4, 2), (5, 1), (6, 1)]
    assert run.counted(2) == [1, 2, 3, 4, 4, 5, 6]
    assert_all_counted(run)


@pytest.mark.parametrize("of_clients", ["restored", "lost"])
def test_a_run_restored_at_both_ends_hides_no_release(deploy, tmp_path, of_clients):
    """The count says it all, wherever it lies: a limits file may put it elsewhere."""
    run = deploy(num_rounds=2)
    for client in run.clients:
        if of_clients == "restored":
            (elsewhere := tmp_path / client.name).mkdir()
            set_limits(client, LIMITS + f'state_dir = "{elsewhere}"\n')
    stop_after(run, 1)
    places = [run.folder.path, *(run.states(index).parent for index in range(3))]
    backups = [copied(p, tmp_path / str(n)) for n, p in enumerate(places)]
    run.start()
    restored(backups[0], places[0])
    for backup, place in zip(backups[1:], places[1:], strict=True):
        shutil.rmtree(place)
        if of_clients == "restored":
            shutil.copytree(backup, place)
    restart_all(run)
    with pytest.raises(RunStopped, match=r"released 1 times more .*\(rounds 2\)"):
        run.start()
    if of_clients == "restored":
        run.start(accept_restore=True)
        assert run.attempts() == [(1, 1), (2, 1), (2, 2)]


def set_limits(client: Client, text: str) -> None:
    path = client.state_dir.with_suffix(".toml")
    path.write_text(text)
    client.node_config["limits"] = str(path)


def test_a_client_at_its_limit_says_what_it_released(deploy, tmp_path):
    """It takes part no more, but a restored ledger must have what it released."""
    run = deploy("run", "selected", num_rounds=3, checkpoint_every=1, min_nodes=1)
    stop_after(run, 1)
    backup = copied(run.folder.path, tmp_path / "at-1")
    run.start()
    last = run.attempts()
    restored(backup, run.folder.path)
    for client in run.clients:
        client.restart()
        epsilon = 'client_epsilon = 1e-9\ndelta = 1e-5\nrelation = "zero-out"\n'
        set_limits(client, LIMITS + epsilon)
    words = r"limit: client_epsilon.*released 2 times more .*\(rounds 2 to 3\)"
    with pytest.raises(RunStopped, match=f"(?s){words}"):
        run.start()
    with pytest.raises(RunStopped, match="limit: client_epsilon"):
        run.start(accept_restore=True)
    assert run.attempts() == last


def test_a_restored_run_needs_each_client_that_was_not_heard(deploy, tmp_path):
    """Also not in a start that hears of no restore; the others' rounds are added."""
    run = deploy("run", "selected", num_rounds=4, checkpoint_every=1, min_nodes=1)
    stop_after(run, 1)
    backup = copied(run.folder.path, tmp_path / "at-1")
    stop_after(run, 3)
    asked = [select(run.folder.config, round) for round in range(4)]
    silent = next(n for n in asked[2] if n not in asked[3])
    restored(backup, run.folder.path)
    restart_all(run)
    run.clients[silent].is_online = False
    words = rf"ledger lacks what {NAMES[silent]} may have released since: start"
    for _ in range(2):  # the second start hears of nothing new
        with pytest.raises(RunStopped, match=words):
            run.start(accept_restore=True)
        assert run.attempts() == [(1, 1), (2, 1), (3, 1)]
    run.clients[silent].restart()
    run.start()
    assert len(run.attempts()) == 6


def test_rounds_before_a_released_one_were_asked_too(deploy):
    run = deploy("run", "selected")
    run.folder.history = [(B, 0)]
    silent = Progress(None, run.folder.config, A, 0)
    calls = roll_call.RollCall(run.grid, run.folder, run.folder.config, [], silent)
    calls.counted[0].update({1: 1})
    calls.lost.update({4: 2})
    assert calls.take_lost() == {2: 1, 3: 1, 4: 2}
    assert calls.take_lost() == {}


def test_a_masked_attempt_of_others_hides_no_release(deploy):
    """The ledger has round 2 of the first two nodes; the last two released it as well.

    The attempt that asked them was counted after the backup was taken.
    """
    run = deploy("run", secure_aggregation=True, noise_multiplier=3.0, min_nodes=2)
    run.folder.history = [(B, 0)]
    config, silent = run.folder.config, Progress(None, run.folder.config, A, 0)
    nodes = range(config.num_nodes)
    asked = [new_event(config, 1, "all", 1), new_event(config, 2, "all", 1, [0, 1])]
    calls = roll_call.RollCall(run.grid, run.folder, config, asked, silent)

    def lost(node: int) -> Counter[int]:
        return lost_rounds(config, node, [1, 1], calls.counted[node])

    assert [dict(lost(node)) for node in nodes] == [{}, {}] + [{2: 1}] * (
        len(nodes) - 2
    )
    calls.lost |= lost(2)
    missing = missing_events(config, asked, calls.take_lost())
    assert [(e.round, e.attempt, e.participants) for e in missing] == [(2, 2, "all")]
    assert not any(lost(node) for node in nodes)


def test_a_client_of_an_older_backup_is_refused_by_the_server(deploy, tmp_path):
    """Its states and its count are of one time, so they show nothing by themselves."""
    run = deploy(num_rounds=4, checkpoint_every=1, min_nodes=2, round_timeout=5.0)
    client = run.clients[0]
    stop_after(run, 1)
    backup = copied(client.state_dir, tmp_path / "at-1")
    stop_after(run, 2)
    newest = copied(client.state_dir, tmp_path / "at-2")
    restored(backup, client.state_dir)
    client.restart()
    stop_after(run, 3)  # without it
    assert run.counted(0) == [1]
    error = (client.state_dir / "error.log").read_text()
    assert "it has no release of round 2 of run" in error
    assert "Never put an older one over it" in error
    restored(newest, client.state_dir)
    client.restart()
    run.start()
    assert run.counted(0) == [1, 2, 4]


def test_releases_to_another_server_are_not_told(deploy):
    """Neither where the folder of that run is there, nor where it was deleted."""
    run = deploy(num_rounds=2)
    run.start()
    settings = roll_call.public_settings(run.folder.config)
    site = Site.read(run.clients[0].node_config)
    this, other = (
        DeployedPlace(site, run_id) for run_id in (run.states(0).parent.name, "0" * 16)
    )
    assert other.join(settings, [(A, 0)]).released == []
    shutil.rmtree(this.folder)
    assert other.join(settings, [(A, 0)]).released == []
    assert this.join(settings, [(A, 0)]).released == [1, 1]


@pytest.mark.parametrize(
    ("released", "words"),
    [
        (None, "without saying what it has released"),
        ("1,1", "without saying what it has released"),
        ([1] * 10**6, "without saying what it has released"),
        ([-1], "released round 1 more than"),
        ([1, 2.0], "released round 2 more than"),
        ([True], "released round 1 more than"),
        ([22], "released round 1 more than 20 times above the ledger"),
        ([0, 0, 1], "released round 3, for which the run does not select it"),
    ],
)
def test_a_client_cannot_claim_more_than_can_be(released, words):
    config = tiny_config(clients_per_round=1, num_rounds=10)
    absent = next(n for n in range(6) if n not in select(config, 3))
    assert_refused(words, lost_rounds, config, absent, released, {1: 1})


def test_what_the_ledger_has_is_no_claim():
    config = tiny_config(clients_per_round=1, num_rounds=10)
    (selected,) = select(config, 3)
    assert lost_rounds(config, selected, [1, 0, 2], {1: 1, 3: 1}) == {3: 1}
    assert lost_rounds(config, selected, [], {}) == {}


# ------------------------------------------------------------------ the count


def cut_off(path: Path) -> None:
    keep_lines(path, -1)


def exchange(path: Path) -> None:
    ledger, other = Ledger.read(path), path.with_name("other")
    with closing(Ledger.open(other)) as forged:
        for event in ledger.events:
            forged.append(replace(event, attempt=7))
    other.replace(path)


def test_a_count_that_was_rolled_back_is_refused_until_it_is_restored(deploy, tmp_path):
    run = deploy(num_rounds=2)
    run.start()
    client, settings = run.clients[1], roll_call.public_settings(run.folder.config)
    site = Site.read(client.node_config)
    place = DeployedPlace(site, run.states(1).parent.name)
    another_run = DeployedPlace(site, "0" * 16)
    count = client.state_dir / "releases" / "releases-00000.jsonl"
    backup = copied(client.state_dir, tmp_path / "backup")
    rolled_back = (
        f"{count}: this client's own count was rolled back, deleted or exchanged: it "
    )
    must = r"and must begin with 2, the last one with the hash [0-9a-f]{64}; restore it"
    ways = {"has 1 releases, ": cut_off, "has 0 releases, ": delete}
    ways["has 2 releases, "] = exchange
    for words, damage in ways.items():
        damage(count)
        for join in (place.join, another_run.join):
            with pytest.raises(UserError, match=re.escape(rolled_back + words) + must):
                join(settings, [(A, 2)])
        assert_refused("own count was rolled back", place.worker)
        set_limits(client, LIMITS + "max_batch_size = 1\n")  # refused anyway
        limited = DeployedPlace(Site.read(client.node_config), place.run_id)
        assert_refused("own count was rolled back", limited.join, settings, [(A, 2)])
        restored(backup, client.state_dir)
    index = count.with_name("clients.json")
    names = index.read_text()
    index.write_text(names.replace('"2"', '"nobody"'))
    for join in (place.join, another_run.join):
        with pytest.raises(UserError, match=r"clients.json: was deleted or exchanged"):
            join(settings, [(A, 2)])
    index.write_text(names)
    assert place.join(settings, [(A, 2)]).released == [1, 1]


def delete(path: Path) -> None:
    shutil.rmtree(path.parent)


# ------------------------------------------------------------------ joining


def test_a_client_of_another_protocol_is_refused_in_a_clear_sentence(deploy, log):
    run = deploy()

    def spoil(name: str, request: Message, reply: Message) -> Message:
        if name == "b-clinic" and request.metadata.message_type == "query":
            del reply.content["fedgs"]["protocol"]  # as before there were protocols
        return reply

    run.grid.spoil = spoil
    words = "b-clinic speaks protocol 1 of joining, this server 3; install the same"
    with pytest.raises(RunStopped, match="b-clinic"):
        run.start()
    assert any(words in line for line in log)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol": 1}, "speaks protocol 1 of joining, this client 3"),
        ({"protocol": None}, "speaks protocol none of joining"),
        ({"settings": 3}, "cannot be decoded"),
        ({"settings": "[]"}, "cannot be decoded"),
        ({"history": "{"}, "cannot be decoded"),
        ({"history": "3"}, "history of the run"),
        *(
            ({"history": json.dumps(known)}, "history of the run")
            for known in (
                [],
                [["../../../etc/abc", 0]],
                [["0" * 16, -1]],
                [["0" * 16, "0"]],
                [["0" * 16, 3], ["1" * 16, 3]],
                [["0" * 16, r] for r in range(10_001)],
            )
        ),
    ],
)
def test_a_malformed_request_to_join_is_refused(change, words):
    whole = {"protocol": 3, "settings": "{}", "history": f'[["{"0" * 16}", 0]]'}
    assert settings_of(whole) == ({}, [("0" * 16, 0)])
    assert_refused(words, settings_of, whole | change)


OLD, REPEATED, NEWEST = [(A, 0)], [(A, 0), (B, 4)], [(A, 0), (C, 8)]


def write_states(folder: Path, start: str, rounds) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for round in rounds:
        state_path(folder, round).write_text(f"{start} {round}")


def in_place(states: Path) -> dict[int, str]:
    found = {r: state_path(states, r).read_text() for r in state_rounds(states)}
    return {round: text.split()[0] for round, text in found.items()}


@pytest.mark.parametrize("crash", [None, *range(6)])
def test_states_follow_the_history_whatever_moment_joining_is_killed_at(
    tmp_path, monkeypatch, crash
):
    """Round 0 is of every history; of the others each start has its own."""
    states = tmp_path / "node-00000"
    enter(tmp_path, states, OLD)
    write_states(states, A, [0, 4, 6, 8])
    enter(tmp_path, states, OLD)
    assert in_place(states) == dict.fromkeys((0, 4, 6, 8), A)
    moves, move = [], Path.replace

    def killed(self, target):
        moves.append(target)
        if len(moves) - 1 == crash:
            raise KeyboardInterrupt
        return move(self, target)

    def entered(known) -> None:
        with monkeypatch.context() as patch:
            moves.clear()
            patch.setattr(Path, "replace", killed)
            with contextlib.suppress(KeyboardInterrupt):
                enter(tmp_path, states, known)
        enter(tmp_path, states, known)

    entered(REPEATED)
    assert in_place(states) == {0: A, 4: A}
    write_states(states, B, [5, 6])
    entered(NEWEST)
    assert in_place(states) == dict.fromkeys((0, 4, 6, 8), A)
    entered([(A, 0), (B, 4), ("d" * 16, 6)])  # the repeated rounds' server after all
    assert in_place(states) == {0: A, 4: A, 5: B, 6: B}


def test_states_set_aside_go_once_newer_ones_are_committed(tmp_path):
    states = tmp_path / "node-00000"
    write_states(states / f"aside-{A}", A, [6, 8])
    forget_aside(states, 5)
    assert state_rounds(states / f"aside-{A}") == [6, 8]
    forget_aside(states, 7)
    assert state_rounds(states / f"aside-{A}") == [8]
    forget_aside(states, 8)
    assert state_rounds(states / f"aside-{A}") == []


def test_a_server_cannot_fill_a_clients_disk_with_states_set_aside(tmp_path):
    states = tmp_path / "node-00000"
    for start in range(history.MOST_ASIDE + 1):
        enter(tmp_path, states, [(f"{start:016x}", 0)])
        write_states(states, "any", [1])
    with pytest.raises(UserError, match="16 starts of the server are set aside"):
        enter(tmp_path, states, OLD)
    assert len(list(states.glob("aside-*"))) == history.MOST_ASIDE


def test_who_made_a_round():
    assert [start_of(REPEATED, round) for round in (0, 1, 4, 5)] == ["", A, A, B]


def test_cost_of_a_restore_is_that_of_fedgs_privacy():
    """A run in progress is charged by counts, not as if it had been planned so."""
    noise = {"noise_seed": None, "noise_multiplier": 4.0, "clients_per_round": 1}
    server = {"selection_seed": 5, "adversary": "server", "engine": "flower"}
    config = tiny_config(num_rounds=20, **noise, **server)
    events = [new_event(config, t, select(config, t), 1) for t in range(1, 5)]
    missing = missing_events(config, events, {5: 1, 6: 1})
    stated = statements_of_runs([Run(config, [*events, *missing])], config.delta)
    own = {"adversary": "server", "relation": config.relation}
    row = next(r for r in stated if own.items() <= vars(r).items())
    assert "the events end after 6 of 20 planned rounds" in row.conditions[0]
    text = cost_text(config, events, missing)
    assert f"Epsilon so far is {row.epsilon:.4g} with these releases" in text
