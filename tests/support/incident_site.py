"""A deployment that incidents happen to: machines, disks, and one run each.

Three hosts in network namespaces (`hosts.Network`). Each has a disk of its own, a small
tmpfs, so that it can be full. Everything lies in one folder; `close` ends, unmounts and
removes all of it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from command_line import flags
from experiments.launch.certs import make_certificates
from fedgs.files import read_tensors
from fedgs.privacy.ledger import Ledger
from hosts import Machines, Network
from live import CLIENTS, PORT, SETTINGS, undisturbed, write_digits
from runs import rounds_done

FLWR = str(Path(sys.executable).with_name("flwr"))
HOSTS = ("server", *CLIENTS)
ROUNDS = 12
STRIKE = 4  # the round after which most incidents happen
DISK = "48m"
SHORT_ROUND = 15.0  # seconds: round_timeout of the runs that must exceed it
RUN_SETTINGS = SETTINGS | {"num_rounds": ROUNDS, "checkpoint_every": 2}
LIMITS = "allow_seeded_noise = true\n"

# A client's upload waits while the file HOLD is there; HOLD.reached says that it does.
UPLOAD_SOURCE = """
import os
import time

hold = os.environ.get("INCIDENT_HOLD")
if hold:
    import httpx

    send = httpx.Client.send

    def held_send(client, request, **more):
        if request.url.path.endswith("/push-object") and os.path.exists(hold):
            open(hold + ".reached", "w").close()
            while os.path.exists(hold):
                time.sleep(0.05)
        return send(client, request, **more)

    httpx.Client.send = held_send
"""


class Refused(AssertionError):
    """What should have been refused was not, or was with other words."""


class Site:
    """Server and two clients, with keys and certificates, and what can befall them.

    Attributes:
        folder: of everything.
        address: of the server.
        processes: the running `fedgs deploy` process of each host.
        runs: the runs so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = Network()
        self.address = self.network.addresses["server"]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.runs: list[Run] = []
        self.is_registered = False
        self.kills: Counter[str] = Counter()  # and stops, of each host
        self.machines = Machines(folder, self.network)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        folder = self.folder
        write_digits(folder)
        (folder / "limits.toml").write_text(LIMITS)
        make_certificates(folder / "certs", [self.address], CLIENTS)
        (folder / "tmp").mkdir()
        (folder / "shims").mkdir()
        (folder / "shims" / "sitecustomize.py").write_text(UPLOAD_SOURCE)
        for host in HOSTS:
            disk = self.disk(host)
            disk.mkdir()
            _mount("-t", "tmpfs", "-o", f"size={DISK},mode=0700", "incidents", disk)
            self.machines.environments[host] = {
                "TMPDIR": str(folder / "tmp"),
            }
        self.machines.environments["a"] |= {
            "INCIDENT_HOLD": str(folder / "hold"),
            "PYTHONPATH": f"{folder / 'shims'}{os.pathsep}{self.machines.python_path}",
        }

    # ------------------------------------------------------------ places

    def disk(self, host: str) -> Path:
        return self.folder / f"disk-{host}"

    def state(self, host: str) -> Path:
        """A host's state directory, on its disk."""
        return self.disk(host) / "state"

    def releases(self, client: str) -> Path:
        return self.state(client) / "releases"

    # ------------------------------------------------------------ commands

    def start_server(self) -> None:
        """Runs the documented command and waits for the port."""
        where = ["--host", "0.0.0.0", "--port", PORT, "--certs", "certs"]
        where += ["--state-dir", self.state("server"), "--log-json", "server.jsonl"]
        process = self.machines.start("server", "deploy", "server", *where)
        self.processes["server"] = process
        self.machines.until(lambda: f":{PORT}" in self.listening("server"), process)

    def start_client(self, name: str, host: str = "", **more: object) -> None:
        """Runs the documented command; `more` are other flags than the usual."""
        host = host or name
        self.processes[host] = self.client(name, host, **more)

    def client(self, name: str, host: str = "", **more: object):
        """The process of a client's command, which may be refused."""
        given: dict[str, object] = {
            "server": f"{self.address}:{PORT}",
            "data": f"npz:{name}.npz",
            "ca": "certs/ca.crt",
            "key": f"certs/clients/{name}.key",
            "limits": "limits.toml",
            "state_dir": self.state(host or name),
            "log_json": f"{name}.jsonl",
        }
        words = flags(**given | more)
        return self.machines.start(host or name, "deploy", "client", name, *words)

    def submit(self, *arguments: object):
        ca = ["--server", f"127.0.0.1:{PORT}", "--ca", "certs/ca.crt"]
        return self.machines.start("server", "deploy", "submit", *ca, *arguments)

    def members(self, with_keys: bool = False) -> list[str]:
        """The `--client` flags, with keys until they are registered."""
        found: list[str] = []
        for name in CLIENTS:
            key = f"={self.folder}/certs/clients/{name}.pub"
            found += ["--client", name + (key if with_keys else "")]
        return found

    def start_run(self, **settings: object) -> "Run":
        """Submits a run of its own name."""
        run = Run(self, f"run-{len(self.runs)}", RUN_SETTINGS | settings)
        self.runs.append(run)
        return run

    # ------------------------------------------------------------ processes

    def pids(self, host: str, *of: str) -> list[int]:
        """The pids on a host, or those whose command line has one of these words."""
        command = ["ip", "netns", "pids", self.network.spaces[host]]
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
        found = [int(pid) for pid in listed.stdout.split()]
        return [pid for pid in found if not of or any(o in words_of(pid) for o in of)]

    def signal(self, number: int, host: str, *of: str) -> None:
        """Sends a signal to processes of a host; there must be one."""
        pids = self.pids(host, *of)
        if not pids:
            raise AssertionError(f"no process of {of or 'any kind'} on {host}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, host: str) -> None:
        """Ends everything on a host at once, as a power cut does."""
        self.kills[host] += 1
        while pids := self.pids(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.machines.started:
                process.poll()
            time.sleep(0.05)

    def stop(self, host: str) -> int:
        """Ends a host's `fedgs deploy` process by SIGTERM; returns its exit code."""
        self.kills[host] += 1  # it ends at once, also in the middle of a round
        process = self.processes[host]
        process.send_signal(signal.SIGTERM)
        return process.wait()

    def revive(self) -> None:
        """Starts what does not run, and waits for nothing else."""
        self.network.heal(*CLIENTS)
        if self.is_gone("server"):
            self.start_server()
        for name in CLIENTS:
            if self.is_gone(name):
                self.start_client(name)

    def is_gone(self, host: str) -> bool:
        return host not in self.processes or self.processes[host].poll() is not None

    def until(self, condition: Callable[[], object], pause: float = 0.02) -> None:
        """Waits; the incident's own time limit ends it."""
        while not condition():
            time.sleep(pause)

    def logs_have(self, text: str, process: "subprocess.Popen[bytes]") -> bool:
        return text in self.machines.log_of(process)

    def server_log(self) -> str:
        """What the server's process of now has written."""
        return self.machines.log_of(self.processes["server"])

    # ------------------------------------------------------------ faults

    def fill(self, host: str) -> None:
        """Fills a host's disk to the last byte."""
        with open(self.disk(host) / "ballast", "wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(b"\0" * 65536):
                    pass
            with contextlib.suppress(OSError):
                while file.write(b"\0"):
                    pass

    def free(self, host: str) -> None:
        (self.disk(host) / "ballast").unlink()

    def back_up(self, name: str = "backup") -> Path:
        """Copies the server's state while no run is going on: docs/operations.md."""
        copy, state = self.folder / name, self.state("server")
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(mode=0o700)
        subprocess.run(["cp", "-a", state / "runs", copy], check=True)
        return copy

    def snapshot(self, host: str, name: str = "backup") -> Path:
        """Copies a host's state at one instant, as a file system's snapshot does."""
        self.signal(signal.SIGSTOP, host)
        try:
            return self.copy(host, name)
        finally:
            self.signal(signal.SIGCONT, host)

    def copy(self, host: str, name: str) -> Path:
        """Copies the state directory of a host whose processes do nothing."""
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", self.state(host), target], check=True)
        return target

    def restore(self, host: str, copy: Path) -> None:
        """Puts a copy in the place of a state directory."""
        shutil.rmtree(self.state(host), ignore_errors=True)
        subprocess.run(["cp", "-a", copy, self.state(host)], check=True)

    # ------------------------------------------------------------ what is left

    def listening(self, host: str) -> str:
        command = [*self.network.on(host), "ss", "-Hltn"]
        return subprocess.run(command, capture_output=True, text=True).stdout

    def leftovers(self) -> list[str]:
        """What a finished incident left beside the server and the clients."""
        found = []
        for host in HOSTS:
            own = set() if self.is_gone(host) else tree_of(self.processes[host].pid)
            for pid in self.pids(host):
                if pid not in own:
                    found.append(f"{host}: process {words_of(pid)[:80]}")
            ports = [line.split()[3] for line in self.listening(host).splitlines()]
            for port in ports:
                if host != "server" or not port.endswith(f":{PORT}"):
                    found.append(f"{host}: port {port}")
        found += [f"tmp/{path.name}" for path in (self.folder / "tmp").iterdir()]
        return found + self.temporary_files()

    def temporary_files(self) -> list[str]:
        """Files of a save that did not end: .NAME.PID."""
        return [
            str(path.relative_to(self.folder))
            for host in HOSTS
            for path in self.disk(host).rglob(".*")
            if path.suffix[1:].isdigit()
        ]

    def close(self) -> list[str]:
        """Ends and removes everything; returns what would have been left over."""
        for host in HOSTS:
            with contextlib.suppress(Exception):
                self.signal(signal.SIGCONT, host)
        self.machines.close()
        found = []
        for host in HOSTS:
            found += [f"{host}: {words_of(pid)[:80]}" for pid in self.pids(host)]
            self.kill(host)
        self.network.close()
        for host in HOSTS:
            with contextlib.suppress(subprocess.CalledProcessError):
                _unmount(self.disk(host))
        mounts = Path("/proc/mounts").read_text()
        found += ["mounts"] if str(self.folder) in mounts else []
        found += [f"tmp/{path.name}" for path in (self.folder / "tmp").iterdir()]
        return found


class Run:
    """One run of a site: its folder, its submitter, and what came of it.

    Attributes:
        path: the run folder on the server.
        submitter: the `fedgs deploy submit` process that follows it.
        lost: client -> releases by round that its count no longer shows.
        seconds: from the disturbance to the next finished round; None before.
    """

    def __init__(self, site: Site, name: str, settings: dict[str, object]) -> None:
        self.site, self.name, self.settings = site, name, settings
        self.path = site.state("server") / "runs" / name
        self.before = {client: self._counted(client) for client in CLIENTS}
        self.kills_before = Counter(site.kills)
        self.lost: dict[str, Counter[int]] = {c: Counter() for c in CLIENTS}
        self.seconds: float | None = None
        self._struck, self._round = 0.0, 0
        self.is_followed = True  # whether the submitter's code tells the outcome
        members = site.members(with_keys=not site.is_registered)
        self.flags = flags(**settings | {"output": name})
        self.submitter = site.submit(*members, *self.flags)

    def resume(self, *more: object) -> "subprocess.Popen[bytes]":
        """Continues the run by the documented command; it registers the keys again."""
        keys = self.site.members(with_keys=True)
        self.submitter = self.site.submit("--resume", self.name, *keys, *more)
        return self.submitter

    def refused(self, text: str, *more: object) -> None:
        """Resumes, which must be refused with a text; nothing is trained."""
        before = self.rounds()
        process = self.resume(*more)
        code, log = process.wait(), self.site.machines.log_of(process)
        if code == 0 or text not in log:
            raise Refused(f"exit code {code}, without {text!r}: {log[-1500:]}")
        if self.rounds() > before:
            raise Refused("a round was trained all the same")

    # ------------------------------------------------------------ progress

    def rounds(self) -> int:
        return rounds_done(self.path)

    def at(self, round: int = STRIKE) -> None:
        """Waits until a round is finished."""
        self.site.until(lambda: self.rounds() >= round or self.has_failed())
        if self.has_failed():
            raise AssertionError(self.site.machines.log_of(self.submitter)[-2000:])
        self.site.is_registered = True

    def ended(self) -> bool:
        return self.submitter.poll() is not None

    def has_failed(self) -> bool:
        return self.submitter.poll() not in (None, 0)

    def _has_given_up(self) -> bool:
        return self.is_followed and self.has_failed()

    def has_moved(self) -> bool:
        """Tells whether a round was finished since the disturbance."""
        return self.rounds() > self._round

    def strike(self) -> None:
        """Starts the clock of the recovery."""
        self._struck, self._round = time.monotonic(), self.rounds()

    def restart_clock(self) -> None:
        """Counts from here: before, a person had to notice and to decide."""
        self.strike()

    def recover(self, round: int | None = None) -> None:
        """Waits for the next finished round and stops the clock."""
        wanted = self._round + 1 if round is None else round
        self.site.until(lambda: self.rounds() >= wanted or self._has_given_up())
        if self.rounds() < wanted:
            raise AssertionError(self.site.machines.log_of(self.submitter)[-2000:])
        self.seconds = time.monotonic() - self._struck

    def halt(self) -> None:
        """Stops the run with a checkpoint, by its stop file."""
        (self.path / ".flower" / "stop").touch()
        self.submitter.wait()

    def finish(self) -> None:
        """Waits for the end, which must be a good one."""
        code = self.submitter.wait()
        self.site.until((self.path / "generator.safetensors").exists)
        if code != 0 and self.is_followed:
            raise AssertionError(self.site.machines.log_of(self.submitter)[-2000:])

    # ------------------------------------------------------------ what came of it

    def is_same(self, reference: Path) -> bool:
        """Tells whether the generator has the bytes of the undisturbed run."""
        tensors, _ = read_tensors(self.path / "generator.safetensors")
        expected, _ = read_tensors(reference)
        return tensors.keys() == expected.keys() and all(
            torch.equal(tensors[name], expected[name]) for name in expected
        )

    def uncounted(self) -> dict[str, dict[int, int]]:
        """Releases of clients, by round, that the server's ledger does not show.

        A client counts a release before it sends it: one that was killed or stopped may
        have counted one that it never sent.
        """
        events = Ledger.read(self.path / "ledger.jsonl").events
        counted = Counter(event.round for event in events)
        found = {}
        for client in CLIENTS:
            released = self._counted(client) - self.before[client] + self.lost[client]
            missing = released - counted
            if missing.total() > self.site.kills[client] - self.kills_before[client]:
                found[client] = dict(missing)
        return found

    @contextlib.contextmanager
    def tampered(self, client: str) -> Iterator[None]:
        """Remembers the releases that what is done within takes from a count."""
        before = self._counted(client)
        yield
        self.lost[client] += before - self._counted(client)

    def _counted(self, client: str) -> Counter[int]:
        """A client's own count: releases by round, over all runs."""
        found: Counter[int] = Counter()
        for path in sorted(self.site.releases(client).glob("releases-*.jsonl")):
            found.update(event.round for event in Ledger.read(path).events)
        return found


def reference(folder: Path) -> Path:
    """Trains the undisturbed run with the local engine; returns its generator."""
    folder.mkdir()
    write_digits(folder)
    undisturbed(folder, RUN_SETTINGS)
    return folder / "local" / "generator.safetensors"


def words_of(pid: int) -> str:
    """A process's command line; empty when it has ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
        return text.replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def tree_of(pid: int) -> set[int]:
    """A process and all its descendants."""
    found, todo = set(), [pid]
    while todo:
        current = todo.pop()
        found.add(current)
        for path in Path(f"/proc/{current}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                todo += [int(child) for child in path.read_text().split()]
    return found


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


def _unmount(path: Path) -> None:
    subprocess.run(["umount", str(path)], check=True, capture_output=True)
