"""A deployment in one process: a server's run folder, clients, and a network.

A client has data and a state directory of its own; the clock moves only by sleeping.
"""

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Error as FlowerError
from flwr.app import Message

import runs
from clients.deployed_client import DeployedClient, DeploymentConfig
from fedgs.privacy.client_ledger import ClientLedger
from fedgs.privacy.ledger import Ledger
from fedgs.runs.run_folder import RunFolder
from server.strategy import FederatedGan
from simulated_grid import SHORT, FakeGrid
from tiny import tiny_config, write_tiny_npz

NODE_UNAVAILABLE = 5
EPOCH = 1.8e9  # Unix time of the start of the clock
NAMES = ["a-clinic", "b-clinic", "c-clinic", "d-clinic", "e-clinic", "f-clinic"]
LIMITS = "allow_seeded_noise = true\nallow_embeddings = true\n"


class Client:
    """One client: its configuration, its process's memory, whether it is online.

    It is also what Flower tells the server of it.
    """

    def __init__(self, folder: Path, name: str, data: str) -> None:
        (limits := folder / "limits.toml").write_text(LIMITS)
        self.name, self.public_key = name, b""
        self.state_dir = folder / f"state-{name}"
        own = {"state-dir": str(self.state_dir), "limits": str(limits)}
        self.node_config: dict[str, Any] = {"name": name, "data": data} | own
        self.memory: dict = {}
        self.is_online, self.starts, self.node_id = True, 1, 0

    @property
    def last_activated_at(self) -> str:
        return f"start {self.starts}"

    def restart(self) -> None:
        """Ends the process, however it was, and starts another one."""
        self.memory, self.is_online = {}, True
        self.starts += 1


class DeployedGrid(FakeGrid):
    """The network between a server and its clients, who are known by their names.

    Attributes:
        on_push: called with (name, request) before a message is delivered; returns
            whether it arrives.
        on_look: called whenever the server looks who is online.
    """

    def __init__(self, clients: list[Client]) -> None:
        super().__init__(len(clients))
        self.clients = dict(zip(self.contexts, clients, strict=True))
        for address, client in self.clients.items():
            client.node_id = address
        self.on_push: Callable[[str, Message], bool] = lambda name, request: True
        self.on_look: Callable[[], object] = lambda: None
        self.sent: dict[str, tuple[Client, Message]] = {}

    def get_nodes(self) -> list[Client]:
        self.on_look()
        return [client for client in self.clients.values() if client.is_online]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        gone = {n for n in message_ids if n in self.sent and n not in self.waiting}
        for name in [n for n in gone if not self.sent[n][0].is_online]:
            lost = FlowerError(NODE_UNAVAILABLE, "")
            self.waiting[name] = Message(lost, reply_to=self.sent.pop(name)[1])
        return super().pull_messages(message_ids)

    def deliver(self, request: Message) -> Message | None:
        client = self.clients[request.metadata.dst_node_id]
        self.sent[request.metadata.message_id] = client, request
        arrives = client.is_online and self.on_push(client.name, request)
        return self.answer(client, request) if arrives else None

    def answer(self, client: Client, request: Message) -> Message | None:
        """Has a client's process answer a message."""
        self.contexts[client.node_id].node_config = client.node_config
        return self.ask(client.name, client.memory, request)


class Deployment:
    """A run folder on the server, and clients."""

    def __init__(self, folder, name: str, **settings: object) -> None:
        root = folder / name
        root.mkdir()
        names = NAMES[: tiny_config(**settings).num_nodes]
        own = {"output": str(root / "run"), "nodes": ",".join(names)}
        own |= {"num_rounds": 4, "round_timeout": 60.0, "data": "digits"}
        config = tiny_config(defaults=SHORT | own, **settings)
        self.equip(root, RunFolder.create(config))

    def equip(self, root: Path, folder: RunFolder) -> None:
        """Gives each node of a run its share of the tiny problem."""
        self.root, self.folder, self.stop = root, folder, threading.Event()
        self.clients: list[Client] = []
        for index, name in enumerate((folder.config.nodes or "").split(",")):
            hosted = folder.config.hosting.hosted(index)
            data = write_tiny_npz(root / f"{name}.npz", hosted)
            self.clients.append(Client(root, name, data))
        self.grid = DeployedGrid(self.clients)

    def restart_killed(self) -> None:
        """A client that ends in the middle of its work is started again."""
        answer = self.grid.answer

        def until_killed(client: Client, request: Message) -> Message | None:
            try:
                return answer(client, request)
            except SystemExit:
                return client.restart()

        self.grid.answer = until_killed

    def start(self, report: runs.Report = runs.ignore) -> None:
        """Starts the server, from its checkpoint on."""
        self.folder = RunFolder.open(self.folder.path)
        FederatedGan(self.folder, report, self.stop).start(self.grid)

    def attempts(self) -> list[tuple[int, int]]:
        return runs.attempts(self.folder)

    def counted(self, index: int) -> list[int]:
        """The rounds of a client's own count."""
        path = self.clients[index].state_dir / "releases" / "releases-00000.jsonl"
        return [event.round for event in Ledger.read(path).events]

    def states(self, index: int):
        (folder,) = self.clients[index].state_dir.glob("*/node-*")
        return folder

    def product(self) -> bytes:
        return runs.generator(self.folder.path)

    def progress(self) -> dict:
        return json.loads((self.folder.path / ".flower" / "nodes.json").read_text())


class Backup:
    """A copy of a client's state directory, to be put back.

    Attributes:
        client: whose.
    """

    def __init__(self, run: Deployment, index: int) -> None:
        self.client, self.copy = run.clients[index], run.root / f"backup-{index}"

    def take(self) -> None:
        shutil.copytree(self.client.state_dir, self.copy)

    def put_back(self, only: str = "") -> None:
        """Puts the copy, or a folder of it, back and starts the client again."""
        shutil.rmtree(self.client.state_dir / only)
        shutil.copytree(self.copy / only, self.client.state_dir / only)
        self.client.restart()

    def between(self, taken: int, put_back: int) -> runs.Report:
        """Takes the copy after one round and puts it back after another one."""

        def report(metrics: dict) -> None:
            if metrics["round"] == taken:
                self.take()
            if metrics["round"] == put_back:
                self.put_back()

        return report

    def refusals(self) -> str:
        return (self.client.state_dir / "error.log").read_text()


def place_of(run: Deployment, index: int = 0, run_id: str = "0" * 16) -> DeployedClient:
    """A client's place in a run, as its process opens it."""
    return DeployedClient(DeploymentConfig.read(run.clients[index].node_config), run_id)


def kill_after_count(monkeypatch, round: int, end=sys.exit) -> None:
    """Ends the first client that counted its release of a round, before it answers."""
    save = ClientLedger.charge

    def charge(self: ClientLedger, event: Any, limits: Any) -> None:
        save(self, event, limits)
        if event.round == round:
            monkeypatch.setattr(ClientLedger, "charge", save)
            end()

    monkeypatch.setattr(ClientLedger, "charge", charge)
