"""`fedgs publish`: what may go out and nothing else, as Hugging Face reads it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import fedgs
from fedgs.files import read_tensors, write_tensors
from fedgs.privacy_label import privacy_label
from fedgs.runs.data_card import (
    CARD,
    LABEL,
    NO_GUARANTEE,
    data_card,
    in_words,
    to_outsiders,
)
from fedgs.runs.publication import publish
from fedgs.runs.run_folder import AVERAGE, GENERATOR, RunFolder
from fedgs.runs.sample import draw_samples
from refusals import assert_refused
from report_folders import make_run

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("card") / "run")


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_folder_is_published_that_others_can_use(run, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, out = RunFolder.open(run), tmp_path / "set"
    label = privacy_label(run)
    publish(folder, out, label, 6)
    found = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert found.column_names == {"train": ["image", "label"]}  # and no label file
    drawn, again = draw_samples(folder, 6), fedgs.load(out).sample(6)
    assert found["train"]["label"] == drawn.labels.tolist()
    assert (drawn.images == again.images).all()  # without the run
    assert np.asarray(found["train"][0]["image"]).shape == (16, 16)
    head = head_of((out / CARD).read_text())
    assert head["configs"][0]["data_files"][0]["path"] == "data/train-*"
    assert head["tags"] == ["synthetic", "differential-privacy"]
    assert json.loads((out / LABEL).read_text()) == label
    assert f"; {to_outsiders(label)}.**" in (out / CARD).read_text()
    # The numbers of clients or noise are in the label: no file tells of others.
    config = json.loads((out / "config.json").read_text())
    assert config.keys().isdisjoint({"num_clients", "noise_multiplier", "seed"})
    tensors, metadata = read_tensors(out / AVERAGE)
    write_tensors(out / AVERAGE, {n: v + 1 for n, v in tensors.items()}, metadata)
    assert_refused("its tensors are not those that", fedgs.load(out).sample, 6)
    assert_refused("^output = /.*set: it exists", publish, folder, out, label, 6)
    assert_refused("set:", privacy_label, out)
    assert "set: it is published" in repr(fedgs.load(out))  # as a prompt shows it


def test_no_byte_of_what_is_published_tells_of_owners_paths_or_seeds(tmp_path):
    """Names of owners in data, cohort and ledger: all are the run's alone."""
    pytest.importorskip("datasets")
    owners = [f"Zacharias-{number}" for number in range(6)]
    images = np.random.default_rng(0).integers(0, 256, (60, 16, 16), np.uint8)
    secret, cohort = tmp_path / "Hidden-Place", tmp_path / "Hidden-Cohort.txt"
    secret.mkdir()
    names = np.repeat(owners, 10)
    np.savez(secret / "a.npz", images=images, labels=np.arange(60) % 2, clients=names)
    cohort.write_text("\n".join(owners[:5]))
    run = fedgs.train(
        data=f"npz:{secret}/a.npz",
        cohort=cohort,
        target_epsilon=10.0,
        num_rounds=1,
        recipe="moments",
        phases="means",
        image_size=16,
        seed=73_912_846,
        output=secret / "run",
    )
    publish(run.folder, tmp_path / "out", privacy_label(run.path), 6)
    written = {p.name: p.read_bytes() for p in (tmp_path / "out").rglob("*.*")}
    parquet = "train-00000-of-00001.parquet"
    files = {CARD, LABEL, AVERAGE, "samples.png", parquet}
    assert {*written} == files | {"config.json", "versions.json"}
    # The test can fail: the run folder has them.
    kept = b"".join(p.read_bytes() for p in run.path.rglob("*") if p.is_file())
    head = run.folder.read_ledger().head
    for told in ("Zacharias", "Hidden-", "73912846", head):
        assert told.encode() in kept
        assert not [name for name, text in written.items() if told.encode() in text]
    # Of every client there is one number, how many; of the release only the generator.
    tensors = read_tensors(tmp_path / "out" / AVERAGE)[0]
    assert tensors.keys() == run.generator.state_dict().keys()


def test_a_run_that_may_not_go_out_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    free = make_run(tmp_path / "free", noise_multiplier=0.0)
    words = "free: NO GUARANTEE; epsilon is unbounded; publish a run that has"
    assert_refused(words, publish, RunFolder.open(free), "out", privacy_label(free), 6)
    part = Path(shutil.copytree(run, tmp_path / "part"))
    (part / GENERATOR).unlink()
    words = "part: it is not finished; run `fedgs resume"
    assert_refused(words, publish, RunFolder.open(part), "out", privacy_label(part), 6)
    assert {path.name for path in tmp_path.iterdir()} == {"free", "part"}


def test_the_card_says_the_whole_label_in_words(run):
    label = privacy_label(run)
    card = data_card(6, label)
    for name, value in label.items():
        assert f"- **{name.replace('_', ' ')}**: {in_words(value)}" in card
    for condition in label["conditions"]:
        assert f"  - {condition}\n" in card


def test_a_data_set_without_a_guarantee_claims_none(tmp_path):
    label = privacy_label(make_run(tmp_path / "run", noise_multiplier=0.0))
    words = data_card(6, label).split("---\n")[2].split("\n\n")
    assert words[1].startswith(f"**Privacy guarantee: {NO_GUARANTEE}; epsilon is unb")
    assert head_of(data_card(6, label))["tags"] == ["synthetic"]
