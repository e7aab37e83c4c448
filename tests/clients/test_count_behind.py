"""A client's own count that went back is seen, also where no process joins again.

Of Fed-Avg GAN's updates: tests/baselines/test_deployed.py.
"""

import pytest
from flwr.app import ConfigRecord, Message

from clients.deployed_client import UNTOLD, told_of
from deployed_grid import NAMES, Backup
from fedgs.federation.training import RunStopped
from refusals import assert_refused
from runs import interrupt_at, num_answers
from server import roll_call
from simulated_grid import round_of, spoil_at

BEHIND = "own count was rolled back or deleted: it has no release of round"


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("full participation", {"num_rounds": 3, "min_answers": 2}),
        ("moments", {"num_rounds": 3}),
    ],
)
def test_a_count_that_goes_back_while_a_run_goes_on_is_refused(deploy, mode, settings):
    run = deploy(mode=mode, **settings)
    backup = Backup(run, 1)
    if "min_answers" in settings:
        run.start(backup.between(1, 2))
        assert num_answers(run.folder)[:3] == [3, 3, 2]
    else:
        with pytest.raises(RunStopped, match="b-clinic failed; its own error"):
            run.start(backup.between(1, 2))
    assert run.counted(1) == [1]
    assert f"{BEHIND} 2 of run" in backup.refusals()


def test_a_server_that_is_killed_before_its_checkpoint_knows_what_it_had(
    deploy, monkeypatch
):
    monkeypatch.setattr(roll_call, "TIMEOUT", 5.0)
    run = deploy(min_answers=2, checkpoint_every=100)
    backup = Backup(run, 1)
    with pytest.raises(KeyboardInterrupt):
        run.start(
            lambda metrics: (interrupt_at(3)(metrics), backup.between(1, 9)(metrics))
        )
    backup.put_back()
    with pytest.raises(RunStopped, match="b-clinic failed; its own error"):
        run.start()
    assert f"{BEHIND} 3 of run" in backup.refusals()


def test_an_answer_that_the_server_refused_has_left_its_client_all_the_same(deploy):
    run = deploy(min_answers=2)
    backup = Backup(run, 1)

    def spoil(request: Message, reply: Message) -> Message:
        reply.content["fedgs"]["clip_bound"] = 2.0
        return reply

    run.grid.spoil = spoil_at({(NAMES[1], 2): spoil})
    run.start(backup.between(1, 2))
    assert num_answers(run.folder) == [3, 2, 2, 2]
    assert run.counted(1) == [1]
    assert f"{BEHIND} 2 of run" in backup.refusals()


def test_an_answer_that_came_too_late_has_left_its_client_all_the_same(deploy):
    run = deploy(min_answers=2)
    backup, late = Backup(run, 0), []

    def hold(request: Message, reply: Message) -> None:
        late.append((request.metadata.message_id, reply))

    def come(request: Message, reply: Message) -> Message:
        run.grid.waiting.update(late)
        return reply

    run.grid.spoil = spoil_at({(NAMES[0], 2): hold, (NAMES[1], 3): come})
    run.grid.on_push = lambda name, request: (name, round_of(request)) != (NAMES[0], 3)
    run.start(backup.between(1, 3))
    assert run.grid.waiting == {}  # taken from Flower, which would keep it
    assert num_answers(run.folder) == [3, 2, 2, 2]
    assert run.counted(0) == [1]
    assert f"{BEHIND} 2 of run" in backup.refusals()


def test_a_count_that_is_ahead_is_right(deploy):
    """Its answers got lost on the way; then the server is restored, and says less."""
    run = deploy(min_answers=2)
    lose = {(NAMES[1], 2): lambda request, reply: None}
    run.grid.spoil = spoil_at(lose)
    kept = run.folder.path / "deployment.json"
    older: list[bytes] = []

    def report(metrics: dict) -> None:
        if metrics["round"] == 1:
            older.append(kept.read_bytes())
        run.clients[1].restart()
        interrupt_at(3)(metrics)

    with pytest.raises(KeyboardInterrupt):
        run.start(report)
    kept.write_bytes(older[0])
    run.start()
    assert num_answers(run.folder) == [3, 2, 3, 3]
    assert run.counted(1) == [1, 2, 3, 3, 4]


def test_an_older_state_with_the_newest_count_goes_on_whichever_start_it_is_of(deploy):
    """As docs/deployment.md says: only RUN_ID/ is restored, never releases/."""
    run = deploy(min_answers=2, num_rounds=4, checkpoint_every=1)
    backup = Backup(run, 1)

    def first(metrics: dict) -> None:
        backup.between(1, 9)(metrics)
        interrupt_at(2)(metrics)

    with pytest.raises(KeyboardInterrupt):
        run.start(first)
    run_id = run.states(1).parent.name

    def second(metrics: dict) -> None:
        if metrics["round"] == 3:
            backup.put_back(only=run_id)

    run.start(second)
    assert num_answers(run.folder) == [3] * 4
    assert run.counted(1) == [1, 2, 2, 3, 4]


def released(start: str, round: str, key: str = "") -> dict[str, str]:
    return UNTOLD | {"answered": f"{start}/{round}/{key}"}


@pytest.mark.parametrize(
    "told",
    [
        {},
        UNTOLD | {"start": "../.."},
        UNTOLD | {"since": -1},
        UNTOLD | {"since": "0"},
        UNTOLD | {"answered": 3},
        released("../../etc/passwd", "1"),
        released("0" * 16, "-1"),
        released("0" * 16, "1" * 10),
        released("0" * 16, "\u0664"),
        released("0" * 16, "1", "f" * 63),
    ],
)
def test_a_server_that_does_not_say_what_it_has_is_refused(told):
    assert_refused("request without what the server has of this node", told_of, told)


def test_what_a_server_has_is_read_as_it_is_written():
    assert told_of(UNTOLD) == ("0" * 16, 0, None)
    assert told_of(released("1" * 16, "12", "f" * 64))[2] == ("1" * 16, 12, "f" * 64)


def test_a_client_refuses_a_request_that_says_nothing_of_its_answers(deploy):
    run = deploy(num_rounds=1)
    push = run.grid.answer

    def without(client, request: Message) -> Message | None:
        if round_of(request) == 1:
            request.content["told"] = ConfigRecord({})
        return push(client, request)

    run.grid.answer = without
    with pytest.raises(RunStopped, match="0 of 3 nodes"):
        run.start()
    assert not list(run.root.glob("state-*/releases/*.jsonl"))
