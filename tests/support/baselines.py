"""Small trainings of every baseline, on scikit-learn's digits."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedgs.baselines import run as frame
from fedgs.baselines.contract import Guarantee
from fedgs.baselines.run import Asked, BaselineRun
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.models import build_generator
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.gaussian import epsilon_from_mu
from runs import Report, ignore

# One line for each method and each kind of training of it that differs: seconds each.
FEW_FEATURES = {"noise_multiplier": 1.0, "num_features": 64}
FEW_STEPS = {"steps": 3, "batch_size": 4}
FEW_STEPS |= {"discriminator_steps": 2, "generator_steps": 2}
ONE_BATCH = {"steps": 3, "batch_size": 4, "discriminator_steps": 1}
FEW_BATCHES = {"noise_per_clip": 1.0, "expected_batch": 12, "steps": 4}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "bdp-gan": ("bdp-gan", FEW_BATCHES),
    "dp-merf": ("dp-merf", FEW_FEATURES | {"generator_steps": 25}),
    "dp-merf by batches": (
        "dp-merf",
        FEW_FEATURES | {"release": "batches", "generator_steps": 4},
    ),
    "dp-merf federated": (
        "dp-merf",
        FEW_FEATURES | {"federated": True, "generator_steps": 25},
    ),
    "dp-merf-ae": (
        "dp-merf-ae",
        FEW_FEATURES | {"autoencoder_steps": 4, "generator_steps": 4},
    ),
    "dp-sgd-gan": ("dp-sgd-gan", FEW_BATCHES),
    "dp-sgd-gan-strong": (
        "dp-sgd-gan-strong",
        FEW_BATCHES | {"steps_per_generator_step": 2},
    ),
    "fedavg-gan": ("fedavg-gan", FEW_STEPS),
    "fedavg-gan sampled": (
        "fedavg-gan",
        FEW_STEPS | {"clients_per_round": 5, "relation": "zero-out"},
    ),
    "g-pate": ("g-pate", {"steps": 3, "batch_size": 4, "teacher_batch_size": 4}),
    "pate-gan": ("pate-gan", {"steps": 3, "batch_size": 4, "teacher_batch_size": 4}),
    "wgan-gp": ("wgan-gp", ONE_BATCH),
}
DIGITS: dict[str, Any] = {
    "data": "digits",
    "image_size": 16,
    "num_clients": 12,
    "generator_dim": 4,
    "discriminator_dim": 4,
    "seed": 3,
    "noise_seed": 5,
    "test_fraction": 0.3,
}


def small_run(
    name: str, output: Path, asked: Asked | None = None, **settings: Any
) -> tuple[BaselineRun, FederatedImages]:
    """Makes the folder of a training of `SMALL`, by its key."""
    method, own = SMALL.get(name, (name, {}))
    if asked is None:
        asked = Asked(max_images_per_user=40)
    given = DIGITS | {"output": str(output)} | settings
    return frame.new_run(method, own, asked, given)


def train(
    run: BaselineRun,
    data: FederatedImages,
    report: Report = ignore,
    stop: threading.Event | None = None,
) -> None:
    """Trains from what is on the disk."""
    frame.train(run, data, report, stop or threading.Event())


class Steps:
    """Four steps that each release a noisy vector; the method `STEPS`."""

    num_steps = 4

    def __init__(self, config: ResolvedConfig) -> None:
        self.config, self.released = config, torch.zeros(2)
        self.generator = build_generator(config, 0)

    def step(self, index: int) -> dict[str, Any]:
        noise = NoiseStream(self.config.noise_seed, 0, index)
        self.released += torch.from_numpy(noise.normal((2,), 1.0)).float()
        return {"kind": "vector", "noise_per_clip": 1.0}

    def state(self) -> dict[str, torch.Tensor]:
        return {"released": self.released}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.released = state["released"]


@dataclass(frozen=True)
class NoSettings:
    """Of a method without any."""


class StepsMethod:
    """A method for tests of the frame: four Gaussian releases, mu = 2."""

    name, title, unit, central = "steps", "Four releases", "record", True
    Settings, recipe = NoSettings, {"generator": "upsample"}

    def calibrated(self, settings: Any, *asked: Any) -> Any:
        return settings

    def guarantees(self, settings: Any, facts: Any, events: Any, delta: float) -> Any:
        epsilon = epsilon_from_mu(len(events) ** 0.5, delta)
        return [Guarantee("valid", "record", "replace-one", epsilon, delta, "exact")]

    def trainer(self, settings: Any, config: Any, data: Any, seed: int) -> Steps:
        return Steps(config)


STEPS = StepsMethod()
