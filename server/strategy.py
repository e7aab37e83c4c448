"""GS-WGAN as a Flower Strategy: the server of Algorithm 2.

It owns the generator (`fedgs.federation.training.Training`), sends fakes to the nodes
that are needed (`configure_train`) and steps on their answers (`aggregate_train`).
`start` is Flower's loop with checkpoints, retries and a stop. `server.roll_call` finds
the nodes, `server.exchange` sends and receives.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedgs.errors import UserError
from fedgs.event_log import log_event
from fedgs.federation.codec import stated_release_bytes
from fedgs.federation.messages import (
    RECORD,
    Answer,
    Request,
    decode_answer,
    decode_key,
    encode_batch,
    one_line,
    pack_request,
)
from fedgs.federation.round import select
from fedgs.federation.training import Report, RunStopped, Stop, Training, nodes_of
from fedgs.mechanism.masks import Announced, MaskedSum
from fedgs.runs.run_folder import RunFolder
from server.exchange import IN_MEMORY, OVER_HTTP, Exchange, SilentStrategy
from server.kept import history_of, kept_of
from server.progress import Progress
from server.restored import cost_text, missing_events
from server.roll_call import RollCall, roll_call

KEY_SECONDS = 10.0  # for a node without a key, where a round can do without it
NOT_JOINED = 0  # in place of an address, which the exchange looks up when it sends


class GsWgan(SilentStrategy):
    """GS-WGAN as a Flower strategy; one instance trains one run folder.

    Args:
        folder: the run folder, locked by the caller; its configuration is resolved.
        report: called with the public metrics of each round.
        stop: when set, the run checkpoints after the current round and stops.
        accept_restore: go on where clients of a deployment have released more than the
            ledger says, and add it.

    Attributes:
        training: the run in progress: generator, accountant, ledger.
        exchange: messages to the nodes and back.
        roll: who is there; None in a simulation, whose nodes are all there.
        requests: node -> what the messages made last ask of it.
        keys: node -> the masking key that it announced and that no list has had.
        left_out: nodes that this round goes on without, for it has been voided by them
            or they announce no key.
    """

    training: Training  # both are there while the run is `opened`
    exchange: Exchange

    def __init__(
        self,
        folder: RunFolder,
        report: Report,
        stop: Stop,
        accept_restore: bool = False,
    ) -> None:
        """Touches nothing yet."""
        self.folder, self.config = folder, folder.config
        self.report, self.stop = report, stop
        self.accept_restore = accept_restore
        self.roll: RollCall | None = None
        self.progress = Progress(None, self.config, "", 0)
        self.requests: dict[int, Request] = {}
        self.keys: dict[int, Announced] = {}
        self.left_out: set[int] = set()

    def start(  # type: ignore[override]
        self, grid: Grid, *_: object, **__: object
    ) -> Result:
        """Trains from the last checkpoint to the last round of the configuration.

        The arguments after `grid` are Flower's and are not used: the run folder's
        configuration decides. Flower's own loop would log and poll in each round, and
        knows neither checkpoints nor a stop.

        Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

        Returns:
            Flower's record of the run, with the averaged generator as `arrays`.

        Raises:
            RunStopped: the run ended early with a checkpoint.
        """
        self.summary()
        with self.opened(grid):
            for number in self.training.rounds(self.stop):
                messages = self.configure_train(
                    number, ArrayRecord(), ConfigRecord(), grid
                )
                replies = self.exchange.send_and_receive(
                    self._by_node(messages),
                    timeout=self.config.round_timeout,
                    patience=self.config.round_timeout,
                )
                self.aggregate_train(number, replies)
                # A node that joined meanwhile may know of more than the ledger has.
                self._add_lost_releases()
            return Result(ArrayRecord(self.training.server.ema.state_dict()))

    @contextmanager
    def opened(self, grid: Grid) -> Iterator[None]:
        """Finds the nodes and opens the run, for the verbs.

        Raises:
            RunStopped: `stop` was set, or not enough nodes joined.
            UserError: nodes are wrong or missing, or the folder is corrupted.
        """
        save_nodes = self._find_nodes(grid)
        with Training.opened(self.folder, self.report, save_nodes) as self.training:
            if self.roll is not None:
                self._wait_for_nodes(self.roll)
                self._add_lost_releases()
            yield

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
        """Begins a round: has new nodes prepared, then returns the round's requests.

        The event is on the disk when this returns. One message for each node that
        hosts a trainee; the arguments are Flower's and are not used.

        Raises:
            RunStopped: nodes could not prepare, or the budget is spent.
        """
        self._prepare_nodes()
        keys = self._gather_keys(server_round) if self.config.is_masked else None
        request = self.training.begin(keys, self._failures())
        self.progress.set_phase("training", request.round)
        nodes = nodes_of(self.config, request.trainees)
        return self._encode(request, [n for n in nodes if n not in self.left_out])

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Finishes a round: checks replies as they come, then takes the step.

        Returns:
            No arrays, for the generator stays here; the public metrics of the round.

        Raises:
            RunStopped: fewer than `min_nodes` nodes answered.
        """
        answers, missing = self._decode(replies)
        if missing:
            number, who = self.training.server.round + 1, self._titles(missing)
            log(WARNING, "round %d: no answer of %s", number, who)
        metrics = self.training.finish(answers, self._failures())
        if metrics:
            self.left_out.clear()
        else:
            self.left_out.update(missing)
            who = self._titles(missing)
            log(WARNING, "round %d: voided, again without %s", server_round, who)
            log_event("voided", round=server_round, outcome=f"without {who}")
        return None, MetricRecord(metrics)

    # -------------------------------------------------------------- nodes

    def _find_nodes(self, grid: Grid) -> Callable[[int], None]:
        """Calls the roll of a simulation, or gets ready for that of a deployment.

        Returns:
            What the nodes ask to be kept with a checkpoint; all save their own states.
        """
        if hasattr(grid, "pull_interval"):  # the simulation's in-memory grid
            grid.pull_interval = IN_MEMORY.least  # pyright: ignore
        if not self.config.node_names:
            addresses = roll_call(grid, self.config.num_nodes, self.stop)
            self.exchange = Exchange(grid, addresses, IN_MEMORY, self.progress)
            # Simulated nodes have written their states before they answer.
            return lambda keep_round: None
        self.folder.history = history_of(self.folder)
        _, committed = self.folder.history[-1]
        flower, run_id = self.folder.path / ".flower", kept_of(self.folder)["run_id"]
        flower.mkdir(exist_ok=True)
        file = flower / "nodes.json"
        self.progress = Progress(file, self.config, str(run_id), committed)
        self.roll = RollCall(grid, self.folder, self.progress)
        addresses = self.roll.addresses
        self.exchange = Exchange(grid, addresses, OVER_HTTP, self.progress, self.roll)
        return self.roll.save

    def _wait_for_nodes(self, roll: RollCall) -> None:
        """Waits for the nodes of a deployment.

        Raises:
            RunStopped: not enough of them joined.
        """
        try:
            roll.wait(self.stop)
        except RunStopped as error:
            try:
                self._add_lost_releases()  # what is known by now counts all the same
            except RunStopped as other:
                raise RunStopped(f"{error}\n{other}") from error
            raise

    def _add_lost_releases(self) -> None:
        """Adds to a restored ledger what nodes say that they released; each once.

        Whoever has not said it yet is kept on the disk, until the ledger has what the
        others say: a start that does not hear of the restore must not go on.

        Raises:
            RunStopped: there is something, and nobody accepted the restore; or a node
                has not said what it has released since the server was restored.
        """
        if self.roll is None:
            return
        if lost := self.roll.take_lost():
            self.roll.set_unheard({*self.config.node_names})
            events = self.training.ledger.events
            missing = missing_events(self.config, events, lost)
            text = cost_text(self.config, events, missing)
            if not self.accept_restore:
                raise RunStopped(
                    f"{text}. Put the newest server state back, or go on from here and "
                    "add them to the ledger: submit with --resume and --accept-restore"
                )
            log(WARNING, "%s; they are added to the ledger", text)
            log_event("restored", added=len(missing), outcome=text)
            self.training.add_events(missing)
        self.roll.set_unheard(self.roll.unheard - self.roll.heard)
        if self.roll.unheard:
            raise RunStopped(
                "this server was restored from a backup, and its ledger lacks what "
                f"{', '.join(sorted(self.roll.unheard))} may have released since: "
                "start these clients with their newest releases/, and resume; "
                "the run does not go on without them"
            )

    def _prepare_nodes(self) -> None:
        """Has nodes make their discriminators, without a time limit.

        A deployed node that is offline for `round_timeout` is given up.

        Raises:
            RunStopped: a node failed twice or is gone, or `stop` was set.
        """
        if not (nodes := self.training.unprepared()):
            return
        messages = self._encode(self.training.preparation, nodes)
        self.progress.set_phase("preparing", 0)
        replies = self.exchange.send_and_receive(
            self._by_node(messages),
            patience=self.config.round_timeout,
            stop=self.stop,
        )
        _, missing = self._decode(replies)
        if not missing:
            return
        who = self._titles(missing)
        if self.stop.is_set():
            raise RunStopped(f"stopped before the discriminators of {who} were made")
        why = "; ".join(self._failures())
        raise RunStopped(f"the discriminators of {who} could not be made: {why}")

    # -------------------------------------------------------------- masks

    def _gather_keys(self, round: int) -> dict[int, Announced]:
        """Returns the keys of the nodes that the next attempt can list; each once.

        An answer brings the node's next key. Only who has none is asked for one, at the
        start and after it was away: nothing is released, and nothing counted. Who gives
        none is left out of the round, so that nobody's release is voided by it.
        """
        planned = nodes_of(self.config, select(self.config, round))
        listed = [node for node in planned if node not in self.left_out]
        if missing := [node for node in listed if node not in self.keys]:
            is_enough = len(listed) - len(missing) >= self.training.required(
                select(self.config, round)
            )
            self._ask_for_keys(missing, round, is_enough)
            self.left_out.update(node for node in missing if node not in self.keys)
        # Taken out: a key that was listed is never listed again, void attempt or not.
        return {n: self.keys.pop(n) for n in listed if n in self.keys}

    def _ask_for_keys(self, nodes: Sequence[int], round: int, is_brief: bool) -> None:
        record = ConfigRecord({"round": round, **self._place})
        messages = {
            node: Message(
                RecordDict({RECORD: record}),
                self.exchange.addresses.get(node, NOT_JOINED),
                "query.key",
            )
            for node in nodes
        }
        seconds = patience = self.config.round_timeout
        if is_brief:  # who is offline is not waited for
            seconds, patience = min(KEY_SECONDS, seconds), 0.0
        replies = self.exchange.send_and_receive(messages, seconds, patience, self.stop)
        for reply in replies:
            node = self.exchange.node_of(reply)
            if node is None or node not in messages:
                continue
            where = f"round {round}: {self.config.node_title(node)}"
            try:
                self.keys[node] = decode_key(self._record(reply, node, where))
            except UserError as error:
                self.exchange.refuse(node, str(error))

    # -------------------------------------------------------------- messages

    @property
    def _place(self) -> dict[str, str]:
        """What tells a node which run a message is of."""
        if self.roll is None:
            return {"run_folder": str(self.folder.path)}
        return {"run_id": self.roll.run_id}

    def _encode(self, request: Request, nodes: Sequence[int]) -> list[Message]:
        """Returns a request as one message for each node; nothing else makes one."""
        self.requests = request.per_node(self.config.hosting, nodes)
        # Packed once: all nodes get the same bytes.
        tensors = pack_request(request, self.config)
        if self.roll is not None:
            self.roll.round = max(self.roll.round, request.round)
        # Nodes share requests, and so they share records.
        distinct = {id(each): each for each in self.requests.values()}
        records = {
            key: ConfigRecord(
                {**encode_batch(each, self.config, tensors), **self._place}
            )
            for key, each in distinct.items()
        }
        return [
            Message(
                RecordDict({RECORD: records[id(each)]}),
                self.exchange.addresses.get(node, NOT_JOINED),
                "train",
            )
            for node, each in self.requests.items()
        ]

    def _by_node(self, messages: Iterable[Message]) -> dict[int, Message]:
        return dict(zip(self.requests, messages, strict=True))

    def _decode(self, replies: Iterable[Message]) -> tuple[list[Answer], list[int]]:
        """Returns the releases in valid replies, and which nodes gave no valid reply.

        While the exchange goes on, a node that is refused gets its request once more;
        the same request gets the same bytes.
        """
        started = time.monotonic()
        answers: list[Answer] = []
        missing, refused = {*self.requests}, set[int]()
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
            # A node without room for another release announces none, and is asked why.
            if isinstance(answer, MaskedSum) and answer.next_key:
                self.keys[node] = Announced.unpack(answer.next_key)
            if self.roll is not None:
                number = self.requests[node].round
                seconds = round(time.monotonic() - started, 3)
                self.roll.add_answer(node, number, answer is not None, seconds)
        for node in sorted(missing):
            reason = self.exchange.reasons.get(node, "no reply")
            name, number = self.config.node_title(node), self.requests[node].round
            log_event("missing", node=name, round=number, outcome=reason)
            # A refusal was counted when it was refused.
            if node not in refused:
                self.progress.add_failure(node, reason)
        return answers, sorted(missing)

    def _checked(self, reply: Message, node: int) -> Answer | None:
        """Checks a reply; raises `UserError` with one line that quotes no data."""
        request = self.requests[node]
        where = f"round {request.round}: {self.config.node_title(node)}"
        record = self._record(reply, node, where)
        if "tensors" in record:  # what it weighs would tell of this one release
            terms = self.config.terms(request.round)
            size = stated_release_bytes(self.config, terms)
            self.progress.add_bytes(received=size)
        return decode_answer(record, self.config, request, node)

    def _record(self, reply: Message, node: int, where: str) -> ConfigRecord:
        """Returns what a reply of a node carries; raises as `_checked`."""
        if reply.has_error():
            raise UserError(f"{where} says: {one_line(reply.error.reason)}")
        if reply.metadata.src_node_id != self.exchange.addresses.get(node):
            raise UserError(f"{where}: a reply of another sender")
        record = reply.content.config_records.get(RECORD)
        if record is None:
            raise UserError(f"{where} answered without a record")
        if len(reply.content) > 1:
            raise UserError(f"{where} answered with other records too")
        return record

    def _failures(self) -> list[str]:
        """Returns why nodes did not answer the last request; public texts."""
        return [reason for _, reason in sorted(self.exchange.reasons.items())]

    def _titles(self, nodes: Sequence[int]) -> str:
        return ", ".join(map(self.config.node_title, nodes))
