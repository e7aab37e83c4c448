"""Fed-Avg GAN as a Flower Strategy, beside GS-WGAN's, and its ServerApp.

The server of `fedgs.baselines.fedavg_gan` sends both networks to the nodes of a round
(`configure_train`) and averages their sanitized updates (`aggregate_train`). `start` is
the loop of `fedgs.baselines.run`, with run folder, ledger and checkpoints: a round's
event is on the disk before its messages are sent. For simulations; see `clients`.
"""

from collections.abc import Iterable, Sequence
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from fedgs.baselines.fedavg_gan import FedAvgGan, terms_of
from fedgs.baselines.fedavg_messages import UpdateRequest, encode_request
from fedgs.baselines.run import BaselineRun, open_run, train_by
from fedgs.errors import UserError
from fedgs.federation.messages import RECORD, decode_answer, one_line
from fedgs.federation.training import Report, RunStopped, Stop, nodes_of
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.process import watch_launcher
from server.exchange import IN_MEMORY, Exchange, SilentStrategy
from server.progress import Progress
from server.roll_call import roll_call
from server.server_app import StopFile, locked, recorded_outcome

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains one run; its outcome is in the run folder's `.flower/result.json`.

    Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.
    """
    watch_launcher()
    run = open_run(Path(str(context.run_config["run_folder"])))
    torch.set_num_threads(run.config.num_threads)
    flower = run.folder.path / ".flower"
    flower.mkdir(exist_ok=True)

    def report(metrics: dict[str, Any]) -> None:
        if metrics["round"] % max(1, run.config.num_rounds // 20) == 0:
            log(INFO, "round %d of %d", metrics["round"], run.config.num_rounds)

    strategy = FedAvgGanStrategy(run, report, StopFile(flower / "stop"))
    with locked(run.folder), recorded_outcome(flower / "result.json"):
        strategy.start(grid)


class FedAvgGanStrategy(SilentStrategy):
    """Fed-Avg GAN as a Flower strategy; one instance trains one run folder.

    Args:
        run: its folder is locked by the caller.
        report: called with the public metrics of each round.
        stop: when set, the run checkpoints after the current round and stops.

    Attributes:
        training: both networks.
        exchange: messages to the nodes and back, while the run is on.
    """

    exchange: Exchange

    def __init__(self, run: BaselineRun, report: Report, stop: Stop) -> None:
        """Builds the networks; sends nothing yet."""
        self.run, self.report, self.stop = run, report, stop
        self.training = FedAvgGan(run.settings, run.config, self._ask, is_ahead=True)
        self.config = self.training.config
        self.answers: list[SanitizedGradients] = []

    def start(  # type: ignore[override]
        self, grid: Grid, *_: object, **__: object
    ) -> Result:
        """Trains from the last checkpoint to the last round of the configuration.

        Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

        Returns:
            Flower's record of the run, with the generator as `arrays`.

        Raises:
            RunStopped: the run ended early with a checkpoint.
        """
        self.summary()
        if hasattr(grid, "pull_interval"):  # the simulation's in-memory grid
            grid.pull_interval = IN_MEMORY.least  # pyright: ignore
        addresses = roll_call(grid, self.config.num_nodes, self.stop)
        progress = Progress(None, self.config, "", 0)
        self.exchange = Exchange(grid, addresses, IN_MEMORY, progress)
        train_by(self.run, self.training, self.report, self.stop)
        return Result(ArrayRecord(self.training.generator.state_dict()))

    def _ask(self, request: UpdateRequest) -> Sequence[SanitizedGradients]:
        """Brings a request to its nodes, and their releases back.

        Raises:
            RunStopped: a node gave no valid answer.
        """
        self.request = request
        empty, none = ArrayRecord(), ConfigRecord()
        messages = self.configure_train(request.round, empty, none, self.exchange.grid)
        nodes = nodes_of(self.config, request.participants)
        timeout = self.config.round_timeout
        replies = self.exchange.send_and_receive(
            dict(zip(nodes, messages, strict=True)), timeout=timeout
        )
        self.aggregate_train(request.round, replies)
        return self.answers

    # -------------------------------------------------------------- Flower's verbs

    def summary(self) -> None:
        """Logs what is about to run."""
        asked = (self.config.clients_per_round, self.config.num_nodes)
        log(INFO, "Fed-Avg GAN: %s clients a round on %d nodes", *asked)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Returns the request of the round as one message for each of its nodes.

        The arguments are Flower's and are not used.
        """
        nodes = nodes_of(self.config, self.request.participants)
        requests = self.request.per_node(self.config.hosting, nodes)
        place = {"run_folder": str(self.run.folder.path)}
        # Nodes with the same clients named share a record ("all"), and its memory.
        records = {
            id(each): ConfigRecord({**encode_request(each, self.config), **place})
            for each in {id(each): each for each in requests.values()}.values()
        }
        return [
            Message(
                RecordDict({RECORD: records[id(each)]}),
                self.exchange.addresses[node],
                "train",
            )
            for node, each in requests.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Checks the replies as they come and keeps their releases for the step.

        Raises:
            RunStopped: a node gave no valid answer; the round stays counted.
        """
        found: dict[int, SanitizedGradients] = {}
        for reply in replies:
            node = self.exchange.node_of(reply)
            if node is None or node in found:
                continue
            try:
                found[node] = self._checked(reply, node)
            except UserError as error:
                self.exchange.refuse(node, str(error))
        asked = nodes_of(self.config, self.request.participants)
        if missing := [node for node in asked if node not in found]:
            why = "; ".join(map(str, self.exchange.reasons.values()))
            raise RunStopped(
                f"round {server_round}: {len(missing)} of {len(asked)} nodes gave no "
                f"valid answer: {why}; the round is counted and discarded"
            )
        self.answers = [found[node] for node in asked]
        return None, MetricRecord({"num_answers": len(found)})

    def _checked(self, reply: Message, node: int) -> SanitizedGradients:
        """Checks a reply; raises `UserError` with one line that quotes no data."""
        where = f"round {self.request.round}: {self.config.node_title(node)}"
        if reply.has_error():
            raise UserError(f"{where} says: {one_line(reply.error.reason)}")
        if reply.metadata.src_node_id != self.exchange.addresses.get(node):
            raise UserError(f"{where}: a reply of another sender")
        record = reply.content.config_records.get(RECORD)
        if record is None or len(reply.content) > 1:
            raise UserError(f"{where} answered without a record, or with others too")
        hosting = self.config.hosting
        request = self.request.per_node(hosting, [node])[node]
        terms = terms_of(self.run.settings, self.config, self.request)
        answer = decode_answer(record, self.config, request, node, terms)
        if not isinstance(answer, SanitizedGradients):
            raise UserError(f"{where} answered nothing")
        return answer
