"""Where discriminators live between messages: the one module-level cache.

A worker process lives as long as the simulation, or the deployed client, so its nodes
stay in memory; each state is also on disk after every round, because the next message
for a node may reach another process. Nothing of a round is put into Flower's
`Context.state`.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fedgs.config.run_config import ResolvedConfig
from fedgs.data.load import load_data
from fedgs.data.records import DataWarning
from fedgs.process import keep_freed_memory
from fedgs.round.node import Node
from fedgs.round.preparation import nodes_in_memory
from fedgs.runs.run_folder import RunFolder, node_folder

workers: dict[str, "NodeCache"] = {}


class NodeCache:
    """One worker process of a run: its most recent nodes.

    Args:
        config: the resolved configuration.
        make: makes a node by its index.
    """

    def __init__(self, config: ResolvedConfig, make: Callable[[int], Node]) -> None:
        """Starts without nodes."""
        self.config = config
        self.make = make
        self.nodes: OrderedDict[int, Node] = OrderedDict()
        # Workers share the nodes; the least recent one is dropped, not lost.
        self.capacity = nodes_in_memory(config)
        torch.set_num_threads(1)
        keep_freed_memory()

    def node(self, node_id: int) -> Node:
        """Returns a node, from memory or new (its state then comes from disk)."""
        if node_id not in self.nodes:
            self.nodes[node_id] = self.make(node_id)
        self.nodes.move_to_end(node_id)
        while len(self.nodes) > self.capacity:
            self.nodes.popitem(last=False)
        return self.nodes[node_id]


@dataclass(frozen=True)
class SimulatedClient:
    """A node of a simulation: the run folder is shared with the server.

    Attributes:
        run_folder: absolute path.
        node_id: Flower's partition-id.
        is_durable: whether a state must be on the disk before an answer leaves.
    """

    run_folder: str
    node_id: int
    is_durable: bool = False  # the server syncs all states at its checkpoints

    @property
    def title(self) -> str:
        """The node's public name."""
        return f"node {self.node_id}"

    @property
    def private(self) -> Path:
        """The folder of the node's states; its `error.log` tells of failures."""
        return node_folder(Path(self.run_folder) / "private", self.node_id)

    def worker(self) -> NodeCache:
        """Returns this process's worker for the run, made on the first message.

        Privacy: reads private data; output private.
        """
        return cached_worker(self.run_folder, self._make)

    def forget(self) -> None:
        """Drops a node that failed half-way."""
        forget(self.run_folder, self.node_id)

    def _make(self) -> NodeCache:
        folder = RunFolder.open(self.run_folder)
        # Ray prints what a worker prints at the server.
        with warnings.catch_warnings(action="ignore", category=DataWarning):
            data = load_data(folder.config)
        make = partial(Node, folder.config, data=data, private=folder.private)
        return NodeCache(folder.config, make)


def forget(run: str, node_id: int) -> None:
    """Drops a node that failed half-way; its last whole state is on disk."""
    if run in workers:
        workers[run].nodes.pop(node_id, None)


def cached_worker(run: str, make: Callable[[], NodeCache]) -> NodeCache:
    """Returns this process's worker for a run, made on the first message.

    Privacy: reads private data; output private.

    Args:
        run: what the worker is known by; the worker of another run is dropped.
        make: makes it.
    """
    if run not in workers:
        # First: memory may not hold the discriminators of two runs.
        workers.clear()
        workers[run] = make()
    return workers[run]


def drop_worker(run: str) -> None:
    """Drops this process's worker for a run, with its limits and its nodes."""
    workers.pop(run, None)
