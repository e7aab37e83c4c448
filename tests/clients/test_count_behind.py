"""A client's own count that went back is seen, also where no process joins again.

Of Fed-Avg GAN's updates: tests/methods/.
"""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message

from clients.deployed_client import NOTHING_TOLD, told_of
from deployed_grid import NAMES, Backup
from fedgs.round.run import RunStopped
from refusals import assert_refused
from runs import interrupt_at, num_answers
from server import roll_call
from simulated_grid import round_of, spoil_at

BEHIND = "own count was rolled back or deleted, because it lacks the release of round"


def test_an_answer_that_no_round_took_has_left_its_client_all_the_same(deploy):
    """One is refused by the server, one comes too late; then both counts go back."""
    run = deploy(mode="full participation", min_answers=1)
    refused, delayed, late = Backup(run, 1), Backup(run, 0), []

    def spoil(request: Message, reply: Message) -> Message:
        reply.content["fedgs"]["clip_bound"] = 2.0
        return reply

    def hold(request: Message, reply: Message) -> None:
        late.append((request.metadata.message_id, reply))

    def come(request: Message, reply: Message) -> Message:
        run.grid.waiting.update(late)
        return reply

    spoilt = {(NAMES[1], 2): spoil, (NAMES[0], 2): hold, (NAMES[2], 3): come}
    run.grid.spoil = spoil_at(spoilt)
    run.grid.on_push = lambda name, request: (name, round_of(request)) != (NAMES[0], 3)
    reports = refused.between(1, 2), delayed.between(1, 3)
    run.start(lambda metrics: [report(metrics) for report in reports])
    assert run.grid.waiting == {}  # taken from Flower, which would keep it
    assert num_answers(run.folder) == [3, 1, 1, 1]
    for index, backup in enumerate((delayed, refused)):
        assert run.counted(index) == [1]
        assert f"{BEHIND} 2 of run" in backup.refusals()


def test_a_server_that_is_killed_before_its_checkpoint_knows_what_it_had(
    deploy, monkeypatch
):
    monkeypatch.setattr(roll_call, "ROLL_CALL_SECONDS", 5.0)
    run = deploy(mode="full participation", min_answers=2, checkpoint_every=100)
    backup = Backup(run, 1)
    with pytest.raises(KeyboardInterrupt):
        run.start(
            lambda metrics: (interrupt_at(3)(metrics), backup.between(1, 9)(metrics))
        )
    backup.put_back()
    with pytest.raises(RunStopped, match="b-clinic failed; its own error"):
        run.start()
    assert f"{BEHIND} 3 of run" in backup.refusals()


def test_an_older_state_with_the_newest_count_goes_on_whichever_start_it_is_of(deploy):
    """As docs/deployment.md says: only RUN_ID/ is restored, never releases/."""
    run = deploy(mode="full participation", min_answers=2, checkpoint_every=1)
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
    return NOTHING_TOLD | {"answered": f"{start}/{round}/{key}"}


@pytest.mark.parametrize(
    "told",
    [
        {},
        NOTHING_TOLD | {"start": "../.."},
        NOTHING_TOLD | {"since": -1},
        NOTHING_TOLD | {"since": "0"},
        NOTHING_TOLD | {"answered": 3},
        released("../../etc/passwd", "1"),
        released("0" * 16, "-1"),
        released("0" * 16, "1" * 10),
        released("0" * 16, "\u0664"),
        released("0" * 16, "1", "f" * 63),
    ],
)
def test_a_server_that_does_not_say_what_it_has_is_refused(told):
    assert_refused("does not say what the server has", told_of, told)


def test_a_client_refuses_a_request_that_says_nothing_of_its_answers(deploy):
    run = deploy(mode="full participation", num_rounds=1)
    push = run.grid.answer

    def without(client, request: Message) -> Message | None:
        if round_of(request) == 1:
            request.content["told"] = ConfigRecord({})
        return push(client, request)

    run.grid.answer = without
    with pytest.raises(RunStopped, match="0 of 3 nodes"):
        run.start()
    assert not list(run.root.glob("state-*/releases/*.jsonl"))


def test_other_owners_in_the_places_of_those_before_are_refused(deploy, monkeypatch):
    """Their discriminators would be those of others; before anything is asked."""
    monkeypatch.setattr(roll_call, "ROLL_CALL_SECONDS", 5.0)
    run = deploy(mode="full participation", min_answers=3, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        run.start(interrupt_at(2))
    source = run.root / f"{NAMES[1]}.npz"
    with np.load(source) as file:
        arrays = dict(file)
    np.savez(source, **arrays | {"clients": arrays["clients"] + 1})
    run.clients[1].restart()
    before = run.attempts()
    with pytest.raises(RunStopped, match="b-clinic failed; its own error"):
        run.start()
    log = (run.clients[1].state_dir / "error.log").read_text()
    assert "the data have other clients than those that this run began with" in log
    assert run.attempts() == before
    np.savez(source, **arrays)
    run.clients[1].restart()
    run.start()
