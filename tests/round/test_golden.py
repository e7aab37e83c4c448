"""Golden numbers that only a deliberate change may move: trajectories, epsilons.

`make golden` rewrites the files; the commit explains the shift in CHANGELOG.md under
Privacy or Numbers. The tolerance covers other processors and library builds: float32
rounding grows over twenty rounds, while any change of the algorithm moves the release
norms in their first digits.
"""

import threading
from pathlib import Path

import pytest

from fedgs.config.phases import read_phases
from fedgs.files import read_json, read_tensors, write_json
from fedgs.gan import refinement
from fedgs.privacy.accountant import statements
from fedgs.privacy.plan import Plan, Releases
from fedgs.round import local
from fedgs.runs.run_folder import RunFolder, versions
from tiny import FULL_PARTICIPATION, REFINED, tiny_config, tiny_data

NORM = "release_norm"
GOLDEN = Path(__file__).parents[1] / "golden"
ROUNDS = 20
# So that the norms are the signal's, not the noise's.
QUIET = {"spectral_norm": False, "latent": "normal", "noise_multiplier": 0.0}
FEW = {"num_rounds": 6}
UPDATES = {"phases": "fedavg-gan", "clients_per_round": 4}
UPDATES |= {"client_selection": "balanced", "clients_per_node": 2}
UPDATES |= {"generator_learning_rate": 0.05, "discriminator_learning_rate": 0.05}
REFINED_TWICE = FULL_PARTICIPATION | REFINED
REFINED_TWICE |= {"phases": REFINED["phases"] + ",gs-wgan"}
TRAJECTORIES = {
    "selected": {"clients_per_round": 1},
    "full-participation": FULL_PARTICIPATION | QUIET,
    "default-recipe": REFINED_TWICE | QUIET | FEW,
    "fedavg-gan": UPDATES | QUIET | FEW,
    "secure-aggregation": FULL_PARTICIPATION | FEW | {"secure_aggregation": True},
}
RELEASES = "means:0.25,scatter:0.25,moments:0.5,pretrained-features:1"


def of_releases(phases: str) -> dict:
    """What a plan knows of phases: the noise of each, and that gradients follow."""
    own = [
        Releases("embedding", phase.share**-0.5, 1, 1) for phase in read_phases(phases)
    ]
    following = Releases("gradient", 1.0, 32, 40 - len(own))
    return {"releases": (*own, following)}


PLANS = {
    "all, local": {},
    "all": {"engine": "flower"},
    "all, masked": {"engine": "flower", "secure_aggregation": True},
    "all, two releases": {"engine": "flower", **of_releases("means:0.5,scatter:2")},
    "all, four releases": of_releases(RELEASES),
    "all, releases, masked": {"secure_aggregation": True, **of_releases(RELEASES)},
    "one drawn": {"client_selection": "uniform", "clients_per_round": 1},
    "ten drawn": {"client_selection": "uniform", "clients_per_round": 10},
    "ten drawn, amplified": {
        "client_selection": "uniform",
        "clients_per_round": 10,
        "discriminator_training": "every_round",
        "amplification": True,
    },
    "ten in turn": {"client_selection": "balanced", "clients_per_round": 10},
    "masked in turn": {
        "client_selection": "balanced",
        "clients_per_round": 54,
        "engine": "flower",
        "secure_aggregation": True,
    },
    "unknown selection": {"client_selection": None, "clients_per_round": 10},
}


def trajectory(output: Path, settings: dict) -> dict[str, list[float]]:
    own = {"num_rounds": ROUNDS, "output": str(output)} | settings
    config = tiny_config(**own)
    folder, norms = RunFolder.create(config), []
    local.train(
        folder,
        tiny_data(config),
        lambda metrics: norms.extend(v for n, v in metrics.items() if n == NORM),
        threading.Event(),
    )
    generator, _ = read_tensors(folder.path / "generator.safetensors")
    weights = [float(value.norm()) for _, value in sorted(generator.items())]
    return {"release_norms": norms, "generator_norms": weights}


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_rounds_repeat_their_golden_numbers(name, tmp_path, update_golden, monkeypatch):
    monkeypatch.setattr(refinement, "STEPS", 3)
    monkeypatch.setattr(refinement, "REFERENCE_STEPS", 4)
    found = trajectory(tmp_path / "run", TRAJECTORIES[name])
    path = GOLDEN / f"{name}.json"
    if update_golden:
        write_json(path, {"versions": versions(), **found})
    golden = read_json(path)
    assert found["release_norms"] == pytest.approx(golden["release_norms"], rel=1e-2)
    assert found["generator_norms"] == pytest.approx(
        golden["generator_norms"], rel=1e-3
    )


def test_twelve_plans_cost_their_golden_epsilons(update_golden):
    shared = {"num_clients": 539, "num_rounds": 40, "batch_size": 32}
    shared |= {"noise_multiplier": 1.2, "client_selection": "all", "engine": "local"}
    shared |= {"clients_per_round": 539}
    found = {
        name: {
            f"{row.adversary}, {row.relation}, {row.client_selection}, {row.theorem}": (
                row.epsilon
            )
            for row in statements(Plan(**shared | plan), delta=1e-5)
        }
        for name, plan in PLANS.items()
    }
    path = GOLDEN / "epsilons.json"
    if update_golden:
        write_json(path, found)
    golden = read_json(path)
    assert len(golden) == 12
    assert found.keys() == golden.keys()
    for name, rows in golden.items():
        assert found[name] == pytest.approx(rows, rel=1e-6), name
