"""Samples as files: some at a time, whole or not at all, and only where they fit."""

import weakref
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fedgs
from command_line import refused
from fedgs.runs import sample, sample_files
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample_files import Samples
from refusals import assert_refused
from report_folders import make_run

FORMS = ("npz", "png", "folder", "hf")
PUBLISHABLE = {"noise_multiplier": 0.5}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("trained") / "run", **PUBLISHABLE)


@pytest.fixture
def free(monkeypatch):
    """Says of every disk, and of memory, that so many bytes are free."""

    def free(disk: float = 1e15, memory: float = 1e15) -> None:
        usage = namedtuple("usage", ("total", "used", "free"))(1e15, 0, disk)
        monkeypatch.setattr(sample_files.shutil, "disk_usage", lambda path: usage)
        there = SimpleNamespace(available=memory)
        monkeypatch.setattr(sample_files.psutil, "virtual_memory", lambda: there)

    return free


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# ------------------------------------------------------------------ some at a time


@pytest.mark.parametrize("count", [1, 9, 16, 23])
@pytest.mark.parametrize("latent", ["bernoulli", "uniform", "normal"])
def test_samples_are_the_same_however_many_are_drawn_at_once(
    tmp_path, monkeypatch, count, latent
):
    folder = RunFolder.open(make_run(tmp_path / "run", latent=latent))
    monkeypatch.setattr(sample, "SAMPLE_BATCH", 8)
    few = sample.draw_samples(folder, count, seed=3)
    assert few.images.shape == (count, 1, 16, 16)  # drawn now
    monkeypatch.setattr(sample, "SAMPLE_BATCH", 1000)
    all_at_once = sample.draw_samples(folder, count, seed=3)
    assert (few.labels == all_at_once.labels).all()
    # A convolution may round in another way where its batch is smaller.
    assert np.abs(few.images - all_at_once.images).max() < 1e-6


@pytest.mark.parametrize("form", ["npz", "folder", "hf"])
def test_memory_holds_few_images_at_a_time(tmp_path, form):
    alive = list[weakref.ref]()

    def parts() -> Iterator[np.ndarray]:
        for _ in range(20):
            assert sum(part() is not None for part in alive) <= 2
            images = np.full((5, 1, 4, 4), 0.5, np.float32)
            alive.append(weakref.ref(images))
            yield images

    labels = np.arange(100, dtype=np.int64) % 2
    Samples(labels, ("a", "b"), (1, 4, 4), parts).write(f"{form}:{tmp_path}/out")
    assert len(alive) == 20


def test_an_npz_is_what_numpy_would_write(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "SAMPLE_BATCH", 8)
    drawn = fedgs.load(run).sample(21, seed=4)
    drawn.write(tmp_path / "a.npz")
    np.savez_compressed(tmp_path / "b.npz", images=drawn.images, labels=drawn.labels)
    with np.load(tmp_path / "a.npz") as own, np.load(tmp_path / "b.npz") as other:
        assert [*own] == [*other]
        for name in own:
            assert own[name].dtype == other[name].dtype
            assert (own[name] == other[name]).all()


def test_hugging_face_reads_all_parts(run, tmp_path, hub_cache, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(sample, "SAMPLE_BATCH", 8)
    drawn = fedgs.load(run).sample(21)
    drawn.write(f"hf:{tmp_path}/out")
    found = datasets.load_dataset(str(tmp_path / "out"), split="train")
    assert found["label"] == drawn.labels.tolist()
    assert found.features == drawn.as_hugging_face().features
    pictures = np.array([np.asarray(picture) for picture in found["image"]])
    assert np.abs(pictures / 255 - drawn.images[:, 0]).max() <= 1 / 255


# ------------------------------------------------------------------ where they fit

TOO_MANY = "10000000000"
LARGE = [["-n", TOO_MANY], ["--per-class", TOO_MANY]]
LARGE += [["--per-class", "9999999", "--labels", "0,1,2"]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("words", LARGE, ids=" ".join)
def test_more_than_anybody_can_write_is_refused(run, fedgs, tmp_path, form, words):
    done = fedgs("sample", run, *words, "-o", f"{form}:{tmp_path}/out")
    refused(done, "count = [0-9]+:")
    assert names(tmp_path) == []


def test_labels_of_any_size_are_refused_in_a_line(run, fedgs, tmp_path):
    for labels in ("9" * 30, "-1", ",".join(["3"] * 5000), "9" * 5000):
        done = fedgs("sample", run, "--labels", labels, "-o", tmp_path / "s.npz")
        assert len(refused(done, "labels = ")) < 6000
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["evaluate", "RUN", "-n", TOO_MANY],
            "count = .*:",
        ),
        (["audit", "RUN", "--trials", TOO_MANY], "trials = .* at most 10000000"),
        (
            ["publish", "RUN", "-o", "p", "-n", TOO_MANY],
            "count = .* from 1 to 10000000",
        ),
    ],
)
def test_counts_of_other_commands_are_bounded(run, fedgs, tmp_path, words, named):
    words = [run if word == "RUN" else word for word in words]
    refused(fedgs(*words), named)
    assert not (run / "audit").exists()


@pytest.mark.parametrize(
    ("form", "bytes"), [("npz", 1024), ("folder", 4096), ("hf", 256)]
)
def test_what_does_not_fit_on_the_disk_is_refused_before_it_is_drawn(
    run, fedgs, tmp_path, monkeypatch, free, form, bytes
):
    def drawn(*_: object) -> None:
        raise AssertionError("drawn")

    with monkeypatch.context() as patched:
        patched.setattr(sample, "sample_latents", drawn)
        free(disk=2_000_000 * bytes - 1)
        words = ["sample", run, "-n", 2_000_000, "-o", f"{form}:{tmp_path}/out"]
        refused(fedgs(*words), ".*: 2000000 images need up to .* GB of disk, .* are")
        assert names(tmp_path) == []
    free(disk=9 * bytes)
    assert fedgs("sample", run, "-n", 9, *words[4:])[0] == 0


def test_a_grid_shows_no_more_than_a_picture_can(run, fedgs, tmp_path):
    done = fedgs("sample", run, "-n", 10_001, "-o", tmp_path / "s.png")
    refused(done, ".*: a grid of 10001 images is too large; give npz:PATH")


def test_what_memory_cannot_hold_is_refused_in_a_program(run, free):
    free(memory=1e6)
    words = r"count = 2000: .* about 0.0 GB of memory, .*, or write them to files"
    assert_refused(words, getattr, fedgs.load(run).sample(2000), "images")
    assert len(fedgs.load(run).sample(20)) == 20


# ------------------------------------------------------------------ two at once


@pytest.mark.parametrize("form", FORMS)
def test_two_that_write_one_output_do_not_mix(run, tmp_path, monkeypatch, form):
    """The other one has finished in between: what it wrote stays as it is."""
    output = f"{form}:{tmp_path}/out"
    ours, theirs = (fedgs.load(run).sample(9, seed=seed) for seed in (1, 2))
    new_folder, replacing = sample_files.new_folder, sample_files.replacing
    before = list[dict[str, bytes]]()

    def first_theirs(original):
        def wrapped(path: Path):
            monkeypatch.setattr(sample_files, "new_folder", new_folder)
            monkeypatch.setattr(sample_files, "replacing", replacing)
            staged = original(path)
            # Another process has another temporary name.
            with monkeypatch.context() as patched:
                patched.setattr("os.getpid", lambda: 1)
                theirs.write(output)
            before.append(contents(tmp_path))
            return staged

        return wrapped

    monkeypatch.setattr(sample_files, "new_folder", first_theirs(new_folder))
    monkeypatch.setattr(sample_files, "replacing", first_theirs(replacing))
    words = "exists already; choose another name|cannot be written .Directory not empty"
    assert_refused(words, ours.write, output)
    assert [contents(tmp_path)] == before


def contents(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}
