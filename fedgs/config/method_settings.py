"""The settings of methods: those of any with two networks, and those of GS-WGAN.

A method names its class, `Method.Settings`; `fedgs.config.run_config.class_of` joins it
with what all runs share. A combination that contradicts itself is found by `problems`.
This module imports no tensor library.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedgs.config.feature_settings import (
    GroupMeansSettings,
    MomentSettings,
    PretrainedSettings,
)
from fedgs.config.fields import Problem, Trait, option, scalar_type
from fedgs.config.settings import GROUPS, IMAGE_SIZES, MOST_WIDTH, Settings, types_of
from fedgs.config.terms import Terms

REFERENCE_WARM_START_ROUNDS = 2_000  # GS-WGAN source/config.py
# More are mistakes of a key: arrays of them overflow before they are refused.
MOST_STEPS = 100_000
STACKED_UP_TO = 32  # width of discriminators, on a CPU: there the loop wins above it


@dataclass(frozen=True)
class NetworkSettings(Settings):
    """Settings of discriminators, and of training a generator against them."""

    discriminator_dim: int = option(
        64,
        "Model",
        "Width d of the discriminator, whose layers have d, 2d and 4d channels.",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    spectral_norm: bool = option(
        True,
        "Model",
        "Normalise the discriminator spectrally, and use ReLU in it; without, it uses"
        " leaky ReLU.",
    )
    generator_learning_rate: float = option(
        1e-4,
        "Training",
        "Step size of the generator's optimizer.",
        above=0,
    )
    discriminator_learning_rate: float = option(
        1e-4,
        "Training",
        "Step size of the discriminators' optimizer.",
        above=0,
    )
    ema_decay: float = option(
        0.999,
        "Training",
        "Largest decay of the generator's moving average: step t uses min(1 - "
        "1/(t+1), ema_decay).",
        at_least=0,
        below=1,
    )
    discriminator_steps: int = option(
        5,
        "Training",
        "Number of discriminator steps in a round (n_dis).",
        at_least=1,
        at_most=MOST_STEPS,
    )
    discriminator_batch_size: int = option(
        32,
        "Training",
        "Number of real and of fake images in a discriminator step, drawn with "
        "replacement.",
        at_least=1,
        at_most=MOST_STEPS,
    )

    @property
    def stacked(self) -> bool:
        """Whether many discriminators train in one batched call, or in turn."""
        return self.device != "cpu" or self.discriminator_dim <= STACKED_UP_TO


@dataclass(frozen=True)
class GsWganSettings(NetworkSettings):
    """Settings of GS-WGAN."""

    discriminator_training: str = option(
        "selected",
        "GS-WGAN",
        "Clients whose discriminators train in a round: selected (as in the paper), "
        "every_round (all clients) or frozen (none after the warm start).",
        traits=("mechanism",),
        choices=("selected", "every_round", "frozen"),
    )
    batch_size: int = option(
        32,
        "GS-WGAN",
        "Number of fake images that a release answers (B).",
        traits=("mechanism",),
        at_least=1,
    )
    dct_size: int | None = option(
        None,
        "GS-WGAN",
        "Number k: clip and noise the k x k low frequencies (DCT) of a gradient. "
        "Default: clip and noise its pixels, as in the paper. Never choose it by "
        "private results.",
        at_least=1,
    )
    fakes_per_round: int | None = option(
        None,
        "GS-WGAN",
        "Number of fake images that the server sends in a round; all discriminator "
        "steps, and the warm start, draw from them. Default: a fresh batch for each "
        "step, and a warm start against a generator of the client's own, as in the "
        "paper.",
        at_least=1,
    )
    warm_start_rounds: int = option(
        REFERENCE_WARM_START_ROUNDS,
        "GS-WGAN",
        "Number of warm-start rounds, each of discriminator_steps steps (T_w).",
        at_least=0,
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
        # A fresh batch for each step. The last fakes are also the ones that are
        # answered, so there are at least as many of them.
        steps = self.discriminator_steps * self.discriminator_batch_size
        return max(steps, self.batch_size)

    @property
    def release_shape(self) -> tuple[int, int, int, int]:
        """Shape (B, channels, side, side) of B gradients in their basis."""
        channels, _, side = self.image_shape
        # With the low frequencies alone, a gradient has only k x k numbers to noise.
        side = self.dct_size or side
        return (self.batch_size, channels, side, side)

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

    def phase_terms(self, round: int) -> Terms:
        """Returns B gradients of the fakes, each clipped to C.

        Source: GS-WGAN, Algorithm 2, line 32; docs/privacy.md, "The mechanism".
        """
        return self._terms

    # Made once: all rounds of a phase have the same, and a run may have a million.
    @cached_property
    def _terms(self) -> Terms:
        return Terms(
            release="gradient",
            noise_multiplier=self.known_noise,
            clip_bound=self.clip_bound,
            shape=self.release_shape,
        )


@dataclass(frozen=True)
class KnownSettings(
    GsWganSettings, MomentSettings, PretrainedSettings, GroupMeansSettings
):
    """All settings that people set, whichever methods a run has; for their fields."""


def settings_with(trait: Trait) -> tuple[str, ...]:
    """Returns the names of the fields that have a trait, in their order."""
    names: list[str] = []
    for spec in dataclasses.fields(KnownSettings):
        if trait in spec.metadata.get("traits", ()):
            names.append(spec.name)
    return tuple(names)


def settings_of(*chosen: str) -> "list[dataclasses.Field[Any]]":
    """Returns the fields that people set, in their order.

    Args:
        *chosen: groups, and names; all when empty.
    """
    wanted = set(chosen or GROUPS)
    found: list[dataclasses.Field[Any]] = []
    for spec in dataclasses.fields(KnownSettings):
        group = spec.metadata.get("group")
        # Fields without a group are set by the code, not by people.
        if group is not None and (spec.name in wanted or group in wanted):
            found.append(spec)
    return found


def field_type(name: str) -> tuple[type, bool]:
    """Returns the scalar type of a setting and whether it may be unset."""
    if name == "phases":
        return str, False  # one text, as `fedgs.config.phases` reads it
    return scalar_type(types_of(KnownSettings)[name])
