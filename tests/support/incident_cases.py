"""The incidents: what is done to a deployment, and what its operator does then.

Each is a function of a site and, unless it has `has_run=False`, of a run of its own
that was just submitted. It disturbs the run, recovers as docs/operations.md says, and
returns; `incidents` then waits for the end and compares.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.launch.certs import make_certificates
from experiments.launch.flower_app import QUIET
from incident_site import (
    CLIENTS,
    FLWR,
    LIMITS,
    PORT,
    SHORT_ROUND,
    STRIKE,
    Refused,
    Run,
    Site,
)
from runs import keep_lines

SUPERLINK = "experiments.launch.superlink"
SUPEREXEC = "flower-superexec"
SERVERAPP = "flwr-serverapp"
LONG_STOP = 60.0  # seconds
LINK_DOWN = 6.0


@dataclass(frozen=True)
class Incident:
    """One row of the table.

    Attributes:
        name: of the row, for `make incidents ONLY=name`.
        what: what happens.
        remedy: what the operator does.
        act: does both.
        settings: of the run, where they differ.
        has_run: whether it has a run of its own.
        limit: seconds that it may take.
    """

    name: str
    what: str
    remedy: str
    act: Callable[..., None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_run: bool = True
    limit: float = 300.0


INCIDENTS: list[Incident] = []
NOTHING = "nothing"
AGAIN = "the same command again"
RESUME = "`submit --resume`"
SERVER_AGAIN = f"server started again, {RESUME}"


def incident(
    what: str, remedy: str, limit: float = 300.0, at: int = STRIKE, **more: Any
):
    """Enters a function into the table under its name.

    A run of its own is given to it after round `at`, with the clock of the recovery
    started; `run.strike` starts it again where the disturbance comes later.
    """

    def enter(act: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(act)
        def after_a_round(site: Site, *runs: Run) -> None:
            for run in runs:
                run.at(at)
                run.strike()
            act(site, *runs)

        name = act.__name__.replace("_", "-")
        INCIDENTS.append(
            Incident(name, what, remedy, after_a_round, limit=limit, **more)
        )
        return act

    return enter


# ------------------------------------------------------------------ clients


def restart(site: Site, *names: str) -> None:
    for name in names:
        site.start_client(name)


def stand_still(site: Site, host: str, *of: str) -> None:
    """Stops processes of a host for a while."""
    site.signal(signal.SIGSTOP, host, *of)
    time.sleep(LONG_STOP)
    site.signal(signal.SIGCONT, host, *of)


def must_stop(run: Run) -> None:
    if run.submitter.wait() != 1:
        raise AssertionError("the run went on without a node that it needs")


def ends_with(process: "subprocess.Popen[bytes]", site: Site, code: int, text: str):
    """Waits for a command that must be refused with a code and a text."""
    found, log = process.wait(), site.machines.log_of(process)
    if found != code or text not in log or "Traceback" in log:
        raise Refused(f"exit code {found}, not {code} with {text!r}: {log[-1500:]}")


@incident("client: SIGKILL between two rounds", AGAIN)
def client_killed(site: Site, run: Run) -> None:
    site.kill("a")
    restart(site, "a")
    run.recover()


@incident("client: SIGKILL after it has counted a release, before it is sent", AGAIN)
def client_killed_in_round(site: Site, run: Run) -> None:
    path = next(site.releases("a").glob("releases-*.jsonl"))
    size = path.stat().st_size
    site.until(lambda: path.stat().st_size > size, pause=0.0005)
    run.strike()
    site.kill("a")
    restart(site, "a")
    run.recover()


@incident("client: SIGKILL in the middle of its upload", AGAIN)
def client_killed_in_upload(site: Site, run: Run) -> None:
    with held_upload(site, run):
        site.kill("a")
    restart(site, "a")
    run.recover()


@incident("client: SIGSTOP in the middle of its upload, for 60 s", NOTHING)
def client_stopped_in_upload(site: Site, run: Run) -> None:
    with held_upload(site, run):
        stand_still(site, "a")
    run.recover()


@contextlib.contextmanager
def held_upload(site: Site, run: Run):
    """Stops client a where its answer is counted and has not left."""
    hold, reached = site.folder / "hold", site.folder / "hold.reached"
    hold.touch()
    site.until(reached.exists, pause=0.005)
    run.strike()
    yield
    hold.unlink()
    reached.unlink()


@incident("client: SIGTERM", AGAIN)
def client_terminated(site: Site, run: Run) -> None:
    if (code := site.stop("a")) != 0:
        raise AssertionError(f"exit code {code} after SIGTERM")
    restart(site, "a")
    run.recover()


@incident("client: SIGSTOP for 60 s", NOTHING)
def client_stopped(site: Site, run: Run) -> None:
    stand_still(site, "a")
    run.recover()


@incident("all clients: SIGKILL at once", AGAIN)
def all_clients_killed(site: Site, run: Run) -> None:
    for name in CLIENTS:
        site.kill(name)
    restart(site, *CLIENTS)
    run.recover()


@incident("client machine: power lost, back after 10 s", AGAIN)
def client_machine_restarted(site: Site, run: Run) -> None:
    site.network.cut("a")  # no FIN reaches the server
    site.kill("a")
    time.sleep(10)
    site.network.heal("a")
    restart(site, "a")
    run.recover()


@incident(
    f"client away for longer than `round_timeout` ({SHORT_ROUND:g} s)",
    f"client started again, {RESUME}",
    settings={"round_timeout": SHORT_ROUND},
)
def client_away(site: Site, run: Run) -> None:
    site.kill("a")
    must_stop(run)
    restart(site, "a")
    run.resume()
    run.recover()


# ------------------------------------------------------------------ the server


def serve_again(site: Site, run: Run) -> None:
    """What systemd and the operator do: start what has ended, resume what failed."""
    if site.is_gone("server"):
        site.start_server()
    run.resume()
    run.recover()


def fall(site: Site, run: Run, *of: str) -> None:
    """Kills processes of the server; the operator acts when the submitter has ended."""
    site.signal(signal.SIGKILL, "server", *of)
    gone = time.monotonic() + 30
    site.until(lambda: site.is_gone("server") or time.monotonic() > gone or run.ended())
    if site.is_gone("server"):
        site.start_server()
    if run.submitter.wait() != 0:
        run.resume()
    run.recover()


@incident("SuperLink: SIGKILL", SERVER_AGAIN)
def superlink_killed(site: Site, run: Run) -> None:
    fall(site, run, SUPERLINK)


@incident("superexec: SIGKILL", SERVER_AGAIN)
def superexec_killed(site: Site, run: Run) -> None:
    fall(site, run, SUPEREXEC)


@incident("ServerApp: SIGKILL", RESUME)
def serverapp_killed(site: Site, run: Run) -> None:
    fall(site, run, SERVERAPP)


@incident("`fedgs deploy server`: SIGKILL of its main process", SERVER_AGAIN)
def server_killed(site: Site, run: Run) -> None:
    site.processes["server"].kill()
    site.processes["server"].wait()
    serve_again(site, run)


@incident("`fedgs deploy server`: SIGTERM with clients connected", SERVER_AGAIN)
def server_terminated(site: Site, run: Run) -> None:
    started = time.monotonic()
    site.stop("server")
    if (seconds := time.monotonic() - started) > 30:
        raise AssertionError(f"it took {seconds:.0f} s to end, not at most 30")
    serve_again(site, run)


@incident("server: all its processes SIGSTOP for 60 s", f"{RESUME} if it failed")
def server_stopped(site: Site, run: Run) -> None:
    of = (SUPERLINK, SUPEREXEC, SERVERAPP, "deploy server")
    stand_still(site, "server", *of)
    settle(site, run)


def settle(site: Site, run: Run) -> None:
    """Waits for a round; resumes the run once if it has failed."""
    site.until(lambda: run.ended() or run.has_moved())
    if not run.has_moved() or run.has_failed():
        if site.is_gone("server"):
            site.start_server()
        run.resume()
    run.recover()


@incident("ServerApp: SIGSTOP for 60 s", f"{RESUME} if it failed")
def serverapp_stopped(site: Site, run: Run) -> None:
    stand_still(site, "server", SERVERAPP)
    settle(site, run)


@incident("server machine: power lost, back after 10 s", SERVER_AGAIN)
def server_machine_restarted(site: Site, run: Run) -> None:
    site.network.cut(*CLIENTS)  # clients are left with half-open connections
    site.kill("server")
    time.sleep(10)
    site.network.heal(*CLIENTS)
    serve_again(site, run)


@incident("every machine: power lost at once", "everything started again, " + RESUME)
def every_machine_restarted(site: Site, run: Run) -> None:
    site.network.cut(*CLIENTS)
    for name in (*CLIENTS, "server"):
        site.kill(name)
    site.network.heal(*CLIENTS)
    site.start_server()
    restart(site, *CLIENTS)
    run.resume()
    run.recover()


@incident("submitter: SIGKILL", NOTHING)
def submitter_killed(site: Site, run: Run) -> None:
    end_submitter(site, run, signal.SIGKILL)


@incident("submitter: SIGTERM", NOTHING)
def submitter_terminated(site: Site, run: Run) -> None:
    end_submitter(site, run, signal.SIGTERM)


@incident("submitter: Ctrl-C", NOTHING)
def submitter_interrupted(site: Site, run: Run) -> None:
    end_submitter(site, run, signal.SIGINT)


def end_submitter(site: Site, run: Run, number: int) -> None:
    run.is_followed = False
    run.submitter.send_signal(number)
    run.submitter.wait()
    run.recover()


@incident("`server`: killed in the middle of saving a checkpoint", SERVER_AGAIN)
def killed_in_save(site: Site, run: Run) -> None:
    checkpoint = run.path / "checkpoint"

    def is_saving() -> bool:
        return any(name.startswith(".") for name in os.listdir(checkpoint))

    site.until(is_saving, pause=0.0)
    run.strike()
    site.kill("server")
    serve_again(site, run)


# ------------------------------------------------------------------ the network


@incident(f"one client's link cut for {LINK_DOWN:g} s", NOTHING)
def link_cut(site: Site, run: Run) -> None:
    cut(site, run, ["a"], LINK_DOWN)
    run.recover()


@incident("every link cut for 45 s", NOTHING)
def every_link_cut(site: Site, run: Run) -> None:
    cut(site, run, CLIENTS, 45)
    run.recover()


@incident(
    f"one client's link cut for longer than `round_timeout` ({SHORT_ROUND:g} s)",
    RESUME,
    settings={"round_timeout": SHORT_ROUND},
)
def link_cut_long(site: Site, run: Run) -> None:
    site.network.cut("a")
    must_stop(run)
    site.network.heal("a")
    run.resume()
    run.recover()


def cut(site: Site, run: Run, names: Any, seconds: float) -> None:
    site.network.cut(*names)
    time.sleep(seconds)
    site.network.heal(*names)


@incident("one client's link at 64 kbit/s, packets beyond it lost", NOTHING, at=2)
def slow_link(site: Site, run: Run) -> None:
    with site.network.slow("a", "64kbit"):
        run.recover()
        run.at(STRIKE)


# ------------------------------------------------------------------ disks


@incident(
    "server's disk full", f"space freed, server started again if it ended, {RESUME}"
)
def server_disk_full(site: Site, run: Run) -> None:
    site.fill("server")
    code = run.submitter.wait()
    if code != 1:
        raise AssertionError(f"the submitter ended with {code}")
    site.free("server")
    serve_again(site, run)


@incident("client's disk full", "space freed, " + RESUME + " if it failed")
def client_disk_full(site: Site, run: Run) -> None:
    site.fill("a")
    time.sleep(5)
    site.free("a")
    settle(site, run)


@incident("client's state directory read-only", "refused, code 2", has_run=False)
def read_only_state(site: Site) -> None:
    site.stop("a")
    disk = str(site.disk("a"))
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        ends_with(site.client("a"), site, 2, "Read-only file system")
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    restart(site, "a")


# ------------------------------------------------------------------ keys, certificates


@incident("client with a key that is not registered", "`submit --client NAME=KEY.pub`")
def wrong_key(site: Site, run: Run) -> None:
    site.kill("a")
    make_certificates(site.folder / "others", [], ["a"])
    process = site.client("a", key="others/clients/a.key")
    said = "is the key of this client registered?"
    try:
        site.until(lambda: site.logs_have(said, process))
    finally:
        process.kill()
        process.wait()
    restart(site, "a")
    run.recover()


@incident(
    "client's key replaced by a new one",
    "run stopped, `submit --resume --client NAME=NEW.pub`, client with the new key",
)
def key_rotated(site: Site, run: Run) -> None:
    run.halt()
    site.stop("a")
    make_certificates(site.folder / "certs", [], ["a"], replace=True)
    run.resume()
    restart(site, "a")
    run.recover()
    run.finish()
    unregister_offline(site)


def unregister_offline(site: Site) -> None:
    """Removes the keys of nodes that are not online: here, the replaced one."""
    home = site.folder / "admin"
    home.mkdir(exist_ok=True)
    ca = site.folder / "certs" / "ca.crt"
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "server"\n[superlink.server]\n'
        f'address = "127.0.0.1:{PORT}"\nroot-certificates = "{ca}"\n'
    )

    def flwr(*arguments: str) -> str:
        command = [*site.network.on("server"), FLWR, "supernode", *arguments]
        environment = os.environ | {"FLWR_HOME": str(home), **QUIET}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    text = flwr("list", "server", "--format", "json")
    nodes = json.loads(text[text.index("{") : text.rindex("}") + 1])["nodes"]
    gone = [node for node in nodes if node["status"] != "online"]
    if len(gone) != 1:
        raise AssertionError(f"nodes that are not online: {gone}")
    flwr("unregister", str(gone[0]["node-id"]), "server")


@incident(
    "authority replaced",
    "clients take both `ca.crt`, server started with the new folder, " + RESUME,
)
def authority_replaced(site: Site, run: Run) -> None:
    certs, new = site.folder / "certs", site.folder / "certs-new"
    make_certificates(new, [site.address], [])
    both = (certs / "ca.crt").read_bytes() + (new / "ca.crt").read_bytes()
    (site.folder / "ca-both.crt").write_bytes(both)
    for name in CLIENTS:
        site.stop(name)
        site.start_client(name, ca="ca-both.crt")
    site.stop("server")
    for path in new.iterdir():
        path.replace(certs / path.name)
    serve_again(site, run)


@incident("server's certificate replaced, same authority", SERVER_AGAIN)
def certificate_replaced(site: Site, run: Run) -> None:
    site.stop("server")
    make_certificates(site.folder / "certs", [site.address], [], replace=True)
    serve_again(site, run)


@incident("server of another authority", "client refuses it and says so", has_run=False)
def another_authority(site: Site) -> None:
    site.stop("a")
    make_certificates(site.folder / "other", [site.address], [])
    process = site.client("a", ca="other/ca.crt")
    site.until(lambda: site.logs_have("CERTIFICATE_VERIFY_FAILED", process))
    process.kill()
    process.wait()
    restart(site, "a")


# ------------------------------------------------------------------ restored


@incident(
    "server restored from a snapshot, older by some rounds",
    "refused; `submit --resume --accept-restore`",
    settings={"checkpoint_every": 6},
)
def server_restored(site: Site, run: Run) -> None:
    run.at(7)
    backup = site.snapshot("server")
    run.at(10)
    run.strike()
    site.kill("server")
    site.restore("server", backup)
    site.start_server()
    run.refused("--accept-restore")
    run.restart_clock()
    run.resume("--accept-restore")
    run.recover()


@incident(
    "server restored from an older snapshot, then its newest state put back",
    SERVER_AGAIN,
    settings={"checkpoint_every": 2},
)
def newest_state_put_back(site: Site, run: Run) -> None:
    run.at(3)
    backup = site.snapshot("server")
    run.at(8)
    run.strike()
    site.kill("server")
    newest = site.copy("server", "newest")
    site.restore("server", backup)
    site.start_server()
    waiting = run.resume()
    # Commits since the copy were the last need of the clients' states of its round.
    site.until(lambda: site.logs_have("put the newest server state back", waiting))
    site.kill("server")
    site.restore("server", newest)
    site.start_server()
    run.restart_clock()
    run.resume()
    run.recover()


@incident(
    "server restored from a copy of a stopped run (`sqlite3 .backup`, `cp -a`)",
    SERVER_AGAIN,
)
def server_restored_same_round(site: Site, run: Run) -> None:
    run.halt()
    backup = site.back_up()
    run.strike()
    site.kill("server")
    site.restore("server", backup)
    serve_again(site, run)


@incident(
    "client's state restored from an older copy",
    "refused; newest state put back, " + RESUME,
)
def client_restored(site: Site, run: Run) -> None:
    run.at(3)
    backup = site.snapshot("a")
    run.at(8)
    run.strike()
    site.kill("a")
    newest = site.copy("a", "newest")
    with run.tampered("a"):
        site.restore("a", backup)
    expect_refusal(site, run)
    run.lost["a"].clear()
    put_back(site, run, newest)


@incident("client's state deleted", "refused; restored from the copy, " + RESUME)
def client_state_deleted(site: Site, run: Run) -> None:
    with damaged_client(site, run):
        shutil.rmtree(site.state("a"))


@incident("client's own count deleted", "refused; restored from the copy, " + RESUME)
def count_deleted(site: Site, run: Run) -> None:
    with damaged_client(site, run):
        shutil.rmtree(site.releases("a"))


@incident(
    "client's own count rolled back", "refused; restored from the copy, " + RESUME
)
def count_rolled_back(site: Site, run: Run) -> None:
    with damaged_client(site, run):
        for path in site.releases("a").glob("releases-*.jsonl"):
            keep_lines(path, -2)


@contextlib.contextmanager
def damaged_client(site: Site, run: Run):
    """Client a is down, and refused until the copy from before is put back."""
    site.kill("a")
    newest = site.copy("a", "newest")
    yield
    expect_refusal(site, run)
    put_back(site, run, newest)


def expect_refusal(site: Site, run: Run) -> None:
    """Starts client a, which must be refused: no round is finished with it.

    At the roll call, by itself (code 2), or in the round that goes on: then the run
    stops with a checkpoint.
    """
    before, known = run.rounds(), len(site.server_log())
    process = site.client("a")

    def is_refused() -> bool:
        log = site.machines.log_of(process) + site.server_log()[known:]
        return "refused" in log or process.poll() == 2 or run.has_failed()

    site.until(lambda: is_refused() or run.rounds() > before)
    site.kill("a")
    if run.rounds() > before:
        raise Refused(f"not refused: round {run.rounds()} was finished with it")


def put_back(site: Site, run: Run, copy: Path) -> None:
    run.restart_clock()
    site.restore("a", copy)
    restart(site, "a")
    settle(site, run)


# ------------------------------------------------------------------ files


def stopped_server(site: Site, run: Run) -> None:
    site.kill("server")


@incident("server's ledger: last line torn", SERVER_AGAIN)
def ledger_torn(site: Site, run: Run) -> None:
    stopped_server(site, run)
    with open(run.path / "ledger.jsonl", "ab") as file:
        file.write(b'{"batch_size":16,"client_sel')
    serve_again(site, run)


@incident("server's ledger: lines cut off at its end", "refused; restored from a copy")
def ledger_shortened(site: Site, run: Run) -> None:
    spoilt(site, run, run.path / "ledger.jsonl", lambda lines: lines[:1])


@incident("server's ledger: a line altered", "refused; restored from a copy")
def ledger_altered(site: Site, run: Run) -> None:
    def alter(lines: list[bytes]) -> list[bytes]:
        return [lines[0].replace(b'"attempt":1', b'"attempt":2'), *lines[1:]]

    spoilt(site, run, run.path / "ledger.jsonl", alter)


@incident("server's checkpoint corrupted", "refused; restored from a copy")
def checkpoint_corrupted(site: Site, run: Run) -> None:
    run.halt()
    (path,) = (run.path / "checkpoint").glob("*.safetensors")

    def corrupt(lines: list[bytes]) -> list[bytes]:
        content = bytearray(b"".join(lines))
        content[len(content) // 2] ^= 255
        return [bytes(content)]

    spoilt(site, run, path, corrupt)


def spoilt(
    site: Site, run: Run, path: Path, spoil: Callable[[list[bytes]], list[bytes]]
) -> None:
    """Spoils a file of the run folder: resuming is refused until it is restored."""
    if run.submitter.poll() is None:
        run.halt()
    run.strike()
    content = path.read_bytes()
    path.write_bytes(b"".join(spoil(content.splitlines(keepends=True))))
    run.refused("restore" if path.suffix == ".jsonl" else "")
    path.write_bytes(content)
    run.restart_clock()
    run.resume()
    run.recover()


@incident("files of a killed save in every state directory", AGAIN + ", " + RESUME)
def temporary_files(site: Site, run: Run) -> None:
    stopped_server(site, run)
    site.kill("a")
    pid = 4_000_000  # above the largest pid of a default Linux
    node = next(site.state("a").glob("*/node-*"))
    for path in (
        run.path / "generator.safetensors",
        run.path / "checkpoint" / "checkpoint.json",
        run.path / "checkpoint" / "round-0000004.safetensors",
        node / "round-0000004.safetensors",
        site.releases("a") / "clients.json",
    ):
        path.with_name(f".{path.name}.{pid}").write_bytes(b"{")
    restart(site, "a")
    serve_again(site, run)


# ------------------------------------------------------------------ people


@incident("run stopped by its stop file", RESUME)
def stop_file(site: Site, run: Run) -> None:
    run.halt()
    run.resume()
    run.recover()


@incident(
    "a run resumed while it is going on",
    "the second waits for the first, and completes with it",
    at=2,
)
def resumed_twice(site: Site, run: Run) -> None:
    second = site.submit("--resume", run.name, *site.members(with_keys=True))
    run.finish()
    run.recover(run.rounds())
    ends_with(second, site, 0, "is completed")


@incident(
    "a run submitted twice under one name",
    "the second waits for the first, and completes with it",
    at=2,
)
def submitted_twice(site: Site, run: Run) -> None:
    second = site.submit(*site.members(), *run.flags)
    run.finish()
    run.recover(run.rounds())
    ends_with(second, site, 0, "is completed")


@incident("two servers on one state directory", "refused, code 2", has_run=False)
def two_servers(site: Site) -> None:
    where = ["--host", "0.0.0.0", "--port", 8001, "--certs", "certs"]
    where += ["--state-dir", site.state("server")]
    second = site.machines.start("server", "deploy", "server", *where)
    try:
        ends_with(second, site, 2, "state")
    finally:
        if second.poll() is None:
            second.kill()


@incident("the server's port is in use", "refused", has_run=False)
def port_in_use(site: Site) -> None:
    where = ["--host", "0.0.0.0", "--port", 8000, "--certs", "certs"]
    where += ["--state-dir", site.disk("server") / "second"]
    second = site.machines.start("server", "deploy", "server", *where)
    if second.wait() == 0:
        raise Refused("exit code 0")
    if "in use" not in site.machines.log_of(second):
        raise Refused(site.machines.log_of(second)[-1500:])
    shutil.rmtree(site.disk("server") / "second")


@incident("two clients on one state directory", "refused, code 2", has_run=False)
def two_clients(site: Site) -> None:
    ends_with(site.client("a"), site, 2, "another client process uses it")


@incident("a copied client machine: one key in two places", "the copy waits", at=2)
def one_key_twice(site: Site, run: Run) -> None:
    copy = site.snapshot("a", "copied")
    second = site.client("a", host="b", state_dir=copy)
    site.until(lambda: site.logs_have("still taken for online", second))
    run.finish()
    run.recover(run.rounds())
    second.terminate()
    second.wait()


@incident(
    "client's limits become too narrow for the run",
    "refused, limits corrected, client started again",
)
def limits_refuse(site: Site, run: Run) -> None:
    site.stop("a")
    path = site.folder / "limits.toml"
    path.write_text("allow_seeded_noise = false\n")
    try:
        expect_refusal(site, run)
    finally:
        path.write_text(LIMITS)
    run.restart_clock()
    restart(site, "a")
    settle(site, run)


@incident("client's own count: last line torn", AGAIN)
def count_torn(site: Site, run: Run) -> None:
    site.kill("a")
    path = next(site.releases("a").glob("releases-*.jsonl"))
    with open(path, "ab") as file:
        file.write(b'{"batch_size":16,"client_sel')
    restart(site, "a")
    run.recover()
