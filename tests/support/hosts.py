"""Machines of a deployment on this one: network namespaces, links, processes.

    server 10.77.0.1 --- bridge --- 10.77.0.2 a
                                   10.77.0.3 b

The bridge lies in the server's namespace, so that nothing of it touches this machine's
own network and deleting the namespaces removes all of it.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FEDGS = (sys.executable, "-m", "fedgs")
PATIENCE = 900.0  # seconds for one step, on a loaded machine


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def require_namespaces() -> None:
    """Skips the test where network namespaces are not permitted."""
    name = f"fgs-{secrets.token_hex(3)}"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "switch", "type", "bridge")
        finally:
            ip("netns", "del", name)
    except FileNotFoundError:
        pytest.skip("needs iproute2: there is no command `ip`")
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or "no reason given"
        pytest.skip(f"network namespaces are not permitted here: {reason}")


class Network:
    """A server, three clients and the links between; `close` removes all of it."""

    def __init__(self) -> None:
        token = secrets.token_hex(3)
        names = ("server", "a", "b", "c")
        self.spaces = {name: f"fgs-{token}-{name}" for name in names}
        self.addresses = {n: f"10.77.0.{i}" for i, n in enumerate(names, 1)}
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        for space in self.spaces.values():
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        center, on_switch = self.spaces["server"], ("dev", "switch")
        ip("-n", center, "link", "add", "switch", "type", "bridge")
        ip("-n", center, "addr", "add", f"{self.addresses['server']}/24", *on_switch)
        ip("-n", center, "link", "set", "switch", "up")
        for name in ("a", "b", "c"):
            far = self.spaces[name]
            link = ["link", "add", f"to-{name}", "type", "veth"]
            ip("-n", center, *link, "peer", "name", "eth0", "netns", far)
            ip("-n", center, "link", "set", f"to-{name}", "master", "switch", "up")
            ip("-n", far, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            ip("-n", far, "link", "set", "eth0", "up")

    def cut(self, *names: str) -> None:
        for name in names:
            ip("-n", self.spaces["server"], "link", "set", f"to-{name}", "down")

    def heal(self, *names: str) -> None:
        for name in names:
            ip("-n", self.spaces["server"], "link", "set", f"to-{name}", "up")

    def on(self, name: str) -> list[str]:
        """The words before a command that make it run on a host."""
        return ["ip", "netns", "exec", self.spaces[name]]

    def close(self) -> None:
        for space in self.spaces.values():
            subprocess.run(
                ["ip", "netns", "del", space], check=False, capture_output=True
            )


class Machines:
    """Processes of `fedgs` on hosts; `close` ends all of them by pid.

    Attributes:
        folder: with a log per process.
        token: in every process's environment, so that children of killed ones are
            found too.
    """

    def __init__(self, folder: Path, network: Network | None = None) -> None:
        self.folder, self.network = folder, network
        self.token = secrets.token_hex(16)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, host: str, *arguments: object) -> "subprocess.Popen[bytes]":
        """Starts `fedgs ...` on a host; its output goes to HOST-N.log."""
        return self.launch(host, [*FEDGS, *map(str, arguments)])

    def launch(
        self, host: str, command: Sequence[str], more: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Starts any command on a host, with more variables in its environment."""
        command = list(command)
        if self.network is not None:
            command = [*self.network.on(host), *command]
        log = self.folder / f"{host}-{len(self.started)}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment() | dict(more or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.started.append(process)
        return process

    def run(self, host: str, *arguments: object) -> str:
        """Runs `fedgs ...` on a host to its end, which must be a good one."""
        process = self.start(host, *arguments)
        assert process.wait(PATIENCE) == 0, self.logs()
        return self.log_of(process)

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return os.environ | {
            "PYTHONPATH": path.rstrip(os.pathsep),
            "FEDGS_RUN_TOKEN": self.token,
            "HOME": str(self.folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """Ends a process as a power cut does."""
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def log_of(self, process: "subprocess.Popen[bytes]") -> str:
        (log,) = self.folder.glob(f"*-{self.started.index(process)}.log")
        return log.read_text(errors="replace")

    def logs(self) -> str:
        """The end of every log, for the message of a failed assertion."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            parts.append(
                f"==== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            )
        return "\n".join(parts)

    def until(self, condition: Callable[[], object], *alive: object) -> None:
        """Waits for a condition while the given processes live."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            for process in alive:
                assert process.poll() is None, self.logs()  # type: ignore[attr-defined]
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def close(self) -> None:
        from fedgs.process import end_processes

        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        end_processes(self.token)
