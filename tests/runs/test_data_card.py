"""`fedgs sample --card`: a data set for Hugging Face that says what is guaranteed."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedgs.privacy_label import privacy_label
from fedgs.runs.data_card import CARD, LABEL, NO_GUARANTEE, data_card, in_words
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import check_output, draw_samples
from refusals import assert_refused
from report_folders import make_run

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("card") / "run")


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_hugging_face_reads_the_folder(run, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    drawn = draw_samples(RunFolder.open(run), 6, [0, 2])
    drawn.write(tmp_path / "set", label=privacy_label(run))
    cache = str(tmp_path / "cache")
    found = datasets.load_dataset(str(tmp_path / "set"), cache_dir=cache)
    assert list(found) == ["train"]  # and the label is no part of it
    assert found["train"]["label"] == [0, 2, 0, 2, 0, 2]
    assert np.asarray(found["train"][0]["image"]).shape == (16, 16)
    head = head_of((tmp_path / "set" / CARD).read_text())
    assert head["configs"][0]["data_files"][0]["path"] == "data/train-*"
    assert head["tags"] == ["synthetic", "differential-privacy"]
    assert json.loads((tmp_path / "set" / LABEL).read_text()) == privacy_label(run)


def test_the_card_says_the_whole_label_in_words(run):
    label = privacy_label(run)
    card = data_card(6, label)
    for name, value in label.items():
        assert f"- **{name.replace('_', ' ')}**: {in_words(value)}" in card
    for condition in label["conditions"]:
        assert f"  - {condition}\n" in card


def test_a_data_set_without_a_guarantee_claims_none(tmp_path):
    label = privacy_label(make_run(tmp_path / "run", noise_multiplier=0.0))
    card = data_card(6, label)
    assert head_of(card)["tags"] == ["synthetic"]
    words = card.split("---\n")[2].split("\n\n")
    assert words[1].startswith(f"**Privacy guarantee: {NO_GUARANTEE}; epsilon is unb")


def test_the_size_is_one_that_the_hub_knows(run):
    label = privacy_label(run)
    for count, size in ((1, "n<1K"), (999, "n<1K"), (60_000, "10K<n<100K")):
        assert head_of(data_card(count, label))["size_categories"] == [size]


def test_other_forms_have_no_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_output("a", has_card=True).form == "hf"
    assert check_output("a").form == "folder"
    words = "a data card is for Hugging Face; give a new"
    assert_refused(words, check_output, "a.png", has_card=True)
