"""What messages weigh whose size depends on what they hold.

    python -m experiments.paper.communication RUN...

prints what a round of Algorithm 2 at its published size weighs where the fakes are
those of a run's generator: compact messages depend on what the fakes show. Of a run of
`fedgs baseline fedavg-gan` it prints what a round of that run weighs.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from experiments.flags import run_command
from experiments.launch.local_grid import SERVER
from experiments.launch.measuring_grid import message_bytes
from experiments.tables import Table
from fedgs.baselines.fedavg_gan import FedAvgGan, run_config
from fedgs.baselines.fedavg_messages import encode_request, new_networks, weights_of
from fedgs.baselines.run import BaselineRun, open_run
from fedgs.config.recipes import algorithm_2
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.federation.codec import round_fakes
from fedgs.federation.messages import (
    RECORD,
    FakeBatch,
    Payload,
    encode_answer,
    encode_batch,
)
from fedgs.federation.training import nodes_of
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.quantization import release_step
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, sanitize
from fedgs.runs import sample
from fedgs.runs.run_folder import RunFolder, is_baseline
from fedgs.shapes import Images, Labels

MODES: dict[str, dict[str, Any]] = {  # of Algorithm 2
    "exact": {},
    "compact": {"transport": "compact"},
}


def round_bytes(
    config: ResolvedConfig, images: Images, labels: Labels
) -> tuple[int, int]:
    """Returns the bytes down and up of a round with one client on a node.

    The release is noise alone, drawn here.

    Args:
        config: with num_clients, num_classes and a noise multiplier.
        images: F = `config.fakes_sent` fakes in [0, 1], shape (F, C, S, S).
        labels: shape (F,), int64.
    """
    client = (0,)
    images = round_fakes(images, config)
    request = FakeBatch(1, images, labels, participants=client, trainees=client)
    nothing = PerSampleGradients(torch.zeros(1, *config.release_shape))
    noise = NoiseStream(None, node_id=0, round=1, is_secure=True)
    parts, step = [clip(nothing, config.clip_bound)], release_step(config)
    release = sanitize(parts, config.noise_std, noise, 1, 0, step)
    return _message_bytes(
        encode_batch(request, config), encode_answer(release, config, request)
    )


def update_bytes(run: BaselineRun) -> tuple[int, int]:
    """Returns the bytes down and up of a round of Fed-Avg GAN, one client on a node.

    Both networks go down, one noisy update of the discriminator comes back. Sizes do
    not depend on what they hold: the update is noise alone, drawn here.

    Args:
        run: of the method fedavg-gan.
    """
    config = dataclasses.replace(run.config, clients_per_node=1, node_sizes=None)
    training = FedAvgGan(run.settings, config, ask=lambda request: [])
    config, request = training.config, training.request(0)
    node = nodes_of(config, request.participants)[0]
    request = request.per_node(config.hosting, [node])[node]
    terms = config.terms(request.round)
    noise = NoiseStream(None, node, round=1)
    parts = [clip(PerSampleGradients(torch.zeros(1, *terms.shape)), terms.clip_bound)]
    release = sanitize(parts, terms.noise_std, noise, 1, node)
    down = encode_request(request, config) | {"run_folder": str(run.folder.path)}
    return _message_bytes(down, encode_answer(release, config, request))


def update_communication(run: BaselineRun) -> dict[str, Any]:
    """Returns what `communication` does, of a run of Fed-Avg GAN.

    Every message of a round weighs the same, so the run's settings tell it all.
    """
    down, up = update_bytes(run)
    config = run_config(run.settings, run.config)
    sizes = {
        name: weights_of(net).numel() for name, net in new_networks(config).items()
    }
    return {
        "bytes_down": down,
        "bytes_up": up,
        "bytes_per_client": down + up,
        "bytes_per_client_max": down + up,
        "messages_per_round": config.clients_per_round,
        "values_per_node": sum(sizes.values()) + sizes["discriminator"],
    }


def fed_avg_run(path: Path) -> BaselineRun:
    """Opens a run of Fed-Avg GAN.

    Raises:
        UserError: it is of another method, or no run.
    """
    run = open_run(path)
    if run.method.name != "fedavg-gan":
        raise UserError(
            f"RUN = {path}: is of {run.method.name}, which sends no messages; give "
            "runs of `fedgs train` or `fedgs baseline fedavg-gan`"
        )
    return run


def _message_bytes(down: Payload, up: Payload) -> tuple[int, int]:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = SERVER
    records = [RecordDict({RECORD: ConfigRecord(dict(p))}) for p in (down, up)]
    sizes = [message_bytes(Message(r, SERVER + 1, "train")) for r in records]
    return sizes[0], sizes[1]


def main(words: Sequence[str] | None = None) -> int:
    """Prints the bytes of Algorithm 2's messages; returns the exit code."""
    return run_command(show, words)


def show(runs: list[Path]) -> None:
    """Print the bytes of Algorithm 2's messages with the fakes of runs."""
    tables: dict[str, list[list[str]]] = {"Algorithm 2": [], "Fed-Avg GAN": []}
    for path in runs:
        if is_baseline(path):
            found, title = {"exact": update_bytes(fed_avg_run(path))}, "Fed-Avg GAN"
        else:
            found, title = weigh(RunFolder.open(path)), "Algorithm 2"
        for mode, sizes in found.items():
            numbers = [f"{size:,}" for size in (*sizes, sum(sizes))]
            tables[title].append([path.absolute().name, mode, *numbers])
    head = ["run", "messages", "down", "up", "both"]
    for title, rows in tables.items():
        if rows:
            Table(f"one round of {title}, one client: bytes", head, rows).show()


def weigh(folder: RunFolder) -> dict[str, tuple[int, int]]:
    """Returns the bytes of a round of Algorithm 2, for each of `MODES`.

    Privacy: post-processing of DP output.

    Args:
        folder: whose generator draws the fakes.
    """
    generator = sample.load_generator(folder)
    names = ("num_clients", "num_classes", "image_size", "image_channels")
    own = {name: getattr(folder.config, name) for name in (*names, "seed")}
    found: dict[str, tuple[int, int]] = {}
    for mode, settings in MODES.items():
        config = ResolvedConfig.from_flat(own | settings, algorithm_2())
        labels = sample.uniform_labels(folder.config, config.fakes_sent, seed=0)
        images = sample.draw(folder.config, generator, labels, seed=0)
        arrays = torch.from_numpy(images), torch.from_numpy(labels)
        found[mode] = round_bytes(config, *arrays)
    return found


if __name__ == "__main__":
    sys.exit(main())
