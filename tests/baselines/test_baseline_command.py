"""`fedgs baseline`, and the other commands with a run of it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from baselines import DIGITS
from command_line import flags, printed, refused
from fedgs.app.commands.run_outcome import to_quote
from fedgs.baselines import METHODS
from fedgs.baselines.frame import CURATOR, open_run
from fedgs.config.settings import settings_with
from fedgs.privacy_label import HOLDS, privacy_label
from fedgs.runs.data_card import NO_GUARANTEE
from report_folders import make_run

TINY = DIGITS | {"steps": 3, "batch_size": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory, exit_code):
    path = tmp_path_factory.mktemp("baseline") / "run"
    assert exit_code("baseline", "wgan-gp", *flags(**TINY, output=path)) == 0
    return path


def test_the_list_names_every_method_and_the_help_its_settings(fedgs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = printed(fedgs("baseline", "--list"))
    assert all(name in out for name in METHODS)
    out = printed(fedgs("baseline", "dp-merf", "--help"))
    for flag in ("--target-epsilon", "--max-images-per-user", "--data", "--seed"):
        assert flag in out


def privacy_of(fedgs, run, *more):
    return json.loads(printed(fedgs("privacy", run, "--json", *more)))


def test_privacy_is_of_the_method_and_a_delta_large_by_the_unit_of_a_line(
    fedgs, run, class_means
):
    none = privacy_of(fedgs, run)
    said = none["method"], none["unit"], none["guarantees"]
    assert said == ("wgan-gp", "none", [])
    assert "epsilon: none" in printed(fedgs("privacy", run))
    found = privacy_of(fedgs, class_means)
    (row,) = found["guarantees"]
    said = found["num_releases"], row["unit"], row["relation"]
    assert said == (1, "user", "zero-out")
    assert 7.99 < row["epsilon"] <= 8
    assert CURATOR in printed(fedgs("privacy", class_means))
    (row,) = privacy_of(fedgs, class_means, "--delta", 0.1)["guarantees"]
    assert row["guarantee"]
    assert row["conditions"][0].startswith("delta is too large to read: 0.1")
    assert "K = 12;" in row["conditions"][0]
    opened = open_run(class_means)
    assert opened.num_units("record") == opened.facts.num_records > 12
    (strict,) = opened.guarantees(1 / 121)
    assert not strict.conditions[0].startswith("delta")


A_RUN = "a run"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("baseline", "wgan"), "baseline = 'wgan': give one of"),
        (
            ("baseline", "dp-merf", "--target-epsilon", 3, "--noise-multiplier", 1),
            r"noise_multiplier = 1\.0: --target-epsilon finds the noise; leave out",
        ),
        (("baseline", "dp-merf", "--release", "two"), "= 'two': give"),
        (
            ("baseline", "dp-merf", "--noise-multiplier", 1e-300),
            "noise_multiplier = 1e-300: give --noise-multiplier 0, or at least 1e-100",
        ),
        (("audit", A_RUN), "RUN = .*: wgan-gp claims no epsilon"),
        (("privacy", A_RUN, A_RUN), "RUN = .*: a baseline's run is accounted alone"),
        (("privacy", A_RUN, "--num-rounds", 1), "num_rounds = 1: RUN is of"),
        (("privacy", A_RUN, "--delta", 2), "delta = 2.0: give --delta"),
    ],
)
def test_bad_input_is_one_line(fedgs, run, words, message):
    refused(fedgs(*(run if word is A_RUN else word for word in words)), message)


@pytest.fixture(scope="module")
def class_means(tmp_path_factory, exit_code):
    """A run of a method that is not of fedgs, at epsilon 8."""
    folder = tmp_path_factory.mktemp("own")
    given = flags(data="digits", image_size=16, num_clients=12, output=folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        words = ("baseline", "class_means:METHOD", *given, "--target-epsilon", 8)
        assert exit_code(*words) == 0
        patch.setenv("FEDGS_METHODS", "class_means:METHOD")
        yield folder / "run"


def test_the_label_and_the_epsilon_to_quote_are_of_the_valid_line(run, class_means):
    label, (row,) = privacy_label(class_means), open_run(class_means).guarantees()
    assert label["guarantee"] == HOLDS
    assert (label["epsilon"], label["relation"]) == (row.epsilon, "zero-out")
    assert label["unit_of_privacy"].startswith("one client with all its images; where")
    assert label["trust_model"] == f"{CURATOR} and is trusted"
    assert "1 x kind " in label["mechanism"][1]
    none = privacy_label(run)
    assert none["guarantee"] == f"{NO_GUARANTEE}; the method claims none"
    assert (none["epsilon"], none["who_sees_what"]) == (None, [])
    assert to_quote(none) == f"none to quote: {none['guarantee']}"
    said = to_quote(label)
    assert re.match(r"(8|7\.99\d) \(adversary release, zero-out, delta 1e-05, ", said)


def test_the_audit_of_the_methods_release_holds_and_comes_near(fedgs, class_means):
    words = ("audit", class_means, "--trials", 50_000, "--json")
    found = json.loads(printed(fedgs(*words)))
    (row,) = found["findings"]
    assert found["holds"]
    assert 2 < row["lower_bound"] <= row["epsilon"] <= 8


def test_an_audit_finds_noise_that_is_not_there(fedgs, class_means, monkeypatch):
    import class_means as method  # of the fixture's folder

    def half(sums, settings, noise):
        std = 0.3 * settings.noise_per_clip * settings.clip_bound
        return sums + noise.normal(sums.shape, std)

    monkeypatch.setattr(method, "released", half)
    code, out, _ = fedgs("audit", class_means, "--trials", 30_000)
    assert code == 1
    assert "REFUTED" in out
    refuted = privacy_label(class_means)
    assert refuted["guarantee"] == f"{NO_GUARANTEE}; `fedgs audit` refuted it"
    assert refuted["audited_bound"]["lower_bound"] > refuted["audited_bound"]["epsilon"]
    shutil.rmtree(class_means / "audit")  # the other tests' run is not at fault


def test_a_baseline_stands_beside_a_run_of_gs_wgan(fedgs, run, tmp_path):
    config = open_run(run).config
    images = {name: getattr(config, name) for name in settings_with("images")}
    other = make_run(tmp_path / "other", **images)
    printed(fedgs("report", run, other, "-o", tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    for words in ("2 runs compared", "Not added up", "Privacy spent"):
        assert words in page
    assert "NO GUARANTEE; the method claims none</span>" in page
    assert "No epsilon: wgan-gp" in page
    commands = re.sub(r"<[^>]*>", "", page)
    assert "fedgs baseline wgan-gp --" in commands
    assert "fedgs train --" in commands


def test_a_baselines_run_is_sampled_and_evaluated_like_any_run(
    fedgs, run, monkeypatch, tmp_path
):
    assert "is finished" in printed(fedgs("resume", run))
    for name in ("FEDGS_CACHE_DIR", "TORCH_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    words = ("--fast", "-n", 60, "--metrics", "cnn", "--json")
    found = json.loads(printed(fedgs("evaluate", run, *words)))
    assert found["round"] == 3
    assert 0 <= found["downstream_cnn_accuracy"] <= 1
