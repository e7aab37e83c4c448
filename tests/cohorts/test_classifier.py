"""The network of cohort selection, and one client's share of images."""

import math

import numpy as np
import pytest
import torch

from fedgs.cohorts import classifier
from tiny import run_config, tiny_config


def test_network_has_the_references_weights():
    config = run_config(data="femnist", num_classes=36, image_size=28, image_channels=1)
    model = classifier.Classifier(config)
    # Keras: 320 + 18,496 + 36,928 + 36,928 + 2,340.
    assert sum(param.numel() for param in model.parameters()) == 95_012
    assert model(torch.rand(2, 1, 28, 28)).shape == (2, 36)
    for side in (16, 32, 64):
        config = run_config(num_classes=3, image_size=side, image_channels=3, seed=1)
        model = classifier.build_classifier(config)
        assert model(torch.rand(2, 3, side, side)).shape == (2, 3)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 0), (2, 1), (3, 1), (10, 3), (100, 30)]
)
def test_held_out_images_are_a_fixed_share(count, expected):
    chosen = classifier.is_held_out(5, "ann", count)
    assert chosen.sum() == expected
    assert (chosen == classifier.is_held_out(5, "ann", count)).all()
    if count == 100:
        assert (chosen != classifier.is_held_out(5, "bob", count)).any()
        assert (chosen != classifier.is_held_out(6, "ann", count)).any()


def test_accuracy_counts_right_labels(monkeypatch):
    monkeypatch.setattr(classifier, "EVALUATED_AT_ONCE", 3)
    model = classifier.build_classifier(tiny_config())
    images = np.random.default_rng(0).random((8, 1, 16, 16), np.float32)
    labels = model(torch.from_numpy(images)).argmax(1).numpy()
    assert classifier.accuracy(model, images, labels) == 1.0
    labels[:2] = (labels[:2] + 1) % 3
    assert classifier.accuracy(model, images, labels) == 0.75
    assert math.isnan(classifier.accuracy(model, images[:0], labels[:0]))
