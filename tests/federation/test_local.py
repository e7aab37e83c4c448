"""The local engine: what a run leaves, what clients refuse, what a crash cannot hide.

That it gives the bytes of every other engine is in test_same_bytes.py.
"""

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
from fedgs.privacy.participation import COUNT_THEOREM
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder, node_folder, state_rounds
from refusals import assert_refused
from runs import (
    attempts,
    events,
    generator,
    ignore,
    interrupt,
    interrupt_at,
    limit_clients,
)
from tiny import FULL_PARTICIPATION, tiny_config, tiny_data

ROUNDS = 4


def create(path: Path, **settings: object) -> RunFolder:
    defaults = {"num_rounds": ROUNDS, "checkpoint_every": 2}
    return RunFolder.create(tiny_config(output=str(path), **defaults | settings))


def train(folder: RunFolder, report: Callable[[dict], None] = ignore) -> None:
    """Trains the folder as found on the disk, as another process would."""
    folder = RunFolder(folder.path, folder.config)
    local.train(folder, tiny_data(folder.config), report, threading.Event())


def kill_after(folder: RunFolder, round: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(folder, interrupt_at(round))


def rounds_sent(folder: RunFolder) -> list[int]:
    return [event.round for event in events(folder)]


def test_a_run_leaves_plain_files_public_numbers_and_secrets_where_they_belong(
    tmp_path,
):
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
    for path in folder.path.rglob("*.safetensors"):  # a discriminator has moments
        with safe_open(path, framework="pt") as file:
            has_moments = any("moment" in name for name in file.keys())  # noqa: SIM118
        assert has_moments == path.is_relative_to(folder.private)
    public = {"round", "seconds", "num_answers", "events", "release_norm"}
    assert all(set(line) == public for line in folder.metrics())


def test_repeated_rounds_count_again_as_further_attempts(tmp_path):
    folder = create(tmp_path / "run", clients_per_round=1)
    kill_after(folder, 3)
    kill_after(folder, 3)
    train(folder)
    first = [(1, 1), (2, 1), (3, 1)]
    assert attempts(folder) == [*first, (3, 2), (3, 3), (4, 1)]


def test_unseeded_noise_is_drawn_anew_for_a_repeated_round(tmp_path):
    folder = create(tmp_path / "run", noise_seed=None, clients_per_round=1)
    norms: list[float] = []

    def keep(metrics: dict) -> None:
        norms.append(metrics["release_norm"])
        if len(norms) == 1:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        train(folder, keep)
    train(folder, keep)
    assert norms[0] != norms[1]
    assert rounds_sent(folder)[:2] == [1, 1]
    assert {event.noise_source for event in events(folder)} == {"os"}


# ------------------------------------------------------------------ the clients' limits


def room_for(releases: int) -> float:
    """The epsilon of so many releases and a half: B = 4, sigma = 0.5, replace-one."""
    return epsilon_from_mu((releases + 0.5) ** 0.5 * 4**0.5 / 0.5, 1e-5)


def test_run_that_a_client_refuses_stops_with_a_checkpoint_and_can_go_on(
    tmp_path, monkeypatch
):
    settings = FULL_PARTICIPATION | {"num_workers": 3}
    folder = create(tmp_path / "run", **settings)
    limit_clients(monkeypatch, room_for(2))
    reason = r"round 3: 0 of 3 nodes answered .*\nnode 0: client_epsilon = .* client 0 "
    for _ in range(2):  # also after a restart
        with pytest.raises(RunStopped, match=reason):
            train(folder)
    # Counted by the server in advance, computed by nobody.
    assert rounds_sent(folder) == [1, 2, 3, 3]
    for node in folder.private.iterdir():
        assert state_rounds(node)[-1] == 2
    limit_clients(monkeypatch, room_for(ROUNDS))
    train(folder)
    whole = create(tmp_path / "whole", **settings)
    train(whole)
    assert generator(folder.path) == generator(whole.path)


def test_run_that_a_client_refuses_is_charged_the_count(tmp_path, monkeypatch):
    """Its end depends on who was drawn: the mixture of its rounds does not hold."""
    settings = {"clients_per_round": 1, "num_rounds": 40, "num_clients": 3}
    folder = create(tmp_path / "run", **settings)
    limit_clients(monkeypatch, room_for(2))
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


def truncated(node: Path) -> None:
    path = node / f"round-{state_rounds(node)[-1]:07d}.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def missing(node: Path) -> None:
    for path in node.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "settings", "message"),
    [
        (truncated, FULL_PARTICIPATION, "round-.*cannot be read.*restore"),
        (missing, FULL_PARTICIPATION, r"node \d: its state is missing .*restor"),
        (missing, {"clients_per_round": 3}, r"node \d: its state is missing .*restor"),
    ],
)
def test_damaged_node_state_is_refused(tmp_path, damage, settings, message):
    folder = create(tmp_path / "run", **settings | {"num_clients": 3})
    kill_after(folder, 3)
    damage(node_folder(folder.private, 0))
    assert_refused(message, train, folder)


def test_checkpoint_of_another_architecture_is_refused(tmp_path):
    folder = create(tmp_path / "run", clients_per_round=1)
    kill_after(folder, 3)
    config = dataclasses.replace(folder.config, generator_dim=8)
    other = RunFolder(folder.path, config)  # as a later version might build it
    assert_refused(r"another generator .*restore config.json", train, other)
