"""`fedgs compare`: which cells there are, and the page that their lines make."""

import json
import sys
from pathlib import Path

import pytest

from command_line import printed, refused
from evaluation_data import refuse
from experiments.baselines import BASELINES
from experiments.comparison import methods
from experiments.comparison.options import METRIC_NAMES, CompareRequest
from experiments.comparison.published import by_classifier
from experiments.comparison.results import details, losses, overview, page
from experiments.comparison.rows import rows_of
from experiments.grid import lines, runs
from experiments.grid.cells import CellMethod
from experiments.grid.line_checks import check_line
from experiments.store import Store
from fedgs.evaluation.classifiers import CLASSIFIERS
from fedgs.privacy.poisson import PoissonReleases, epsilon
from refusals import assert_refused

DOCS = Path(__file__).parents[2] / "docs"
STORED = DOCS / "benchmark" / "cells.jsonl"
SMALL = ("--num-clients=12", "--clients-per-node=6", "--test-fraction=0.25")
SMALL += ("--image-size=16", "--data=digits", "--seeds=0")


@pytest.fixture
def call(fedgs, monkeypatch, tmp_path):
    """Calls the command on a few digits, with tiny rows; returns exit code and text."""
    votes = {"steps": 2, "batch_size": 4, "teacher_batch_size": 4}
    embedding = {"num_features": 50, "generator_steps": 2}
    few = {"discriminator_dim": 4, "generator_dim": 4}
    of_others = {
        "pate-gan": CellMethod(baseline="pate-gan", reduced=votes),
        "wgan-gp": CellMethod(baseline="wgan-gp", settings=few, reduced={"steps": 2}),
        "dp-merf": CellMethod(baseline="dp-merf", reduced=embedding),
    }
    own = {n: how for n, how in methods.KNOWN.methods.items() if not how.baseline}
    tiny = methods.KNOWN._replace(methods=own | of_others)
    known = dict.fromkeys(of_others, "")
    monkeypatch.setattr(methods, "KNOWN", tiny)
    monkeypatch.setattr(methods, "BASELINES", known)
    monkeypatch.setattr(runs, "NUM_SAMPLES", 200)
    monkeypatch.setattr(lines, "TRIALS", 300)
    monkeypatch.setenv("FEDGS_CACHE_DIR", str(tmp_path / "cache"))

    def run(*words: str) -> tuple[int, str, str]:
        return fedgs("compare", *SMALL, f"--output={tmp_path / 'out'}", *words)

    return run


def tables(tmp_path) -> dict[str, dict[str, list[str]]]:
    """Returns the Markdown tables by caption, their rows by the first cell."""
    found: dict[str, dict[str, list[str]]] = {}
    caption = ""
    for text in (tmp_path / "out" / "table.md").read_text().splitlines():
        if text.startswith("**"):
            caption = text.strip("*")
        elif text.startswith("| ") and caption:
            row = [cell.strip() for cell in text.strip("|").split("|")]
            found.setdefault(caption, {})[row[0].removesuffix(" *")] = row[1:]
    return found


def test_rows_of_users_of_records_and_without_privacy_stand_apart(
    call, tmp_path, monkeypatch
):
    only = "--only=pate-gan-eps10|wgan-gp|dp-merf-eps10|steps-eps3"
    others = "--method=baselines:Steps"  # of somebody else
    code, shown, _ = call(only, others, "--metrics=cnn")
    assert code == 0
    found = tables(tmp_path)
    unit = "epsilon of one user (a client with all its images)"
    titles = (
        f"accuracy of the CNN, FID, by {unit}",
        f"{unit}, what was run",
        "epsilon of one record (one image), what was run",
        "nobody: no guarantee, what was run",
    )
    by_epsilon, users, records, nobody = (found[title] for title in titles)
    assert by_epsilon["moments"] == ["not run"] * 4
    assert by_epsilon["pate-gan"][1:] == ["not run"] * 2 + ["–"]
    named = [{*rows} - {"method"} for rows in (users, records, nobody)]
    assert named == [{"pate-gan"}, {"dp-merf", "steps"}, {"wgan-gp"}]
    # PATE-GAN's own target is of replace-one; here all users' rows are of zero-out.
    assert users["pate-gan"][1].startswith("10 zero-out")
    assert users["method"][1] == "epsilon of one user"
    assert records["dp-merf"][1].startswith("10 replace-one")
    assert records["dp-merf"][2].endswith("(cap 100)")
    assert "pate-gan" in shown
    stored = Store(tmp_path / "out" / "cells.jsonl").lines
    line = stored["digits-dp-merf-eps10-seed0"]
    by_unit = {r["unit"]: r["epsilon"] for r in line["guarantees"]}
    assert by_unit["user"] is None or by_unit["user"] > by_unit["record"]
    assert line["cap"] == 100
    assert line["reduced"] == {"num_features": 50, "generator_steps": 2}
    assert stored["digits-steps-eps3-seed0"]["releases"] == 4
    given = {"num_clients": 12, "clients_per_node": 6, "test_fraction": 0.25}
    assert line["settings"] == given | {"image_size": 16}
    monkeypatch.setattr(runs, "compute", refuse)
    assert printed(call(only, others)) == printed(call(only, others, "--metrics=cnn"))


def test_every_registered_method_has_rows():
    asked = CompareRequest(method=("baselines:Steps",))
    known = methods.grid(asked, {})
    names = {m.baseline for m in known.methods.values() if m.baseline}
    assert names == {*BASELINES, "baselines:Steps"}
    assert methods.unit(known.methods["steps"]) == "record"
    cells = [cell.name for cell in known.of_seeds([0])]
    assert len(cells) == len({*cells})
    assert "mnist-by-writer-moments-eps10-seed0" in cells
    assert "mnist-gs-wgan-epsinf-seed0" in cells
    wanted = [f"mnist-steps-eps{epsilon}-seed0" for epsilon in (10, 3, 1)]
    assert [name for name in cells if name.startswith("mnist-steps")] == wanted


def line(method: str, accuracy: float, own: bool, unit: str = "user") -> dict:
    named = {"cell": f"x-{method}", "data": "x", "method": method, "own": own}
    return named | {"asked_epsilon": 10.0, "unit": unit, "accuracy_cnn": accuracy}


def test_the_page_says_where_own_methods_lose():
    own = [line("ours", 0.5, True), line("best", 0.9, True)]
    others = [line("theirs", 0.7, False), line("curator", 0.95, False, "record")]
    known = {each["method"]: each for each in own + others}
    first, second = losses(rows_of([], known))
    assert first == "x, epsilon 10 of one user: ours (0.500) is below theirs (0.700)"
    assert "curator has 0.950, more than all of fedgs' (0.900)" in second
    known["theirs"]["accuracy_cnn"] = 0.4
    assert len(losses(rows_of([], known))) == 1


def test_a_failed_cell_stands_on_the_page_with_its_reason():
    failed = line("theirs", 0.0, False) | {"failed": "too much"}
    text = page(rows_of([], {"theirs": failed}))
    assert "x-theirs: too much" in text
    assert "| theirs | failed |" in text


def test_thirteen_classifiers_stand_below_the_papers():
    ours = line("moments", 0.9, True) | {"data": "mnist"}
    ours["accuracy_by_classifier"] = dict.fromkeys(CLASSIFIERS, 0.75)
    gan = ours | {"cell": "gan", "method": "wgan-gp", "asked_epsilon": None}
    older = line("dp-merf", 0.8, False, "record") | {"data": "mnist"}
    rows = rows_of([], {each["cell"]: each for each in (ours, gan, older)})
    table = by_classifier("mnist", rows)
    assert table is not None
    names = [row[0] for row in table.rows]
    place = names.index("GAN (non-private), published")
    assert names[place + 1] == "wgan-gp, no noise"
    assert names[-1] == "moments, epsilon 10 of one user"
    assert not any(name.startswith("dp-merf") for name in names)
    assert table.rows[place][-1] == "0.63"
    assert table.rows[-1][1:] == ["0.750"] * 14
    assert by_classifier("x", rows) is None


@pytest.mark.parametrize("is_full", [False, True])
def test_the_noise_of_bdp_gan_is_that_of_the_epsilon_asked(is_full):
    known = methods.grid(CompareRequest(full=is_full), {}).methods
    noise = known["bdp-gan"].epsilons[3.0]["noise_per_clip"]
    steps, batch = (23_437, 1024) if is_full else (700, 64)
    rate = batch / 52_000
    releases = [PoissonReleases(rate, z, steps) for z in (noise, noise * 0.995)]
    enough, too_little = (epsilon([each], methods.GRID_DELTA) for each in releases)
    assert enough <= 3.0 < too_little


def test_bdp_gan_has_no_epsilon_where_the_number_of_images_is_not_known():
    known = methods.grid(CompareRequest(), {"data": "npz:own.npz"}).of_seeds([0])
    asked = [cell.epsilon for cell in known if cell.method == "bdp-gan"]
    assert asked == [methods.NO_NOISE]


def test_at_full_scale_no_setting_is_below_its_method():
    grids = [methods.grid(CompareRequest(full=full), {}) for full in (True, False)]
    full, small = ({cell.method: cell for cell in grid.of_seeds([0])} for grid in grids)
    assert small["fedavg-gan"].settings["num_rounds"] == 60
    assert "num_rounds" not in full["fedavg-gan"].settings
    assert small["wgan-gp"].settings["steps"] == 700
    assert not any(cell.how.reduced for cell in full.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--print"], "output = .*out:"),
        (["--only=nope"], "only = 'nope':"),
        (["--device=cuda"], "device = cuda:"),
        (["--data=npz:/no.npz"], "data = 'npz:/no.npz': .* does not exist"),
        (["--metrics=fid"], "metrics = 'fid':"),
    ],
)
def test_what_would_fail_every_cell_is_refused_and_stores_nothing(
    call, tmp_path, monkeypatch, words, said
):
    assert {*METRIC_NAMES} == {*runs.SCORES_OF_METRICS}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(call(*words), said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("seeds", ["-1", "1000", "0,1000", ""])
def test_seeds_that_no_row_has_are_refused_by_their_own_name(call, seeds):
    refused(call(f"--seeds={seeds}"), "seeds = .*give --seeds")


def test_an_output_that_can_hold_nothing_is_refused_before_work(call, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for output in (file, file / "below"):
        refused(call(f"--output={output}"), f"output = {output}: {file} is a file;")
    refused(call("--output=~nobody-of-this-name/out"), "output = ~nobody-of-this-name")


# ------------------------------------------------------------------ lines of a folder

ONE_CELL = "--only=moments-eps10"
CELL = "digits-moments-eps10-seed0"


def keep(folder: Path, *lines: dict) -> Path:
    """Writes lines of one cell, each a good one with changes; returns the file."""
    good = json.loads(STORED.read_text().partition("\n")[0])
    good |= {"cell": CELL, "data": "digits", "num_clients": 12}
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "cells.jsonl"
    texts = [json.dumps(good | changes) for changes in lines]
    kept.write_text("".join(f"{text}\n" for text in texts))
    return kept


def test_a_stored_line_of_what_is_asked_for_is_the_answer(call, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "compute", refuse)
    settings = {"num_clients": 12, "clients_per_node": 6, "test_fraction": 0.25}
    keep(tmp_path / "out", {"settings": settings | {"image_size": 16}})
    assert "0.936" in printed(call(ONE_CELL))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "0.936" in printed(call(ONE_CELL, "--output=~/out"))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"num_clients": 1000}, "num_clients = 1000, not 12;"),
        ({"asked_epsilon": 3.0}, "asked_epsilon = 3.0, not 10.0;"),
        ({"seed": 1}, "seed = 1, not 0;"),
        ({"method": "gs-wgan"}, "method = 'gs-wgan', not 'moments';"),
        ({"unit": "record"}, "unit = 'record', not 'user';"),
        ({"reduced": {"steps": 1}}, r"reduced = {'steps': 1}, not {};"),
        ({"settings": {"image_size": 28}}, "settings = {'image_size': 28}, not {.*};"),
    ],
)
def test_a_stored_line_of_other_settings_is_not_the_answer(call, tmp_path, other, said):
    kept = keep(tmp_path / "out", other)
    before = kept.read_bytes()
    refused(call(ONE_CELL), f"{CELL} is stored with {said} .*another --output.*--print")
    assert kept.read_bytes() == before
    printed(call(ONE_CELL, "--print"))


def test_a_failure_replaces_no_scores(call, tmp_path):
    kept = keep(tmp_path / "out", {"fid": None})
    (tmp_path / "out" / CELL).write_text("in the place of the run folder")
    code, shown, said = call(ONE_CELL, "--metrics=cnn,images")
    assert (code, "0.936" in shown) == (2, True)
    assert f"{CELL}: failed; call again" in said
    assert kept.read_text().count("\n") == 1
    keep(tmp_path / "out", {}, {"failed": "as an older version kept it"})
    assert "0.936" in printed(call(ONE_CELL, "--print"))


@pytest.mark.parametrize("name", ["data", "method", "asked_epsilon", "unit", "own"])
@pytest.mark.parametrize("value", [None, [], {"a": 1}, float("nan"), 10**400, "\ud800"])
def test_a_damaged_line_is_refused_by_its_number(call, tmp_path, name, value):
    if (name, value) == ("asked_epsilon", None):
        value = "ten"
    kept = keep(tmp_path / "out", {}, {name: value})
    for words in ([], ["--print"]):
        refused(call(ONE_CELL, *words), f"{kept}: line 2 .*{name}.*restore the file")


NUMBERS = ["num_clients", "releases", "rounds", "bytes_per_client", "accuracy_cnn"]
GUARANTEE = {"label": "valid", "unit": "user", "relation": "zero-out", "epsilon": 1.0}
AUDIT = {"lower_bound": 1.0, "claimed": 2.0, "refuted": False}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        *(({name: float("inf")}, name) for name in NUMBERS),
        *(({name: "many"}, name) for name in [*NUMBERS, "cpu_seconds", "fid"]),
        ({"guarantees": None}, "guarantees"),
        ({"guarantees": ["valid"]}, "guarantees"),
        ({"guarantees": [GUARANTEE | {"relation": "other"}]}, "relation = 'other'"),
        ({"guarantees": [GUARANTEE | {"epsilon": "1"}]}, "epsilon = '1'"),
        ({"guarantees": [{"label": "valid"}]}, "unit is missing"),
        ({"audit": 3}, "audit = 3"),
        ({"audit": AUDIT | {"claimed": []}}, "claimed = "),
        ({"accuracy_by_classifier": {"mlp": "good"}}, "accuracy_by_classifier.mlp"),
        ({"reduced": []}, "reduced"),
        ({"settings": 1}, "settings"),
        ({"trust": 1}, "trust"),
        ({"failed": 1}, "failed"),
    ],
)
def test_damaged_facts_of_a_line_are_refused(call, tmp_path, wrong, named):
    keep(tmp_path / "out", wrong)
    refused(call(ONE_CELL, "--print"), f"line 1 .*{named}")


@pytest.mark.parametrize("changes", [{}, {"failed": "why"}])
def test_a_line_without_a_field_is_refused(tmp_path, changes):
    kept = keep(tmp_path, changes)
    whole = json.loads(kept.read_text())
    needed = {"cell", "data", "method", "asked_epsilon", "seed"}
    if not changes:
        unread = {"num_records", "accuracy_by_classifier", "versions", "fid_network"}
        needed = set(whole) - unread
    for name in needed:
        line = {other: whole[other] for other in whole if other != name}
        kept.write_text(json.dumps(line) + "\n")
        assert_refused(f"line 1 .*{name} is missing", Store, kept, check_line)


def test_rows_without_the_accuracy_show_none_and_lose_nothing(call, tmp_path):
    images_only = {"accuracy_cnn": None, "fid": 20.0}
    second = {"cell": f"{CELL[:-1]}1", "seed": 1}
    keep(tmp_path / "out", images_only, images_only | second)
    shown = printed(call(ONE_CELL, "--print", "--metrics=images"))
    assert "–, 20 (2)" in shown
    assert "-1.000" not in (tmp_path / "out" / "table.md").read_text()


# ------------------------------------------------------------------ methods of others

FINE = """
from baselines import Steps
class METHOD(Steps):
    pass
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("METHOD = (", "SyntaxError: "),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        (f"{FINE}METHOD.Settings = dict", "Settings is no dataclass"),
        (f"{FINE}METHOD.name = None", "name = None"),
        (f"{FINE}METHOD.title = 3", "title = 3"),
        (f"{FINE}METHOD.unit = 'site'", "unit = 'site'"),
        (f"{FINE}METHOD.recipe = None", "recipe = None"),
        (
            f"import dataclasses\n{FINE}METHOD.Settings = dataclasses.make_dataclass("
            "'Needs', ['value'])",
            "missing 1 required .* argument: 'value'",
        ),
    ],
)
@pytest.mark.parametrize("words", [[], ["--print"]])
def test_a_method_of_others_that_cannot_be_used_is_refused(
    call, tmp_path, monkeypatch, code, said, words
):
    place = tmp_path / "methods"
    place.mkdir()
    (place / "bad_method.py").write_text(code)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "bad_method", raising=False)
    refused(call("--method=bad_method:METHOD", *words), f"method = .*{said}")


# ------------------------------------------------------------------ what is stored


@pytest.fixture
def stored() -> dict[str, dict]:
    return Store(STORED, check_line).lines


@pytest.fixture
def rows(stored):
    return rows_of(methods.grid(CompareRequest(), {}).of_seeds([0]), stored)


def test_stored_lines_have_no_figure_that_the_guarantee_keeps_back(stored):
    for known in stored.values():
        assert {row["label"] for row in known["guarantees"]} <= {"valid"}


def test_seeds_that_were_not_run_alike_have_no_mean(stored):
    stored["mnist-by-writer-wgan-gp-epsinf-seed2"]["reduced"] = {"steps": 120}
    assert_refused("seed2: differs from .*seed0 in reduced;", rows_of, [], stored)


def test_the_documentation_has_the_page_of_the_stored_lines(rows):
    # Else: fedgs compare --print --output docs/benchmark
    assert (DOCS / "benchmark" / "table.md").read_text() == page(rows)


def test_rows_that_were_tuned_on_what_they_are_scored_on_are_marked(rows):
    digits = {name for name, how in methods.KNOWN.methods.items() if how.recipe}
    digits = digits - {"dp-merf-federated"} | {"wgan-gp"}
    expected = dict.fromkeys(methods.KNOWN.data, digits)
    of_clothes = {"moments", "moments-parts", "feature-means", "feature-means-gs-wgan"}
    expected["fashion-mnist"] = of_clothes
    for data, names in expected.items():
        for table in (overview(data, "user", rows), details(data, "user", rows)):
            first = [row[0].split(" ") for row in table.rows]
            marked = {name for name, *marks in first if "‡" in marks}
            assert marked == names & {name for name, *_ in first}
