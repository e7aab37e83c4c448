"""`fedgs baseline`, and the other commands with a run of it."""

import dataclasses
import json
import math
import re
import shutil
from types import MappingProxyType

import pytest
import torch

from baselines import DIGITS
from command_line import printed, refused
from experiments.baselines import BASELINES
from experiments.baselines.baseline import Baseline
from experiments.baselines.baseline_run import CURATOR, open_run
from fedgs.app.commands.privacy_words import explained, protection
from fedgs.config.fields import flag
from fedgs.config.method_settings import settings_with
from fedgs.data.federated import to_float
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.accountant import Statement
from fedgs.privacy.gaussian import epsilon_from_mu, mu_from_epsilon
from fedgs.privacy_label import LABEL_HOLDS, privacy_label
from fedgs.runs.data_card import NO_GUARANTEE
from report_folders import make_run

TINY = DIGITS | {"steps": 3, "batch_size": 4}


def flags(**settings):
    """Every setting that a baseline reads has a flag, the rare ones as well."""
    words = []
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


@pytest.fixture(scope="module")
def run(tmp_path_factory, exit_code):
    path = tmp_path_factory.mktemp("baseline") / "run"
    assert exit_code("baseline", "wgan-gp", *flags(**TINY, output=path)) == 0
    return path


def test_the_list_names_every_method_and_the_help_its_settings(fedgs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = printed(fedgs("baseline", "--list"))
    assert all(name in out for name in BASELINES)
    out = printed(fedgs("baseline", "dp-merf", "--help"))
    for name in ("--target-epsilon", "--max-images-per-user", "--data", "--seed"):
        assert name in out


def privacy_of(fedgs, run, *more):
    return json.loads(printed(fedgs("privacy", "of", run, "--json", *more)))


def test_privacy_is_of_the_method_and_a_delta_large_by_the_unit_of_a_line(
    fedgs, run, class_means
):
    assert privacy_of(fedgs, run) == []
    assert "no epsilon" in printed(fedgs("privacy", "of", run))
    (row,) = privacy_of(fedgs, class_means)
    said = row["num_rounds"], row["unit"], row["relation"]
    assert said == (1, "user", "zero-out")
    assert 7.99 < row["epsilon"] <= 8
    assert CURATOR in printed(fedgs("privacy", "of", class_means))
    (row,) = privacy_of(fedgs, class_means, "--delta", 0.1)
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
        (("baseline", "wgan"), "baseline = 'wgan':"),
        (
            ("baseline", "dp-merf", "--target-epsilon", 3, "--noise-multiplier", 1),
            r"noise_multiplier = 1\.0:",
        ),
        (("baseline", "dp-merf", "--release", "two"), "= 'two': give"),
        (
            ("baseline", "dp-merf", "--noise-multiplier", 1e-300),
            "noise_multiplier = 1e-300:",
        ),
        (("audit", A_RUN), "RUN = .*: wgan-gp states no epsilon"),
        (
            ("privacy", "of", A_RUN, A_RUN),
            "RUN = .*: a run of `fedgs baseline` cannot be",
        ),
        (("privacy", "of", A_RUN, "--at-epsilon", 1), "at_epsilon = 1.0:"),
        (("privacy", "of", A_RUN, "--delta", 2), "delta = 2.0:"),
    ],
)
def test_bad_input_is_one_line(fedgs, run, words, message):
    refused(fedgs(*(run if word is A_RUN else word for word in words)), message)


# A method that is not of fedgs: a user's mean images by class, in one release.
PLACE = "test_baseline_command:ClassMeans"


@dataclasses.dataclass(frozen=True)
class Settings:
    clip_bound: float = flag(10.0, "Largest norm of a client's means.", above=0)
    noise_per_clip: float = flag(1.0, "Noise over the clip bound.", at_least=0)


def released(sums, settings, noise):
    return sums + noise.normal(
        sums.shape, settings.noise_per_clip * settings.clip_bound
    )


class ClassMeans(Baseline[Settings]):
    name, title, unit = "class-means", "Noisy class means", "user"
    Settings = Settings
    recipe = MappingProxyType(
        {"generator": "gaussian", "latent": "normal", "latent_dim": 4}
    )

    def build(self):
        self.num_steps = 1

    def step(self, index):
        sums = 0.0
        for client in range(self.data.num_clients):
            own = self.data.of(client)
            means = self.means(to_float(own.images), own.labels)
            sums = sums + means * min(1.0, self.settings.clip_bound / means.norm())
        noise = NoiseStream(self.config.noise_seed, 0, index)
        noisy = released(sums.numpy(), self.settings, noise) / self.data.num_clients
        with torch.no_grad():
            self.net.mean.copy_(torch.from_numpy(noisy))
        return {"kind": "class-means", "noise_per_clip": self.settings.noise_per_clip}

    def means(self, images, labels):
        shape = (self.data.num_classes, *images.shape[1:])
        sums = torch.zeros(shape).index_add(
            0, torch.tensor(labels), torch.tensor(images)
        )
        counts = torch.bincount(torch.tensor(labels), minlength=len(sums))
        return sums / counts.clamp(min=1).view(-1, 1, 1, 1)

    @classmethod
    def calibrated(cls, settings, facts, target_epsilon, delta):
        noise = 1 / mu_from_epsilon(target_epsilon, delta)
        return dataclasses.replace(settings, noise_per_clip=noise)

    @classmethod
    def guarantees(cls, settings, facts, events, delta):
        ratios = [event["noise_per_clip"] for event in events]
        costs = [1 / ratio**2 if ratio else math.inf for ratio in ratios]
        epsilon = epsilon_from_mu(math.sqrt(sum(costs)), delta)
        theorem = "exact curve of Gaussian noise"
        return [Statement("valid", "user", "zero-out", epsilon, delta, theorem)]

    @classmethod
    def audit_scores(cls, settings, facts, event, relation, trials):
        size = torch.zeros(trials).numpy()  # a client of zeros, and one of norm C
        there, gone = (
            released(size + c, settings, NoiseStream(None, 0, 0))
            for c in (settings.clip_bound, 0.0)
        )
        return gone, there


@pytest.fixture(scope="module")
def class_means(tmp_path_factory, exit_code):
    """A run of a method that is not of fedgs, at epsilon 8."""
    folder = tmp_path_factory.mktemp("own")
    given = flags(data="digits", image_size=16, num_clients=12, output=folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        words = ("baseline", PLACE, *given, "--target-epsilon", 8)
        assert exit_code(*words) == 0
        patch.setenv("FEDGS_METHODS", PLACE)
        yield folder / "run"


def test_the_label_and_the_epsilon_to_quote_are_of_the_valid_line(run, class_means):
    label, (row,) = privacy_label(class_means), open_run(class_means).guarantees()
    assert label["guarantee"] == LABEL_HOLDS
    assert (label["epsilon"], label["relation"]) == (row.epsilon, "zero-out")
    assert label["unit_of_privacy"] == "one shard of the data, not a person"
    assert label["trust_model"] == f"{CURATOR} and is trusted"
    assert "1 x kind " in label["mechanism"][1]
    none = privacy_label(run)
    assert none["guarantee"] == f"{NO_GUARANTEE}; the method claims none"
    assert (none["epsilon"], none["who_sees_what"]) == (None, [])
    assert protection(none) == f"none; {none['guarantee']}"
    words = r"epsilon (8|7\.99\d) \((replace-one|zero-out), delta 1e-05\) for one shard"
    assert re.match(words, protection(label))
    said = explained(label)[0]
    assert "(adversary release, zero-out, delta 1e-05, " in said


def test_the_audit_of_the_methods_release_holds_and_comes_near(fedgs, class_means):
    words = ("audit", class_means, "--trials", 50_000, "--json")
    found = json.loads(printed(fedgs(*words)))
    (row,) = found["findings"]
    assert found["holds"]
    assert 2 < row["lower_bound"] <= row["epsilon"] <= 8


def test_an_audit_finds_noise_that_is_not_there(fedgs, class_means, monkeypatch):
    def half(sums, settings, noise):
        std = 0.3 * settings.noise_per_clip * settings.clip_bound
        return sums + noise.normal(sums.shape, std)

    monkeypatch.setitem(globals(), "released", half)
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
    assert "No epsilon: its method guarantees nothing" in page
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
