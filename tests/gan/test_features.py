"""Feature networks: shapes that both sides know, and what a client computes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgs.config.feature_settings import OF_TRUNKS
from fedgs.config.plugins import GROUP_MEANS
from fedgs.config.run_config import FeatureConfig
from fedgs.gan import features
from fedgs.gan.features import KINDS, embedding
from fedgs.mechanism.sanitizer import PerSampleGradients, clip
from fedgs.randomness import stream
from tiny import MOMENTS, tiny_config


def fakes(count: int, side: int = 16, channels: int = 1):
    """Draws noise in place of a generator's samples, three classes alike."""
    shape = (count, channels, side, side)
    images = np.random.default_rng(3).random(shape, dtype=np.float32)
    return torch.from_numpy(images), torch.arange(count) % 3


def made(config: FeatureConfig, seed: int = 0):
    """A network of a phase: any, of the shapes of the server's."""
    rng = stream(seed, "test")
    shapes = KINDS[config.method].shapes(config).items()
    return {n: torch.from_numpy(rng.random(s, dtype=np.float32)) for n, s in shapes}


def phase_of(kind: str, side: int = 16, channels: int = 1) -> FeatureConfig:
    """The settings of a phase, after those that it needs."""
    before = ("means", "scatter")
    if kind in ("means", GROUP_MEANS):
        before = ()
    elif kind == "scatter":
        before = ("means",)
    settings = MOMENTS | {"phases": ",".join([*before, kind])}
    settings |= {"image_size": side, "image_channels": channels}
    if kind == GROUP_MEANS:
        settings |= {"healthy": "v1", "suspicious": "v2", "cohorts": "own.csv"}
    if kind in OF_TRUNKS:
        settings["generator"] = "refined"
    return tiny_config(**settings).at_phase(len(before))


@pytest.mark.parametrize(("side", "channels"), [(16, 1), (28, 3), (32, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_and_features_have_the_shapes_that_the_settings_say(
    kind, side, channels
):
    config = phase_of(kind, side, channels)
    net = made(config)
    shapes = {name: tuple(value.shape) for name, value in net.items()}
    assert shapes == KINDS[kind].shapes(config)
    images, labels = fakes(6, side, channels)
    found = KINDS[kind].features(net, images, labels)
    assert found.shape == (6, config.num_features)
    # Those of an image do not depend on the others.
    alone = [KINDS[kind].features(net, images[[i]], labels[[i]]) for i in range(6)]
    atol = 1e-5 * float(found.abs().max())
    assert torch.allclose(found, torch.cat(alone), rtol=1e-4, atol=atol)


# ------------------------------------------------------------------ the embedding


@pytest.mark.parametrize(("kind", "groups"), [("means", 3), ("scatter", 1)])
def test_an_embedding_is_its_definition_image_by_image(monkeypatch, kind, groups):
    monkeypatch.setattr(features, "IMAGES_AT_ONCE", 2)
    config = phase_of(kind)
    net = made(config)
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(5, 1, 16, 16, generator=rng)
    labels = torch.tensor([2, 0, 0, 2, 2])  # no image of class 1
    centre = torch.rand(groups, config.num_features, generator=rng)
    found = embedding(kind, net, centre, images, labels)
    expected = torch.zeros(groups, 1 + config.num_features, dtype=torch.float64)
    for image, label in zip(images, labels, strict=True):
        group = int(label) if groups == 3 else 0
        own = KINDS[kind].features(net, image[None], label[None])[0]
        expected[group, 0] += groups / 5 * 2  # MASS
        expected[group, 1:] += groups / 5 * (own - centre[group]).double()
    assert torch.allclose(found, expected, atol=1e-4)
    assert not found[1:2].any()
    assert found.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_without_images_has_the_embedding_zero(kind):
    config = phase_of(kind)
    groups = {"scatter": 1, "parts": 12}.get(kind, 3)
    centre = torch.ones(groups, config.num_features)
    nothing = (torch.zeros(0, 1, 16, 16), torch.zeros(0, dtype=torch.int64))
    values = embedding(kind, made(config), centre, *nothing)
    assert torch.equal(values, torch.zeros(groups, 1 + config.num_features).double())


@given(
    counts=st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any),
    kind=st.sampled_from(sorted(KINDS)),
    scale=st.floats(0, 10),
)
@settings(max_examples=40)
def test_no_embedding_is_shorter_than_any_clip_bound_that_is_allowed(
    counts, kind, scale
):
    """At least MASS sqrt(groups), so that clipping by C leaves exactly C."""
    labels = torch.arange(3).repeat_interleave(torch.tensor(counts))
    images, _ = fakes(len(labels))
    config = phase_of(kind)
    groups = {"scatter": 1, "parts": 12}.get(kind, 3)
    centre = scale * torch.ones(groups, config.num_features)
    values = embedding(kind, made(config), centre, images, labels)
    assert values.norm() >= 2 * groups**0.5 * (1 - 1e-9)
    for clip_bound in (1e-3, 1.0, 2.0):
        clipped = clip(PerSampleGradients(values[None, None, None]), clip_bound).values
        assert float(clipped.norm()) == pytest.approx(clip_bound, rel=1e-9)


@pytest.mark.parametrize("kind", OF_TRUNKS)
def test_means_of_groups_are_those_of_what_clients_compute(kind):
    config = phase_of(kind, channels=3)
    net = made(config)
    images, labels = fakes(9, channels=3)
    of_each = KINDS[kind].features(net, images, labels)
    expected = torch.stack([of_each[labels == c].mean(0) for c in range(3)])
    found = features.mean_layers(kind, net, images, groups=3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
