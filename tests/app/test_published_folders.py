"""A published folder is read by others: nothing private is written into it."""

import json
from pathlib import Path

import numpy as np
import pytest

import fedgs as library
from command_line import printed, refused
from evaluation_data import labelled
from fedgs.privacy_label import privacy_label
from fedgs.runs.publication import publish
from fedgs.runs.run_folder import RunFolder, published_folder
from refusals import assert_refused
from report_folders import make_run

pytest.importorskip("datasets")

CNN = ("-n", "40", "--metrics", "cnn")
REAL = ("--data", "npz:real.npz", "--test", "npz:test.npz", *CNN)
NOT_HERE = "for-others is a published folder, and "


@pytest.fixture
def published(tmp_path, monkeypatch, capsys) -> Path:
    """A published folder in the working directory, beside its run and real images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDGS_CACHE_DIR", str(tmp_path / "cache"))
    run = make_run(tmp_path / "run")
    output = tmp_path / "for-others"
    publish(RunFolder.open(run), output, privacy_label(run), 5)
    for seed, name in enumerate(("real", "test")):
        images, labels = labelled(60, seed)
        np.savez(f"{name}.npz", images=images, labels=labels)
    capsys.readouterr()
    return output


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("evaluate", "for-others", *REAL), f"output is unset: .*{NOT_HERE}"),
        (
            ("evaluate", "for-others", *REAL, "--output", "for-others/data/scores"),
            f"output = for-others/data/scores: .*{NOT_HERE}",
        ),
        (
            ("evaluate", "run", *REAL, "--output", "link"),
            f"output = link: .*{NOT_HERE}",
        ),
        (
            ("data", "inspect", "npz:real.npz", "--sheet", "for-others/a.png"),
            f"sheet = for-others/a.png: .*{NOT_HERE}",
        ),
        (
            ("report", "run", "-o", "for-others/report.html"),
            f"output = for-others/report.html: .*{NOT_HERE}",
        ),
        (
            ("train", "--data", "digits", "--output", "for-others/run"),
            f"output = for-others/run: .*{NOT_HERE}",
        ),
        (
            ("debug", "--data", "digits", "--each", "--output", "for-others/run"),
            f"output = for-others/run: .*{NOT_HERE}",
        ),
        (("resume", "for-others"), "for-others: it is published"),
        (("debug", "--output", "for-others"), "for-others: it is published"),
        (("audit", "for-others"), "for-others: it is published"),
        (("audit", "for-others", "--full"), "for-others: it is published"),
    ],
)
def test_no_command_writes_into_a_published_folder(fedgs, published, words, named):
    Path("link").symlink_to(published)
    before = files_in(published)
    refused(fedgs(*words), named)
    assert files_in(published) == before


def test_what_lies_in_a_published_folder_is_evaluated_elsewhere(
    fedgs, published, monkeypatch
):
    """Results lie beside a file of samples, and a yardstick's where one works."""
    np.savez(published / "drawn.npz", images=labelled(60, 2)[0], labels=[0, 1, 2] * 20)
    before = files_in(published)
    refused(fedgs("evaluate", "for-others/drawn.npz", *REAL), "output is unset")
    monkeypatch.chdir(published)
    own = ("--data", "npz:../real.npz", "--test", "npz:../test.npz", *CNN)
    refused(fedgs("evaluate", "real-test", *own), "output is unset")
    assert files_in(published) == before


def test_a_published_folder_is_evaluated_against_data_that_the_user_names(
    fedgs, published
):
    elsewhere = ("--output", "scores")
    done = fedgs("evaluate", "for-others", *CNN, *elsewhere)
    refused(done, "data is unset: a published folder does not say what it was")
    out = printed(fedgs("evaluate", "for-others", *REAL, *elsewhere))
    assert "scores/evaluation; the lower half of samples.png shows real images" in out
    found = json.loads(Path("scores/evaluations.jsonl").read_text())
    assert "round" not in found  # the folder does not say how long it was trained
    assert Path("scores/evaluation/samples.png").exists()
    # It was trained on these, but the folder does not say so, and may not.
    done = fedgs("evaluate", "for-others", *elsewhere, "--data", "digits", *CNN)
    refused(done, "data = 'digits': it has no test split")


def test_publishing_says_where_the_guarantee_stands(fedgs, published):
    out = printed(fedgs("publish", "run", "-n", 5, "-o", "more"))
    words = "The guarantee and its conditions: more/privacy_label.json\n"
    assert out.endswith(words)
    label = json.loads(Path("more/privacy_label.json").read_text())
    assert label["guarantee"].startswith("holds")


def test_a_program_trains_no_published_folder(published):
    before = files_in(published)
    assert_refused("it is published", library.load(published).resume)
    assert files_in(published) == before


def test_a_label_alone_makes_no_published_folder(tmp_path, published):
    (tmp_path / "privacy_label.json").write_text("{}")
    assert published_folder(tmp_path / "run") is None
    assert published_folder(published / "data" / "new") == published
