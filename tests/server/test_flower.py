"""Real runs on Flower and Ray, through the command line: bits, crashes, leftovers.

A run costs 20 to 60 seconds, so that only one of them is among the ordinary tests.
"""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny
from command_line import flags
from experiments.launch import flower_engine
from experiments.launch.control import FlowerFailed
from fedgs import gs_wgan, process
from fedgs.config.recipes import recipe
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data.load import load_data
from fedgs.errors import UserError
from fedgs.federation.preparation import resolve
from fedgs.files import read_tensors
from fedgs.privacy.ledger import Ledger
from fedgs.process import (
    TOKEN_VARIABLE,
    end_processes,
    end_simulation,
    home_of,
    processes_of,
)
from fedgs.runs.run_folder import RunFolder
from runs import generator, rounds_done, train
from tiny import tiny_config, write_tiny_npz

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240.0  # seconds, on a loaded machine
FULL = tiny.FULL_PARTICIPATION | {"discriminator_training": "every_round"}


def environment(**more: str) -> dict[str, str]:
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": python_path.rstrip(os.pathsep)} | more


@pytest.fixture
def settings(tmp_path) -> dict[str, object]:
    data = write_tiny_npz(tmp_path / "tiny.npz")
    config = tiny_config(**FULL | {"data": data, "num_workers": 2, "engine": "flower"})
    unset = RunConfig()
    names = {name for name in config.to_flat() if name not in ("num_clients",)}
    found = {
        name: getattr(config, name)
        for name in sorted(names - {"num_classes", "clients_per_round"})
        if getattr(config, name) != getattr(unset, name)
    }
    return found | {"test_fraction": 0.0}  # the command would hold some out


class Fedgs:
    """One command of fedgs in a process group of its own, and what it leaves."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "fedgs", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def fedgs() -> Iterator[Callable[..., Fedgs]]:
    started: list[Fedgs] = []

    def fedgs(*arguments: object) -> Fedgs:
        started.append(Fedgs(*arguments))
        return started[-1]

    yield fedgs
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.communicate()


def until(condition: Callable[[], object], patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def token_of(folder: Path) -> str:
    return (folder / ".flower" / "token").read_text()


def local_twin(settings: dict[str, object], output: Path) -> bytes:
    """The generator that the local engine trains with one worker."""
    twin = {"engine": "local", "num_workers": 1, "output": str(output)}
    twin["clients_per_round"] = None
    config, data = resolve(RunConfig(**settings | twin))
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
    monkeypatch.setattr(flower_engine, "LOCK_SECONDS", 0.2)
    with sleeper:
        with pytest.raises(UserError, match=r"another process trains .*; wait"):
            flower_engine.train(folder, lambda metrics: None, threading.Event())
        assert sleeper.poll() is None
        assert processes_of(token) == [sleeper.pid]
        end_processes(token)
        assert processes_of(token) == []
    lock.lock.release()
    assert sleeper.returncode == -signal.SIGTERM


def test_stubborn_process_is_killed_after_the_patience():
    token = secrets.token_hex(16)
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    code += "print(1, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = environment(**{TOKEN_VARIABLE: token})
    with subprocess.Popen([sys.executable, "-c", code], env=env, **pipes) as stubborn:
        assert stubborn.stdout.readline() == b"1\n"
        # It stays a zombie of this process, whose environment is gone, when killed.
        end_processes(token, patience=0.5)
    assert stubborn.returncode == -signal.SIGKILL


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


LAUNCHER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from experiments.launch.flower_engine import _superlink
from fedgs.process import hold_lock

place = Path(sys.argv[1])
lock = hold_lock(place / ".flower" / "launcher.lock", "")
folder = SimpleNamespace(path=place)
with _superlink(folder, sys.argv[2]):
    pass
"""


def test_superlink_of_a_simulation_ends_with_its_launcher_from_the_first_moment(
    tmp_path,
):
    """Flower is not even imported by then, and nobody else would look for it."""
    (tmp_path / ".flower").mkdir()
    token = secrets.token_hex(16)
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), token]
    try:
        with subprocess.Popen(command, env=environment(), cwd=ROOT) as launcher:
            until(lambda: processes_of(token))
            launcher.kill()
        until(lambda: not processes_of(token), patience=20)
        until(lambda: not home_of(token).exists(), patience=5)
    finally:
        end_simulation(token, patience=0)


def test_all_workers_share_a_gpu(tmp_path, monkeypatch):
    """Flower's own arithmetic, on a machine that says it has a GPU."""
    from flwr.simulation.ray_transport import ray_actor

    machine = [{"Resources": {"CPU": 4.0, "GPU": 1.0}}]
    monkeypatch.setattr(ray_actor.ray, "nodes", lambda: machine)
    asked: list[dict[str, float]] = []
    control = SimpleNamespace(start=lambda _, **fields: asked.append(fields))
    for device, workers in (("cpu", 4), ("cuda", 4), ("cuda", 1)):
        settings = {"device": device, "num_workers": workers}
        config = tiny_config(engine="flower", output="unused", **settings)
        folder = SimpleNamespace(config=config, path=tmp_path)
        flower_engine._submit(control, folder, ("module:app", "module:app"))
    of_a_client = [
        {"num_cpus": each["client_resources_num_cpus"]}
        | {"num_gpus": each.get("client_resources_num_gpus", 0.0)}
        for each in asked
    ]
    assert [ray_actor.pool_size_from_resources(each) for each in of_a_client] == [
        4,
        4,
        1,
    ]
    machine[0]["Resources"].pop("GPU")
    with pytest.raises(ValueError, match="ActorPool is empty"):
        ray_actor.pool_size_from_resources(of_a_client[1])


# ------------------------------------------------------------------ with Ray


@pytest.mark.gpu
@pytest.mark.flower
def test_two_workers_that_share_a_gpu_give_what_one_process_gives_there(
    tmp_path, settings, fedgs, cuda
):
    settings |= {"device": cuda, "num_workers": 2, "gpu_fraction": 0.5}
    output = tmp_path / "run"
    code, _, err = fedgs("train", *flags(output=output, **settings)).wait()
    assert (code, err) == (0, ""), (output / "flower.log").read_text()
    settings |= {"engine": "local", "gpu_fraction": 0.0}
    assert fedgs("train", *flags(output=tmp_path / "local", **settings)).wait()[0] == 0
    found, expected = (
        read_tensors(folder / "generator.safetensors")[0]
        for folder in (output, tmp_path / "local")
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.flower
def test_flower_with_two_workers_gives_the_local_bytes(tmp_path, settings, fedgs):
    output = tmp_path / "run"
    command = fedgs("train", *flags(output=output, **settings))
    command.until(lambda: (output / ".flower" / "token").exists())
    token = token_of(output)
    code, out, err = command.wait()
    assert (code, err) == (0, ""), (output / "flower.log").read_text()
    assert generator(output) == local_twin(settings, tmp_path / "local")
    config = RunFolder.open(output).config
    page = gs_wgan.train(config, load_data(config)).generator.state_dict()
    found, _ = read_tensors(output / "generator.safetensors")
    torch.testing.assert_close(found, dict(page), rtol=0, atol=1e-5)
    assert "6 clients on 3 nodes, 6 per round, 3 rounds" in out
    assert "round 3 of 3" in out
    assert f"run folder   {output}" in out
    assert Ledger.read(output / "ledger.jsonl").length == 3
    made = sorted(path.name for path in (output / "private").iterdir())
    assert made == ["node-00000", "node-00001", "node-00002"]
    assert processes_of(token) == []
    assert not (Path(tempfile.gettempdir()) / f"fedgs-{token[:8]}").exists()


def test_a_simulation_whose_ray_started_too_late_is_started_again(
    tmp_path, monkeypatch
):
    config = tiny_config(engine="flower", output=str(tmp_path / "run"))
    folder = RunFolder.create(config)
    logs = [f"Exception: The current {flower_engine.RAY_IS_LATE}.", "another reason"]

    def simulate(*_: object) -> tuple[str, str, str]:
        return "finished:failed", "", logs.pop(0)

    monkeypatch.setattr(flower_engine, "_simulate", simulate)
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
def test_killed_run_resumes_and_leaves_no_process(tmp_path, settings, fedgs):
    output = tmp_path / "run"
    settings |= {"num_rounds": 120, "checkpoint_every": 7}
    command = fedgs("train", *flags(output=output, **settings))
    command.until(lambda: rounds_done(output) >= 20)
    os.killpg(command.process.pid, signal.SIGKILL)
    assert command.wait()[0] == -signal.SIGKILL
    token = token_of(output)
    sent = Ledger.read(output / "ledger.jsonl").length
    assert 20 <= sent < 120
    code, _, err = fedgs("resume", output).wait()
    assert (code, err) == (0, ""), (output / "flower.log").read_text()
    assert generator(output) == local_twin(settings, tmp_path / "local")
    assert Ledger.read(output / "ledger.jsonl").length >= 120
    assert processes_of(token) == []
    assert not (Path(tempfile.gettempdir()) / f"fedgs-{token[:8]}").exists()


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.1, 0.5, 1, 2, 4, 8])
def test_nothing_is_left_of_a_run_that_is_killed_while_it_starts(
    tmp_path, settings, fedgs, seconds
):
    output, settings = tmp_path / "run", settings | {"num_rounds": 2000}
    command = fedgs("train", *flags(output=output, **settings))
    command.until(lambda: (output / ".flower" / "token").exists())
    token = token_of(output)
    command.until(lambda: processes_of(token))
    time.sleep(seconds)
    command.process.kill()
    try:
        until(lambda: not processes_of(token), patience=20)
        until(lambda: not home_of(token).exists(), patience=5)
    finally:
        end_simulation(token, patience=0)


@pytest.mark.flower
@pytest.mark.slow
def test_terminated_run_has_a_checkpoint_and_resumes(tmp_path, settings, fedgs):
    output = tmp_path / "run"
    settings |= {"num_rounds": 120, "checkpoint_every": 1000}
    command = fedgs("train", *flags(output=output, **settings))
    command.until(lambda: rounds_done(output) >= 5)
    token = token_of(output)
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.wait()
    assert code == 1
    assert "\nstopped after round " in err
    assert f"continue with: fedgs resume {output}" in err
    assert processes_of(token) == []
    commit = json.loads((output / "checkpoint" / "checkpoint.json").read_text())
    assert 5 <= commit["round"] == rounds_done(output) < 120
    assert fedgs("resume", output).wait()[0] == 0
    assert generator(output) == local_twin(settings, tmp_path / "local")
    assert Ledger.read(output / "ledger.jsonl").length == 120  # nothing repeated


@pytest.fixture
def private_flower(tmp_path) -> Iterator[dict[str, str]]:
    """An environment in which a plain `flwr` touches nothing of the user's."""
    token = secrets.token_hex(16)
    short = tempfile.mkdtemp(prefix="fedgs-")  # Ray makes sockets in it
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bin_folder = str(Path(sys.executable).parent)
    try:
        yield environment(
            HOME=str(tmp_path),
            FLWR_HOME=str(tmp_path / "flwr"),
            PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            RAY_TMPDIR=short,
            FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(port),
            FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
            **{TOKEN_VARIABLE: token},
        )
    finally:
        end_processes(token)
        shutil.rmtree(short, ignore_errors=True)


@pytest.mark.flower
@pytest.mark.slow
def test_plain_flwr_run_trains_with_the_settings_of_pyproject(tmp_path, private_flower):
    file = tmp_path / "more.toml"
    file.write_text("generator_dim = 4\nnum_rounds = 9\nnoise_seed = 1\n")
    overrides = {"num_clients": 6, "clients_per_node": 3, "image_size": 16}
    overrides |= {"num_rounds": 3, "config": f"'{file}'"}
    pairs = [f"{name}={value}" for name, value in overrides.items()]
    command = ["flwr", "run", ".", "--stream", "--run-config"]
    command.append(" ".join([*pairs, "output='plain'"]))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=private_flower,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    folder = tmp_path / "fedgs-runs" / "plain"
    assert folder.exists(), done.stdout + done.stderr
    result = json.loads((folder / ".flower" / "result.json").read_text())
    assert result == {"status": "completed", "message": ""}
    config = RunFolder.open(folder).config
    assert (config.data, config.num_nodes, config.engine) == ("digits", 2, "flower")
    assert (config.generator_dim, config.stages) == (4, recipe("demo").stages)
    assert Ledger.read(folder / "ledger.jsonl").length == config.num_rounds == 3
    twin = {"engine": "local", "num_workers": 1, "output": str(tmp_path / "local")}
    alone = RunFolder.create(ResolvedConfig.from_flat(twin, config))
    train(alone)
    assert generator(folder) == generator(alone.path)
