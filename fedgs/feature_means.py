"""The default on one page: feature means, slow and obviously right.

In each phase of a run every client answers once, with the mean features of its images:

    means      1. where the classes lie, in low frequencies of the images
    scatter    2. how images lie around them: the longest axes of all classes together
    moments    3. the mean and the covariance of each class, along these axes
    features   4. mean features of public networks: a refiner is fitted to them

After phase 3 the generator draws from a Gaussian for each class, and after phase 4
through a network behind it. Every engine is tested against this page, which draws from
the same streams. To train, use `fedgs.train`: this page has no ledger, no checkpoint,
no limits, no parts and no public data.

Source: docs/privacy.md, "Embedding releases".
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from fedgs.config.feature_settings import MASS, OF_MOMENTS, PRETRAINED
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan import features, models, moments, refinement
from fedgs.gan.features import LEAST_SHARE, LEAST_WEIGHT, MeanFeatures, products
from fedgs.gan.public_networks import refiner_of_fonts
from fedgs.gan.torchvision_network import chosen_network
from fedgs.gs_wgan import Trained
from fedgs.mechanism import sanitizer
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.accountant import statements
from fedgs.privacy.plan import Plan
from fedgs.randomness import derived_seed
from fedgs.shapes import Images, TensorDict


def train(config: ResolvedConfig, data: FederatedImages) -> Trained:
    """Trains a generator, one phase after the other, on the CPU.

    Privacy: releases (epsilon, delta)-DP output; events: in every phase, one Gaussian
    release of each node, with the noise of the phase's share.
    """
    seed = derived_seed(config.seed, "generator")
    generator: Any = models.build_generator(config, seed)
    if PRETRAINED in config.methods:  # the refiner begins as one of fonts
        generator.refiner.load_state_dict(refiner_of_fonts(config), strict=False)
    average = copy.deepcopy(generator)
    found: list[MeanFeatures] = []
    for round in range(1, config.num_rounds + 1):
        phase: Any = config.at_round(round)  # with the noise of its share
        if phase.method in OF_MOMENTS:
            model = moments.model_of(phase, found)
            network = model.network
            size = phase.num_groups, phase.num_features
            expected = moments.expected(model, phase.method, *size)
        else:
            network, expected = refinement.reference(phase, average)
        total = torch.zeros(len(expected), 1 + expected.shape[1], dtype=torch.float64)
        for node in range(config.num_nodes):
            hosted = config.hosting.hosted(node)
            answers = [answer(phase, network, expected, data, k) for k in hosted]
            noise = NoiseStream(config.noise_seed, node, round)
            # The privacy barrier: one Gaussian release of the node.
            release = sanitizer.sanitize(answers, phase.noise_std, noise, round, node)
            total += release.values[0, 0]
        noise_std = phase.noise_std * math.sqrt(config.num_nodes)
        found.append(means(phase, network, expected, total, noise_std))
        if phase.method in OF_MOMENTS:
            model = moments.model_of(phase, found)  # one Gaussian for each class
            moments.set_generator(phase, model, generator, average)
        else:
            fit(phase, found[-1], generator, average)
    cost = statements(Plan.from_config(config), config.delta)  # known in advance
    return Trained(generator, average, cost)


def answer(
    phase: Any,
    network: TensorDict,
    expected: Tensor,
    data: FederatedImages,
    k: int,
) -> sanitizer.ClippedGradients:
    """Returns how client k's images differ from what is expected, clipped to norm C.

    Privacy: reads private data; what it returns is sent with noise only.
    """
    total = torch.zeros(1, 1, len(expected), 1 + expected.shape[1], dtype=torch.float64)
    images, labels = data.client(k)
    for image, label in zip(torch.tensor(images), torch.tensor(labels), strict=True):
        group = 0 if phase.method == "scatter" else int(label)
        found = features_of(phase, network, image[None], label)
        total[0, 0, group, 0] += MASS
        total[0, 0, group, 1:] += found - expected[group]
    # Divided by their number, so that a client with more images counts no more.
    total *= len(expected) / len(images)
    return sanitizer.clip(sanitizer.PerSampleGradients(total[None]), phase.clip_bound)


def features_of(
    phase: Any,
    network: TensorDict,
    image: Images,
    label: Tensor,
) -> Tensor:
    """Returns the features of one image (1, C, S, S)."""
    if phase.method not in OF_MOMENTS:  # layers of public networks
        chosen = chosen_network(phase)
        return features.mean_layers(phase.method, network, image, 1, chosen)[0]
    low = sanitizer.to_dct(image, phase.moment_size).flatten()  # k x k low frequencies
    if phase.method == "means":
        return low - network["mean"][label]
    if phase.method == "scatter":  # around the means, of all classes together
        return products((low - network["mean"][label])[None])[0]
    along = low @ network["axes"] - network["centre"][label]
    return torch.cat([along, 0.5 * products(along[None])[0]])


def means(
    phase: Any,
    network: TensorDict,
    expected: Tensor,
    total: Tensor,
    noise_std: float,
) -> MeanFeatures:
    """Makes mean features (groups, features) of the noisy sum of all clients' answers.

    The first feature was MASS for each image: it tells what clipping left of them.
    """
    length = MASS * math.sqrt(len(total))  # of an answer without other features
    most = phase.num_clients * phase.clip_bound / length  # where all are clipped
    least = max(LEAST_WEIGHT * most, noise_std / length)  # less is only noise
    weight = min(max(float(total[:, 0].mean()) / MASS, least), most)
    target, noise = expected.double(), torch.zeros(len(total))
    for group, row in enumerate(total):
        share = max(float(row[0]) / MASS / weight, LEAST_SHARE)  # of the group; mean 1
        target[group] += row[1:] / (weight * share)
        noise[group] = noise_std / (weight * share)
    return MeanFeatures(phase.method, network, target.float(), noise)


def fit(phase: Any, release: MeanFeatures, generator: Any, average: Any) -> None:
    """Fits the refiner: mean features of what is drawn become those released."""
    steps, rate, longest = refinement.schedule(release)
    weights = list(generator.refiner.parameters())
    adam = torch.optim.Adam(weights, lr=rate, betas=refinement.BETAS)
    found: Tensor | None = None  # an average over the steps so far
    for step in range(steps):
        z, labels = refinement.latents(phase, step)
        gaussian = generator.gaussian(z, labels)
        drawn = generator.refiner(gaussian, labels)
        now = refinement.class_means(phase, release.network, drawn, labels)
        found = now.detach() if found is None else now.detach().lerp(found, 0.95)
        adam.zero_grad()
        nearer = (now * (found - release.target)).sum()  # |E f(G) - target|^2 / 2
        (nearer + refinement.strayed(phase, drawn, gaussian)).backward()
        torch.nn.utils.clip_grad_norm_(weights, longest)
        adam.param_groups[0]["lr"] = refinement.rate_of(step, steps, rate)
        adam.step()
        models.update_ema(average.refiner, generator.refiner, step, refinement.AVERAGED)
    generator.load_state_dict(average.state_dict())
