"""A warm start that is interrupted goes on where it was, to the same bytes."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgs.gan import discriminators
from fedgs.gan.discriminators import Discriminators
from fedgs.round import kept_warm_start, local, run
from fedgs.round.node import Node
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import RunFolder, node_folder, warm_start_path
from refusals import assert_refused
from runs import generator, interrupt
from tiny import FULL_PARTICIPATION, public_fakes, tiny_config, tiny_data

ROUNDS = 3
# Two nodes of three clients in chunks of two: 2 * 2 * 3 steps of the warm start.
SETTINGS = FULL_PARTICIPATION | {
    "clients_per_node": 3,
    "warm_start_rounds": ROUNDS,
    "num_rounds": 1,
    "num_workers": 1,
}
STEPS = 4 * ROUNDS
# A step of a warm start or a round trains a chunk twice, with n_dis = 2.
ALL_CALLS = 2 * STEPS + 2 * 4


@pytest.fixture(autouse=True, scope="module")
def _told_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discriminators, "CHUNK_SIZE", 2)
        patch.setattr(run, "TELL_SECONDS", -1.0)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """The generator of a run that nobody interrupts."""
    folder = create(tmp_path_factory.mktemp("whole") / "run")
    train(folder)
    return generator(folder.path)


def create(path: Path, **settings: object) -> RunFolder:
    config = tiny_config(output=str(path), **SETTINGS | settings)
    return RunFolder.create(config)


def train(folder: RunFolder, told=None, is_stopped: bool = False) -> None:
    """Trains what is on the disk; `told` gets the stop and each step."""
    stop = threading.Event()
    if is_stopped:
        stop.set()

    def report(metrics: dict) -> None:
        if told and "warm_start_step" in metrics:
            told(stop, metrics["warm_start_step"])

    again = RunFolder(folder.path, folder.config)
    local.train(again, tiny_data(folder.config), report, stop)


def stopping_after(step: int):
    """Is told of the steps, and has the run stop at the one after `step`."""

    def told(stop: threading.Event, found: int) -> None:
        if found == step:
            stop.set()

    return told


def kept(folder: RunFolder, node_id: int) -> Path:
    return warm_start_path(node_folder(folder.private, node_id))


@pytest.fixture
def count(monkeypatch) -> list[int]:
    """Counts the calls that train discriminators."""
    calls: list[int] = []
    original = Discriminators.train

    def counted(self: Discriminators, *args: object) -> None:
        calls.append(1)
        original(self, *args)

    monkeypatch.setattr(Discriminators, "train", counted)
    return calls


# At the end of the first chunk, in the second one, in the second node.
@pytest.mark.parametrize("step", [2, 4, 7])
def test_stopped_warm_start_goes_on_to_the_same_bytes(tmp_path, whole, count, step):
    folder = create(tmp_path / "run")
    words = f"after step {step + 1} of {STEPS} of the warm start"
    with pytest.raises(RunStopped, match=words):
        train(folder, stopping_after(step))
    assert not folder.metrics()
    steps: list[int] = []
    train(folder, lambda stop, found: steps.append(found))
    assert len(count) == ALL_CALLS  # no step was taken twice
    assert steps[-1] == STEPS
    assert generator(folder.path) == whole
    assert not kept(folder, 0).exists()
    assert not kept(folder, 1).exists()


def test_stop_before_the_kept_chunk_begins_again_loses_nothing(tmp_path, whole, count):
    folder = create(tmp_path / "run")
    with pytest.raises(RunStopped):
        train(folder, stopping_after(4))
    with pytest.raises(RunStopped, match=f"after step 3 of {STEPS} of the warm start"):
        train(folder, is_stopped=True)
    train(folder)
    assert len(count) == ALL_CALLS
    assert generator(folder.path) == whole


def test_warm_start_against_the_first_fakes_goes_on_to_the_same_bytes(tmp_path):
    folders = [create(tmp_path / name, fakes_per_round=5) for name in "ab"]
    train(folders[0])
    with pytest.raises(RunStopped):
        train(folders[1], stopping_after(4))
    train(folders[1])
    first, second = (generator(folder.path) for folder in folders)
    assert first == second


def test_killed_warm_start_goes_on_from_what_was_kept_last(
    tmp_path, monkeypatch, count
):
    monkeypatch.setattr(kept_warm_start, "FIT_SECONDS", -1.0)
    monkeypatch.setattr(kept_warm_start, "CHECKPOINT_SHARE", 1e9)
    folder = create(tmp_path / "run", clients_per_node=6)

    def killed(stop: threading.Event, step: int) -> None:
        if step == 5:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        train(folder, killed)
    done = len(count)
    count.clear()
    train(folder)
    other = create(tmp_path / "whole", clients_per_node=6)
    left = len(count)
    count.clear()
    train(other)
    assert len(count) == done + left
    assert generator(folder.path) == generator(other.path)


def test_short_warm_starts_write_and_tell_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TELL_SECONDS", 60.0)
    monkeypatch.setattr(kept_warm_start.KeptSteps, "keep", interrupt)
    told: list[int] = []
    train(create(tmp_path / "run"), lambda stop, step: told.append(step))
    assert told == []


def stopped(path: Path) -> RunFolder:
    folder = create(path)
    with pytest.raises(RunStopped):
        train(folder, stopping_after(4))
    return folder


def test_damaged_file_is_told_of_and_the_warm_start_begins_anew(tmp_path, whole, count):
    folder = stopped(tmp_path / "run")
    for node_id in range(2):  # the second one had begun when the first one stopped
        content = bytearray(kept(folder, node_id).read_bytes())
        content[-1] ^= 1
        kept(folder, node_id).write_bytes(content)
    count.clear()
    with pytest.warns(RuntimeWarning, match="corrupted.*; the warm start begins anew"):
        train(folder)
    assert len(count) == ALL_CALLS
    assert generator(folder.path) == whole


@pytest.mark.parametrize("what", ["clients", "fakes"])
def test_what_is_kept_of_another_warm_start_is_not_used(tmp_path, count, what):
    folder = stopped(tmp_path / "run")
    config = folder.config
    data = tiny_data(config)
    request = public_fakes(config)
    if what == "clients":
        names = [f"other {name}" for name in data.client_names]
        object.__setattr__(data, "client_names", names)
    else:
        request.tensors["images"] = request.tensors["images"] / 2
    count.clear()
    Node(config, 0, data, folder.private).answer(request)
    assert len(count) == 2 * ROUNDS * config.discriminator_steps


def test_other_networks_are_refused(tmp_path):
    folder = stopped(tmp_path / "run")
    config = tiny_config(**SETTINGS, discriminator_dim=3)
    node = Node(config, 0, tiny_data(config), folder.private)
    words = r"it is of another warm start \(.*\); remove it, then resume the run"
    assert_refused(words, node.answer, public_fakes(folder.config))


def test_report_of_the_last_step_comes_after_those_before(tmp_path):
    told: list[int] = []
    train(create(tmp_path / "run"), lambda stop, step: told.append(step))
    assert told == [*range(1, STEPS + 1)]
