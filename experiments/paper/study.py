"""The study of GS-WGAN's knobs: one change at a time on public data, then together.

    python -m experiments.paper.study                        every change, seed 0
    python -m experiments.paper.study --seeds 0,1 --only X   some cells with two seeds
    python -m experiments.paper.study --print                from folders only

The data are digits drawn from fonts, which are public, so that nothing is chosen on
private data. The scale is small: 100 pseudo-writers, 16 x 16 pixels, 25 rounds. What
was best is trained on `mnist-by-writer` too, which needs --data-dir. A cell is that of
`experiments.grid.runs`; the cells are in `study.toml`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.flags import request_flags, run_command
from experiments.grid.cells import Cells, Request
from experiments.paper.pictures import show
from fedgs.config.fields import flag

STUDY = Cells.read(Path(__file__).with_suffix(".toml"))


@dataclass(frozen=True, kw_only=True)
class StudyRequest(Request):
    """What a call asks for: other defaults than the table of pictures has."""

    seeds: tuple[str, ...] = flag(("0",), "Of each row, at most.")
    output: Path = flag(Path("runs/study"), "Its folder.")


def main(words: Sequence[str] | None = None) -> int:
    """Fills and prints the table; returns the exit code."""
    return run_command(study, words)


@request_flags(StudyRequest)
def study(*, given: dict[str, Any]) -> None:
    """Reprint the table of the study; train and evaluate what is missing."""
    show(STUDY, StudyRequest(**given))


if __name__ == "__main__":
    sys.exit(main())
