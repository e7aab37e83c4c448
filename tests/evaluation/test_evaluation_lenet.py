"""The classifier of the real data: learns, is cached by content, never as a pickle."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file

from evaluation_data import labelled
from fedgs.evaluation import lenet
from fedgs.evaluation.images import RealImages, load_real
from refusals import assert_refused
from tiny import NUM_CLASSES, record_calls, run_config


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDGS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def get(train, num_classes=NUM_CLASSES) -> lenet.LeNet:
    return lenet.cached_lenet(train, num_classes, "cpu", lambda done, total: None)[1]


def test_classifier_learns_and_its_outputs_have_documented_shapes():
    train, test = labelled(300, 0), labelled(90, 1)
    found = lenet.outputs(get(train), test.images)
    assert found.features.shape == (90, lenet.LENET_FEATURES)
    assert found.features.min() >= 0
    real = RealImages(train, test, NUM_CLASSES)
    assert lenet.test_accuracy(found, real) > 0.9
    wrong = RealImages(train, test._replace(labels=(test.labels + 1) % 3), NUM_CLASSES)
    assert lenet.test_accuracy(found, wrong) < 0.1


def test_classifier_is_cached_without_pickle_and_trained_again_if_damaged(
    cache, monkeypatch
):
    train = labelled(60, 0)
    calls = record_calls(monkeypatch, lenet, "fit")
    first, second = (lenet.outputs(get(train), train.images) for _ in range(2))
    assert len(calls) == 1
    assert (first.logits == second.logits).all()
    assert cache.stat().st_mode & 0o777 == 0o700
    (path,) = cache.glob("*.safetensors")
    assert "conv1.weight" in load_file(path)
    assert json.loads(path.with_suffix(".json").read_text())["num_images"] == 60
    assert {each.suffix for each in cache.iterdir()} == {".safetensors", ".json"}
    content = path.read_bytes()
    path.write_bytes(content[:100])
    get(train)
    assert path.read_bytes() == content
    get(train._replace(images=train.images[::-1].copy()))
    assert len(calls) == 3  # other images have another classifier


def test_cache_that_cannot_be_made_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDGS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert_refused(r"FEDGS_CACHE_DIR = .*Not a directory.; set", get, labelled(60, 0))


@pytest.mark.slow
@pytest.mark.paper
@pytest.mark.parametrize(
    ("data", "least"), [("mnist", 0.992), ("fashion-mnist", 0.925)]
)
def test_accuracy_on_the_real_data_is_close_to_the_papers(data_dir, data, least):
    config = run_config(data=data, data_dir=str(data_dir))
    real = load_real(config)
    found = lenet.outputs(get(real.train, real.num_classes), real.test.images)
    assert lenet.test_accuracy(found, real) >= least
    assert np.isfinite(found.features).all()
