"""BDP-GAN: DP-SGD on the discriminator, with an epsilon of images drawn at random.

Training is that of `dp-sgd-gan`. What differs is what is said of it: in each step the
gradients of some images, drawn from the data, tell how far one such image would have
moved the noisy sum; `baselines.bayesian_accounting` makes an epsilon of that,
with its repairs and what it does not promise. The classical epsilon of the same run
stands beside it, and is the one to rely on.

The line is labelled distributional, and is no target: whoever asks for differential
privacy gets the classical one. The costs are computed from private gradients without
noise, so they tell of the images: they stay in the run's private folder.

Differs from the reference:
    - Each image's gradient is clipped, not the batch's: clipping a batch bounds no
      image's part but by 2 C, and leaves no classical epsilon to fall back on (the
      paper reports 1e7). At the paper's noise on the mean of a batch, 0.01, this makes
      a noise multiplier of 0.01 B / C.
    - B is unpublished; 1024 is that of the accountant's demo.
    - Networks and loss are those of `dp-sgd-gan`: no SELU, no Wasserstein critic.
    - The annotator is no part of it: fakes are made for given labels.

Source: Triastcyn, Faltings, "Generating higher-fidelity synthetic datasets with privacy
guarantees", Algorithms 15, 2022, section 2; the accountant's reference
https://github.com/AlekseiTriastcyn/bayesian-differential-privacy.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from experiments.baselines import bayesian_accounting as bayesian
from experiments.baselines import dp_sgd
from experiments.baselines.baseline import SECRET, Facts, StepEvent
from experiments.baselines.dp_sgd_gan import DPSGDGan, DPSGDGanSettings
from fedgs.config.fields import again, entry
from fedgs.errors import UserError
from fedgs.privacy.accountant import Statement
from fedgs.randomness import secret, stream

BAYESIAN_COSTS = f"{SECRET}bayesian_costs"
# Images drawn in each step to estimate its cost; with 8, Student's quantile is 382.
COST_RECORDS = 32
_DISTRIBUTIONAL_CONDITIONS = (
    "of an image drawn like the others: an outlier is promised nothing",
    "estimated from private gradients without noise: itself private",
)
_KEPT_BACK = (
    "nobody is told the Bayesian costs in private/, which have no noise, nor the "
    "distributional and published figures that are computed from them"
)


@dataclass(frozen=True)
class BdpGanSettings(DPSGDGanSettings):
    """What BDP-GAN is asked for; defaults are the paper's for MNIST, with B = 1024."""

    noise_per_clip: float | None = again(DPSGDGanSettings, "noise_per_clip", 20.48)
    clip: float = again(DPSGDGanSettings, "clip", 0.5)
    expected_batch: int = again(DPSGDGanSettings, "expected_batch", 1024)
    steps: int = again(DPSGDGanSettings, "steps", 23_437)
    steps_per_generator_step: int = entry(1, at_least=1)
    optimizer: str = again(DPSGDGanSettings, "optimizer", "adam")


class BdpGan(DPSGDGan[BdpGanSettings]):
    """The baseline `bdp-gan`."""

    name = "bdp-gan"
    title = "BDP-GAN: DP-SGD with an epsilon of images drawn at random"
    Settings = BdpGanSettings
    recipe = MappingProxyType(
        {
            **DPSGDGan.recipe,
            "discriminator_learning_rate": 1e-4,
            "generator_learning_rate": 1e-4,
        }
    )

    def build(self) -> None:
        """Builds the networks.

        Raises:
            UserError: too large a batch, or too few images for an estimate.
        """
        count = self.data.sizes.sum()
        if count < COST_RECORDS:
            raise UserError(
                f"data has {count} images: each step's Bayesian cost is estimated from "
                f"{COST_RECORDS} of them; give more images"
            )
        super().build()

    def step(self, index: int) -> dict[str, Any]:
        """Estimates the cost of a step, and takes it."""
        # Before the step, because the estimate is of the network that takes it.
        costs = self._costs(index)
        event = super().step(index)
        return {BAYESIAN_COSTS: costs} | event

    def _costs(self, index: int) -> list[float]:
        """Returns the Bayesian cost of the step for each order: private."""
        if self.noise_per_clip == 0:
            return [0.0] * len(bayesian.ORDERS)  # `guarantees` says unbounded
        norms = self.gradient_norms(index)
        # In standard deviations of the noise on the sum.
        distances = norms / self.settings.clip / self.noise_per_clip
        moments = bayesian.log_moments(distances, self.rate)
        return bayesian.step_cost(moments, self.settings.steps).tolist()

    def gradient_norms(self, index: int) -> np.ndarray:
        """Returns norms of the clipped gradients of images drawn for a step.

        Privacy: reads private data; output private.

        Returns:
            Shape (COST_RECORDS,), at most the clip bound, float64.
        """
        seed = self.config.noise_seed
        if seed is None:
            # The estimate supposes a fair draw: a public seed could have been chosen.
            seed = secret()
        rng = stream(seed, "bayesian-records", index)
        drawn = rng.choice(len(self.labels), COST_RECORDS, replace=False)
        grads = dp_sgd.clipped_rows(
            self.discriminator,
            self.real_losses,
            torch.from_numpy(drawn),
            self.settings.clip,
        )
        norms = torch.cat(list(grads)).norm(dim=1)
        return norms.double().cpu().numpy()

    @classmethod
    def calibrated(
        cls,
        settings: BdpGanSettings,
        facts: Facts,
        target_epsilon: float,
        delta: float,
    ) -> BdpGanSettings:
        """Refuses: a Bayesian epsilon is no target of differential privacy."""
        raise UserError(
            f"target_epsilon = {target_epsilon:g}: the epsilon of bdp-gan is Bayesian, "
            "of images drawn at random, and is known after the training only; give "
            "--noise-per-clip and read both epsilons from `fedgs privacy`, or use "
            "dp-sgd-gan, which trains alike and takes a target"
        )

    @classmethod
    def guarantees(
        cls,
        settings: BdpGanSettings,
        facts: Facts,
        events: Sequence[StepEvent],
        delta: float,
    ) -> list[Statement]:
        """Returns the Bayesian line, the classical ones, and the reference's.

        Without the private folder's costs the classical ones alone.
        """
        classical: list[Statement] = []
        for each in dp_sgd.add_or_remove(facts, events, delta):
            conditions = (*each.conditions, _KEPT_BACK)
            line = dataclasses.replace(each, conditions=conditions)
            classical.append(line)
        # Whoever was handed the run without its private folder has no costs.
        if not all(BAYESIAN_COSTS in event for event in events):
            return classical
        costs = np.sum([event[BAYESIAN_COSTS] for event in events], axis=0)
        # Without noise anybody could tell the image; of no step nothing was told.
        if any(event["noise_per_clip"] == 0 for event in events):
            ours = math.inf
            theirs = math.inf
        elif events:
            ours = bayesian.bayesian_epsilon(costs, len(events), delta)
            theirs = bayesian.published_epsilon(costs, len(events), delta)
        else:
            ours = 0.0
            theirs = 0.0
        line = Statement(
            label="distributional",
            unit="record",
            relation="add-or-remove",
            epsilon=ours,
            delta=delta,
            theorem="Bayesian accountant, corrected",
            conditions=_DISTRIBUTIONAL_CONDITIONS,
        )
        published = dataclasses.replace(
            line,
            label="as published",
            epsilon=theirs,
            theorem="Bayesian accountant, no bound over its orders",
        )
        return [line, *classical, published]
