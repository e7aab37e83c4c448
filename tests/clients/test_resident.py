"""The client in one process: what it replaces of Flower, when, and what that does.

The functions of Flower are called directly; real processes with TLS and authentication
are in tests/server.
"""

import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate import NodeStateFactory
from PIL import Image

from clients import client_app, flower_speed, resident
from clients.flower_speed import IDLE_LEAST, Waiting
from tiny import write_tiny_npz

ROOT = Path(__file__).resolve().parents[2]
LOOP, COMMAND, CONNECTION, RETRY = (
    import_module(getattr(flower_speed, name))
    for name in ("LOOP", "COMMAND", "CONNECTION", "RETRY")
)
CHANGED = {
    LOOP: ("time", "_push_messages"),
    COMMAND: ("_start_supernode_http_api", "start_client_internal"),
    CONNECTION: ("flwr_exit", "os"),
    RETRY: ("os",),
    pull_objects: ("__kwdefaults__",),
    threading: ("excepthook",),
}


@pytest.fixture
def installed(monkeypatch):
    """Installs the replacements; Flower's own come back afterwards."""
    for owner, names in CHANGED.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    pull_objects.__kwdefaults__ = dict(pull_objects.__kwdefaults__)
    flower_speed.make_resident(lambda **given: client_app.app(**given))


# ------------------------------------------------------------------ the command


def node(data: str = "data", state: str = "state", more: str = "") -> list[str]:
    return [f'--node-config=name="a" data="npz:{data}.npz" state-dir="{state}"{more}']


CA, KEY = "--root-certificates=", "--auth-supernode-private-key="


@pytest.fixture(name="told")
def fixture_told(monkeypatch, tmp_path) -> list[str]:
    """What is said to systemd, and that Flower runs; a folder with broken files."""
    monkeypatch.chdir(tmp_path)
    write_tiny_npz(tmp_path / "data.npz")
    for name in ("garbage", "garbage.npz"):
        (tmp_path / name).write_text("-----BEGIN CERTIFICATE-----\nAA")
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "selected").mkdir(mode=0o700)
    for name in ("others.csv", "selected/cohorts.csv"):
        (tmp_path / name).write_text("owner,cohort\nzoe,v1\n")
    (tmp_path / "own.csv").write_text("owner,cohort\n0,v1\n")
    said: list[str] = []
    monkeypatch.setattr(resident, "notify", said.append)
    monkeypatch.setattr(resident, "make_resident", lambda app: None)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(COMMAND, "flower_supernode", lambda: said.append("runs"))
    return said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "--node-config is unset"),
        (["--node-config=name=a b"], "--node-config name=a b"),
        (node(more=" rounds=3"), "rounds"),
        (node(state="open"), "chmod 700"),
        (node("none"), "data = 'npz:"),
        (node("garbage"), "data = 'npz:"),
        (node(more=' cohorts="none.csv"'), "cohorts = "),
        (node(more=' cohorts="garbage"'), "first line is '-----BEGIN"),
        (node(more=' cohorts="others.csv"'), "has no client 'zoe'"),
        (node(more=' cohorts="own.csv" partition="iid"'), "cohorts = '"),
        (node(more=' classes="a,b"'), "classes = 'a,b': only "),
        ([*node(), CA + "none"], "ca = none:"),
        ([*node(), CA + "garbage"], "ca = garbage:"),
        ([*node(), KEY + "none"], "key = none:"),
        ([*node(), KEY + "garbage"], "key = garbage:"),
        (node(), "flwr: "),
    ],
)
def test_what_is_wrong_ends_with_exit_code_2_before_systemd_is_told(
    monkeypatch, capsys, told, given, words
):
    if given == node():
        monkeypatch.delattr(LOOP, "_push_messages")
    with pytest.raises(SystemExit) as ended:
        resident.main(given)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert told == []


@pytest.mark.parametrize("more", ["", ' partition="iid"'])
def test_systemd_is_told_once_the_client_can_run(told, capsys, more):
    """Whatever cohorts a selection has left, which the next run may not ask for."""
    resident.main(node(state="selected", more=more))
    assert told == ["READY=1", "runs"]
    # Reading may take minutes, so whoever started the client sees what it does.
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("reading ")
    assert "waits for the server" in second


def test_pictures_of_any_size_are_data_as_the_run_says_its_own(told):
    for owner, side in (("ann", 40), ("bob", 28)):
        Path("pictures", owner).mkdir(parents=True)
        Image.new("L", (side, side)).save(Path("pictures", owner, "1.png"))
    site = 'name="a" data="folder:pictures" state-dir="state"'
    resident.main([f"--node-config={site}"])
    assert told == ["READY=1", "runs"]


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("typer", signal.SIGTERM),
        ("clients.client_command", signal.SIGINT),
        ("torch", signal.SIGTERM),
    ],
)
def test_a_client_that_is_told_to_end_while_it_starts_ends_with_0(
    tmp_path, moment, number
):
    """While its command is imported, as it becomes another, while that is imported."""
    command = [sys.executable, "-X", "importtime", "-m"]
    if moment == "torch":
        command += ["clients.resident", "--superlink", "127.0.0.1:1", "--insecure"]
        command += [f'--node-config=name="a" data="digits" state-dir="{tmp_path}/s"']
    else:
        command += ["fedgs", "deploy", "client", "a", "--server", "127.0.0.1:1"]
        command += ["--insecure", "--data", "digits", "--state-dir", f"{tmp_path}/s"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        next(line for line in process.stdout if moment in line)
        process.send_signal(number)
        process.communicate()
    assert process.returncode == 0


# ------------------------------------------------------------------ the loop


def test_looks_for_messages_rarely_only_when_rarely_asked(monkeypatch):
    slept: list[float] = []
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=slept.append)
    monkeypatch.setattr(flower_speed, "time", clock)
    waiting = Waiting()
    for clock.now in (0.0, 1.0, 10.0, 1000.0):
        waiting.sleep(3)
    assert slept == [IDLE_LEAST, IDLE_LEAST, 1.0, 3]
    waiting.last = clock.now  # asked just now
    waiting.sleep(3)
    assert slept[-1] == IDLE_LEAST


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
def test_a_message_is_answered_in_the_process_and_nothing_is_left_over(monkeypatch):
    def slow(message, context):
        threading.Event().wait(0.1)
        return client_app.roll_call(message, context)

    monkeypatch.setattr(client_app, "app", slow)
    flow = Flow()
    flow.push()
    ((reply, seconds),) = flow.sent
    assert dict(reply.content["fedgs"]) == {"node_id": 4}
    assert seconds < 0.05  # not how long the answer took: that depends on data
    assert len(flow.store) == 0
    assert flow.state.msg_store == {}
    assert flow.state.task_store == {}
    server, thread = COMMAND._start_supernode_http_api(None, None)
    server.should_exit = True  # no port was opened
    assert not thread.is_alive()


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


@pytest.fixture(name="clock")
def fixture_clock(monkeypatch):
    """Waiting costs no time."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(flower_speed, "time", clock)
    return clock


def http_error(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://server/")
    response = httpx.Response(status, text="{}", request=request)
    return httpx.HTTPStatusError("no", request=request, response=response)


def given_up() -> None:
    """As Flower's returns from a connection that it gave up."""


def not_registered() -> None:
    """As its key is not known, or its predecessor counts as online."""
    CONNECTION.flwr_exit(601, "Failed to initialize the connection to the SuperLink.")


def signature_refused() -> None:
    """As its server was restarted, and knows its key no more."""

    def reject() -> None:
        raise http_error(401)

    RETRY.make_simple_http_retry_invoker().invoke(reject)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("end", [given_up, not_registered, signature_refused])
def test_a_connection_that_has_ended_is_made_anew_until_sigterm(clock, end):
    """In all these cases Flower's own process ends."""
    states: list[object] = []

    def connect(*, state_factory, server_address):
        states.append(state_factory.state())
        assert server_address == "host:1"
        if len(states) == 3:
            raise SystemExit(0)  # as SIGTERM does
        end()

    start = flower_speed.lasting(connect)
    with pytest.raises(SystemExit):
        start(state_factory=None, server_address="host:1")
    assert len(set(map(id, states))) == 3  # what was half received is gone
    assert clock.now == 3 * flower_speed.RECONNECT_SECONDS  # once, and then twice that


def test_a_client_that_waits_for_days_tells_of_it_seldom(clock, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(flower_speed, "log", lambda level, *text: told.append(text[1]))
    attempts = iter(range(1, 402))

    def connect(**config: object) -> None:
        attempt = next(attempts)
        if attempt == 401:
            raise SystemExit(0)
        if attempt != 201:
            raise ConnectionError("not registered")
        clock.sleep(100.0)  # its key was registered, and then the server was stopped

    with pytest.raises(SystemExit):
        flower_speed.lasting(connect)()
    # 200 attempts take half an hour, and each ten minutes it tells that it still waits.
    waited = ["not registered"] * 3
    assert told == [*waited, "the connection to the server has ended", *waited]


@pytest.mark.parametrize("end", [ConnectionError("refused"), LookupError("a bug")])
@pytest.mark.usefixtures("installed")
def test_a_refused_heartbeat_prints_no_traceback(monkeypatch, end):
    """The loop's own request tells why; what else goes wrong is still told."""
    told: list[object] = []

    def stock(failure: threading.ExceptHookArgs) -> None:
        told.append(failure.exc_value)

    monkeypatch.setattr(threading, "excepthook", stock)
    flower_speed.make_resident(lambda **given: client_app.app(**given))

    def beat() -> None:
        raise end

    thread = threading.Thread(target=beat)
    thread.start()
    thread.join()
    assert told == ([] if isinstance(end, ConnectionError) else [end])


def test_what_flower_says_in_two_lines_is_told_in_one():
    leave = flower_speed.refused_unless_final(lambda *_: None)
    with pytest.raises(ConnectionError) as refusal:
        leave(601, "Failed to connect.\n[code: 2004] Failed to activate SuperNode.")
    assert "\n" not in str(refusal.value)
    assert "SuperNode: is the key of this client registered?" in str(refusal.value)


def test_a_server_of_another_authority_ends_the_process():
    def stock(code, message):
        raise SystemExit(code)

    leave = flower_speed.refused_unless_final(stock)
    with pytest.raises(SystemExit):
        leave(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
