"""Engine x method x fault: whatever trains and whatever breaks, the bytes are the same.

Fed-Avg GAN's are in tests/methods; real processes in tests/server and tests/clients.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from deployed_grid import Deployment
from fedgs.files import read_tensors
from fedgs.privacy.ledger import Ledger
from fedgs.round import checkpoint, local
from fedgs.runs import run_folder
from fedgs.runs.run_folder import RunFolder, state_rounds
from runs import Report, attempts, events, generator, ignore, train
from server.strategy import FederatedGan
from simulated_grid import MODES as SIMULATED
from simulated_grid import FakeGrid
from tiny import REFINED, WITH_RELEASES, digest, tiny_config, write_tiny_npz

pytestmark = pytest.mark.usefixtures("server_process", "clock")

ROUNDS = 4
BASE = {"num_rounds": ROUNDS, "checkpoint_every": 2}
BASE |= {"warm_start_rounds": 1, "discriminator_steps": 1, "round_timeout": 60.0}
MODES = SIMULATED | {
    "balanced, frozen": {
        "client_selection": "balanced",
        "clients_per_round": 3,
        "discriminator_training": "frozen",
        "clients_per_node": 4,
    },
    # A generator whose spectral vectors move with each step.
    "resnet": {"clients_per_round": 1, "generator": "resnet", "generator_dim": 2},
    "parts": WITH_RELEASES | {"phases": "means,scatter,parts,gs-wgan"},
    # Moments, a refiner, and rounds of discriminators that train it on.
    "refined": WITH_RELEASES | REFINED | {"phases": "means,scatter,features,gs-wgan"},
    "public start": WITH_RELEASES
    | {"phases": "moments,moments,gs-wgan", "public_data": "all"},
}


class Local:
    """A run of the local engine."""

    more: ClassVar[dict[str, object]] = {}

    def __init__(self, place: Path, settings: dict[str, object]) -> None:
        config = tiny_config(**settings | self.more, output=str(place / "run"))
        self.folder = RunFolder.create(config)

    def start(self, report: Report = ignore) -> None:
        """Trains from what is on the disk, as another process would."""
        train(RunFolder.open(self.folder.path), report)

    def states(self) -> dict[str, str]:
        """Every node's last state."""
        found = {}
        for node in sorted(self.folder.private.glob("node-*")):
            path = node / f"round-{state_rounds(node)[-1]:07d}.safetensors"
            found[path.parent.name] = digest(read_tensors(path)[0])
        return found

    def counts(self) -> Counter[int]:
        """How often each client has released, by its own node's count."""
        found: Counter[int] = Counter()
        for path in self.folder.private.glob("node-*/releases-*.jsonl"):
            names = json.loads((path.parent / "clients.json").read_text())[path.name]
            for event in Ledger.read(path).events:
                everyone = range(len(names))
                asked = everyone if event.participants == "all" else event.participants
                found.update(int(names[position]) for position in asked)
        return found


class Workers(Local):
    """The local engine with threads."""

    more: ClassVar = {"num_workers": 3}


class Flower(Local):
    """A simulation whose messages go through Flower's serialisation."""

    more: ClassVar = {"engine": "flower"}
    num_workers = 1

    def start(self, report: Report = ignore) -> None:
        folder = RunFolder.open(self.folder.path)
        grid = FakeGrid(folder.config.num_nodes, num_workers=self.num_workers)
        FederatedGan(folder, report, threading.Event()).start(grid)


class Hopping(Flower):
    """Nodes hop between workers: most messages find an old state, or none."""

    num_workers = 3


class Deployed(Deployment):
    """Clients with data of their own, each started again with the server."""

    def __init__(self, place: Path, settings: dict[str, object]) -> None:
        super().__init__(place, "deployed", **settings)

    def start(self, report: Report = ignore) -> None:
        for client in self.clients:
            client.restart()
        super().start(report)


ENGINES = {e.__name__: e for e in (Workers, Flower, Hopping, Deployed)}


def made(engine: type, place: Path, mode: str, **more: object):
    data = write_tiny_npz(place / "all.npz")
    settings = BASE | MODES[mode] | {"data": data} | more
    if settings.get("public_data"):
        settings["public_data"] = write_tiny_npz(place / "public.npz")
    return engine(place, settings)


def product(run) -> tuple[str, ...]:
    names = ("generator", "generator_ema")
    return tuple(generator(run.folder.path, name) for name in names)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Callable[[str], Local]:
    """The local engine's run of a mode; both engines need the same server process."""
    found: dict[str, Local] = {}

    def of(mode: str) -> Local:
        if mode not in found:
            found[mode] = made(Local, tmp_path_factory.mktemp("whole"), mode)
            found[mode].start()
        return found[mode]

    return of


def check(run, whole: Local) -> None:
    assert product(run) == product(whole)
    if isinstance(run, Local):
        assert run.states() == whole.states()


CASES = [
    *((mode, "Workers") for mode in ("selected", "balanced, frozen")),
    *((m, "Flower") for m in ("trains without answering", "public start", "parts")),
    *(("refined", engine) for engine in ("Flower", "Deployed")),
    *((m, "Hopping") for m in ("selected", "full participation", "with releases")),
    *((m, "Deployed") for m in ("selected", "silos that differ", "with releases")),
]


@pytest.mark.parametrize(("mode", "engine"), CASES)
def test_every_engine_gives_the_same_bytes(tmp_path, uninterrupted, mode, engine):
    run = made(ENGINES[engine], tmp_path, mode)
    run.start()
    check(run, uninterrupted(mode))
    assert events(run.folder) == events(uninterrupted(mode).folder)


@pytest.mark.parametrize("seed", ["seed", "noise_seed"])
def test_each_seed_decides_the_result(tmp_path, uninterrupted, seed):
    run = made(Local, tmp_path, "selected", **{seed: 99})
    run.start()
    assert product(run)[0] != product(uninterrupted("selected"))[0]


# ------------------------------------------------------------------ faults


class Killed(KeyboardInterrupt):
    """Stands for a process that is killed at this point."""


def before_sending(patch: pytest.MonkeyPatch, round: int) -> None:
    answers = local.LocalNodes.answers

    def crash(self: local.LocalNodes, request):
        if request.round == round:
            raise Killed
        return answers(self, request)

    patch.setattr(local.LocalNodes, "answers", crash)


def after_the_answers(patch: pytest.MonkeyPatch, round: int) -> None:
    answers = local.LocalNodes.answers

    def crash(self: local.LocalNodes, request):
        found = answers(self, request)
        if request.round == round:
            self.save(request.keep_round)  # as Flower's nodes do in every round
            raise Killed
        return found

    patch.setattr(local.LocalNodes, "answers", crash)


def after_the_step(patch: pytest.MonkeyPatch, round: int) -> None:
    append = RunFolder.append_metrics

    def crash(self: RunFolder, metrics: dict) -> None:
        append(self, metrics)
        if metrics["round"] == round:
            raise Killed

    patch.setattr(RunFolder, "append_metrics", crash)


def between_nodes_and_commit(patch: pytest.MonkeyPatch, round: int) -> None:
    save = RunFolder.save_checkpoint

    def crash(self: RunFolder, done: int, *rest) -> None:
        if done >= round:
            raise Killed
        save(self, done, *rest)

    patch.setattr(RunFolder, "save_checkpoint", crash)


def before_the_commit(patch: pytest.MonkeyPatch, round: int) -> None:
    write_json = run_folder.files.write_json

    def crash(path: Path, content: dict) -> None:
        if path.name == "checkpoint.json" and content["round"] >= round:
            raise Killed
        write_json(path, content)

    patch.setattr(run_folder.files, "write_json", crash)


def in_the_fit(patch: pytest.MonkeyPatch, step: int) -> None:
    done = checkpoint.KeptFit.done

    def crash(fit: checkpoint.KeptFit, finished: int, steps: int) -> None:
        done(fit, finished, steps)
        if finished == step:
            raise Killed

    patch.setattr(checkpoint.KeptFit, "done", crash)


def in_a_kept_fit(patch: pytest.MonkeyPatch, step: int) -> None:
    patch.setattr(checkpoint, "FIT_SECONDS", -1.0)
    in_the_fit(patch, step)


FAULTS: dict[str, list[tuple[Callable, int]]] = {
    "before the first release": [(before_sending, 1)],
    "before the first checkpoint": [(between_nodes_and_commit, 2)],
    "after a step": [(after_the_step, 3)],
    "in the refiner's fit": [(in_the_fit, 7), (after_the_step, ROUNDS)],
    "in a kept fit": [
        (in_a_kept_fit, 7),
        (in_a_kept_fit, 9),
        (after_the_step, ROUNDS),
    ],
    "with uncommitted node states": [(between_nodes_and_commit, ROUNDS)],
    "at the end": [(before_the_commit, ROUNDS)],
    "four times": [
        (after_the_answers, 1),
        (before_the_commit, 2),
        (after_the_answers, 3),
        (after_the_step, ROUNDS),
    ],
}
NOT_REPEATED = "at the end"  # no request is lost
BROKEN = [
    ("selected", Local, "before the first release"),
    ("selected", Local, "with uncommitted node states"),
    ("selected", Local, "at the end"),
    ("selected", Local, "four times"),
    ("resnet", Local, "after a step"),
    ("refined", Local, "in the refiner's fit"),
    ("refined", Local, "in a kept fit"),
    ("with releases", Local, "four times"),
    ("public start", Local, "after a step"),
    ("selected", Flower, "after a step"),
    ("full participation", Flower, "before the first checkpoint"),
    ("full participation", Deployed, "after a step"),
    ("trains without answering", Deployed, "after a step"),
]


@pytest.mark.parametrize(("mode", "engine", "fault"), BROKEN)
def test_a_killed_run_resumes_to_the_same_bytes_and_counts_what_it_repeats(
    tmp_path, uninterrupted, mode, engine, fault
):
    run, counts = made(engine, tmp_path, mode), []
    for where, number in FAULTS[fault]:
        with pytest.MonkeyPatch.context() as patch:
            where(patch, number)
            with pytest.raises(Killed):
                run.start()
        counts.append(len(attempts(run.folder)))
    run.start()
    check(run, uninterrupted(mode))
    sent = events(run.folder)
    assert [*counts, len(sent)] == sorted([*counts, len(sent)])  # none is taken back
    assert len(sent) > ROUNDS or fault == NOT_REPEATED
    first = {event.round: event.participants for event in reversed(sent)}
    assert all(event.participants == first[event.round] for event in sent)
    rounds = [line["round"] for line in run.folder.metrics()]
    assert rounds == list(range(1, ROUNDS + 1))
    if isinstance(run, Deployed) and mode == "full participation":
        assert run.counted(0) == [event.round for event in sent]  # it left again
    elif isinstance(run, Local):  # clients count what the ledger says, never more
        asked: Counter[int] = Counter()
        for event in sent:
            everyone = range(event.num_clients)
            asked.update(
                everyone if event.participants == "all" else event.participants
            )
        assert run.counts() <= asked
        assert run.counts() == asked or fault == "before the first release"
