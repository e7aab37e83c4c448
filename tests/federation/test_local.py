"""The local engine: workers, interruptions and crashes change no bit of the result."""

import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from fedgs.errors import UserError
from fedgs.federation import local
from fedgs.federation.training import RunStopped
from fedgs.files import read_tensors
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Ledger
from fedgs.privacy.participation import COUNT_THEOREM
from fedgs.runs import epsilons, run_folder
from fedgs.runs.run_folder import RunFolder, node_folder, state_rounds
from refusals import assert_refused
from runs import attempts, events, generator
from tiny import FULL_PARTICIPATION, MOMENTS, STAGED, tiny_config, tiny_data

ROUNDS = 6
MODES = {
    # The paper: one client a round, its discriminator made when first needed.
    "selected": {"clients_per_round": 1},
    "full participation": FULL_PARTICIPATION,
    "balanced, frozen": {
        "client_selection": "balanced",
        "clients_per_round": 3,
        "discriminator_training": "frozen",
        "clients_per_node": 4,
    },
    # Forgets from round 3 on; a generator whose spectral vectors move with each step.
    "surrogate": FULL_PARTICIPATION
    | {
        "generator": "resnet",
        "generator_dim": 2,
        "surrogate_steps": 2,
        "surrogate_fit_steps": 2,
        "surrogate_memory": 2,
    },
    "staged": STAGED,
    "moments": MOMENTS,
}


class CrashError(Exception):
    """Stands for a process that is killed at this point."""


def create(path: Path, **settings: object) -> RunFolder:
    defaults = {"num_rounds": ROUNDS, "checkpoint_every": 2, "sample_every": ROUNDS}
    return RunFolder.create(tiny_config(output=str(path), **defaults | settings))


def train(folder: RunFolder, report: Callable[[dict], None] | None = None) -> None:
    """Trains the folder as found on the disk, as another process would."""
    folder = RunFolder(folder.path, folder.config)
    ignore = report or (lambda metrics: None)
    local.train(folder, tiny_data(folder.config), ignore, threading.Event())


def product(folder: RunFolder) -> dict[str, bytes]:
    """The generator, its average and every node's last state, as bytes."""
    names = ("generator", "generator_ema")
    files = {name: generator(folder.path, name) for name in names}
    for node in sorted(folder.private.glob("node-*")):
        last = state_rounds(node)[-1]
        files[f"{node.name}/{last}"] = (
            node / f"round-{last:07d}.safetensors"
        ).read_bytes()
    return files


def rounds_sent(folder: RunFolder) -> list[int]:
    return [event.round for event in events(folder)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Callable[[str], dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}

    def of(mode: str) -> dict[str, bytes]:
        if mode not in found:
            folder = create(tmp_path_factory.mktemp("whole") / "run", **MODES[mode])
            train(folder)
            found[mode] = product(folder)
        return found[mode]

    return of


# ------------------------------------------------------------------ crashes


def before_sending(patch: pytest.MonkeyPatch, round: int) -> None:
    answers = local.LocalNodes.answers

    def crash(self: local.LocalNodes, request):
        if request.round == round:
            raise CrashError
        return answers(self, request)

    patch.setattr(local.LocalNodes, "answers", crash)


def after_the_answers(patch: pytest.MonkeyPatch, round: int) -> None:
    answers = local.LocalNodes.answers

    def crash(self: local.LocalNodes, request):
        found = answers(self, request)
        if request.round == round:
            self.save(request.keep_round)  # as Flower's nodes do in every round
            raise CrashError
        return found

    patch.setattr(local.LocalNodes, "answers", crash)


def after_the_step(patch: pytest.MonkeyPatch, round: int) -> None:
    append = RunFolder.append_metrics

    def crash(self: RunFolder, metrics: dict) -> None:
        append(self, metrics)
        if metrics["round"] == round:
            raise CrashError

    patch.setattr(RunFolder, "append_metrics", crash)


def between_nodes_and_commit(patch: pytest.MonkeyPatch, round: int) -> None:
    save = RunFolder.save_checkpoint

    def crash(self: RunFolder, done: int, *rest) -> None:
        if done >= round:
            raise CrashError
        save(self, done, *rest)

    patch.setattr(RunFolder, "save_checkpoint", crash)


def before_the_commit(patch: pytest.MonkeyPatch, round: int) -> None:
    write_json = run_folder.write_json

    def crash(path: Path, content: dict) -> None:
        if path.name == "checkpoint.json" and content["round"] >= round:
            raise CrashError
        write_json(path, content)

    patch.setattr(run_folder, "write_json", crash)


CRASHES = {
    "before the first release": [(before_sending, 1)],
    "in the first round": [(after_the_answers, 1)],
    "before the first checkpoint": [(between_nodes_and_commit, 2)],
    "after a send": [(before_sending, 4)],
    "with later node states": [(after_the_answers, 4)],
    "after a step": [(after_the_step, 5)],
    "with uncommitted node states": [(between_nodes_and_commit, 4)],
    "with an uncommitted server state": [(before_the_commit, 4)],
    "at the end": [(before_the_commit, ROUNDS)],
    "four times": [
        (after_the_answers, 1),
        (before_the_commit, 2),
        (after_the_answers, 5),
        (after_the_step, ROUNDS),
    ],
}


def crash(folder: RunFolder, where: Callable, round: int) -> int:
    """Trains until the crash; returns how many releases were asked for by then."""
    with pytest.MonkeyPatch.context() as patch:
        where(patch, round)
        with pytest.raises(CrashError):
            train(folder)
    return len(rounds_sent(folder))


# What differs with nodes that are made at once and on public fakes.
ALSO_IN_FULL = (
    "before the first release",
    "with later node states",
    "with an uncommitted server state",
    "four times",
)
CASES = [("selected", points) for points in CRASHES]
CASES += [("full participation", points) for points in ALSO_IN_FULL]
CASES += [("surrogate", points) for points in ("four times",)]
CASES += [("staged", points) for points in (*ALSO_IN_FULL, "in the first round")]
CASES += [("moments", points) for points in ("in the first round", "four times")]


@pytest.mark.parametrize(("mode", "points"), CASES)
def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path, uninterrupted, mode, points
):
    folder = create(tmp_path / "run", **MODES[mode])
    counts = [crash(folder, *point) for point in CRASHES[points]]
    train(folder)
    assert product(folder) == uninterrupted(mode)
    counts.append(len(rounds_sent(folder)))
    assert counts == sorted(counts)  # no event is ever taken back
    assert counts[-1] > ROUNDS or points == "at the end"


def test_repeated_rounds_count_again_as_further_attempts(tmp_path):
    folder = create(tmp_path / "run", **MODES["selected"])
    crash(folder, after_the_answers, 4)
    crash(folder, before_sending, 3)
    train(folder)
    first = [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert attempts(folder) == [*first, (3, 2), (3, 3), (4, 2), (5, 1), (6, 1)]
    asked = {event.round: event.participants for event in events(folder)}
    assert all(asked[event.round] == event.participants for event in events(folder))


def test_rounds_repeated_after_crashes_cannot_be_cut_off_the_ledger(tmp_path):
    """Before the first checkpoint, and right after a start that asked nothing yet."""
    folder = create(tmp_path / "run", checkpoint_every=100)
    for _ in range(3):
        crash(folder, after_the_step, 2)
    path = folder.path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 6

    def check() -> None:
        for kept in range(1, 7):
            path.write_bytes(b"".join(lines[:kept]))
            assert_refused(r" is the last, .* saw ", folder.read_ledger)
        path.write_bytes(b"".join(lines))
        assert folder.read_ledger().length == 6

    check()
    folder.ledger().close()
    folder.truncate_metrics(0)  # as a resumption does
    check()


def test_metrics_of_a_resumed_run_have_each_round_once(tmp_path):
    folder = create(tmp_path / "run")
    crash(folder, after_the_step, 5)
    train(folder)
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_unseeded_noise_is_drawn_anew_for_a_repeated_round(tmp_path):
    folder = create(tmp_path / "run", noise_seed=None, clients_per_round=1)
    norms: dict[int, list[float]] = {round: [] for round in range(1, ROUNDS + 1)}

    def keep(metrics: dict) -> None:
        norms[metrics["round"]].append(metrics["release_norm"])
        if len(norms[1]) == 1:
            raise CrashError

    with pytest.raises(CrashError):
        train(folder, keep)
    train(folder, keep)
    first, repeated = norms[1]
    assert first != repeated
    assert rounds_sent(folder).count(1) == 2
    assert {event.noise_source for event in events(folder)} == {"os"}


@pytest.mark.parametrize("seed", ["seed", "noise_seed"])
def test_each_seed_decides_the_result(tmp_path, uninterrupted, seed):
    folder = create(tmp_path / "run", **MODES["selected"] | {seed: 99})
    train(folder)
    found = product(folder)["generator"]
    assert found != uninterrupted("selected")["generator"]


# ------------------------------------------------------------------ workers and state


@pytest.mark.parametrize("mode", MODES)
def test_number_of_workers_changes_no_bit(tmp_path, uninterrupted, mode):
    folder = create(tmp_path / "run", **MODES[mode], num_workers=3)
    train(folder)
    assert product(folder) == uninterrupted(mode)


def test_only_selected_clients_get_a_discriminator(tmp_path):
    folder = create(tmp_path / "run", clients_per_round=1, num_rounds=2)
    train(folder)
    asked = {client for event in events(folder) for client in event.participants}
    made = {int(node.name[-5:]) for node in folder.private.glob("node-*")}
    assert made == asked


def test_discriminators_lie_in_the_private_folder_only(tmp_path):
    folder = create(tmp_path / "run")
    train(folder)
    for path in folder.path.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            has_moments = any("moment" in name for name in file.keys())  # noqa: SIM118
        assert has_moments == path.is_relative_to(folder.private)


def test_every_file_is_plain_json_safetensors_or_a_picture(tmp_path):
    folder = create(tmp_path / "run")
    train(folder)
    found = Counter()
    for path in folder.path.rglob("*"):
        if path.is_file() and path.name != ".lock":
            found[path.suffix] += 1
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                assert all(json.loads(line) for line in path.read_text().splitlines())
            elif path.suffix == ".png":
                assert np.asarray(Image.open(path)).max() > 0
            else:
                read_tensors(path)
    assert set(found) == {".json", ".jsonl", ".png", ".safetensors"}
    assert (folder.path / ".lock").read_bytes() == b""


def test_metrics_are_public_numbers_only(tmp_path):
    folder = create(tmp_path / "run")
    train(folder)
    for line in (folder.path / "metrics.jsonl").read_text().splitlines():
        assert set(json.loads(line)) == {
            "round",
            "seconds",
            "num_answers",
            "events",
            "release_norm",
        }


# ------------------------------------------------------------------ the clients' count


def counted(folder: RunFolder) -> Counter[int]:
    """How often each client has released, by its own node's count."""
    found: Counter[int] = Counter()
    for path in folder.private.glob("node-*/releases-*.jsonl"):
        names = json.loads((path.parent / "clients.json").read_text())[path.name]
        for event in Ledger.read(path).events:
            asked = event.participants
            positions = range(len(names)) if asked == "all" else asked
            found.update(int(names[position]) for position in positions)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_clients_count_what_the_ledger_says_and_never_less(tmp_path, mode):
    folder = create(tmp_path / "run", **MODES[mode])
    crash(folder, after_the_answers, 3)
    train(folder)
    asked: Counter[int] = Counter()
    for event in events(folder):
        everyone = range(event.num_clients)
        asked.update(everyone if event.participants == "all" else event.participants)
    assert counted(folder) == asked


def room_for(releases: int) -> float:
    """The epsilon of so many releases and a half: B = 4, sigma = 0.5, replace-one."""
    return epsilon_from_mu((releases + 0.5) ** 0.5 * 4**0.5 / 0.5, 1e-5)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_run_that_a_client_refuses_stops_with_a_checkpoint_and_can_go_on(
    tmp_path, uninterrupted, num_workers
):
    mode = MODES["full participation"] | {"num_workers": num_workers}
    folder = create(tmp_path / "run", **mode, client_epsilon=room_for(3))
    reason = r"round 4: 0 of 3 nodes answered .*\nnode 0: client_epsilon = .* client 0 "
    for _ in range(2):  # also after a restart
        with pytest.raises(RunStopped, match=reason):
            train(folder)
    # Counted by the server in advance, computed by nobody.
    assert rounds_sent(folder) == [1, 2, 3, 4, 4]
    assert counted(folder) == dict.fromkeys(range(6), 3)
    for node in folder.private.iterdir():
        assert state_rounds(node)[-1] == 3
    config = dataclasses.replace(folder.config, client_epsilon=room_for(6))
    train(RunFolder(folder.path, config))
    assert product(folder) == uninterrupted("full participation")
    assert counted(folder) == dict.fromkeys(range(6), 6)


def test_run_that_a_client_refuses_is_charged_the_count(tmp_path):
    """Its end depends on who was drawn: the mixture of its rounds does not hold."""
    settings = MODES["selected"] | {"num_rounds": 40, "num_clients": 3}
    folder = create(tmp_path / "run", **settings, client_epsilon=room_for(2))
    with pytest.raises(RunStopped, match="client_epsilon"):
        train(folder)
    assert len(sent := rounds_sent(folder)) < 8
    found = epsilons.of_run(folder.path)[0]
    assert found.theorem == COUNT_THEOREM
    assert f"after {len(sent)} of 40 planned rounds" in found.conditions[0]
    mu = 3**0.5 * 4**0.5 / 0.5  # its third release was refused, and is counted
    assert found.epsilon == pytest.approx(epsilon_from_mu(mu, folder.config.delta))


# ------------------------------------------------------------------ refusals


def test_folder_in_use_is_refused(tmp_path):
    folder = create(tmp_path / "run")
    with folder.locked(), pytest.raises(UserError, match="another process trains"):
        train(folder)
    assert rounds_sent(folder) == []


def test_truncated_node_state_is_refused_with_its_path(tmp_path):
    folder = create(tmp_path / "run", **MODES["full participation"])
    crash(folder, before_sending, 4)
    node = node_folder(folder.private, 1)
    path = node / f"round-{state_rounds(node)[-1]:07d}.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert_refused(r"node-00001/round-.*cannot be read.*restore", train, folder)


@pytest.mark.parametrize("mode", ["selected", "full participation"])
def test_missing_node_state_is_refused(tmp_path, mode):
    folder = create(tmp_path / "run", **MODES[mode] | {"num_clients": 3})
    crash(folder, before_sending, 5)
    node = int(sorted(folder.private.iterdir())[0].name[-5:])
    for path in node_folder(folder.private, node).iterdir():
        path.unlink()
    assert_refused(rf"node {node}: its state is missing .*restor", train, folder)


def test_checkpoint_of_another_architecture_is_refused(tmp_path):
    folder = create(tmp_path / "run", clients_per_round=1)
    crash(folder, before_sending, 4)
    config = dataclasses.replace(folder.config, generator_dim=8)
    other = RunFolder(folder.path, config)  # as a later version might build it
    assert_refused(r"another generator .*restore config.json", train, other)
