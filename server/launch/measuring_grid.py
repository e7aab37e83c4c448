"""What crosses the network in a round, in bytes: counted on Flower's own messages.

`MeasuringGrid` carries the strategy's messages to the ClientApp in this process and
counts each one as Flower serialises it: metadata, record and tensors as one protobuf
message. On a network come HTTP/2 and gRPC frames, and Flower's polling.

The paper counts values, not bytes, and no labels: n_dis batches of fakes and one of
gradients, 6 x 32 x 784 = 150,528 for one client and generator update (Table 2, CT).
"""

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto

from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError
from fedgs.federation.codec import stated_release_bytes
from fedgs.federation.messages import RECORD
from fedgs.files import read_json_lines
from fedgs.runs.run_folder import RunFolder
from server.launch.local_grid import LocalGrid

FILE = "communication.jsonl"
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
