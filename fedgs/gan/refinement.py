"""The refiner's fit: one release of feature means holds what critics would say.

A discriminator that is linear over fixed features has, averaged over the clients, a
gradient that depends on the generator's features and on the class means of the
clients' alone. So one release of those means replaces all rounds of all such
discriminators, and the generator may take as many steps against it as it likes:

    loss = sum over classes of |E f(G(z, y)) - target_y|^2

In colour no field of an image goes far from its Gaussian's colour: `strayed`.
Features are made by the trunks of `fedgs.gan.public_networks`, one of which a network
of `fedgs.gan.torchvision_network` may replace, and scaled by what the generator itself
draws before the release. Where moments begin from public images, a small budget is of
use, and the noise may be larger than the distances: `credible`.

Privacy: post-processing of DP output.

Source: docs/privacy.md, "Embedding releases"; generative moment matching: Li, Swersky,
Zemel 2015; over features of a public network: Harder et al., "Pre-trained perceptual
features improve differentially private image generation", TMLR 2023.
"""

import math
from multiprocessing.pool import ThreadPool

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgs.config.feature_settings import MASS, OF_TRUNKS, TRUNK_AXES, layers_of
from fedgs.config.run_config import FeatureConfig
from fedgs.gan.features import KINDS, MeanFeatures, mean_layers
from fedgs.gan.fit import Fit
from fedgs.gan.models import Generator, GeneratorRefined, sample_latents, update_ema
from fedgs.gan.moments import belief
from fedgs.gan.public_networks import trunk_features
from fedgs.gan.torchvision_network import chosen_network
from fedgs.randomness import stream
from fedgs.shapes import Images, Labels, Latents, TensorDict

STEPS = 3000
SAMPLES = 10  # of each class in a step
THREADS = 2  # each has a part of a step's batch; the bits depend on their number
REFERENCE_STEPS = 40  # whose samples scale the features
LEAST_VARIANCE = 0.01  # of an axis, of the mean over all
# The more noise a release has, the smaller and fewer steps fit it, so that they fit
# less of it. Most noise of a feature for large steps, and for all steps:
FOR_LARGE = 0.022
FOR_ALL = 0.021
# Learning rates and longest gradients
SMALL = (1e-3, math.inf)
LARGE = (3e-3, 20.0)
RISING = 50  # steps in which the rate rises by the small one
LEAST_OF_RATE = 0.05  # the share of it that is left at the end
BETAS = (0.5, 0.99)
# Of the means of the steps before, in the factor that stands for E f(G(z, y)): without
# it a step's own noise would count as a distance, and pictures of one kind be nearer.
MEMORY = 0.95
AVERAGED = 0.98  # decay of the averaged refiner
# Of colours: how far the mean of a field may go from the Gaussian's, in log odds, by
# the number of fields to a side of an image, and how much what is beyond counts beside
# the features. Means of features hardly see a flat black or cyan field in some of the
# images, and where a channel is saturated the sigmoid has no slope to come back by. So
# a refiner made such holes. Small fields have more freedom, for edges, but without them
# a hole with bright dots has a mean that is allowed.
FREE = {8: 0.8, 16: 2.0}
ANCHOR = 0.3
# A field that a Gaussian draws darker is taken as this dark, and likewise in white: its
# own hole is no reason for one.
DARKEST = 0.1
LEAST_ODDS = 1e-4  # so that no logarithm is infinite


def reference(config: FeatureConfig, generator: Generator) -> tuple[TensorDict, Tensor]:
    """Returns how features are scaled, and their means, by the generator's own samples.

    Each layer has mean length 1 around its mean. The axes are the longest of the last
    layer, along which it has variance 1.

    Privacy: post-processing of DP output.

    Returns:
        What the server sends: the network, and the centre, shape (classes, features).
    """
    kind = config.method
    layers = layers_of(kind)
    chosen = chosen_network(config)
    steps = range(-REFERENCE_STEPS, 0)
    with torch.no_grad():
        samples = [_drawn(config, generator, step) for step in steps]
        features = [trunk_features(kind, images, chosen) for images, _ in samples]
        means: list[Tensor] = []
        scales: list[Tensor] = []
        axes: list[Tensor] = []
        lasts = range(len(layers))[3::4]  # of each trunk
        of_images = [found.split(layers, dim=1) for found in features]
        # One layer at a time: of 62 classes, all of them in float64 take a gigabyte.
        for index, values in enumerate(zip(*of_images, strict=True)):
            centred = torch.cat(values).double()
            mean = centred.mean(0)
            centred -= mean
            length = centred.norm(dim=1).mean()
            scale = 1 / length.clamp_min(1e-9)
            means.append(mean)
            scales.append(scale.expand_as(mean))
            if index in lasts:
                axes.append(_axes(centred))
        joined = {"mean": means, "scale": scales, "axes": axes}
        network = {name: torch.cat(parts).float() for name, parts in joined.items()}
        of_classes: list[Tensor] = []
        for images, labels in samples:
            of_classes.append(class_means(config, network, images, labels))
    centre = torch.stack(of_classes).mean(0)
    sent = {name: value.cpu() for name, value in network.items()}
    return sent, centre.cpu()


def _axes(deep: Tensor) -> Tensor:
    """Returns the longest axes of centred vectors (n, d), each over its length."""
    covariance = deep.T @ deep / len(deep)
    variances, axes = torch.linalg.eigh(covariance)  # upwards
    # An axis that the samples hardly vary along would have the largest products.
    share_of_mean = float(LEAST_VARIANCE * variances.mean())
    least = max(share_of_mean, 1e-9)
    longest = axes[:, -TRUNK_AXES:]
    lengths = variances[-TRUNK_AXES:].clamp_min(least).sqrt()
    return longest / lengths


def class_means(
    config: FeatureConfig,
    net: TensorDict,
    images: Images,
    labels: Labels,
) -> Tensor:
    """Returns the mean features of each class, which all have as many images.

    Args:
        config: the resolved configuration.
        net: tensors of the phase.
        images: shape (n, C, S, S).
        labels: shape (n,), as of `_drawn`.
    """
    chosen = chosen_network(config)
    return mean_layers(config.method, net, images, config.num_classes, chosen)


def strayed(config: FeatureConfig, images: Images, gaussian: Images) -> Tensor:
    """Returns how far fields of images stray from the Gaussian's; 0 of grey images.

    It is half the square of what the log odds log(p / (1 - p)) of a field's mean p
    change by beyond FREE, over all fields, channels and classes, times ANCHOR. Its
    slope grows however black a field is, so a fit comes back from there, while edges
    and textures within a field are free. Grey images begin at a refiner of fonts, which
    has to move strokes, and have flat backgrounds.

    Args:
        config: the phase's configuration.
        images: refined, shape (n, C, S, S).
        gaussian: what they were made of, of the same shape.
    """
    if config.image_channels == 1:
        return images.new_zeros(())
    squares = images.new_zeros(())
    for fields, free in FREE.items():
        side = math.ceil(config.image_size / fields)  # of a field
        found = F.avg_pool2d(images, side)
        expected = F.avg_pool2d(gaussian, side).clamp(DARKEST, 1 - DARKEST)
        change = _log_odds(found) - _log_odds(expected)
        beyond = F.relu(change.abs() - free)
        squares = squares + beyond.square().sum()
    return ANCHOR / 2 * squares * config.num_classes / len(images)


def _log_odds(shares: Tensor) -> Tensor:
    odds = (shares + LEAST_ODDS) / (1 - shares + LEAST_ODDS)
    return odds.log()


def latents(config: FeatureConfig, step: int) -> tuple[Latents, Labels]:
    """Draws latents, as many for each class, in turns; the same for the same step."""
    classes = torch.arange(config.num_classes)
    labels = classes.repeat(SAMPLES)
    number = step + REFERENCE_STEPS  # from 0: the reference's steps are negative
    rng = stream(config.seed, "refinement", number)
    z = sample_latents(config, rng, len(labels))
    return z.to(config.device), labels.to(config.device)


def _drawn(
    config: FeatureConfig,
    generator: Generator,
    step: int,
) -> tuple[Images, Labels]:
    """Draws the images of a step."""
    z, labels = latents(config, step)
    return generator(z, labels), labels


def refine(
    config: FeatureConfig,
    release: MeanFeatures,
    generator: GeneratorRefined,
    average: GeneratorRefined,
    fit: Fit,
) -> None:
    """Fits the refiner to a release of feature means.

    Privacy: post-processing of DP output.

    Args:
        config: the resolved configuration.
        release: what the phase has released.
        generator: whose refiner is trained; the averaged one at the end.
        average: a network of the same shape; the averaged one at the end.
        fit: where an earlier attempt was, and who is told of the steps.
    """
    net = {name: value.to(config.device) for name, value in release.network.items()}
    target = release.target.to(config.device)
    steps, rate, longest = schedule(release)
    weights = list(generator.refiner.parameters())
    adam = torch.optim.Adam(weights, rate, BETAS)

    def found_of(z: Latents, labels: Labels) -> tuple[Tensor, Tensor]:
        gaussian = generator.gaussian(z, labels)
        images = generator.refiner(gaussian, labels)
        means = class_means(config, net, images, labels)
        return means, strayed(config, images, gaussian)

    def gradient(means: Tensor, strayed: Tensor) -> tuple[Tensor, ...]:
        # Each part has its share of the batch, whose means are those of the parts.
        share = distance / THREADS
        nearer = (means * share).sum()
        loss = nearer + strayed / THREADS
        return torch.autograd.grad(loss, weights)

    generator.train()
    remembered = _Remembered(target)
    parts = {
        "refiner": generator.refiner,
        "average": average.refiner,
        "adam": adam,
        "remembered": remembered,
    }
    begun = fit.begin(parts)
    with ThreadPool(THREADS, torch.set_num_threads, (1,)) as pool:
        for step in range(begun, steps):
            adam.param_groups[0]["lr"] = rate_of(step, steps, rate)
            z, labels = latents(config, step)
            batch = zip(z.chunk(THREADS), labels.chunk(THREADS), strict=True)
            drawn = pool.starmap(found_of, batch)
            of_parts = torch.stack([means.detach() for means, _ in drawn])
            found = of_parts.mean(0)
            if step > 0:
                found = torch.lerp(found, remembered.means, MEMORY)
            remembered.means = found
            distance = found - target
            if config.public_data is not None:
                distance = credible(distance, release)
            gradients = pool.starmap(gradient, drawn)
            for weight, *summands in zip(weights, *gradients, strict=True):
                weight.grad = sum(summands)
            nn.utils.clip_grad_norm_(weights, longest)
            adam.step()
            update_ema(average.refiner, generator.refiner, step, AVERAGED)
            fit.done(step + 1, steps)
    generator.load_state_dict(average.state_dict())


class _Remembered(nn.Module):
    """The means of the steps before, as a part of a fit that is kept."""

    means: Tensor

    def __init__(self, target: Tensor) -> None:
        """Has the shape of the released means."""
        super().__init__()
        self.register_buffer("means", torch.zeros_like(target))


def nothing_released(config: FeatureConfig, longer: float) -> MeanFeatures:
    """Returns a release of zeros, to time a fit by, with about its noise.

    Args:
        config: the phase's configuration.
        longer: how long clients' embeddings are, over what their numbers of images
            alone, all classes alike, would make them.
    """
    groups = config.num_groups
    # See `fedgs.gan.features.mean_features`.
    shortest = MASS * math.sqrt(groups)  # of an embedding
    weight = config.num_clients * config.clip_bound / shortest
    of_sum = config.noise_std * math.sqrt(config.num_nodes)
    noise_std = longer * of_sum / weight
    shapes = KINDS[config.method].shapes(config)
    network = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return MeanFeatures(
        method=config.method,
        network=network,
        target=torch.zeros(groups, config.num_features),
        noise_std=torch.full((groups,), noise_std),
    )


def schedule(release: MeanFeatures) -> tuple[int, float, float]:
    """Returns steps, learning rate and longest gradient of a fit to a release."""
    variance = release.noise_std.square().mean()
    noise = float(variance.sqrt())
    if noise <= FOR_LARGE:
        rate, longest = LARGE
    else:
        rate, longest = SMALL
    divisor = max(noise, FOR_ALL)
    steps = math.ceil(STEPS * FOR_ALL / divisor)
    return steps, rate, longest


def rate_of(step: int, steps: int, rate: float) -> float:
    """Returns the learning rate of a step, from 0: it rises at first, then falls."""
    small, _ = SMALL
    risen = min(rate, small * (1 + step / RISING))
    left = 1 - step / steps
    return risen * max(LEAST_OF_RATE, left)


def credible(distance: Tensor, release: MeanFeatures) -> Tensor:
    """Weighs distances by the share of their square that noise does not explain.

    Each layer has two weights, of what all classes have in common and of what makes
    them differ, which has more noise. They fall to 0 where the fit is as near to the
    release as the truth itself (the discrepancy principle: Morozov 1966).

    Privacy: post-processing of DP output.

    Args:
        distance: how far features are from those released, shape (classes, features).
        release: what the phase has released.
    """
    layers = layers_of(release.method)
    trunks = len(OF_TRUNKS[release.method])
    products = (distance.shape[1] - sum(layers)) // trunks
    sizes = [*layers, *[products] * trunks]
    common = distance.mean(0, keepdim=True)
    own = distance - common
    variance = release.noise_std.square().mean()

    def weighed(values: Tensor, variance: Tensor) -> Tensor:
        weighed: list[Tensor] = []
        for part in values.split(sizes, dim=1):
            weighed.append(part * belief(part, variance))
        return torch.cat(weighed, dim=1)

    share = 1 / len(distance)  # of the noise's square that all classes have in common
    own = weighed(own, variance * (1 - share))
    common = weighed(common, variance * share)
    return own + common
