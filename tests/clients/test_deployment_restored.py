"""A server of an older backup: its run ends, and no state and no release gets lost.

A client whose count is older than what the server has: test_count_behind.py.
"""

import shutil
from pathlib import Path

import pytest
from flwr.app import Message

from clients.deployed_client import DeployedClient, DeploymentConfig, settings_of
from deployed_grid import LIMITS, Deployment, kill_after_count, place_of
from fedgs.process import PROTOCOL
from fedgs.round.run import RunStopped, new_event
from fedgs.runs.epsilons import of_run
from fedgs.runs.run_folder import state_path, state_rounds
from refusals import assert_refused
from runs import at_round, interrupt_at
from server.deployment_record import kept_of
from server.progress import RunProgress
from server.roll_call import RollCall, public_settings

EPSILON = 'client_epsilon = 1e-9\ndelta = 1e-5\nrelation = "zero-out"\n'
RESTORED = r"has released more than this run's ledger says \(rounds {}\): this server "


def stop_after(run: Deployment, round: int) -> None:
    """Runs on to a round, which is then committed."""
    with pytest.raises(RunStopped, match=f"after round {round}"):
        run.start(at_round(round, run.stop.set))
    run.stop.clear()


def restored(backup: Path, place: Path) -> None:
    shutil.rmtree(place)
    shutil.copytree(backup, place)


def test_a_server_of_an_older_backup_ends_the_run_and_states_no_epsilon(
    deploy, undisturbed, tmp_path
):
    """With the newest copy of its folder it goes on: no client has deleted anything."""
    run = deploy(num_rounds=5, round_timeout=5.0)
    stop_after(run, 2)
    backup = shutil.copytree(run.folder.path, tmp_path / "at-2")
    stop_after(run, 4)
    newest = shutil.copytree(run.folder.path, tmp_path / "at-4")
    restored(backup, run.folder.path)
    del run.grid.replies[:]
    with pytest.raises(RunStopped, match=RESTORED.format("3, 4")):
        run.start()
    assert "train" not in {kind for kind, *_ in run.grid.replies}
    problem = r"ledger-behind.txt: \S+ has released more than this run's ledger says"
    for attempt in (run.start, lambda: of_run(run.folder.path)):
        assert_refused(problem, attempt)
    restored(newest, run.folder.path)
    run.start()
    assert run.product() == undisturbed(run)
    assert run.attempts() == [(round, 1) for round in range(1, 6)]


def test_a_run_that_lost_its_name_is_not_taken_for_a_new_one(deploy):
    """Under a new run_id its clients would begin anew; before a release it is none."""
    run = deploy()
    record = run.folder.path / "deployment.json"
    assert kept_of(run.folder)["run_id"]
    record.unlink()
    with pytest.raises(KeyboardInterrupt):
        run.start(interrupt_at(2))
    record.unlink()
    words = "deployment.json: it is missing, .*; restore"
    assert_refused(words, run.start)
    assert not record.exists()


def test_a_clients_own_crash_is_no_restore(deploy, monkeypatch):
    """It counts a release twice, of which one left: the server's ledger is right."""
    run = deploy(mode="full participation", num_rounds=2, round_timeout=600.0)
    kill_after_count(monkeypatch, 2)
    run.restart_killed()
    with pytest.raises(KeyboardInterrupt):
        run.start(interrupt_at(2))
    assert [run.counted(index) for index in range(3)].count([1, 2, 2]) == 1
    run.start()
    assert run.attempts() == [(1, 1), (2, 1), (1, 2), (2, 2)]


def test_a_masked_attempt_of_others_hides_no_release(deploy):
    """The ledger has round 2 of the first two nodes; the last one released it as well.

    The attempt that asked it was counted after the backup was taken.
    """
    run = deploy("run", secure_aggregation=True, noise_multiplier=3.0, min_answers=2)
    config = run.folder.config
    events = [new_event(config, 1, "all", 1), new_event(config, 2, "all", 1, [0, 1])]
    silent = RunProgress(None, config, "0" * 16, 0)
    calls = RollCall(run.grid, run.folder, config, events, silent)
    for node in (0, 1):
        calls.check_ledger(node, [1, 1])
    with pytest.raises(RunStopped, match=RESTORED.format("2")):
        calls.check_ledger(2, [1, 1])


@pytest.mark.parametrize("released", [None, "1,1", [1] * 5, [1, 1.0], [True]])
def test_a_client_that_does_not_say_what_it_released_is_refused(deploy, released):
    run = deploy()  # of four rounds
    silent = RunProgress(None, run.folder.config, "0" * 16, 0)
    calls = RollCall(run.grid, run.folder, run.folder.config, [], silent)
    words = "does not say what it has released"
    assert_refused(words, calls.check_ledger, 0, released)
    calls.check_ledger(0, [0, 0])


def test_a_client_tells_a_server_what_it_released_to_it_and_to_no_other(
    deploy, tmp_path
):
    """Without states, from a count elsewhere, also where it takes part no more."""
    run, limits = deploy(num_rounds=3), tmp_path / "limits.toml"
    limits.write_text(count := LIMITS + f'state_dir = "{tmp_path}"\n')
    run.clients[0].node_config["limits"] = str(limits)
    run.start()
    settings = public_settings(run.folder.config)
    this, other = (
        place_of(run, run_id=n) for n in (run.states(0).parent.name, "0" * 16)
    )
    assert other.join(settings).released == []
    shutil.rmtree(this.folder)
    assert other.join(settings).released == []
    limits.write_text(count + EPSILON)
    joined = this.join(settings)
    assert joined.refusal is not None
    assert joined.released == [1, 1, 1]


# ------------------------------------------------------------------ states


def test_uncommitted_states_go_with_the_first_request_of_a_new_start(deploy):
    """Not at joining, which a server of an older backup gets to; and once."""
    run = deploy()
    stop_after(run, 2)
    site, states = DeploymentConfig.read(run.clients[0].node_config), run.states(0)
    run_id, settings = states.parent.name, public_settings(run.folder.config)

    def place(start: str) -> DeployedClient:
        told = {"start": start * 16, "since": 2, "answered": ""}
        return DeployedClient(site, run_id, told)

    for start in ("a", "b"):
        before = [*state_rounds(states), 3]
        shutil.copyfile(state_path(states, 2), state_path(states, 3))
        assert place(start).join(settings).round == 2
        assert state_rounds(states) == before
        place(start).worker()
        assert state_rounds(states)[-1] == 2
    shutil.copyfile(state_path(states, 2), state_path(states, 3))
    for start in ("b", "a"):  # its own; and a late request of the start before
        place(start).worker()
    assert place("b").join(settings).round == 3


# ------------------------------------------------------------------ joining


def test_a_client_of_another_protocol_is_refused_in_a_clear_sentence(deploy, log):
    run = deploy()

    def spoil(name: str, request: Message, reply: Message) -> Message:
        if name == "b-clinic" and request.metadata.message_type == "query":
            del reply.content["fedgs"]["protocol"]  # as before there were protocols
        return reply

    run.grid.spoil = spoil
    words = f"version 1 of the protocol, and this server uses version {PROTOCOL}"
    with pytest.raises(RunStopped, match="b-clinic"):
        run.start()
    assert any(words in line for line in log)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"protocol": 1},
            f"version 1 of the protocol, and this client uses version {PROTOCOL}",
        ),
        ({"protocol": None}, "version none of the protocol"),
        ({"settings": 3}, "cannot be decoded"),
        ({"settings": "[]"}, "cannot be decoded"),
        ({"settings": "{"}, "cannot be decoded"),
        ({"settings": "[" * 100_000}, "cannot be decoded"),
        ({"settings": "{}" + " " * 200_000}, "cannot be decoded"),
        ({"settings": '{"seed": "1\\nlies"}'}, "no short line"),
        ({"settings": '{"x\\u001b[31m": 1}'}, "no short line"),
        ({"settings": '{"seed": [1]}'}, "no short line"),
        ({"settings": f'{{"seed": "{"x" * 60_000}"}}'}, "no short line"),
    ],
)
def test_a_malformed_request_to_join_is_refused(change, words):
    whole = {"protocol": PROTOCOL, "settings": "{}"}
    assert settings_of(whole) == {}
    assert_refused(words, settings_of, whole | change)
