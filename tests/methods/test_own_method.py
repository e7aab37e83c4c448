"""A federated method that is not of fedgs: docs/baselines.md shows all of it."""

import dataclasses
import json
from pathlib import Path

import pytest

from command_line import flags, printed, refused
from fedgs.files import read_tensors
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
    unknown = flags(method="nonsense", data="digits", target_epsilon=8, output=run)
    refused(fedgs("train", *unknown), "method = 'nonsense': give one of")
    assert not run.exists()
    monkeypatch.setenv("FEDGS_METHODS", OWN)
    printed(fedgs("train", *flags(**GIVEN, output=run)))
    rows = json.loads(printed(fedgs("privacy", run, "--json")))
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
