"""Real runs on Flower and Ray, through the command line: bits, crashes, leftovers.

A run costs 20 to 60 seconds, so that only one of them is among the ordinary tests.
"""

import contextlib
import ipaddress
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import tiny
from command_line import flags
from fedgs import process
from fedgs.config.recipes import recipe
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.privacy.ledger import Ledger
from fedgs.process import (
    FAST_VARIABLE,
    TOKEN_VARIABLE,
    end_processes,
    homes_of,
    processes_of,
)
from fedgs.round.preparation import resolve
from fedgs.runs.run_folder import RunFolder
from hosts import PATIENCE, ROOT, Machines
from recorder import LOOPBACK, Proxy, connected, connections
from runs import generator, rounds_done, train
from server.launch import flower_engine
from server.launch.control import FlowerFailed
from server.launch.flower_app import free_port
from tiny import run_config, tiny_config, write_tiny_npz

FULL = tiny.FULL_PARTICIPATION | {"discriminator_training": "every_round"}


def environment(**more: str) -> dict[str, str]:
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": python_path.rstrip(os.pathsep)} | more


@pytest.fixture
def settings(tmp_path) -> dict[str, object]:
    data = write_tiny_npz(tmp_path / "tiny.npz")
    given = tiny.SETTINGS | FULL | {"data": data, "num_workers": 2, "engine": "flower"}
    of_the_data = ("num_clients", "num_classes", "clients_per_round")
    found = {name: value for name, value in given.items() if name not in of_the_data}
    return found | {"test_fraction": 0.0}  # the command would hold some out


@pytest.fixture
def machines(tmp_path) -> Iterator[Machines]:
    with contextlib.closing(Machines(tmp_path)) as machines:
        yield machines


def token_of(folder: Path) -> str:
    return (folder / ".flower" / "token").read_text()


def local_twin(settings: dict[str, object], output: Path) -> bytes:
    """The generator that the local engine trains with one worker."""
    twin = {"engine": "local", "num_workers": 1, "output": str(output)}
    twin["clients_per_round"] = None
    config, data = resolve(run_config(**settings | twin))
    folder = RunFolder.create(config)
    train(folder, data=data)
    return generator(output)


# ------------------------------------------------------------------ without Ray


def test_second_launcher_is_refused_and_harms_nothing(tmp_path, monkeypatch):
    """The first one may be starting up, when its simulation has no lock yet."""
    folder = RunFolder.create(tiny_config(output=str(tmp_path / "run")))
    flower = folder.path / ".flower"
    flower.mkdir()
    token = secrets.token_hex(16)
    (flower / "token").write_text(token)
    lock = process.hold_lock(flower / "launcher.lock", "", 0.0)
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        env=environment(**{TOKEN_VARIABLE: token}),
        stdin=subprocess.PIPE,
    )
    monkeypatch.setattr(flower_engine, "LAUNCHER_LOCK_SECONDS", 0.2)
    with sleeper:
        with pytest.raises(UserError, match=r"another process trains .*; wait"):
            flower_engine.train(folder, lambda metrics: None, threading.Event())
        assert sleeper.poll() is None
        assert processes_of(token) == [sleeper.pid]
        end_processes(token)
        assert processes_of(token) == []
    lock.lock.release()
    assert sleeper.returncode == -signal.SIGTERM


def test_process_ends_with_its_launcher(tmp_path):
    token, path = secrets.token_hex(16), tmp_path / "launcher.lock"
    lock = process.hold_lock(path, "", 0.0)
    code = "from fedgs.process import watch_launcher; watch_launcher(); "
    code += "import sys; print(1, flush=True); sys.stdin.read()"
    env = environment(**{TOKEN_VARIABLE: token, process.LOCK_VARIABLE: str(path)})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=env, cwd=ROOT, **pipes) as child:
        assert child.stdout.readline() == b"1\n"
        assert child.poll() is None
        lock.lock.release()  # as the end of the launcher does
        assert child.wait(timeout=PATIENCE) == 1


def test_workers_share_a_gpu(tmp_path, monkeypatch):
    """Flower's own arithmetic, on a machine that says it has a GPU."""
    from flwr.simulation.ray_transport import ray_actor

    machine = [{"Resources": {"CPU": 4.0, "GPU": 1.0}}]
    monkeypatch.setattr(ray_actor.ray, "nodes", lambda: machine)
    of_a_client: list[dict[str, float]] = []

    def start(_: bytes, **fields: float) -> None:
        asked = {n: fields[f"client_resources_{n}"] for n in ("num_cpus", "num_gpus")}
        of_a_client.append(asked)

    for num_workers in (1, 2, 4):
        settings = {"device": "cuda", "num_workers": num_workers}
        config = tiny_config(engine="flower", output="unused", **settings)
        folder = SimpleNamespace(config=config, path=tmp_path)
        control = SimpleNamespace(start=start)
        flower_engine.start_run(control, folder)
    pools = [ray_actor.pool_size_from_resources(each) for each in of_a_client]
    assert pools == [1, 2, 4]
    machine[0]["Resources"].pop("GPU")
    with pytest.raises(ValueError, match="ActorPool is empty"):
        ray_actor.pool_size_from_resources(of_a_client[1])


# ------------------------------------------------------------------ with Ray


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with contextlib.closing(Proxy()) as proxy:
        yield proxy


def of_a_company(proxy: Proxy, folder: Path) -> dict[str, str]:
    """The environment of a batch job there; nothing of it must matter."""
    long = folder / "a-folder-of-a-batch-system" / "\u00e9"
    long.mkdir(parents=True)
    return {
        **proxy.environment(),
        "ALL_PROXY": "socks5://127.0.0.1:9",  # cannot be used at all
        "NO_PROXY": "[::1]",  # nor read
        "TMPDIR": str(long),
        "RAY_ADDRESS": "192.0.2.1:6379",
        "RAY_grpc_enable_http_proxy": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        **connections(folder),
    }


def listening(token: str) -> set[str]:
    """On which addresses a simulation's processes take connections now."""
    found = set[str]()
    for pid in processes_of(token):
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(pid).net_connections():
                if each.status == psutil.CONN_LISTEN:
                    found.add(each.laddr.ip)
    return found


@pytest.mark.flower
@pytest.mark.parametrize("is_fast", ["0", "1"])
def test_flower_with_two_workers_gives_the_local_bytes(
    tmp_path, settings, machines, proxy, is_fast
):
    output, addresses = tmp_path / "run", set[str]()
    settings = {"recipe": "algorithm-2"} | settings
    words = ("train", *flags(output=output, **settings))
    more = of_a_company(proxy, tmp_path) | {FAST_VARIABLE: is_fast}
    command = machines.start("cli", *words, more=more)
    machines.until(lambda: (output / ".flower" / "token").exists(), command)
    token = token_of(output)
    while command.poll() is None:
        addresses |= listening(token)
        time.sleep(0.5)
    assert command.wait(PATIENCE) == 0, (output / "flower.log").read_text()
    assert generator(output) == local_twin(settings, tmp_path / "local")
    out = machines.log_of(command)
    assert "6 clients (nodes: 3, rounds: 3, clients in each: 6)" in out
    assert "round 3 of 3" in out
    assert "run folder" in out.lower()
    assert Ledger.read(output / "ledger.jsonl").length == 3
    made = sorted(path.name for path in (output / "private").iterdir())
    assert made == ["node-00000", "node-00001", "node-00002"]
    assert processes_of(token) == []
    assert not any(home.exists() for home in homes_of(token))
    # All of it is on the loopback: nobody else reaches Ray, and the metadata service of
    # a cloud is not asked.
    assert addresses
    assert all(
        ipaddress.ip_address(a.removeprefix("::ffff:")).is_loopback for a in addresses
    )
    assert connected(tmp_path) <= LOOPBACK
    assert proxy.heard == []
    assert "Ray without a dashboard" not in (output / "flower.log").read_text()


def test_a_simulation_whose_ray_started_too_late_is_started_again(
    tmp_path, monkeypatch
):
    config = tiny_config(engine="flower", output=str(tmp_path / "run"))
    folder = RunFolder.create(config)
    logs = [f"Exception: The current {flower_engine.RAY_IS_LATE}.", "another reason"]

    ended = "finished:failed", ""
    monkeypatch.setattr(flower_engine, "simulate", lambda *_: (*ended, logs.pop(0)))
    with pytest.raises(FlowerFailed, match="without an outcome"):
        flower_engine.train(folder, lambda metrics: None, threading.Event())
    assert logs == []


@pytest.mark.flower
@pytest.mark.slow
def test_a_simulation_that_cannot_start_is_noticed_at_once(tmp_path, monkeypatch):
    """Not only after the time that a start may take."""
    config = tiny_config(engine="flower", output=str(tmp_path / "run"))
    folder, started = RunFolder.create(config), time.monotonic()
    made = flower_engine.app_project

    def without_apps(*words: str) -> str:
        return re.sub(r"(server|clients)\.\w+:app", "no_such_module:app", made(*words))

    monkeypatch.setattr(flower_engine, "app_project", without_apps)
    with pytest.raises(FlowerFailed, match=r"finished:failed.*without an outcome\. \w"):
        flower_engine.train(folder, lambda metrics: None, threading.Event())
    assert time.monotonic() - started < flower_engine.START_TIMEOUT / 2
    assert "no_such_module" in (folder.path / "flower.log").read_text()


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False])
def test_ended_run_leaves_no_process_and_resumes(
    tmp_path, settings, machines, is_killed
):
    output = tmp_path / "run"
    settings |= {"num_rounds": 120}
    settings = {"recipe": "algorithm-2"} | settings
    command = machines.start("cli", "train", *flags(output=output, **settings))
    machines.until(lambda: rounds_done(output) >= 20, command)
    token = token_of(output)
    if is_killed:
        machines.kill(command)
    else:
        command.terminate()
        assert command.wait(PATIENCE) == 1
        log = machines.log_of(command)
        assert "\nstopped after round " in log
        assert "continue with: fedgs resume run" in log
        assert processes_of(token) == []
        commit = json.loads((output / "checkpoint" / "checkpoint.json").read_text())
        assert commit["round"] == rounds_done(output)
    assert 20 <= Ledger.read(output / "ledger.jsonl").length < 120
    machines.run("cli", "resume", output)
    assert generator(output) == local_twin(settings, tmp_path / "local")
    repeated = Ledger.read(output / "ledger.jsonl").length - 120
    assert repeated >= 0 if is_killed else repeated == 0
    assert processes_of(token) == []
    assert not any(home.exists() for home in homes_of(token))


@pytest.mark.flower
@pytest.mark.slow
def test_plain_flwr_run_trains_with_the_settings_of_pyproject(
    tmp_path, machines, monkeypatch
):
    # As in Flower's processes, which know nothing of the short fits of the tests.
    for name, value in {"STEPS": 3000, "FOR_LARGE": 0.022, "FOR_ALL": 0.021}.items():
        monkeypatch.setattr(f"fedgs.gan.refinement.{name}", value)
    file = tmp_path / "more.toml"
    file.write_text("generator_dim = 4\nnum_clients = 9\nnoise_seed = 1\n")
    overrides = {"num-clients": 6, "clients-per-node": 3, "image-size": 16}
    overrides |= {"config": f"'{file}'", "output": "'plain'"}
    pairs = " ".join(f"{name}={value}" for name, value in overrides.items())
    command = ["flwr", "run", str(ROOT), "--stream", "--run-config", pairs]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short:
        bin_folder = str(Path(sys.executable).parent)
        private = {
            "FLWR_HOME": str(tmp_path / "flwr"),
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "RAY_TMPDIR": short,  # Ray makes sockets in it
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }
        machines.launch("cli", command, private).wait(PATIENCE)
        machines.close()
    folder = tmp_path / "fedgs-runs" / "plain"
    assert folder.exists(), machines.logs()
    result = json.loads((folder / ".flower" / "result.json").read_text())
    assert result == {"status": "completed", "message": ""}
    config = RunFolder.open(folder).config
    assert (config.data, config.num_nodes, config.engine) == ("digits", 2, "flower")
    assert (config.generator_dim, config.phases) == (4, recipe("demo").phases)
    assert config.num_clients == 6  # a key of --run-config is over the file
    assert Ledger.read(folder / "ledger.jsonl").length == config.num_rounds == 4
    twin = {"engine": "local", "num_workers": 1, "output": str(tmp_path / "local")}
    alone = RunFolder.create(ResolvedConfig.from_flat(twin, config))
    train(alone)
    assert generator(folder) == generator(alone.path)
