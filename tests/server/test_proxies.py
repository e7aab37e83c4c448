"""Proxies of the environment: never for this machine, knowingly for a server elsewhere.

A simulation in such an environment is in test_flower.py.
"""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from clients.client_command import ClientOptions
from command_line import flags
from fedgs.deployment import address_of, environment_of, proxy_variables
from live import SETTINGS, Live, prepare
from recorder import LOOPBACK, Proxy, connected, connections
from refusals import assert_refused
from runs import rounds_done
from server.launch.certs import make_certificates
from server.launch.control import FlowerFailed, control_of
from server.launch.server_command import ServerOptions

NOT_HERE = "gs.example.org"
NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "GRPC_PROXY")
DEAD = "127.0.0.1:9"
# What an HTTP client cannot be made with, used or not.
BROKEN = {
    "socks": {"ALL_PROXY": f"socks5://{DEAD}"},
    "lower socks": {"all_proxy": f"socks5h://{DEAD}"},
    "unknown": {"HTTP_PROXY": f"socks4://user:secret@{DEAD}"},
    "no port": {"https_proxy": "http://user:secret@proxy:port"},
    "exceptions": {"NO_PROXY": "::1/128,[::1]"},
}


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with contextlib.closing(Proxy()) as proxy:
        yield proxy


class Answering(BaseHTTPRequestHandler):
    """A server that knows no run of anybody."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_error(404, "is here")

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def answering(certs: Path | None = None) -> Iterator[int]:
    """A server on the loopback, with TLS if it has certificates; yields its port."""
    with ThreadingHTTPServer(("", 0), Answering) as server:
        if certs is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certs / "server.crt", certs / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def ask(server: str, authority: Path | None = None) -> None:
    """Asks a server of a run; it must be reached."""
    with (
        control_of(server, authority) as control,
        pytest.raises(FlowerFailed, match="the server says: 404"),
    ):
        control.status(1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.9.1"])
def test_no_proxy_is_asked_for_this_machine(proxy, monkeypatch, host, capsys):
    given = proxy.environment()
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with answering() as port:
        ask(f"{host}:{port}")
    assert proxy.heard == []
    assert {name: os.environ[name] for name in given} == given
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", BROKEN)
def test_a_proxy_that_cannot_be_used_does_not_matter_on_this_machine(name, monkeypatch):
    for variable, value in BROKEN[name].items():
        monkeypatch.setenv(variable, value)
    with answering() as port:
        ask(f"localhost:{port}")


@pytest.mark.parametrize("name", ["", *BROKEN])
def test_what_a_server_starts_reaches_this_machine_directly(proxy, name):
    """In its own processes; other hosts keep a proxy that can be used."""
    code = "import httpx, sys; print(httpx.get(sys.argv[1]).status_code)"
    more = BROKEN[name] if name else proxy.environment()
    with answering() as port, environment_of(more):
        server = ServerOptions(host="127.8.9.1", insecure=True, port=port)
        environment = os.environ | server.command()[1]
        where = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", code]
        direct = subprocess.check_output([*command, where], env=environment)
        assert direct == b"501\n"  # it answers to POST alone
        assert proxy.heard == []
        if not name:
            away = f"http://{NOT_HERE}"
            asked = subprocess.check_output([*command, away], env=environment)
            assert asked == b"502\n"
            assert proxy.heard[0].startswith(b"GET http://gs.example.org/")


# ------------------------------------------------------------------ a server elsewhere


@pytest.fixture
def certs(tmp_path) -> Path:
    make_certificates(tmp_path / "certs", [NOT_HERE], [])
    return tmp_path / "certs"


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
def test_a_server_elsewhere_is_reached_through_the_proxy_that_is_named(
    proxy, certs, monkeypatch, capsys, name
):
    monkeypatch.setenv(name, proxy.url)
    with answering(certs) as proxy.target:
        ask(f"{NOT_HERE}:8000", certs / "ca.crt")
    assert [data.split(b"\r\n")[0] for data in proxy.heard] == [
        b"CONNECT gs.example.org:8000 HTTP/1.1"
    ]
    (line,) = capsys.readouterr().out.splitlines()
    assert f"the proxy {proxy.shown} ({name.lower()})" in line
    assert f"put {NOT_HERE} into no_proxy" in line
    assert "secret" not in line


@pytest.mark.parametrize(
    "excepted", [NOT_HERE, "*", "a, example.org", f"{NOT_HERE}:8000", "b,*"]
)
def test_a_server_that_needs_no_proxy_is_reached_without_a_word(
    proxy, certs, monkeypatch, capsys, excepted
):
    monkeypatch.setenv("ALL_PROXY", proxy.url)
    monkeypatch.setenv("NO_PROXY", excepted)
    asked = list[str]()

    def look_up(host: str, *more: object, **named: object) -> None:
        asked.append(host)
        raise socket.gaierror("is not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with (
        control_of(f"{NOT_HERE}:8000", certs / "ca.crt") as control,
        pytest.raises(FlowerFailed, match="is not known"),
    ):
        control.status(1)
    assert asked == [NOT_HERE]
    assert proxy.heard == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["socks", "lower socks", "no port"])
def test_a_proxy_that_cannot_be_used_is_refused_for_a_server_elsewhere(
    name, certs, monkeypatch, tmp_path
):
    ((variable, value),) = BROKEN[name].items()
    monkeypatch.setenv(variable, value)
    server = f"{NOT_HERE}:8000"
    shown = value.replace("user:secret@", "")
    words = f"^{variable.lower()} = {shown}: .* put {NOT_HERE} into no_proxy.*"
    assert_refused(words, proxy_variables, server)
    own = {"ca": certs / "ca.crt", "key": certs / "server.key"}
    client = ClientOptions(name="a", server=server, data="digits", **own)
    assert_refused(words, client.command)
    monkeypatch.setenv("NO_PROXY", NOT_HERE)
    assert client.command()[1]["no_proxy"] == "*"


# ------------------------------------------------------------------ real processes


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_deployment_on_this_machine_asks_no_proxy(proxy, tmp_path, host):
    """In plain text, with everything that a company's machine has in its way."""
    live = Live(prepare(tmp_path))
    live.machines.environment |= proxy.environment() | {"NO_PROXY": "[::1]"}
    live.machines.environment |= connections(tmp_path)
    live.machines.environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    live.host, server = host, address_of(host, live.port)
    with contextlib.closing(live.machines):
        serving = live.serve("--insecure")
        for name in live.names:
            live.join(name, server=server, insecure=True, ca=None, key=None)
        own = SETTINGS | {"num_rounds": 2}
        clients = [f"--client={name}" for name in live.names]
        words = ["deploy", "submit", "--server", server, "--insecure", *clients]
        submitted = live.machines.start("server", *words, *flags(**own))
        assert submitted.wait(600) == 0, live.machines.logs()
        assert serving.poll() is None
    assert rounds_done(live.run) == 2
    assert proxy.heard == []
    assert connected(tmp_path) <= LOOPBACK


@pytest.mark.slow
def test_clients_take_part_in_a_run_through_a_proxy(proxy, tmp_path):
    """With TLS from end to end, to a name that only the proxy knows."""
    live = Live(prepare(tmp_path))
    make_certificates(tmp_path / "certs", [NOT_HERE], live.names)
    proxy.target = live.port
    live.machines.environment["HTTPS_PROXY"] = proxy.url
    with contextlib.closing(live.machines):
        live.serve()
        clients = [live.join(n, server=f"{NOT_HERE}:8000") for n in live.names]
        submitted = live.start_run(num_rounds=2)  # on the server's machine
        assert submitted.wait(600) == 0, live.machines.logs()
        assert all(f"the proxy {proxy.shown}" in live.log(each) for each in clients)
        assert "proxy" not in live.log(submitted)
    begin = f"CONNECT {NOT_HERE}:8000".encode()
    assert proxy.heard
    assert all(heard.startswith(begin) for heard in proxy.heard)
