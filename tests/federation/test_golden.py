"""Golden trajectories: twenty rounds whose numbers only a deliberate change may move.

`make golden` rewrites the files; the commit explains the shift in CHANGELOG.md under
Privacy or Numbers. The tolerance covers other processors and library builds: float32
rounding grows over twenty rounds, while any change of the algorithm moves the release
norms in their first digits.
"""

import threading
from pathlib import Path

import pytest

from fedgs.federation import local
from fedgs.files import read_json, read_tensors, write_json
from fedgs.runs.run_folder import RunFolder, versions
from tiny import FULL_PARTICIPATION, tiny_config, tiny_data

GOLDEN = Path(__file__).parents[1] / "golden"
ROUNDS = 20
TRAJECTORIES = {
    "selected": {"clients_per_round": 1},
    "full-participation": {
        **FULL_PARTICIPATION,
        "spectral_norm": False,
        "latent": "normal",
        "noise_multiplier": 0.0,  # so that the norms are the signal's, not the noise's
    },
}


def trajectory(output: Path, settings: dict) -> dict[str, list[float]]:
    config = tiny_config(num_rounds=ROUNDS, output=str(output), **settings)
    folder, norms = RunFolder.create(config), []
    local.train(
        folder,
        tiny_data(config),
        lambda metrics: norms.append(metrics["release_norm"]),
        threading.Event(),
    )
    generator, _ = read_tensors(folder.path / "generator.safetensors")
    weights = [float(value.norm()) for _, value in sorted(generator.items())]
    return {"release_norms": norms, "generator_norms": weights}


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_twenty_rounds_repeat_their_golden_numbers(name, tmp_path, update_golden):
    found = trajectory(tmp_path / "run", TRAJECTORIES[name])
    path = GOLDEN / f"{name}.json"
    if update_golden:
        write_json(path, {"versions": versions(), **found})
    golden = read_json(path)
    assert found["release_norms"] == pytest.approx(golden["release_norms"], rel=1e-2)
    assert found["generator_norms"] == pytest.approx(
        golden["generator_norms"], rel=1e-3
    )
