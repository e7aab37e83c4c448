"""`make bench`: speed and memory on this machine, as tables; nothing is asserted.

    python -m experiments.bench [--device cuda] [--skip-flower] [--skip-deployment]

1. Discriminator steps per second, stacked against one at a time, by width.
2. Seconds per round of the Flower simulation and of the local engine, same work.
3. Memory of 539 width-16 discriminators with their Adam moments.
4. Milliseconds for the noise of one release, the secure sampler against Philox.
5. On a GPU: the local warm start of width-64 discriminators, and the share of the
   card's measured matrix peak.
6. Rounds per second of a simulation's messages alone (`bench_messages`), and seconds
   per round of a deployment on the loopback (`bench_deployment`).
"""

import argparse
import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from experiments.bench.deployment import latency_table
from experiments.bench.messages import messages_table
from experiments.recipes import full_participation
from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.warm_start import warm_start
from fedgs.mechanism.noise import NoiseStream
from fedgs.runs.run_folder import RunFolder

WIDTHS = (8, 16, 32, 64)
NUM_CLIENTS = 539
BENCH_ROUNDS = 12
console = Console()


def main() -> None:
    """Runs the benchmarks."""
    parser = argparse.ArgumentParser(description="Speed and memory, as tables")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--skip-flower", action="store_true")
    parser.add_argument("--skip-deployment", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps_table(arguments.device)
    memory_table()
    noise_table()
    if arguments.device != "cpu":
        warm_start_table(arguments.device)
    if not arguments.skip_flower:
        engines_table()
        messages_table()
    if not arguments.skip_deployment:
        latency_table()


def steps_table(device: str) -> None:
    """Prints discriminator steps per second, stacked and in a loop."""
    where = "1 thread" if device == "cpu" else torch.cuda.get_device_name()
    table = Table(title=f"discriminator steps per second, batch 16 + 16, {where}")
    for column in ("width", "clients", "stacked", "loop", "stacked / loop"):
        table.add_column(column, justify="right")
    for width in WIDTHS:
        clients = 49 if width < 32 or device != "cpu" else 16
        rates = []
        for stacking in ("stacked", "loop"):
            config = _config(discriminator_dim=width, stacking=stacking, device=device)
            rates.append(clients / _seconds(_training_step(config, clients), device))
        table.add_row(
            str(width),
            str(clients),
            f"{rates[0]:.0f}",
            f"{rates[1]:.0f}",
            f"{rates[0] / rates[1]:.2f}",
        )
    console.print(table)


def _training_step(config: RunConfig, clients: int) -> Callable[[], None]:
    """Returns a function that takes one step with every client's discriminator."""
    discriminators = Discriminators(config, range(clients))
    size = (clients, config.discriminator_batch_size)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand((2, *size, 1, 28, 28), generator=generator).to(config.device)
    labels = torch.randint(10, (2, *size), generator=generator).to(config.device)
    mix = torch.rand(size, generator=generator).to(config.device)
    chunks = list(discriminators.chunks(range(clients)))

    def step() -> None:
        for chunk in chunks:
            discriminators.train(
                chunk,
                images[0, chunk],
                labels[0, chunk],
                images[1, chunk],
                labels[1, chunk],
                mix[chunk],
            )

    return step


def memory_table() -> None:
    """Prints how much 539 width-16 discriminators add to a process that trains."""
    code = "from experiments import bench; bench.print_memory()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    before, after, size = (float(word) for word in result.stdout.split())
    table = Table(title=f"memory of {NUM_CLIENTS} width-16 discriminators, MiB")
    for column in ("state (3 x parameters)", "process before", "peak", "added"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{size:.0f}", f"{before:.0f}", f"{after:.0f}", f"{after - before:.0f}"
    )
    console.print(table)


def print_memory() -> None:
    """Prints MiB before, at the peak and of the state; for a process of its own."""
    torch.set_num_threads(1)
    config = _config(discriminator_dim=16)
    _training_step(config, 1)()  # what any training process loads
    before = _status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    state = Discriminators(config, range(NUM_CLIENTS))
    train_once(config, state)
    size = sum(v.numel() * v.element_size() for v in state.state().values()) / 2**20
    print(before, _status_mib("VmHWM"), size)


def _status_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def train_once(config: RunConfig, state: Discriminators) -> None:
    """Takes one step with every client, on random images, chunk by chunk."""
    size = config.discriminator_batch_size
    for chunk in state.chunks(range(len(state))):
        images = torch.rand(2, len(chunk), size, 1, 28, 28)
        labels = torch.randint(10, (2, len(chunk), size))
        mix = torch.rand(len(chunk), size)
        state.train(chunk, images[0], labels[0], images[1], labels[1], mix)


def noise_table() -> None:
    """Prints what the secure sampler costs per release of B = 32 fakes."""
    table = Table(title="noise of one release, ms")
    for column in ("release", "secure", "Philox", "secure / Philox"):
        table.add_column(column, justify="right")
    for side in (14, 28):
        shape = (32, 1, side, side)
        secure, philox = (
            1000 * _seconds(partial(_draw_noise, shape, is_secure), "cpu")
            for is_secure in (True, False)
        )
        table.add_row(
            "x".join(map(str, shape)),
            f"{secure:.2f}",
            f"{philox:.2f}",
            f"{secure / philox:.0f}",
        )
    console.print(table)


def _draw_noise(shape: tuple[int, ...], is_secure: bool) -> None:
    NoiseStream(None, 0, 1, is_secure).normal(shape, 1.0)


def warm_start_table(device: str, clients: int = 64, rounds: int = 2) -> None:
    """Prints the speed of the paper's local warm start at width 64 on a GPU."""
    peak = _matrix_peak(device)
    table = Table(title=f"local warm start, width 64, {torch.cuda.get_device_name()}")
    for column in (
        "stacking",
        "steps per second",
        "1000 clients x 2000 rounds, hours",
        "share of measured float32 matrix peak",
    ):
        table.add_column(column, justify="right")
    data = bench_data(clients, 60)
    for stacking in ("stacked", "loop"):
        config = _config(
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
        seconds = _once(
            partial(warm_start, config, state, data, range(clients)), device
        )
        steps = clients * rounds * config.discriminator_steps / seconds
        flops = steps * _step_flops(64, 32)
        table.add_row(
            stacking, f"{steps:.0f}", f"{1e7 / steps / 3600:.1f}", f"{flops / peak:.1%}"
        )
    console.print(table)


def _step_flops(width: int, batch: int) -> float:
    """Estimates the operations of one step: forward 1, backward 2, penalty 6."""
    macs = 196 * 25 * width + 49 * 25 * 2 * width**2 + 16 * 25 * 8 * width**2
    return 2 * macs * batch * (2 * 3 + 6)


def _matrix_peak(device: str) -> float:
    a = torch.randn(8192, 8192, device=device)
    return 2 * 8192**3 / _seconds(lambda: a @ a, device)


def engines_table() -> None:
    """Prints seconds per round of both engines on 539 width-8 clients, in turn."""
    table = Table(title=f"{NUM_CLIENTS} clients, width 8, 11 nodes, 2 workers")
    for column in ("engine", "s/round, median", "ratio"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as scratch:
        data = bench_data(NUM_CLIENTS, 60)
        path = Path(scratch) / "data.npz"
        clients = np.repeat(np.arange(NUM_CLIENTS), 60)
        np.savez(path, images=data.images[:, 0], labels=data.labels, clients=clients)
        medians = []
        for engine in ("local", "flower"):
            output = Path(scratch) / engine
            command = [
                sys.executable,
                "-m",
                "fedgs",
                "train",
                "--recipe",
                "full-participation",
                "--data",
                f"npz:{path}",
                "--engine",
                engine,
                "--num-rounds",
                str(BENCH_ROUNDS),
                "--warm-start-rounds",
                "1",
                "--noise-multiplier",
                "1",
                "--output",
                str(output),
                "--seed",
                "0",
            ]
            subprocess.run(command, check=True, capture_output=True)
            lines = (RunFolder.open(output).path / "metrics.jsonl").read_text()
            seconds = [
                float(line.split('"seconds": ')[1].split(",")[0])
                for line in lines.splitlines()[2:]
            ]
            medians.append(statistics.median(seconds))
            table.add_row(
                engine, f"{medians[-1]:.2f}", f"{medians[-1] / medians[0]:.2f}"
            )
    console.print(table)


def bench_data(num_clients: int, size: int) -> FederatedImages:
    """Returns random images, `size` of each client."""
    rng = np.random.default_rng(0)
    count = num_clients * size
    return FederatedImages(
        rng.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8),
        rng.integers(0, 10, count),
        tuple(np.arange(count).reshape(num_clients, size)),
        tuple(str(client) for client in range(num_clients)),
        10,
        "random",
    )


def _config(**overrides: object) -> RunConfig:
    settings = {"num_classes": 10, "seed": 0, "noise_multiplier": 1.0}
    config = dataclasses.replace(full_participation(), target_epsilon=None)
    return dataclasses.replace(config, **{**settings, **overrides})  # type: ignore[arg-type]


def _once(function: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _seconds(function: Callable[[], object], device: str) -> float:
    """Returns the median time of five calls after two that do not count."""
    for _ in range(2):
        function()
    return statistics.median(_once(function, device) for _ in range(5))


if __name__ == "__main__":
    main()
