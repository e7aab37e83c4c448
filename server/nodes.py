"""The nodes of a run, whatever it trains: who is there, requests out, answers in.

`server.roll_call` finds them, `server.messenger` sends and receives.
"""

import time
from collections.abc import Iterable, Iterator, Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedgs.errors import UserError, malformed
from fedgs.event_log import log_event
from fedgs.mechanism.masks import Attempt
from fedgs.methods.base import Request
from fedgs.round.codec import pack_request
from fedgs.round.messages import (
    PAYLOAD_RECORD,
    TOLD,
    Answer,
    MaskedRequest,
    SentRequest,
    content_of,
    decode_answer,
    encode_request,
    one_line,
)
from fedgs.round.run import Stop
from fedgs.runs.run_folder import RunFolder
from server.deployment_record import kept_of
from server.messenger import IN_MEMORY, OVER_HTTP, Messenger
from server.progress import RunProgress
from server.roll_call import RollCall, roll_call

NOT_JOINED = 0  # in place of an address, which the exchange looks up when it sends


class Nodes:
    """The nodes of one run.

    Args:
        folder: the run folder, locked by the caller.
        stop: when set, nobody is waited for any longer.

    Attributes:
        exchange: messages to the nodes and back, while the run is on.
        roll: who is there; None in a simulation, whose nodes are all there.
        requests: node -> what the messages made last ask of it.
    """

    exchange: Messenger

    def __init__(self, folder: RunFolder, stop: Stop) -> None:
        """Touches nothing yet."""
        self.folder = folder
        self.config = folder.config
        self.stop = stop
        self.roll: RollCall | None = None
        self.progress = RunProgress(
            path=None,
            config=self.config,
            run_id="",
            round=0,
        )
        self.requests: dict[int, SentRequest] = {}

    # -------------------------------------------------------------- nodes

    def find(self, grid: Grid) -> None:
        """Calls the roll of a simulation, or gets ready for that of a deployment."""
        if hasattr(grid, "pull_interval"):  # the simulation's in-memory grid
            grid.pull_interval = IN_MEMORY.least  # pyright: ignore
        if not self.config.node_names:
            addresses = roll_call(
                grid=grid,
                expected=self.config.num_nodes,
                run_folder=self.folder.path,
                stop=self.stop,
            )
            self.exchange = Messenger(grid, addresses, IN_MEMORY, self.progress)
            return
        flower = self.folder.path / ".flower"
        flower.mkdir(exist_ok=True)
        self.progress = RunProgress(
            path=flower / "nodes.json",
            config=self.config,
            run_id=str(kept_of(self.folder)["run_id"]),
            round=self.folder.last_round,
        )
        events = self.folder.read_ledger().events
        self.roll = RollCall(
            grid,
            self.folder,
            self.config,
            events=events,
            progress=self.progress,
        )
        self.exchange = Messenger(
            grid=grid,
            addresses=self.roll.addresses,  # which grow while nodes join
            polling=OVER_HTTP,
            progress=self.progress,
            roll=self.roll,
        )

    def wait(self) -> None:
        """Waits until enough nodes of a deployment have joined.

        Raises:
            RunStopped: `stop` was set, or not enough nodes joined.
        """
        if self.roll is not None:
            self.roll.wait(self.stop)

    # -------------------------------------------------------------- messages

    @property
    def place(self) -> dict[str, str]:
        """What tells a node which run a message is of."""
        if self.roll is None:
            return {"run_folder": str(self.folder.path)}
        return {"run_id": self.roll.run_id}

    def encode(
        self,
        request: Request,
        nodes: Sequence[int],
        attempt: Attempt | None = None,
    ) -> list[Message]:
        """Returns a request as one message for each node; nothing else makes one.

        Args:
            request: the request of the run.
            nodes: that are asked.
            attempt: whose sums are added up under masks; None without masks.
        """
        if self.roll is not None:
            self.roll.round = max(self.roll.round, request.round)
        # Packed once: all nodes get the same bytes.
        tensors = pack_request(request.tensors, self.config)
        self.requests = {}
        messages: list[Message] = []
        # Nodes with the same content share one request, and so they share a record.
        sent: dict[int, SentRequest] = {}
        records: dict[int, ConfigRecord] = {}
        by_node = request.per_node(self.config.hosting, nodes)
        for node, own in by_node.items():
            key = id(own)
            if key not in sent:
                sent[key] = own
                if attempt is not None:
                    sent[key] = MaskedRequest(own, attempt)
                payload = encode_request(sent[key], self.config, tensors)
                records[key] = ConfigRecord({**payload, **self.place})
            self.requests[node] = sent[key]
            messages.append(self.message(records[key], node, "train"))
        return messages

    def message(self, record: ConfigRecord, node: int, kind: str) -> Message:
        """Returns a message to a node; beside what nodes share lies what is its own."""
        content = RecordDict({PAYLOAD_RECORD: record})
        if self.roll is not None:
            content[TOLD] = ConfigRecord(self.roll.told(node))
        address = self.exchange.addresses.get(node, NOT_JOINED)
        return Message(content, address, kind)

    def replies(
        self,
        messages: Iterable[Message],
        timeout: float,
        stop: Stop | None,
    ) -> Iterator[Message]:
        """Sends the messages that were made last; yields the replies as they come.

        Args:
            messages: the messages that `encode` returned, in its order.
            timeout: seconds for all of them.
            stop: when set, nothing is waited for any longer.
        """
        by_node = dict(zip(self.requests, messages, strict=True))
        patience = self.config.round_timeout
        return self.exchange.send_and_receive(
            by_node,
            timeout=timeout,
            patience=patience,
            stop=stop,
        )

    def decode(self, replies: Iterable[Message]) -> tuple[list[Answer], list[int]]:
        """Returns the releases in valid replies, and which nodes gave no valid reply.

        While the exchange goes on, a node that is refused gets its request once more;
        the same request gets the same bytes.
        """
        started = time.monotonic()
        answers: list[Answer] = []
        missing = {*self.requests}
        refused = set[int]()
        for reply in replies:
            node = self.exchange.node_of(reply)
            # Of nobody who was asked, or the second answer to one request.
            if node is None or node not in missing:
                continue
            try:
                answer = self._checked(reply, node)
            except UserError as error:
                refused.add(node)
                self.exchange.refuse(node, str(error))
                continue
            missing.remove(node)
            if answer is not None:
                answers.append(answer)
            # How long it took is for the server's own log alone.
            if self.roll is not None:
                seconds = round(time.monotonic() - started, 3)
                self.roll.add_answer(node, self._round_of(node), seconds)
        # On the disk before a next request tells a node what the server has of it.
        if self.roll is not None:
            self.roll.save()
        for node in sorted(missing):
            reason = self.exchange.reasons.get(node, "it did not answer")
            name = self.config.node_title(node)
            round_asked = self._round_of(node)
            log_event("missing", node=name, round=round_asked, outcome=reason)
            # A refusal was counted when it was refused.
            if node not in refused:
                self.progress.add_failure(node, reason)
        return answers, sorted(missing)

    def _checked(self, reply: Message, node: int) -> Answer | None:
        """Checks a reply; raises `UserError` with one line that quotes no data."""
        title = self.config.node_title(node)
        where = f"round {self._round_of(node)}: {title}"
        record = self.record(reply, node, where)
        sent = self.requests[node]
        # Noted before it is checked: it has left its client, valid or not.
        if self.roll is not None and record.get("is_empty") == 0:
            self.roll.add_release(node, sent)
        return decode_answer(record, self.config, sent, node)

    def _round_of(self, node: int) -> int:
        return content_of(self.requests[node]).round

    def record(self, reply: Message, node: int, where: str) -> ConfigRecord:
        """Returns what a reply of a node carries; raises as `_checked`."""
        if reply.has_error():
            raise UserError(f"{where} says: {one_line(reply.error.reason)}")
        if reply.metadata.src_node_id != self.exchange.addresses.get(node):
            raise UserError(
                f"{where}: the reply came from another sender, so it is refused; look "
                "for a second process that uses the name"
            )
        record = reply.content.config_records.get(PAYLOAD_RECORD)
        if record is None:
            raise malformed(f"{where}: the reply has no record")
        # Nothing else may come along, however well this record is checked.
        if len(reply.content) > 1:
            raise malformed(f"{where}: the reply has more than its one record")
        return record

    def failures(self) -> list[str]:
        """Returns why nodes did not answer the last request; public texts."""
        reasons = self.exchange.reasons
        return [reasons[node] for node in sorted(reasons)]

    def titles(self, nodes: Sequence[int]) -> str:
        """Returns what nodes are called for people."""
        return ", ".join(map(self.config.node_title, nodes))
