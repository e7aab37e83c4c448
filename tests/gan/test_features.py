"""Feature networks: shapes that both sides know, and what a client computes."""

import numpy as np
import pytest
import torch
from fedgs.config.stages import FEATURES
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgs.gan import features
from fedgs.gan.features import KINDS, embedding
from fedgs.mechanism.sanitizer import PerSampleGradients, clip
from fedgs.randomness import stream
from tiny import STAGED, tiny_config


def fakes(count: int, side: int = 16, channels: int = 1):
    """Draws noise in place of a generator's samples, three classes alike."""
    shape = (count, channels, side, side)
    images = np.random.default_rng(3).random(shape, dtype=np.float32)
    return torch.from_numpy(images), torch.arange(count) % 3


def made(kind: str, seed: int = 0, side: int = 16, channels: int = 1):
    """A network: any, of the shapes of the server's model."""
    rng = stream(seed, "test")
    shapes = KINDS[kind].shapes(sized(side, channels)).items()
    return {n: torch.from_numpy(rng.random(s, dtype=np.float32)) for n, s in shapes}


def sized(side: int, channels: int):
    sizes = {"image_size": side, "image_channels": channels, "moment_size": 4}
    return tiny_config(**STAGED | sizes)


@pytest.mark.parametrize(("side", "channels"), [(16, 1), (28, 3), (32, 1)])
@pytest.mark.parametrize("kind", FEATURES)
def test_tensors_and_features_have_the_shapes_that_the_settings_say(
    kind, side, channels
):
    config = sized(side, channels)
    net = made(kind, side=side, channels=channels)
    shapes = {name: tuple(value.shape) for name, value in net.items()}
    assert shapes == KINDS[kind].shapes(config)
    images, labels = fakes(6, side, channels)
    found = KINDS[kind].features(net, images, labels)
    assert found.shape == (6, FEATURES[kind](config.moment_features, config.latent_dim))
    # Those of an image do not depend on the others.
    alone = [KINDS[kind].features(net, images[[i]], labels[[i]]) for i in range(6)]
    atol = 1e-5 * float(found.abs().max())
    assert torch.allclose(found, torch.cat(alone), rtol=1e-4, atol=atol)


# ------------------------------------------------------------------ the embedding


@pytest.mark.parametrize(("kind", "groups"), [("means", 3), ("scatter", 1)])
def test_an_embedding_is_its_definition_image_by_image(monkeypatch, kind, groups):
    monkeypatch.setattr(features, "IMAGES_AT_ONCE", 2)
    networks = [made(kind, seed) for seed in (0, 1)]
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(5, 1, 16, 16, generator=rng)
    labels = torch.tensor([2, 0, 0, 2, 2])  # no image of class 1
    size = FEATURES[kind](16, 4)
    centre = torch.rand(2, groups, size, generator=rng)
    found = embedding(kind, networks, centre, images, labels)
    expected = torch.zeros(2, groups, 1 + size, dtype=torch.float64)
    for index, net in enumerate(networks):
        for image, label in zip(images, labels, strict=True):
            group = int(label) if groups == 3 else 0
            own = KINDS[kind].features(net, image[None], label[None])[0]
            expected[index, group, 0] += groups / 5 * 2  # MASS
            difference = (own - centre[index, group]).double()
            expected[index, group, 1:] += groups / 5 * difference
    assert torch.allclose(found, expected, atol=1e-4)
    assert not found[:, 1:2].any()
    assert found.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_without_images_has_the_embedding_zero(kind):
    groups = {"scatter": 1, "parts": 12}.get(kind, 3)
    centre = torch.ones(1, groups, FEATURES[kind](16, 4))
    nothing = (torch.zeros(0, 1, 16, 16), torch.zeros(0, dtype=torch.int64))
    values = embedding(kind, [made(kind)], centre, *nothing)
    assert torch.equal(values, torch.zeros(1, groups, centre.shape[2] + 1).double())


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
    net = made(kind)
    groups = {"scatter": 1, "parts": 12}.get(kind, 3)
    centre = scale * torch.ones(1, groups, FEATURES[kind](16, 4))
    values = embedding(kind, [net], centre, images, labels)
    assert values.norm() >= 2 * groups**0.5 * (1 - 1e-9)
    for clip_bound in (1e-3, 1.0, 2.0):
        clipped = clip(PerSampleGradients(values[None, None]), clip_bound).values
        assert float(clipped.norm()) == pytest.approx(clip_bound, rel=1e-9)
