"""The study of GS-WGAN's knobs: one change at a time on public data, then together.

    python -m experiments.paper.study                        every change, seed 0
    python -m experiments.paper.study --seeds 0,1 --only X   some cells with two seeds
    python -m experiments.paper.study --print                from folders only

The data are digits drawn from fonts, which are public, so that nothing is chosen on
private data. The scale is small: 100 pseudo-writers, 16 x 16 pixels, 25 rounds.
`EPSILON` gives their average the noise that 539 writers have at epsilon 10. What was
best is trained on `mnist-by-writer` too, which needs --data-dir. A cell is that of
`experiments.paper.cells`, a method is called by what it changes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.flags import request_flags, run_command
from experiments.paper.cell_list import Cells, Method, Request, Settings, Source
from experiments.paper.cells import fill
from fedgs.config.fields import flag

# mu of 100 clients at 103.3 / mu of 539 at 10 = 539 / 100, delta 1e-5, zero-out
EPSILON = {103.3: {}}
RECIPE = "full-participation"
FONTS, WRITERS = ["fonts"], ["mnist-by-writer"]
DATA = {
    "fonts": Source({"num_clients": 100, "clients_per_node": 100}, {}),
    "mnist-by-writer": Source({}, {10: 0.93}),
}
SMALL: Settings = {"image_size": 16, "dct_size": 8}  # half the frequencies, as at 28
LARGE: Settings = {"num_rounds": 25, "surrogate_steps": 8, "discriminator_steps": 5}
BASE = SMALL | LARGE
TOGETHER: Settings = {"discriminator_learning_rate": 8e-3}
ONE_AT_A_TIME: dict[str, tuple[Any, ...]] = {
    "discriminator_steps": (1, 10),
    "surrogate_steps": (0, 2),
    "discriminator_learning_rate": (5e-4, 8e-3),
    "generator_learning_rate": (3e-4, 3e-3),
    "num_rounds": (10, 50),
    "gradient_penalty_weight": (1.0,),
    "gradient_penalty_every": (4, 16),
    "clip_bound": (0.3, 3.0),
    "dct_size": (5, 16),
    "generator": ("dcgan",),
    "latent_dim": (30,),
    "discriminator_dim": (16,),
    "generator_dim": (32,),
    "warm_start_rounds": (0,),
    "batch_size": (64,),
    "spectral_norm": (True,),
    "ema_decay": (0.9,),
}
PAIRS: tuple[Settings, ...] = (
    {"discriminator_steps": 2, "discriminator_learning_rate": 8e-3},
)
CHANGES: tuple[Settings, ...] = (
    *PAIRS,
    *({name: value} for name, values in ONE_AT_A_TIME.items() for value in values),
)


def _method(change: Settings, draws: int = 1) -> Method:
    return Method(RECIPE, BASE | change, EPSILON, FONTS, draws=draws)


def _named(change: Settings) -> str:
    return ",".join(f"{name}={value}" for name, value in change.items())


METHODS = {
    "base": _method({}),
    "draws=4": _method({}, draws=4),
    **{_named(change): _method(change) for change in CHANGES},
    "together": Method(RECIPE, LARGE | TOGETHER, {10.0: {}}, WRITERS),
}
STUDY = Cells("GS-WGAN's knobs", DATA, METHODS)


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
    fill(STUDY, StudyRequest(**given))


if __name__ == "__main__":
    sys.exit(main())
