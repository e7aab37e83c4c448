"""A deployment without a network: crashes, lost messages, full disks, waiting.

`round_timeout` and `min_answers` decide; a node that is back in time gives identical
bytes, and no count is below what left a client.
"""

import errno
import os
import shutil
import signal
from collections.abc import Iterable

import pytest
from flwr.app import Error as FlowerError
from flwr.app import Message

from clients import client_app
from clients.failures import log_privately
from deployed_grid import EPOCH, LIMITS, NAMES, Backup, kill_after_count
from fedgs import event_log
from fedgs.errors import UserError
from fedgs.round.run import RunStopped
from runs import at_round, interrupt_at, json_lines, num_answers
from server import progress
from simulated_grid import round_of, spoil_at

# ------------------------------------------------------------------ faults


ONCE = [(1, 1), (2, 1), (3, 1), (4, 1)]


@pytest.mark.parametrize(("round", "restart"), [(3, True), (3, False), (None, True)])
def test_a_lost_reply_is_asked_for_and_counted_once(
    deploy, undisturbed, clock, round, restart
):
    """It is lost with the client's process or without it; also in the roll call."""
    run, lost = deploy(round_timeout=600.0), []

    def lose(request: Message, reply: Message) -> Message | None:
        if lost:
            return reply
        lost.append(reply)
        if restart:
            run.clients[1].restart()
        return None

    run.grid.spoil = spoil_at({(NAMES[1], round): lose})
    run.start()
    assert run.product() == undisturbed(run)
    assert run.attempts() == ONCE
    assert run.counted(1) == [1, 2, 3, 4]  # the stored bytes were sent again
    # A restart is seen at once; without a sign the server waits longer.
    assert clock.now < 20 if restart else 60 <= clock.now < 120


@pytest.mark.parametrize(("signals", "most"), [(0, 4), (1, 3), (2, 4)])
def test_a_client_killed_at_work_gives_the_same_bytes_and_sigterm_waits_for_them(
    deploy, undisturbed, monkeypatch, capfd, signals, most
):
    """Killed, or at a second SIGTERM: nothing had left, the new answer counts too."""

    def end() -> None:
        for _ in range(signals):
            signal.raise_signal(signal.SIGTERM)
        if not signals:
            raise SystemExit

    def leave(number: int, frame: object) -> None:
        raise SystemExit  # as Flower's

    run = deploy(mode="moments", num_rounds=3, round_timeout=600.0)
    kill_after_count(monkeypatch, 3, end)
    run.restart_killed()
    before = signal.signal(signal.SIGTERM, leave)
    try:
        run.start()
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, before)
    assert sorted(client.starts for client in run.clients) == [1, 1, 2]
    assert run.product() == undisturbed(run)
    assert sorted(len(run.counted(i)) for i in range(3)) == [3, 3, most]
    said = "send SIGTERM (or press Ctrl-C) again" in capfd.readouterr().err
    assert said == (signals > 0)


def test_a_cut_network_that_heals_in_time_changes_nothing(
    deploy, undisturbed, clock, log
):
    """Nobody but who is cut off is waited for meanwhile."""
    run = deploy(round_timeout=100.0)
    gone, waiting = run.clients[0], list[list[str]]()

    def arrives(name: str, request: Message) -> bool:
        if name == gone.name and round_of(request) == 2:
            gone.is_online = clock.now > 61
        return gone.is_online or name != gone.name

    def look() -> None:
        waiting.append(run.progress()["waiting_for"])
        gone.is_online = gone.is_online or clock.now > 61

    run.grid.on_push = arrives
    run.start(at_round(1, lambda: setattr(run.grid, "on_look", look)))
    assert 61 < clock.now < 100
    assert run.product() == undisturbed(run)
    assert run.attempts() == ONCE
    assert waiting[:20] == 20 * [["a-clinic"]]
    waits = [line for line in log if line == "waiting for answers of a-clinic"]
    assert len(waits) == 2  # every 30 s


def test_a_client_that_lost_its_state_is_refused_and_the_run_says_so(deploy):
    run = deploy()
    with pytest.raises(KeyboardInterrupt):
        run.start(interrupt_at(3))
    reasons = {
        run.states(
            1
        ).parent: "what it kept is lost; it took part until round 2; restore",
        run.clients[1].state_dir: "b-clinic failed; its own error.log says why",
    }
    for lost, reason in reasons.items():  # with its count the client itself refuses
        shutil.rmtree(lost)
        run.clients[1].restart()
        with pytest.raises(RunStopped, match=rf"b-clinic \({reason}"):
            run.start()
    assert len(run.attempts()) == 3  # nothing more was asked


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_client_with_an_old_state_is_refused(deploy, is_killed):
    """By the server that starts again, or by itself."""
    run = deploy(mode="full participation", checkpoint_every=1)
    backup = Backup(run, 1)

    def restore(metrics: dict) -> None:
        if metrics["round"] == 1:
            backup.take()
        if metrics["round"] == 3:
            backup.put_back(only=run.states(1).parent.name)
            if is_killed:
                raise KeyboardInterrupt

    if is_killed:
        with pytest.raises(KeyboardInterrupt):
            run.start(restore)
        words = "it keeps round 1, although it took part until round 2"
        with pytest.raises(RunStopped, match=rf"b-clinic \({words}"):
            run.start()
    else:
        with pytest.raises(RunStopped, match="round 4: 2 of 3"):
            run.start(restore)
        words = "what it keeps is of round 1, and it is asked for round 4"
        assert words in backup.refusals()


def test_who_does_not_answer_in_time_or_wrongly_is_said_and_not_waited_for(
    deploy, clock, monkeypatch, tmp_path
):
    monkeypatch.setattr(progress, "WRITE_SECONDS", 0.0)
    monkeypatch.setenv(event_log.EVENT_LOG_VARIABLE, str(tmp_path / "events"))
    run, wrong = deploy(min_answers=2, round_timeout=30.0), []

    def fail_once(request: Message, reply: Message) -> Message:
        wrong.append(reply)
        out_of_memory = FlowerError(0, "out of memory")
        return reply if wrong[1:] else Message(out_of_memory, reply_to=request)

    lose = {(NAMES[2], 2): lambda request, reply: None, (NAMES[1], 3): fail_once}
    run.grid.spoil = spoil_at(lose)
    run.start()
    assert num_answers(run.folder) == [3, 2, 3, 3]
    assert 30 <= clock.now < 32
    nodes = run.progress()["nodes"]
    counted = [(n["resends"], n["failures"]) for n in nodes.values()]
    assert counted == [(0, 0), (1, 1), (0, 1)]
    assert nodes["b-clinic"]["last_failure"] == "round 3: b-clinic says: out of memory"
    assert nodes["c-clinic"]["last_failure"] == "c-clinic: it did not answer in time"
    assert nodes["c-clinic"]["last_answer"] == 4
    assert nodes["c-clinic"]["last_answer_time"] == round(EPOCH + clock.now)
    assert nodes["a-clinic"]["last_failure"] == nodes["a-clinic"]["reason"] == ""
    events = json_lines(tmp_path / "events")
    answered = [(e["node"], e["round"]) for e in events if e["event"] == "answered"]
    expected = {(name, round) for name in NAMES[:3] for round in range(5)}
    assert sorted(answered) == sorted(expected - {(NAMES[2], 2)})  # round 0: warm start
    (missing,) = [e for e in events if e["event"] == "missing"]
    assert (missing["node"], missing["round"]) == (NAMES[2], 2)


def test_a_reply_that_flower_cannot_read_is_its_senders_trouble(deploy, log):
    """Flower raises then, and gives nobody's replies; all are asked for again."""
    two = {"mode": "moments", "phases": "means:0.5,scatter:2"}
    run = deploy(**two, min_answers=2, num_rounds=2, round_timeout=5.0)
    pull = run.grid.pull_messages

    def unreadable(names: Iterable[str]) -> list[Message]:
        replies = pull(list(names))
        for reply in replies:
            client, request = run.grid.sent[reply.metadata.reply_to_message_id]
            if client.name == NAMES[0] and round_of(request):
                raise KeyError("NoSuchRecord")
        return replies

    run.grid.pull_messages = unreadable
    run.start()
    assert num_answers(run.folder) == [2, 2]
    assert "a reply cannot be read (KeyError) and is asked for again" in log
    assert "round 2: a-clinic did not answer" in log


def test_progress_that_cannot_be_written_is_said_once(deploy, log):
    run = deploy(mode="full participation", num_rounds=1)
    (run.folder.path / ".flower").mkdir()
    (run.folder.path / ".flower" / "nodes.json").mkdir()
    run.start()
    assert run.product()
    (line,) = [line for line in log if "nodes.json" in line]
    assert "Is a directory" in line


# ------------------------------------------------------------------ full disks


class Disk:
    """A folder on a disk that has no room from the moment when it is filled."""

    def __init__(self, monkeypatch, where: str) -> None:
        self.is_full, self.where = False, where
        self.fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.write)

    def fill(self) -> None:
        self.is_full = True

    def write(self, descriptor: int) -> None:
        if self.is_full and self.where in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        self.fsync(descriptor)


def test_a_clients_full_disk_releases_nothing_uncounted(
    deploy, undisturbed, monkeypatch
):
    run = deploy(mode="full participation")
    disk = Disk(monkeypatch, "state-b-clinic")
    words = r"(?s)round 3: 2 of 3 nodes .* within round_timeout = 60 s.*b-clinic says: "
    with pytest.raises(RunStopped, match=words):
        run.start(at_round(2, disk.fill))
    error = (run.clients[1].state_dir / "error.log").read_text()
    assert "No space left on device" in error
    assert run.counted(1) == [1, 2]
    disk.is_full = False
    run.start()
    assert run.product() == undisturbed(run)
    assert run.counted(1) == [1, 2, 3, 4]
    assert run.counted(0) == [1, 2, 3, 3, 4]  # it had answered, and left


@pytest.mark.parametrize("is_deployed", [True, False])
def test_the_cause_of_a_failure_is_in_the_clients_own_journal(
    tmp_path, capsys, is_deployed
):
    """In a line; what is not for people, and may quote data, by its kind alone."""
    for error in (
        UserError("data = x: it is lost"),
        LookupError("label 7 of writer 4"),
    ):
        log_privately(tmp_path / "state", error, is_deployed)
    log = tmp_path / "state" / "error.log"
    assert "label 7 of writer 4" in log.read_text()
    log.unlink()
    log.mkdir()
    log_privately(tmp_path / "state", OSError(errno.ENOSPC, "No space"), is_deployed)
    expected = f"{log}: data = x: it is lost\n{log}: LookupError\n"
    expected += f"{log}: it cannot be written (Is a directory); it would say: "
    expected += "[Errno 28] No space\n"
    assert capsys.readouterr().err == (expected if is_deployed else "")


@pytest.mark.filterwarnings("ignore:.*samples.*cannot be written")
def test_the_servers_full_disk_sends_nothing_uncounted(
    deploy, undisturbed, monkeypatch
):
    run = deploy()
    disk = Disk(monkeypatch, str(run.folder.path))
    with (
        pytest.warns(RuntimeWarning, match="samples: it cannot be written"),
        pytest.raises((UserError, OSError), match="No space left"),
    ):
        run.start(at_round(2, disk.fill))
    disk.is_full = False
    assert [run.counted(i) for i in range(3)] == 3 * [[1, 2]]
    assert run.attempts() in ([(1, 1), (2, 1)], [(1, 1), (2, 1), (3, 1)])
    run.start()
    assert run.product() == undisturbed(run)


# ------------------------------------------------------------------ waiting


def test_the_roll_call_says_who_is_missing_and_can_be_stopped(deploy, log, clock):
    run = deploy()
    run.clients[2].is_online = False
    run.grid.on_look = lambda: clock.now > 50 and run.stop.set()
    with pytest.raises(RunStopped, match=r"during the roll call.*: c-clinic"):
        run.start()
    assert sum("waits for c-clinic" in line for line in log) == 1
    assert run.progress()["waiting_for"] == ["c-clinic"]
    assert not run.progress()["nodes"]["c-clinic"]["joined"]


def test_a_clients_own_limit_ends_a_run_that_needs_it_at_once(
    deploy, monkeypatch, clock
):
    """Asking again mends nothing; what others may do without, goes on without it."""
    monkeypatch.setattr(progress, "WRITE_SECONDS", 0.0)
    run = deploy()
    client = run.clients[1]
    usual = client.node_config["limits"]
    (run.root / "strict.toml").write_text("min_noise_multiplier = 1e9\n" + LIMITS)
    client.node_config["limits"] = str(run.root / "strict.toml")
    client.restart()
    words = f"{client.name} refused: its own limit .* forbids this run; submit another"
    with pytest.raises(RunStopped, match=words):
        run.start()
    assert clock.now < 10
    assert run.attempts() == []
    assert "its own limit" in run.progress()["nodes"][client.name]["last_failure"]
    client.node_config["limits"] = usual
    client.restart()
    run.start()
    assert run.folder.is_finished


def test_a_refusal_that_may_be_mended_is_told_once(deploy, log, clock):
    run = deploy()
    run.clients[1].node_config["data"] = "npz:nowhere.npz"
    run.clients[1].restart()
    with pytest.raises(
        RunStopped, match=r"b-clinic failed; .* did not join within 60 s"
    ):
        run.start()
    assert sum("is refused" in line for line in log) == 1


def test_a_server_that_starts_again_with_all_answers_needs_nobody(deploy, clock):
    run = deploy()
    run.start()
    product = run.product()
    (run.folder.path / "generator.safetensors").unlink()
    for client in run.clients:
        client.is_online = False
    before = clock.now
    run.start()
    assert clock.now - before < 10
    assert run.product() == product
    assert run.progress()["waiting_for"] == []
    assert run.progress()["phase"] == "training"
    assert [n["last_answer"] for n in run.progress()["nodes"].values()] == [4, 4, 4]


def test_a_stop_before_a_later_warm_start_repeats_no_round(deploy, undisturbed, clock):
    """In the paper's mode a node makes its discriminator when it is first selected."""
    run = deploy(mode="selected", checkpoint_every=100, num_rounds=3)
    asked_first: list[str] = []

    def arrives(name: str, request: Message) -> bool:
        if round_of(request) == 0:
            asked_first.append(name)
        return len(asked_first) < 3

    run.grid.on_push = arrives
    run.grid.on_look = lambda: len(asked_first) >= 3 and run.stop.set()
    with pytest.raises(RunStopped, match="discriminators"):
        run.start()
    done = run.attempts()
    assert done
    run.stop.clear()
    run.grid.on_push, run.grid.on_look = lambda *_: True, lambda: None
    run.start()
    assert run.attempts() == [(round, 1) for round in range(1, 4)]
    assert run.product() == undisturbed(run)


def test_the_log_of_a_client_tells_how_far_a_long_warm_start_is(
    deploy, log, monkeypatch
):
    monkeypatch.setattr(client_app, "WARM_START_SECONDS", -1.0)
    run = deploy(warm_start_rounds=2)
    run.start()
    told = [line for line in log if "warm start: step" in line]
    lines = [f"{name}: warm start: step 1 of 2" for name in NAMES[:3]]
    assert set(lines) < set(told)
    assert len(told) == 2 * len(lines)
