"""What processes ask of the network: a proxy that keeps what it gets, and a log."""

import contextlib
import socket
import threading
from pathlib import Path

# What `connected` finds where all of it is on one machine.
LOOPBACK = {"127.0.0.1", "::1", "localhost", "None", "unix"}
# Every Python process of whose PYTHONPATH this is part says whom it connects to.
SITE = """
import os, socket
stock = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}
def made(name):
    def connect(self, address):
        with open(os.environ["CONNECTED_TO"], "a") as log:
            log.write(f"{address[0] if isinstance(address, tuple) else 'unix'}\\n")
        return stock[name](self, address)
    return connect
for name in stock:
    setattr(socket.socket, name, made(name))
found = socket.getaddrinfo
def getaddrinfo(host, *more, **named):
    with open(os.environ["CONNECTED_TO"], "a") as log:
        log.write(f"{host.decode() if isinstance(host, bytes) else host}\\n")
    return found(host, *more, **named)
socket.getaddrinfo = getaddrinfo
"""


class Proxy:
    """A proxy on the loopback that keeps the first bytes of every connection.

    Attributes:
        url: of it, with a password.
        heard: the bytes.
        target: port of this machine to which every tunnel leads; None refuses all.
    """

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        port = self.server.getsockname()[1]
        self.url = f"http://user:secret@127.0.0.1:{port}"
        self.shown = f"http://127.0.0.1:{port}"
        self.heard: list[bytes] = []
        self.target: int | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """All variables that name a proxy, as a company's machine has them."""
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "GRPC_PROXY")
        both = [*names, *map(str.lower, names)]
        return dict.fromkeys(both, self.url) | {"NO_PROXY": "", "no_proxy": ""}

    def close(self) -> None:
        self.server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self.server.accept()
                threading.Thread(
                    target=self._serve, args=(client,), daemon=True
                ).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            self.heard.append(client.recv(65536))
            if self.target is None:
                client.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", self.target)) as server:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=_pass, args=(server, client))
                back.start()
                _pass(client, server)
                back.join()


def _pass(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def connections(folder: Path) -> dict[str, str]:
    """The environment of processes that say in a file whom they connect to."""
    (folder / "sitecustomize.py").write_text(SITE)
    return {"CONNECTED_TO": str(folder / "connected.log")}


def connected(folder: Path) -> set[str]:
    """Whom they have connected to, or asked the name server for."""
    return set((folder / "connected.log").read_text().split())
