"""The papers' tables and figures, from cells that are trained once and kept.

    python -m experiments.paper.figures table2           Table 2
    python -m experiments.paper.figures noise-scale      Fig. 4 c, A2
    python -m experiments.paper.figures iterations       Fig. 4 b, A2
    python -m experiments.paper.figures sampling-rate    Fig. 4 a
    python -m experiments.paper.figures rotation         BDP-GAN's Fig. 1

The cells are in `figures.toml`; see `experiments.grid.runs` for what a cell is. Every
row has its grid of samples, `OUTPUT/<row>.png` (Fig. 3, 5). Sizes are for two CPU
cores and about an hour, and say nothing of the published numbers; `--full` reduces
none, which needs a GPU and days.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020; Triastcyn, Faltings,
"Generating higher-fidelity synthetic datasets with privacy guarantees", Algorithms 15,
2022.
"""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.grid.cells import Cells, TableRequest
from experiments.grid.runs import Lines, fill
from experiments.paper import figure_drawing
from experiments.store import Line
from fedgs.app.flags import request_flags, run_command, settings_flags
from fedgs.app.report import words
from fedgs.app.tables import Table
from fedgs.config.fields import check_ranges, flag
from fedgs.privacy.rounding import upper

CELLS = Cells.read(Path(__file__).with_suffix(".toml"))
_CELLS_OF_CURVES = {  # name: which cells
    "noise-scale": "gs-wgan-eps",
    "iterations": "gs-wgan-eps10-|rounds-",
    "sampling-rate": "gs-wgan-eps10-|participants-",
}
_CELLS_OF_FIGURES = _CELLS_OF_CURVES | {
    "table2": "algorithm-2|gs-wgan(-compact)?-eps10-|fedavg-gan",
    "rotation": "bdp-gan",
}
SCORES = {"IS": "inception_score", "FID": "fid", "CNN": "accuracy_cnn"}


@dataclass(frozen=True, kw_only=True)
class FigureRequest(TableRequest):
    """What a call asks for; each flag's help says what it is.

    Raises:
        UserError: no such figure.
    """

    figure: str = flag(
        MISSING,
        "Which.",
        metavar="FIGURE",
        choices=tuple(_CELLS_OF_FIGURES),
    )
    output: Path = flag(Path("runs/figures"), "Folder of the results.")
    metrics: tuple[str, ...] = ("cnn", "images")

    def __post_init__(self) -> None:
        """Checks the figure."""
        super().__post_init__()
        check_ranges(self)


def judged(cells: Cells, lines: Lines) -> dict[str, list[Line]]:
    """Returns the lines of what was computed, by what their seeds have in common."""
    rows: dict[str, list[Line]] = {}
    # A folder may have lines of cells that figures.toml does not have any more.
    for name, line in lines.items():
        is_known = "failed" not in line and line["method"] in cells.methods
        if is_known:
            row, _, _ = name.rpartition("-seed")
            rows.setdefault(row, []).append(line)
    return rows


def table(caption: str, rows: dict[str, list[Line]]) -> Table:
    """Returns scores, epsilons and costs, a row for each method and epsilon."""
    head = ["", "epsilon, release", "epsilon, server", *SCORES, "bytes/client"]
    head += ["wall s", "rounds", "seeds"]
    cells = [[name, *_row(lines)] for name, lines in rows.items()]
    note = "bytes/client: of the whole run, asked as often as the others"
    return Table(caption, head, cells, note)


def _row(lines: Sequence[Line]) -> list[str]:
    """Returns the cells of one row, but for its name."""
    first = lines[0]
    cells = [_epsilons(first, "release"), _epsilons(first, "server")]
    for score in SCORES.values():
        values = [line[score] for line in lines]
        cells.append(_mean(values))
    sent = "–"
    if first["bytes_per_client"]:
        sent = words.num_bytes(first["bytes_per_client"])
    cells.append(sent)
    # A run that was interrupted has no time: nobody knows what its first part took.
    times = [line["wall_seconds"] for line in lines]
    seconds = [time for time in times if time is not None]
    shown = "–"
    if seconds:
        shown = f"{mean(seconds):.0f}"
    cells.append(shown)
    cells.append(str(first["rounds"]))
    cells.append(str(len(lines)))
    return cells


def _epsilons(line: Line, adversary: str) -> str:
    known = line["epsilons"].get(adversary, {})
    texts = [f"{upper(epsilon)} {relation}" for relation, epsilon in known.items()]
    return " / ".join(texts) or "–"


def _mean(values: Sequence[float]) -> str:
    text = f"{mean(values):.4g}"
    # One seed has no spread.
    if len(values) > 1:
        text += f" ± {stdev(values):.2g}"
    return text


def points(rows: dict[str, list[Line]]) -> list[figure_drawing.Point]:
    """Returns where each row lies: its release's epsilon (replace-one), IS and FID."""
    found: list[figure_drawing.Point] = []
    for lines in rows.values():
        first = lines[0]
        of_release = first["epsilons"].get("release", {})
        inception_scores = [line[SCORES["IS"]] for line in lines]
        fids = [line[SCORES["FID"]] for line in lines]
        point = figure_drawing.Point(
            note=f"{first['method']}, {first['rounds']} rounds",
            epsilon=of_release.get("replace-one"),
            inception_score=mean(inception_scores),
            fid=mean(fids),
        )
        found.append(point)
    return found


@settings_flags("data_dir", "device")
@request_flags(FigureRequest)
def figures(*, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Make a table or figure of the papers; train and evaluate what is missing."""
    figure = given["figure"]
    # Of an unknown figure there is no expression, and the request refuses it.
    only = _CELLS_OF_FIGURES.get(figure, "")
    request = FigureRequest(**given, only=only)
    cells = CELLS.with_settings(settings)
    if request.full:
        cells = cells.at_full_scale()
    names = {cell.row for cell in request.of(cells)}

    def chosen(lines: Lines) -> dict[str, list[Line]]:
        rows = judged(cells, lines)
        return {name: rows[name] for name in rows if name in names}

    # The page has all that is stored; printed is what this figure needs.
    def page(lines: Lines) -> str:
        return table("", judged(cells, lines)).markdown()

    def printed(lines: Lines) -> list[Table]:
        return [table(figure, chosen(lines))]

    lines = fill(cells, request, page, printed)
    if figure in _CELLS_OF_CURVES:
        picture = request.output / f"{figure}.png"
        shown = points(chosen(lines))
        drawn = figure_drawing.privacy_utility(shown)
        scale = "reduced: figures.toml says how"
        if request.full:
            scale = "full scale"
        figure_drawing.save(picture, drawn, f"scale: {scale}")


if __name__ == "__main__":
    sys.exit(run_command(figures))
