"""The uses of BDP-GAN's pictures: its annotator, its command."""

import json

import pytest

from experiments.paper import bayesian_pictures as pictures
from fedgs.app.flags import run_command
from fedgs.config.run_config import RunConfig
from fedgs.evaluation.downstream import predict
from fedgs.evaluation.images import load_real


@pytest.fixture(scope="module")
def digits():
    config = RunConfig(data="digits", image_size=16, test_fraction=0.25)
    return load_real(config)


@pytest.mark.slow  # 3 seconds
@pytest.mark.parametrize(("noise", "is_private"), [(0.01, False), (100.0, True)])
def test_the_annotator_learns_from_noisy_gradients(digits, noise, is_private):
    made, cost = pictures.annotator(digits.train, 10, noise, steps=60)
    accuracy = (predict(made, digits.test.images) == digits.test.labels).mean()
    assert (accuracy < 0.3) == is_private
    assert (cost["classical"] < 0.1) == is_private
    assert (cost["bayesian"] < 2) == is_private


def test_the_command_prints_and_keeps_its_result(monkeypatch, capsys, tmp_path):
    row = {"bayesian": None, "classical": 9.5}
    fixed = {
        "runs": {"upright": row},
        "annotator": {"bayesian": 12.0, "classical": 5.0, "accuracy": 0.75},
        "labels": {name: {"100": 0.3} for name in ("generator", "annotator", "real")},
    }
    monkeypatch.setattr(pictures, "measure", lambda request: fixed)
    tmp_path.joinpath("out").mkdir()
    words = ["--output", str(tmp_path / "out")]
    assert run_command(pictures.command, words) == 0
    shown = capsys.readouterr().out
    assert "unbounded" in shown
    assert "accuracy 0.750" in shown
    assert json.loads((tmp_path / "out" / "pictures.json").read_text()) == fixed
