"""What all tests share: an offline Flower, one thread, the command line, the data."""

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from jaxtyping import install_import_hook

# Every call in these modules is checked against the shapes of its annotations. Messages
# and codec are not among them: they check by themselves what a hostile side sends.
CHECKED = ["fedgs.mechanism", "fedgs.gan", "fedgs.gs_wgan", "fedgs.round.local"]
CHECKED += [f"fedgs.round.{name}" for name in ("node", "round", "training")]
install_import_hook(CHECKED, "shape_checks.check_shapes")
# The same examples in every run: what breaks a property fails where it was changed. No
# deadline: on a busy machine a test takes as long as it takes.
hypothesis.settings.register_profile(
    "same", derandomize=True, database=None, deadline=None
)
hypothesis.settings.load_profile("same")

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers of pytest-xdist and processes that tests start share the cores already:
    # threads of linear algebra, which wait busily, cost a seventh of the whole suite.
    "OMP_NUM_THREADS": "1",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the golden trajectories instead of comparing with them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Sets the environment before a test module can import Flower or Ray."""
    flower_home = tempfile.mkdtemp(prefix="fedgs-tests-")
    os.environ.update(ENVIRONMENT, FLWR_HOME=flower_home)
    config.add_cleanup(lambda: shutil.rmtree(flower_home, ignore_errors=True))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Keeps the last bits of sums independent of the machine's number of cores."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")  # before any module trains
def _short_fits() -> Iterator[None]:
    """Ten steps of the refiner's 3,000, which take minutes; with any noise."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"STEPS": 10, "FOR_LARGE": 1e9, "FOR_ALL": 1e9}.items():
            patched.setattr(f"fedgs.gan.refinement.{name}", value)
        yield


@pytest.fixture(autouse=True)
def _batched_calls(request: pytest.FixtureRequest, monkeypatch) -> None:
    """Has a test with `stacking` or `chunk_size` train discriminators in this way."""
    if "stacking" in request.fixturenames:
        is_stacked = request.getfixturevalue("stacking") == "stacked"
        name = "fedgs.config.method_settings.STACKED_UP_TO"
        monkeypatch.setattr(name, 10_000 if is_stacked else 0)
    if "chunk_size" in request.fixturenames:
        size = request.getfixturevalue("chunk_size")
        monkeypatch.setattr("fedgs.gan.discriminators.CHUNK_SIZE", size)


@pytest.fixture
def global_state_is_kept() -> Iterator[None]:
    """Fails a test whose calls move a random state of the process."""
    from tiny import global_state

    before = global_state()
    yield
    assert global_state() == before


@pytest.fixture(scope="session")
def exit_code() -> Callable[..., int]:
    """Runs the command line in this process and returns its exit code."""
    from fedgs.app.cli.main import main

    def exit_code(*arguments: object) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["fedgs", *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                main()
        return int(ended.value.code or 0)

    return exit_code


@pytest.fixture
def fedgs(exit_code, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: code, standard output and error."""

    def fedgs(*arguments: object) -> tuple[int, str, str]:
        code = exit_code(*arguments)
        found = capsys.readouterr()
        return code, found.out, found.err

    return fedgs


@contextlib.contextmanager
def coarse(module: Any, cached: Any, **values: float) -> Iterator[None]:
    """Other constants of a module for a while; what it keeps is of neither."""
    with pytest.MonkeyPatch.context() as patch:
        cached.cache_clear()
        for name, value in values.items():
            patch.setattr(module, name, value)
        yield
        cached.cache_clear()


@pytest.fixture
def coarse_grid() -> Iterator[None]:
    """A grid that searches are quick on; amplified figures are a little larger."""
    from fedgs.privacy import amplification as module

    with coarse(module, module._composed, _RESOLUTION=3e-3):
        yield


@pytest.fixture
def coarse_poisson() -> Iterator[None]:
    """The same for releases of Poisson batches."""
    from fedgs.privacy import poisson as module

    with coarse(module, module._composed_epsilon, _RESOLUTION=3e-2, _TOLERANCE=1e-2):
        yield


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the Hugging Face cache inside the tests' folder."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("flwr_datasets")
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


@pytest.fixture
def server_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as one that Flower has started, with no worker of another test."""
    from flwr.supercore.task_identity import TaskIdentity

    from clients import node_cache

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    node_cache.workers.clear()
    yield
    node_cache.workers.clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Waiting costs the server no time: a sleep moves its clock, nothing else does."""
    from deployed_grid import EPOCH
    from server import messenger, nodes, progress, roll_call

    def sleep(seconds: float) -> None:
        clock.now += seconds

    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=sleep)
    clock.time = lambda: EPOCH + clock.now
    for module in (messenger, nodes, progress, roll_call):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(
        roll_call, "ROLL_CALL_SECONDS", 60.0
    )  # it looks ten times a second
    return clock


@pytest.fixture
def log() -> Iterator[list[str]]:
    """The lines that Flower logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("flwr").addHandler(handler)
    yield lines
    logging.getLogger("flwr").removeHandler(handler)


@pytest.fixture
def create(tmp_path: Path, server_process: None, clock: object) -> Callable[..., Any]:
    """Makes run folders of a simulation, by name and settings."""
    from fedgs.runs.run_folder import RunFolder
    from simulated_grid import SHORT
    from tiny import tiny_config, write_tiny_npz

    own = {"data": write_tiny_npz(tmp_path / "tiny.npz"), "round_timeout": 1.0}

    def create(name: str, **settings: object) -> RunFolder:
        output = str(tmp_path / name)
        config = tiny_config(output=output, defaults=SHORT | own, **settings)
        return RunFolder.create(config)

    return create


@pytest.fixture
def deploy(tmp_path: Path, server_process: None, clock: object) -> Callable[..., Any]:
    """Makes deployments without a network, by name, mode and settings."""
    from deployed_grid import Deployment
    from simulated_grid import MODES

    def deploy(name: str = "run", mode: str = "with releases", **settings: object):
        return Deployment(tmp_path, name, **MODES[mode] | settings)

    return deploy


@pytest.fixture
def undisturbed(tmp_path: Path) -> Callable[..., str]:
    """The generator of the local engine with the settings of a deployment."""
    from runs import undisturbed
    from tiny import write_tiny_npz

    data = write_tiny_npz(tmp_path / "all.npz")
    return lambda run: undisturbed(run.folder.config, data, run.root / "local")


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Any]:
    """Real processes: a server and two clients with certificates; nothing runs yet."""
    from live import Live, prepare

    live = Live(prepare(tmp_path))
    live.certify()
    yield live
    live.machines.close()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU that computes in float32, so that its numbers are those of the CPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for part in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(part, "allow_tf32", False)
    return "cuda"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the real data sets, in torchvision's layout."""
    folder = os.environ.get("FEDGS_DATA_DIR", "")
    if not (folder and Path(folder).is_dir()):
        pytest.skip(f"needs real data: FEDGS_DATA_DIR={folder!r} is no directory")
    return Path(folder)


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """True under `make golden`: write the trajectory instead of comparing."""
    return bool(request.config.getoption("--update-golden"))
