"""Private values that must never be found again.

`planted_data` has one client whose pixels, sizes and label counts occur nowhere else.
`failing` makes clients raise errors that quote them.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.message import Message as Proto

from loading import write_npz
from tiny import NUM_CLASSES, SIDE, SIZES

VICTIM = 0
NUM_IMAGES = 10_007  # of the victim
NUM_RARE = 9_973  # of its images with the label 2; the others have label 0
PIXELS = bytes(range(173, 173 + SIDE))  # a row of each of its images
WORDS = "ward-4711-chemotherapy"  # in error texts, a type's name and the data's path


class ward_4711_chemotherapy(Exception):
    """An error whose very name tells."""


def planted_data(folder: Path) -> str:
    """Writes data with the private values and returns that value of `data`."""
    folder = folder / WORDS
    folder.mkdir()
    sizes = [NUM_IMAGES if client == VICTIM else n for client, n in enumerate(SIZES)]
    owners = np.repeat(np.arange(len(sizes)), sizes)
    images = np.random.default_rng(0).integers(
        256, size=(len(owners), 1, SIDE, SIDE), dtype=np.uint8
    )
    labels = np.arange(len(owners)) % NUM_CLASSES
    images[owners == VICTIM] = np.frombuffer(PIXELS, np.uint8)
    labels[:NUM_IMAGES] = np.where(np.arange(NUM_IMAGES) < NUM_RARE, 2, 0)
    return write_npz(folder / "x.npz", images=images, labels=labels, clients=owners)


def canaries() -> dict[str, bytes]:
    """The private values in every form in which they might leave, as patterns."""
    row = np.frombuffer(PIXELS, np.uint8)
    found = {
        "pixels": re.escape(PIXELS),
        "pixels, float32": re.escape((row.astype(np.float32) / 255)[:4].tobytes()),
        "pixels, printed": b",? ".join(b"%d" % value for value in row[:3]),
        "words": WORDS.replace("-", ".").encode(),
        "a word": WORDS.rpartition("-")[2].encode(),
    }
    for name, number in (("size", NUM_IMAGES), ("label count", NUM_RARE)):
        # Not within a hash, a decimal fraction or a longer number.
        found[f"{name}, printed"] = rb"(?<![\w.])%d(?!\w|\.\d)" % number
        for kind in (np.int64, np.float32, np.float64):
            found[f"{name}, {kind.__name__}"] = re.escape(kind(number).tobytes())
    return found


def canaries_in(content: bytes) -> set[str]:
    """Returns the names of the private values in some bytes."""
    return {n for n, each in canaries().items() if re.search(each, content, re.DOTALL)}


def leaves(proto: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value that is set in a protobuf message, however deep."""
    for field, value in proto.ListFields():
        below = f"{path}.{field.name}".lstrip(".")
        is_single = isinstance(value, str | bytes | int | float | Proto)
        for item in [value] if is_single else value:
            if isinstance(item, Proto):
                yield from leaves(item, below)
            else:
                yield below, item


# ------------------------------------------------------------------ failing clients


QUOTED = f"{WORDS}: {NUM_IMAGES} images, {NUM_RARE} of label 2, {[*PIXELS]}"
LOGS_NOTHING = 5  # the round in which the failure's text cannot be written either
FAILURES: dict[int, Exception | None] = {
    1: LookupError(QUOTED),
    2: None,  # an error of torch's
    3: ward_4711_chemotherapy(),
    4: ValueError(f"{WORDS} \udcff"),  # as in the name of a file that is not UTF-8
    LOGS_NOTHING: LookupError(QUOTED),
}


def failing(answer_of: Callable[..., Any], marks: Path) -> Callable[..., Any]:
    """Returns `answer_of`, failing when a node is asked first in each round."""

    def fail_first(config: Any, hosted: Any, request: Any) -> Any:
        node_id = hosted.node_id
        mark = marks / f"failed-{node_id}-{request.round}"
        if mark.exists():
            return answer_of(config, hosted, request)
        mark.touch()
        if request.round == LOGS_NOTHING:
            log = Path(config.output) / "private" / f"node-{node_id:05d}" / "error.log"
            log.unlink(missing_ok=True)
            log.mkdir(parents=True)
        if (error := FAILURES[request.round]) is not None:
            raise error
        return torch.zeros(NUM_IMAGES) + torch.zeros(NUM_RARE)

    return fail_first
