"""Tests of the architectures, the spectral norm, the average and the latents."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from fedgs.config.run_config import RunConfig
from fedgs.gan.models import (
    advance_spectral_vectors,
    build_discriminator,
    build_generator,
    sample_labels,
    sample_latents,
    update_ema,
)
from fedgs.shapes import TensorDict
from tiny import digest, run_config

GENERATORS = ("resnet", "dcgan", "upsample", "coded")
BATCH, SEED = 3, 2**63 - 1
# Bound of rounding in a sum of 1e4 float32 products of order 1.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

pytestmark = pytest.mark.usefixtures("global_state_is_kept")


def _config(**settings: object) -> RunConfig:
    narrow = {"num_classes": 5, "generator_dim": 2, "discriminator_dim": 2}
    return run_config(**(IMAGES | narrow | settings))


# The size of MNIST's images.
IMAGES = {"image_size": 28, "image_channels": 1}


def _inputs(config: RunConfig, count: int = BATCH) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    return sample_latents(config, rng, count), sample_labels(config, rng, count)


def _images(config: RunConfig, *leading: int) -> Tensor:
    side = config.image_size
    shape = (*leading, config.image_channels, side, side)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def _tensors(module: nn.Module) -> tuple[TensorDict, TensorDict]:
    params = {name: value.detach() for name, value in module.named_parameters()}
    return params, dict(module.named_buffers())


def _normalised_layers(module: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in module.named_modules() if "u" in dict(m._buffers)}


# Architectures


@pytest.mark.parametrize(("side", "channels"), [(16, 1), (28, 3), (32, 1), (64, 3)])
@pytest.mark.parametrize("kind", GENERATORS)
def test_networks_take_and_make_images_of_every_shape(kind, side, channels):
    shape = {"image_size": side, "image_channels": channels, "generator": kind}
    config = _config(**shape, spectral_norm=kind == "resnet")
    first, other, again = (build_generator(config, s) for s in (SEED, 1, SEED))
    z, labels = _inputs(config)
    images = first(z, labels)
    assert images.shape == (BATCH, channels, side, side)
    assert images.dtype == torch.float32
    assert 0 <= images.min() <= images.max() <= 1
    assert not images.equal(first(z, (labels + 1) % 5))
    assert digest(first.state_dict()) != digest(other.state_dict())
    assert digest(first.state_dict()) == digest(again.state_dict())
    rounded = build_generator(_config(**shape, precision="bfloat16"), SEED)(z, labels)
    assert images.equal(rounded) == (kind in ("dcgan", "coded"))
    scores = build_discriminator(config, 0)(_images(config, BATCH), labels)
    assert scores.isfinite().tolist() == [True] * BATCH


@pytest.mark.parametrize(
    ("build", "settings", "weights"),
    # The first two: the counts of the reference's default networks.
    # dcgan: (20 + 1) * 4096 + 256 * 128 * 25 + 128 + 128 * 64 * 25 + 64 + 64 * 64 + 1.
    # coded: (20 + 1) * 100 + 101 * 100 + 101 * 10 + 11 * 100 + 101 * 784.
    [
        (build_generator, {}, 3_826_177),
        (build_discriminator, {}, 1_071_105),
        (build_generator, {"generator": "dcgan", "generator_dim": 64}, 1_114_305),
        (build_generator, {"generator": "upsample", "generator_dim": 32}, 224_257),
        (build_generator, {"generator": "coded", "generator_dim": 100}, 93_494),
    ],
)
def test_weights_are_counted_with_biases(build, settings, weights):
    network = build(run_config(num_classes=10, **(IMAGES | settings)), 0)
    assert sum(param.numel() for param in network.parameters()) == weights


def test_projection_score_is_the_published_formula():
    config = _config(spectral_norm=False)
    discriminator = build_discriminator(config, 0)
    images, labels = _images(config, BATCH), torch.arange(BATCH)
    h = images
    for layer in (discriminator.conv1, discriminator.conv2, discriminator.conv3):
        h = _leaky(layer(h))
    h = h.flatten(1)
    embedded = (discriminator.embedding.weight[labels] * h).sum(1)
    expected = discriminator.linear(h).squeeze(1) + embedded
    torch.testing.assert_close(discriminator(images, labels), expected, **TOLERANCE)


def _rms(h: Tensor) -> Tensor:
    return h / (h.square().mean(1, keepdim=True) + 1e-10).sqrt()


def _twice(h: Tensor) -> Tensor:
    return h.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


def _leaky(h: Tensor) -> Tensor:
    return torch.where(h > 0, h, 0.2 * h)


def _resnet(plain: nn.Module, h: Tensor) -> Tensor:
    # W / sigma in the weights, so that plain layers compute the forward.
    for layer in _normalised_layers(plain).values():
        layer.weight.data /= layer.u @ layer.weight.data.flatten(1) @ layer.v
    h = _rms(plain.linear(h).relu().view(BATCH, 8, 4, 4))
    for block in plain.blocks:
        inner = block.conv1(_twice(_rms(h)))
        h = block.conv2(_rms(inner).relu()) + block.conv_skip(_twice(h))
    assert h.shape[2:] == (32, 32)
    return plain.conv(h).sigmoid()[:, :, :-2, :-2]  # of 30 x 30


def _dcgan(plain: nn.Module, h: Tensor) -> Tensor:
    h = _rms(plain.linear(h).relu().view(BATCH, 8, 4, 4))
    for deconv, crop in zip(plain.deconvs, (7, 11, 28), strict=True):
        h = deconv(h)[:, :, :crop, :crop]
        h = _rms(h.relu()) if crop < 28 else h.sigmoid()
    return h


def _upsample(plain: nn.Module, h: Tensor) -> Tensor:
    h = _rms(_leaky(plain.linear(h)).view(BATCH, 8, 7, 7))
    for conv in (plain.conv1, plain.conv2):
        h = _rms(_leaky(conv(_twice(h))))
    return (plain.conv3(h) - 2).sigmoid()


FORWARDS = {"resnet": _resnet, "dcgan": _dcgan, "upsample": _upsample}


@pytest.mark.parametrize(("kind", "forward"), FORWARDS.items())
def test_generator_is_the_published_or_documented_one(kind, forward):
    config = _config(generator=kind)
    z, labels = _inputs(config)
    images = build_generator(config, 0)(z, labels)
    one_hot = nn.functional.one_hot(labels, 5).float()
    expected = forward(build_generator(config, 0), torch.cat([z, one_hot], dim=1))
    torch.testing.assert_close(images, expected, **TOLERANCE)


# Spectral norm


def test_one_power_iteration_is_the_published_one():
    weight = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    buffers = {"a.u": torch.tensor([0.6, 0.8]), "a.v": torch.tensor([1.0, 0.0])}
    advanced = advance_spectral_vectors({"a.weight": weight}, buffers)
    # W^T u = (1.8, 0.8); W v is proportional to (5.4, 0.8).
    v = torch.tensor([1.8, 0.8]) / math.hypot(1.8, 0.8)
    u = torch.tensor([5.4, 0.8]) / math.hypot(5.4, 0.8)
    torch.testing.assert_close(advanced, {"a.u": u, "a.v": v})
    assert buffers["a.u"].tolist() == pytest.approx([0.6, 0.8])  # input untouched


def test_gradient_flows_through_sigma():
    # W / sigma(W) does not change with the scale of W, so <dD/dW, W> = 0. Without the
    # gradient of sigma it would not be.
    discriminator = build_discriminator(_config(), 0)
    batch = _images(_config(), BATCH), torch.arange(BATCH)
    params, buffers = _tensors(discriminator)

    def score(tensors: TensorDict) -> Tensor:
        return functional_call(discriminator, (tensors, buffers), batch).sum()

    grads = grad(score)(params)
    for name in _normalised_layers(discriminator):
        gradient, weight = grads[f"{name}.weight"], params[f"{name}.weight"]
        inner = (gradient * weight).sum().abs()
        assert gradient.norm() > 0
        assert inner < 1e-3 * gradient.norm() * weight.norm()


# Average


def test_average_of_parameters_and_copy_of_buffers():
    average, *generators = (build_generator(_config(), seed) for seed in range(4))
    average.requires_grad_(False)
    for step, generator in enumerate(generators):
        update_ema(average, generator, step, decay=0.6)
    # Weights of the past, by source/ops.py: 0, 0.5, 0.6 = min(1 - 1 / (step + 1), 0.6).
    for name, param in average.named_parameters():
        first, second, third = (each.get_parameter(name) for each in generators)
        expected = 0.6 * (0.5 * first + 0.5 * second) + 0.4 * third
        torch.testing.assert_close(param, expected.detach())
    for name, buffer in average.named_buffers():
        assert buffer.equal(generators[-1].get_buffer(name))
        assert buffer.data_ptr() != generators[-1].get_buffer(name).data_ptr()


# Latents


@pytest.mark.parametrize(
    ("latent", "mean", "variance", "least", "most"),
    [
        ("bernoulli", 0.5, 1 / 4, 0, 1),
        ("normal", 0.0, 1.0, -6, 6),
        ("uniform", 0.5, 1 / 12, 0, 1),
    ],
)
def test_latents_have_their_distribution(latent, mean, variance, least, most):
    config = _config(latent=latent, latent_dim=20)
    drawn = (sample_latents(config, np.random.default_rng(0), 5_000) for _ in "ab")
    z, again = drawn
    assert z.shape == (5_000, 20)
    assert z.dtype == torch.float32
    assert least <= z.min() <= z.max() <= most
    # 5 standard deviations of a mean of 1e5 draws, and of their mean square about it.
    assert abs(z.mean() - mean) < 5 * (variance / 1e5) ** 0.5
    assert abs((z - mean).square().mean() - variance) < 0.0224 * variance
    assert (set(z.unique().tolist()) == {0.0, 1.0}) == (latent == "bernoulli")
    assert z.equal(again)
    assert sample_latents(config, np.random.default_rng(0), 0).shape == (0, 20)


def test_labels_are_uniform():
    labels = sample_labels(_config(), np.random.default_rng(0), 50_000)
    assert labels.dtype == torch.int64
    counts = labels.bincount(minlength=5)
    assert len(counts) == 5
    # 5 standard deviations of Binomial(5e4, 0.2): 5 * sqrt(8e3) = 447.
    assert (counts - 10_000).abs().max() < 447
