"""Bytes that really cross the loopback in a round of Algorithm 2, beside their payload.

    python -m experiments.bench.wire [--rounds 12]

A server and one client of `fedgs deploy`, without TLS, and between them a proxy that
counts the bytes of both directions: messages, Flower's objects, gRPC and HTTP/2 frames,
polls and heartbeats. Table 2 counts the messages only; this says what is left out.
"""

import contextlib
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

from click import Choice
from typer import Option

from experiments.bench.deployment import Place, running
from experiments.flags import run_command
from experiments.paper.communication import MODES
from experiments.tables import Table

CHUNK = 65_536
FIRST_ROUND = 3  # counted from its end: before it come joining and the warm start
WATCH_SECONDS = 0.02
SETTINGS: dict[str, object] = {
    "recipe": "algorithm-2",
    "partition": "auto",
    "warm_start_rounds": 1,
    "generator": "upsample",
    "generator_dim": 4,
    "discriminator_dim": 4,
    "num_classes": 10,
    "sample_every": 1000,
}


class CountingProxy:
    """Forwards connections to a port of the loopback and counts the bytes.

    Attributes:
        address: where to connect instead.
        up: bytes from those who connect.
        down: bytes to them.
    """

    def __init__(self, target: str) -> None:
        """Listens; `target` is HOST:PORT."""
        self.target = target.rpartition(":")
        self.up = self.down = 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(client,)).start()

    def _serve(self, client: socket.socket) -> None:
        host, _, port = self.target
        with client, socket.create_connection((host, int(port))) as server:
            back = threading.Thread(target=self._pump, args=(server, client, "down"))
            back.start()
            self._pump(client, server, "up")
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(CHUNK):
                with self.lock:
                    setattr(self, name, getattr(self, name) + len(content))
                sink.sendall(content)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def bytes_per_round(settings: dict[str, object], rounds: int) -> tuple[float, float]:
    """Returns mean bytes down and up of a round, of a run of so many rounds.

    Raises:
        RuntimeError: a process ended early.
    """
    with tempfile.TemporaryDirectory(prefix="fedgs-wire-") as name:
        place = Place(Path(name), ["client-0"], is_secure=False)
        proxy = CountingProxy(place.address)
        place.address_for_clients = proxy.address
        seen: dict[int, tuple[int, int]] = {}
        with contextlib.closing(proxy), running(place):
            watched = Path(name) / "server" / "runs" / "bench" / "metrics.jsonl"
            done = threading.Event()
            arguments = (watched, proxy, seen, done)
            watch = threading.Thread(target=_watch, args=arguments, daemon=True)
            watch.start()
            place.submit({**SETTINGS, **settings, "num_rounds": rounds})
            done.set()
            watch.join()
            first, last = min(n for n in seen if n >= FIRST_ROUND), max(seen)
            pairs = zip(seen[first], seen[last], strict=True)
            down, up = ((after - before) / (last - first) for before, after in pairs)
            print(f"{down:,.0f} down, {up:,.0f} up", file=sys.stderr, flush=True)
    return down, up


def _watch(
    metrics: Path,
    proxy: CountingProxy,
    seen: dict[int, tuple[int, int]],
    done: threading.Event,
) -> None:
    """Notes the bytes at the end of every round."""
    while not done.is_set():
        with contextlib.suppress(FileNotFoundError):
            count = metrics.read_bytes().count(b"\n")
            if count and count not in seen:
                seen[count] = (proxy.down, proxy.up)
        time.sleep(WATCH_SECONDS)


def main(
    rounds: int = 12,
    modes: Annotated[list[str] | None, Option(click_type=Choice([*MODES]))] = None,
) -> None:
    """Print the table."""
    rows: list[list[str]] = []
    for mode in modes or MODES:
        down, up = bytes_per_round(MODES[mode], rounds)
        rows.append([mode, *(f"{size:,.0f}" for size in (down, up, down + up))])
    caption = "one client, bytes of a round on the loopback, no TLS"
    Table(caption, ["messages", "down", "up", "both"], rows).show()


if __name__ == "__main__":
    sys.exit(run_command(main))
