"""The Flower ServerApp of cohort selection: federated averaging, then questions.

The strategy is Flower's FedAvg, in private mode inside Flower's DP strategy; only who
takes part when is the project's own, a public schedule. What the server learns from a
client is in `fedgs.cohorts.selection.Selection`.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    FedAvg,
    Strategy,
)

from fedgs.cohorts.classifier import build_classifier
from fedgs.cohorts.selection import (
    ARRAYS,
    CONFIG,
    NOBODY_ABOVE,
    NOBODY_BELOW,
    OUTCOME,
    WEIGHT,
    Selection,
    find_thresholds,
    read_plan,
)
from fedgs.cohorts.selection_settings import CLIP_BOUND
from fedgs.config.run_config import ResolvedConfig
from fedgs.files import write_json
from fedgs.methods.schedule import select
from fedgs.round.messages import RECORD
from fedgs.round.run import Report, RunStopped, Stop
from fedgs.runs.run_folder import RunFolder
from server.roll_call import roll_call
from server.server_app import StopFile, locked, recorded_outcome

TIMEOUT = 3600.0  # seconds for one round or question

app = ServerApp()


class ScheduledFedAvg(FedAvg):
    """FedAvg with participants by a public schedule and sums in a fixed order.

    Args:
        config: with num_clients, clients_per_round, client_selection and seed.
        addresses: Flower's address of each client.
        fewest: answers that a round needs; with fewer the classifier stays as it is.
    """

    def __init__(
        self, config: ResolvedConfig, addresses: Mapping[int, int], fewest: int
    ) -> None:
        """Takes part in no evaluation."""
        super().__init__(fraction_evaluate=0.0, weighted_by_key=WEIGHT)
        self.config = config
        self.fewest = fewest
        self.addresses = addresses
        self.clients = {address: client for client, address in addresses.items()}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sends the classifier to the clients of the schedule.

        Privacy: public; the classifier is what earlier rounds released.
        """
        # Clients draw their batches by it.
        config["server-round"] = server_round
        record = RecordDict({ARRAYS: arrays, CONFIG: config})
        chosen = select(self.config, server_round)
        nodes = [self.addresses[int(client)] for client in chosen]
        return self._construct_messages(record, nodes, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Averages as FedAvg does; who answered first does not change a bit.

        Privacy: reads private data; output private with bounded sensitivity where
        clients clip.
        """
        # Sums of floating-point numbers depend on their order.
        order = sorted(replies, key=lambda r: self.clients[r.metadata.src_node_id])
        if sum(not reply.has_error() for reply in order) < self.fewest:
            return None, None
        return super().aggregate_train(server_round, order)


class Selecting:
    """One selection of cohorts, over any grid.

    Args:
        folder: holds the plan.
        grid: reaches one node per client.
        report: called with the public metrics of each round.
        stop: when set, the selection ends after the current round or question.
    """

    def __init__(self, folder: Path, grid: Grid, report: Report, stop: Stop) -> None:
        """Reads the plan."""
        self.folder, self.grid, self.report, self.stop = folder, grid, report, stop
        self.config, self.selection = read_plan(folder)
        self.num_clients = self.config.num_clients
        self.addresses: dict[int, int] = {}
        self.started, self.questions = time.monotonic(), 0

    def run(self) -> dict[str, Any]:
        """Trains, finds thresholds, and asks every client for its cohort.

        Privacy: in private mode releases (epsilon, delta)-DP output; event:
        `Selection.cost`. Else reads private data; the cohorts are published.

        Returns:
            low and high, the thresholds (None where there is no such cohort), and
            cohorts, one for each client in the order of the data.

        Raises:
            RunStopped: `stop` was set, or clients did not answer.
        """
        self.addresses = roll_call(self.grid, self.num_clients, self.stop)
        classifier = self._train()
        self._ask("query.measure", {}, classifier)
        low, high = self._thresholds()
        question = {
            "low": NOBODY_BELOW if low is None else low,
            "high": NOBODY_ABOVE if high is None else high,
        }
        answers = self._ask("query.join", question)
        cohorts = [str(answer["cohort"]) for answer in answers]
        return {"low": low, "high": high, "cohorts": cohorts}

    def _train(self) -> ArrayRecord:
        """Returns the trained classifier."""
        weights = ArrayRecord(build_classifier(self.config).state_dict())
        result = strategy(self.config, self.selection, self.addresses).start(
            self.grid,
            weights,
            self.selection.num_rounds,
            TIMEOUT,
            train_config=ConfigRecord({"folder": str(self.folder)}),
            evaluate_fn=self._after_round,
        )
        return result.arrays

    def _after_round(self, number: int, arrays: ArrayRecord | None = None) -> None:
        """Reports a round of Flower's loop, or a question, and ends it if asked to."""
        now = time.monotonic()
        if number:
            self.report({"round": number, "seconds": now - self.started})
        self.started = now
        if self.stop.is_set():
            raise RunStopped(f"stopped after round {number}; nothing was selected")

    def _thresholds(self) -> tuple[float | None, float | None]:
        """Returns the accuracies that divide the cohorts, found where needed."""
        low, high = self.selection.below, self.selection.above
        percentiles = self.selection.percentiles
        if percentiles:
            limits = find_thresholds(percentiles, self.num_clients, self._counts)
            low = None if low is None else limits[0]
            high = None if high is None else limits[-1]
        if low is not None and high is not None:
            high = max(low, high)  # ties or noise may swap them
        return low, high

    def _counts(self, thresholds: Sequence[float]) -> list[float]:
        """Returns how many clients' accuracies are at most each threshold."""
        question = {"thresholds": list(thresholds)}
        answers = self._ask("query.compare", question)
        bits = np.array([answer["is_at_most"] for answer in answers])  # (K, thresholds)
        counts = bits.sum(0).astype(float)
        cost = self.selection.cost(self.num_clients)
        if cost is not None:
            rng = np.random.default_rng()  # of the operating system's entropy
            counts += rng.normal(0, cost.count_noise_std, len(counts))
        return counts.tolist()

    def _ask(
        self,
        question: str,
        details: Mapping[str, float | list[float]],
        arrays: ArrayRecord | None = None,
    ) -> list[ConfigRecord]:
        """Asks all clients; returns their answers in the order of the data."""
        config = ConfigRecord({"folder": str(self.folder), **details})
        content = RecordDict({CONFIG: config})
        if arrays is not None:
            content[ARRAYS] = arrays
        replies = self.grid.send_and_receive(
            [Message(content, node, question) for node in self.addresses.values()],
            timeout=TIMEOUT,
        )
        clients = {address: client for client, address in self.addresses.items()}
        answers = {
            clients[reply.metadata.src_node_id]: reply.content.config_records[RECORD]
            for reply in replies
            if not reply.has_error()
        }
        if missing := sorted(set(self.addresses) - set(answers)):
            raise RunStopped(f"{question}: no answer of clients {missing[:10]}")
        self.questions += 1
        self._after_round(self.selection.num_rounds + self.questions)
        return [answers[client] for client in sorted(answers)]


def strategy(
    config: ResolvedConfig, selection: Selection, addresses: Mapping[int, int]
) -> Strategy:
    """Returns FedAvg on the schedule, in private mode inside Flower's DP strategy.

    Clients clip (`fedgs.cohorts.classifier.clipped_update`), for an update that Flower
    clips on the server must not be zero or non-finite; Flower's server adds the noise.

    Args:
        config: with num_clients and seed.
        selection: the settings.
        addresses: Flower's address of each client.
    """
    per_round = min(selection.clients_per_round, config.num_clients)
    scheduled = dataclasses.replace(
        config, clients_per_round=per_round, client_selection="balanced"
    )
    if selection.noise_per_clip is None:
        return ScheduledFedAvg(scheduled, addresses, fewest=1)
    # An average over fewer would carry less noise on its sum than is accounted for.
    return DifferentialPrivacyClientSideFixedClipping(
        ScheduledFedAvg(scheduled, addresses, fewest=per_round),
        selection.noise_per_clip,
        CLIP_BOUND,
        per_round,
    )


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Selects cohorts; the outcome is in the folder's `.flower`.

    Privacy: as `Selecting.run`.
    """
    path = Path(str(context.run_config["run_folder"]))
    folder = RunFolder(path, read_plan(path)[0])
    flower, stop = path / ".flower", StopFile(path / ".flower" / "stop")
    if hasattr(grid, "pull_interval"):  # the simulation's in-memory grid
        grid.pull_interval = 0.01  # pyright: ignore
    with locked(folder), recorded_outcome(flower / "result.json"):
        cohorts = Selecting(path, grid, folder.append_metrics, stop).run()
        write_json(flower / OUTCOME, cohorts)
