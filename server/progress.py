"""What a deployed run is doing: RUN/.flower/nodes.json, for people and tools.

    {"run_id": "0123456789abcdef", "time": 1795271045.1, "phase": "training",
     "round": 17, "num_rounds": 250, "waiting_for": ["hospital-b"],
     "nodes": {"hospital-a": {"node_id": 0, "joined": true, "online": true,
                              "last_answer": 17, "reason": ""}},
     "bytes_sent": 1234, "bytes_received": 1234}

Everything in it is public: names, rounds and counts of bytes. Bytes are those of the
messages' contents, each counted once however often Flower hands it on.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

from fedgs.config import RunConfig
from fedgs.run_folder import write_json

WRITE_SECONDS = 0.5  # at least this long between two writes of an unchanged phase


class Progress:
    """Keeps the file up to date; a disk that is full loses the file, not the run.

    Args:
        path: the file; None keeps nothing (a simulation).
        config: the run's.
        run_id: of the run folder.
        round: the round that the run goes on from.
    """

    def __init__(
        self, path: Path | None, config: RunConfig, run_id: str, round: int
    ) -> None:
        """Writes nothing yet."""
        self.path, self.config = path, config
        self.nodes: dict[str, dict[str, Any]] = {
            name: {
                "node_id": node_id,
                "joined": False,
                "online": False,
                "last_answer": 0,
                "reason": "",
            }
            for node_id, name in enumerate(config.node_names)
        }
        self.content: dict[str, Any] = {
            "run_id": run_id,
            "time": 0.0,
            "phase": "roll call",
            "round": round,
            "num_rounds": config.num_rounds,
            "waiting_for": list(config.node_names),
            "nodes": self.nodes,
            "bytes_sent": 0,
            "bytes_received": 0,
        }
        self._written = 0.0

    @property
    def reasons(self) -> dict[str, str]:
        """Why each node is not there or did not answer, as far as is known."""
        return {name: node["reason"] for name, node in self.nodes.items()}

    def set_joined(self, node: int) -> None:
        """Notes that a node has joined."""
        self._node(node).update(joined=True, online=True, reason="")
        self._write(now=True)

    def set_reason(self, node: int, reason: str) -> None:
        """Notes why a node is not there or did not answer."""
        if self.nodes:
            self._node(node)["reason"] = reason
            self._write()

    def set_online(self, online: list[int]) -> None:
        """Notes which nodes Flower can reach."""
        for node in self.nodes.values():
            node["online"] = node["node_id"] in online
        self._write()

    def set_phase(self, phase: str, round: int, waiting: list[int]) -> None:
        """Notes what the run does and which nodes it waits for."""
        if self.nodes:
            names = self.config.node_names
            self.content.update(phase=phase, round=round)
            self.content["waiting_for"] = [names[node] for node in waiting]
            self._write()

    def set_answered(self, node: int, round: int) -> None:
        """Notes a valid answer."""
        if self.nodes:
            self._node(node).update(last_answer=round, reason="")

    def add_bytes(self, sent: int = 0, received: int = 0) -> None:
        """Counts what was sent or received."""
        self.content["bytes_sent"] += sent
        self.content["bytes_received"] += received

    def close(self, phase: str) -> None:
        """Writes the last state."""
        self.content.update(phase=phase, waiting_for=[])
        self._write(now=True)

    def _node(self, node: int) -> dict[str, Any]:
        return self.nodes[self.config.node_names[node]]

    def _write(self, now: bool = False) -> None:
        if self.path is None:
            return
        if not now and time.monotonic() - self._written < WRITE_SECONDS:
            return
        self._written = time.monotonic()
        self.content["time"] = round(time.time(), 1)
        with contextlib.suppress(OSError):
            write_json(self.path, self.content)
