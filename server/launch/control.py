"""One driver of Flower's control interface: registers clients, starts and asks of runs.

Simulations and deployments are driven by it, with the client that the command `flwr`
uses and in this one process: a process per question takes seconds each.
"""

import contextlib
import errno
import hashlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedgs.deployment import FLOWER_REMEDY, environment_of, proxy_variables
from fedgs.errors import wrap_error

KNOWN_KEY = 23  # Flower's ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE
UNKNOWN_RUN = 16  # and RUN_ID_NOT_FOUND
RETRY_SECONDS = 1.0
NOBODY_LISTENS = os.strerror(errno.ECONNREFUSED)


class FlowerFailed(RuntimeError):
    """A run failed, or its server refused something or cannot be reached.

    Args:
        text: why.
        code: Flower's number of the server's refusal.
    """

    def __init__(self, text: str, code: int | None = None) -> None:
        """Keeps both."""
        super().__init__(text)
        self.code = code


class Control:
    """The control interface of one server; made by `control_of`.

    Args:
        client: Flower's.
        patience: seconds to wait for a server that is starting.
    """

    def __init__(self, client: Any, patience: float) -> None:
        """Asks nothing yet."""
        self.client = client
        self._patience = patience
        self._deadline = time.monotonic() + patience
        self._is_waiting = False

    def register(self, name: str, key: bytes) -> bool:
        """Registers a client's key under its name; returns whether it was before.

        Args:
            name: the name of the client.
            key: public, in PEM form.

        Raises:
            FlowerFailed: the server refused it, or cannot be reached.
        """
        from flwr.proto.control_pb2 import RegisterNodeRequest

        request = RegisterNodeRequest(public_key=key, name=name)
        try:
            self._ask("RegisterNode", request, f"{name} cannot be registered")
        except FlowerFailed as error:
            if error.code != KNOWN_KEY:
                raise
            return True
        return False

    def name_of(self, key: bytes) -> str:
        """Returns the name that a key is registered under; "" where there is none.

        Args:
            key: public, in PEM form.

        Raises:
            FlowerFailed: the server does not answer.
        """
        from flwr.proto.control_pb2 import ListNodesRequest

        known = self._ask("ListNodes", ListNodesRequest(), "the clients")
        for node in known.nodes_info:
            if node.public_key == key:
                return str(node.name)
        return ""

    def start(self, project: str, **simulation: float) -> int:
        """Submits an app; returns Flower's id of its run.

        Args:
            project: the app's `pyproject.toml`, which is all of it.
            **simulation: fields of Flower's `SimulationConfig`.

        Raises:
            FlowerFailed: the server refused it, or cannot be reached.
        """
        from flwr.cli.build import build_fab_from_files
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.fab_pb2 import Fab
        from flwr.proto.federation_config_pb2 import SimulationConfig

        # Flower's use of pathspec is its own affair.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            content, _ = build_fab_from_files({"pyproject.toml": project.encode()})
        federation = None
        if simulation:
            federation = SimulationConfig(**simulation)  # type: ignore
        request = StartRunRequest(
            fab=Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content),
            override_federation_config=federation,
        )
        answer = self._ask("StartRun", request, "the run cannot be started")
        if not answer.HasField("run_id"):
            raise FlowerFailed("the run cannot be started: the server gave it no id")
        return int(answer.run_id)

    def status(self, run_id: int) -> tuple[str, str]:
        """Returns a run's status, such as finished:completed, and details of it.

        Raises:
            FlowerFailed: the server does not answer, or does not know the run.
        """
        from flwr.proto.control_pb2 import ListRunsRequest

        request = ListRunsRequest(run_id=run_id)
        runs = self._ask("ListRuns", request, f"run {run_id}").run_dict
        if run_id not in runs:
            raise FlowerFailed(
                f"run {run_id}: the server does not know this run; look at its log"
            )
        status = runs[run_id].status
        words = (status.status, status.sub_status)
        return ":".join(word for word in words if word), status.details

    def log(self, run_id: int, after: float) -> Iterator[Any]:
        """Yields parts of a run's log, with `log_output` and `latest_timestamp`.

        Raises:
            FlowerFailed: the connection ended.
        """
        from flwr.proto.control_pb2 import StreamLogsRequest

        request = StreamLogsRequest(run_id=run_id, after_timestamp=after)
        with _refusals("log"):
            yield from self.client.StreamLogs(request)

    def _ask(self, method: str, request: Any, what: str) -> Any:
        """Asks, and waits once for a server that is starting: nobody listens yet."""
        while True:
            try:
                with _refusals(what):
                    answer = getattr(self.client, method)(request)
            except FlowerFailed as error:
                is_late = time.monotonic() >= self._deadline
                if is_late or NOBODY_LISTENS not in str(error):
                    raise
                if not self._is_waiting:
                    print(f"{error}; trying again for {self._patience:g} s", flush=True)
                self._is_waiting = True
                time.sleep(RETRY_SECONDS)
            else:
                self._deadline = 0.0  # it has started
                return answer


@contextlib.contextmanager
def control_of(
    server: str,
    authority: Path | None = None,
    patience: float = 0.0,
) -> Iterator[Control]:
    """Yields the control interface of a server.

    Args:
        server: HOST:PORT or [IPV6]:PORT.
        authority: its certificate file; None for plain text.
        patience: seconds to wait for a server that is starting.

    Raises:
        UserError: another Flower, no certificate, or a proxy that cannot be used.
    """
    variables = proxy_variables(server)
    with wrap_error(
        ImportError, "flwr: this version of Flower is not known", FLOWER_REMEDY
    ):
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    problem = f"ca = {authority}: it is no certificate in PEM form"
    with (
        wrap_error((OSError, ValueError), problem, "give the server's ca.crt"),
        environment_of(variables),  # is read here, and not again
    ):
        client = ControlHttpClient.from_server_address(
            server,
            authority is None,
            authority and authority.expanduser().read_bytes(),
            [RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )
    with contextlib.closing(client):
        yield Control(client, patience)


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turns an error of the connection, or of the server, into a line for people."""
    import httpx
    from flwr.supercore.error import FlowerError

    try:
        yield
    except httpx.HTTPStatusError as error:
        text = f"{error.response.status_code} {error.response.text}"
        code = None
        refusal = FlowerError.from_json(error.response.text)
        if refusal is not None:
            text = f"{refusal.message} {refusal.public_details or ''}".strip()
            code = refusal.code
        raise FlowerFailed(f"{what}: the server says: {text}", code) from error
    except httpx.HTTPError as error:
        raise FlowerFailed(f"{what}: {error}") from error
