"""The report's curves: numbers from public quantities.

What a run leaves behind is public, and less than what a critic knows. The Wasserstein
estimate of a WGAN, mean D(real) - mean D(fake), needs scores of real images: they never
leave a client, so no report can show it. What the releases hold beside noise can be
told, because the noise's scale is public (`fedgs.round.answer.signal_to_noise`).
"""

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedgs.app.report.run import Grid, RunFacts
from fedgs.app.report.svg import Curve, Line
from fedgs.errors import UserError
from fedgs.privacy.rounding import upper
from fedgs.runs.epsilons import by_round

MOST_POINTS = 16  # of the curve of epsilon
GRID_PADDING = 2  # pixels, of fedgs.runs.sample.save_images


def curves(runs: Sequence[RunFacts]) -> list[Curve]:
    """Returns the curves of one run, or of several in the same axes.

    Privacy: post-processing of DP output.

    Raises:
        UserError: a grid that its run's settings do not explain.
    """
    return [_epsilon(runs), *_signal(runs)]


def _epsilon(runs: Sequence[RunFacts]) -> Curve:
    lines = []
    unbounded = [facts.name for facts in runs if facts.headline.epsilon is None]
    for place, facts in enumerate(runs):
        found: dict[str, list[tuple[float, float]]] = {}
        for round, rows in by_round(facts.config, facts.events, MOST_POINTS):
            for row in rows:
                if row.relation == facts.config.relation and row.epsilon is not None:
                    found.setdefault(row.adversary, []).append((round, row.epsilon))
        for row, (adversary, points) in enumerate(found.items()):
            if len(runs) == 1:
                lines.append(Line(adversary, row, points))
            elif adversary == facts.headline.adversary:
                lines.append(Line(facts.name, place, points))
    first = runs[0].headline
    own = "each run's own adversary and relation"
    if len(runs) > 1:
        against = own
    else:
        against = f"relation {first.relation}"
    if unbounded:
        notes = [f"Unbounded, so not drawn: {', '.join(unbounded)}."]
    else:
        notes = []
    if any(f.config.noise_std and f.config.noise_seed is not None for f in runs):
        notes.append("Seeded noise: not a guarantee.")
    if any(facts.config.amplification for facts in runs):
        notes.append("Without amplification by sampling; the table has it.")
    return Curve(
        "Privacy spent",
        "epsilon",
        lines,
        f"Epsilon after each round at delta {upper(first.delta, 6)}, from the ledger; "
        f"{against}. Repeated rounds count again.",
        " ".join(notes),
    )


def _signal(runs: Sequence[RunFacts]) -> list[Curve]:
    """Returns the signal beside the noise of the rounds of phases with many."""
    lines: list[Line] = []
    for place, facts in enumerate(runs):
        points = [
            (row["round"], row["signal_to_noise"])
            for row in facts.metrics
            if not facts.config.at_round(row["round"]).releases_once
            and row.get("signal_to_noise") is not None
        ]
        lines += [Line(facts.name, place, points)] if points else []
    text = "Power of a round's summed release, without the part that the known noise "
    text += "explains, over the noise's. 0: the noise hides it in this round."
    title = "Signal beside noise"
    unit = "signal-to-noise ratio"
    if lines:
        return [Curve(title, unit, lines, text)]
    return []


def grid_images(grid: Grid, facts: RunFacts) -> NDArray[np.float64]:
    """Returns the images of a grid, shape (images, numbers), in [0, 1].

    Raises:
        UserError: the picture's size is not that of a grid of this run.
    """
    side = facts.config.image_size
    channels = facts.config.image_channels
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
