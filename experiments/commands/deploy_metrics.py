"""The numbers of `fedgs deploy status` for Prometheus: a file or an endpoint.

docs/deployment.md says what each of them means.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from experiments.commands.deploy_status import STATES, Overview, RunStatus, Unreadable
from experiments.launch.health import NEEDED, Server
from fedgs.errors import UserError, explained
from fedgs.files import write_atomically

# Metric -> field of the status, help. A field that is None has no sample.
RUN = {
    "fedgs_round": ("round", "Finished generator updates."),
    "fedgs_rounds_planned": ("num_rounds", "Generator updates of the whole run."),
    "fedgs_releases": ("released", "Events in the ledger; repeats count again."),
    "fedgs_participants": ("participants", "Clients asked in the last round."),
    "fedgs_clients": ("num_clients", "Clients of the run."),
    "fedgs_nodes": ("num_nodes", "Nodes of the run."),
    "fedgs_nodes_answered": ("num_answers", "Nodes that answered the last round."),
    "fedgs_sent_bytes": ("bytes_sent", "Payload to nodes."),
    "fedgs_received_bytes": ("bytes_received", "Payload from them; compact: about."),
    "fedgs_round_seconds": ("seconds_per_round", "Median duration of the last rounds."),
    "fedgs_left_seconds": ("seconds_left", "Estimated time to the last round."),
    "fedgs_updated_timestamp_seconds": ("updated", "When the last round finished."),
    "fedgs_last_sign_timestamp_seconds": ("last_sign", "When it last said anything."),
}
NODE = {
    "fedgs_node_last_answer_round": ("last_answer", "Round of the last valid answer."),
    "fedgs_node_last_answer_timestamp_seconds": ("last_answer_time", "When it came."),
    "fedgs_node_resends_total": ("resends", "Requests that were sent again."),
    "fedgs_node_failures_total": ("failures", "Answers refused, or that never came."),
}
NODE_AT_WORK = {
    "fedgs_node_online": ("online", "1 if the node can be reached; of runs at work."),
    "fedgs_node_waited_for": ("is_waited_for", "1 if it is waited for; as above."),
}
SERVER = {
    "fedgs_server_up": ("is_alive", "1 if runs can go on."),
    "fedgs_superexec_restarts_total": ("superexec_restarts", "Since the server began."),
    "fedgs_disk_free_bytes": ("free_bytes", "Free for the state directory."),
    "fedgs_disk_size_bytes": ("disk_bytes", "Of the state directory's file system."),
}
OTHERS = {
    "fedgs_state": "1 for the state that the run is in.",
    "fedgs_nodes_waited_for": "Nodes that the server waits for now.",
    "fedgs_epsilon": "Epsilon of all releases so far; +Inf is unbounded.",
    "fedgs_processes": "Living processes of the server.",
    "fedgs_certificate_expiry_timestamp_seconds": "When the file expires.",
}
HELP = OTHERS | {
    name: text
    for table in (RUN, NODE, NODE_AT_WORK, SERVER)
    for name, (_, text) in table.items()
}

Sample = tuple[str, dict[str, str], float]  # name, labels, value


class Metrics(Collector):
    """What Prometheus asks for, as of the moment when it asks.

    Args:
        current: returns how the server and its runs stand.
    """

    def __init__(self, current: Callable[[], Overview]) -> None:
        """Looks at nothing yet."""
        self.current = current

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Returns all metrics that have a sample."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, labels, value in _all_samples(self.current()):
            if name not in families:
                is_counter = name.endswith("_total")
                kind = CounterMetricFamily if is_counter else GaugeMetricFamily
                families[name] = kind(name, HELP[name], labels=[*labels])
            families[name].add_metric([*labels.values()], value)
        return families.values()


def to_prometheus(overview: Overview) -> str:
    """Returns the numbers in Prometheus' text exposition format."""
    return generate_latest(Metrics(lambda: overview)).decode()


def write_prometheus(path: Path, overview: Overview) -> None:
    """Writes a file for node_exporter's textfile collector; name it *.prom.

    Raises:
        UserError: it cannot be written.
    """
    problem, remedy = f"prometheus = {path}: cannot be written", "choose another file"
    with explained(OSError, problem, remedy):
        write_atomically(path, to_prometheus(overview).encode())


def serve_metrics(
    host: str, port: int, current: Callable[[], Overview]
) -> tuple[WSGIServer, threading.Thread]:
    """Starts a server of GET /metrics; returns it and its thread, which does not end.

    Raises:
        UserError: the address cannot be listened on.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Metrics(current))
    problem = f"serve = {host}:{port}: cannot be listened on"
    with explained(OSError, problem, "choose another address"):
        server, thread = start_http_server(port, host, registry)
    server.set_app(partial(_answer, server.get_app()))
    return server, thread


def _answer(metrics: Any, request: dict[str, Any], start_response: Any) -> list[bytes]:
    """Answers one HTTP request, with an error where there is nothing to tell."""
    status = "404 Not Found"
    if request["PATH_INFO"] == "/metrics":
        try:
            return metrics(request, start_response)
        except UserError as error:
            print(error, flush=True)  # paths are not for who asks
            status = "503 Service Unavailable"
    start_response(status, [])
    return []


def _all_samples(overview: Overview) -> Iterator[Sample]:
    if overview.server is not None:
        yield from _server_samples(overview.server)
    for status in overview.runs:
        for name, labels, value in _run_samples(status):
            yield name, {"run": status.run, **labels}, value


def _plain(
    source: object, table: dict[str, tuple[str, str]], **labels: str
) -> Iterator[Sample]:
    """Yields the samples that are fields of an object."""
    for name, (field, _) in table.items():
        if (value := getattr(source, field)) is not None:
            yield name, labels, value


def _server_samples(server: Server) -> Iterator[Sample]:
    yield from _plain(server, SERVER)
    living = [process.role for process in server.processes if process.is_alive]
    for role in (*NEEDED, "serverapp"):
        yield "fedgs_processes", {"role": role}, living.count(role)
    for certificate in server.certificates:
        if certificate.expires is not None:
            name = "fedgs_certificate_expiry_timestamp_seconds"
            yield name, {"certificate": certificate.whose}, certificate.expires


def _run_samples(status: RunStatus) -> Iterator[Sample]:
    for state in STATES:
        yield "fedgs_state", {"state": state}, state == status.state
    if isinstance(status, Unreadable):
        return
    yield from _plain(status, RUN)
    yield "fedgs_nodes_waited_for", {}, len(status.waiting_for)
    for node in status.nodes:
        yield from _plain(node, NODE, node=node.name)
        if node.online is not None:
            yield from _plain(node, NODE_AT_WORK, node=node.name)
    for row in status.epsilons:
        labels = {
            "adversary": row.adversary,
            "relation": row.relation,
            "delta": f"{row.delta:g}",
            "guarantee": "yes" if row.guarantee else "no",
        }
        yield "fedgs_epsilon", labels, math.inf if row.epsilon is None else row.epsilon
