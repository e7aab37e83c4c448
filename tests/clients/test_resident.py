"""The client in one process: what it replaces of Flower, when, and what that does.

The functions of Flower are called directly; one slow test runs real processes with TLS
and authentication.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace

import flwr
import httpx
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import node_auth_http_interceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate import NodeStateFactory

from clients import client_app, flower_1_41, resident
from clients.flower_1_41 import POLL_LEAST, POLL_MOST, Waiting
from fedgs.errors import UserError
from fedgs.parcels import METHODS

ROOT = Path(__file__).resolve().parents[2]
LOOP = flower_1_41._module("flwr.supernode.start_client_internal")
COMMAND = flower_1_41._module("flwr.supernode.cli.flower_supernode")
CONNECTION = flower_1_41._module("flwr.supernode.fleet_http_connection")
CHANGED = {
    LOOP: ("time", "_push_messages"),
    COMMAND: ("_start_supernode_http_api", "start_client_internal"),
    FleetHttpClient: ("ActivateNode", "SendNodeHeartbeat", *METHODS.values()),
    node_auth_http_interceptor: ("now",),
    node_auth_http_interceptor.NodeAuthHttpInterceptor: ("intercept",),
    flower_1_41._module("flwr.supercore.heartbeat"): ("HEARTBEAT_DEFAULT_INTERVAL",),
    CONNECTION: ("HEARTBEAT_DEFAULT_INTERVAL", "make_simple_http_retry_invoker"),
    flower_1_41._module("flwr.supercore.retry.http_retry"): ("MAX_RETRY_DELAY",),
}


@pytest.fixture
def installed(monkeypatch):
    """Installs the replacements, and puts Flower's own back afterwards."""
    for owner, names in CHANGED.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    objects = flower_1_41._module("flwr.supercore.inflatable.inflatable_utils")
    defaults = objects.pull_objects.__kwdefaults__
    before = dict(defaults)
    flower_1_41.make_resident(lambda **given: client_app.app(**given))
    yield
    defaults.update(before)


# ------------------------------------------------------------------ the version


def test_the_pinned_flower_is_the_known_version():
    assert flwr.__version__.startswith(flower_1_41.KNOWN_VERSION)


@pytest.mark.parametrize(
    ("version", "flags"), [("1.42.0", []), (flwr.__version__, ["--stock"])]
)
def test_an_unknown_version_or_a_wish_gets_flowers_own_path(
    monkeypatch, tmp_path, caplog, version, flags
):
    started: list[list[str]] = []

    def execv(command: str, arguments: list[str]) -> None:
        started.append(arguments)
        raise SystemExit

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(flwr, "__version__", version)
    monkeypatch.setattr(flwr.common.logger.FLOWER_LOGGER, "propagate", True)
    node = f'name="a" data="digits" state-dir="{tmp_path}/s"'
    given = ["--superlink", "host:1", *flags, "--node-config", node]
    with pytest.raises(SystemExit):
        resident.main(given)
    ((command, *rest),) = started
    assert Path(command).name == "flower-supernode"
    assert Path(command).exists()
    assert rest == [part for part in given if part != "--stock"]
    assert ("written for Flower 1.41.x, this is 1.42.0" in caplog.text) is not flags


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "--node-config is missing"),
        (["--node-config", 'name="a"'], "data is missing"),
        (["--node-config=name=a b"], "--node-config name=a b"),
        (["--node-config", 'name="a" data="digits" state-dir="s" rounds=3'], "rounds"),
    ],
)
def test_a_wrong_node_config_ends_with_exit_code_2(capsys, given, words):
    with pytest.raises(SystemExit) as ended:
        resident.main(given)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error


@pytest.mark.parametrize("is_refused", [False, True])
def test_systemd_is_told_once_the_state_directory_is_open(monkeypatch, is_refused):
    done: list[str] = []

    def open_() -> None:
        done.append("opened")
        if is_refused:
            raise UserError("no such file")

    site = SimpleNamespace(open=open_, settings={"data": "digits"})
    monkeypatch.setattr(resident, "_site", lambda given: site)
    monkeypatch.setattr(
        resident.sources, "read_records", lambda config: done.append(config.data)
    )
    monkeypatch.setattr(resident, "notify", done.append)
    monkeypatch.setattr(resident, "make_resident", lambda app: None)
    monkeypatch.setattr(COMMAND, "flower_supernode", lambda: done.append("runs"))
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit) if is_refused else nullcontext():
        resident.main([])
    begun = ["digits", "opened"]
    assert done == (begun if is_refused else [*begun, "READY=1", "runs"])


@pytest.mark.parametrize("flags", [[], ["--stock"]])
@pytest.mark.parametrize("text", [None, "garbage"])
def test_systemd_is_not_told_of_a_client_without_data(
    monkeypatch, tmp_path, capsys, text, flags
):
    path, told = tmp_path / "a.npz", []
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(resident, "notify", told.append)
    monkeypatch.setattr(resident, "make_resident", lambda app: None)
    monkeypatch.setattr(COMMAND, "flower_supernode", sys.exit)
    monkeypatch.setattr(os, "execv", lambda *command: sys.exit())
    node = f'name="a" data="npz:{path}" state-dir="{tmp_path}/state"'
    with pytest.raises(SystemExit) as ended:
        resident.main([*flags, "--node-config", node])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: data = 'npz:{path}'")
    assert told == []


def ended_at(moment: str, number: int, command: list[str]) -> int:
    """Sends a signal to a process once it says a word; returns its exit code."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            if moment in line:
                process.send_signal(number)
                break
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["typer", "clients.resident", "torch"])
def test_a_client_that_is_told_to_end_while_it_starts_ends_with_0(
    tmp_path, moment, number
):
    """While its command is imported, as it becomes another, while that is imported."""
    given = ["--server", "127.0.0.1:1", "--insecure", "--data", "digits"]
    given += ["--state-dir", f"{tmp_path}/state"]
    options = ["-X", "importtime"] if moment == "typer" else []
    command = [sys.executable, *options, "-m", "fedgs", "deploy", "client", "a", *given]
    if moment == "torch":
        node = f'name="a" data="digits" state-dir="{tmp_path}/state"'
        command = [sys.executable, "-X", "importtime", "-m", "clients.resident"]
        command += ["--superlink", "127.0.0.1:1", "--insecure", "--node-config", node]
    assert ended_at(moment, number, command) == 0


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nAA", None])
@pytest.mark.parametrize("what", ["ca", "key"])
def test_a_file_that_is_no_certificate_or_key_ends_with_exit_code_2(
    tmp_path, capsys, what, text
):
    option = {"ca": "--root-certificates", "key": "--auth-supernode-private-key"}[what]
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    node = f'name="a" data="digits" state-dir="{tmp_path}/state"'
    with pytest.raises(SystemExit) as ended:
        resident.main(["--node-config", node, f"{option}={path}"])
    assert ended.value.code == 2
    reason = "No such file" if text is None else "no PEM certificate"
    if what == "key":
        reason = "not a private key"
    assert f"error: {what} = {path}: {reason}" in capsys.readouterr().err


def test_a_second_client_on_a_state_directory_is_refused(tmp_path):
    node = f'name="a" data="digits" state-dir="{tmp_path}/state"'
    code = "import sys; from clients.site import Site; from pathlib import Path; "
    code += "Site('a', Path(sys.argv[1]), {}).open(); "
    code += "print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "state")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    impatient = "import sys; from clients import resident, site; "
    impatient += "site.LOCK_SECONDS = 0.2; resident.main(sys.argv[1:])"
    with subprocess.Popen(command, env=env, **pipes) as first:
        assert first.stdout.readline() == b"1\n"
        second = subprocess.run(
            [sys.executable, "-c", impatient, "--node-config", node],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        first.stdin.close()
    assert second.returncode == 2
    assert "another client process uses it" in second.stderr


# ------------------------------------------------------------------ the loop


def test_looks_for_messages_rarely_only_when_rarely_asked(monkeypatch):
    slept: list[float] = []
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=slept.append)
    monkeypatch.setattr(flower_1_41, "time", clock)
    waiting = Waiting()
    for clock.now in (0.0, 1.0, 10.0, 1000.0):
        waiting.sleep(3)
    assert slept == [POLL_LEAST, POLL_LEAST, 0.2, POLL_MOST]
    for notice in ("last", "told"):  # asked just now, or the server says when
        waiting.last = waiting.told = 0.0
        setattr(waiting, notice, clock.now)
        waiting.sleep(0.5)
        assert slept[-1] == POLL_LEAST


@pytest.mark.usefixtures("installed")
def test_no_port_is_opened():
    server, thread = COMMAND._start_supernode_http_api(None, None)
    server.should_exit = True
    thread.join(timeout=3)
    assert not thread.is_alive()


class Flow:
    """The SuperNode's state with one message, and what is sent to the server."""

    def __init__(self, kind: str = "query") -> None:
        objects = ObjectStoreFactory()
        self.state = NodeStateFactory(objectstore_factory=objects).state()
        self.store = objects.store()
        self.sent: list[tuple[Message, float]] = []
        run = SimpleNamespace(run_id=7, series_id=5)
        self.state.store_run(run)
        context = Context(7, 3, {"partition-id": 4}, RecordDict(), {}, series_id=5)
        self.state.set_run_series_context(5, context)
        content = RecordDict({"fedgs": ConfigRecord({"any": b"x" * 100_000})})
        message = Message(content, 3, kind)
        message.metadata.__dict__.update(_run_id=7, _src_node_id=1)
        LOOP._insert_message(message, self.state, self.store)

    def push(self) -> None:
        def send(message, tree, seconds):
            self.sent.append((message, seconds))
            return set(), "session"

        LOOP._push_messages(
            state=self.state,
            object_store=self.store,
            send=send,
            push_object=lambda *parts: None,
        )


@pytest.mark.usefixtures("installed", "server_process")
def test_a_message_is_answered_in_the_process_and_nothing_is_left_over():
    flow = Flow()
    flow.push()
    ((reply, seconds),) = flow.sent
    assert dict(reply.content["fedgs"]) == {"node_id": 4}
    assert seconds < 0.01  # not how long the answer took: that depends on data
    assert len(flow.store) == 0
    assert flow.state.msg_store == {}
    assert flow.state.task_store == {}


@pytest.mark.usefixtures("installed", "server_process")
def test_the_time_that_an_answer_takes_is_not_sent(monkeypatch):
    def slow(message, context):
        threading.Event().wait(0.2)
        return client_app.roll_call(message, context)

    monkeypatch.setattr(client_app, "app", slow)
    flow = Flow()
    flow.push()
    assert flow.sent[0][1] < 0.1


@pytest.mark.usefixtures("installed", "server_process")
@pytest.mark.parametrize("spoilt", ["unknown kind", "raises"])
def test_a_message_without_an_answer_gets_an_error_without_words(monkeypatch, spoilt):
    if spoilt == "raises":

        def fail(message, context):
            raise LookupError("label 7 of writer 4711")

        monkeypatch.setattr(client_app, "app", fail)
    flow = Flow(kind="query" if spoilt == "raises" else "evaluate.other")
    flow.push()
    assert flow.sent[0][0].error.reason == "refused"
    assert len(flow.store) == 0


# ------------------------------------------------------------------ the server


def http_error(code: int, status: int = 409) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://server/")
    text = f'{{"code": {code}, "detail": "no"}}'
    response = httpx.Response(status, text=text, request=request)
    return httpx.HTTPStatusError("no", request=request, response=response)


@pytest.fixture(name="clock")
def fixture_clock(monkeypatch):
    """Waiting costs no time."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(flower_1_41, "time", clock)
    return clock


REFUSALS = {
    "not registered": http_error(flower_1_41.NOT_ACTIVATED),
    "signature": http_error(0, 401),
    "full disk": http_error(0, 500),
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("times", [0, 3, 9])
def test_waits_for_registration_or_the_end_of_a_predecessor(clock, times, refusal):
    tries: list[int] = []

    def activate(client, request):
        tries.append(1)
        if len(tries) <= times:
            raise REFUSALS[refusal]
        return "activated"

    assert flower_1_41._patient(activate)(None, None) == "activated"
    assert clock.now == {0: 0, 3: 1 + 2 + 3, 9: 3 + 7 * 3}[times]


def test_another_refusal_of_the_server_is_not_waited_out():
    def activate(client, request):
        raise http_error(flower_1_41.NOT_ACTIVATED - 1)

    with pytest.raises(httpx.HTTPStatusError):
        flower_1_41._patient(activate)(None, None)


@pytest.mark.usefixtures("installed")
def test_a_connection_that_has_ended_is_made_anew_until_sigterm(monkeypatch, clock):
    """Flower's returns from a connection that it gave up, and the process ended."""
    states: list[object] = []

    def connect(*, state_factory, server_address):
        states.append(state_factory.state())
        assert server_address == "host:1"
        if len(states) == 3:
            raise SystemExit(0)  # as SIGTERM does

    start = flower_1_41._lasting(connect)
    with pytest.raises(SystemExit):
        start(state_factory=None, server_address="host:1")
    assert len(set(map(id, states))) == 3  # what was half received is gone
    assert clock.now == 2 * flower_1_41.AGAIN_SECONDS


HANDSHAKE = "_ssl.c:989: The handshake operation timed out"
FINAL = {
    "certificate": httpx.ConnectError(
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: Hostname mismatch"
    ),
    "no TLS": httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number"),
    "refused": http_error(0, 401),
    "broken": http_error(0, 500),
}
PASSING = {
    "stands still": httpx.ConnectTimeout(HANDSHAKE),
    "killed": httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred"),
    "gone": httpx.ConnectError("[Errno 111] Connection refused"),
    "slow": httpx.ReadTimeout("timed out"),
    "overloaded": http_error(0, 503),
    "expired": httpx.ConnectError(
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has "
        "expired (_ssl.c:1006)"
    ),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("what", FINAL | PASSING)
def test_a_request_is_repeated_until_the_server_answers(monkeypatch, what):
    """What is final ends the connection, never the process: no signal is sent."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda *signal: killed.append(1))
    invoker = CONNECTION.make_simple_http_retry_invoker()
    invoker.wait_function = lambda seconds: None
    calls: list[int] = []

    def request() -> str:
        calls.append(1)
        if len(calls) < 40:
            raise (FINAL | PASSING)[what]
        return "answer"

    if what in FINAL:
        with pytest.raises(httpx.HTTPError):
            invoker.invoke(request)
    else:
        assert invoker.invoke(request) == "answer"
    assert len(calls) == (1 if what in FINAL else 40)
    assert not killed


@pytest.mark.parametrize("answer", ["unknown node", 401, 500])
def test_a_refused_heartbeat_is_tried_again(answer):
    """Flower's own would end the thread, or the process."""

    def beat(client, request):
        if isinstance(answer, int):
            raise http_error(0, answer)
        return SimpleNamespace(success=False)

    with pytest.raises(httpx.TransportError):  # what Flower tries again
        flower_1_41._beating(beat)(None, None)
    good = SimpleNamespace(success=True)
    assert flower_1_41._beating(lambda client, request: good)(None, None) is good


class StrictServer:
    """A server as Flower's: it refuses what is 5 s ahead or 305 s behind its clock.

    Args:
        real: what this machine's clock says.
        ahead: seconds that this machine's clock is ahead of the server's.
        stale: how many answers still have the date of another time, as those do that a
            server gives right after it stood still or its clock stepped.
        shown: that other time, in seconds after `real`.
    """

    def __init__(
        self, real: datetime, ahead: float, stale: int = 0, shown: float = 0
    ) -> None:
        self.now, self.stale = real - timedelta(seconds=ahead), stale
        self.shown = real + timedelta(seconds=shown)
        self.ages: list[float] = []

    def __call__(self, context) -> httpx.Response:
        signed = datetime.fromisoformat(context.request.headers["flwr-timestamp"])
        self.ages.append((self.now - signed).total_seconds())
        status = 200 if -5 < self.ages[-1] < 305 else 401
        date = self.shown if len(self.ages) <= self.stale else self.now
        return httpx.Response(status, headers={"date": format_datetime(date, True)})


REAL = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture(name="sign")
def fixture_sign(monkeypatch, clock):
    """Flower's signing with this machine's clock at `REAL`, and its correction."""
    from cryptography.hazmat.primitives.asymmetric import ec

    interceptor = node_auth_http_interceptor.NodeAuthHttpInterceptor
    monkeypatch.setattr("flwr.supercore.date.now", lambda: REAL)
    monkeypatch.setattr(node_auth_http_interceptor, "now", lambda: REAL)
    monkeypatch.setattr(interceptor, "intercept", interceptor.intercept)
    flower_1_41._correct_clock()
    key = ec.generate_private_key(ec.SECP384R1())
    auth = interceptor(key, key.public_key())

    def sign(call) -> int:
        request = httpx.Request("POST", "http://server/")
        return auth.intercept(SimpleNamespace(request=request), call).status_code

    return sign


@pytest.mark.parametrize("ahead", [-3600, -301, 0, 30, 86400])
def test_a_wrong_clock_is_corrected_by_the_servers(sign, ahead):
    server = StrictServer(REAL, ahead)
    assert [sign(server), sign(server)] == [200, 200]
    is_wrong = not -5 < -ahead < 305
    assert len(server.ages) == (3 if is_wrong else 2)
    assert abs(server.ages[-1]) < 2 or not is_wrong


@pytest.mark.parametrize("ahead", [-600, 600])
@pytest.mark.parametrize("shown", [0, -2000])
@pytest.mark.parametrize("stale", [1, 2, 4])
def test_a_date_of_before_the_servers_clock_stepped_is_not_believed_for_long(
    sign, clock, ahead, shown, stale
):
    server = StrictServer(REAL, ahead, stale, shown)
    assert sign(server) == 200
    assert abs(server.ages[-1]) < 2
    assert clock.now <= flower_1_41.CLOCK_TRIES * flower_1_41.CLOCK_SECONDS


def test_a_refusal_for_another_reason_stays_a_refusal(sign, clock):
    calls: list[int] = []

    def call(context) -> httpx.Response:
        calls.append(1)
        return httpx.Response(401, headers={"date": format_datetime(REAL, True)})

    assert sign(call) == 401
    assert len(calls) == 1 + flower_1_41.CLOCK_TRIES
    assert clock.now == flower_1_41.CLOCK_TRIES * flower_1_41.CLOCK_SECONDS
