"""Tables of cells: every cell is a valid run, made once, stored, and printed again."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from PIL import Image

from evaluation_data import refuse
from experiments.comparison import methods
from experiments.comparison.options import CompareRequest
from experiments.grid import lines, runs
from experiments.grid.cells import (
    NO_NOISE,
    Cell,
    CellMethod,
    Cells,
    Source,
    TableRequest,
)
from experiments.paper.figures import CELLS
from experiments.store import Store
from fedgs.app.commands.run_outcome import Exit
from fedgs.config.recipes import overridden, recipe
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.files import read_json_lines
from fedgs.privacy.accountant import Plan, statements
from fedgs.runs.run_folder import RunFolder
from plans import epsilon
from refusals import assert_refused

CELL = "digits-tiny-eps10-seed0"
FEW = {"num_clients": 12, "clients_per_node": 6, "test_fraction": 0.25}
SMALL = {"image_size": 16, "moment_size": 3, "latent_dim": 4}
TINY = Cells(
    {"digits": Source(FEW)},
    {
        "broken": CellMethod("moments", SMALL, {10.0: {"generator": "upsample"}}),
        "tiny": CellMethod("moments", SMALL, {10.0: {}, NO_NOISE: {}}),
    },
)


@pytest.fixture
def fill(monkeypatch, tmp_path) -> Callable[..., runs.Lines]:
    """Fills cells whose only data are a few digits, and whose methods are tiny."""
    monkeypatch.setattr(runs, "NUM_SAMPLES", 200)
    monkeypatch.setattr(lines, "TRIALS", 300)
    monkeypatch.setenv("FEDGS_CACHE_DIR", str(tmp_path / "cache"))

    def fill(only: str, **asked: object) -> runs.Lines:
        given = {"seeds": ("0",), "output": tmp_path / "out"} | asked
        request = TableRequest(only=only, **given)
        return runs.fill(TINY, request, json.dumps, lambda lines: [])

    return fill


def test_cells_are_made_once_and_printed_from_their_lines(fill, tmp_path, monkeypatch):
    found, out = fill("tiny"), tmp_path / "out"
    run = RunFolder.open(out / CELL)
    assert run.config.noise_seed is None
    assert run.config.engine == "local"
    assert run.config.target_epsilon == 10
    scored = read_json_lines(out / CELL / "evaluations.jsonl")[-1]
    assert scored["num_synthetic"] == 200
    private, noise_free = found[CELL], found["digits-tiny-epsinf-seed0"]
    assert private["audit"]["lower_bound"] <= private["audit"]["claimed"]
    assert private["accuracy_cnn"] == scored["downstream_cnn_accuracy"]
    assert private["epsilons"]["release"]["zero-out"] == pytest.approx(10, rel=1e-3)
    assert private["epsilons"]["release"]["replace-one"] > 20
    assert set(noise_free["epsilons"]["release"].values()) == {None}
    assert private["cpu_seconds"] > 0
    assert private["rounds"] == 3
    pictures = sorted(path.stem for path in out.glob("*.png"))
    assert pictures == ["digits-eps10", "digits-epsinf"]
    with Image.open(out / "digits-eps10.png") as picture:  # the method, and real images
        assert picture.size == (10 * (16 + 2) + 2, 2 * (16 + 2) + 2)
        real = np.asarray(picture.convert("L"))[16 + 4 : 2 * (16 + 2)]
    assert real.max() > 200
    for path in out.iterdir():
        if path.name != "cells.jsonl":
            path.rename(tmp_path / path.name)
    monkeypatch.setattr(runs, "compute", refuse)
    kept = (out / "cells.jsonl").read_bytes()
    for printed in (False, True):
        assert fill("tiny", printed=printed) == found
        assert json.loads((out / "table.md").read_text()) == found
    assert (out / "cells.jsonl").read_bytes() == kept


def test_a_failed_cell_costs_no_other_and_is_tried_again(fill, tmp_path, capsys):
    for _ in range(2):
        with pytest.raises(UserError, match=r"digits-broken-eps10-seed0: failed"):
            fill("eps10")
        assert "generator" in capsys.readouterr().err
    cells = [line["cell"] for line in read_json_lines(tmp_path / "out" / "cells.jsonl")]
    assert sorted(cells) == [*["digits-broken-eps10-seed0"] * 2, CELL]


@pytest.mark.parametrize("place", ["train_from_checkpoint", "evaluate"])
def test_an_interrupted_cell_goes_on(fill, tmp_path, monkeypatch, place):
    """What the first part of a training took is not known any more."""

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runs, place, crash)
        with pytest.raises((KeyboardInterrupt, Exit)):
            fill("tiny-eps10")
    assert not (tmp_path / "out" / "cells.jsonl").exists()
    if place == "evaluate":
        monkeypatch.setattr(runs, "train_cell", refuse)
    line = fill("tiny-eps10")[CELL]
    assert (line["cpu_seconds"] is None) == (place == "train_from_checkpoint")
    assert line["rounds"] == 3


def config_of(cell: Cell) -> RunConfig:
    return overridden(recipe(cell.how.recipe), cell.settings).validate()


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("grid", ["figures", "comparison"])
def test_every_cell_is_a_valid_run(grid, is_full):
    known = CELLS.at_full_scale() if is_full else CELLS
    if grid == "comparison":
        known = methods.grid(CompareRequest(full=is_full), {})
    cells = known.of_seeds([0, 1, 2])
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        if not cell.how.baseline:
            config = config_of(cell)
            assert config.noise_seed is None
            if config.noise_multiplier is None:
                asked = (config.target_epsilon, config.relation)
                assert asked == (cell.epsilon, "zero-out")


def test_a_noise_of_its_own_costs_the_epsilon_that_its_row_is_called_by():
    own = [c for c in CELLS.of_seeds([0]) if c.how.recipe and c.epsilon % 1 > 0]
    assert len(own) == 5
    for cell in own:
        config = dataclasses.replace(config_of(cell), num_classes=10)
        m = config.clients_per_round or config.num_clients
        plan = Plan.from_config(dataclasses.replace(config, clients_per_round=m))
        asked = {"adversary": "release", "relation": "zero-out", "guarantee": True}
        stated = epsilon(statements(plan, config.delta), **asked)
        assert stated == pytest.approx(cell.epsilon, rel=5e-3)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"only": "no-such"}, "give --only a part of"),
        ({"only": "("}, "regular expression"),
        ({"seeds": ("one",)}, "give --seeds"),
    ],
)
def test_unknown_cells_and_seeds_are_refused(asked, said):
    assert_refused(said, partial(TableRequest(**asked).of, CELLS))


def test_stored_lines_survive_a_torn_one(tmp_path):
    path = tmp_path / "out" / "cells.jsonl"
    Store(path).add("a", {"value": 1})
    path.write_bytes(path.read_bytes() + b'{"cell": "b", "val')
    store = Store(path)
    assert "b" not in store.lines
    store.add("b", {"value": 2})
    store.add("a", {"value": 3})
    assert Store(path).lines == store.lines
    assert [line["value"] for line in store.lines.values()] == [3, 2]
    path.write_text(json.dumps({"a": 1}) + "\n")
    assert_refused(f"^{path}: ", Store, path)
