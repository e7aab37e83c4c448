"""How a deployed server stands apart from its runs: processes, certificates, disk.

Read from its state directory; the server itself is asked nothing.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from experiments.launch.supervisor import PROCESS_FILE
from fedgs.files import read_json
from fedgs.process import start_of

NEEDED = ("server", "superlink", "superexec")  # a server without one serves nothing


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process that the server has written down.

    Attributes:
        role: server, superlink, superexec or serverapp.
        pid: of it, or of the one that it was.
        is_alive: whether that very process lives.
    """

    role: str
    pid: int
    is_alive: bool


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A certificate file of the server, as it is now.

    Attributes:
        whose: "server" or "authority".
        path: of the file.
        expires: Unix time; None where the file cannot be read.
    """

    whose: str
    path: str
    expires: float | None


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server; all public.

    Attributes:
        state: running, stopping, ended as asked or with a reason, or dead.
        reason: why it ended, or what is missing.
        processes: as they were written down last.
        superexec_restarts: since the server was started.
        certificates: none of an insecure server.
        free_bytes, disk_bytes: of the state directory's file system.
    """

    state: str
    reason: str
    processes: tuple[Process, ...]
    superexec_restarts: int
    certificates: tuple[Certificate, ...]
    free_bytes: int
    disk_bytes: int

    @property
    def is_alive(self) -> bool:
        """Whether a run can go on."""
        return self.state in ("running", "stopping")


def state_directory(path: Path) -> Path | None:
    """Returns the server's state directory that a path is, or lies in, if any.

    Args:
        path: a state directory, its folder of runs, or a run folder.
    """
    path = path.absolute()
    places = (path, *path.parents[:2])
    return next((place for place in places if (place / PROCESS_FILE).is_file()), None)


def server_of(path: Path) -> Server | None:
    """Reads how the server of a path stands; None where there is none.

    Args:
        path: as of `state_directory`.

    Raises:
        UserError: a broken file.
    """
    place = state_directory(path)
    if place is None:
        return None
    content = read_json(place / PROCESS_FILE)
    processes = tuple(
        Process(
            role=entry["role"],
            pid=entry["pid"],
            # A pid alone may have been given to another process.
            is_alive=start_of(entry["pid"]) == entry["start"],
        )
        for entry in content["processes"]
    )
    state, reason = content["state"], content["reason"]
    living = {process.role for process in processes if process.is_alive}
    if state != "ended" and (missing := [r for r in NEEDED if r not in living]):
        # The superexec may be about to be started again; the others are not.
        if missing != ["superexec"]:
            state = "dead"
        reason = f"no process: {', '.join(missing)}"
    disk = shutil.disk_usage(place)
    return Server(
        state=state,
        reason=reason,
        processes=processes,
        superexec_restarts=content["superexec_restarts"],
        certificates=tuple(
            Certificate(whose=whose, path=path, expires=_expiry(Path(path)))
            for whose, path in content.get("certificates", {}).items()
        ),
        free_bytes=disk.free,
        disk_bytes=disk.total,
    )


def _expiry(path: Path) -> float | None:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return None
    return certificate.not_valid_after_utc.timestamp()
