"""Rounds per second of a simulation whose clients compute nothing: messages alone.

    python -m experiments.bench.messages [--rounds 600] [--nodes 10]

Paper mode: one client per round, 100 KB down and 100 KB up, through the project's own
sending and collecting (`server.exchange`), with and without `fast_messages`.
"""

import itertools
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from clients.flower_1_41 import hasten_simulation
from experiments.flags import run_command
from experiments.launch import flower_engine
from experiments.tables import Table
from fedgs.config.run_config import RunConfig
from fedgs.federation.messages import RECORD
from fedgs.federation.preparation import resolve
from fedgs.files import read_json, write_json
from fedgs.runs.run_folder import RunFolder
from server.exchange import IN_MEMORY, Exchange
from server.progress import Progress
from server.roll_call import roll_call

COMPONENTS = (
    "experiments.bench.messages:server_app",
    "experiments.bench.messages:client_app",
)
PAYLOAD = bytes(100_352)  # 32 images of 28x28 float32
SKIPPED = 20  # first rounds: every worker starts

server_app = ServerApp()
client_app = ClientApp()
hasten_simulation()


@client_app.query()
def say_index(message: Message, context: Context) -> Message:
    """Tells the node's index."""
    index = int(context.node_config["partition-id"])
    return _message({"node_id": index}, message)


@client_app.train()
def echo(message: Message, context: Context) -> Message:
    """Replies with as many bytes as a release has."""
    return _message({"tensors": PAYLOAD}, message)


def _message(content: dict[str, int | bytes], reply_to: Message) -> Message:
    record = ConfigRecord({**content})
    return Message(RecordDict({RECORD: record}), reply_to=reply_to)


@server_app.main()
def main_of_server(grid: Grid, context: Context) -> None:
    """Asks one node after the other; writes how long that took."""
    folder = RunFolder.open(str(context.run_config["run_folder"]))
    if hasattr(grid, "pull_interval"):
        grid.pull_interval = IN_MEMORY.least  # pyright: ignore
    with folder.locked():
        addresses = roll_call(grid, folder.config.num_nodes)
        progress = Progress(None, folder.config, "", 0)
        exchange = Exchange(grid, addresses, IN_MEMORY, progress)
        payload = RecordDict({RECORD: ConfigRecord({"tensors": PAYLOAD})})
        started, processor = 0.0, 0.0
        for number in range(folder.config.num_rounds + SKIPPED):
            if number == SKIPPED:
                started, processor = time.monotonic(), time.process_time()
            node = number % len(addresses)
            request = Message(payload, addresses[node], "train")
            if not [*exchange.send_and_receive({node: request})]:
                raise RuntimeError("a node did not answer")
        seconds = time.monotonic() - started
    found = {"seconds": seconds, "processor": time.process_time() - processor}
    write_json(folder.path / ".flower" / "rate.json", found)
    outcome = {"status": "completed", "message": ""}
    write_json(folder.path / ".flower" / "result.json", outcome)


def seconds_per_round(nodes: int, rounds: int, is_fast: bool) -> tuple[float, float]:
    """Returns the seconds of a round, and the server process's share of a processor."""
    with tempfile.TemporaryDirectory(prefix="fedgs-bench-") as name:
        config = RunConfig(
            num_clients=nodes,
            num_rounds=rounds,
            noise_multiplier=1.0,
            seed=0,
            engine="flower",
            output=str(Path(name) / "run"),
            fast_messages=is_fast,
        )
        folder = RunFolder.create(resolve(config)[0])
        stop = threading.Event()
        flower_engine.train(folder, lambda metrics: None, stop, COMPONENTS)
        found = read_json(folder.path / ".flower" / "rate.json")
    return found["seconds"] / rounds, found["processor"] / rounds


def messages_table(nodes: list[int] | None = None, rounds: int = 600) -> None:
    """Print rounds per second of pure messaging."""
    rows: list[list[str]] = []
    for count, is_fast in itertools.product(nodes or [10], (True, False)):
        number = rounds if is_fast else max(rounds // 10, 10)
        seconds, processor = seconds_per_round(count, number, is_fast)
        rows.append([f"{count}", json.dumps(is_fast), f"{1 / seconds:.1f}"])
        rows[-1] += [f"{1000 * seconds:.2f}", f"{1000 * processor:.2f}"]
    head = ["nodes", "fast_messages", "rounds/s", "ms/round", "server CPU ms/round"]
    Table("simulation, one client per round, 100 KB each way", head, rows).show()


if __name__ == "__main__":
    sys.exit(run_command(messages_table))
