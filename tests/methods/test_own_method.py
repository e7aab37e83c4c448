"""A federated method that is not of fedgs: docs/baselines.md shows all of it."""

import dataclasses
import json
import sys
import threading
from html import unescape
from pathlib import Path

import pytest

from command_line import flags, printed, refused
from fedgs.data.load import load_data
from fedgs.files import read_tensors
from fedgs.round import local
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import RunFolder
from simulated_grid import FakeGrid, start

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


def test_as_one_phase_of_two_it_needs_to_know_nothing_of_phases(
    own, fedgs, tmp_path, monkeypatch
):
    """Half of the privacy each: ledger, budget, masks and resume for nothing."""
    monkeypatch.setenv("FEDGS_METHODS", OWN)
    given = GIVEN | {"recipe": "gs-wgan", "output": tmp_path / "run"}
    given |= {"phases": f"{OWN}*1:0.5,gs-wgan*2:0.5", "generator": "gaussian"}
    given |= {"warm_start_rounds": 1, "image_size": 16, "dct_size": 4}
    out = printed(fedgs("train", *flags(**given)))
    assert f"1 round of {OWN} (50 %), 2 rounds of gs-wgan (50 % of" in out
    rows = json.loads(printed(fedgs("privacy", "of", tmp_path / "run", "--json")))
    assert 7.9 < min(row["epsilon"] for row in rows) <= 8
    folder = RunFolder.open(tmp_path / "run")
    kinds = [event.release for event in folder.read_ledger().events]
    assert kinds == ["embedding", "gradient", "gradient"]
    # Stopped after its own phase, it goes on to the same bytes; masked, too.
    other = dataclasses.replace(folder.config, output=str(tmp_path / "again"))
    again = RunFolder.create(other)
    stop = threading.Event()
    data = load_data(other)
    with pytest.raises(RunStopped):
        local.train(again, data, lambda metrics: stop.set(), stop)
    assert len(again.read_ledger().events) == 1
    local.train(again, data, lambda metrics: None, threading.Event())
    masked = {"output": str(tmp_path / "masked"), "engine": "flower"}
    third = RunFolder.create(dataclasses.replace(folder.config, **masked))
    start(third, FakeGrid(3))
    ends = [
        read_tensors(each.path / "generator.safetensors")[0]
        for each in (folder, again, third)
    ]
    for tensors in ends[1:]:
        assert all((ends[0][name] == tensors[name]).all() for name in ends[0])


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
