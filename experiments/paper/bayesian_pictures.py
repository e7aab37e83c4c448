"""The uses of BDP-GAN's pictures: `python -m experiments.paper.bayesian_pictures`.

The other experiments of its paper, on generators that are trained once and kept:

* **Rotation.** Some images are turned by 90 degrees. Do the pictures show it, at a
  Bayesian epsilon and at a classical one? A person looks at `rotation.png`.
* **Label efficiency.** A student learns from 100 to 10,000 labelled pictures; beside
  it, one that learns from as many real images.
* **Private annotator.** The labels are given by a classifier that learnt from the
  private images by DP-SGD, with a Bayesian and a classical epsilon of its own.

The paper clips the gradient of a batch, which gives no classical epsilon to speak of.
Here each image's is clipped, at the paper's bound.

Source: Triastcyn, Faltings, "Generating higher-fidelity synthetic datasets with privacy
guarantees", Algorithms 15, 2022, sections 3.1 and 3.2, Figures 1 and 3.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from experiments.grid.cells import Cells, Method, Source
from experiments.grid.runs import trained
from experiments.paper import figure_drawing
from fedgs.app.flags import request_flags, run_command
from fedgs.app.tables import Table
from fedgs.baselines import bayesian_accounting as bayesian
from fedgs.baselines import dp_sgd
from fedgs.baselines.run import BaselineRun, open_run
from fedgs.config.fields import flag
from fedgs.config.run_config import RunConfig
from fedgs.evaluation.downstream import cnn_accuracy, predict
from fedgs.evaluation.images import LabelledImages, RealImages, draw_from_run, load_real
from fedgs.evaluation.label_efficiency import NUM_STEPS, label_efficiency, num_epochs
from fedgs.files import write_json
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.poisson import Releases, epsilon
from fedgs.randomness import stream
from fedgs.runs import sample

NUM_LABELS = (100, 1000, 10_000)
GRID_ROWS = 8
DELTA = RunConfig().delta
CLIP = 0.5  # the paper's
STEPS, BATCH = 500, 64  # of each discriminator, and of the annotator
SEED, SAMPLES = 0, 10_000
MODEL = {"generator": "upsample", "generator_dim": 8, "discriminator_dim": 8}
MODEL |= {"image_size": 16, "num_clients": 100}  # clients do not matter here
MODEL |= {"steps": STEPS, "expected_batch": BATCH, "clip": CLIP}
TURNED = {"corruption": "rotate", "corruption_unit": "image"}
TURNED |= {"corruption_fraction": 0.5}  # of all images
NOISE = 0.43  # noise / clip bound, of a Bayesian epsilon near 10
METHODS = {  # noise: of an epsilon near 10, by whose accountant the run is named
    name: Method("", MODEL | bug, {10.0: {"noise_per_clip": z}}, baseline="bdp-gan")
    for name, bug, z in (
        ("upright", {}, NOISE),
        ("bayesian", TURNED, NOISE),
        ("classical", TURNED, 0.347),
    )
}


@dataclass(frozen=True)
class Request:
    """What is asked for; each flag's help says what it is."""

    data: str = flag("mnist", "Private digits with a test split.")
    data_dir: str | None = flag(None, "As of fedgs train.")
    output: Path = flag(Path("runs/bayesian"), "Its folder.")


def epsilons(run: BaselineRun) -> dict[str, float | None]:
    """Returns the Bayesian and the classical epsilon of one image."""
    rows = run.guarantees(with_private=True)
    rows = {row.label: row.epsilon for row in rows if row.unit == "record"}
    return {"bayesian": rows["distributional"], "classical": rows["valid"]}


# ------------------------------------------------------------------ annotator


def annotator(
    train: LabelledImages, num_classes: int, noise: float = NOISE, steps: int = STEPS
) -> tuple[nn.Module, dict[str, float]]:
    """Trains a classifier by DP-SGD, clipped and by default with noise as the runs.

    Privacy: releases a (epsilon, delta)-DP network; events: none, the epsilons are
    returned, and the Bayesian one reads the gradients of private images.

    Returns:
        The network, and its Bayesian and classical epsilon of one image.
    """
    images, labels = map(torch.from_numpy, train)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        plain = narrow_cnn(images.shape[1], images.shape[2], num_classes)
    network = dp_sgd.per_sample(plain)
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    rate, costs = BATCH / len(labels), np.zeros(len(bayesian.ORDERS))

    def losses(rows: Tensor) -> Tensor:
        scores = network(images[rows])
        return functional.cross_entropy(scores, labels[rows], reduction="none")

    for step in range(steps):
        drawn = stream(SEED, "annotator-records", step)
        drawn = torch.from_numpy(drawn.choice(len(labels), 32, replace=False))
        found = norms(network, losses, drawn) / noise
        costs += bayesian.step_cost(bayesian.log_moments(found, rate), steps)
        batch = dp_sgd.poisson_batch(None, step, len(labels), rate)
        of_batch = partial(losses_at, losses, batch)
        total = dp_sgd.clipped_sum(network, of_batch, len(batch), CLIP)
        release = dp_sgd.noisy(total, noise * CLIP, NoiseStream(None, 0, step))
        dp_sgd.set_grads(network, release / BATCH)
        optimizer.step()
    network.disable_hooks()
    made = (Releases(rate, noise, steps),)
    total_cost = bayesian.bayesian_epsilon(costs, steps, DELTA)
    return network.eval(), {"bayesian": total_cost, "classical": epsilon(made, DELTA)}


def losses_at(losses: dp_sgd.Losses, batch: Tensor, at: Tensor) -> Tensor:
    """Returns losses of some rows of a batch."""
    return losses(batch[at])


def norms(network: Any, losses: dp_sgd.Losses, rows: Tensor) -> NDArray[np.float64]:
    """Returns norms of clipped gradients / clip bound, of single images.

    Privacy: reads private data; output private.
    """
    network.zero_grad(set_to_none=True)
    with dp_sgd.quiet():
        losses(rows).sum().backward()
    grads = torch.cat([p.grad_sample.flatten(1) for p in network.parameters()], 1)
    network.zero_grad(set_to_none=True)
    return (dp_sgd.clipped(grads, CLIP).norm(dim=1) / CLIP).double().numpy()


def narrow_cnn(channels: int, side: int, num_classes: int) -> nn.Module:
    """Builds a CNN without dropout; each image has a gradient as large as it."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, num_classes)),
    )


# ------------------------------------------------------------------ everything


def measure(request: Request) -> dict[str, Any]:
    """Trains what is missing and measures everything; draws `rotation.png`.

    Privacy: scores and Bayesian epsilons are computed from private images: private.

    Returns:
        `runs`: for each of `METHODS` its epsilons; `annotator`: its epsilons and
        accuracy; `labels`: accuracies by number of labels, of each way to label.
    """
    cells = Cells("", {request.data: Source({}, {})}, METHODS).of_seeds([SEED])
    runs = {
        cell.method: open_run(trained(cell, request.output, request.data_dir))
        for cell in cells
    }
    upright = runs["upright"]
    draw_rotation(runs, request.output / "rotation.png")
    real = load_real(upright.config)
    made, cost = annotator(real.train, real.num_classes)
    accuracy = float((predict(made, real.test.images) == real.test.labels).mean())
    drawn = draw_from_run(upright.folder, SAMPLES, SEED)
    return {
        "runs": {name: epsilons(run) for name, run in runs.items()},
        "annotator": cost | {"accuracy": accuracy},
        "labels": label_curves(drawn, made, real),
    }


def label_curves(
    pictures: LabelledImages, made: nn.Module, real: RealImages
) -> dict[str, dict[str, float]]:
    """Returns accuracies of students, for pictures by both labels and for real ones."""
    sizes = [size for size in NUM_LABELS if size <= len(pictures.labels)]
    asked = (real.test, real.num_classes, SEED)
    curves = label_efficiency(
        pictures,
        predict(made, pictures.images),
        *asked,
        lambda done, total: None,
        sizes,
    )
    students = {
        str(size): cnn_accuracy(
            real.train.subset(size, SEED, "labels"),
            *asked,
            num_epochs=num_epochs(size, NUM_STEPS),
        )
        for size in sizes
    }
    return curves | {"real": students}


def draw_rotation(runs: Mapping[str, BaselineRun], path: Path) -> None:
    """Draws the pictures of all runs side by side, a column for each digit.

    Privacy: post-processing of DP output.
    """
    config = runs["upright"].config
    labels = np.tile(np.arange(config.num_classes), GRID_ROWS)
    generators = {n: sample.load_generator(run.folder) for n, run in runs.items()}
    grids = {n: sample.draw(config, net, labels, 0) for n, net in generators.items()}
    scale = f"scale: {config.num_rounds} steps, {config.data}"
    figure = figure_drawing.sample_grids(grids, config.num_classes, scale)
    figure_drawing.save(path, figure)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the tables of `measure`."""
    shown = [
        [name, *(_number(row[key]) for key in ("bayesian", "classical"))]
        for name, row in found["runs"].items()
    ]
    note = "Half of the images of all runs but the first were turned; see rotation.png."
    labeller = found["annotator"]
    head = ["run", "Bayesian epsilon", "classical epsilon"]
    curves = found["labels"]
    sizes = list(curves["real"])
    names = {"generator": "generator", "annotator": "private annotator", "real": "real"}
    labels = [
        [title, *(f"{curves[name][size]:.3f}" for size in sizes)]
        for name, title in names.items()
    ]
    costs = (
        f"The annotator: Bayesian epsilon {_number(labeller['bayesian'])}, classical "
        f"{_number(labeller['classical'])}, accuracy {labeller['accuracy']:.3f}. Its "
        "epsilons add to those of the pictures, which are of run upright; real: as "
        "many labelled real images."
    )
    return [
        Table("Rotation", head, shown, note),
        Table("CNN by number of labelled images", ["labels of", *sizes], labels, costs),
    ]


def _number(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.3g}"


@request_flags(Request)
def command(given: dict[str, Any]) -> None:
    """Trains three small BDP-GANs and prints what their pictures are good for."""
    request = Request(**given)
    found = measure(request)
    write_json(request.output / "pictures.json", found)
    for table in tables(found):
        table.show()


if __name__ == "__main__":
    sys.exit(run_command(command))
