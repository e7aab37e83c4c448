"""`make bench`: speed and memory on this machine, as tables; nothing is asserted.

    python -m experiments.bench [--device cuda] [--skip-flower] [--skip-deployment]

1. Training steps against what the machine can do (`steps`).
2. Memory of 539 width-16 discriminators with their Adam moments.
3. Milliseconds for the noise of one release, the secure sampler against Philox.
4. On a GPU: the local warm start of width-64 discriminators, `--warm-start-clients` of
   them, and the share of the card's measured matrix peak.
5. Seconds per round of the Flower simulation and of the local engine, same work, in
   `--pairs` pairs; wall time, and CPU time of all processes.
6. Rounds per second of a simulation's messages alone (`messages`), and seconds per
   round of a deployment on the loopback (`deployment`).
"""

import itertools
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from experiments.bench.deployment import (
    cpu_of_round,
    flags_of,
    latency_table,
    metered,
    seconds_of_rounds,
)
from experiments.bench.measuring import (
    median_seconds,
    memory_bytes,
    printed_by,
    seconds_of,
)
from experiments.bench.messages import messages_table
from experiments.bench.steps import (
    bench_config,
    bench_data,
    critic_flops,
    critics_table,
    flop_peaks,
    paper_table,
    peaks_table,
    products_table,
    training_step,
)
from experiments.flags import run_command
from experiments.tables import Table
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.warm_start import warm_start
from fedgs.mechanism.noise import NoiseStream
from fedgs.process import keep_freed_memory

NUM_CLIENTS = 539
BENCH_ROUNDS = 12
MIB = 2**20


def main(
    device: str = "cpu",
    skip_flower: bool = False,
    skip_deployment: bool = False,
    warm_start_clients: int = 64,
    pairs: int = 1,
) -> None:
    """Print speed and memory as tables."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a training process does
    peaks_table(device)
    critics_table(device)
    paper_table(device)
    products_table(device)
    memory_table()
    noise_table()
    if device != "cpu":
        warm_start_table(device, warm_start_clients)
    if not skip_flower:
        engines_table(pairs)
        messages_table()
    if not skip_deployment:
        latency_table()


def memory_table() -> None:
    """Prints how much 539 width-16 discriminators add to a process that trains."""
    code = "from experiments.bench.__main__ import print_memory; print_memory()"
    before, peak, state = (float(word) / MIB for word in printed_by(code))
    head = ["state (3 x parameters)", "process before", "peak", "added"]
    cells = [f"{size:.0f}" for size in (state, before, peak, peak - before)]
    Table(f"memory of {NUM_CLIENTS} width-16 discriminators, MiB", head, [cells]).show()


def print_memory() -> None:
    """Prints bytes before, at the peak and of the state; for a process of its own."""
    torch.set_num_threads(1)
    config = bench_config(discriminator_dim=16)
    training_step(config, Discriminators(config, range(1)))()  # imports and buffers
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    state = Discriminators(config, range(NUM_CLIENTS))
    training_step(config, state)()
    size = sum(v.numel() * v.element_size() for v in state.state().values())
    print(before, memory_bytes("VmHWM"), size)


def noise_table() -> None:
    """Prints what the secure sampler costs per release of B = 32 fakes."""
    rows: list[list[str]] = []
    for side in (14, 28):
        shape = (32, 1, side, side)
        secure, philox = (
            1000 * median_seconds(partial(_draw_noise, shape, is_secure))
            for is_secure in (True, False)
        )
        name = "x".join(map(str, shape))
        rows.append([name, f"{secure:.2f}", f"{philox:.2f}", f"{secure / philox:.0f}"])
    head = ["release", "secure", "Philox", "secure / Philox"]
    Table("noise of one release, ms", head, rows).show()


def _draw_noise(shape: tuple[int, ...], is_secure: bool) -> None:
    NoiseStream(None, 0, 1, is_secure).normal(shape, 1.0)


def warm_start_table(device: str, clients: int, rounds: int = 2) -> None:
    """Prints the speed of the paper's local warm start at width 64 on a GPU."""
    peak = flop_peaks(device)["matrix, float32"]
    data = bench_data(clients, 60)
    rows: list[list[str]] = []
    for stacking in ("stacked", "loop"):
        config = bench_config(
            discriminator_dim=64,
            generator="resnet",
            generator_dim=64,
            spectral_norm=True,
            discriminator_activation="relu",
            latent="bernoulli",
            discriminator_steps=5,
            discriminator_batch_size=32,
            fakes_per_round=None,
            warm_start="local",
            warm_start_rounds=rounds,
            stacking=stacking,
            device=device,
            num_clients=clients,
            clients_per_round=clients,
        )
        state = Discriminators(config, range(clients))
        start = partial(warm_start, config, state, data, range(clients))
        rate = clients * rounds * config.discriminator_steps / seconds_of(start, device)
        share = rate * critic_flops(64, 32) / peak
        rows.append([stacking, f"{rate:.0f}", f"{1e7 / rate / 3600:.1f}"])
        rows[-1].append(f"{share:.1%}")
    head = ["stacking", "steps per second", "1000 clients x 2000 rounds, hours"]
    head.append("share of measured float32 matrix peak")
    where = torch.cuda.get_device_name()
    Table(f"local warm start, width 64, {where}", head, rows).show()


def engines_table(pairs: int) -> None:
    """Prints a round's time in both engines on 539 width-8 clients, in turn.

    CPU seconds are those of all processes, so that other work disturbs them little.
    """
    found: dict[str, list[tuple[float, float]]] = {"local": [], "flower": []}
    with tempfile.TemporaryDirectory() as scratch:
        data = bench_data(NUM_CLIENTS, 60)
        path = Path(scratch) / "data.npz"
        clients = np.repeat(np.arange(NUM_CLIENTS), 60)
        np.savez(path, images=data.images[:, 0], labels=data.labels, clients=clients)
        for pair, engine in itertools.product(range(pairs), found):
            run = Path(scratch) / f"{engine}-{pair}"
            settings: dict[str, object] = {
                "recipe": "full-participation",
                "data": f"npz:{path}",
                "engine": engine,
                "num_rounds": BENCH_ROUNDS,
                "warm_start_rounds": 1,
                "noise_multiplier": 1,
                "output": run,
                "seed": 0,
            }
            command = [sys.executable, "-m", "fedgs", "train", *flags_of(settings)]
            with metered(run / "metrics.jsonl") as seen:
                subprocess.run(command, check=True, capture_output=True)
            wall = statistics.median(seconds_of_rounds(run))
            found[engine].append((wall, cpu_of_round(seen)))
    rows: list[list[str]] = []
    for engine, times in found.items():
        cells = [engine]
        for at in range(2):
            ratios = (
                t[at] / t0[at] for t, t0 in zip(times, found["local"], strict=True)
            )
            cells.append(f"{statistics.median(t[at] for t in times):.2f}")
            cells.append(f"{statistics.median(ratios):.2f}")
        rows.append(cells)
    caption = f"{NUM_CLIENTS} clients, width 8, 11 nodes, 2 workers, pairs: {pairs}"
    Table(caption, ["engine", "s/round", "ratio", "CPU s/round", "ratio"], rows).show()


if __name__ == "__main__":
    sys.exit(run_command(main))
