"""Tables of cells: every cell is a valid run, made once, stored, and printed again."""

import dataclasses
import json
import re

import pytest

from experiments.grid import lines, runs
from experiments.grid.cells import NO_NOISE, Cell, Cells, Method, Request, Source
from experiments.paper import pictures
from experiments.paper.pictures import PICTURES
from experiments.store import Store
from fedgs.config.recipes import overridden, recipe
from fedgs.config.run_config import RunConfig
from fedgs.files import read_json_lines
from fedgs.privacy.accounting import Plan, statements
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from small_scale import refuse

CELL = "digits-tiny-eps10-seed0"


@pytest.fixture
def flags(monkeypatch, tmp_path) -> list[str]:
    """Of a call whose only data are a few digits, and whose methods are tiny."""
    few = {"num_clients": 12, "clients_per_node": 6, "test_fraction": 0.25}
    small = {"image_size": 16, "moment_size": 3, "latent_dim": 4}
    methods = {
        "broken": Method("staged", small, {10.0: {"generator": "upsample"}}),
        "tiny": Method("staged", small, {10.0: {}, NO_NOISE: {}}),
    }
    known = Cells("Tiny", {"digits": Source(few, {10.0: 0.93})}, methods)
    monkeypatch.setattr(pictures, "PICTURES", known)
    monkeypatch.setattr(runs, "NUM_SAMPLES", 200)
    monkeypatch.setattr(lines, "TRIALS", 2000)
    monkeypatch.setenv("FEDGS_CACHE_DIR", str(tmp_path / "cache"))
    return ["--seeds=0", f"--output={tmp_path / 'out'}"]


def table_of(tmp_path) -> dict[str, list[str]]:
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {" ".join(row[1:3]): row[3:] for row in rows}


def test_cells_are_made_once_and_printed_from_their_lines(flags, tmp_path, monkeypatch):
    assert pictures.main([*flags, "--only=tiny"]) == 0
    out = tmp_path / "out"
    run = RunFolder.open(out / CELL)
    assert run.config.noise_seed is None
    assert run.config.engine == "local"
    assert run.config.target_epsilon == 10
    scored = read_json_lines(out / CELL / "evaluations.jsonl")[-1]
    assert scored["num_synthetic"] == 200
    stored = Store(out / "cells.jsonl").lines[CELL]
    assert stored["audit"]["lower_bound"] <= stored["audit"]["claimed"]
    found = table_of(tmp_path)
    private, noise_free = found.values()
    assert re.fullmatch(r"tiny 10 \(2\d\.\d\)", next(iter(found)))
    assert [name for name in found if name.endswith("none")]
    accuracy = f"{scored['downstream_cnn_accuracy']:.3f}"
    assert private[:3] == [f"{accuracy} ({accuracy}–{accuracy})", "1", "0.93"]
    assert noise_free[2] == "–"
    assert private[3].isdigit()
    assert private[-1] == "3"
    grids = {"digits-tiny-eps10", "digits-tiny-epsinf"}
    assert {path.stem for path in out.glob("*.png")} == grids
    for path in out.iterdir():
        if path.name != "cells.jsonl":
            path.rename(tmp_path / path.name)
    monkeypatch.setattr(runs, "_compute", refuse)
    kept = (out / "cells.jsonl").read_bytes()
    for more in ([], ["--print"]):
        assert pictures.main([*flags, "--only=tiny", *more]) == 0
        assert table_of(tmp_path) == found
    assert (out / "cells.jsonl").read_bytes() == kept


def test_a_failed_cell_costs_no_other_and_is_tried_again(flags, tmp_path, capsys):
    for _ in range(2):
        assert pictures.main([*flags, "--only=eps10"]) == 2
        assert [name.split()[0] for name in table_of(tmp_path)] == ["tiny"]
        error = capsys.readouterr().err
        assert "generator" in error
        assert "digits-broken-eps10-seed0: failed" in error
    cells = [line["cell"] for line in read_json_lines(tmp_path / "out" / "cells.jsonl")]
    assert sorted(cells) == [*["digits-broken-eps10-seed0"] * 2, CELL]


@pytest.mark.parametrize(
    ("place", "cost"), [("train_from_checkpoint", "–"), ("evaluate", r"\d+")]
)
def test_an_interrupted_cell_goes_on(flags, tmp_path, monkeypatch, place, cost):
    """What the first part of a training took is not known any more."""

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    only = [*flags, "--only=tiny-eps10"]
    with monkeypatch.context() as patched:
        patched.setattr(runs, place, crash)
        assert pictures.main(only) == 130
    assert not (tmp_path / "out" / "cells.jsonl").exists()
    if place == "evaluate":
        monkeypatch.setattr(runs, "_train", refuse)
    assert pictures.main(only) == 0
    ((*_, seconds, rounds),) = table_of(tmp_path).values()
    assert re.fullmatch(cost, seconds)
    assert rounds == "3"


def config_of(cell: Cell) -> RunConfig:
    return overridden(recipe(cell.how.recipe), cell.settings).validate()


def test_every_cell_is_a_valid_run():
    found = PICTURES.of_seeds([0, 1, 2])
    assert len({cell.name for cell in found}) == len(found)
    for cell in found:
        config = config_of(cell)
        assert config.noise_seed is None
        if config.noise_multiplier is None:
            asked = (config.target_epsilon, config.relation)
            assert asked == (cell.epsilon, "zero-out")
        if cell.method.startswith("staged"):
            assert config.num_rounds == config.num_stages


def test_refinement_leaves_the_stages_four_fifths_of_the_privacy_spent():
    (cell,) = Request(only="writer-refined-eps", seeds=("0",)).of(PICTURES)
    config = config_of(cell)
    stages = sum(stage.weight for stage in config.stage_list)
    gradients = (config.num_rounds - config.num_stages) * config.batch_size
    assert stages / (stages + gradients) == pytest.approx(0.8)


def test_a_published_noise_costs_the_epsilon_that_its_row_is_called_by():
    (cell,) = Request(only="algorithm-1", seeds=("0",)).of(PICTURES)
    config = dataclasses.replace(config_of(cell), num_clients=1000, num_classes=10)
    assert (config.noise_multiplier, config.target_epsilon) == (1.07, None)
    (stated,) = [
        row.epsilon
        for row in statements(Plan.from_config(config), config.delta)
        if (row.adversary, row.relation) == ("release", "zero-out") and row.guarantee
    ]
    assert stated == pytest.approx(cell.epsilon, rel=5e-3)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(only="no-such"), "give --only a part of"),
        (Request(only="("), "regular expression"),
        (Request(seeds=("one",)), "give --seeds"),
    ],
)
def test_unknown_cells_and_seeds_are_refused(request_, said):
    assert_refused(said, request_.of, PICTURES)


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
    assert_refused("restore the file", Store, path)
