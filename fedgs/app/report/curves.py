"""The report's curves: numbers from public quantities.

What a run leaves behind is public, and less than what a critic knows. The Wasserstein
estimate of a WGAN, mean D(real) - mean D(fake), needs scores of real images: they never
leave a client, so no report can show it. One quantity says whether training settles:

    movement  mean distance between the samples of two successive grids, of the same
              latents: a coupling, so it bounds the Wasserstein-1 distance between the
              two generators (estimated from the images of a grid)
"""

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedgs.app.report.run import Grid, RunFacts, epsilon_by_round
from fedgs.app.report.svg import Curve, Line, Points
from fedgs.errors import UserError

GRID_PADDING = 2  # pixels, of fedgs.runs.sample.save_images


def curves(runs: Sequence[RunFacts]) -> list[Curve]:
    """Returns the curves of one run, or of several in the same axes.

    Privacy: post-processing of DP output.

    Raises:
        UserError: a grid that its run's settings do not explain.
    """
    return [_epsilon(runs), *_movement(runs)]


def _epsilon(runs: Sequence[RunFacts]) -> Curve:
    lines = []
    unbounded = [facts.name for facts in runs if facts.headline.epsilon is None]
    for place, facts in enumerate(runs):
        for row, (adversary, points) in enumerate(epsilon_by_round(facts).items()):
            if len(runs) == 1:
                lines.append(Line(adversary, row, points))
            elif adversary == facts.headline.adversary:
                lines.append(Line(facts.name, place, points))
    first = runs[0].headline
    about = {(f.headline.adversary, f.headline.relation) for f in runs}
    against = "each run's own adversary and relation"
    if len(about) == 1:
        against = f"relation {first.relation}"
        against += f", adversary {first.adversary}" if len(runs) > 1 else ""
    notes = [f"Unbounded, so not drawn: {', '.join(unbounded)}."] if unbounded else []
    if any(f.config.noise_std and f.config.noise_seed is not None for f in runs):
        notes.append("Seeded noise: not a guarantee.")
    if any(facts.config.amplification for facts in runs):
        notes.append("Without amplification by sampling; the table has it.")
    return Curve(
        "Privacy spent",
        "epsilon",
        lines,
        f"Epsilon after each round at delta {first.delta:g}, from the ledger; {against}"
        ". Repeated rounds count again.",
        " ".join(notes),
    )


# ------------------------------------------------------------------ samples that move


def _movement(runs: Sequence[RunFacts]) -> list[Curve]:
    """Returns the movement of runs with two grids or more, nothing without one."""
    lines = [
        Line(facts.name, place, movement(facts))
        for place, facts in enumerate(runs)
        if len(facts.grids) > 1
    ]
    text = (
        "Mean L2 distance between the images of two successive grids with the same "
        "latents, per 100 rounds. Times the rounds between, it bounds the Wasserstein "
        "distance between the two generators. Small: training has settled. It does "
        "not say how near the real images are."
    )
    title, unit = "How far the samples still move", "L2 distance per 100 rounds"
    return [Curve(title, unit, lines, text)] if lines else []


def movement(facts: RunFacts) -> Points:
    """Returns how far images moved since the grid before, for each 100 rounds.

    Privacy: post-processing of DP output.

    Raises:
        UserError: a grid that this run's settings do not explain.
    """
    images = [grid_images(grid, facts) for grid in facts.grids]
    points = []
    for place, grid in enumerate(facts.grids[1:], 1):
        before = facts.grids[place - 1]
        moved = np.linalg.norm(images[place] - images[place - 1], axis=1).mean()
        points.append((grid.round, 100 * float(moved) / (grid.round - before.round)))
    return points


def grid_images(grid: Grid, facts: RunFacts) -> NDArray[np.float64]:
    """Returns the images of a grid, shape (images, numbers), in [0, 1].

    Raises:
        UserError: the picture's size is not that of a grid of this run.
    """
    side, channels = facts.config.image_size, facts.config.image_channels
    step = side + GRID_PADDING
    pixels = np.asarray(Image.open(io.BytesIO(grid.png)).convert("RGB"), float) / 255
    rows, columns = ((n - GRID_PADDING) // step for n in pixels.shape[:2])
    expected = (rows * step + GRID_PADDING, columns * step + GRID_PADDING)
    if pixels.shape[:2] != expected or min(rows, columns) < 1:
        raise UserError(
            f"{facts.name}: samples of round {grid.round} are {grid.width} x "
            f"{grid.height} pixels, no grid of {side} x {side} images; restore the "
            "file from a copy"
        )
    cells = pixels[GRID_PADDING:, GRID_PADDING:, :channels]
    cells = cells.reshape(rows, step, columns, step, channels)[:, :side, :, :side]
    return cells.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
