"""The Flower ServerApp of cohort selection: the run of the classifier, then questions.

What the server learns from a client is in `fedgs.cohorts.selection.Selection`.
"""

import functools
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedgs.cohorts.selection import OUTCOME, ask_cohorts
from fedgs.files import write_json
from fedgs.round.messages import PAYLOAD_RECORD
from fedgs.round.run import RunStopped, Stop
from fedgs.runs.run_folder import GENERATOR, RunFolder
from server.nodes import Nodes
from server.server_app import StopFile, locked, log_progress, recorded_outcome
from server.strategy import FederatedGan

QUESTION_SECONDS = 3600.0  # seconds for one question

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains the classifier and selects cohorts; the outcome is in `.flower`.

    Privacy: as `FederatedGan.start` and `ask_cohorts`.
    """
    folder = RunFolder.open(str(context.run_config["run_folder"]))
    flower = folder.path / ".flower"
    stop = StopFile(flower / "stop")
    strategy = FederatedGan(folder, functools.partial(log_progress, folder), stop)
    with locked(folder), recorded_outcome(flower / "result.json"):
        strategy.start(grid)
        ask = functools.partial(ask_nodes, strategy.nodes, stop)
        weights = (folder.path / GENERATOR).read_bytes()
        outcome = ask_cohorts(folder.path.parent, weights, ask)
        write_json(flower / OUTCOME, outcome)


def ask_nodes(
    nodes: Nodes, stop: Stop, question: str, details: Mapping[str, Any]
) -> list[ConfigRecord]:
    """Asks all clients; returns their answers in the order of the data.

    Raises:
        RunStopped: `stop` was set, or a client did not answer.
    """
    record = ConfigRecord({"question": question, **details, **nodes.place})
    exchange = nodes.exchange
    asked = {
        node: nodes.message(record, node, "query.cohort")
        for node in range(nodes.config.num_nodes)
    }
    answers: dict[int | None, ConfigRecord] = {}
    for reply in exchange.send_and_receive(asked, QUESTION_SECONDS, stop=stop):
        if not reply.has_error():
            record = reply.content.config_records[PAYLOAD_RECORD]
            answers[exchange.node_of(reply)] = record
    # Cohorts are chosen among all clients: an answer of some would choose others.
    missing = sorted({*asked} - {*answers})
    if missing:
        why = f"no answer of clients {missing[:10]}"
        raise RunStopped(f"stopped at the question {question}: {why}")
    return [answers[node] for node in asked]
