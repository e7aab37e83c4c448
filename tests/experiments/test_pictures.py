"""Tables of cells: every cell is a valid run, made once, and printed again."""

import dataclasses
import json
import re

import pytest

from experiments.paper import cells, pictures
from experiments.paper.cell_list import NO_NOISE, Cell, Cells, Method, Request, Source
from experiments.paper.pictures import PICTURES
from fedgs.config.recipes import overridden, recipe
from fedgs.config.run_config import RunConfig
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
    monkeypatch.setattr(cells, "NUM_SAMPLES", 200)
    monkeypatch.setenv("FEDGS_CACHE_DIR", str(tmp_path / "cache"))
    return ["--seeds=0", f"--output={tmp_path / 'out'}"]


def table_of(tmp_path) -> dict[str, list[str]]:
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {" ".join(row[1:3]): row[3:] for row in rows}


def test_cells_are_made_once_and_printed_from_their_folders(
    flags, tmp_path, monkeypatch
):
    assert pictures.main([*flags, "--only=tiny"]) == 0
    out = tmp_path / "out"
    run = RunFolder.open(out / CELL)
    assert run.config.noise_seed is None
    assert run.config.engine == "local"
    assert run.config.target_epsilon == 10
    lines = (out / CELL / "evaluations.jsonl").read_text().splitlines()
    scored = json.loads(lines[-1])
    assert scored["num_synthetic"] == 200
    found = table_of(tmp_path)
    private, noise_free = found.values()
    assert re.fullmatch(r"tiny 10 \(2\d\.\d\)", next(iter(found)))
    assert [name for name in found if name.endswith("none")]
    accuracy = f"{scored['downstream_cnn_accuracy']:.3f}"
    assert private[:3] == [f"{accuracy} ({accuracy}–{accuracy})", "1", "0.93"]
    assert noise_free[2] == "–"
    assert private[3].isdigit()
    assert private[-1] == "3"
    assert {path.stem for path in out.glob("*.png")} == {
        "digits-tiny-eps10",
        "digits-tiny-epsinf",
    }
    (out / "table.md").unlink()
    for name in ("new_run", "train_from_checkpoint", "evaluate"):
        monkeypatch.setattr(cells, name, refuse)
    for more in ([], ["--print"]):
        assert pictures.main([*flags, "--only=tiny", *more]) == 0
        assert table_of(tmp_path) == found


def test_a_failed_cell_costs_no_other(flags, tmp_path, capsys):
    assert pictures.main([*flags, "--only=eps10"]) == 2
    assert [name.split()[0] for name in table_of(tmp_path)] == ["tiny"]
    error = capsys.readouterr().err
    assert "generator" in error
    assert "digits-broken-eps10-seed0: failed" in error


def test_an_interrupted_cell_goes_on_and_its_cost_is_unknown(
    flags, tmp_path, monkeypatch
):
    def crash(*_: object) -> None:
        raise MemoryError

    only = [*flags, "--only=tiny-eps10"]
    with monkeypatch.context() as patched:
        patched.setattr(cells, "train_from_checkpoint", crash)
        assert pictures.main(only) == 2
    assert table_of(tmp_path) == {}
    assert pictures.main(only) == 0
    ((*_, cost, rounds),) = table_of(tmp_path).values()
    assert (cost, rounds) == ("–", "3")


def config_of(cell: Cell) -> RunConfig:
    return overridden(recipe(cell.how.recipe), cell.settings()).validate()


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
    asked = Request(only="writer-refined-eps", seeds=("0",))
    (cell,) = asked.of(PICTURES)
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


def test_nothing_is_printed_of_a_folder_that_is_not_there(tmp_path):
    asked = Request(output=tmp_path / "none", printed=True)
    assert_refused("output = .*none: no such folder", cells.fill, PICTURES, asked)


def test_unknown_cells_and_seeds_are_refused():
    for asked, part in {
        "give --only a part of": Request(only="no-such"),
        "regular expression": Request(only="("),
        "give --seeds": Request(seeds=("one",)),
    }.items():
        assert_refused(asked, lambda part=part: part.of(PICTURES))
