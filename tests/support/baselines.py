"""Small trainings of every baseline, on scikit-learn's digits."""

import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.baselines.baseline import Baseline
from experiments.baselines.baseline_run import BaselineRun, new_run
from fedgs.data.federated import FederatedImages
from fedgs.privacy.accountant import Statement
from fedgs.privacy.gaussian import epsilon_from_mu
from runs import Report, ignore

FEW_FEATURES = {"noise_multiplier": 1.0, "num_features": 64, "generator_steps": 4}
MORE_STEPS = {"generator_steps": 25}
FEW_STEPS = {"steps": 3, "batch_size": 4, "discriminator_steps": 2}
FEW_BATCHES = {"noise_per_clip": 1.0, "expected_batch": 12, "steps": 4}
FEW_VOTES = {"steps": 3, "batch_size": 4, "teacher_batch_size": 4}
# One line for each method and each kind of training of it that differs: seconds each.
# The first word is the method.
SMALL: dict[str, dict[str, Any]] = {
    "bdp-gan": FEW_BATCHES,
    "dp-merf": FEW_FEATURES | MORE_STEPS,
    "dp-merf by batches": FEW_FEATURES | {"release": "batches"},
    "dp-merf-ae": FEW_FEATURES | {"autoencoder_steps": 4},
    "dp-sgd-gan": FEW_BATCHES,
    "dp-sgd-gan-strong": FEW_BATCHES | {"steps_per_generator_step": 2},
    "g-pate": FEW_VOTES,
    "pate-gan": FEW_VOTES,
    "wgan-gp": FEW_STEPS | {"discriminator_steps": 1},
}
FEW_IMAGES: dict[str, Any] = {"max_images_per_user": 40}
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
    name: str, output: Path, asked: Mapping[str, Any] = FEW_IMAGES, **settings: Any
) -> tuple[BaselineRun, FederatedImages]:
    """Makes the folder of a training of `SMALL`, by its key, with other settings."""
    method = name.split()[0]
    given = DIGITS | SMALL.get(name, {}) | dict(asked) | settings
    return new_run(method, given | {"output": str(output)})


def small_trainer(name: str, folder: Path, **settings: Any) -> Any:
    """Returns the trainer of such a training, which has not begun."""
    run, data = small_run(name, folder / "run", **settings)
    return run.training(data)


def train(run: BaselineRun, data, report: Report = ignore, stop=None) -> None:
    """Trains from what is on the disk."""
    run.train(data, report, stop or threading.Event())


class Steps(Baseline[Any]):
    """A method for tests of the loop: four Gaussian releases, mu = 2."""

    name = "steps"
    title = "Four releases"
    unit = "record"
    Settings = dataclasses.make_dataclass("NoSettings", [])
    recipe: ClassVar[Mapping[str, Any]] = {"generator": "upsample"}

    @classmethod
    def calibrated(
        cls, settings: Any, facts: Any, target_epsilon: float, delta: float
    ) -> Any:
        return settings

    @classmethod
    def guarantees(cls, settings: Any, facts: Any, events: Any, delta: float) -> Any:
        epsilon = epsilon_from_mu(len(events) ** 0.5, delta)
        return [Statement("valid", "record", "replace-one", epsilon, delta, "exact")]

    def build(self) -> None:
        self.num_steps = 4

    def step(self, index: int) -> dict[str, Any]:
        return {"kind": "vector", "noise_per_clip": 1.0}
