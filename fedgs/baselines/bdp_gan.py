"""BDP-GAN: DP-SGD on the discriminator, with an epsilon of images drawn at random.

Training is that of `dp-sgd-gan`. What differs is what is said of it: in each step the
gradients of some images, drawn from the data, tell how far one such image would have
moved the noisy sum; `fedgs.baselines.bayesian_accounting` makes an epsilon of that,
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedgs.baselines import bayesian_accounting as bayesian
from fedgs.baselines import dp_sgd, dp_sgd_gan
from fedgs.baselines.contract import SECRET, Event, Facts, Guarantee
from fedgs.config.fields import NOISE, Scalar, entry, flag
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError
from fedgs.gan.models import Generator
from fedgs.randomness import stream
from fedgs.shapes import TensorDict

COSTS = f"{SECRET}bayesian_costs"
DISTRIBUTIONAL = (
    "of an image drawn like the others: an outlier is promised nothing",
    "estimated from private gradients without noise: itself private",
)
KEPT_BACK = (
    "nobody is told the Bayesian costs in private/, which have no noise, nor the "
    "distributional and published figures that are computed from them"
)


@dataclass(frozen=True)
class Settings:
    """What BDP-GAN is asked for; defaults are the paper's for MNIST, with B = 1024."""

    noise_per_clip: float = flag(
        20.48, "Noise of a sum of gradients / clip bound.", **NOISE
    )
    clip: float = flag(0.5, "Clip bound of an image's gradient.", above=0)
    expected_batch: int = flag(
        1024, "Images of a Poisson batch on average.", at_least=1
    )
    steps: int = flag(23_437, "Steps of the discriminator: releases.", at_least=1)
    learning_rate: float = entry(1e-4, above=0)  # of Adam, for both networks
    cost_records: int = flag(
        32,
        "Images drawn in each step to estimate its Bayesian cost.",
        at_least=bayesian.LEAST_RECORDS,
    )


class BdpGan:
    """The method; see `fedgs.baselines.contract.Baseline`."""

    name = "bdp-gan"
    title = "BDP-GAN: DP-SGD with an epsilon of images drawn at random"
    unit = "record"
    central = True
    Settings = Settings
    recipe: Mapping[str, Scalar] = dp_sgd_gan.dp_sgd_gan.recipe

    def calibrated(
        self, settings: Settings, facts: Facts, target_epsilon: float, delta: float
    ) -> Settings:
        """Refuses: a Bayesian epsilon is no target of differential privacy."""
        raise UserError(
            f"target_epsilon = {target_epsilon:g}: the epsilon of bdp-gan is Bayesian, "
            "of images drawn at random, and is known after the training only; give "
            "--noise-per-clip and read both epsilons from `fedgs privacy`, or use "
            "dp-sgd-gan, which trains alike and takes a target"
        )

    def guarantees(
        self, settings: Settings, facts: Facts, events: Sequence[Event], delta: float
    ) -> list[Guarantee]:
        """Returns the Bayesian line, the classical ones, and the reference's.

        Without the private folder's costs the classical ones alone.
        """
        classical = [
            dataclasses.replace(each, conditions=(*each.conditions, KEPT_BACK))
            for each in dp_sgd.add_or_remove(facts, events, delta)
        ]
        if not all(COSTS in event for event in events):
            return classical
        costs = np.sum([event[COSTS] for event in events], axis=0)
        found = [0.0, 0.0]
        if events:
            count = len(events)
            found = [
                bayesian.bayesian_epsilon(costs, count, delta),
                bayesian.published_epsilon(costs, count, delta),
            ]
        if any(event["noise_per_clip"] == 0 for event in events):
            found = [math.inf, math.inf]
        ours, theirs = (value if math.isfinite(value) else None for value in found)
        line = Guarantee(
            "distributional",
            "record",
            "add-or-remove",
            ours,
            delta,
            "Bayesian accountant, corrected",
            DISTRIBUTIONAL,
        )
        published = dataclasses.replace(
            line,
            label="as published",
            epsilon=theirs,
            theorem="Bayesian accountant, no bound over its orders",
        )
        return [line, *classical, published]

    def trainer(
        self,
        settings: Settings,
        config: ResolvedConfig,
        data: FederatedImages,
        seed: int,
    ) -> "BdpGanTrainer":
        """Starts a training.

        Raises:
            UserError: too large a batch, or too few images for an estimate.
        """
        return BdpGanTrainer(settings, config, data, seed)

    audit_scores = staticmethod(dp_sgd.audit_scores)


class BdpGanTrainer:
    """A training of BDP-GAN under way; see `fedgs.baselines.contract.Trainer`."""

    def __init__(
        self,
        settings: Settings,
        config: ResolvedConfig,
        data: FederatedImages,
        seed: int,
    ) -> None:
        """Starts the training of `dp-sgd-gan` that does the work."""
        self.settings, self.seed = settings, seed
        config = dataclasses.replace(
            config,
            discriminator_learning_rate=settings.learning_rate,
            generator_learning_rate=settings.learning_rate,
        )
        self.training = dp_sgd_gan.dp_sgd_gan.trainer(
            dp_sgd_gan.Settings(
                noise_per_clip=settings.noise_per_clip,
                clip=settings.clip,
                expected_batch=settings.expected_batch,
                steps=settings.steps,
                optimizer="adam",
            ),
            config,
            data,
            seed,
        )
        self.num_steps = self.training.num_steps
        if settings.cost_records > len(self.training.labels):
            raise UserError(
                f"cost_records = {settings.cost_records}: an estimate draws so many of "
                f"{len(self.training.labels)} images; give fewer --cost-records, at "
                f"least {bayesian.LEAST_RECORDS}, or more images"
            )

    @property
    def generator(self) -> Generator:
        """What samples are drawn from."""
        return self.training.generator

    def step(self, index: int) -> dict[str, Any]:
        """Estimates the cost of a step, and takes it."""
        costs = self._costs(index)
        event = self.training.step(index)
        assert event is not None  # noqa: S101 - every step releases
        return event | {COSTS: costs}

    def state(self) -> TensorDict:
        """Returns everything that the training needs."""
        return self.training.state()

    def load(self, state: TensorDict) -> None:
        """Goes on from what `state` returned."""
        self.training.load(state)

    def _costs(self, index: int) -> list[float]:
        """Returns the Bayesian cost of the step for each order: private."""
        settings = self.settings
        if settings.noise_per_clip == 0:
            return [0.0] * len(bayesian.ORDERS)  # `guarantees` says unbounded
        norms = self.gradient_norms(index) / settings.clip
        moments = bayesian.log_moments(
            norms / settings.noise_per_clip, self.training.rate
        )
        return bayesian.step_cost(moments, settings.steps).tolist()

    def gradient_norms(self, index: int) -> np.ndarray:
        """Returns norms of the clipped gradients of images drawn for a step.

        Privacy: reads private data; output private.

        Returns:
            Shape (cost_records,), at most the clip bound, float64.
        """
        training, network = self.training, self.training.discriminator
        rng = stream(self.seed, "bayesian-records", index)
        count = len(training.labels)
        rows = torch.from_numpy(
            rng.choice(count, self.settings.cost_records, replace=False)
        )
        device = training.config.device
        network.zero_grad(set_to_none=True)
        with dp_sgd.quiet():
            scores = network(
                training.images[rows].to(device), training.labels[rows].to(device)
            )
            F.softplus(-scores).sum().backward()
        grads = torch.cat([p.grad_sample.flatten(1) for p in network.parameters()], 1)
        network.zero_grad(set_to_none=True)
        norms = dp_sgd.clipped(grads, self.settings.clip).norm(dim=1)
        return norms.double().cpu().numpy()


METHOD = BdpGan()
