"""What `fedgs bench` prints: steps a second.

Nothing is asserted. On a CPU one thread works and its CPU seconds count, so that other
work on the machine disturbs little; times are medians of five after a first one.
"""

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from fedgs.app.tables import Table
from fedgs.config.recipes import gs_wgan
from fedgs.config.run_config import GsWganConfig
from fedgs.gan.discriminators import Discriminators
from fedgs.process import keep_freed_memory
from fedgs.round.preparation import check_device

WIDTHS = (8, 16, 32, 64)
REPEATS = 6  # the first does not count


def bench(device: str) -> None:
    """Prints steps a second by width and precision, in one batched call and in turn.

    Args:
        device: "cpu" or "cuda", of the steps.

    Raises:
        UserError: there is no GPU.
    """
    check_device(_config(device=device))
    torch.set_num_threads(1)
    keep_freed_memory()  # as a training process does
    rows: list[list[str]] = []
    for width, precision in itertools.product(WIDTHS, ("float32", "bfloat16")):
        clients = 64
        if device == "cpu":  # about as long for every width
            clients = 256 // width
        config = _config(discriminator_dim=width, precision=precision, device=device)
        stacked = _steps_a_second(config, clients, is_stacked=True)
        in_turn = _steps_a_second(config, clients, is_stacked=False)
        row = [str(width), precision, str(clients), stacked, in_turn]
        rows.append(row)
    head = ["width", "convolutions", "discriminators"]
    head += ["stacked, steps/s", "loop, steps/s"]
    Table(f"discriminator steps on {device}, 16 + 16 images", head, rows).show()


def _steps_a_second(config: GsWganConfig, clients: int, is_stacked: bool) -> str:
    """Returns the median speed of all clients together, as a table shows it."""
    state = Discriminators(config, range(clients), is_stacked)
    step = training_step(config, state)
    seconds = [_seconds_of(step, config.device) for _ in range(REPEATS)]
    # The first call reserves memory and chooses kernels.
    typical = statistics.median(seconds[1:])
    return f"{clients / typical:.2f}"


def _config(**overrides: object) -> GsWganConfig:
    """Returns settings of full participation, for one client unless another is said."""
    settings = {
        "num_classes": 10,
        "seed": 0,
        "noise_multiplier": 1.0,
        "target_epsilon": None,
        "num_clients": 1,
        "clients_per_round": 1,
        "image_size": 28,
        "image_channels": 1,
    }
    return GsWganConfig.from_flat(settings | overrides, gs_wgan())


def training_step(config: GsWganConfig, state: Discriminators) -> Callable[[], None]:
    """Returns a function that takes one step with every client's discriminator.

    All clients train on the same random images: their memory is not what is measured.
    """
    rng = torch.Generator().manual_seed(0)
    size = config.discriminator_batch_size
    images = torch.rand(2, 1, size, 1, 28, 28, generator=rng).to(config.device)
    labels = torch.randint(10, (2, 1, size), generator=rng).to(config.device)
    mix = torch.rand(1, size, generator=rng).to(config.device)
    count = len(state)  # of clients
    # Views: every client has the same images in the same memory.
    real = images[0].expand(count, -1, -1, -1, -1)
    fake = images[1].expand(count, -1, -1, -1, -1)
    real_labels = labels[0].expand(count, size)
    fake_labels = labels[1].expand(count, size)
    mix = mix.expand(count, size)

    def step() -> None:
        for chunk in state.chunks(range(count)):
            state.train(
                chunk,
                real[chunk],
                real_labels[chunk],
                fake[chunk],
                fake_labels[chunk],
                mix[chunk],
            )

    return step


def _seconds_of(step: Callable[[], None], device: str) -> float:
    """Returns the seconds of one call: of this process, or on a GPU of the clock."""
    clock = time.perf_counter
    if device == "cpu":
        clock = time.process_time

    def now() -> float:
        torch.zeros((), device=device).item()  # waits for what a GPU still does
        return clock()

    started = now()
    step()
    return now() - started
