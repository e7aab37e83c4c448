"""A federated method that is not of fedgs: docs/baselines.md shows all of it."""

import dataclasses
import json
import sys
from html import unescape
from pathlib import Path

import pytest

from command_line import flags, printed, refused
from fedgs.files import read_tensors
from fedgs.privacy.accountant import statements, statements_of_runs
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.plan import Plan
from fedgs.privacy.same_clients import Run
from fedgs.round.run import BudgetSpent, RunStopped
from fedgs.runs.run_folder import RunFolder
from runs import attempts, events, train
from simulated_grid import FakeGrid, product, start
from tiny import FULL_PARTICIPATION

OWN = "own_means:METHOD"
GIVEN = {"recipe": OWN, "data": "digits", "num_clients": 12, "clients_per_node": 4}
GIVEN |= {"target_epsilon": 8, "seed": 1, "noise_seed": 2, "secure_aggregation": True}


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    """The page's code, where Python finds it."""
    page = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text()
    code = page.partition("<!-- class_means.py -->\n```python\n")[2].partition("```")[0]
    (tmp_path / "own_means.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return code


def test_sixty_lines_get_the_whole_frame(own, fedgs, tmp_path, monkeypatch):
    assert len(own.splitlines()) <= 60
    run = tmp_path / "run"
    refused(fedgs("train", *flags(**GIVEN, output=run)), f"set FEDGS_METHODS={OWN}")
    unknown = flags(recipe="nonsense", data="digits", target_epsilon=8, output=run)
    refused(fedgs("train", *unknown), "recipe = 'nonsense':")
    assert not run.exists()
    monkeypatch.setenv("FEDGS_METHODS", OWN)
    printed(fedgs("train", *flags(**GIVEN, output=run)))
    rows = json.loads(printed(fedgs("privacy", "of", run, "--json")))
    assert 7.9 < min(row["epsilon"] for row in rows) <= 8
    # Masked, in Flower, it is the same sum.
    folder = RunFolder.open(run)
    other = {"output": str(tmp_path / "masked"), "engine": "flower"}
    config = dataclasses.replace(folder.config, **other)
    masked = RunFolder.create(config)
    start(masked, FakeGrid(3))
    ends = [read_tensors(f.path / "generator.safetensors")[0] for f in (folder, masked)]
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    report = tmp_path / "report.html"
    printed(fedgs("report", run, "-o", report))
    assert OWN in report.read_text()
    words = ("audit", run, "--trials", 5000, "--json")
    assert json.loads(printed(fedgs(*words)))["holds"]


SETTINGS = """
from dataclasses import dataclass
from fedgs.config.fields import option
from fedgs.config.method_settings import NetworkSettings

@dataclass(frozen=True)
class OwnSettings(NetworkSettings):
    weight: float = option(1.0, "Training", "Of nothing.", above=0)

ClassMeans.Settings = OwnSettings
"""


def test_its_own_settings_have_a_table_and_nobody_elses(
    own, fedgs, tmp_path, monkeypatch
):
    (tmp_path / "own_means.py").write_text(own + SETTINGS)
    monkeypatch.delitem(sys.modules, "own_means", raising=False)
    monkeypatch.setenv("FEDGS_METHODS", OWN)
    run, file = tmp_path / "run", tmp_path / "run.toml"

    def train(text: str, **others: object) -> tuple[int, str, str]:
        file.write_text(text)
        return fedgs("train", *flags(**GIVEN | others, output=run, config=file))

    refused(train(f'["{OWN}"]\nweight = 0'), "weight = 0.0:")
    refused(train('["gs-wgan"]\nweight = 2'), r"weight:")
    refused(train(f'["{OWN}"]\nclip_bound = 2'), r"clip_bound:")
    refused(train("moment_size = 4"), "moment_size:")
    refused(train("weight = 2", recipe="moments"), "weight:")
    assert not run.exists()
    printed(train(f'seed = 1\n["{OWN}"]\nweight = 2'))
    config = RunFolder.open(run).config
    assert config.to_flat()["weight"] == 2
    assert "discriminator_training" not in config.to_flat()
    printed(fedgs("report", run, "-o", tmp_path / "report.html"))
    shown = unescape((tmp_path / "report.html").read_text())
    assert f"# in a TOML file: ['{OWN}'] weight = 2.0" in shown
    assert "--weight" not in shown


# ------------------------------------------------------------------ a phase of two

SHARES = {"phases": f"{OWN}*1:0.5,gs-wgan*2:2", "num_rounds": 3}
TWO = FULL_PARTICIPATION | SHARES | {"clip_bound": 1.0, "target_epsilon": 30.0}
TWO |= {"generator": "gaussian", "latent": "normal", "noise_multiplier": 1.0}


@pytest.fixture
def trusted(own, monkeypatch) -> None:
    """The page's method, whose place the user trusts."""
    monkeypatch.delitem(sys.modules, "own_means", raising=False)
    monkeypatch.setenv("FEDGS_METHODS", OWN)


def test_as_a_phase_of_two_it_needs_to_know_nothing_of_phases(trusted, create):
    """Engines, resumes and the ledger: the page's code is the one of a whole run."""
    local = create("local", **TWO, engine="local")
    train(local)
    flower = create("flower", **TWO)

    def stop(metrics: dict) -> None:
        if metrics["round"] == 2:
            raise RunStopped("here")

    with pytest.raises(RunStopped, match="here"):
        start(flower, FakeGrid(3), stop)
    start(RunFolder.open(flower.path), FakeGrid(3, num_workers=2))
    assert product(flower) == product(local)
    sent = events(local)
    assert [event.release for event in sent] == ["embedding", "gradient", "gradient"]
    assert [event.batch_size for event in sent] == [1, 4, 4]
    # Of a node, replace-one: shares of mu^2, over both phases.
    stds = [event.noise_std for event in sent]
    costs = [e.batch_size * (2 / s) ** 2 for e, s in zip(sent, stds, strict=True)]
    assert costs == pytest.approx([0.5, 1.0, 1.0])
    done = statements_of_runs([Run(local.config, sent)], 1e-5)
    planned = statements(Plan.from_config(local.config), 1e-5)
    assert [row.epsilon for row in done] == pytest.approx(
        [row.epsilon for row in planned]
    )


def test_as_a_phase_of_two_its_sums_are_masked_and_its_budget_ends(trusted, create):
    masked = TWO | {"secure_aggregation": True}
    local = create("local", **masked, engine="local")
    train(local)
    flower = create("flower", **masked)
    start(flower, FakeGrid(3))
    assert product(flower) == product(local)
    assert {event.kind for event in events(flower)} == {"discrete"}
    # Room for the first phase, and for one of the two rounds of the second.
    cost = 0.5 + 1.5 * 1.0
    target = epsilon_from_mu((cost / 3) ** 0.5, 1e-5)
    own = {"target_epsilon": target, "relation": "replace-one"}
    short = create("short", **TWO | own)
    with pytest.raises(BudgetSpent, match="before round 3"):
        start(short, FakeGrid(3))
    assert attempts(short) == [(1, 1), (2, 1)]
