"""Federated DP-MERF: norms of embeddings, what they cost, the generator's fit.

What it shares with Fed-Avg GAN is in test_fedavg_gan.py.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedgs.data.federated import to_float
from fedgs.files import read_tensors, write_tensors
from fedgs.gan.fit import Fit
from fedgs.methods import dp_merf, new_state
from fedgs.methods.dp_merf import METHOD, Embedding
from fedgs.privacy.accountant import statements
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.plan import Plan
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import RunFolder
from runs import attempts
from simulated_grid import FakeGrid, product, start
from tiny import embedding_round, server_round, tiny_config, tiny_data

SETTINGS: dict[str, Any] = {"phases": "dp-merf", "num_rounds": 1}
SETTINGS |= {"client_selection": "all", "clients_per_node": 2}
SETTINGS |= {"generator_learning_rate": 0.01}


@pytest.fixture(autouse=True)
def _small_and_short(monkeypatch) -> None:
    """Few features, and forty steps of the fit's 3,000."""
    monkeypatch.setattr(dp_merf, "NUM_FEATURES", 64)
    monkeypatch.setattr(dp_merf, "STEPS", 40)


def vectors(count: int) -> torch.Tensor:
    return torch.rand((count, 9), generator=torch.Generator().manual_seed(0)) * 5


def quiet():
    """One node without noise: its configuration and data, the server, its request."""
    own = {"noise_multiplier": 0.0, "clients_per_node": 6}
    config = tiny_config(**SETTINGS | own)
    server = new_state(config)
    return config, tiny_data(config), server, METHOD.begin(config, server)[0]


def test_the_embedding_is_the_class_sum_of_random_fourier_features():
    net, labels = Embedding(4, 9, 64, 105.0, 0), [0, 3, 3, 1]
    expected = np.zeros((4, 64))
    for x, y in zip(vectors(4).double().numpy(), labels, strict=True):
        phase = net.frequencies.double().numpy() @ x
        expected[y] += np.concatenate([np.cos(phase), np.sin(phase)]) / np.sqrt(32)
    found = net.sum(vectors(4), torch.tensor(labels))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_every_record_has_a_norm_of_at_most_one_and_nearly_one():
    net, label = Embedding(4, 9, 64, 105.0, 0), torch.tensor([2])
    norms = [net.sum(v[None], label).double().norm() for v in vectors(50) * 100]
    assert 0.9999 < min(norms) <= max(norms) <= 1


def test_a_replaced_client_moves_the_sum_by_two_at_most():
    config, data, _, request = quiet()
    images = data.images.copy()
    images[data.client_records[4]] = 255 - images[data.client_records[4]]
    whole, other = (
        embedding_round(config, each, range(6), request, 0).values
        for each in (data, dataclasses.replace(data, images=images))
    )
    assert 0.2 < float((whole - other).double().norm()) <= 2
    # Clipping to C = 1 changes nothing: this is the sum of the clients' means.
    embedding, expected = dp_merf._embedding(config), torch.zeros(3, 64)
    for client in range(6):
        own = data.of(client)
        pixels = torch.from_numpy(to_float(own.images)).flatten(1)
        labels = torch.from_numpy(own.labels)
        expected += embedding.sum(pixels, labels) / len(labels)
    assert torch.allclose(whole[0, 0], expected, atol=1e-5)


@pytest.mark.parametrize(("sigma", "of_one"), [(5.0, 0.726), (25.0, 0.125)])
def test_one_release_costs_by_the_exact_curve_of_gaussian_noise(sigma, of_one):
    """The paper: sigma 5 is "epsilon < 1", 25 is "< 0.2", for one node's noise."""
    own = {"noise_multiplier": sigma, "engine": "flower"}
    rows = statements(Plan.from_config(tiny_config(**SETTINGS | own)), 1e-5)
    found = {(row.adversary, row.relation): row.epsilon for row in rows}
    for (adversary, relation), epsilon in found.items():
        moved = {"replace-one": 2.0, "zero-out": 1.0}[relation]
        noise = 2 * sigma * (1 if adversary == "server" else 3) ** 0.5
        assert epsilon == pytest.approx(epsilon_from_mu(moved / noise, 1e-5))
    assert found["server", "replace-one"] == pytest.approx(of_one, abs=2e-3)


def test_the_fit_brings_the_fakes_nearer_to_the_released_mean():
    config, data, server, request = quiet()
    answer = embedding_round(config, data, range(6), request, 0)
    server_round(config, server, None, [answer])
    target = server.parts["embedding"].target
    assert torch.allclose(target, answer.values[0, 0] / 6)

    def loss() -> float:
        labels = torch.arange(200) % 3
        z = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        fakes = server.ema(z, labels).detach().flatten(1)
        found = dp_merf._embedding(config).sum(fakes, labels) / 200
        return float((target - found).square().sum())

    at_first, steps = loss(), list[tuple[int, int]]()
    assert METHOD.settle(config, server, Fit(lambda *step: steps.append(step)))
    assert steps[-1] == (40, 40)
    assert loss() < 0.7 * at_first


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def of_another_checkpoint(path: Path) -> None:
    tensors, _ = read_tensors(path)
    write_tensors(path, tensors, {"fit": "0" * 64}, is_sealed=True)


def without_a_seal(path: Path) -> None:
    tensors, metadata = read_tensors(path)
    start, _ = metadata["fit"].split()
    write_tensors(path, tensors, {"fit": start})


def of_another_step(path: Path) -> None:
    tensors, metadata = read_tensors(path)
    write_tensors(path, tensors | {"step": torch.tensor(30)}, metadata)


@pytest.mark.parametrize(
    ("harm", "first", "warning"),
    [
        (None, 21, None),
        (Path.unlink, 1, None),
        (damage, 1, "its tensors are not those .* begins anew"),
        (of_another_checkpoint, 1, None),
        (without_a_seal, 1, "does not say which fit .* begins anew"),
        (of_another_step, 1, "its tensors are not those .* begins anew"),
    ],
)
def test_a_fit_that_is_stopped_goes_on_to_the_same_bytes(
    create, recwarn, harm, first, warning
):
    whole, run = create("whole", **SETTINGS), create("run", **SETTINGS)
    start(whole, FakeGrid(3))

    def stop(metrics: dict) -> None:
        if metrics.get("fit_step") == 20:
            raise RunStopped("here")

    with pytest.raises(RunStopped, match="here"):
        start(run, FakeGrid(3), stop)
    kept = run.path / "checkpoint" / "fit.safetensors"
    if harm is not None:
        harm(kept)
    steps = []
    start(RunFolder.open(run.path), FakeGrid(3), lambda told: steps.append(told))
    assert steps[0]["fit_step"] == first
    assert product(run) == product(whole)
    assert attempts(run) == [(1, 1)]  # nothing is released again
    assert not kept.exists()
    told = [str(found.message) for found in recwarn if "fit" in str(found.message)]
    assert len(told) == (warning is not None)
    assert re.search(warning or "", " ".join(told))
