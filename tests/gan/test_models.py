"""Tests of the architectures, the spectral norm, the average and the latents."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedgs.config.run_config import RunConfig
from fedgs.gan.losses import discriminator_loss, generator_image_grads
from fedgs.gan.models import (
    Discriminator,
    Generator,
    advance_in_place,
    advance_spectral_vectors,
    build_discriminator,
    build_generator,
    ema_weight,
    sample_labels,
    sample_latents,
    update_ema,
)
from fedgs.shapes import TensorDict
from tiny import digest

GENERATORS = ("resnet", "dcgan", "upsample", "coded")
SIZES = (16, 28, 32, 64)
BATCH = 3
# Bound of rounding in a sum of 1e4 float32 products of order 1.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

pytestmark = pytest.mark.usefixtures("global_state_is_kept")


def _config(**settings: object) -> RunConfig:
    narrow = {"num_classes": 5, "generator_dim": 2, "discriminator_dim": 2}
    return RunConfig(**(narrow | settings))


def _paper(**settings: object) -> RunConfig:
    return RunConfig(num_classes=10, **settings)


def _inputs(config: RunConfig, count: int = BATCH) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    return sample_latents(config, rng, count), sample_labels(config, rng, count)


def _images(config: RunConfig, *leading: int) -> Tensor:
    side = config.image_size
    shape = (*leading, config.image_channels, side, side)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def _num_weights(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _tensors(module: nn.Module) -> tuple[TensorDict, TensorDict]:
    params = {name: value.detach() for name, value in module.named_parameters()}
    return params, dict(module.named_buffers())


def _stacked(modules: list[nn.Module]) -> tuple[TensorDict, TensorDict]:
    params, buffers = zip(*map(_tensors, modules), strict=True)
    return tuple(
        {name: torch.stack([each[name] for each in group]) for name in group[0]}
        for group in (params, buffers)
    )


def _normalised_layers(module: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in module.named_modules() if "u" in dict(m._buffers)}


# Architectures


def each_shape(test):
    for name, values in (
        ("side", SIZES),
        ("channels", (1, 3)),
    ):
        test = pytest.mark.parametrize(name, values)(test)
    return test


@pytest.mark.parametrize("kind", GENERATORS)
@each_shape
def test_generator_makes_images_of_every_shape(kind, side, channels):
    shape = {"image_size": side, "image_channels": channels}
    for width in (1, 3):
        networks = {"generator": kind, "generator_dim": width}
        config = _config(**shape, **networks)
        images = build_generator(config, 0)(*_inputs(config))
        assert images.shape == (BATCH, channels, side, side)
        assert images.dtype == torch.float32
        assert images.min() >= 0
        assert images.max() <= 1


@pytest.mark.parametrize("spectral_norm", [True, False])
@each_shape
def test_discriminator_scores_images_of_every_shape(spectral_norm, side, channels):
    shape = {"image_size": side, "image_channels": channels}
    for width in (1, 3):
        networks = {"spectral_norm": spectral_norm, "discriminator_dim": width}
        config = _config(**shape, **networks)
        discriminator = build_discriminator(config, 0)
        scores = discriminator(_images(config, BATCH), torch.arange(BATCH))
        assert scores.shape == (BATCH,)
        assert scores.isfinite().all()


def test_weights_of_the_paper_are_counted_with_biases():
    # 3,826,177 and 1,071,105: the counts of the reference's default networks.
    assert _num_weights(build_generator(_paper(), 0)) == 3_826_177
    assert _num_weights(build_discriminator(_paper(), 0)) == 1_071_105
    plain = build_discriminator(_paper(spectral_norm=False), 0)  # no weights of its own
    assert _num_weights(plain) == 1_071_105
    assert not list(plain.buffers())


@pytest.mark.parametrize(
    ("kind", "width", "weights"),
    # dcgan: (20 + 1) * 4096 + 256 * 128 * 25 + 128 + 128 * 64 * 25 + 64 + 64 * 64 + 1.
    # coded: (20 + 1) * 100 + 101 * 100 + 101 * 10 + 11 * 100 + 101 * 784.
    [
        ("dcgan", 64, 1_114_305),
        ("upsample", 16, 89_089),
        ("upsample", 32, 224_257),
        ("coded", 100, 93_494),
    ],
)
def test_weights_of_the_other_generators(kind, width, weights):
    config = _paper(generator=kind, generator_dim=width)
    assert _num_weights(build_generator(config, 0)) == weights


@pytest.mark.parametrize(("side", "num_blocks"), [(16, 2), (28, 3), (32, 3), (64, 4)])
def test_resnet_doubles_from_four(side, num_blocks):
    generator = build_generator(_config(image_size=side), 0)
    assert len(generator.blocks) == num_blocks


def test_untrained_upsample_generator_is_near_the_background():
    config = _config(generator="upsample", generator_dim=16)
    images = [build_generator(config, seed)(*_inputs(config)) for seed in range(8)]
    # Logits are about N(-2, 1/3), so the mean is near sigmoid(-2) = 0.12; else 0.5.
    assert torch.stack(images).mean() < 0.2


@pytest.mark.parametrize("spectral_norm", [True, False])
def test_discriminator_holds_no_batch_norm(spectral_norm):
    discriminator = build_discriminator(_config(spectral_norm=spectral_norm), 0)
    allowed = (Discriminator, nn.Conv2d, nn.Linear, nn.Embedding)
    assert all(type(module) in allowed for module in discriminator.modules())


@pytest.mark.parametrize("kind", GENERATORS)
def test_label_matters(kind):
    config = _config(generator=kind)
    z, _ = _inputs(config)
    zeros = torch.zeros(BATCH, dtype=torch.int64)
    generator = build_generator(config, 0)
    assert not generator(z, zeros).equal(generator(z, zeros + 1))
    discriminator = build_discriminator(config, 0)
    images = _images(config, BATCH)
    scores = discriminator(images, zeros), discriminator(images, zeros + 1)
    assert not scores[0].equal(scores[1])


def test_projection_score_is_the_published_formula():
    config = _config(spectral_norm=False)
    discriminator = build_discriminator(config, 0)
    images, labels = _images(config, BATCH), torch.arange(BATCH)
    h = images
    for name in ("conv1", "conv2", "conv3"):
        h = discriminator.get_submodule(name)(h)
        h = torch.where(h > 0, h, 0.2 * h)
    h = h.flatten(1)
    expected = discriminator.linear(h).squeeze(1)
    expected = expected + torch.stack(
        [discriminator.embedding.weight[y] @ h[i] for i, y in enumerate(labels)]
    )
    torch.testing.assert_close(discriminator(images, labels), expected, **TOLERANCE)


def _rms(h: Tensor) -> Tensor:
    return h / (h.square().mean(1, keepdim=True) + 1e-10).sqrt()


def _twice(h: Tensor) -> Tensor:
    return h.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


def _with_divided_weights(module: nn.Module) -> nn.Module:
    """Bakes W / sigma into the weights, so that plain layers compute the forward."""
    for layer in _normalised_layers(module).values():
        layer.weight.data /= layer.u @ layer.weight.data.flatten(1) @ layer.v
    return module


def test_resnet_forward_is_the_published_one():
    config = _config()
    z, labels = _inputs(config)
    images = build_generator(config, 0)(z, labels)
    plain = _with_divided_weights(build_generator(config, 0))
    h = plain.linear(torch.cat([z, nn.functional.one_hot(labels, 5).float()], dim=1))
    h = _rms(h.relu().view(BATCH, 8, 4, 4))
    for block in plain.blocks:
        inner = block.conv1(_twice(_rms(h)))
        h = block.conv2(_rms(inner).relu()) + block.conv_skip(_twice(h))
    assert h.shape[2:] == (32, 32)
    expected = plain.conv(h).sigmoid()
    assert expected.shape[2:] == (30, 30)
    torch.testing.assert_close(images, expected[:, :, :-2, :-2], **TOLERANCE)


def test_dcgan_forward_is_the_published_one():
    config = _config(generator="dcgan")
    z, labels = _inputs(config)
    plain = build_generator(config, 0)
    h = plain.linear(torch.cat([z, nn.functional.one_hot(labels, 5).float()], dim=1))
    h = _rms(h.relu().view(BATCH, 8, 4, 4))
    sides = [4]
    for deconv, crop in zip(plain.deconvs, (7, 11, 28), strict=True):
        h = deconv(h)
        sides.append(h.shape[-1])
        h = h[:, :, :crop, :crop]
        h = _rms(h.relu()) if crop < 28 else h.sigmoid()
    assert sides == [4, 8, 11, 28]
    torch.testing.assert_close(plain(z, labels), h, **TOLERANCE)


def test_upsample_forward_is_the_documented_one():
    config = _config(generator="upsample")
    z, labels = _inputs(config)
    plain = build_generator(config, 0)
    h = plain.linear(torch.cat([z, nn.functional.one_hot(labels, 5).float()], dim=1))
    h = _rms(torch.where(h > 0, h, 0.2 * h).view(BATCH, 8, 7, 7))
    for conv in (plain.conv1, plain.conv2):
        h = conv(_twice(h))
        h = _rms(torch.where(h > 0, h, 0.2 * h))
    expected = (plain.conv3(h) - 2).sigmoid()
    torch.testing.assert_close(plain(z, labels), expected, **TOLERANCE)


# Initialisation


@pytest.mark.parametrize("kind", GENERATORS)
def test_initialisation_is_a_function_of_the_seed(kind):
    config = _config(generator=kind)
    for build in (build_generator, build_discriminator):
        first = digest(build(config, 2**63 - 1).state_dict())
        with torch.random.fork_rng():
            torch.rand(1)  # moves the global state, which must not matter
            assert digest(build(config, 2**63 - 1).state_dict()) == first
        assert digest(build(config, 1).state_dict()) != first


def test_initialisation_in_threads_is_deterministic():
    def build(seed: int) -> str:
        return digest(build_discriminator(_config(), seed).state_dict())

    seeds = list(range(24))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(build, seeds)) == [build(seed) for seed in seeds]


# Spectral norm


@pytest.mark.parametrize("training", [True, False])
def test_forward_and_backward_change_no_bit_of_state(training):
    config = _config()
    generator = build_generator(config, 0).train(training)
    discriminator = build_discriminator(config, 0).train(training)
    before = [digest(m.state_dict()) for m in (generator, discriminator)]
    z, labels = _inputs(config)
    images = generator(z, labels)
    generator_image_grads(discriminator, images.detach(), labels)
    discriminator(images, labels).sum().backward()
    after = [digest(m.state_dict()) for m in (generator, discriminator)]
    assert after == before


@pytest.mark.parametrize("build", [build_generator, build_discriminator])
def test_sigma_approaches_the_largest_singular_value(build):
    module = build(_config(discriminator_dim=4), 0)
    params, buffers = _tensors(module)
    for _ in range(300):
        buffers = advance_spectral_vectors(params, buffers)
    layers = _normalised_layers(module)
    # Discriminator: 3 convolutions, linear, embedding. ResNet at 28: linear, 3 blocks
    # of 3 convolutions, output.
    assert len(layers) == (5 if isinstance(module, Discriminator) else 11)
    for name in layers:
        weight = params[f"{name}.weight"].flatten(1)
        u, v = buffers[f"{name}.u"], buffers[f"{name}.v"]
        largest = torch.linalg.svdvals(weight)[0]
        # The error of sigma falls as (second / first singular value)^(4 * 300).
        torch.testing.assert_close(u @ weight @ v, largest, rtol=1e-3, atol=0.0)
        torch.testing.assert_close(u.norm(), torch.tensor(1.0), rtol=1e-5, atol=0.0)


def test_sigma_is_positive_before_the_first_step():
    discriminator = build_discriminator(_config(), 0)
    for layer in _normalised_layers(discriminator).values():
        assert layer.u @ layer.weight.flatten(1) @ layer.v > 0


def test_one_power_iteration_is_the_published_one():
    weight = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    buffers = {"a.u": torch.tensor([0.6, 0.8]), "a.v": torch.tensor([1.0, 0.0])}
    advanced = advance_spectral_vectors({"a.weight": weight}, buffers)
    # W^T u = (1.8, 0.8); W v is proportional to (5.4, 0.8).
    v = torch.tensor([1.8, 0.8]) / math.hypot(1.8, 0.8)
    u = torch.tensor([5.4, 0.8]) / math.hypot(5.4, 0.8)
    torch.testing.assert_close(advanced, {"a.u": u, "a.v": v})
    assert buffers["a.u"].tolist() == pytest.approx([0.6, 0.8])  # input untouched


def test_generator_advances_in_place_as_the_pure_function_says():
    generator = build_generator(_config(), 0)
    expected = advance_spectral_vectors(*_tensors(generator))
    advance_in_place(generator)
    assert set(expected) == set(dict(generator.named_buffers()))
    for name, value in generator.named_buffers():
        assert value.equal(expected[name])
    light = build_generator(_config(generator="upsample"), 0)
    advance_in_place(light)  # nothing to do, no error


def test_gradient_flows_through_sigma():
    # W / sigma(W) does not change with the scale of W, so <dD/dW, W> = 0. Without the
    # gradient of sigma it would not be.
    config = _config()
    discriminator = build_discriminator(config, 0)
    images, labels = _images(config, BATCH), torch.arange(BATCH)
    params, buffers = _tensors(discriminator)

    def score(tensors: TensorDict) -> Tensor:
        return functional_call(
            discriminator, (tensors, buffers), (images, labels)
        ).sum()

    grads = grad(score)(params)
    for name in _normalised_layers(discriminator):
        gradient, weight = grads[f"{name}.weight"], params[f"{name}.weight"]
        inner = (gradient * weight).sum().abs()
        assert gradient.norm() > 0
        assert inner < 1e-3 * gradient.norm() * weight.norm()


def test_no_gradient_flows_through_the_vectors():
    generator = build_generator(_config(), 0)
    advance_in_place(generator)
    advanced = advance_spectral_vectors(
        dict(generator.named_parameters()), dict(generator.named_buffers())
    )
    assert not any(value.requires_grad for value in advanced.values())
    assert not any(buffer.requires_grad for buffer in generator.buffers())


# Stacks


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("spectral_norm", [True, False])
def test_stacked_discriminators_equal_a_loop(training, spectral_norm):
    config = _config(spectral_norm=spectral_norm)
    modules = [build_discriminator(config, seed).train(training) for seed in range(4)]
    template = build_discriminator(config, 9).train(training)
    images = _images(config, 4, BATCH)
    labels = torch.arange(BATCH).expand(4, BATCH)

    def score(params: TensorDict, buffers: TensorDict, x: Tensor, y: Tensor) -> Tensor:
        return functional_call(template, (params, buffers), (x, y))

    stacked = vmap(score)(*_stacked(modules), images, labels)
    loop = torch.stack([m(images[i], labels[i]) for i, m in enumerate(modules)])
    torch.testing.assert_close(stacked, loop, **TOLERANCE)


def test_stacked_power_iterations_equal_a_loop():
    modules = [build_discriminator(_config(), seed) for seed in range(4)]
    stacked = vmap(advance_spectral_vectors)(*_stacked(modules))
    for i, module in enumerate(modules):
        for name, value in advance_spectral_vectors(*_tensors(module)).items():
            torch.testing.assert_close(stacked[name][i], value, **TOLERANCE)


@pytest.mark.parametrize("spectral_norm", [True, False])
def test_stacked_gradients_of_the_penalised_loss_equal_a_loop(spectral_norm):
    config = _config(spectral_norm=spectral_norm)
    modules = [build_discriminator(config, seed) for seed in range(2)]
    template = build_discriminator(config, 9)
    real, fake = _images(config, 2, 2, BATCH)
    labels = torch.arange(BATCH).expand(2, BATCH)
    mix_weight = torch.full((2, BATCH), 0.3)

    def loss(params: TensorDict, buffers: TensorDict, *batch: Tensor) -> Tensor:
        if buffers:
            buffers = advance_spectral_vectors(params, buffers)

        def score(x: Tensor, y: Tensor) -> Tensor:
            return functional_call(template, (params, buffers), (x, y))

        return discriminator_loss(score, *batch)

    params, buffers = _stacked(modules)
    batch = (real, labels, fake, labels, mix_weight)
    stacked = vmap(grad(loss))(params, buffers, *batch)
    for i, module in enumerate(modules):
        own_params, own_buffers = _tensors(module)
        own = grad(loss)(own_params, own_buffers, *(each[i] for each in batch))
        for name, gradient in own.items():
            torch.testing.assert_close(
                stacked[name][i], gradient, rtol=1e-3, atol=1e-4, msg=name
            )


@pytest.mark.parametrize("kind", GENERATORS)
def test_stacked_generators_equal_a_loop(kind):
    config = _config(generator=kind)
    modules = [build_generator(config, seed) for seed in range(3)]
    template = build_generator(config, 9)
    z, labels = _inputs(config)

    def make(params: TensorDict, buffers: TensorDict, y: Tensor) -> Tensor:
        return functional_call(template, (params, buffers), (z, y))

    stacked = vmap(make)(*_stacked(modules), labels.expand(3, BATCH))
    loop = torch.stack([module(z, labels) for module in modules])
    torch.testing.assert_close(stacked, loop, **TOLERANCE)


# Average


def test_average_ramps_up_to_its_decay():
    # GS-WGAN source/ops.py: min(1 - 1 / (step + 1), decay).
    weights = [ema_weight(step, 0.999) for step in (0, 1, 3, 998, 999, 20_000)]
    assert weights == pytest.approx([0, 0.5, 0.75, 1 - 1 / 999, 0.999, 0.999])


def test_average_of_parameters_and_copy_of_buffers():
    config = _config()
    average: Generator = build_generator(config, 0)
    average.requires_grad_(False)
    generators = [build_generator(config, seed) for seed in (1, 2, 3)]
    values = [_tensors(generator)[0] for generator in generators]
    before = [digest(generator.state_dict()) for generator in generators]
    for step, generator in enumerate(generators):
        update_ema(average, generator, step, decay=0.6)
    # Weights of the past: 0, 0.5, 0.6.
    for name, param in average.named_parameters():
        first, second, third = (each[name] for each in values)
        expected = 0.6 * (0.5 * first + 0.5 * second) + 0.4 * third
        torch.testing.assert_close(param, expected)
    buffers = dict(generators[-1].named_buffers())
    assert buffers
    for name, buffer in average.named_buffers():
        assert buffer.equal(buffers[name])
        assert buffer.data_ptr() != buffers[name].data_ptr()
    assert [digest(generator.state_dict()) for generator in generators] == before


def test_first_update_of_the_average_copies():
    config = _config()
    average, generator = build_generator(config, 0), build_generator(config, 1)
    update_ema(average, generator, step=0, decay=0.999)
    assert digest(average.state_dict()) == digest(generator.state_dict())


# Latents


def test_bernoulli_latents_are_fair_bits():
    z = sample_latents(_config(), np.random.default_rng(0), 10_000)
    assert z.shape == (10_000, 10)
    assert z.dtype == torch.float32
    assert set(z.unique().tolist()) == {0.0, 1.0}
    # 5 standard deviations of a mean of 1e5 fair bits: 5 * 0.5 / sqrt(1e5) = 0.0079.
    assert abs(z.mean() - 0.5) < 0.0079


def test_ten_bits_and_ten_labels_make_at_most_10_240_inputs():
    rng = np.random.default_rng(0)
    z, labels = (
        sample_latents(_paper(), rng, 60_000),
        sample_labels(_paper(), rng, 60_000),
    )
    distinct = torch.cat([z, labels[:, None].float()], dim=1).unique(dim=0)
    assert len(distinct) <= 10_240


def test_normal_latents_are_standard():
    config = _config(latent="normal", latent_dim=20)
    z = sample_latents(config, np.random.default_rng(0), 5_000)
    assert z.shape == (5_000, 20)
    assert z.dtype == torch.float32
    # 5 standard deviations: of the mean 5 / sqrt(1e5), of the std 5 / sqrt(2e5).
    assert abs(z.mean()) < 0.0159
    assert abs(z.std() - 1) < 0.0112


def test_uniform_latents_fill_the_unit_interval():
    config = _config(latent="uniform", latent_dim=20)
    z = sample_latents(config, np.random.default_rng(0), 5_000)
    assert z.dtype == torch.float32
    assert z.min() >= 0
    assert z.max() < 1
    # 5 standard deviations of a mean of 1e5 draws of variance 1/12: 0.0046.
    assert abs(z.mean() - 0.5) < 0.0046
    assert abs((z - 0.5).square().mean() - 1 / 12) < 0.0012


def test_labels_are_uniform():
    labels = sample_labels(_config(), np.random.default_rng(0), 50_000)
    assert labels.dtype == torch.int64
    counts = labels.bincount(minlength=5)
    assert len(counts) == 5
    # 5 standard deviations of Binomial(5e4, 0.2): 5 * sqrt(8e3) = 447.
    assert (counts - 10_000).abs().max() < 447


def test_latents_and_labels_are_functions_of_their_stream():
    for latent in ("bernoulli", "normal", "uniform"):
        config = _config(latent=latent)
        first, second = _inputs(config), _inputs(config)
        assert first[0].equal(second[0])
        assert first[1].equal(second[1])
    assert sample_latents(_config(), np.random.default_rng(0), 0).shape == (0, 10)
