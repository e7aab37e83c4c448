"""The loop: event first, then the send; stops, budgets, checkpoints and refusals."""

import errno
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, sanitize
from fedgs.methods.base import Request
from fedgs.methods.schedule import nodes_of
from fedgs.process import CANNOT_GO_ON
from fedgs.round import checkpoint, preparation
from fedgs.round import run as training
from fedgs.round.local import train_nodes
from fedgs.round.run import BudgetSpent, RunStopped
from fedgs.runs import sample_files
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from runs import (
    Report,
    events,
    generator,
    ignore,
    interrupt_at,
    keep_lines,
    num_answers,
)
from tiny import run_config, tiny_config, write_tiny_npz

GIGABYTE = 10**9


class Nodes:
    """Nodes without data: each releases seeded gradients; `lost` nodes do not answer.

    Attributes:
        sent: the rounds that were asked for.
        kept: the committed round that each request named.
        prepared: the nodes that were asked to make their discriminators.
        saved: the argument of every `save`.
    """

    def __init__(self, folder: RunFolder, lost: dict[int, int] | None = None) -> None:
        self.config = folder.config
        self.lost = lost or {}
        self.failures: list[str] = []
        self.sent: list[int] = []
        self.kept: list[int] = []
        self.prepared: list[int] = []
        self.saved: list[int] = []

    def answers(self, request: Request):
        self.sent.append(request.round)
        self.kept.append(request.keep_round)
        nodes = nodes_of(self.config, request.participants)
        answering = nodes[self.lost.get(request.round, 0) :]
        return [self.release(request.round, node) for node in answering]

    def prepare(self, request: Request, nodes, told) -> None:
        assert request.round == 0
        self.prepared += nodes

    def release(self, round: int, node: int):
        rng = torch.Generator().manual_seed(1000 * round + node)
        grads = torch.randn(1, *self.config.release_shape, generator=rng)
        noise = NoiseStream(self.config.noise_seed, node, round)
        parts = [clip(PerSampleGradients(grads), self.config.clip_bound)]
        return sanitize(parts, self.config.noise_std, noise, round, node)

    def save(self, keep_round: int) -> None:
        self.saved.append(keep_round)


def create(path: Path, **settings: object) -> RunFolder:
    defaults = {"num_rounds": 5, "checkpoint_every": 2}
    return RunFolder.create(tiny_config(output=str(path), **defaults | settings))


def run(
    folder: RunFolder,
    nodes: Nodes,
    report: Report = ignore,
    stop: threading.Event | None = None,
) -> None:
    train_nodes(folder, nodes, report, stop or threading.Event())


def committed(folder: RunFolder) -> int:
    path = folder.path / "checkpoint" / "checkpoint.json"
    return json.loads(path.read_text())["round"]


# ------------------------------------------------------------------ write ahead


def test_event_is_in_the_ledger_before_the_round_is_sent(tmp_path):
    """On the disk, too: an append returns after that (tests/privacy/test_ledger.py)."""
    folder = create(tmp_path / "run")

    class Watched(Nodes):
        def answers(self, request: Request):
            assert events(folder)[-1].round == request.round
            return super().answers(request)

    run(folder, nodes := Watched(folder))
    assert nodes.sent == [1, 2, 3, 4, 5]


MASKED = {"engine": "flower", "clients_per_node": 2, "secure_aggregation": True}
EVERYBODY = MASKED | {"client_selection": "all", "min_answers": 2}
DRAWN = MASKED | {"clients_per_round": 4}  # two clients each on two nodes, or on three


@pytest.mark.parametrize(
    ("settings", "participants", "nodes", "planned", "counted", "asked"),
    [
        # Three clients live on at least two nodes.
        ({"clients_per_round": 3, "clients_per_node": 2}, (0, 2, 4), None, 3, 2, None),
        ({"clients_per_round": 3, "clients_per_node": 2}, (0, 1, 4), None, 2, 2, None),
        # An attempt counts all its nodes unless they follow from a draw.
        (EVERYBODY, "all", [0, 1, 2], 3, 3, None),
        (EVERYBODY, "all", [0, 2], 2, 2, (0, 1, 4, 5)),
        (DRAWN, (0, 1, 2, 3), [0, 1], 2, 2, None),
        (DRAWN, (0, 2, 3, 5), [0, 1, 2], 3, 2, None),
    ],
)
def test_event_says_what_was_planned(
    settings, participants, nodes, planned, counted, asked
):
    event = training.new_event(tiny_config(**settings), 1, participants, 1, nodes)
    assert event.participants == (asked or participants)
    assert (event.planned_nodes, event.counted_nodes) == (planned, counted)
    assert (event.num_clients, event.batch_size, event.clip_bound) == (6, 4, 1.0)
    assert (event.noise_std, event.noise_source) == (1.0, "seeded")


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"client_selection": "all"}, "all"),
        ({"discriminator_training": "every_round", "clients_per_round": 1}, "all"),
        ({"clients_per_round": 1}, "participants"),
    ],
)
def test_nodes_prepare_once_when_first_needed_and_that_is_no_event(
    tmp_path, settings, asked
):
    folder = create(tmp_path / "run", **settings)
    nodes = Nodes(folder)
    run(folder, nodes)
    needed = {node for event in events(folder) for node in event.participants}
    if asked == "all":
        needed = range(6)
    assert len(nodes.prepared) == len(set(nodes.prepared))
    assert set(nodes.prepared) == set(needed)
    assert nodes.sent == [event.round for event in events(folder)] == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------ budget


def test_budget_stops_before_the_release_that_exceeds_it_also_after_a_repeat(tmp_path):
    settings = {"noise_multiplier": 2.0, "num_rounds": 40, "delta": 1e-3}
    settings |= {"target_epsilon": 6.0, "checkpoint_every": 50}
    folder = create(tmp_path / "run", client_selection="all", **settings)
    nodes = Nodes(folder)
    with pytest.raises(BudgetSpent, match=r"before round \d+.* target_epsilon = 6"):
        run(folder, nodes)
    done = len(events(folder))
    assert 3 < done < 40
    assert len(nodes.sent) == done == committed(folder)
    assert generator(folder.path)  # what was bought so far is the run's product
    again = create(tmp_path / "again", client_selection="all", **settings)
    with pytest.raises(KeyboardInterrupt):
        run(again, Nodes(again), interrupt_at(2))
    with pytest.raises(BudgetSpent):
        run(again, Nodes(again))
    assert len(events(again)) == done
    assert committed(again) == done - 2


def test_lost_release_that_has_no_room_for_another_is_told_to_be_the_end(tmp_path):
    """Nothing was learned, so there is no product, and no resume helps."""
    settings = {"noise_multiplier": 2.0, "num_rounds": 1, "delta": 1e-3}
    settings |= {"client_selection": "all", "target_epsilon": 1.5}  # one release
    folder = create(tmp_path / "run", **settings)
    lost = rf"{CANNOT_GO_ON}: a repetition would exceed target_epsilon = .* new run"
    with pytest.raises(RunStopped, match=lost):
        run(folder, Nodes(folder, lost={1: 1}))
    never = rf"^{CANNOT_GO_ON}: the release of round 1 would exceed target_epsilon"
    for _ in range(2):
        with pytest.raises(RunStopped, match=never):
            run(folder, Nodes(folder))
    assert len(events(folder)) == 1
    assert not folder.is_finished
    assert not folder.has_average


@pytest.mark.parametrize("noise", [{"noise_multiplier": 1.0}, {"target_epsilon": 9.0}])
def test_one_owner_alone_is_refused_where_the_owner_is_the_unit(noise):
    alone = {"num_clients": 1, "clients_per_round": 1, "noise_multiplier": None}
    words = "num_clients = 1: .*; give data of more owners, or --privacy-unit record"
    refused = preparation.with_noise
    assert_refused(words, refused, tiny_config(RunConfig, **alone | noise))
    record = {"privacy_unit": "record", "partition": "iid"}
    for allowed in (record | noise, {"noise_multiplier": 0.0}):
        resolved = preparation.with_noise(tiny_config(RunConfig, **alone | allowed))
        assert resolved.num_clients == 1
    words = "noise_multiplier is unset: give --noise"
    assert_refused(words, refused, tiny_config(RunConfig, noise_multiplier=None))


# ------------------------------------------------------------------ lost nodes


LOST = {"clients_per_round": 3, "num_rounds": 4, "checkpoint_every": 99}


def test_too_few_answers_are_counted_and_discarded(tmp_path):
    folder = create(tmp_path / "run", **LOST)
    words = r"round 3: 2 of 3 nodes .*min_answers requires 3"
    with pytest.raises(RunStopped, match=words):
        run(folder, Nodes(folder, lost={3: 1}))
    assert [event.round for event in events(folder)] == [1, 2, 3]
    assert committed(folder) == 2
    assert not (folder.path / "generator.safetensors").exists()
    # Its release has no metrics, but it cannot be cut off.
    keep_lines(folder.path / "ledger.jsonl", 2)
    assert_refused(r"line 2 is the last, .* saw 3", folder.read_ledger)


def test_round_goes_on_with_min_answers_and_counts_their_noise_only(tmp_path):
    folder = create(tmp_path / "run", min_answers=2, **LOST)
    run(folder, Nodes(folder, lost={3: 1}))
    assert [event.counted_nodes for event in events(folder)] == [2] * 4
    assert [event.planned_nodes for event in events(folder)] == [3] * 4
    assert num_answers(folder) == [3, 3, 2, 3]


# ------------------------------------------------------------------ stopping


def test_stop_commits_a_checkpoint_and_in_the_last_round_the_run(tmp_path):
    folder, stop = create(tmp_path / "run"), threading.Event()
    stop.set()
    with pytest.raises(RunStopped, match="after round 1"):
        run(folder, Nodes(folder), stop=stop)
    assert committed(folder) == 1
    nodes = Nodes(folder)
    run(folder, nodes)
    assert nodes.sent == [2, 3, 4, 5]
    short = create(tmp_path / "short", num_rounds=1)
    run(short, Nodes(short), stop=stop)
    assert generator(short.path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_to_stop_and_the_second_one_ends(number):
    before = signal.getsignal(number)
    with training.stop_on_signal() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


# ------------------------------------------------------------------ checkpoints


def test_checkpoints_are_as_often_as_asked_and_ten_sample_grids_over_the_run(tmp_path):
    folder = create(tmp_path / "run", num_rounds=21, checkpoint_every=8)
    nodes = Nodes(folder)
    run(folder, nodes)
    assert nodes.saved == [0, 8, 16]  # before the commits of 8, 16 and 21
    # Nodes are told which state to keep.
    assert nodes.kept == [*[0] * 8, *[8] * 8, *[16] * 5]
    assert committed(folder) == 21
    names = sorted(path.stem for path in (folder.path / "samples").iterdir())
    assert [int(name[-7:]) for name in names] == [*range(2, 21, 2), 21]


# 600 rounds of 0.3 s: at most every second (4 rounds), then every 20 times the cost.
@pytest.mark.parametrize(("cost", "number"), [(0.01, 150), (3.0, 3)])
def test_checkpoints_cost_under_5_percent_of_the_time(monkeypatch, cost, number):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    saved = []

    def save(keep_round: int) -> None:
        saved.append(keep_round)
        clock.now += cost

    config = tiny_config(checkpoint_every=None, num_rounds=600)
    folder = SimpleNamespace(config=config, save_checkpoint=lambda *args: None)
    folder.load_checkpoint = folder.truncate_metrics = lambda *args: None
    server = SimpleNamespace(round=0)
    monkeypatch.setattr(checkpoint, "time", clock)
    monkeypatch.setattr(training, "new_state", lambda config: server)
    monkeypatch.setattr(training, "server_tensors", lambda server: {})
    session = training.RunSession(folder, SimpleNamespace(events=()), ignore, save)
    for server.round in range(1, 601):
        clock.now += 0.3
        if session.is_due:
            session.commit()
    assert len(saved) == number
    first = cost  # was not known before it was paid
    assert number * cost - first <= 0.05 * (clock.now - first)


@pytest.mark.parametrize(
    ("full", "what"),
    [
        ("/checkpoint/", "the checkpoint of round 2"),
        ("/.generator.safetensors", "the generator"),
    ],
)
def test_what_must_be_written_ends_the_run_with_the_reason(
    tmp_path, monkeypatch, full, what
):
    folder, write = create(tmp_path / "run", num_rounds=2), open

    def no_room(path, *args, **kwargs):
        if full in str(path) and args[:1] == ("wb",):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", no_room)
    words = rf"run: {what} cannot be written \(No space left .*\); free the disk, then"
    assert_refused(words, run, folder, Nodes(folder))


def test_what_is_only_looked_at_ends_no_round_where_it_cannot_be_written(
    tmp_path, monkeypatch
):
    folder, reported = create(tmp_path / "run", num_rounds=3), []

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sample_files, "write_atomically", no_room)
    monkeypatch.setattr(RunFolder, "append_metrics", no_room)
    with pytest.warns(RuntimeWarning, match="No space left") as warned:
        run(folder, Nodes(folder), reported.append)
    shown = {str(warning.message).split(":")[0] for warning in warned}
    assert shown == {str(folder.path / name) for name in ("samples", "metrics.jsonl")}
    assert [metrics["round"] for metrics in reported] == [1, 2, 3]
    assert generator(folder.path)
    assert len(events(folder)) == 3


# ------------------------------------------------------------------ resolve


@pytest.fixture
def tiny_npz(tmp_path) -> str:
    return write_tiny_npz(tmp_path / "tiny.npz")


def test_resolving_fixes_clients_classes_seed_and_noise(tiny_npz):
    config = run_config(
        data=tiny_npz,
        image_size=16,
        client_selection="all",
        clients_per_round=None,
        target_epsilon=3.0,
        batch_size=4,
    )
    resolved, data = preparation.resolve(config)
    assert (resolved.num_clients, resolved.num_classes, data.num_clients) == (6, 3, 6)
    assert resolved.clients_per_round == 6
    assert resolved.noise_multiplier is not None
    assert resolved.noise_seed is None
    assert preparation.resolve(config)[0].seed != resolved.seed


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_clients": 41, "partition": "iid"}, r"num_clients = 41:"),
        ({"num_clients": 7}, r"num_clients = 7:"),
        ({"num_classes": 2}, r"has the label 2; give --num-classes above 2"),
    ],
)
def test_settings_that_the_data_contradicts_are_refused(tiny_npz, settings, named):
    base = {"data": tiny_npz, "image_size": 16, "noise_multiplier": 1.0}
    assert_refused(named, preparation.resolve, run_config(**base | settings))


# ------------------------------------------------------------------ capacity


STATE = 1000 * 3 * 4 * 1_071_105  # weights (methods.md 1), two Adam moments, 4 bytes


@pytest.mark.parametrize(
    ("settings", "memory", "disk", "needed"),
    [
        ({}, 2 * GIGABYTE, 3 * STATE, r"about 12.9 GB of memory, 2.0 GB are free"),
        ({}, STATE, 2 * GIGABYTE, r"about 38.6 GB of disk, 2.0 GB are free"),
        ({"device": "cuda"}, STATE, 3 * STATE, "device = cuda: no GPU .*--device cpu"),
        ({}, STATE, 3 * STATE, None),
    ],
)
def test_run_that_does_not_fit_is_refused_with_the_estimate(
    tmp_path, monkeypatch, settings, memory, disk, needed
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    available = SimpleNamespace(available=memory)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=disk))
    shared = {
        "num_clients": 1000,
        "num_classes": 10,
        "image_size": 28,
        "image_channels": 1,
        "noise_multiplier": 1.0,
        "seed": 0,
    }
    paper = ResolvedConfig.from_flat(shared | settings)
    if needed is None:
        preparation.check_capacity(paper, tmp_path / "not" / "there")
    else:
        assert_refused(needed, preparation.check_capacity, paper, tmp_path)
