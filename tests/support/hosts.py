"""Machines of a deployment on this one: network namespaces, links, processes.

    server 10.77.0.1 --- bridge --- 10.77.0.2 a
                                   10.77.0.3 b

The bridge lies in the server's namespace, so that nothing of it touches this machine's
own network and deleting the namespaces removes all of it.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedgs.process import TOKEN_VARIABLE, end_processes

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900.0  # seconds for one step, on a loaded machine
Process = subprocess.Popen[bytes]


def ip(command: str, check: bool = True) -> None:
    subprocess.run(["ip", *command.split()], check=check, capture_output=True)


class Network:
    """A server, three clients and the links between; `close` removes all of it.

    A test is skipped where network namespaces are not permitted.
    """

    def __init__(self) -> None:
        if shutil.which("ip") is None:
            pytest.skip("needs iproute2: there is no command `ip`")
        token = secrets.token_hex(3)
        names = ("server", "a", "b", "c")
        self.spaces = {name: f"fgs-{token}-{name}" for name in names}
        self.addresses = {n: f"10.77.0.{i}" for i, n in enumerate(names, 1)}
        self.center = f"-n {self.spaces['server']}"
        try:
            self._build()
        except BaseException as error:
            self.close()
            if not isinstance(error, subprocess.CalledProcessError):
                raise
            pytest.skip(f"network namespaces are not permitted here: {error.stderr}")

    def _build(self) -> None:
        for space in self.spaces.values():
            ip(f"netns add {space}")
            ip(f"-n {space} link set lo up")
        ip(f"{self.center} link add switch type bridge")
        ip(f"{self.center} addr add {self.addresses['server']}/24 dev switch")
        ip(f"{self.center} link set switch up")
        for name in ("a", "b", "c"):
            far, near = self.spaces[name], f"to-{name}"
            ip(f"{self.center} link add {near} type veth peer name eth0 netns {far}")
            ip(f"{self.center} link set {near} master switch up")
            ip(f"-n {far} addr add {self.addresses[name]}/24 dev eth0")
            ip(f"-n {far} link set eth0 up")

    def close(self) -> None:
        for space in self.spaces.values():
            ip(f"netns del {space}", check=False)


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
        self.started: list[Process] = []
        own = {"PYTHONPATH": str(ROOT), TOKEN_VARIABLE: self.token}
        self.environment = os.environ | own | {"HOME": str(folder)}

    def start(self, host: str, *arguments: object, more=None) -> Process:
        """Starts `fedgs ...` on a host; its output goes to HOST-N.log."""
        words = [sys.executable, "-m", "fedgs", *map(str, arguments)]
        return self.launch(host, words, more)

    def launch(self, host: str, command: Sequence[str], more=None) -> Process:
        """Starts any command on a host, with more variables in its environment."""
        if self.network is not None:
            command = ["ip", "netns", "exec", self.network.spaces[host], *command]
        with open(self.folder / f"{host}-{len(self.started)}.log", "wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment | (more or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.started.append(process)
        return process

    def run(self, host: str, *arguments: object) -> None:
        """Runs `fedgs ...` on a host to its end, which must be a good one."""
        assert self.start(host, *arguments).wait(PATIENCE) == 0, self.logs()

    def kill(self, process: Process) -> None:
        """Ends a process as a power cut does."""
        process.kill()
        process.wait()

    def log_of(self, process: Process) -> str:
        (log,) = self.folder.glob(f"*-{self.started.index(process)}.log")
        return log.read_text(errors="replace")

    def logs(self) -> str:
        """The end of every log, for the message of a failed assertion."""
        return "\n".join(f"== {p.args}\n{self.log_of(p)[-3000:]}" for p in self.started)

    def until(self, condition: Callable[[], object], *alive: Process) -> None:
        """Waits for a condition while the given processes live."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert all(process.poll() is None for process in alive), self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def close(self) -> None:
        end_processes(self.token, 10.0)
        for process in self.started:
            process.wait()
