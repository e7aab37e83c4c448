"""Conditional GANs with DP-SGD on the discriminator: DP-CGAN, and a strong recipe.

    D   sum over a Poisson batch of clip(grad softplus(-D(x, y)), C) + N(0, sigma^2 C^2)
        plus the fakes' clipped gradients, without noise: fakes are DP output already
    G   softplus(-D(G(z, y), y)) by the private D: post-processing

`dp-sgd-gan` is DP-CGAN as GS-WGAN's Table 1 has it; `dp-sgd-gan-strong` the recipe of
later work: many steps of D for one of G, large batches, a small clip bound, an average
of G.

Differs from the reference: one clip norm over all weights (DP-CGAN clips each of its
four variables to C, which makes the sensitivity 2 C); sigma, not sigma C, is accounted;
batches are Poisson's; fakes have uniform labels of their own, because DP-CGAN's are the
private batch's. The networks are the project's: nothing normalises over a batch.

Source: Torkzadehmahani, Kairouz, Paten, "DP-CGAN", CVPR workshops 2019,
https://github.com/reihaneh-torkzadehmahani/DP-CGAN; Bie, Kamath, Zhang, "Private GANs,
revisited", TMLR 2023, https://github.com/alexbie98/dpgan-revisit; Gong et
al., "DPImageBench", 2025 (the strong recipe).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from experiments.baselines import dp_sgd
from experiments.baselines.baseline import (
    AuditScores,
    Baseline,
    Facts,
    StepEvent,
    descend,
)
from fedgs.config.fields import NOISE, Scalar, again, entry, flag
from fedgs.errors import UserError
from fedgs.gan.models import Discriminator, build, update_ema
from fedgs.privacy.accountant import Statement
from fedgs.privacy.oracle import poisson_rdp_epsilon
from fedgs.privacy.poisson import PoissonReleases, smallest_noise
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import Images, Labels, Scores

BETA2 = 0.999  # Adam's default
SGD_DECAY = 0.48  # DP-CGAN's rate: linear from 0.1 to 0.052, in so many steps
SGD_DECAY_STEPS = 10_000


@dataclass(frozen=True)
class DPSGDGanSettings:
    """What `dp-sgd-gan` is asked for; learning rates are RunConfig's."""

    noise_per_clip: float | None = flag(
        None,
        "Noise on the discriminator's gradients: its standard deviation divided "
        "by the clip bound.",
        **NOISE,
    )
    clip: float = flag(1.1, "Clip bound of the gradient of one image.", above=0)
    expected_batch: int = flag(
        600,
        "Average number of images in a Poisson batch.",
        at_least=1,
    )
    steps: int = flag(
        30_000,
        "Number of steps of the discriminator; each is a release.",
        at_least=1,
    )
    steps_per_generator_step: int = flag(
        1,
        "Number of discriminator steps for each step of the generator.",
        at_least=1,
    )
    optimizer: str = entry("sgd", choices=("sgd", "adam"))  # of the discriminator
    beta1: float = entry(0.9, at_least=0, below=1)  # of Adam, for both networks


@dataclass(frozen=True)
class StrongDPSGDGanSettings(DPSGDGanSettings):
    """What `dp-sgd-gan-strong` is asked for."""

    clip: float = again(DPSGDGanSettings, "clip", 1e-3)
    expected_batch: int = again(DPSGDGanSettings, "expected_batch", 4096)
    steps: int = again(DPSGDGanSettings, "steps", 2200)
    steps_per_generator_step: int = again(
        DPSGDGanSettings, "steps_per_generator_step", 5
    )
    optimizer: str = again(DPSGDGanSettings, "optimizer", "adam")
    beta1: float = again(DPSGDGanSettings, "beta1", 0.0)


AnyDPSGDSettings = TypeVar("AnyDPSGDSettings", bound=DPSGDGanSettings)


class LayeredDiscriminator(Discriminator):
    """The project's discriminator, by calls of torch's layers: Opacus watches those."""

    convolution = nn.Conv2d

    def forward(self, images: Images, labels: Labels) -> Scores:
        """Returns scores (B,); see `Discriminator.forward`."""
        h = images
        for conv in (self.conv1, self.conv2, self.conv3):
            h = F.leaky_relu(conv(h), self.slope)
        h = h.flatten(1)
        scores = self.linear(h).squeeze(1)
        # Projection: how well the image fits its label.
        fit = self.embedding(labels) * h
        return scores + fit.sum(1)


class DPSGDGan(Baseline[AnyDPSGDSettings]):
    """The baseline `dp-sgd-gan`: DP-CGAN."""

    name = "dp-sgd-gan"
    title = "DP-CGAN with one global clip: DP-SGD on the discriminator"
    unit = "record"
    Settings: ClassVar[type] = DPSGDGanSettings
    recipe: ClassVar[Mapping[str, Scalar]] = {
        "generator": "upsample",
        "generator_dim": 16,
        "discriminator_dim": 16,
        "spectral_norm": False,
        "latent": "normal",
        "latent_dim": 100,
        "discriminator_learning_rate": 0.1,
        "generator_learning_rate": 0.001,
        "ema_decay": 0.0,
    }
    is_dp_cgan: ClassVar[bool] = True

    def build(self) -> None:
        """Builds the networks.

        Raises:
            UserError: no noise, too large a batch, or Opacus is not installed.
        """
        config = self.config
        settings = self.settings
        if settings.noise_per_clip is None:
            remedy = "give --noise-per-clip or --target-epsilon"
            raise UserError(f"noise_per_clip is unset: {remedy}")
        self.noise_per_clip = settings.noise_per_clip
        self.images, self.labels = dp_sgd.pooled(self.data)
        self.rate = sampling_rate(settings, len(self.labels))
        self.num_steps = settings.steps
        # Samples are drawn from the average, which changes less from step to step.
        self.average = self.new_generator()
        # Opacus knows torch's own layers, not their spectral norms.
        plain = dataclasses.replace(config, spectral_norm=False)
        seed = derived_seed(self.seed, "discriminator")
        module = build(LayeredDiscriminator, plain, seed).to(config.device)
        self.discriminator = dp_sgd.per_sample(module)
        betas = (settings.beta1, BETA2)
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), config.generator_learning_rate, betas
        )
        self.private_optimizer = self._private_optimizer(betas)
        self.parts |= {
            "average": self.average,
            "discriminator": self.discriminator,
            "adam": self.optimizer,
            "private.adam": self.private_optimizer,
        }

    def _private_optimizer(self, betas: tuple[float, float]) -> Optimizer:
        weights = self.discriminator.parameters()
        rate = self.config.discriminator_learning_rate
        if self.settings.optimizer == "sgd":
            return torch.optim.SGD(weights, rate)
        return torch.optim.Adam(weights, rate, betas)

    def step(self, index: int) -> dict[str, Any]:
        """Takes one step of the discriminator, and one of the generator if due."""
        self._train_discriminator(index)
        taken = index + 1
        if taken % self.settings.steps_per_generator_step == 0:
            self._train_generator(index)
        return dp_sgd.event(
            self.rate,
            self.noise_per_clip,
            what="discriminator",
            clip_bound=self.settings.clip,
        )

    def _train_discriminator(self, index: int) -> None:
        config = self.config
        clip = self.settings.clip
        count = self.settings.expected_batch
        rng = stream(self.seed, "discriminator-fakes", index)
        fakes, fake_labels = self.fakes(rng, count)
        num_records = len(self.labels)
        rows = dp_sgd.poisson_batch(config.noise_seed, index, num_records, self.rate)

        def fake_losses(at: Tensor) -> Tensor:
            return F.softplus(self.discriminator(fakes[at], fake_labels[at]))

        real = dp_sgd.clipped_sum(self.discriminator, self.real_losses, rows, clip)
        # Clipped alike, although they need it not: else fakes would outweigh images.
        every = torch.arange(len(fakes))
        fake = dp_sgd.clipped_sum(self.discriminator, fake_losses, every, clip)
        source = dp_sgd.noise_source(config, index)
        released = dp_sgd.noisy(real, self.noise_per_clip * clip, source)
        gradient = released + fake
        # By the expected number: how many were drawn is private.
        dp_sgd.set_grads(self.discriminator, gradient / count)
        # Computed from the step, so that a resumed training has the same rate.
        if self.settings.optimizer == "sgd":
            progress = min(index / SGD_DECAY_STEPS, 1.0)
            decay = 1 - SGD_DECAY * progress
            for group in self.private_optimizer.param_groups:
                group["lr"] = config.discriminator_learning_rate * decay
        self.private_optimizer.step()
        self.private_optimizer.zero_grad(set_to_none=True)

    def real_losses(self, rows: Tensor) -> Tensor:
        """Returns the discriminator's losses of records, shape (records,)."""
        images = self.images[rows].to(self.config.device)
        labels = self.labels[rows].to(self.config.device)
        return F.softplus(-self.discriminator(images, labels))

    def _train_generator(self, index: int) -> None:
        """Takes a step of the generator against the private discriminator."""
        rng = stream(self.seed, "generator-fakes", index)
        z, labels = self.latents(rng, self.settings.expected_batch)
        # Opacus would keep a gradient of every fake, which nobody needs here.
        self.discriminator.disable_hooks()
        fakes = self.net(z, labels)
        scores = self.discriminator(fakes, labels)
        loss = F.softplus(-scores).mean()
        with dp_sgd.quiet():
            descend(self.optimizer, loss)
        self.discriminator.enable_hooks()
        self.discriminator.zero_grad(set_to_none=True)
        done = index // self.settings.steps_per_generator_step
        update_ema(self.average, self.net, done, self.config.ema_decay)

    @classmethod
    def calibrated(
        cls,
        settings: Any,
        facts: Facts,
        target_epsilon: float,
        delta: float,
    ) -> Any:
        """Sets the noise for a record that is added or removed.

        Raises:
            UserError: a batch would be larger than the data.
        """
        rate = sampling_rate(settings, facts.num_records)
        noise = smallest_noise(
            lambda noise: [PoissonReleases(rate, noise, settings.steps)],
            target_epsilon,
            delta,
        )
        return dataclasses.replace(settings, noise_per_clip=noise)

    @classmethod
    def guarantees(
        cls,
        settings: Any,
        facts: Facts,
        events: Sequence[StepEvent],
        delta: float,
    ) -> list[Statement]:
        """Returns what was released so far; published by GS-WGAN's table and the code.

        DP-CGAN's code accounts sigma C in the place of sigma.
        """
        lines = dp_sgd.add_or_remove(facts, events, delta)
        accounted = settings.noise_per_clip or 0.0
        # The figures below are what others printed of such a run: none is a guarantee.
        what = "sigma"
        if cls.is_dp_cgan:
            lines += dp_sgd.published(accounted, events, delta, "GS-WGAN, Table 1")
            accounted *= settings.clip
            what = "sigma C"
        made = dp_sgd.releases(events)
        if len(made) == 1 and accounted:
            rate = made[0].rate
            epsilon = poisson_rdp_epsilon(accounted, rate, made[0].times, delta)
            line = Statement(
                label="as published",
                unit="record",
                relation="add-or-remove",
                epsilon=epsilon,
                delta=delta,
                theorem=f"RDP of Poisson batches with {what}",
            )
            lines.append(line)
        return lines

    @classmethod
    def audit_scores(
        cls,
        settings: Any,
        facts: Facts,
        event: StepEvent,
        relation: str,
        trials: int,
    ) -> AuditScores:
        """Plays one release with and without a record whose gradient is clipped."""
        return dp_sgd.audit_scores(event, trials)


class StrongDPSGDGan(DPSGDGan[StrongDPSGDGanSettings]):
    """The baseline `dp-sgd-gan-strong`: the recipe of later work."""

    name = "dp-sgd-gan-strong"
    title = (
        "DP-SGD GAN, strong recipe: many discriminator steps, large batches, small clip"
    )
    Settings = StrongDPSGDGanSettings
    recipe = MappingProxyType(
        {
            **DPSGDGan.recipe,
            "discriminator_learning_rate": 5e-4,
            "generator_learning_rate": 2e-4,
            "ema_decay": 0.999,
        }
    )
    is_dp_cgan = False


def sampling_rate(settings: DPSGDGanSettings, num_records: int) -> float:
    """Returns the chance of a record to be in a batch.

    Raises:
        UserError: a batch would be larger than the data.
    """
    if settings.expected_batch > num_records:
        remedy = (
            f"give --expected-batch at most {num_records}, the images that there are"
        )
        raise UserError(f"expected_batch = {settings.expected_batch}: {remedy}")
    return settings.expected_batch / num_records
