"""Training from Python: forms of data and samples, the same run folder, resuming."""

import ast
import math
import re
import shutil
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset
from torchvision.datasets import ImageFolder

import fedgs
import runs
from fedgs.app.commands import train as command
from fedgs.config.recipes import configure
from fedgs.runs import epsilons
from refusals import assert_refused
from tiny import FULL_PARTICIPATION, SETTINGS, tiny_config, tiny_data, write_tiny_npz

TINY = SETTINGS | FULL_PARTICIPATION | {"num_rounds": 2}
OPEN = ("data", "image_size", "num_classes", "num_clients", "clients_per_round")
SETTINGS_GIVEN = {n: v for n, v in TINY.items() if n not in OPEN}


DATA = tiny_data(tiny_config())
OWNERS = np.repeat(range(6), [len(records) for records in DATA.client_records])
IMAGES, LABELS, OWNERS = GIVEN = DATA.images, DATA.labels, OWNERS
SHORT = {"num_rounds": 1, "warm_start_rounds": 0}


class Triples(Dataset):
    """A torch Dataset whose third element says whose an image is."""

    def __getitem__(self, index: int) -> tuple:
        return Image.fromarray(IMAGES[index, 0]), LABELS[index], str(OWNERS[index])

    def __len__(self) -> int:
        return len(LABELS)


def hugging_face() -> datasets.Dataset:
    kinds = {"img": datasets.Image(), "y": datasets.ClassLabel(num_classes=3)}
    kinds["writer"] = datasets.Value("int64")
    pictures = [Image.fromarray(image[0]) for image in IMAGES]
    columns = {"img": pictures, "y": LABELS, "writer": OWNERS}
    return datasets.Dataset.from_dict(columns, datasets.Features(kinds))


def owners_with(gap: float | None) -> list[object]:
    """Owners as a table has them, of which one is missing."""
    owners: list[object] = [f"p{owner}" for owner in OWNERS]
    owners[2] = gap
    return owners


def of_palette(pixels: np.ndarray) -> Image.Image:
    """The same picture, whose stored numbers are those of a palette from white on."""
    made = Image.fromarray(255 - pixels).convert("P")
    made.putpalette([255 - grey for grey in range(256) for _ in "RGB"])
    return made


FORMS = {
    "floats": lambda: (IMAGES[:, 0] / 255, LABELS, OWNERS),
    "strings as objects": lambda: (IMAGES, LABELS, OWNERS.astype(str).astype(object)),
    "torch pairs": lambda: (
        TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS)),
        None,
        OWNERS,
    ),
    "torch triples of pictures": lambda: (Triples(),),
    "a list of pictures": lambda: (
        [Image.fromarray(image[0]) for image in IMAGES],
        LABELS,
        [str(owner) for owner in OWNERS],
    ),
    "pictures of a palette": lambda: (
        [of_palette(image[0]) for image in IMAGES],
        LABELS,
        OWNERS,
    ),
    "Hugging Face": lambda: (hugging_face(), None, "writer"),
}


def train(path: Path, *given: object, **settings: object) -> fedgs.TrainingRun:
    own = {"recipe": "gs-wgan"} | SETTINGS_GIVEN
    return fedgs.train(*given, output=path, **own | settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> fedgs.TrainingRun:
    return train(tmp_path_factory.mktemp("library") / "run", IMAGES, LABELS, OWNERS)


def generator(run: fedgs.TrainingRun) -> str:
    return runs.generator(run.path)


# ------------------------------------------------------------------ training


def test_run_has_the_bytes_of_the_command(tmp_path, run):
    data = write_tiny_npz(tmp_path / "tiny.npz")
    given = {"data": data, "image_size": 16, "output": str(tmp_path / "run")}
    config = configure("gs-wgan", None, SETTINGS_GIVEN | given)
    command.train(config, {})
    assert runs.generator(tmp_path / "run") == generator(run)
    assert fedgs.load(tmp_path / "run").resume().is_finished


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> str:
    """The generator of one round."""
    path = tmp_path_factory.mktemp("short") / "run"
    return generator(train(path, *GIVEN, **SHORT))


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_data_give_the_same_clients(tmp_path, short, form):
    torch.set_num_threads(2)  # which are the caller's, and stay
    found = train(tmp_path / "run", *FORMS[form](), **SHORT)
    assert torch.get_num_threads() == 2
    assert (found.config.num_clients, found.config.num_classes) == (6, 3)
    assert generator(found) == short


def test_a_light_background_is_inverted_in_a_copy(tmp_path, short):
    light = 255 - IMAGES
    given = {"background": "light"} | SHORT
    assert generator(train(tmp_path / "a", light, LABELS, OWNERS, **given)) == short
    assert (light == 255 - IMAGES).all()


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        (GIVEN, {"num_round": 3}, "num_round:"),
        (GIVEN, {"data": "digits"}, "data = 'digits'"),
        (GIVEN, {"engine": "flower"}, "engine = flower"),
        ((IMAGES, LABELS), {}, "this partition; add 'clients', the owner"),
        ((hugging_face(), "z", "writer"), {}, "not 'z', 'writer'"),
        ((TensorDataset(*[torch.zeros(2)] * 4),), {}, "items of 4 values"),
        ((None, LABELS, OWNERS), {}, "images is unset: labels or clients"),
        (GIVEN, {"recipe": 3}, "recipe = 3: give"),
        ((IMAGES, LABELS, owners_with(math.nan)), {}, "clients: image 2 has no value"),
        ((IMAGES, LABELS, owners_with(None)), {}, "clients: image 2 has no value"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path, given, settings, message
):
    words, run = re.escape(message), tmp_path / "run"
    assert_refused(words, train, run, *given, **settings)
    assert list(tmp_path.iterdir()) == []
    run.mkdir()
    assert_refused(f"^output = {run}: ", train, run, *GIVEN)


# ------------------------------------------------------------------ resuming


def stopped(path: Path) -> fedgs.TrainingRun:
    """A run that was stopped after its first round."""
    stop, rounds = threading.Event(), list[int]()

    def progress(metrics: dict) -> None:
        rounds.append(metrics["round"])
        stop.set()

    how = {"output": path, "progress": progress, "stop": stop}
    how |= {"recipe": "gs-wgan"}
    run = fedgs.train(*GIVEN, **SETTINGS_GIVEN, **how)
    assert (rounds, run.is_finished) == ([1], False)
    return run


def test_another_process_must_give_the_images_again(tmp_path, run):
    path = stopped(tmp_path / "run").path
    assert fedgs.load(path).config.data == "given"
    words = r"data = 'given'.*fedgs\.load\(RUN\)\.resume"
    assert_refused(words, command.resume, path)
    assert_refused("data = 'given'", fedgs.load(path).resume)
    few = [part[OWNERS < 5] for part in GIVEN]
    assert_refused("num_clients = 6:", fedgs.load(path).resume, *few)
    found = fedgs.load(path).resume(IMAGES, LABELS, OWNERS)
    assert generator(found) == generator(run)
    paths = [run.path, path]
    assert_refused("data = given", epsilons.of_runs, paths, {})
    assert epsilons.of_runs(paths, {}, same_clients=True)


ONE_ROUND = fedgs.epsilon_from_mu(2.0, 1e-5)  # zero-out: sqrt(B) C / noise_std = 2


def test_spent_budget_ends_a_run_as_planned(tmp_path):
    settings = {"target_epsilon": 1.1 * ONE_ROUND, "relation": "zero-out"}
    settings |= {"num_rounds": 9, "warm_start_rounds": 0, "node_sizes": "6"}
    run = train(tmp_path / "run", IMAGES, LABELS, OWNERS, **settings)
    assert run.is_finished
    assert len(run.folder.read_ledger().events) == 1


# ------------------------------------------------------------------ what it gives


def test_epsilon_is_the_statements(run):
    unseeded = {row.relation: row.epsilon for row in run.statements(1e-4)}
    assert epsilons.of_run(run.path, 1e-4) == run.statements(1e-4)
    assert set(unseeded) == {"replace-one", "zero-out"}
    assert run.epsilon() == math.inf  # the noise has a seed: nothing is guaranteed
    asked = {"adversary": "server", "relation": "zero-out"}
    assert_refused("adversary, relation = server, zero-out", run.epsilon, **asked)


def test_samples_take_labels_in_turn_and_a_seed(run):
    samples = run.sample(5, labels=[2, 0])
    assert samples.labels.tolist() == [2, 0, 2, 0, 2]
    assert samples.images.shape == (5, 1, 16, 16)
    assert (run.sample(5, labels=[2, 0]).images == samples.images).all()
    assert (run.sample(5, labels=[2, 0], seed=1).images != samples.images).any()
    for labels in (3, [], [-1], 1.5, "1", [[0, 1]]):
        assert_refused("^labels = ", run.sample, 5, labels=labels)
    for count in (2.5, "3", None, True):
        assert_refused("^count = ", run.sample, count)
    assert run.sample(np.int64(2), labels=np.int64(1)).labels.tolist() == [1, 1]
    images = run.generator(torch.zeros(2, 4), torch.tensor([0, 1]))  # a module
    assert images.shape == (2, 1, 16, 16)


def test_samples_in_the_forms_of_other_programs(tmp_path, run):
    samples = run.sample(6, labels=[0, 1])
    image, label = samples.as_dataset()[1]
    row = samples.as_hugging_face()[1]
    assert (image.numpy() == samples.images[1]).all()
    assert label == row["label"] == 1
    written = np.asarray(row["image"]) / 255
    assert np.abs(written - samples.images[1, 0]).max() <= 1 / 255
    samples.write(tmp_path / "folder")
    folder = ImageFolder(tmp_path / "folder")
    assert (folder.classes, folder.targets) == (["0", "1"], [0, 0, 0, 1, 1, 1])


def test_a_run_prints_what_it_is_and_what_may_be_claimed(run, tmp_path):
    said = f"{run.path}: gs-wgan, 6 clients, round 2 of 2, NO GUARANTEE; noise seeded"
    assert str(run) == f"{said}: not private"
    assert_refused("run:", run.publish, tmp_path / "out")


# ------------------------------------------------------------------ the commands


def test_a_run_is_scored_reported_and_forecast(run, tmp_path):
    data = write_tiny_npz(tmp_path / "tiny.npz")
    test = f"npz:{shutil.copy(tmp_path / 'tiny.npz', tmp_path / 'test.npz')}"
    given = {"data": data, "test": test, "metrics": ("cnn",), "output": tmp_path}
    assert_refused("data = 'given'", fedgs.evaluate, run, metrics=("cnn",))
    assert 0 <= fedgs.evaluate(run, count=30, **given)["downstream_cnn_accuracy"] <= 1
    fedgs.report(run, tmp_path / "page.html")
    assert b"fedgs train" in (tmp_path / "page.html").read_bytes()
    unseeded = SETTINGS_GIVEN | {"noise_seed": None, "output": tmp_path / "no"}
    unseeded |= {"recipe": "gs-wgan"}
    found = fedgs.forecast(*GIVEN, **unseeded)
    assert found["rounds"] == "2, each with 6 of 6 clients; engine local"
    assert "epsilon (release, zero-out)" in found
    assert not (tmp_path / "no").exists()
    assert_refused("metric:", fedgs.evaluate, run, metric="cnn")
    for wrong in ([], None):
        assert_refused("^runs? = ", fedgs.report, wrong)
    assert_refused("^run = 3: give the path", fedgs.load, 3)
    # A run that will guarantee nothing says so before it begins.
    seeded = fedgs.forecast(*GIVEN, **(unseeded | {"noise_seed": 1}))
    assert seeded["privacy"] == "none; NO GUARANTEE: noise seeded: not private"
    without = fedgs.forecast(*GIVEN, **(unseeded | {"noise_multiplier": 0.0}))
    assert without["privacy"].endswith("unbounded, because there is no noise")
    assert not any(key.startswith("epsilon") for key in (*seeded, *without))
    counted = fedgs.forecast(*GIVEN, **(unseeded | {"num_rounds": np.int64(2)}))
    assert counted["rounds"].startswith("2, ")


def test_a_bug_is_looked_for(tmp_path):
    owners = np.repeat(np.arange(16), 4)
    images = np.resize(IMAGES[:, 0], (64, 16, 16))
    images[32:] = 255 - images[32:]
    labels = np.arange(64) % 3
    np.savez(tmp_path / "a.npz", images=images, labels=labels, clients=owners)
    asked = {"data": f"npz:{tmp_path}/a.npz", "target_epsilon": 1e3, "seed": 0}
    for name, some in (("healthy", range(8)), ("suspicious", range(8, 16))):
        (tmp_path / name).write_text("\n".join(map(str, some)))
        asked[name] = tmp_path / name
    asked |= {"image_size": 16, "output": tmp_path / "out"}
    found = fedgs.debug(**asked)
    again = fedgs.debug(output=tmp_path / "out")
    assert found["comparisons"] == again["comparisons"]
    assert found["rows"] == ["healthy", "suspicious"]


# ------------------------------------------------------------------ names


def test_public_names_are_those_that_type_checkers_see():
    source = Path(fedgs.__file__).read_text()
    block = next(n for n in ast.parse(source).body if isinstance(n, ast.If))
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        for alias in node.names
    }
    lazily = {n: f"fedgs.{module}.{n}" for n, module in fedgs._MODULES.items()}
    assert seen == lazily
    assert set(dir(fedgs)) == set(seen)
    assert all(getattr(fedgs, name) is not None for name in seen)
