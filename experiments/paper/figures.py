"""The paper's figures, from runs that are stored and never trained twice.

    python -m experiments.paper.figures norms            Fig. 2 and A1; NOT PRIVATE
    python -m experiments.paper.figures noise-scale      Fig. 4 c, A2
    python -m experiments.paper.figures iterations       Fig. 4 b, A2
    python -m experiments.paper.figures sampling-rate    Fig. 4 a
    python -m experiments.paper.figures samples RUN...   Fig. 3 and 5

A command trains what is missing in `OUTPUT/runs` (`OUTPUT/probes` for the norms),
computes what is missing in `OUTPUT/scores.jsonl`, and draws. With `--redraw` it only
draws. The runs are those of `experiments.paper.table2` where their settings are the
same.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020.
"""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.paper import figure_drawing
from experiments.paper.gradient_norms import probe, read_norms, unprotected
from experiments.paper.privacy_utility import KINDS, curves, parse_values, variations
from experiments.paper.scales import Experiment, configured, label
from experiments.paper.stored_runs import stopped_by_signal, stored, train
from experiments.store import Store
from fedgs.app.flags import request_flags, run_command
from fedgs.config.fields import flag
from fedgs.config.recipes import RECIPES
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError
from fedgs.federation.training import Stop
from fedgs.files import write_json
from fedgs.privacy.plan import ADVERSARIES, RELATIONS
from fedgs.runs import sample
from fedgs.runs.run_folder import RunFolder

NAMES = ("norms", *KINDS, "samples")


@dataclass(frozen=True, kw_only=True)
class Request(Experiment):
    """What a call asks for; each flag's help says what it is."""

    figure: str = flag(MISSING, "Which one.", metavar="FIGURE", choices=NAMES)
    runs: list[Path] | None = flag(None, "Run folders, of samples.", metavar="RUN...")
    output: Path = flag(Path("runs/figures"), "Its folder.")
    recipe: str = flag("full-participation", f"Of {', '.join(RECIPES)}.")
    seed: int = flag(0, "Of the runs.")
    values: str | None = flag(None, "What the curve varies, as 1,3,10; 0 is no noise.")
    adversary: str = flag("release", "Of epsilon.", choices=ADVERSARIES)
    relation: str = flag("replace-one", "Of epsilon.", choices=tuple(RELATIONS))
    redraw: bool = flag(False, "Train nothing.")

    def __post_init__(self) -> None:
        """Checks what goes together."""
        super().__post_init__()
        if bool(self.runs) != (self.figure == "samples"):
            raise UserError("RUN: give run folders to samples, and to no other figure")
        if self.figure not in KINDS and self.values is not None:
            raise UserError(
                f"values = {self.values}: only curves vary a setting; leave out "
                "--values"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the runs over their recipe."""
        return {"seed": self.seed, "engine": "flower", **super().settings}


def draw(request: Request, stop: Stop) -> list[Path]:
    """Returns the pictures of a figure; trains and computes what is missing.

    Privacy: reads private data; output private. `samples` is post-processing of DP
    output.

    Raises:
        RunStopped: `stop` was set; call again to continue.
        UserError: bad settings or data, or with `is_redraw` a run that is missing.
    """
    if request.figure == "norms":
        return _draw_norms(request, stop)
    if request.figure == "samples":
        return [_draw_samples(request)]
    return [_draw_curves(request, stop)]


def _draw_norms(request: Request, stop: Stop) -> list[Path]:
    config = configured(request.recipe, request.scale, request.settings)
    config = unprotected(config)
    train_probe = None if request.redraw else partial(probe, stop=stop)
    folder = stored(request.output / "probes", request.recipe, config, train_probe)
    norms, scale = read_norms(folder), _scale(folder, config, request.recipe)
    figures = {
        request.output / "norm-dynamics.png": figure_drawing.norm_dynamics,
        request.output / "norm-histograms.png": figure_drawing.norm_histograms,
    }
    for path, figure_of in figures.items():
        figure_drawing.save(path, figure_of(norms, config.clip_bound, scale))
    return list(figures)


def _draw_curves(request: Request, stop: Stop) -> Path:
    kind, recipe = request.figure, request.recipe
    values = parse_values(kind, request.values, request.scale)
    configs = variations(kind, recipe, request.scale, values, request.settings)
    training = None if request.redraw else partial(train, stop=stop)
    runs = {
        title: stored(request.output / "runs", recipe, config, training)
        for title, config in configs.items()
    }
    store = Store(request.output / "scores.jsonl")
    asked = (request.adversary, request.relation)
    found, names = curves(kind, runs, request.protocol, store, *asked)
    config = configured(recipe, request.scale, request.settings)
    scale = _scale(next(iter(runs.values())), config, recipe)
    words = ", ".join([*asked, f"delta {config.delta:g}"])
    path = request.output / f"{kind}.png"
    figure_drawing.save(
        path, figure_drawing.privacy_utility(found, names, words, scale)
    )
    points = {name: [p._asdict() for p in curve] for name, curve in found.items()}
    write_json(path.with_suffix(".json"), {"scores": names, "curves": points})
    return path


def _draw_samples(request: Request) -> Path:
    grids, texts = {}, []
    folders = [RunFolder.open(run) for run in request.runs or ()]
    shapes = {_grid_shape(folder.config) for folder in folders}
    if len(shapes) > 1:
        raise UserError(
            "RUN: the runs differ in classes or in the size of images; draw them apart"
        )
    columns, classes = shapes.pop()[:2]
    for folder in folders:
        config = folder.config
        labels = np.tile(np.arange(columns) % classes, figure_drawing.GRID_ROWS)
        images = sample.draw(config, sample.load_generator(folder), labels, seed=0)
        noise = f"noise multiplier {config.noise_multiplier:g}"
        noise = "no noise: NOT PRIVATE" if config.noise_multiplier == 0 else noise
        bug = "" if config.corruption == "none" else f", {config.corruption}"
        grids[f"{folder.path.name}, {config.num_rounds} rounds, {noise}{bug}"] = images
        texts.append(f"{config.num_clients} clients of {config.data.split(':')[0]}")
    path = request.output / "samples.png"
    scale = f"scale: {', '.join(dict.fromkeys(texts))}"
    figure_drawing.save(path, figure_drawing.sample_grids(grids, columns, scale))
    return path


def _grid_shape(config: ResolvedConfig) -> tuple[int, int, int, int]:
    """Returns columns, classes, and size and channels of the images."""
    classes = config.num_classes
    return classes, classes, config.image_size, config.image_channels


def _scale(folder: RunFolder, config: RunConfig, recipe: str) -> str:
    """Returns in words where the runs of a figure are not their recipe."""
    data = folder.config.data.split(":")[0]
    clients = f"{folder.config.num_clients} clients of {data}, seed {config.seed}"
    return f"scale: {recipe}, {clients}, {label(config, recipe)}"


def main(words: Sequence[str] | None = None) -> int:
    """Draws one figure; returns the exit code."""
    return run_command(figures, words)


@request_flags(Request)
def figures(*, given: dict[str, Any]) -> None:
    """Draw one of the paper's figures; train and compute what is missing."""
    request = Request(**given)
    with stopped_by_signal() as stop:
        print(*draw(request, stop), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
