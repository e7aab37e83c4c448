"""The table of pictures: what a user-level epsilon buys, by data set and method.

    python -m experiments.paper.pictures --data-dir DATA              train and print
    python -m experiments.paper.pictures --only by-writer-staged-eps  some cells
    python -m experiments.paper.pictures --print                      from folders only

See `experiments.paper.cells` for what a cell is.
"""

import sys
from collections.abc import Sequence
from typing import Any

from experiments.flags import request_flags, run_command
from experiments.paper.cell_list import (
    NO_NOISE,
    Cells,
    Method,
    Request,
    Settings,
    Source,
)

SHARDS = {"partition": "iid", "num_clients": 1000, "clients_per_node": 50}
DATA = {
    "mnist-by-writer": Source({}, {10: 0.93, 3: 0.88, 1: 0.80}),
    "mnist": Source(SHARDS, {10: 0.95, 3: 0.92, 1: 0.85}),
    "fashion-mnist": Source(SHARDS, {10: 0.80, 3: 0.76, 1: 0.70}),
}
# Chosen on digits of fonts and on Fashion-MNIST; PARTED with MNIST in view as well.
SIZES = {10.0: {"moment_size": 10}, 3.0: {"moment_size": 8}, 1.0: {"moment_size": 6}}
PARTED = {10.0: {}, 3.0: {"moment_size": 10, "latent_dim": 30}}
AXES = {10.0: {"latent_dim": 30}, 3.0: {"latent_dim": 20}, 1.0: {"latent_dim": 15}}
# 40 rounds of gradients of 32 fakes cost 1280, a fifth of mu^2; stages have the rest.
REFINED: Settings = {"stages": "means:1280,scatter:1280,moments:2560"}
REFINED |= {"num_rounds": 43}
SHORT = {"num_rounds": 50}
FAST = {"generator_learning_rate": 1e-3}
WRITERS = ["mnist-by-writer"]
TEN, ONCE = {10.0: {}}, (WRITERS, [0])
GS_WGAN = "full-participation"
# The published noise has no target: 10 rounds of it cost 11.4.
PUBLISHED = {"num_rounds": 10, "warm_start_rounds": 1, "noise_multiplier": 1.07}
PUBLISHED |= {"clients_per_node": 1}  # a node warm-starts all its discriminators
METHODS = {
    "staged": Method("staged", {}, SIZES),
    "staged-parts": Method("staged-parts", {}, PARTED),
    "staged-fonts": Method("staged-fonts", {}, AXES, ["mnist-by-writer", "mnist"]),
    "staged-none": Method("staged", {}, {NO_NOISE: {}}),
    "staged-parts-none": Method("staged-parts", {}, {NO_NOISE: {}}),
    "refined": Method("staged", REFINED | FAST, TEN, *ONCE),
    "gs-wgan": Method(GS_WGAN, SHORT, TEN, WRITERS),
    "gs-wgan-none": Method(GS_WGAN, SHORT, {NO_NOISE: {}}, *ONCE),
    "algorithm-1": Method("algorithm-1", PUBLISHED, {11.4: {}}, ["mnist"], [0]),
}
PICTURES = Cells("Pictures", DATA, METHODS)


def main(words: Sequence[str] | None = None) -> int:
    """Fills and prints the table; returns the exit code."""
    return run_command(pictures, words)


@request_flags(Request)
def pictures(*, given: dict[str, Any]) -> None:
    """Reprint the table of pictures; train and evaluate what is missing."""
    from experiments.paper.cells import fill

    fill(PICTURES, Request(**given))


if __name__ == "__main__":
    sys.exit(main())
