"""The local engine: what a run leaves, what clients refuse, what a crash cannot hide.

That it gives the bytes of every other engine is in test_same_bytes.py.
"""

import dataclasses
import threading
from pathlib import Path

import pytest
from safetensors import safe_open

from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.round import local
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from runs import events, generator, ignore, limit_clients
from tiny import FULL_PARTICIPATION, tiny_config, tiny_data


def create(path: Path, **settings: object) -> RunFolder:
    defaults = {"num_rounds": 4, "checkpoint_every": 2}
    defaults |= {"warm_start_rounds": 1, "discriminator_steps": 1}
    return RunFolder.create(tiny_config(output=str(path), **defaults | settings))


def train(folder: RunFolder) -> None:
    """Trains the folder as found on the disk, as another process would."""
    folder = RunFolder(folder.path, folder.config)
    local.train(folder, tiny_data(folder.config), ignore, threading.Event())


def test_a_run_leaves_plain_files_public_numbers_and_secrets_where_they_belong(
    tmp_path,
):
    folder = create(tmp_path / "run")
    train(folder)
    found = [path for path in folder.path.rglob("*") if path.is_file()]
    kinds = {path.suffix for path in found if path.name != ".lock"}
    assert kinds == {".json", ".jsonl", ".png", ".safetensors"}
    assert (folder.path / ".lock").read_bytes() == b""
    for path in folder.path.rglob("*.safetensors"):  # a discriminator has moments
        with safe_open(path, framework="pt") as file:
            has_moments = any("moment" in name for name in file.keys())  # noqa: SIM118
        assert has_moments == path.is_relative_to(folder.private)
    public = {"round", "seconds", "num_answers", "events", "release_norm"}
    public |= {"signal_to_noise"}
    assert all(set(line) == public for line in folder.metrics())


# ------------------------------------------------------------------ the clients' limits


def room_for(releases: int) -> float:
    """The epsilon of so many releases and a half: B = 4, sigma = 0.5, replace-one."""
    return epsilon_from_mu((releases + 0.5) ** 0.5 * 4**0.5 / 0.5, 1e-5)


def test_run_that_a_client_refuses_stops_with_a_checkpoint_and_can_go_on(
    tmp_path, monkeypatch
):
    settings = FULL_PARTICIPATION | {"num_workers": 3, "num_rounds": 2}
    folder = create(tmp_path / "run", **settings)
    limit_clients(monkeypatch, room_for(1))
    reason = r"round 2: 0 of 3 nodes answered .*\nnode 0: client_epsilon = .* client 0 "
    for _ in range(2):  # also after a restart
        with pytest.raises(RunStopped, match=reason):
            train(folder)
    # Counted by the server in advance, computed by nobody.
    assert [event.round for event in events(folder)] == [1, 2, 2]
    limit_clients(monkeypatch, room_for(2))
    train(folder)
    whole = create(tmp_path / "whole", **settings)
    train(whole)
    assert generator(folder.path) == generator(whole.path)


# ------------------------------------------------------------------ refusals


def test_checkpoint_of_another_architecture_is_refused(tmp_path):
    folder = create(tmp_path / "run", clients_per_round=1, num_rounds=1)
    train(folder)
    config = dataclasses.replace(folder.config, generator_dim=8)
    other = RunFolder(folder.path, config)  # as a later version might build it
    assert_refused(r"another generator .*restore config.json", train, other)
