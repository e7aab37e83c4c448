"""Golden numbers of every recipe on both engines: a refactor moves none of them.

A small run of each is trained twice: by the local engine, and by Flower's two sides in
this process, which must give the same bytes. `make golden` rewrites the numbers, as
those of `test_golden`; `recipe_runs` alone knows the settings.

The runs have few rounds, so norms of releases hardly depend on the processor; norms of
weights may differ by a thousandth after a fit.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedgs.files import read_json, read_tensors, write_json
from fedgs.privacy.accountant import Statement, statements
from fedgs.privacy.ledger import Event
from fedgs.runs.epsilons import of_run
from fedgs.runs.run_folder import RunFolder, versions
from recipe_runs import RECIPE_NAMES, plan_of_recipe, run_of_recipe, shorten_fits
from runs import events, json_lines
from simulated_grid import product

GOLDEN = Path(__file__).parents[1] / "golden" / "recipes.json"
# Relative and absolute tolerances. Those of weights are larger: Adam's steps are no
# shorter where a gradient is nearly 0, and rounding decides its sign.
TOLERANCES = {
    "release_norms": (1e-4, 1e-9),
    "generator_norms": (3e-3, 1e-4),
    "average_norms": (3e-3, 1e-4),
}
DELTA = 1e-5


def norms(path: Path) -> list[float]:
    """The norm of each tensor of a file, by its name's order."""
    tensors, _ = read_tensors(path)
    return [float(value.double().norm()) for _, value in sorted(tensors.items())]


def counted(sent: Sequence[Event]) -> dict[str, list[Any]]:
    """What the ledger says of every release, by column."""
    return {
        "kind": [f"{event.kind} {event.release}" for event in sent],
        "clients": [str(event.participants) for event in sent],
        "noise": [event.noise_multiplier for event in sent],
        "B": [event.batch_size for event in sent],
        "C": [event.clip_bound for event in sent],
    }


def epsilons(rows: Iterable[Statement]) -> dict[str, float | None]:
    """What is stated for each adversary and relation: recipes claim no amplification.

    None is an epsilon without a bound.
    """
    return {f"{row.adversary}, {row.relation}": row.epsilon for row in rows}


def numbers(folder: RunFolder) -> dict[str, Any]:
    """What both engines must agree on."""
    lines = json_lines(folder.path / "metrics.jsonl")
    return {
        "release_norms": [line["release_norm"] for line in lines],
        "generator_norms": norms(folder.path / "generator.safetensors"),
        "average_norms": norms(folder.path / "generator_ema.safetensors"),
        "events": counted(events(folder)),
    }


def rewrite(name: str, found: dict[str, Any]) -> None:
    """Puts the numbers of one recipe into the file, and drops recipes that are gone."""
    known = read_json(GOLDEN)["recipes"] if GOLDEN.exists() else {}
    recipes = {n: known[n] for n in RECIPE_NAMES if n in known} | {name: found}
    write_json(GOLDEN, {"versions": versions(), "recipes": recipes})


@pytest.mark.usefixtures("server_process", "clock")
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_recipe_repeats_its_golden_numbers_on_both_engines(
    name, tmp_path, update_golden, monkeypatch
):
    shorten_fits(monkeypatch)
    local = run_of_recipe(name, tmp_path / "local", "local")
    flower = run_of_recipe(name, tmp_path / "flower", "flower")
    found = numbers(local)
    assert product(flower) == product(local)
    assert numbers(flower) == found
    found["epsilons"] = {
        "local": epsilons(of_run(local.path)),
        "flower": epsilons(of_run(flower.path)),
        "at full size": epsilons(statements(plan_of_recipe(name), DELTA)),
    }
    if update_golden:
        rewrite(name, found)
    golden = read_json(GOLDEN)["recipes"][name]
    for kind, (rel, least) in TOLERANCES.items():
        assert found[kind] == pytest.approx(golden[kind], rel=rel, abs=least), kind
    noise, expected = found["events"].pop("noise"), golden["events"].pop("noise")
    assert found["events"] == golden["events"]
    assert noise == pytest.approx(expected, rel=1e-6)
    assert found["epsilons"].keys() == golden["epsilons"].keys()
    for what, rows in golden["epsilons"].items():
        assert found["epsilons"][what] == pytest.approx(rows, rel=1e-6), what


def test_every_recipe_has_golden_numbers():
    assert {*read_json(GOLDEN)["recipes"]} == {*RECIPE_NAMES}
