"""The table of docs/debugging.md about real images: each bug of the catalogue.

    python -m experiments.debug.catalogue_table --data mnist-by-writer --data-dir DATA

Nothing is trained. Cohorts are random groups of clients, and the samples of a group are
real images of its clients: what perfect generators would draw. The bug is put into all
or half of the suspicious cohort's images, where it has a degree at one that the
catalogue does not look for.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.debug.bug_detection import outcome
from experiments.flags import request_flags, run_command
from fedgs.config.fields import flag
from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages, to_float
from fedgs.data.load import load_data
from fedgs.data.transformations import TRANSFORMATIONS, Degree, Transformation
from fedgs.diagnosis.diagnosis import diagnose
from fedgs.evaluation.images import LabelledImages
from fedgs.randomness import stream

GROUPS = 4
DEGREES: dict[str, Degree] = {
    "blur": 0.06,
    "noise": 0.2,
    "contrast": 0.5,
    "brightness": 0.5,
    "gamma": 1.8,
    "shift": (0.1, 0.05),
    "crop": 0.8,
    "border": 0.12,
    "scale": 0.8,
    "low-resolution": 0.4,
    "compression": 8,
    "swap-labels": (3, 5),
    "mislabel": (1, 7),
}


@dataclass(frozen=True)
class Request:
    """What the command is asked for; each flag's help says what it is."""

    data: str = flag("mnist-by-writer", "As of fedgs train.")
    data_dir: str = flag("", "As of fedgs train.")
    image_size: int = flag(16, "As of fedgs train.")
    samples_per_group: int = flag(500, "Images of each group.")
    seed: int = flag(0, "Of the groups.")
    none_seeds: int = flag(10, "How often nothing is planted.")


@request_flags(Request)
def main(*, given: dict[str, Any]) -> None:
    """Print the table, row by row."""
    asked = Request(**given)
    config = RunConfig(
        data=asked.data,
        data_dir=asked.data_dir or None,
        image_size=asked.image_size,
        seed=asked.seed,
    )
    data = load_data(config)
    print("| bug | in all images | in half of them |\n|---|---|---|", flush=True)
    for entry in TRANSFORMATIONS:
        cells = [" ".join(_cell(data, entry, share, asked)) for share in (1.0, 0.5)]
        print(f"| `{entry.name}` | {' | '.join(cells)} |", flush=True)
    seeds = range(asked.seed, asked.seed + asked.none_seeds)
    found = [_verdict(groups(data, asked, seed), data) for seed in seeds]
    print(f"| none | {', '.join(found)} | |", flush=True)


def _cell(
    data: FederatedImages, entry: Transformation, share: float, asked: Request
) -> Iterator[str]:
    own = groups(data, asked, asked.seed)
    own[GROUPS:] = [spoilt(group, entry, share, data) for group in own[GROUPS:]]
    verdict = _verdict(own, data)
    is_wrong = verdict == "none" or outcome(verdict, entry.name) == "wrong"
    result = "wrong" if is_wrong else outcome(verdict, entry.name)
    yield result
    if result != "right":
        yield f"({verdict})"


def _verdict(own: list[LabelledImages], data: FederatedImages) -> str:
    return diagnose(own[:GROUPS], own[GROUPS:], data.num_classes).verdict


def groups(data: FederatedImages, asked: Request, seed: int) -> list[LabelledImages]:
    """Returns images of disjoint random groups of clients, of both cohorts."""
    rng = stream(seed, "catalogue-table")
    found = list[LabelledImages]()
    for clients in np.array_split(rng.permutation(data.num_clients), 2 * GROUPS):
        records = np.concatenate([data.client_records[c] for c in clients])
        chosen = rng.choice(records, asked.samples_per_group, replace=False)
        found.append(LabelledImages(to_float(data.images[chosen]), data.labels[chosen]))
    return found


def spoilt(
    group: LabelledImages, entry: Transformation, share: float, data: FederatedImages
) -> LabelledImages:
    """Returns the group with the bug in its first images; their order is random."""
    images, labels = group.images.copy(), group.labels.copy()
    degree = DEGREES.get(entry.name, entry.degrees[0])
    own = slice(round(share * len(labels)))
    if entry.images is not None:
        images[own] = entry.images(images[own], degree)
    if entry.labels is not None:
        labels[own] = entry.labels(labels[own], data.num_classes, degree)
    return LabelledImages(images, labels)


if __name__ == "__main__":
    sys.exit(run_command(main))
