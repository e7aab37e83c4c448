"""DP-MERF: a generator fitted to noisy class means of random Fourier features.

    phi(x) = [cos(W x), sin(W x)] / sqrt(D / 2),  W ~ N(0, 1 / s),  norm 1
    M = (1/n) sum_i phi(x_i) onehot(y_i)^T + noise,  loss = ||M - M of fakes||^2

One release of all data; or, as in the version of GS-WGAN's Table 1, one of a batch for
every step of the generator. Federated it is `fedgs.methods.dp_merf`.
`dp-merf-ae` first trains an autoencoder by DP-SGD, and its x is the code of an image.

Differs from the reference: n and the sampling rate are public, the noise is calibrated
to what is said to be the relation, and batches are Poisson's, not a shuffled list cut
into pieces. Of the autoencoder, the encoder too is trained by DP-SGD. The reference
adds noise to the decoder only; its encoder saw all images without noise, so that one
image may move every code, and the embedding has no sensitivity of 2/n. Nothing
normalises over a batch. The generator is the project's, of the same family.

Source: Harder, Adamczewski, Park, "DP-MERF: differentially private mean embeddings with
random features for practical privacy-preserving data generation", AISTATS 2021;
https://github.com/frhrdr/dp-merf.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.baselines import dp_sgd
from experiments.baselines.baseline import AuditScores, Baseline, Facts, StepEvent
from fedgs.config.fields import NOISE, Scalar, again, entry, flag
from fedgs.config.run_config import NetworkConfig
from fedgs.errors import UserError
from fedgs.gan.models import (
    CODE_DIM,
    GeneratorCoded,
    build,
    coded_decoder,
    sample_latents,
)
from fedgs.mechanism.noise import NoiseStream
from fedgs.methods.dp_merf import Embedding
from fedgs.privacy.accountant import Statement
from fedgs.privacy.gaussian import epsilon_from_mu, mu_from_epsilon
from fedgs.privacy.poisson import GAUSSIAN_THEOREM, PoissonReleases, smallest_noise
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import Images, Labels

UPDATES_AT_ONCE = 10  # of the generator, in one outer step after a single release
AUTOENCODER_CLIP = 1.0  # of its gradients; the published code's
AUTOENCODER_SHARE = 0.5  # of target_epsilon, that it alone may cost
AUDITED_FEATURES = 64  # noise and norms are the same for any number


@dataclass(frozen=True)
class CentralDPMerfSettings:
    """Settings of both methods; those without a flag are of the published code."""

    noise_multiplier: float | None = flag(
        None,
        "Standard deviation of the noise on a sum of vectors of norm 1 / 2, as in"
        " `fedgs train`.",
        **NOISE,
    )
    num_features: int = flag(
        10_000,
        "Number of random features (D); an even number.",
        at_least=2,
    )
    # s of the features' kernel:
    kernel_variance: float = entry(105.0, at_least=1e-6, at_most=1e6)
    release: str = flag(
        "once",
        "Release to make: the embedding of all data once, or that of a batch at every"
        " step.",
        choices=("once", "batches"),
    )
    sampling_rate: float = entry(1 / 120, above=0, at_most=1)  # of an image, by batches
    generator_steps: int = flag(3000, "Number of steps of the generator.", at_least=1)
    fakes_per_step: int = entry(100, at_least=1)

    @property
    def rate(self) -> float:
        """Chance of an image to be in a release of an embedding."""
        if self.release == "batches":
            return self.sampling_rate
        return 1.0

    @property
    def noise_std(self) -> float:
        """Of every number of a released sum of vectors of norm 1.

        Raises:
            UserError: the noise is unset.
        """
        return 2 * _given(self.noise_multiplier)


def _given(noise: float | None) -> float:
    if noise is None:
        remedy = "give --noise-multiplier or --target-epsilon"
        raise UserError(f"noise_multiplier is unset: {remedy}")
    return noise


@dataclass(frozen=True)
class AutoencoderDPMerfSettings(CentralDPMerfSettings):
    """What `dp-merf-ae` is asked for."""

    kernel_variance: float = again(CentralDPMerfSettings, "kernel_variance", 80.0)
    release: str = entry("batches", choices=("batches",))
    generator_steps: int = again(CentralDPMerfSettings, "generator_steps", 840)
    fakes_per_step: int = again(CentralDPMerfSettings, "fakes_per_step", 500)
    autoencoder_steps: int = flag(
        1200,
        "Number of steps of the autoencoder.",
        at_least=1,
    )
    # Its noise / its clip bound, set by a target; else noise_multiplier, as published.
    autoencoder_noise: float | None = entry(None, **NOISE)
    autoencoder_learning_rate: float = entry(1e-3, above=0)

    @property
    def encoder_noise(self) -> float:
        """Noise of the autoencoder's DP-SGD / its clip bound.

        Raises:
            UserError: the noise is unset.
        """
        if self.autoencoder_noise is not None:
            return self.autoencoder_noise
        return _given(self.noise_multiplier)


AnyDPMerfSettings = TypeVar("AnyDPMerfSettings", bound=CentralDPMerfSettings)


class CentralDPMerf(Baseline[AnyDPMerfSettings]):
    """The baseline `dp-merf`: one release or many, and the generator's fit to them.

    What is embedded, x, is the image; `AutoencoderDPMerf` embeds an image's code.
    """

    name = "dp-merf"
    title = "DP-MERF: noisy mean embedding of random Fourier features"
    unit = "record"
    Settings: ClassVar[type] = CentralDPMerfSettings
    recipe: ClassVar[Mapping[str, Scalar]] = {
        "generator": "upsample",
        "generator_dim": 8,
        "latent": "normal",
        "latent_dim": 5,
        "generator_learning_rate": 0.01,
    }

    def build(self) -> None:
        """Draws the random features.

        Raises:
            UserError: no noise, or an odd number of features.
        """
        config = self.config
        settings = self.settings
        _given(settings.noise_multiplier)
        self.images, self.labels = dp_sgd.pooled(self.data)
        self.optimizer = torch.optim.Adam(self.trained())
        if settings.num_features % 2:
            number = settings.num_features
            raise UserError(f"num_features = {number}: give an even number")
        embedding = Embedding(
            classes=config.num_classes,
            size=self.vector_size,
            num_features=settings.num_features,
            variance=settings.kernel_variance,
            seed=self.seed,
        )
        self.embedding = embedding.to(config.device)
        self.parts |= {"adam": self.optimizer, "embedding": self.embedding}
        self.num_steps = settings.generator_steps
        if settings.release == "once":
            # The release is a step of its own; each step after it is several updates.
            self.num_steps = 1 + math.ceil(settings.generator_steps / UPDATES_AT_ONCE)

    def step(self, index: int) -> dict[str, Any] | None:
        """Releases an embedding or moves the generator; by batches it does both."""
        if self.settings.release == "batches":
            event = self._release(index)
            self._update(index)
            return event
        if index == 0:
            return self._release(index)
        # Step 0 was the release.
        first = (index - 1) * UPDATES_AT_ONCE
        last = min(first + UPDATES_AT_ONCE, self.settings.generator_steps)
        for update in range(first, last):
            self._update(update)
        return None

    def _release(self, step: int) -> dict[str, Any]:
        """Makes the target of the fit: the noisy mean of embeddings."""
        settings = self.settings
        images = self.images
        labels = self.labels
        count = settings.rate * len(labels)  # expected: how many are drawn is private
        if settings.rate < 1:
            seed = self.config.noise_seed
            rows = dp_sgd.poisson_batch(seed, step, len(labels), settings.rate)
            images = images[rows]
            labels = labels[rows]
        with torch.no_grad():
            total = self.embedding.total(images, labels, self.vectors)
        # Of this step alone: noise that is used twice could be subtracted.
        source = dp_sgd.noise_source(self.config, step)
        released = dp_sgd.noisy(total, settings.noise_std, source)
        self.embedding.target = released / count
        return dp_sgd.event(settings.rate, settings.noise_std, what="mean embedding")

    def _update(self, update: int) -> None:
        """Takes one step of the generator towards the target, with classes alike."""
        config = self.config
        count = self.settings.fakes_per_step
        # As many of each class: the target has the classes' shares of its own.
        in_turn = torch.arange(count) % config.num_classes
        labels = in_turn.to(config.device)
        rng = stream(self.seed, "latent", update)
        z = sample_latents(config, rng, count).to(config.device)
        vectors = self.fake_vectors(z, labels)
        rate = config.generator_learning_rate
        self.embedding.approach(vectors, labels, self.optimizer, rate, update)

    # What x is: the image; `AutoencoderDPMerf` has the code of an image in its place.

    @property
    def vector_size(self) -> int:
        """Numbers of x."""
        return self.config.image_channels * self.config.image_size**2

    def trained(self) -> list[nn.Parameter]:
        """Returns the weights that the fit moves."""
        return list(self.net.parameters())

    def vectors(self, images: Images) -> Tensor:
        """Returns x of real images, shape (B, vector_size).

        Privacy: reads private data; output private.
        """
        return images.flatten(1)

    def fake_vectors(self, z: Tensor, labels: Labels) -> Tensor:
        """Returns x of fakes, shape (B, vector_size)."""
        return self.net(z, labels).flatten(1)

    # -------------------------------------------------------------- what it costs

    @classmethod
    def calibrated(
        cls,
        settings: Any,
        facts: Facts,
        target_epsilon: float,
        delta: float,
    ) -> Any:
        """Sets sigma for replace-one; by batches add-or-remove."""
        if settings.release == "once":  # noise / sensitivity of the relation, 1 or 2
            sigma = 1 / mu_from_epsilon(target_epsilon, delta)
        else:
            rate = settings.rate
            count = settings.generator_steps
            sigma = smallest_noise(
                lambda noise: [PoissonReleases(rate, 2 * noise, count)],
                target_epsilon,
                delta,
            )
        return dataclasses.replace(settings, noise_multiplier=sigma)

    @classmethod
    def guarantees(
        cls,
        settings: Any,
        facts: Facts,
        events: Sequence[StepEvent],
        delta: float,
    ) -> list[Statement]:
        """Returns what was released so far, first by the relation of `calibrated`."""
        if settings.release == "batches":
            lines = dp_sgd.add_or_remove(facts, events, delta)
            code = "DP-MERF by batches"
        else:
            lines = _unsampled(facts, events, delta)
            code = "DP-MERF, sigma"
        sigma = _given(settings.noise_multiplier)
        return lines + dp_sgd.published(sigma, events, delta, code)

    @classmethod
    def audit_scores(
        cls,
        settings: Any,
        facts: Facts,
        event: StepEvent,
        relation: str,
        trials: int,
    ) -> AuditScores:
        """Plays a release with a blank image of class 0, and with its neighbour.

        The neighbour has no image, or, to replace one, a blank image of class 1.
        """
        if float(event["sampling_rate"]) < 1:
            return dp_sgd.audit_scores(event, trials)
        embedding = Embedding(
            classes=2,
            size=1,
            num_features=AUDITED_FEATURES,
            variance=settings.kernel_variance,
            seed=0,
        )
        inside = embedding.sum(torch.zeros(1, 1), torch.tensor([0]))
        outside = torch.zeros_like(inside)
        if relation == "replace-one":
            outside = embedding.sum(torch.zeros(1, 1), torch.tensor([1]))
        along = inside - outside
        noise_std = float(event["noise_per_clip"])
        scores = np.empty((2, trials))
        for row, total in enumerate((outside, inside)):
            for trial in range(trials):
                source = NoiseStream(None, row, trial)
                noisy = dp_sgd.noisy(total, noise_std, source)
                scores[row, trial] = float((noisy * along).sum())
        return scores[0], scores[1]


def _unsampled(
    facts: Facts,
    events: Sequence[StepEvent],
    delta: float,
) -> list[Statement]:
    """Returns valid lines of sums over all images, to which a record adds norm 1."""
    square = 0.0
    for each in dp_sgd.releases(events):
        noise = each.noise_per_clip
        if noise:
            square += each.times / noise**2
        else:
            square = math.inf
    lines: list[Statement] = []
    for unit, size in dp_sgd.units(facts):
        for relation, moved in (("replace-one", 2 * size), ("zero-out", size)):
            mu = moved * math.sqrt(square)
            line = Statement(
                label="valid",
                unit=unit,
                relation=relation,
                epsilon=epsilon_from_mu(mu, delta),
                delta=delta,
                theorem=f"{GAUSSIAN_THEOREM}, sensitivity {moved}",
            )
            lines.append(line)
    return lines


# ------------------------------------------------------------------ on codes


class _Autoencoder(nn.Module):
    """FC 300, 100, code; and the generator's decoder back to the image."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        size = config.image_channels * config.image_size**2
        first = nn.Linear(size, 300)
        second = nn.Linear(300, 100)
        last = nn.Linear(100, CODE_DIM)
        self.encoder = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
        self.decoder = coded_decoder(config)

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))


class AutoencoderDPMerf(CentralDPMerf[AutoencoderDPMerfSettings]):
    """The baseline `dp-merf-ae`: DP-SGD of an autoencoder, then DP-MERF on its codes.

    Raises:
        UserError: the generator is not `coded`, or Opacus is not installed.
    """

    name = "dp-merf-ae"
    title = "DP-MERF on the codes of an autoencoder that DP-SGD trained"
    Settings = AutoencoderDPMerfSettings
    recipe = MappingProxyType(
        {
            **CentralDPMerf.recipe,
            "generator": "coded",
            "generator_dim": 100,
            "latent_dim": 10,
            "generator_learning_rate": 0.001,
        }
    )
    net: GeneratorCoded

    def build(self) -> None:
        """Builds the autoencoder as well."""
        config = self.config
        settings = self.settings
        if config.generator != "coded":
            remedy = "give --generator coded: its decoder is the autoencoder's"
            raise UserError(f"generator = {config.generator!r}: {remedy}")
        super().build()
        module = build(_Autoencoder, config, derived_seed(self.seed, "autoencoder"))
        self.autoencoder = module
        self.private = dp_sgd.per_sample(module.to(config.device))
        rate = settings.autoencoder_learning_rate
        self.private_optimizer = torch.optim.Adam(self.private.parameters(), lr=rate)
        self.parts |= {"autoencoder": module, "private": self.private_optimizer}
        self.num_steps += settings.autoencoder_steps

    def step(self, index: int) -> dict[str, Any] | None:
        """Trains the autoencoder first, then as DP-MERF by batches."""
        if index >= self.settings.autoencoder_steps:
            return super().step(index - self.settings.autoencoder_steps)
        return self._train_autoencoder(index)

    def _train_autoencoder(self, index: int) -> dict[str, Any]:
        """Takes one step of DP-SGD with encoder and decoder; the loss is per image."""
        settings = self.settings
        device = self.config.device
        clip = AUTOENCODER_CLIP
        rate = settings.sampling_rate
        count = len(self.images)
        at = self.num_steps + index  # embeddings draw their noise from streams before
        drawn = dp_sgd.poisson_batch(self.config.noise_seed, at, count, rate)

        def losses(rows: Tensor) -> Tensor:
            pixels = self.images[rows].flatten(1).to(device)
            logits = self.private(pixels)
            lost = F.binary_cross_entropy_with_logits(logits, pixels, reduction="none")
            return lost.sum(1)

        total = dp_sgd.clipped_sum(self.private, losses, drawn, clip)
        source = dp_sgd.noise_source(self.config, at)
        released = dp_sgd.noisy(total, settings.encoder_noise * clip, source)
        dp_sgd.set_grads(self.private, released / (rate * count))
        self.private_optimizer.step()
        self.private_optimizer.zero_grad(set_to_none=True)
        # Images are decoded as DP-SGD learned it, whatever the fit does later.
        self.net.decoder.load_state_dict(self.autoencoder.decoder.state_dict())
        return dp_sgd.event(rate, settings.encoder_noise, what="autoencoder")

    @property
    def vector_size(self) -> int:
        """Numbers of a code."""
        return CODE_DIM

    def trained(self) -> list[nn.Parameter]:
        """Returns the weights that make codes: the decoder is DP-SGD's."""
        named = self.net.named_parameters()
        return [p for name, p in named if not name.startswith("decoder.")]

    def vectors(self, images: Images) -> Tensor:
        """Returns the codes of real images.

        Privacy: reads private data; output private.
        """
        return self.autoencoder.encoder(images.flatten(1))

    def fake_vectors(self, z: Tensor, labels: Labels) -> Tensor:
        """Returns the codes that fakes are decoded from."""
        return self.net.codes(z, labels)

    @classmethod
    def calibrated(
        cls,
        settings: Any,
        facts: Facts,
        target_epsilon: float,
        delta: float,
    ) -> Any:
        """Sets both noises: first the autoencoder's by its share, then the rest."""
        rate = settings.sampling_rate
        count = settings.generator_steps

        def first(noise: float) -> PoissonReleases:
            return PoissonReleases(rate, noise, settings.autoencoder_steps)

        # Two noises and one target: the autoencoder's is found by its share alone.
        share = AUTOENCODER_SHARE * target_epsilon
        encoder = smallest_noise(lambda noise: [first(noise)], share, delta)
        sigma = smallest_noise(
            lambda noise: [first(encoder), PoissonReleases(rate, 2 * noise, count)],
            target_epsilon,
            delta,
        )
        return dataclasses.replace(
            settings,
            noise_multiplier=sigma,
            autoencoder_noise=encoder,
        )

    @classmethod
    def guarantees(
        cls,
        settings: Any,
        facts: Facts,
        events: Sequence[StepEvent],
        delta: float,
    ) -> list[Statement]:
        """Returns what was released so far, by autoencoder and embeddings together."""
        lines = dp_sgd.add_or_remove(facts, events, delta)
        sigma = _given(settings.noise_multiplier)
        if settings.encoder_noise != sigma:  # the published code has one sigma
            return lines
        return lines + dp_sgd.published(sigma, events, delta, "DP-MERF AE")
