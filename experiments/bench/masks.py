"""What secure aggregation costs a node and the server in one attempt of a round.

    python -m experiments.bench.masks [--nodes 11 --nodes 100]

CPU time of one thread, for a release of 32 gradients of 14 x 14 coefficients (the
recipe full-participation): a node checks the signatures of the list, masks its sum,
draws and signs its next key; the server adds up and opens. Bytes beside the tensors are
those of the list that goes down to each node, and of the key that comes back.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from experiments.flags import run_command
from experiments.launch.certs import make_certificates
from experiments.tables import Table
from fedgs.config.integers import clip_units
from fedgs.mechanism.integers import sanitize_integers
from fedgs.mechanism.masks import Asked, Attempt, MaskingKey, mask, unmask
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.peers import Peers
from fedgs.mechanism.sanitizer import PerSampleGradients, clip

SHAPE = (32, 1, 14, 14)
NOISE = 1.0  # multiplier; costs nothing
RUN = "0" * 16


def masks_table(nodes: list[int] | None = None) -> None:
    """Print milliseconds and bytes of one attempt, by number of nodes."""
    rows: list[list[str]] = []
    for count in nodes or [2, 11, 25, 50, 100]:
        rows.append([f"{count}", *_row(count)])
    head = ["nodes", "node: check ms", "mask ms", "next key ms", "server: open ms"]
    head += ["tensors up, bytes", "key up", "list down"]
    Table("secure aggregation, one attempt, CPU time", head, rows).show()


def _row(count: int) -> list[str]:
    names = [f"node-{number}" for number in range(count)]
    with tempfile.TemporaryDirectory(prefix="fedgs-bench-") as folder:
        make_certificates(Path(folder), [], names)
        files = Path(folder) / "clients"
        peers = [Peers.read(n, files / f"{n}.key", files, None) for n in names]
    keys = [MaskingKey.generate() for _ in names]
    listed = [own.sign(key, RUN) for own, key in zip(peers, keys, strict=True)]
    attempt = Attempt(1, dict(enumerate(listed)))
    units = clip_units(NOISE, count)
    part = clip(PerSampleGradients(torch.randn(1, *SHAPE)), 1.0)
    noise = NoiseStream(None, 0, 1)
    own = sanitize_integers([part], units, 2 * NOISE, noise, 1, 0)
    asked = Asked(RUN, 1, "a" * 64, names.__getitem__)
    masked = mask(own, keys[0], attempt, asked, listed[0].pack())
    parts: list[Callable[[], object]] = [
        lambda: peers[0].check(dict(zip(names, listed, strict=True)), RUN),
        lambda: mask(own, keys[0], attempt, asked, b""),
        lambda: peers[0].sign(MaskingKey.generate(), RUN),
        lambda: unmask([masked] * count),
    ]
    sizes = (masked.values.nbytes, len(masked.next_key), len(attempt.packed))
    return [
        *(f"{_milliseconds(part):.2f}" for part in parts),
        *(f"{s:,}" for s in sizes),
    ]


def _milliseconds(function: Callable[[], object]) -> float:
    """Returns the median CPU time of seven calls."""
    found: list[float] = []
    for _ in range(7):
        started = time.process_time()
        function()
        found.append(1000 * (time.process_time() - started))
    return statistics.median(found)


if __name__ == "__main__":
    sys.exit(run_command(masks_table))
