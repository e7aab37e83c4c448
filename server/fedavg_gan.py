"""Fed-Avg GAN as a Flower strategy, beside GS-WGAN's.

The server of `fedgs.baselines.fedavg_gan` sends both networks to the nodes of a round
(`configure_train`) and averages their sanitized updates (`aggregate_train`). The loop
is that of `fedgs.baselines.run`, with run folder, ledger and checkpoints: a round's
event is on the disk before its messages are sent.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedgs.baselines.fedavg_gan import FedAvgGan
from fedgs.baselines.fedavg_messages import UpdateRequest, pack_networks
from fedgs.baselines.releases import ReleaseLedger
from fedgs.baselines.run import BaselineRun, Session
from fedgs.errors import UserError
from fedgs.federation.messages import Request
from fedgs.federation.training import Report, RunStopped, Stop, nodes_of
from fedgs.mechanism.sanitizer import SanitizedGradients
from server.strategy_base import FlowerStrategy


class FedAvgGanStrategy(FlowerStrategy):
    """Fed-Avg GAN as a Flower strategy; one instance trains one run folder.

    Args:
        run: its folder is locked by the caller.
        report, stop: as of `FlowerStrategy`.

    Attributes:
        training: both networks.
        session: the run in progress, while it is on: ledger and checkpoints.
        answers: of the round that was asked last, by node.
    """

    ledger_kind = ReleaseLedger
    session: Session

    def __init__(self, run: BaselineRun, report: Report, stop: Stop) -> None:
        """Builds the networks; sends nothing yet."""
        self.run = run
        self.training = FedAvgGan(run.settings, run.config, self._ask, is_ahead=True)
        super().__init__(run.folder, self.training.config, report, stop)
        self.answers: Sequence[SanitizedGradients] = []

    def start(self, grid: Grid, *_: object, **__: object) -> Result:
        """Trains as `FlowerStrategy.start` says.

        Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.
        """
        self.summary()
        save_nodes = self._find_nodes(grid)
        with closing(self.folder.ledger(ReleaseLedger)) as ledger:
            self.session = Session(self.run, self.training, ledger, save_nodes)
            if self.roll is not None:
                self.roll.wait(self.stop)
            self.session.train(self.report, self.stop)
        return Result(ArrayRecord(self.training.generator.state_dict()))

    def _ask(self, request: UpdateRequest) -> Sequence[SanitizedGradients]:
        """Brings a request to its nodes, and their releases back.

        Raises:
            RunStopped: a node gave no valid answer.
        """
        self.request = replace(request, keep_round=self.session.committed)
        empty, none = ArrayRecord(), ConfigRecord()
        messages = self.configure_train(request.round, empty, none, self.exchange.grid)
        self.aggregate_train(request.round, self._replies(messages))
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
        self.progress.set_phase("training", self.request.round)
        nodes = nodes_of(self.config, self.request.participants)
        return self._encode(self.request, nodes)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Checks the replies as they come and keeps their releases for the step.

        Raises:
            RunStopped: a node gave no valid answer; the round stays counted.
        """
        answers, missing = self._decode(replies)
        if missing:
            why = "; ".join(self._failures())
            raise RunStopped(
                f"round {server_round}: {len(missing)} of {len(self.requests)} nodes "
                f"gave no valid answer: {why}; the round is counted and discarded"
            )
        self.answers = [a for a in answers if isinstance(a, SanitizedGradients)]
        return None, MetricRecord({"num_answers": len(self.answers)})

    def _pack(self, request: Request) -> bytes:
        if not isinstance(request, UpdateRequest):
            raise UserError(f"round {request.round}: no request of Fed-Avg GAN")
        return pack_networks(request)
