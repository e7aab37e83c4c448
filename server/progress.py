"""What a deployed run is doing: RUN/.flower/nodes.json, for people and tools.

    {"run_id": "0123456789abcdef", "time": 1795271045.1, "phase": "training",
     "round": 17, "num_rounds": 250, "waiting_for": ["hospital-b"],
     "nodes": {"hospital-a": {"node_id": 0, "joined": true, "online": true,
                              "last_answer": 17, "last_answer_time": 1795271044,
                              "resends": 0, "failures": 1, "reason": "",
                              "last_failure": "hospital-a: no answer in time"}}}

Everything in it is public: names, rounds, and when a node answered, to the second. What
an answer weighs is not there: it may depend on what the answer holds. Counts begin anew
when a run is resumed.
"""

import json
import time
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from fedgs.config.run_config import ResolvedConfig
from fedgs.files import write_json

WRITE_SECONDS = 0.5  # at least this long between two writes
ALIVE_SECONDS = 5.0  # between writes where nothing changes: the server is there


class RunProgress:
    """Keeps the file up to date; a disk that is full loses the file, not the run.

    Args:
        path: the file; None keeps nothing (a simulation).
        config: the run's, resolved.
        run_id: the name of the run folder.
        round: the round that the run goes on from.
    """

    def __init__(
        self,
        path: Path | None,
        config: ResolvedConfig,
        run_id: str,
        round: int,
    ) -> None:
        """Writes nothing yet."""
        self.path = path
        self.config = config
        self.nodes: dict[str, dict[str, Any]] = {
            config.node_title(node_id): {
                "node_id": node_id,
                "joined": False,
                "online": False,
                "last_answer": 0,
                "last_answer_time": None,
                "resends": 0,
                "failures": 0,
                "reason": "",
                "last_failure": "",
            }
            for node_id in range(config.num_nodes)
        }
        self.content: dict[str, Any] = {
            "run_id": run_id,
            "time": 0.0,
            "phase": "roll call",
            "round": round,
            "num_rounds": config.num_rounds,
            "waiting_for": list(self.nodes),
            "nodes": self.nodes,
        }
        self._written = -WRITE_SECONDS  # when, by the monotonic clock
        self._last = ""  # what was written then
        self._is_warned = False  # that the file cannot be written

    @property
    def reasons(self) -> dict[str, str]:
        """Why each node is not there or did not answer, as far as is known."""
        return {name: node["reason"] for name, node in self.nodes.items()}

    def set_joined(self, node: int) -> None:
        """Notes that a node has joined."""
        name = self.config.node_title(node)
        self.nodes[name].update(joined=True, online=True, reason="")
        waiting = self.content["waiting_for"]
        self.content["waiting_for"] = [other for other in waiting if other != name]
        self._write(now=True)

    def set_answered(self, name: str, round: int) -> None:
        """Notes which round a node has answered last, to an earlier start."""
        if name in self.nodes:
            self.nodes[name]["last_answer"] = round

    def set_online(self, online: list[int]) -> None:
        """Notes which nodes Flower can reach."""
        for node in self.nodes.values():
            node["online"] = node["node_id"] in online
        self._write()

    def set_phase(self, phase: str, round: int) -> None:
        """Notes what the run does; written with the nodes that it waits for."""
        self.content.update(phase=phase, round=round)

    def set_waiting(self, reasons: Mapping[int, str]) -> None:
        """Notes which nodes the run waits for, and why if it is known."""
        names = {self.config.node_title(node): node for node in reasons}
        for name, node in names.items():
            self.nodes[name]["reason"] = reasons[node]
        self.content.update(waiting_for=list(names))
        # What follows the last answer, such as a fit, may take long without a word.
        self._write(now=not names)

    def add_answer(self, node: int, round: int) -> None:
        """Notes a valid answer to a round."""
        entry = self._node(node)
        entry["last_answer"] = round
        # To the second: how long it took is nobody's business.
        entry["last_answer_time"] = int(time.time())
        entry["reason"] = ""

    def add_resend(self, node: int) -> None:
        """Counts a request that was sent again."""
        self._node(node)["resends"] += 1

    def add_failure(self, node: int, reason: str) -> None:
        """Counts an answer that was refused, or that did not come."""
        entry = self._node(node)
        entry["failures"] += 1
        entry["reason"] = reason
        entry["last_failure"] = reason
        self._write()

    def close(self, phase: str) -> None:
        """Writes the last state."""
        self.content.update(phase=phase, waiting_for=[])
        self._write(now=True)

    def _node(self, node: int) -> dict[str, Any]:
        return self.nodes[self.config.node_title(node)]

    def _write(self, now: bool = False) -> None:
        """Writes what has changed; what comes too soon is written at the next call."""
        since = time.monotonic() - self._written
        is_due = now or since >= WRITE_SECONDS
        if self.path is None or not is_due:
            return
        # Without the time, which alone is no change.
        content = json.dumps(self.content)
        is_alive_due = now or since >= ALIVE_SECONDS
        if content == self._last and not is_alive_due:
            return
        self._written = time.monotonic()
        self._last = content
        try:
            write_json(self.path, self.content | {"time": round(time.time(), 1)})
        except OSError as error:
            if not self._is_warned:
                text = "%s: %s; the run goes on, its status shows old numbers"
                log(WARNING, text, self.path, error)
            self._is_warned = True
