"""A run folder of an earlier version of the code: it is read, and goes on.

`tests/golden/run-before-the-rooms` was written when the modules lay flat: the embedded
digits of four clients on two nodes, stopped with a checkpoint after round 3 of 6.
"""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

import runs
from fedgs.federation.preparation import resolve
from fedgs.files import read_tensors
from fedgs.runs.run_folder import RunFolder

STORED = Path(__file__).parents[1] / "golden" / "run-before-the-rooms"


@pytest.fixture
def stored(tmp_path) -> Path:
    copy = tmp_path / "stored"
    shutil.copytree(STORED, copy)
    (copy / "private").chmod(0o700)  # Git keeps neither modes
    (copy / "samples").mkdir()  # nor empty folders
    return copy


def train(path: Path, new: bool) -> dict[str, torch.Tensor]:
    pytest.importorskip("sklearn", reason="needs the digits of scikit-learn")
    stored_config = RunFolder.open(STORED).config
    config, data = resolve(dataclasses.replace(stored_config, output=str(path)))
    folder = RunFolder.create(config) if new else RunFolder.open(path)
    runs.train(folder, data=data)
    return read_tensors(path / "generator.safetensors")[0]


def test_a_run_folder_from_before_the_rooms_goes_on(stored, tmp_path):
    resumed, undisturbed = train(stored, new=False), train(tmp_path / "new", new=True)
    assert resumed.keys() == undisturbed.keys()
    for name, value in resumed.items():  # other processors round differently
        torch.testing.assert_close(value, undisturbed[name], rtol=1e-3, atol=1e-4)
    events = RunFolder.open(stored).read_ledger().events
    assert [event.round for event in events] == [1, 2, 3, 4, 5, 6]
