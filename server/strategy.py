"""The Flower Strategy: select, send, collect, check, hand to `federation.round`.

The rounds themselves are `fedgs.federation.training.run_rounds`; this file is its
exchange. It overrides `start`, because Flower's own loop logs and polls per round and
knows no checkpoint. `server.roll_call` finds the nodes, `server.asking` sends and
collects.
"""

import math
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from logging import INFO, WARNING
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedgs.errors import UserError
from fedgs.event_log import log_event
from fedgs.federation.codec import pack_fakes, stated_release_bytes
from fedgs.federation.messages import (
    RECORD,
    FakeBatch,
    decode_answer,
    encode_batch,
    one_line,
)
from fedgs.federation.training import Report, RunStopped, Stop, nodes_of, run_rounds
from fedgs.files import read_json, write_json
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.privacy.ledger import Event, Ledger
from fedgs.process import UNNAMED
from fedgs.runs.run_folder import CHECKPOINT, RunFolder
from server.asking import IN_MEMORY, OVER_HTTP, Asking
from server.progress import Progress
from server.restored import cost_text, missing_events
from server.roll_call import RollCall
from server.roll_call import roll_call as roll_call


class GsWgan(Strategy):
    """GS-WGAN as a Flower strategy; one instance trains one run folder.

    Args:
        folder: the run folder, locked by the caller; its configuration is resolved.
        report: called with the public metrics of each round.
        stop: when set, the run checkpoints after the current round and stops.
        accept_restore: go on where clients of a deployment have released more than the
            ledger says, and add it.
    """

    def __init__(
        self,
        folder: RunFolder,
        report: Report,
        stop: Stop,
        accept_restore: bool = False,
    ) -> None:
        """See the class."""
        self.folder = folder
        self.config = folder.config
        self.report = report
        self.stop = stop
        self.accept_restore = accept_restore
        self.asking: Asking  # set by `start`
        self.roll: RollCall | None = None  # of a deployment
        self.progress = Progress(None, self.config, "", 0)

    @property
    def failures(self) -> list[str]:
        """Why nodes did not answer the last request, by node; nodes give no data."""
        return [text for _, text in sorted(self.asking.reasons.items())]

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: object = None,
    ) -> Result:
        """Trains from the last checkpoint to the last round of the configuration.

        The arguments after `grid` are Flower's and are not used: the run folder's
        configuration decides.

        Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

        Raises:
            RunStopped: the run ended early with a checkpoint.
        """
        self.summary()
        if hasattr(grid, "pull_interval"):  # the simulation's in-memory grid
            grid.pull_interval = IN_MEMORY.least  # pyright: ignore
        if self.config.node_names:
            self._meet(grid)
        else:
            addresses = roll_call(grid, self.config.num_nodes, self.stop)
            self.asking = Asking(grid, addresses, IN_MEMORY)
        run_rounds(self.folder, self, self.report, self.stop, self.unrecorded)
        return Result()

    def _meet(self, grid: Grid) -> None:
        """Waits for the nodes of a deployment.

        Raises:
            RunStopped: not enough of them joined.
        """
        kept = kept_of(self.folder)
        self.folder.history = history_of(self.folder)
        _, committed = self.folder.history[-1]
        flower = self.folder.path / ".flower"
        flower.mkdir(exist_ok=True)
        self.progress = Progress(
            flower / "nodes.json", self.config, str(kept["run_id"]), committed
        )
        events = self.folder.read_ledger().events
        self.roll = RollCall(
            grid, self.config, kept, events, self.folder.history, self.progress
        )
        title = self.config.node_title
        self.asking = Asking(grid, self.roll.addresses, OVER_HTTP, self.roll, title)
        try:
            self.roll.wait(self.stop)
        except RunStopped as error:  # what is known by now counts all the same
            with closing(self.folder.ledger()) as ledger:
                try:
                    while events := self.unrecorded(ledger):
                        for event in events:
                            ledger.append(event)
                        self.folder.record(ledger)
                except RunStopped as other:
                    raise RunStopped(f"{error}\n{other}") from error
            raise

    # -------------------------------------------------------------- exchange

    def answers(self, request: FakeBatch) -> Sequence[SanitizedGradients]:
        """Sends a request to the nodes concerned and collects who answers in time.

        A node that fails or answers wrongly is asked once more; the same request gets
        the same bytes. Then the round goes on without it, if `min_nodes` allows.
        """
        deadline = time.monotonic() + self.config.round_timeout
        nodes = nodes_of(self.config, request.trainees)
        answers, missing = self._ask("training", request, nodes, deadline)
        if missing:
            log(WARNING, "round %d: no answer of %s", request.round, self._who(missing))
        return answers

    def prepare(self, request: FakeBatch, nodes: Sequence[int]) -> None:
        """Has the nodes make their discriminators, without a time limit.

        A deployed node that is offline for `round_timeout` is given up.

        Raises:
            RunStopped: a node failed twice or is gone, or `stop` was set.
        """
        if not nodes:
            return
        _, missing = self._ask("preparing", request, nodes, math.inf)
        if missing and self.stop.is_set():
            who = self._who(missing)
            raise RunStopped(f"stopped before the discriminators of {who} were made")
        if missing:
            who, why = self._who(missing), "; ".join(self.failures)
            raise RunStopped(f"the discriminators of {who} could not be made: {why}")

    def save(self, keep_round: int) -> None:
        """Keeps who has answered; nodes save their state in every round."""
        if self.roll is not None:
            keep(self.folder, answered=self.roll.answered)

    def _who(self, nodes: Sequence[int]) -> str:
        return ", ".join(map(self.config.node_title, nodes))

    def unrecorded(self, ledger: Ledger) -> Sequence[Event]:
        """Returns what nodes have released and a restored ledger lacks; each once.

        Whoever has not said it yet is kept on the disk, until the ledger has what the
        others say: a start that does not hear of the restore must not go on.

        Raises:
            RunStopped: there is something, and nobody accepted the restore; or a node
                has not said what it has released since the server was restored.
        """
        if self.roll is None:
            return ()
        if not (lost := self.roll.take_lost()):
            self._keep_unheard(self.roll.unheard - self.roll.heard)
            if self.roll.unheard:
                raise RunStopped(
                    "this server was restored from a backup, and its ledger lacks what "
                    f"{', '.join(sorted(self.roll.unheard))} may have released since: "
                    "start these clients with their newest releases/, and resume; "
                    "the run does not go on without them"
                )
            return ()
        self._keep_unheard(set(self.config.node_names))
        missing = missing_events(self.config, ledger.events, lost)
        text = cost_text(self.config, ledger.events, missing)
        if not self.accept_restore:
            raise RunStopped(
                f"{text}. Put the newest server state back, or go on from here and add "
                "them to the ledger: submit with --resume and --accept-restore"
            )
        log(WARNING, "%s; they are added to the ledger", text)
        log_event("restored", added=len(missing), outcome=text)
        return missing

    def _keep_unheard(self, names: set[str]) -> None:
        if self.roll is not None and names != self.roll.unheard:
            keep(self.folder, unheard=sorted(names))
            self.roll.unheard = names

    def _ask(
        self, phase: str, request: FakeBatch, nodes: Sequence[int], deadline: float
    ) -> tuple[list[SanitizedGradients], list[int]]:
        told = request.told(self.config.hosting, nodes)
        tensors = pack_fakes(request.images, request.labels, self.config)
        different = {id(own): own for own in told.values()}
        records = {key: self._record(own, tensors) for key, own in different.items()}
        if self.roll is not None:
            self.roll.round = max(self.roll.round, request.round)

        asked, refused = set[int](), set[int]()

        def make(node: int) -> Message:
            self.progress.add_bytes(sent=len(tensors))
            if node in asked:
                self.progress.add_resend(node)
            asked.add(node)
            record = records[id(told[node])]
            # What nobody waits for any more is not delivered to a node that is back.
            left = None
            if self.roll is not None and deadline < math.inf:
                left = max(deadline - time.monotonic(), 1.0)
            content, address = RecordDict({RECORD: record}), self.asking.addresses[node]
            return Message(content, address, "train", ttl=left)

        def decode(reply: Message, node: int) -> SanitizedGradients | None:
            try:
                answer = self._decode(reply, told[node], node)
            except UserError as error:
                self.progress.add_failure(node, str(error))
                refused.add(node)
                raise
            if self.roll is not None:
                log_event(
                    "answered",
                    node=self.config.node_title(node),
                    round=request.round,
                    outcome="ok",
                    seconds=round(time.monotonic() - started, 3),
                )
                if answer is not None:
                    start, _ = self.roll.history[-1]
                    name = self.config.node_title(node)
                    self.roll.answered[name] = start, request.round
                if request.round:
                    self.roll.seen[node] = request.round
                    self.progress.add_answer(node, request.round)
            return answer

        def waiting(missing: Sequence[int]) -> None:
            reasons = {node: self.asking.reasons.get(node, "") for node in missing}
            self.progress.set_waiting(phase, request.round, reasons)

        started = time.monotonic()
        answers, missing = self.asking.ask(
            nodes,
            make,
            decode,
            deadline,
            patience=self.config.round_timeout,
            stop=self.stop if phase == "preparing" else None,
            waiting=waiting,
        )
        for node in missing:
            reason, name = self.asking.reasons[node], self.config.node_title(node)
            log_event("missing", node=name, round=request.round, outcome=reason)
            if node not in refused:
                self.progress.add_failure(node, reason)
        return answers, missing

    def _record(self, request: FakeBatch, tensors: bytes) -> ConfigRecord:
        payload: dict[str, Any] = dict(encode_batch(request, self.config, tensors))
        if self.roll is None:
            payload["run_folder"] = str(self.folder.path)
        else:
            payload["run_id"] = self.roll.run_id
        return ConfigRecord(payload)

    def _decode(
        self, reply: Message, request: FakeBatch, node_id: int
    ) -> SanitizedGradients | None:
        """Checks a reply; raises `UserError` with one line that quotes no data."""
        where = f"round {request.round}: {self.config.node_title(node_id)}"
        if reply.has_error():
            raise UserError(f"{where} says: {one_line(reply.error.reason)}")
        if reply.metadata.src_node_id != self.asking.addresses.get(node_id):
            raise UserError(f"{where}: a reply of another sender")
        record = reply.content.config_records.get(RECORD)
        if record is None:
            raise UserError(f"{where} answered without a record")
        if len(reply.content) > 1:
            raise UserError(f"{where} answered with other records too")
        if "tensors" in record:  # what it weighs would tell of this one release
            self.progress.add_bytes(received=stated_release_bytes(self.config))
        return decode_answer(record, self.config, request, node_id)

    # -------------------------------------------------------------- Flower's verbs

    def summary(self) -> None:
        """Logs what is about to run."""
        log(
            INFO,
            "GS-WGAN: %s clients on %d nodes, %d rounds, run folder %s",
            self.config.num_clients,
            self.config.num_nodes,
            self.config.num_rounds,
            self.folder.path,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Is not used: `answers` builds the messages of a round."""
        raise NotImplementedError(
            "fedgs.federation.training.run_rounds drives the rounds"
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Is not used: `fedgs.federation.round.server_round` uses the answers."""
        raise NotImplementedError(
            "fedgs.federation.training.run_rounds drives the rounds"
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sends nothing: clients evaluate nothing, for that would leave a client."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Has nothing to aggregate."""
        return None


def history_of(folder: RunFolder) -> list[tuple[str, int]]:
    """Returns which starts of the server made a deployed run's rounds; the last is new.

    It is kept with the checkpoint, so that the two are of one time in every backup.

    Privacy: public.

    Raises:
        UserError: a malformed checkpoint.
    """
    committed, known = folder.last_round, []
    if committed:
        known = read_json(folder.path / CHECKPOINT).get("history", [(UNNAMED, 0)])
    past = [(str(start), int(first)) for start, first in known if first < committed]
    return [*past, (secrets.token_hex(8), committed)]


def kept_of(folder: RunFolder) -> dict[str, Any]:
    """Returns what is kept of a deployed run across starts: `deployment.json`.

    `run_id`, under which clients keep their state, is drawn once, so that a run that is
    submitted again finds it. `answered` and `unheard` are `RollCall`'s.

    Privacy: public.

    Raises:
        UserError: the file is broken.
    """
    path = folder.path / "deployment.json"
    if not path.exists():
        nodes = list(folder.config.node_names)
        write_json(path, {"run_id": secrets.token_hex(8), "nodes": nodes})
    return read_json(path)


def keep(folder: RunFolder, **values: object) -> None:
    """Keeps more of a deployed run, or other values; see `kept_of`.

    Privacy: public.
    """
    write_json(folder.path / "deployment.json", kept_of(folder) | values)
