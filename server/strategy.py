"""The Flower strategy: the server of Algorithm 2, and of every other method.

It owns the run (`fedgs.round.run.RunSession`), whose generator stays here: it
sends a round's request to the nodes that are needed (`configure_train`) and steps on
their answers (`aggregate_train`). `start` is Flower's loop with checkpoints, retries
and a stop. Who is there, and messages, are in `server.nodes`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedgs.config.recipes import described
from fedgs.errors import UserError
from fedgs.event_log import log_event
from fedgs.mechanism.masks import Announced, Attempt, MaskedSum, repeated_key
from fedgs.methods.schedule import nodes_of, select
from fedgs.round.messages import Answer, decode_key
from fedgs.round.run import Report, RunSession, RunStopped, Stop
from fedgs.runs.run_folder import RunFolder
from server.messenger import SilentStrategy
from server.nodes import Nodes

KEY_SECONDS = 10.0  # for a node without a key, where a round can do without it


class FederatedGan(SilentStrategy):
    """A federated method as a Flower strategy; one instance trains one run folder.

    Args:
        folder: the run folder, locked by the caller; its configuration is resolved.
        report: called with the public metrics of each round.
        stop: when set, the run checkpoints after the current round and stops.

    Attributes:
        nodes: the nodes of the run; messages to them and back.
        training: the run in progress, while it is `opened`: generator, accountant,
            ledger.
        keys: node -> the masking key that it announced and that no list has had.
        left_out: nodes that this round goes on without, for it has been voided by them
            or they announce no key.
    """

    training: RunSession

    def __init__(self, folder: RunFolder, report: Report, stop: Stop) -> None:
        """Touches nothing yet."""
        self.folder = folder
        self.config = folder.config
        self.report = report
        self.stop = stop
        self.nodes = Nodes(folder, stop)
        self.keys: dict[int, Announced] = {}
        self.left_out: set[int] = set()

    def start(self, grid: Grid, *_: object, **__: object) -> Result:
        """Trains from the last checkpoint to the last round of the configuration.

        The arguments after `grid` are Flower's and are not used: the run folder's
        configuration decides. Flower's own loop would log and poll in each round, and
        knows neither checkpoints nor a stop.

        Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

        Returns:
            Flower's record of the run: the averaged generator as `arrays`, and the
            public metrics of each round as `train_metrics_clientapp`.

        Raises:
            RunStopped: the run ended early with a checkpoint.
        """
        self.summary()
        result = Result()
        with self.opened(grid):
            self.training.settle(self.stop)
            while self.training.goes_on:
                round = self.training.round + 1
                # Flower's arrays and configuration are empty: the run has its own.
                messages = self.configure_train(
                    round,
                    ArrayRecord(),
                    ConfigRecord(),
                    grid,
                )
                timeout = self.config.round_timeout
                replies = self.nodes.replies(messages, timeout, stop=None)
                metrics = self.aggregate_train(round, replies)[1]
                # A round that was voided has none, and is repeated.
                if metrics:
                    result.train_metrics_clientapp[round] = metrics
                self.training.stop_if_asked(self.stop)
                self.training.settle(self.stop)
            self.training.save_generator()
            result.arrays = ArrayRecord(self.training.server.ema.state_dict())
            return result

    @contextmanager
    def opened(self, grid: Grid) -> Iterator[None]:
        """Finds the nodes and opens the run, for the verbs.

        Raises:
            RunStopped: `stop` was set, or not enough nodes joined.
            UserError: nodes are wrong or missing, or the folder is corrupted.
        """
        self.nodes.find(grid)
        # Nodes have written their states before they answer.
        opened = RunSession.opened(self.folder, self.report, lambda keep_round: None)
        with opened as self.training:
            if self.training.goes_on:
                self.nodes.wait()
            else:
                # Only the last fit is left, which asks nobody: a client that is away,
                # or whose limit is spent, must not hold it up.
                self.nodes.progress.set_phase("training", self.training.round)
                self.nodes.progress.set_waiting({})
            yield

    # -------------------------------------------------------------- Flower's verbs

    def summary(self) -> None:
        """Logs what is about to run."""
        log(
            INFO,
            "%s Nodes: %d. Run folder: %s",
            described(self.config),
            self.config.num_nodes,
            self.folder.path,
        )

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Begins a round: has new nodes prepared, then returns the round's requests.

        The event is on the disk when this returns. One message for each node that
        hosts a trainee; the arguments are Flower's and are not used.

        Raises:
            RunStopped: nodes could not prepare, or the budget is spent.
        """
        self._prepare_nodes()
        attempt = None
        if self.config.is_masked:
            keys = self._gather_keys(server_round)
            request = self.training.begin([*keys], self.nodes.failures())
            # Of the number that the ledger has it under.
            attempt = Attempt(self.training.attempts[request.round], keys)
        else:
            request = self.training.begin()
        self.nodes.progress.set_phase("training", request.round)
        planned = nodes_of(self.config, request.trainees)
        asked = [node for node in planned if node not in self.left_out]
        return self.nodes.encode(request, asked, attempt)

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Finishes a round: checks replies as they come, then takes the step.

        Returns:
            No arrays, for the generator stays here; the public metrics of the round.

        Raises:
            RunStopped: fewer than `min_answers` nodes answered.
        """
        answers, missing = self.nodes.decode(replies)
        self._keep_keys(answers)
        who = self.nodes.titles(missing)
        if missing:
            log(WARNING, "round %d: %s did not answer", server_round, who)
        metrics = self.training.finish(answers, self.nodes.failures())
        if metrics:
            self.left_out.clear()
        else:
            self.left_out.update(missing)
            text = "round %d: this attempt is void, and the round is asked without %s"
            log(WARNING, text, server_round, who)
            log_event("voided", round=server_round, outcome=f"without {who}")
        return None, MetricRecord(metrics)

    # -------------------------------------------------------------- nodes

    def _prepare_nodes(self) -> None:
        """Has nodes make their discriminators, without a time limit.

        A deployed node that is offline for `round_timeout` is given up.

        Raises:
            RunStopped: a node failed twice or is gone, or `stop` was set.
        """
        nodes = self.training.unprepared()
        if not nodes:
            return
        messages = self.nodes.encode(self.training.preparation, nodes)
        self.nodes.progress.set_phase("preparing", 0)
        replies = self.nodes.replies(messages, math.inf, self.stop)
        _, missing = self.nodes.decode(replies)
        if not missing:
            return
        who = self.nodes.titles(missing)
        if self.stop.is_set():
            raise RunStopped(
                f"The run was told to stop, before {who} had made discriminators"
            )
        why = "; ".join(self.nodes.failures())
        raise RunStopped(
            f"The run stopped, because {who} could not make discriminators: {why}"
        )

    # -------------------------------------------------------------- masks

    def _keep_keys(self, answers: Sequence[Answer]) -> None:
        """Keeps the keys of the nodes' next attempts."""
        for answer in answers:
            # A node without room for another release announces none, and is asked why.
            if isinstance(answer, MaskedSum) and answer.next_key:
                with suppress(UserError):  # without one, the next round asks for it
                    self._keep_key(answer.node_id, Announced.unpack(answer.next_key))

    def _keep_key(self, node: int, announced: Announced) -> None:
        """Keeps a node's key; raises `UserError` if the others would not take it."""
        name = self.config.node_title(node)
        roll = self.nodes.roll
        if roll is not None and not roll.has_signed(node, announced):
            raise UserError(
                f"the masking key of {name} is not signed with the key that is "
                f"registered for it, so it is not taken; ask {name} which key it uses"
            )
        # Listed, it would have every other node refuse the round.
        announced.check(name)
        for other, kept in self.keys.items():
            if other != node and kept.public == announced.public:
                raise repeated_key(name, self.config.node_title(other))
        self.keys[node] = announced

    def _gather_keys(self, round: int) -> dict[int, Announced]:
        """Returns the keys of the nodes that the next attempt can list; each once.

        An answer brings the node's next key. Only who has none is asked for one, at the
        start and after it was away: nothing is released, and nothing counted. Who gives
        none is left out of the round, so that nobody's release is voided by it.
        """
        participants = select(self.config, round)
        planned = nodes_of(self.config, participants)
        listed = [node for node in planned if node not in self.left_out]
        missing = [node for node in listed if node not in self.keys]
        if missing:
            num_with_keys = len(listed) - len(missing)
            is_enough = num_with_keys >= self.training.required(participants)
            self._ask_for_keys(missing, round, is_enough)
            still_missing = [node for node in missing if node not in self.keys]
            self.left_out.update(still_missing)
        # Taken out: a key that was listed is never listed again, void attempt or not.
        # Sorted, because a node refuses a list in which nodes do not increase.
        with_keys = sorted(node for node in listed if node in self.keys)
        return {node: self.keys.pop(node) for node in with_keys}

    def _ask_for_keys(self, nodes: Sequence[int], round: int, is_brief: bool) -> None:
        record = ConfigRecord({"round": round, **self.nodes.place})
        asked: dict[int, Message] = {}
        for node in nodes:
            asked[node] = self.nodes.message(record, node, "query.key")
        seconds = self.config.round_timeout
        patience = seconds
        if is_brief:
            seconds = min(KEY_SECONDS, seconds)
            patience = 0.0  # a node that is offline is not waited for
        exchange = self.nodes.exchange
        for reply in exchange.send_and_receive(asked, seconds, patience, self.stop):
            node = exchange.node_of(reply)
            if node is None or node not in asked:
                continue
            where = f"round {round}: {self.config.node_title(node)}"
            try:
                record = self.nodes.record(reply, node, where)
                self._keep_key(node, decode_key(record, where))
            except UserError as error:
                exchange.refuse(node, str(error))
