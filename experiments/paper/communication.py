"""What crosses the network in a round, in bytes: counted on Flower's own messages.

`MeasuringGrid` carries the strategy's messages to the ClientApp in this process and
counts each one as Flower serialises it: metadata, record and tensors as one protobuf
message. On a network come HTTP/2 and gRPC frames, and Flower's polling.

The paper counts values, not bytes, and no labels: n_dis batches of fakes and one of
gradients, 6 x 32 x 784 = 150,528 for one client and generator update (Table 2, CT).

    python -m experiments.paper.communication RUN...

prints what a round of Algorithm 2 at its published size weighs where the fakes are
those of a run's generator: compact messages depend on what the fakes show. Of a run of
`fedgs baseline fedavg-gan` it prints what a round of that run weighs.
"""

import dataclasses
import json
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.supercore.task_identity import TaskIdentity

from experiments.flags import run_command
from experiments.tables import Table
from fedgs.baselines.fedavg_gan import FedAvgGan, run_config
from fedgs.baselines.fedavg_messages import encode_request, new_networks, weights_of
from fedgs.baselines.run import BaselineRun, open_run
from fedgs.config.recipes import algorithm_2
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError
from fedgs.federation.codec import round_fakes, stated_release_bytes
from fedgs.federation.messages import (
    RECORD,
    FakeBatch,
    Payload,
    encode_answer,
    encode_batch,
)
from fedgs.federation.training import nodes_of
from fedgs.files import read_json_lines
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.quantization import release_step
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, sanitize
from fedgs.runs import sample
from fedgs.runs.run_folder import RunFolder, is_baseline
from fedgs.shapes import Images, Labels
from server.launch.local_grid import SERVER, LocalGrid

FILE = "communication.jsonl"
MODES: dict[str, dict[str, Any]] = {  # of Algorithm 2
    "exact": {},
    "compact": {"transport": "compact"},
}
Line = dict[str, Any]


class MeasuringGrid(LocalGrid):
    """All nodes in this process, and a line of the file for every round's message.

    The roll call and the warm start are counted too, as round 0. A release counts as
    `fedgs.federation.codec.stated_release_bytes`, because the lines are published
    and the size of a compact release depends on what it holds.

    Args:
        client_app: answers the messages.
        config: of the run.
        path: the file of lines; a resumed run appends to it.
    """

    def __init__(
        self, client_app: ClientApp, config: ResolvedConfig, path: Path
    ) -> None:
        """See the class."""
        super().__init__(client_app, config.num_nodes, config.num_workers)
        self.config, self.path = config, path
        self.lock = threading.Lock()

    def _deliver(self, message: Message) -> Message:
        reply = super()._deliver(message)
        record = message.content.config_records.get(RECORD) or {}
        line = {
            "round": int(str(record.get("round", 0))),
            "node": message.metadata.dst_node_id,
            "bytes_down": message_bytes(message),
            "bytes_up": self._stated_bytes(reply),
        }
        with self.lock, open(self.path, "a") as lines:
            lines.write(json.dumps(line) + "\n")
        return reply

    def _stated_bytes(self, reply: Message) -> int:
        """Returns the size of a reply with a stand-in for any release in it."""
        record = reply.content.config_records.get(RECORD) or ConfigRecord()
        if "tensors" not in record:
            return message_bytes(reply)
        release = record["tensors"]
        record["tensors"] = bytes(stated_release_bytes(self.config))
        try:
            return message_bytes(reply)
        finally:
            record["tensors"] = release


def message_bytes(message: Message) -> int:
    """Returns the size of a message in Flower's serialisation.

    Privacy: as of the content; of a compact release it depends on what it holds.
    """
    return len(message_to_proto(message).SerializeToString())


def values_per_node(config: RunConfig) -> int:
    """Returns how many numbers a node receives and sends in a round: the paper's unit.

    >>> values_per_node(RunConfig(discriminator_steps=5, batch_size=32))
    150528
    """
    pixels = config.image_channels * config.image_size**2
    batch, channels, side, _ = config.release_shape
    return config.fakes_sent * pixels + batch * channels * side**2


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
    noise = NoiseStream(None, node_id=0, round=1)
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


def communication(folder: RunFolder) -> dict[str, Any]:
    """Returns what a round of a measured run sent, averaged over its messages.

    Privacy: public; releases count as `stated_release_bytes`.

    Returns:
        `bytes_down` and `bytes_up` of one node's message and reply; `bytes_per_client`,
        all of a round divided by its participants (the paper's average), and
        `bytes_per_client_max` of the largest round; `values_per_node` in the paper's
        unit; `bytes_before`, all of roll call and warm start.

    Raises:
        UserError: the run was not measured.
    """
    before: list[Line] = []
    rounds: dict[int, dict[int, Line]] = {}  # of a round repeated, the last attempt
    for line in read_json_lines(folder.path / FILE):
        if line["round"] == 0:
            before.append(line)
        else:
            rounds.setdefault(line["round"], {})[line["node"]] = line
    if not rounds:
        raise UserError(
            f"{folder.path}: its messages were not measured ({FILE} is missing or "
            "empty); train it by `python -m experiments.paper.table2`"
        )
    participants = folder.config.clients_per_round
    totals = [_total(found.values()) for found in rounds.values()]
    sent = [line for found in rounds.values() for line in found.values()]
    return {
        "bytes_down": round(sum(line["bytes_down"] for line in sent) / len(sent)),
        "bytes_up": round(sum(line["bytes_up"] for line in sent) / len(sent)),
        "bytes_per_client": round(sum(totals) / len(totals) / participants),
        "bytes_per_client_max": round(max(totals) / participants),
        "messages_per_round": len(sent) / len(rounds),
        "rounds_measured": len(rounds),
        "values_per_node": values_per_node(folder.config),
        "bytes_before": _total(before),
    }


def _total(lines: Iterable[Line]) -> int:
    return sum(line["bytes_down"] + line["bytes_up"] for line in lines)


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
