"""Damaged files: whatever a file holds, it is read or refused in one `UserError`.

Every kind of file that somebody hands over is written small, then cut, overwritten and
spliced at many places, the same ones in every run.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from PIL import Image

import femnist_files
import loading
from baselines import small_run
from experiments.baselines.baseline_run import open_run
from fedgs import deployment
from fedgs.app.report.page import report
from fedgs.cohorts.cohort_file import read_cohort
from fedgs.config.recipes import settings_in
from fedgs.errors import UserError
from fedgs.evaluation.cache import read_cached
from fedgs.files import read_json, read_json_lines, write_json, write_tensors
from fedgs.methods import new_state
from fedgs.privacy.client_limits import Limits
from fedgs.runs.run_folder import RunFolder, read_state, sealed
from fedgs.runs.sample import load_generator
from report_folders import make_diagnosed, make_run
from runs import tiny_event
from tiny import tiny_config

Made = tuple[Path, Callable[[], Any]]  # a file, and what reads it
TIMES = 300  # that each is damaged; a tenth of it where a read takes longer
MOST_KEYS = 40  # of JSON that get another name
SLOW = {"parquet", "diagnosis", "picture of a round", "audit"}
SLOW |= {"scores"}
PAGES = itertools.count()  # names of reports
GREY = np.random.default_rng(0).integers(256, size=(4, 28, 28), dtype=np.uint8)
LABELS, OWNERS = np.array([0, 1, 2, 1]), np.array(["ann", "ann", "bob", "bob"])
pytestmark = [
    pytest.mark.usefixtures("hub_cache"),
    pytest.mark.filterwarnings("ignore::fedgs.data.records.DataWarning"),
]


def loaded(data: str, **settings: object) -> Callable[[], Any]:
    return lambda: loading.load(data, **settings)


def npz(root: Path, save: Callable[..., None] = np.savez) -> Made:
    path = root / "toy.npz"
    save(path, images=GREY, labels=LABELS, clients=OWNERS)
    return path, loaded(f"npz:{path}")


def compressed_npz(root: Path) -> Made:
    return npz(root, np.savez_compressed)


def picture(kind: str) -> Callable[[Path], Made]:
    def make(root: Path) -> Made:
        path = root / "ann" / "0" / "a.jpg"
        path.parent.mkdir(parents=True)
        Image.fromarray(GREY[0]).convert("RGB").save(path, kind)
        return path, loaded(f"folder:{root}", image_channels=3)

    return make


def hdf5(root: Path) -> Made:
    data = femnist_files.write_hdf5(root / "x.h5", compression="gzip")
    return root / "x.h5", loaded(data)


def leaf(root: Path) -> Made:
    return root / "all_data_0.json", loaded(femnist_files.write_leaf(root))


def fresh(root: Path, data: str, **settings: object) -> Callable[[], Any]:
    """Reads with an empty cache: else `datasets` does not look at the file again."""
    caches = iter(range(10**6))
    return lambda: loading.load(
        data, data_dir=str(root / "caches" / str(next(caches))), **settings
    )


def parquet(root: Path) -> Made:
    data = femnist_files.write_hub(root / "hub")
    (path,) = (root / "hub").rglob("*.parquet")
    return path, fresh(root, data)


def saved_to_disk(name: str) -> Callable[[Path], Made]:
    def make(root: Path) -> Made:
        write_splits(root / "saved")
        return root / "saved" / name, loaded(f"hf:{root / 'saved'}?client=owner")

    return make


def write_splits(root: Path, splits: tuple[str, ...] = ("train", "test")) -> None:
    """Writes what `datasets.DatasetDict.save_to_disk` does."""
    import datasets

    rows = {"image": [*map(Image.fromarray, GREY)], "owner": OWNERS, "label": LABELS}
    kinds = {"image": datasets.Image(), "owner": datasets.Value("string")}
    kinds["label"] = datasets.ClassLabel(names=["a", "b", "c"])
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    if splits:
        table = datasets.DatasetDict(dict.fromkeys(splits, table))
    table.save_to_disk(root)


def idx(root: Path) -> Made:
    loading.write_mnist(root, GREY, LABELS)
    path = root / "MNIST/raw/train-images-idx3-ubyte"
    return path, loaded("mnist", data_dir=str(root), num_clients=2)


def writers(root: Path) -> Made:
    loading.write_mnist(root, GREY, LABELS)
    loading.write_writers(root, LABELS, np.array([5, 5, 6, 6]))
    path = root / "QMNIST/raw/qmnist-train-labels-idx2-int"
    return path, loaded("mnist-by-writer", data_dir=str(root))


def of_text(text: str, read: Callable[[Path], Any]) -> Callable[[Path], Made]:
    def make(root: Path) -> Made:
        path = root / "a.txt"
        path.write_text(text)
        return path, lambda: read(path)

    return make


def private_key(root: Path) -> Made:
    key = ec.generate_private_key(ec.SECP384R1())
    kind = serialization.PrivateFormat.OpenSSH
    how = serialization.Encoding.PEM, kind, serialization.NoEncryption()
    (root / "a.key").write_bytes(key.private_bytes(*how))
    return root / "a.key", lambda: deployment.private_key("key", root / "a.key")


def public_key(root: Path) -> Made:
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    how = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    (root / "a.pub").write_bytes(key.public_bytes(*how))
    return root / "a.pub", lambda: deployment.public_key("peers", root / "a.pub")


def run_file(name: str) -> Callable[[Path], Made]:
    """A file of a finished run, which is opened, checked and drawn from."""

    def make(root: Path) -> Made:
        folder = RunFolder.create(tiny_config(output=str(root / "run")))
        with contextlib.closing(folder.ledger()) as ledger:
            ledger.append(tiny_event(1))
            folder.append_metrics({"round": 1, "events": 1})
            networks = new_state(folder.config)
            tensors = networks.generator.state_dict(), networks.ema.state_dict()
            folder.save_generator(*tensors, ledger)

        def read() -> None:
            opened = RunFolder.open(folder.path)
            opened.read_ledger()
            load_generator(opened)

        return folder.path / name, read

    return make


def shown(name: str, content: Any = None) -> Callable[[Path], Made]:
    """A file that the report of a run shows."""

    def make(root: Path) -> Made:
        path = make_run(root / "run") / name
        if content is not None:
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content) + "\n")
        return path, lambda: report([root / "run"], root / f"{next(PAGES)}.html")

    return make


def diagnosis(root: Path) -> Made:
    path = make_diagnosed(root / "run") / "diagnosis.json"
    return path, lambda: report([root / "run"], root / f"{next(PAGES)}.html")


def baseline(root: Path) -> Made:
    run, _ = small_run("dp-merf", root / "run")
    return root / "run" / "baseline.json", lambda: open_run(run.folder.path)


def node_state(root: Path) -> Made:
    tensors, metadata = {"a": torch.arange(6.0)}, {"digest": "1"}
    path = root / "round-0000001.safetensors"
    write_tensors(path, sealed(tensors, metadata), metadata)
    return path, lambda: read_state(path)


def cached(root: Path) -> Made:
    write_json(root / "a.json", {"accuracy": 0.5})
    return root / "a.json", lambda: read_cached("a")


LIMITS = 'client_epsilon = 1\ndelta = 1e-5\nrelation = "zero-out"\nmax_fakes = 3\n'
COHORT = "# caf\u00e9\n# selection: not private\nann\nbob\n"
CONFIG = 'num_rounds = 5\ndata = "caf\u00e9"\n[gs-wgan]\nwarm_start_rounds = 2\n'
FINDING = {"attack": "A canary", "adversary": "release", "relation": "zero-out"}
FINDING |= {"lower_bound": 0.5, "level": 0.95, "trials": 1000}
AUDIT = {"findings": [FINDING], "holds": True}
READERS: dict[str, Callable[[Path], Made]] = {
    **{make.__name__: make for make in (npz, compressed_npz, hdf5, leaf, parquet)},
    **{make.__name__: make for make in (idx, writers, private_key, public_key)},
    **{make.__name__: make for make in (node_state, cached, baseline)},
    **{kind: picture(kind) for kind in ("PNG", "JPEG", "AVIF", "WEBP", "GIF", "TIFF")},
    "arrow": saved_to_disk("train/data-00000-of-00001.arrow"),
    "its state": saved_to_disk("train/state.json"),
    "its splits": saved_to_disk("dataset_dict.json"),
    "config": of_text(CONFIG, settings_in),
    "limits": of_text(LIMITS, Limits.read),
    "cohort": of_text(COHORT, read_cohort),
    "JSON": of_text('{"a": [1, {"b": "caf\u00e9"}]}', read_json),
    "JSON lines": of_text('{"a": 1}\n{"b": 2}\n', read_json_lines),
    "settings of a run": run_file("config.json"),
    "versions": run_file("versions.json"),
    "ledger": run_file("ledger.jsonl"),
    "length of the ledger": run_file("ledger.json"),
    "metrics": run_file("metrics.jsonl"),
    "generator": run_file("generator_ema.safetensors"),
    "diagnosis": diagnosis,
    "picture of a round": shown("samples/round-0000003.png"),
    "audit": shown("audit/report.json", AUDIT),
    "scores": shown("evaluations.jsonl", {"data": "digits", "fid": 3.0}),
}


def damages(whole: bytes, times: int) -> Iterator[bytes]:
    """Yields contents: of other kinds, of other keys, cut, overwritten, spliced."""
    yield from (b"", b"\0" * len(whole), b"[" * 100_000, b"{}", b"[]", b"\xff\xfe")
    for key in [*re.finditer(rb'"(\w+)":', whole)][:MOST_KEYS]:  # of JSON
        yield whole[: key.start(1)] + b"_" + whole[key.start(1) :]
    rng = np.random.default_rng(0)
    for number in range(times):
        # Half of them in the header, where most of a format is.
        most = len(whole) if number % 2 else min(200, len(whole))
        place, put = int(rng.integers(most)), rng.bytes(int(rng.integers(1, 5)))
        yield (
            whole[:place],
            whole[:place] + put + whole[place + len(put) :],
            whole[:place] + put + whole[place + int(rng.integers(9)) :],
        )[number % 3]


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDGS_CACHE_DIR", str(tmp_path))
    path, read = READERS[name](tmp_path)
    whole = path.read_bytes()
    read()
    refused: list[str] = []
    times = TIMES // 10 if name in SLOW else TIMES
    for content in damages(whole, times):
        path.write_bytes(content)
        try:
            read()
        except UserError as error:
            refused.append(str(error))
    assert refused or name == "cached"  # a torn cache is none
    # The second line says what to do.
    assert max((text.count("\n") for text in refused), default=0) <= 1
