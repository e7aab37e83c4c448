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

from fedgs.app.report.run import GRID_PADDING, Grid, RunFacts
from fedgs.app.report.svg import Curve, Line
from fedgs.errors import UserError
from fedgs.privacy.rounding import upper
from fedgs.runs.epsilons import by_round

MOST_POINTS = 16  # of the curve of epsilon


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
        # Epsilons of another relation are no comparison, so the table alone has them.
        found: dict[str, list[tuple[float, float]]] = {}
        for round, rows in by_round(facts.config, facts.events, MOST_POINTS):
            for row in rows:
                is_own = row.relation == facts.config.relation
                if not is_own or row.epsilon is None:
                    continue
                points = found.setdefault(row.adversary, [])
                points.append((round, row.epsilon))
        for row, (adversary, points) in enumerate(found.items()):
            # Beside other runs each has one line, that of its own adversary. More lines
            # would invite a comparison of different adversaries.
            if len(runs) == 1:
                line = Line(adversary, row, points)
                lines.append(line)
            elif adversary == facts.headline.adversary:
                line = Line(facts.name, place, points)
                lines.append(line)
    first = runs[0].headline
    against = f"relation {first.relation}"
    if len(runs) > 1:
        against = "each run's own adversary and relation"
    notes: list[str] = []
    # A missing line must not look like an epsilon of 0.
    if unbounded:
        names = ", ".join(unbounded)
        notes.append(f"Unbounded, so not drawn: {names}.")
    # Whoever knows the seed can subtract the noise, so the epsilons drawn here show
    # only what fresh noise would give.
    configs = [facts.config for facts in runs]
    noisy = [config for config in configs if config.noise_std]
    if any(config.noise_seed is not None for config in noisy):
        notes.append("Seeded noise: not a guarantee.")
    if any(config.amplification for config in configs):
        notes.append("Without amplification by sampling; the table has it.")
    delta = upper(first.delta, 6)
    text = (
        f"Epsilon after each round at delta {delta}, from the ledger; "
        f"{against}. Repeated rounds count again."
    )
    note = " ".join(notes)
    return Curve("Privacy spent", "epsilon", lines, text, note=note, shown=upper)


def _signal(runs: Sequence[RunFacts]) -> list[Curve]:
    """Returns the signal beside the noise of the rounds of phases with many."""
    lines: list[Line] = []
    for place, facts in enumerate(runs):
        points: list[tuple[float, float]] = []
        for row in facts.metrics:
            round = row["round"]
            own = facts.config.at_round(round)
            ratio = row.get("signal_to_noise")
            # A phase of one release has one point, and so no curve.
            if own.releases_once or ratio is None:
                continue
            points.append((round, ratio))
        if points:
            line = Line(facts.name, place, points)
            lines.append(line)
    if not lines:
        return []
    text = (
        "Power of a round's summed release, without the part that the known noise "
        "explains, over the noise's. 0: the noise hides it in this round."
    )
    curve = Curve("Signal beside noise", "signal-to-noise ratio", lines, text)
    return [curve]


def grid_images(grid: Grid, facts: RunFacts) -> NDArray[np.float64]:
    """Returns the images of a grid, shape (images, numbers), in [0, 1].

    Raises:
        UserError: the picture's size is not that of a grid of this run.
    """
    side = facts.config.image_size
    channels = facts.config.image_channels
    step = side + GRID_PADDING
    content = io.BytesIO(grid.png)
    picture = Image.open(content).convert("RGB")
    pixels = np.asarray(picture, float) / 255
    # Every image has the padding to its right and below, and the picture has it once
    # more on the left and at the top.
    rows = (grid.height - GRID_PADDING) // step
    columns = (grid.width - GRID_PADDING) // step
    expected_height = rows * step + GRID_PADDING
    expected_width = columns * step + GRID_PADDING
    is_grid = grid.height == expected_height and grid.width == expected_width
    if not is_grid or rows < 1 or columns < 1:
        raise UserError(
            f"{facts.name}: samples of round {grid.round} are {grid.width} x "
            f"{grid.height} pixels, no grid of {side} x {side} images; restore the "
            "file from a copy"
        )
    # A grey image has the same number in all three channels, so the first is enough.
    inner = pixels[GRID_PADDING:, GRID_PADDING:, :channels]
    padded = inner.reshape(rows, step, columns, step, channels)
    images = padded[:, :side, :, :side]
    # The row and the column of an image in front, then its own.
    in_order = images.transpose(0, 2, 1, 3, 4)
    return in_order.reshape(rows * columns, -1)
