"""Small trainings of every baseline, on scikit-learn's digits."""

import threading
from pathlib import Path
from typing import Any

from fedgs.baselines import run as frame
from fedgs.baselines.run import Asked, BaselineRun
from fedgs.data.federated import FederatedImages
from runs import Report, ignore

# One line for each method and each kind of training of it that differs: seconds each.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "g-pate": ("g-pate", {"steps": 4, "batch_size": 4, "teacher_batch_size": 4}),
    "pate-gan": ("pate-gan", {"steps": 4, "batch_size": 4, "teacher_batch_size": 4}),
    "wgan-gp": ("wgan-gp", {"steps": 6, "batch_size": 4}),
    "wgan-gp per client": (
        "wgan-gp",
        {"steps": 6, "batch_size": 4, "discriminators": "per-client"},
    ),
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
    method, own = SMALL[name]
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
