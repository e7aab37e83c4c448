"""Features by a network of torchvision: its file, its stages, and whole runs."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchvision import models

from clients.deployed_client import DeployedClient, DeploymentConfig
from fedgs import feature_means
from fedgs.config.feature_settings import LAYERS
from fedgs.config.recipes import LEAST_FOR_FEATURES, moments_for, signal_of
from fedgs.config.recipes import feature_means as default_recipe
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError
from fedgs.files import read_tensors
from fedgs.gan import refinement, torchvision_network
from fedgs.gan.torchvision_network import (
    candidates,
    chosen_network,
    loaded_network,
    with_weights,
)
from fedgs.privacy.accountant import statements
from fedgs.privacy.plan import Plan
from fedgs.round.preparation import with_noise
from fedgs.runs.run_folder import RunFolder
from networks import SMALL, random_weights, write_network
from refusals import assert_refused
from runs import interrupt_at, train
from server.roll_call import public_settings
from simulated_grid import FakeGrid, product, start
from tiny import REFINED, tiny_config, tiny_data, write_tiny_npz

PHASES = "means:0.5,scatter:1,moments:2,pretrained-features:4"
CHOSEN = REFINED | {"phases": PHASES, "features": SMALL}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of torchvision."""
    loaded_network.cache_clear()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    yield tmp_path / "torch" / "hub" / "checkpoints"
    loaded_network.cache_clear()


@pytest.fixture
def short_fits(monkeypatch):
    """Fits of few steps."""
    monkeypatch.setattr(refinement, "STEPS", 12)
    monkeypatch.setattr(refinement, "REFERENCE_STEPS", 4)


def chosen(**settings: object) -> Any:
    """The settings of a run with features of a network, by its weights here."""
    return with_weights(tiny_config(**CHOSEN | settings))


# ------------------------------------------------------------------ the network


def test_layers_are_as_many_as_the_packaged_networks_and_pass_gradients(cache):
    write_network(cache)
    network = chosen_network(chosen())
    assert network is not None
    grey = torch.rand(2, 1, 16, 16, requires_grad=True)
    layers = network.layers(grey)
    assert tuple(layer[0].numel() for layer in layers) == LAYERS["imagenet"]
    # Grey images are those whose colours are equal.
    of_rgb = network.layers(grey.expand(-1, 3, -1, -1))
    assert all(map(torch.equal, layers, of_rgb))
    sum(layer.square().sum() for layer in layers).backward()
    assert grey.grad is not None
    assert grey.grad.abs().amax() > 0


def test_layers_are_of_the_weights_in_the_file_and_of_imagenets_colours(cache):
    write_network(cache)
    network = chosen_network(chosen())
    model = models.get_model(SMALL, weights=None)
    model.load_state_dict(random_weights())
    model.eval()
    images = torch.rand(2, 3, 32, 32)
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    stage = model.conv1((images - mean) / std)  # 16 fields to a side: the first one
    pooled = F.adaptive_avg_pool2d(stage, 7).movedim(1, -1).flatten(0, 2)
    found = network.layers(images)[0].movedim(1, -1).flatten(0, 2)
    # Some weights that add channels up make all of the layer out of the stage.
    weights = torch.linalg.lstsq(pooled, found).solution
    torch.testing.assert_close(pooled @ weights, found, rtol=1e-3, atol=1e-4)


def test_a_file_of_torch_and_one_of_safetensors_hold_the_same_network(cache):
    images = torch.rand(2, 3, 16, 16)
    first = write_network(cache)
    expected = chosen_network(chosen()).layers(images)
    (cache / f"{SMALL}.safetensors").unlink()
    second = write_network(cache, ending=".pth")
    assert first != second
    found = chosen_network(chosen()).layers(images)
    assert all(map(torch.equal, expected, found))


def test_of_two_files_the_agreed_one_is_taken(cache):
    write_network(cache, seed=1)
    agreed = write_network(cache, ending=".pth")
    assert chosen(features_sha256=agreed).features_sha256 == agreed
    assert chosen().features_sha256 != agreed


def test_torchvisions_own_file_is_found_by_its_name_and_checked_by_its_digits(
    cache, monkeypatch
):
    digest = write_network(cache, ending=".pth")
    for digits in (digest[:8], "0" * 8):
        loaded_network.cache_clear()
        own = cache / f"{SMALL}-{digits}.pth"
        next(cache.iterdir()).rename(own)
        entry = SimpleNamespace(
            url=f"https://download.example/models/{own.name}",
            meta={"categories": ["cat", "dog"]},
        )
        monkeypatch.setattr(models, "get_model_weights", lambda name, e=entry: [e])
        if digest.startswith(digits):
            assert chosen().features_sha256 == digest
    assert_refused(f"^features = '{SMALL}': ", chosen)


def test_a_file_of_features_alone_is_no_candidate(cache):
    names = [path.name for path in candidates("vgg16", cache)]
    assert names == ["vgg16.safetensors", "vgg16.pth", "vgg16-397923af.pth"]
    for name in models.list_models(module=models):
        files = [path.name for path in candidates(name, cache)]
        assert not any("features" in file for file in files)


# ------------------------------------------------------------------ what is refused


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def not_finite(path: Path) -> None:
    weights = random_weights()
    weights["conv1.0.weight"][0] = torch.nan
    torch.save(weights, path.with_suffix(".pth"))
    path.unlink(missing_ok=True)


def stored(path: Path, change) -> None:
    """Writes weights that torch reads, with a change that no network has."""
    weights = random_weights()
    change(weights)
    torch.save(weights, path.with_suffix(".pth"))
    path.unlink(missing_ok=True)


def numbered(path: Path) -> None:
    stored(path, lambda weights: weights.update({5: weights["conv1.0.weight"]}))


def sparse(path: Path) -> None:
    name = "conv1.0.weight"
    stored(path, lambda weights: weights.update({name: weights[name].to_sparse()}))


def elsewhere(path: Path) -> None:
    name = "conv1.0.weight"
    stored(path, lambda weights: weights.update({name: weights[name].to("meta")}))


def complex_numbers(path: Path) -> None:
    name = "conv1.0.weight"
    stored(path, lambda weights: weights.update({name: weights[name] * 1j}))


def of_another(path: Path) -> None:
    torch.save(random_weights("squeezenet1_1"), path.with_suffix(".pth"))
    path.unlink()


class Code:
    """What a pickle runs."""

    def __reduce__(self):
        return os.mkdir, (os.environ["TORCH_HOME"] + "/executed",)


def with_code(path: Path) -> None:
    path.with_suffix(".pth").write_bytes(pickle.dumps({"conv1.0.weight": Code()}))
    path.unlink()


def a_list(path: Path) -> None:
    torch.save([1, 2], path.with_suffix(".pth"))
    path.unlink()


def numbers(path: Path) -> None:
    torch.save({"conv1.0.weight": 1}, path.with_suffix(".pth"))
    path.unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        damage,
        not_finite,
        numbered,
        sparse,
        elsewhere,
        complex_numbers,
        of_another,
        with_code,
        a_list,
        numbers,
        Path.unlink,
    ],
)
@pytest.mark.filterwarnings("error")
def test_weights_that_are_not_the_networks_are_refused_and_not_executed(cache, spoil):
    write_network(cache)
    spoil(cache / f"{SMALL}.safetensors")
    assert_refused(f"features = '{SMALL}': .*{cache}.*; (give|put)", chosen)
    with pytest.raises(UserError) as refusal:
        chosen()
    # Torch's own reasons name every layer, or advise to execute the file.
    assert len(str(refusal.value).replace(str(cache), "")) < 300
    assert "weights_only" not in str(refusal.value)
    assert not (cache.parents[1] / "executed").exists()


def test_a_damaged_file_of_torch_is_refused(cache):
    write_network(cache, ending=".pth")
    damage(cache / f"{SMALL}.pth")
    assert_refused(f"^features = '{SMALL}': ", chosen)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"features": "vgg91"}, "features = 'vgg91'.*vgg19"),
        ({"features": "../vgg19"}, "features = '../vgg19'"),
        ({"features": "vit_b_16"}, "features = 'vit_b_16': .*of convolutions; give"),
        ({"features": "swin_t"}, "features = 'swin_t': .*of convolutions; give"),
        ({"features": None, "features_sha256": "0" * 64}, "features_sha256"),
        ({"features_sha256": "0" * 63}, "features_sha256"),
        ({"features_sha256": "0" * 64}, "features_sha256 = 0+: .*put"),
    ],
)
def test_settings_of_no_network_here_are_refused(cache, settings, named):
    write_network(cache)
    assert_refused(named, chosen, **settings)


def test_a_network_without_four_stages_is_refused(cache, monkeypatch):
    write_network(cache, "squeezenet1_1")
    monkeypatch.setattr(torchvision_network, "SIDES", (32,))
    assert_refused("^features = 'squeezenet1_1': ", chosen, features="squeezenet1_1")


def test_a_budget_without_features_refuses_a_network_for_them():
    config = RunConfig.from_flat(
        {"features": SMALL, "num_clients": 9}, default_recipe()
    )
    noisy = RunConfig.from_flat({"noise_multiplier": 9.0}, config)
    assert_refused(f"features = '{SMALL}'", moments_for, noisy)


@pytest.mark.parametrize(("epsilon", "least"), [(10, 71), (3, 197), (1, 528)])
def test_features_need_as_many_clients_as_the_documentation_says(epsilon, least):
    text = Path("docs/using.md").read_text()
    (line,) = [line for line in text.splitlines() if "features need 71 clients" in line]
    assert f"{least} " in line
    for count in (least - 1, least):
        given = {"num_clients": count, "target_epsilon": epsilon, "num_classes": 10}
        given |= {"image_size": 28, "image_channels": 1, "clients_per_round": count}
        given |= {"seed": 0, "test_owners": 0, "test_fraction": 0}
        config = with_noise(RunConfig.from_flat(given, default_recipe()))
        pays = signal_of(config) >= LEAST_FOR_FEATURES
        assert pays == (count == least)


def test_the_command_line_refuses_missing_weights_before_it_writes(
    fedgs, tmp_path, cache
):
    run = tmp_path / "run"
    words = ("train", "--data", "digits", "--set", f"features={SMALL}", "--output", run)
    code, _, err = fedgs(*words)
    assert code == 2
    assert "features" in err
    assert SMALL in err
    assert not run.exists()


# ------------------------------------------------------------------ runs


def test_epsilons_are_the_same_and_say_which_images_are_public(cache):
    write_network(cache)
    config, plain = chosen(), tiny_config(**CHOSEN | {"features": None})
    of_both = [statements(Plan.from_config(c), 1e-5) for c in (config, plain)]
    costs, expected = ([row.epsilon for row in rows] for rows in of_both)
    assert costs == expected
    conditions = "\n".join(config.public_conditions)
    assert SMALL in conditions
    assert "ImageNet" not in conditions


def test_the_engine_trains_what_the_page_trains(cache, short_fits, tmp_path):
    write_network(cache)
    config = chosen(output=str(tmp_path / "run"))
    page = feature_means.train(config, tiny_data(config))
    folder = RunFolder.create(config)
    train(folder, data=tiny_data(config))
    tensors, _ = read_tensors(folder.path / "generator_ema.safetensors")
    for name, value in page.average.state_dict().items():
        assert torch.allclose(tensors[name], value, rtol=1e-3, atol=2e-4), name


def test_engines_and_a_resumed_run_give_the_same_bytes_and_no_other_weights(
    cache, short_fits, server_process, clock, tmp_path
):
    agreed = write_network(cache)
    data = write_tiny_npz(tmp_path / "tiny.npz")
    config = chosen(data=data, checkpoint_every=1)

    def folder(name: str, **own: object) -> RunFolder:
        output = str(tmp_path / name)
        flat = own | {"output": output}
        return RunFolder.create(ResolvedConfig.from_flat(flat, config))

    local = folder("local")
    train(local)
    simulated = folder("flower", engine="flower", round_timeout=60.0)
    start(simulated, FakeGrid(config.num_nodes))
    assert product(simulated) == product(local)
    resumed = folder("resumed")
    with pytest.raises(KeyboardInterrupt):
        train(resumed, interrupt_at(3))
    write_network(cache, seed=1)
    loaded_network.cache_clear()
    again = RunFolder.open(resumed.path)
    assert_refused("features_sha256", train, again)
    assert write_network(cache) == agreed
    train(again)
    assert product(resumed) == product(local)


def test_a_client_refuses_a_run_with_other_weights_than_its_own(
    cache, tmp_path, server_process, clock
):
    write_network(cache)
    limits = tmp_path / "limits.toml"
    limits.write_text("allow_embeddings = true\n")
    data = write_tiny_npz(tmp_path / "tiny.npz")
    values = {"name": "a", "data": data, "limits": str(limits)}
    site = DeploymentConfig.read(values | {"state_dir": str(tmp_path / "state")})
    config = chosen(
        **{"nodes": "a", "node_sizes": "6", "engine": "flower", "noise_seed": None},
        **{"data": "digits", "clients_per_node": 6},
    )
    joined = DeployedClient(site, "0" * 16).join(public_settings(config))
    assert joined.refusal is None
    write_network(cache, seed=1)
    loaded_network.cache_clear()
    joined = DeployedClient(site, "1" * 16).join(public_settings(config))
    assert joined.refusal is not None
    assert joined.refusal.setting == "features"
    assert config.features_sha256 in str(joined.refusal)


def test_what_every_client_imports_is_not_torchvision():
    """It would double the time in which a client, a node and a worker start."""
    code = "import sys, clients.client_app; sys.exit('torchvision' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
