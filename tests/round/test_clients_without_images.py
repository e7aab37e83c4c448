"""A client without images keeps its place in every round and contributes nothing."""

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch

from baselines import small_run, train
from fedgs.config.plugins import COHORT_CLASSIFIER
from fedgs.data.federated import FederatedImages
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.warm_start import warm_start
from fedgs.methods import dp_merf, new_state, phase_at
from fedgs.methods.base import Hosted
from fedgs.round import local
from fedgs.round.answer import answer_of
from fedgs.round.messages import Request
from fedgs.runs.run_folder import RunFolder
from runs import ignore
from tiny import FULL_PARTICIPATION, MOMENTS, tiny_config, tiny_data

WITHOUT = (0, 3)
QUIET = {"noise_multiplier": 0.0, "clients_per_node": 6}
METHODS: dict[str, dict[str, Any]] = {
    "gs-wgan": FULL_PARTICIPATION,
    "moments": MOMENTS,
    "dp-merf": {"phases": "dp-merf", "client_selection": "all", "num_rounds": 1},
    "classifier": {"phases": COHORT_CLASSIFIER, "client_selection": "all"},
    "counts": {
        **{"phases": "cohort-classifier*1,cohort-counts*1", "num_rounds": 2},
        **{"client_selection": "all", "below": 0.5},
    },
    "fedavg-gan": {
        **{"phases": "fedavg-gan", "client_selection": "all"},
        **{"spectral_norm": False, "discriminator_steps": 1},
    },
}


@pytest.fixture(autouse=True)
def _small_and_short(monkeypatch) -> None:
    """Few features of DP-MERF, and ten steps of its fit."""
    monkeypatch.setattr(dp_merf, "NUM_FEATURES", 64)
    monkeypatch.setattr(dp_merf, "STEPS", 10)


def emptied(data: FederatedImages, clients: tuple[int, ...]) -> FederatedImages:
    """Takes the images of some clients away; another client's stay in memory."""
    none = np.empty(0, np.int64)
    records = [
        none if number in clients else own
        for number, own in enumerate(data.client_records)
    ]
    return dataclasses.replace(data, client_records=tuple(records))


def released(config, data: FederatedImages, participants: Any) -> torch.Tensor | None:
    """What one node without noise releases in its first round, warm start included."""
    server = new_state(config)
    method, own = phase_at(config, 1)
    nets = None
    if method.has_discriminators:
        nets = Discriminators(own, range(6))
        warm_start(own, nets, data, range(6))
    request: Request = method.begin(own, server)[0]
    asked = dataclasses.replace(request, participants=participants)
    answer = answer_of(config, Hosted(data, range(6), 0, nets), asked)
    return None if answer is None else answer.values


@pytest.mark.parametrize("stacking", ["stacked", "looped"])
@pytest.mark.parametrize("name", METHODS)
def test_its_contribution_is_the_zero_vector(name, stacking):
    config = tiny_config(**METHODS[name] | QUIET)
    data = tiny_data(config)
    others = tuple(client for client in range(6) if client not in WITHOUT)
    expected = released(config, data, others)
    assert expected is not None
    assert expected.abs().max() > 0
    found = released(config, emptied(data, WITHOUT), tuple(range(6)))
    assert torch.equal(found, expected)
    # Whatever lies in memory where its images were.
    spoilt = dataclasses.replace(
        emptied(data, WITHOUT), images=data.images.copy(), labels=data.labels.copy()
    )
    for client in WITHOUT:
        spoilt.images[data.client_records[client]] = 255
        spoilt.labels[data.client_records[client]] = 2
    assert torch.equal(released(config, spoilt, tuple(range(6))), expected)


@pytest.mark.parametrize("name", METHODS)
def test_a_node_of_such_clients_alone_releases_noise(name):
    settings = {"noise_multiplier": 0.5, "clients_per_node": 6}
    config = tiny_config(**METHODS[name] | settings)
    data = emptied(tiny_data(config), tuple(range(6)))
    found = released(config, data, tuple(range(6)))
    assert found is not None
    std = config.terms(1).noise_std if name in ("gs-wgan", "moments") else None
    assert found.std() > 0
    if std is not None:
        assert abs(found.std() / std - 1) < 0.2
    assert released(config, data, ()) is None


@pytest.mark.parametrize("name", METHODS)
def test_a_run_with_such_clients_trains(tmp_path, name):
    settings = METHODS[name] | {"output": str(tmp_path / "run")}
    folder = RunFolder.create(tiny_config(**settings))
    data = emptied(tiny_data(folder.config), WITHOUT)
    local.train(folder, data, ignore, threading.Event())
    assert folder.is_finished


@pytest.mark.parametrize("name", ["pate-gan", "g-pate", "wgan-gp", "dp-merf"])
def test_a_baseline_on_such_data_trains(tmp_path, name):
    run, data = small_run(name, tmp_path / "run")
    train(run, emptied(data, WITHOUT))
    assert (run.folder.path / "generator_ema.safetensors").exists()
