"""Staged embeddings on the server: feature networks, targets, and the generator's fit.

    stage    make_stage -> (the noisy sum of the clients' embeddings) -> released -> fit

Moments determine a Gaussian generator at once (`fedgs.gan.moments`); to all other
features it is fitted by gradients. All of it is post-processing of releases and of what
is public.

Source: docs/privacy.md, "Embedding releases".
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgs.config.run_config import ResolvedConfig
from fedgs.config.stages import MASS, MOMENT_KINDS
from fedgs.gan.features import KINDS, Sample, StageRelease, group_sums
from fedgs.gan.models import Generator, advance_in_place, sample_latents, update_ema
from fedgs.gan.moments import Model, expected, in_parts, model_of, set_generator
from fedgs.randomness import stream
from fedgs.shapes import Images, Labels, TensorDict

CENTRE_PER_CLASS = 60  # samples of the generator that a centre is the mean of
START_PER_CLASS = 30  # samples that a network's moving average starts from
MEANS_DECAY = 0.8  # of the moving average of the fakes' class means
NORM_DECAY = 0.97  # of the moving average of the image gradient's norm
OLDER_WEIGHT = 0.5  # of drawing a network of an earlier stage; the newest have 1
LEAST_SHRINKAGE = 0.1  # of a gradient whose difference is all noise
LAST_LEARNING_RATE = 0.1  # of the first one, after all stages' steps
SAMPLES_AT_ONCE = 500
LEAST_SHARE = 0.2  # of a group, of what it has where all are alike
LEAST_WEIGHT = 1e-6  # of all clients, of the most that they can have


def make_stage(
    config: ResolvedConfig,
    average: Generator,
    releases: Sequence[StageRelease],
    round: int,
    start: Model | None = None,
) -> tuple[tuple[TensorDict, ...], Tensor]:
    """Makes the feature networks of a round's stage, and what clients subtract.

    Clients subtract what the model so far expects, or the features of fakes; before
    there are any, those of a blank image.

    Privacy: post-processing of DP output.

    Returns:
        The networks, and the centre: shape (networks, groups, features), float32.

    Source: docs/privacy.md, "Embedding releases".
    """
    stage = config.stage_list[round - 1]
    _, groups, columns = config.terms(round).shape[1:]
    if stage.is_moments:
        model = model_of(config, releases, start)
        if stage.kind == "parts":
            model = in_parts(model)
        return (model.network,), expected(model, stage.kind, groups, columns - 1)
    networks: list[TensorDict] = []
    for index in range(config.stage_networks):
        rng = stream(config.seed, "stage-network", round, index)
        sample = _sampler(config, average, "stage-network-fakes", round, index)
        net = KINDS[stage.kind].make(config, rng, sample)
        networks.append({name: value.contiguous() for name, value in net.items()})
    if round > 1:
        sample = _sampler(config, average, "stage-centre", round)
        return tuple(networks), _class_means(
            config, stage.kind, networks, sample, CENTRE_PER_CLASS
        )
    side = config.image_size
    blank = torch.zeros(1, config.image_channels, side, side)
    labels = torch.zeros(1, dtype=torch.int64)
    rows = [KINDS[stage.kind].features(net, blank, labels) for net in networks]
    return tuple(networks), torch.stack([row.expand(groups, -1) for row in rows])


def released(
    config: ResolvedConfig,
    round: int,
    networks: tuple[TensorDict, ...],
    centre: Tensor,
    total: Tensor,
    noise_std: float,
) -> StageRelease:
    """Makes means of the images' features out of the noisy sum of all embeddings.

    Embeddings are equally long, so each counts by what its clipping left of it, C / its
    norm. The sum of those weights, and each group's share of the images, stand in the
    first feature: dividing by it gives a mean over images, weighted by client, whatever
    the clip bound is. Only a group with less than LEAST_SHARE of what all have on
    average stays nearer to the centre than that, for its noise would be large.

    Privacy: post-processing of DP output.

    Args:
        config: the resolved configuration.
        round: of the stage.
        networks: that the clients had.
        centre: that they subtracted.
        total: sum over clients, shape (networks, groups, 1 + features), float64.
        noise_std: of each number in `total`, at least 0.

    Source: docs/privacy.md, "Embedding releases".
    """
    copies = math.sqrt(len(networks) * total.shape[1])  # of the mass
    mass = total[:, :, 0].mean(0) / MASS  # of every group; noise may make it negative
    # Clipping leaves this at most, and a weight below its own noise says nothing.
    most = config.num_clients * config.clip_bound / (MASS * copies)
    least = max(LEAST_WEIGHT * most, noise_std / (MASS * copies))
    weight = float(mass.mean().clamp(least, most))
    shares = (mass / weight).clamp_min(LEAST_SHARE)  # 1 where all are alike
    target = centre.double() + total[:, :, 1:] / (weight * shares[:, None])
    noise = noise_std / (weight * shares)
    kind = config.stage_list[round - 1].kind
    of_parts = shares.float() if kind == "parts" else None
    return StageRelease(kind, networks, target.float(), noise.float(), of_parts)


def _sampler(
    config: ResolvedConfig, average: Generator, purpose: str, *indices: int
) -> Sample:
    """Returns what draws fakes to the CPU, of the averaged generator, classes alike."""
    rng = stream(config.seed, purpose, *indices)

    def sample(count: int) -> tuple[Images, Labels]:
        labels = _balanced(config, count)
        z = sample_latents(config, rng, len(labels))
        images: list[Images] = []
        with torch.no_grad():
            for rows in torch.arange(len(labels)).split(SAMPLES_AT_ONCE):
                there = (z[rows].to(config.device), labels[rows].to(config.device))
                images.append(average(*there).cpu())
        return torch.cat(images), labels

    return sample


def _balanced(config: ResolvedConfig, count: int) -> Labels:
    """Returns about `count` labels, as many of every class, at least one."""
    each = max(1, round(count / config.num_classes))
    return torch.arange(config.num_classes).repeat(each)


def _class_means(
    config: ResolvedConfig,
    kind: str,
    networks: Sequence[TensorDict],
    sample: Sample,
    per_class: int,
) -> Tensor:
    images, labels = sample(per_class * config.num_classes)
    classes = config.num_classes
    sums = [group_sums(kind, net, images, labels, classes) for net in networks]
    return (torch.stack(sums)[:, :, 1:] / (len(labels) / classes)).float()


# ------------------------------------------------------------------ the fit


def steps_before(config: ResolvedConfig, stage: int) -> int:
    """Returns the generator's steps of all stages before one, counted from 0."""
    return sum(stage.steps for stage in config.stage_list[:stage])


def learning_rate(config: ResolvedConfig, step: int) -> float:
    """Returns the rate after so many steps: linear down to a tenth at the last."""
    total = steps_before(config, config.num_stages)
    share = min(step / total, 1.0) * (1 - LAST_LEARNING_RATE) if total else 0.0
    return config.generator_learning_rate * (1 - share)


class _Network:
    """One network of a fit, on the run's device, with its moving averages."""

    def __init__(
        self, config: ResolvedConfig, release: StageRelease, at: int, sample: Sample
    ) -> None:
        self.kind, net, device = release.kind, release.networks[at], config.device
        means = _class_means(config, self.kind, [net], sample, START_PER_CLASS)[0]
        self.net = {name: value.to(device) for name, value in net.items()}
        self.target, self.means = release.target[at].to(device), means.to(device)
        features = self.target.shape[1]
        self.noise = float(release.noise_std.norm()) * math.sqrt(features)
        self.norm: float | None = None

    def image_grads(self, images: Images, labels: Labels) -> Images:
        """Returns the image gradient of <class means, average - target>, scaled.

        The average is divided out, and what may be noise only is shrunk.
        """
        classes = len(self.target)
        leaf = images.detach().requires_grad_()
        features = KINDS[self.kind].features(self.net, leaf, labels)
        one_hot = F.one_hot(labels, classes).to(features)
        means = one_hot.T @ features / (len(labels) / classes)
        self.means = MEANS_DECAY * self.means + (1 - MEANS_DECAY) * means.detach()
        difference = self.means - self.target
        # The difference is a constant here: its average has the means of earlier steps.
        (grads,) = torch.autograd.grad((means * difference).sum(), leaf)
        norm = float(grads.norm()) or 1.0
        before = norm if self.norm is None else self.norm
        self.norm = NORM_DECAY * before + (1 - NORM_DECAY) * norm
        size = float(difference.norm()) or 1.0
        shrinkage = max(LEAST_SHRINKAGE, 1 - (self.noise / size) ** 2)
        return grads * (shrinkage / self.norm)


def fit(
    config: ResolvedConfig,
    generator: Generator,
    average: Generator,
    optimizer: torch.optim.Optimizer,
    releases: Sequence[StageRelease],
    is_stopped: Callable[[], bool] = lambda: False,
    start: Model | None = None,
) -> bool:
    """Fits the generator to the targets of all stages so far, after a new one.

    Deterministic: a function of its arguments and the run's seed.

    Privacy: post-processing of DP output.

    Args:
        config: the resolved configuration.
        generator: trained in place.
        average: of the generator, moved in place.
        optimizer: of the generator; it keeps the last learning rate.
        releases: of stages 1 to s; the last one is new.
        is_stopped: asked before every step; a fit that was stopped is of no use.
        start: of stages of moments; None: without public images.

    Returns:
        Whether it took all steps.
    """
    newest = len(releases) - 1
    if config.stage_list[newest].is_moments:
        model = model_of(config, releases, start)
        set_generator(config, model, generator, average)
        return True
    networks: list[_Network] = []
    for release in releases:
        if release.kind in MOMENT_KINDS:  # the generator starts from them
            continue
        for at in range(len(release.networks)):
            sample = _sampler(config, average, "stage-start", newest, len(networks))
            networks.append(_Network(config, release, at, sample))
    first = len(networks) - len(releases[-1].networks)
    odds = [OLDER_WEIGHT if at < first else 1.0 for at in range(len(networks))]
    chances = [each / sum(odds) for each in odds]
    before = steps_before(config, newest)
    generator.train()
    for step in range(before, before + config.stage_list[newest].steps):
        if is_stopped():
            return False
        _set_rate(optimizer, learning_rate(config, step))
        rng = stream(config.seed, "stage", step)
        network = networks[int(rng.choice(len(networks), p=chances))]
        labels = _balanced(config, config.stage_batch_size).to(config.device)
        advance_in_place(generator)
        z = sample_latents(config, rng, len(labels)).to(config.device)
        images = generator(z, labels)
        grads = network.image_grads(images, labels)
        optimizer.zero_grad(set_to_none=True)
        images.backward(grads)
        optimizer.step()
        update_ema(average, generator, step, config.ema_decay)
    set_rate(config, optimizer, newest + 1)
    return True


def set_rate(
    config: ResolvedConfig, optimizer: torch.optim.Optimizer, fitted: int
) -> None:
    """Gives an optimizer the learning rate that it has after so many fitted stages."""
    _set_rate(optimizer, learning_rate(config, steps_before(config, fitted)))


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
