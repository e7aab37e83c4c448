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

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from experiments.baselines import command as baselines
from experiments.flags import JsonOption, request_flags, run_command
from experiments.paper import figure_drawing
from experiments.tables import Table
from fedgs.baselines import bayesian_accounting as bayesian
from fedgs.baselines import dp_sgd
from fedgs.baselines.run import BaselineRun, open_run
from fedgs.config.fields import coerce_fields, flag
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
MODEL = {"generator": "upsample", "generator_dim": 8, "discriminator_dim": 8}
MODEL |= {"image_size": 16, "num_clients": 100}  # clients do not matter here
SHARE = 0.5  # of images that are turned


class Made(NamedTuple):
    """One training: are images turned, and noise / clip bound."""

    is_rotated: bool
    noise: float


RUNS = {  # noise: of an epsilon near 10 by the accountant that the run is named after
    "upright": Made(False, 0.43),
    "bayesian": Made(True, 0.43),
    "classical": Made(True, 0.347),
}


@dataclass(frozen=True)
class Request:
    """What is asked for; each flag's help says what it is.

    Raises:
        UserError: a value outside its range.
    """

    data: str = flag("mnist", "Private digits with a test split.")
    data_dir: str | None = flag(None, "As of fedgs train.")
    output: Path = flag(Path("runs/bayesian"), "Its folder.")
    steps: int = flag(500, "Of each discriminator, and of the annotator.", at_least=1)
    batch: int = flag(64, "Images of a Poisson batch on average.", at_least=1)
    samples: int = flag(10_000, "Pictures of a generator.", at_least=100)
    seed: int = flag(0, "Of everything but the noise.", at_least=0)

    def __post_init__(self) -> None:
        """Checks every field."""
        coerce_fields(self)


def trained(name: str, request: Request) -> BaselineRun:
    """Trains one of `RUNS`, as far as it is not there.

    Privacy: releases (epsilon, delta)-DP output; events: in the run's ledger, whose
    Bayesian costs are private.
    """
    path, made = request.output / name, RUNS[name]
    if not (path / "config.json").exists():
        own = {
            "noise_per_clip": made.noise,
            "clip": CLIP,
            "steps": request.steps,
        }
        own |= {"expected_batch": request.batch}
        data = {"data": request.data, "data_dir": request.data_dir or ""}
        if made.is_rotated:
            data |= {"corruption": "rotate", "corruption_unit": "image"}
            data |= {"corruption_fraction": SHARE}
        place = {"output": str(path.absolute()), "seed": request.seed}
        baselines.train("bdp-gan", own, data | place | MODEL)
    elif not (path / "generator.safetensors").exists():
        baselines.resume(path)
    return open_run(path)


def epsilons(run: BaselineRun) -> dict[str, float | None]:
    """Returns the Bayesian and the classical epsilon of one image."""
    rows = run.guarantees(with_private=True)
    rows = {row.label: row.epsilon for row in rows if row.unit == "record"}
    return {"bayesian": rows["distributional"], "classical": rows["valid"]}


# ------------------------------------------------------------------ annotator


def annotator(
    train: LabelledImages, num_classes: int, request: Request
) -> tuple[nn.Module, dict[str, float]]:
    """Trains a classifier by DP-SGD, clipped and with noise as run `bayesian`.

    Privacy: releases a (epsilon, delta)-DP network; events: none, the epsilons are
    returned, and the Bayesian one reads the gradients of private images.

    Returns:
        The network, and its Bayesian and classical epsilon of one image.
    """
    noise = RUNS["bayesian"].noise
    images, labels = map(torch.from_numpy, train)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(request.seed)
        plain = narrow_cnn(images.shape[1], images.shape[2], num_classes)
    network = dp_sgd.per_sample(plain)
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    rate, costs = request.batch / len(labels), np.zeros(len(bayesian.ORDERS))

    def losses(rows: Tensor) -> Tensor:
        scores = network(images[rows])
        return functional.cross_entropy(scores, labels[rows], reduction="none")

    for step in range(request.steps):
        drawn = stream(request.seed, "annotator-records", step)
        drawn = torch.from_numpy(drawn.choice(len(labels), 32, replace=False))
        found = norms(network, losses, drawn) / noise
        costs += bayesian.step_cost(bayesian.log_moments(found, rate), request.steps)
        batch = dp_sgd.poisson_batch(None, step, len(labels), rate)
        of_batch = partial(losses_at, losses, batch)
        total = dp_sgd.clipped_sum(network, of_batch, len(batch), CLIP)
        release = dp_sgd.noisy(total, noise * CLIP, NoiseStream(None, 0, step))
        dp_sgd.set_grads(network, release / request.batch)
        optimizer.step()
    network.disable_hooks()
    made = (Releases(rate, noise, request.steps),)
    total_cost = bayesian.bayesian_epsilon(costs, request.steps, DELTA)
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
        `runs`: for each of `RUNS` its epsilons; `annotator`: its epsilons and accuracy;
        `labels`: accuracies by number of labels, of each way to label.
    """
    runs = {name: trained(name, request) for name in RUNS}
    upright = runs["upright"]
    draw_rotation(runs, request.output / "rotation.png")
    real = load_real(upright.config)
    made, cost = annotator(real.train, real.num_classes, request)
    accuracy = float((predict(made, real.test.images) == real.test.labels).mean())
    drawn = draw_from_run(upright.folder, request.samples, request.seed)
    return {
        "runs": {name: epsilons(run) for name, run in runs.items()},
        "annotator": cost | {"accuracy": accuracy},
        "labels": label_curves(drawn, made, real, request),
    }


def label_curves(
    pictures: LabelledImages, made: nn.Module, real: RealImages, request: Request
) -> dict[str, dict[str, float]]:
    """Returns accuracies of students, for pictures by both labels and for real ones."""
    sizes = [size for size in NUM_LABELS if size <= len(pictures.labels)]
    asked = (real.test, real.num_classes, request.seed)
    curves = label_efficiency(
        pictures, predict(made, pictures.images), *asked, say_nothing, sizes
    )
    students = {
        str(size): cnn_accuracy(
            real.train.subset(size, request.seed, "labels"),
            *asked,
            num_epochs=num_epochs(size, NUM_STEPS),
        )
        for size in sizes
    }
    return curves | {"real": students}


def say_nothing(done: int, total: int) -> None:
    """Takes the progress of a stage of seconds."""


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
def command(given: dict[str, object], as_json: JsonOption = False) -> None:
    """Trains three small BDP-GANs and prints what their pictures are good for."""
    request = Request(**given)  # type: ignore[arg-type]
    found = measure(request)
    write_json(request.output / "pictures.json", found)
    if as_json:
        print(json.dumps(found))
    for table in () if as_json else tables(found):
        table.show()


if __name__ == "__main__":
    sys.exit(run_command(command))
