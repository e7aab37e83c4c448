"""The engines against the default on one page."""

import pytest
import torch

from fedgs import feature_means
from fedgs.files import read_tensors
from fedgs.gan import refinement
from fedgs.runs.run_folder import RunFolder
from runs import train
from tests.support.ledgers import statements_from_ledger
from tiny import MOMENTS, REFINED, tiny_config, tiny_data

CONFIGURATIONS = {
    "moments": MOMENTS,
    "in colour": MOMENTS | {"image_channels": 3},
    "moments twice": MOMENTS | {"phases": "means,scatter,moments,moments:3"},
    "silos that differ": MOMENTS | {"node_sizes": "1,4,1"},
    "features": REFINED,
    "features in colour": REFINED | {"image_channels": 3},
    "public networks": REFINED
    | {"phases": "means:0.5,scatter:1,moments:2,pretrained-features:4"},
    "without noise": REFINED | {"noise_multiplier": 0.0, "clip_bound": 0.01},
}


@pytest.mark.parametrize("settings", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_the_engine_trains_what_the_page_trains(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(refinement, "STEPS", 12)
    monkeypatch.setattr(refinement, "REFERENCE_STEPS", 4)
    monkeypatch.setattr(refinement, "ANCHOR", 1e3)  # so that no engine can leave it out
    settings = dict(settings)
    settings.setdefault("num_rounds", settings["phases"].count(",") + 1)
    config = tiny_config(**settings, output=str(tmp_path / "run"))
    page = feature_means.train(config, tiny_data(config))
    folder = RunFolder.create(config)
    train(folder, data=tiny_data(config))
    tensors, _ = read_tensors(folder.path / "generator_ema.safetensors")
    expected = page.average.state_dict()
    assert tensors.keys() >= expected.keys()
    start = feature_means.models.build_generator(config, 0).state_dict()
    for name, value in expected.items():
        # Adam's first steps have the rate's length, whatever rounding decides.
        assert torch.allclose(tensors[name], value, rtol=1e-3, atol=2e-4), name
    assert any(not torch.equal(start[name], value) for name, value in expected.items())
    events = folder.read_ledger().events
    stated = statements_from_ledger(events, config.delta, engine="local")
    found = {(row.adversary, row.relation): row.epsilon for row in stated}
    planned = {(row.adversary, row.relation): row.epsilon for row in page.cost}
    assert found == pytest.approx(planned)
