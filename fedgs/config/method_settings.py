"""The settings of methods: those of any with two networks, and those of GS-WGAN.

A method names its class, `Method.Settings`; `fedgs.config.run_config.class_of` joins it
with what all runs share. A combination that contradicts itself is found by `problems`.
This module imports no tensor library.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedgs.config.fields import Problem, Trait, option, scalar_type
from fedgs.config.settings import GROUPS, IMAGE_SIZES, Settings, types_of
from fedgs.config.stages import (
    FEATURES,
    MASS,
    MOST_FEATURES,
    PARTS,
    Stage,
    Terms,
    read_stages,
)
from fedgs.errors import UserError

REFERENCE_WARM_START_ROUNDS = 2_000  # GS-WGAN source/config.py
# More are mistakes of a key: arrays of them overflow before they are refused.
MOST_WIDTH = 8192
MOST_STEPS = 100_000
STACKED_UP_TO = 32  # width of discriminators, on a CPU: there the loop wins above it


@dataclass(frozen=True)
class NetworkSettings(Settings):
    """Settings of a generator, a discriminator and their training."""

    generator: str = option(
        "resnet",
        "Model",
        "Generator: resnet or dcgan (the paper), the light upsample, gaussian: one "
        "Gaussian for each class, which stages determine, refined: a U-net behind it, "
        "or coded: linear layers through a short code.",
        choices=("resnet", "dcgan", "upsample", "gaussian", "refined", "coded"),
    )
    generator_dim: int = option(
        64, "Model", "Width of the generator.", at_least=1, at_most=MOST_WIDTH
    )
    discriminator_dim: int = option(
        64,
        "Model",
        "Width d of the discriminator: channels d, 2d, 4d.",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    spectral_norm: bool = option(
        True,
        "Model",
        "Spectral normalisation of the discriminator, and ReLU; else leaky ReLU.",
    )
    precision: str = option(
        "float32",
        "Runtime",
        "Of convolutions; bfloat16 is faster where processors have it, else slower.",
        choices=("float32", "bfloat16"),
    )
    latent: str = option(
        "bernoulli",
        "Model",
        "Latent z: bernoulli bits (the paper; 10 bits and 10 labels give at most "
        "10,240 distinct images), normal, or uniform on [0, 1) (PATE-GAN).",
        choices=("bernoulli", "normal", "uniform"),
    )
    latent_dim: int = option(10, "Model", "Length of z.", at_least=1)
    moment_size: int = option(
        10,
        "Training",
        "Side k of the k x k low frequencies (DCT) whose moments stages release.",
        at_least=1,
    )
    generator_learning_rate: float = option(
        1e-4, "Training", "Adam's step size for the generator.", above=0
    )
    discriminator_learning_rate: float = option(
        1e-4, "Training", "Adam's step size for the discriminators.", above=0
    )
    ema_decay: float = option(
        0.999,
        "Training",
        "Decay of the averaged generator, min(1 - 1/(t+1), ema_decay).",
        at_least=0,
        below=1,
    )
    discriminator_steps: int = option(
        5,
        "Training",
        "n_dis, discriminator steps of a round.",
        at_least=1,
        at_most=MOST_STEPS,
    )
    discriminator_batch_size: int = option(
        32,
        "Training",
        "Real and fake images of a discriminator step; drawn with replacement.",
        at_least=1,
        at_most=MOST_STEPS,
    )

    @property
    def stacked(self) -> bool:
        """Whether many discriminators train in one batched call, or in turn."""
        return self.device != "cpu" or self.discriminator_dim <= STACKED_UP_TO

    @property
    def moment_features(self) -> int:
        """Number of low frequencies of one image, over all channels.

        Those of a grey image as long as no data have been read.
        """
        return (self.image_channels or 1) * self.moment_size**2

    @property
    def num_parts(self) -> int:
        """Gaussians of each class of the generator `gaussian`."""
        return 1

    def problems(self) -> Iterator[Problem]:
        """Yields whether a refiner has nothing to be fitted to."""
        yield from super().problems()
        if self.generator == "refined" and not self.has_features:
            yield "generator", "is fitted to features; give --stages with them"


@dataclass(frozen=True)
class GsWganSettings(NetworkSettings):
    """Settings of GS-WGAN, and of the stages that a run of it may begin with."""

    discriminator_training: str = option(
        "selected",
        "GS-WGAN",
        "Whose discriminators train in a round: selected (the paper), "
        "every_round (all clients) or frozen (none after the warm start).",
        traits=("mechanism",),
        choices=("selected", "every_round", "frozen"),
    )
    batch_size: int = option(
        32,
        "GS-WGAN",
        "B, fakes answered by a release.",
        traits=("mechanism",),
        at_least=1,
    )
    dct_size: int | None = option(
        None,
        "GS-WGAN",
        "Clip and noise the k x k low frequencies (DCT) of a gradient, not its pixels "
        "(the paper); never tuned on private data.",
        at_least=1,
    )
    fakes_per_round: int | None = option(
        None,
        "GS-WGAN",
        "Size of the one set of fakes that a round's steps draw from, and those of the "
        "warm start; unset: n_dis fresh batches, the last one answered, and a warm "
        "start against an own generator that is thrown away (the paper).",
        at_least=1,
    )
    warm_start_rounds: int = option(
        REFERENCE_WARM_START_ROUNDS,
        "GS-WGAN",
        "T_w, warm-start rounds of n_dis discriminator steps.",
        at_least=0,
    )
    stages: str | None = option(
        None,
        "GS-WGAN",
        "What the first rounds release, one each, and its share of the privacy spent: "
        "means:0.25,scatter:0.25,moments:0.5 for a Gaussian of each class, ...,parts "
        "for four, ...,features for a refiner behind them, or pretrained-features, of "
        "networks of public images. Of a stage of weight w, noise_std = 2 * clip_bound "
        "* noise_multiplier / sqrt(w); without weights equal, sum 1.",
        traits=("mechanism",),
    )

    @property
    def is_warm_start_public(self) -> bool:
        """Whether the warm start is on the server's first fakes."""
        return self.fakes_per_round is not None

    @property
    def fakes_sent(self) -> int:
        """Number of fake images that one round sends to every participant."""
        if self.fakes_per_round is not None:
            return self.fakes_per_round
        steps = self.discriminator_steps * self.discriminator_batch_size
        return max(steps, self.batch_size)

    @property
    def release_shape(self) -> tuple[int, int, int, int]:
        """Shape (B, channels, side, side) of B gradients in their basis."""
        channels, _, side = self.image_shape
        side = self.dct_size or side
        return (self.batch_size, channels, side, side)

    @property
    def stage_list(self) -> tuple[Stage, ...]:
        """The stages that the run begins with, one round each; empty without."""
        return read_stages(self.stages)

    @property
    def num_parts(self) -> int:
        """Gaussians of each class of the generator `gaussian`."""
        return PARTS if any(s.kind == "parts" for s in self.stage_list) else 1

    def problems(self) -> Iterator[Problem]:
        """Yields which settings contradict each other."""
        yield from super().problems()
        fakes = self.fakes_per_round
        if fakes is not None and fakes < self.batch_size:
            least = f"batch_size = {self.batch_size}"
            yield "fakes_per_round", f"give --fakes-per-round at least {least}"
        most = self.image_size or max(IMAGE_SIZES)
        if self.dct_size is not None and self.dct_size > most:
            yield "dct_size", f"give --dct-size at most {most}, the side of an image"
        yield from release_problems(self)
        yield from _stage_problems(self)

    def terms(self, round: int) -> Terms:
        """Returns what the release of a round, from 1, is agreed to be.

        Raises:
            UserError: noise_multiplier or num_classes is unset.

        Source: docs/privacy.md, "Embedding releases".
        """
        multiplier = self.known_noise
        if not 1 <= round <= self.num_stages:
            return Terms("gradient", multiplier, self.clip_bound, self.release_shape)
        stage = self.stage_list[round - 1]
        if self.num_classes is None:
            raise UserError("num_classes is unset: give --num-classes")
        groups = stage.num_groups(self.num_classes)
        count = FEATURES[stage.kind](self.moment_features, self.latent_dim)
        shape = (1, 1, groups, 1 + count)
        multiplier /= stage.weight**0.5
        return Terms("embedding", multiplier, self.clip_bound, shape)


def release_problems(config: GsWganSettings) -> Iterator[Problem]:
    """Yields what of the stages' releases contradicts the run's."""
    if config.stages is None:
        return
    if config.client_selection != "all":
        yield (
            "stages",
            f"every client takes part in a stage, client_selection = "
            f"{config.client_selection}; give --client-selection all",
        )
    if config.num_rounds < config.num_stages:
        least = f"one for each of the {config.num_stages} stages"
        yield "num_rounds", f"give --num-rounds at least {least}"
    if config.clip_bound > MASS:
        why = f"an embedding may be as short as {MASS:g}, beyond that is only noise"
        yield "clip_bound", f"{why}; give --clip-bound at most {MASS:g}"


def _stage_problems(config: GsWganSettings) -> Iterator[Problem]:
    """Yields what is wrong with the stages; reading them refuses malformed ones."""
    if config.stages is None:
        return
    if config.public_data is not None and config.latent_dim > config.moment_features:
        most = f"the {config.moment_features} low frequencies of moment_size"
        yield "latent_dim", f"give --latent-dim at most {most}"
    most = config.image_size or max(IMAGE_SIZES)
    if config.moment_size > most:
        yield "moment_size", f"give --moment-size at most {most}, the side of an image"
    kinds = [stage.kind for stage in config.stage_list]
    kinds = kinds[:-1] if config.has_features and len(kinds) > 1 else kinds
    # Each needs what the one before found.
    first = ["means", "scatter"] if config.public_data is None else []
    in_order = [*first, *["moments"] * len(kinds)][: len(kinds)]
    if kinds[-1] == "parts" and len(kinds) > len(first):
        in_order[-1] = "parts"
    if kinds != in_order:
        order = ", ".join([*first, "any number of moments, parts once, features"])
        yield "stages", f"moments come in the order {order}; give --stages so"
    for name, kind in (("moment_size", "scatter"), ("latent_dim", "moments")):
        if FEATURES[kind](config.moment_features, config.latent_dim) > MOST_FEATURES:
            why = f"more than {MOST_FEATURES} products of two coordinates"
            yield name, f"{why}; give a smaller --{name.replace('_', '-')}"
    generator = "refined" if config.has_features else "gaussian"
    for name, needed in (("generator", generator), ("latent", "normal")):
        if getattr(config, name) != needed:
            why = "stages determine it"
            yield name, f"{why}; give --{name} {needed}"


def settings_with(trait: Trait) -> tuple[str, ...]:
    """Returns the names of the fields that have a trait, in their order."""
    specs = dataclasses.fields(GsWganSettings)
    return tuple(s.name for s in specs if trait in s.metadata.get("traits", ()))


def settings_of(*chosen: str) -> "list[dataclasses.Field[Any]]":
    """Returns the fields that people set, in their order.

    Args:
        *chosen: groups, and names; all when empty.
    """
    specs = [s for s in dataclasses.fields(GsWganSettings) if "group" in s.metadata]
    names = {*(chosen or GROUPS)}
    return [s for s in specs if {s.name, s.metadata["group"]} & names]


def field_type(name: str) -> tuple[type, bool]:
    """Returns the scalar type of a setting and whether it may be unset."""
    return scalar_type(types_of(GsWganSettings)[name])
