"""The benchmark: cells are made once, printed from their lines, and fail alone."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from command_line import refused
from experiments.benchmark import command, grid, lines
from experiments.benchmark.page import losses, markdown
from experiments.benchmark.published import by_classifier
from experiments.benchmark.request import METRICS, BenchmarkRequest
from experiments.benchmark.tables import details, overview, rows_of
from experiments.paper import cells
from fedgs.baselines import METHODS, dp_merf
from fedgs.baselines.contract import Facts
from fedgs.evaluation.classifiers import NAMES
from fedgs.files import read_json_lines
from fedgs.privacy.poisson import Releases, epsilon
from refusals import assert_refused
from small_scale import refuse

DOCS = Path(__file__).parents[2] / "docs"
SMALL = ("--num-clients=12", "--clients-per-node=6", "--test-fraction=0.25")
SMALL += ("--image-size=16", "--data=digits", "--seeds=0")
FEW = {"discriminator_dim": 4, "generator_dim": 4}


@pytest.fixture
def call(fedgs, monkeypatch, tmp_path):
    """Calls the command on a few digits, with tiny rows; returns exit code and text."""
    tiny = {"steps": 2, "batch_size": 4, "teacher_batch_size": 4}
    entries = {
        "pate-gan": grid.Entry("pate-gan", {}, tiny, noise=grid._inverse_noise),
        "wgan-gp": grid.Entry("wgan-gp", FEW, {"steps": 2}, {}, is_private=False),
        "dp-merf": grid.Entry(
            "dp-merf", {}, {"num_features": 50, "generator_steps": 2}
        ),
    }
    monkeypatch.setattr(grid, "ENTRIES", entries)
    monkeypatch.setattr(grid, "REGISTERED", {e.baseline: "" for e in entries.values()})
    monkeypatch.setattr(cells, "NUM_SAMPLES", 200)
    monkeypatch.setattr(lines, "TRIALS", 2000)
    monkeypatch.setenv("FEDGS_CACHE_DIR", str(tmp_path / "cache"))

    def run(*words: str) -> tuple[int, str, str]:
        return fedgs("benchmark", *SMALL, f"--output={tmp_path / 'out'}", *words)

    return run


def stored(tmp_path) -> dict[str, dict]:
    return lines.read_lines(tmp_path / "out")


def tables(tmp_path) -> dict[str, dict[str, list[str]]]:
    """Returns the Markdown tables by caption, their rows by the first cell."""
    found: dict[str, dict[str, list[str]]] = {}
    caption = ""
    for text in (tmp_path / "out" / "benchmark.md").read_text().splitlines():
        if text.startswith("**"):
            caption = text.strip("*")
        elif text.startswith("| ") and caption:
            row = [cell.strip() for cell in text.strip("|").split("|")]
            found.setdefault(caption, {})[row[0].removesuffix(" *")] = row[1:]
    return found


def test_rows_of_users_of_records_and_without_privacy_stand_apart(call, tmp_path):
    code, shown, _ = call("--only=pate-gan-eps10|wgan-gp|dp-merf-eps10")
    assert code == 0
    found = tables(tmp_path)
    users, records, nobody = (
        next(rows for name, rows in found.items() if name.startswith(start))
        for start in (
            "epsilon of one user (a client with all its images), what was run",
            "epsilon of one record (one image), what was run",
            "nobody: no guarantee, what was run",
        )
    )
    assert [{*rows} - {"method"} for rows in (users, records, nobody)] == [
        {"pate-gan"},
        {"dp-merf"},
        {"wgan-gp"},
    ]
    # PATE-GAN's own target is of replace-one; here all users' rows are of zero-out.
    assert users["pate-gan"][1].startswith("10 zero-out")
    assert users["method"][1] == "epsilon of one user"
    assert records["dp-merf"][1].startswith("10 replace-one")
    assert records["dp-merf"][2].endswith("(cap 100)")
    assert "pate-gan" in shown
    line = stored(tmp_path)["digits-dp-merf-eps10-seed0"]
    by_unit = {r["unit"]: r["epsilon"] for r in line["guarantees"]}
    assert by_unit["user"] is None or by_unit["user"] > by_unit["record"]
    assert line["cap"] == 100
    assert line["peak_memory_bytes"] > 1e8
    assert line["cpu_seconds"] > 0
    assert line["audit"]["lower_bound"] <= line["audit"]["claimed"]
    assert line["reduced"] == {"num_features": 50, "generator_steps": 2}


def test_cells_without_a_line_say_not_run(call, tmp_path):
    assert call("--only=wgan-gp")[0] == 0
    found = tables(tmp_path)
    (users,) = (
        rows for name, rows in found.items() if "by epsilon of one user" in name
    )
    assert users["staged"] == ["not run"] * 4
    assert users["pate-gan"] == ["not run"] * 3 + ["–"]


def test_printing_needs_the_stored_lines_alone(call, tmp_path, monkeypatch):
    assert call("--only=pate-gan-eps10")[0] == 0
    before = (tmp_path / "out" / "benchmark.md").read_text()
    kept = (tmp_path / "out" / "cells.jsonl").read_bytes()
    for path in (tmp_path / "out").iterdir():
        if path.name != "cells.jsonl":
            path.rename(tmp_path / path.name)
    monkeypatch.setattr(command, "compute", refuse)
    assert call("--only=pate-gan-eps10", "--print")[0] == 0
    assert call("--only=pate-gan-eps10")[0] == 0  # nothing is missing
    assert (tmp_path / "out" / "benchmark.md").read_text() == before
    assert (tmp_path / "out" / "cells.jsonl").read_bytes() == kept


def test_a_failed_cell_costs_no_other_and_is_tried_again(call, tmp_path, monkeypatch):
    only = "--only=pate-gan-eps10|wgan-gp"

    def broken(cell, *rest):
        if cell.method == "pate-gan":
            raise MemoryError("too much")
        return compute(cell, *rest)

    compute = command.compute
    with monkeypatch.context() as patched:
        patched.setattr(command, "compute", broken)
        code, _, error = call(only)
    assert code == 2
    assert "digits-pate-gan-eps10-seed0: failed" in error
    assert {name: "failed" in line for name, line in stored(tmp_path).items()} == {
        "digits-wgan-gp-epsinf-seed0": False,
        "digits-pate-gan-eps10-seed0": True,
    }
    text = (tmp_path / "out" / "benchmark.md").read_text()
    assert "too much" in text
    assert "| pate-gan | failed |" in text
    assert call(only)[0] == 0
    assert "failed" not in stored(tmp_path)["digits-pate-gan-eps10-seed0"]
    assert len(read_json_lines(tmp_path / "out" / "cells.jsonl")) == 3


def test_an_interrupted_benchmark_goes_on(call, tmp_path, monkeypatch):
    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cells, "evaluate", crash)
        assert call("--only=pate-gan-eps10")[0] != 0
    assert stored(tmp_path) == {}
    monkeypatch.setattr(cells, "_train", refuse)  # what was trained is not again
    assert call("--only=pate-gan-eps10")[0] == 0
    assert [*stored(tmp_path)] == ["digits-pate-gan-eps10-seed0"]


def test_the_page_is_one_file_with_a_row_of_each_cell(call, tmp_path):
    assert call("--only=wgan-gp|dp-merf-eps10")[0] == 0
    page = (tmp_path / "out" / "benchmark.html").read_text()
    tags: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))
    parser.feed(page)
    names = {tag for tag, _ in tags}
    assert not names & {"script", "iframe", "object"}
    images = [found for tag, found in tags if tag == "img"]
    assert len(images) == 2
    assert all(str(found["src"]).startswith("data:image/png") for found in images)
    links = [str(found.get("href")) for tag, found in tags if tag == "a"]
    targets = {f"#{found['id']}" for _, found in tags if "id" in found}
    assert {*links} <= targets
    assert "dp-merf" in page


def test_somebody_elses_method_joins_by_its_place(call, tmp_path):
    asked = BenchmarkRequest(method=("baselines:STEPS",))
    known = grid.grid(asked, {"data": "digits"})
    assert grid.unit(known.methods["steps"]) == "record"
    assert [cell.name for cell in known.of_seeds([0]) if cell.method == "steps"] == [
        f"digits-steps-eps{epsilon}-seed0" for epsilon in (10, 3, 1)
    ]
    words = ("--method=baselines:STEPS", "--only=steps-eps3")
    assert call(*words)[0] == 0
    line = stored(tmp_path)["digits-steps-eps3-seed0"]
    assert (line["unit"], line["releases"]) == ("record", 4)


def test_every_registered_method_has_rows():
    known = grid.grid(BenchmarkRequest(), {})
    assert {m.baseline for m in known.methods.values() if m.baseline} == {*METHODS}
    names = [cell.name for cell in known.of_seeds([0])]
    assert len(names) == len({*names})
    assert {"mnist-by-writer-staged-eps10-seed0", "mnist-gs-wgan-epsinf-seed0"} <= {
        *names
    }


def line(method: str, accuracy: float, own: bool, unit: str = "user") -> dict:
    return {
        "cell": f"x-{method}",
        "data": "x",
        "method": method,
        "asked_epsilon": 10.0,
        "unit": unit,
        "own": own,
        "accuracy_cnn": accuracy,
    }


def test_the_page_says_where_own_methods_lose():
    known = {
        name: line(name, *rest)
        for name, rest in {
            "ours": (0.5, True),
            "best": (0.9, True),
            "theirs": (0.7, False),
            "curator": (0.95, False, "record"),
        }.items()
    }
    first, second = losses(rows_of([], known))
    assert first == "x, epsilon 10 of one user: ours (0.500) is below theirs (0.700)"
    assert "curator has 0.950, more than all of fedgs' (0.900)" in second
    known["theirs"]["accuracy_cnn"] = 0.4
    assert len(losses(rows_of([], known))) == 1


def test_thirteen_classifiers_stand_below_the_papers():
    ours = line("staged", 0.9, True) | {"data": "mnist"}
    ours["accuracy_by_classifier"] = dict.fromkeys(NAMES, 0.75)
    gan = ours | {"cell": "gan", "method": "wgan-gp", "asked_epsilon": None}
    older = line("dp-merf", 0.8, False, "record") | {"data": "mnist"}
    rows = rows_of([], {each["cell"]: each for each in (ours, gan, older)})
    table = by_classifier("mnist", rows)
    assert table is not None
    names = [row[0] for row in table.rows]
    place = names.index("GAN (non-private), published")
    assert names[place + 1] == "wgan-gp, no noise"
    assert names[-1] == "staged, epsilon 10 of one user"
    assert not any(name.startswith("dp-merf") for name in names)
    assert table.rows[place][-1] == "0.63"
    assert table.rows[-1][1:] == ["0.750"] * 14
    assert by_classifier("x", rows) is None


def test_a_line_has_the_fid_of_its_scores(monkeypatch, tmp_path):
    monkeypatch.setattr(lines, "_of_own", lambda run: {})
    cell = grid.grid(BenchmarkRequest(), {}).of_seeds([0])[0]
    found = {"fid_lenet_mnist_by_writer": 7.5, "network": "lenet-35af6d"}
    made = lines.line_of(cell, tmp_path, found, is_full=False)
    assert (made["fid"], made["fid_network"]) == (7.5, "lenet-35af6d")


def test_stored_lines_have_no_figure_that_the_guarantee_keeps_back():
    for line in lines.read_lines(DOCS / "benchmark").values():
        assert {row["label"] for row in line["guarantees"]} <= {"valid"}


@pytest.mark.parametrize("is_full", [False, True])
def test_the_noise_of_bdp_gan_is_that_of_the_epsilon_asked(is_full):
    of_epsilon = grid.others(BenchmarkRequest(full=is_full))["bdp-gan"].of_epsilon
    steps, batch = (23_437, 1024) if is_full else (700, 64)
    noise = of_epsilon[3.0]["noise_per_clip"]
    found = [
        epsilon([Releases(batch / 52_000, z, steps)], grid.DELTA)
        for z in (noise, noise * 0.995)
    ]
    assert found[0] <= 3.0 < found[1]


def test_bdp_gan_has_no_epsilon_where_the_number_of_images_is_not_known():
    known = grid.grid(BenchmarkRequest(), {"data": "npz:own.npz"}).of_seeds([0])
    asked = [cell.epsilon for cell in known if cell.method == "bdp-gan"]
    assert asked == [grid.NO_NOISE]


def test_seeds_that_were_not_run_alike_have_no_mean():
    stored = lines.read_lines(DOCS / "benchmark")
    assert len(rows_of([], stored)) > 40
    stored["mnist-by-writer-wgan-gp-epsinf-seed2"]["reduced"] = {"steps": 120}
    assert_refused("seed2: differs from .*seed0 in reduced;", rows_of, [], stored)


def test_unknown_metrics_and_lines_are_refused(tmp_path):
    assert_refused("give --metrics", BenchmarkRequest, metrics=("fid",))
    (tmp_path / "cells.jsonl").write_text(json.dumps({"a": 1}) + "\n")
    assert_refused("restore the file", lines.read_lines, tmp_path)
    assert {*METRICS} == {*command.SCORES} == {*cells.MARKS}


def test_a_client_of_a_federated_method_sends_what_its_messages_hold():
    facts = Facts(12, 100, None, 10, (1, 16, 16))
    settings = dp_merf.dp_merf.Settings(federated=True, num_features=50)
    sent = dp_merf.dp_merf.bytes_per_client
    assert sent(settings, None, facts) == 4 * 50 * 10
    assert sent(dp_merf.dp_merf.Settings(), None, facts) is None


def test_at_full_scale_no_setting_is_below_its_method():
    full, small = (
        grid.grid(BenchmarkRequest(full=is_full), {}).methods
        for is_full in (True, False)
    )
    assert small["gs-wgan"].settings["num_rounds"] == 50
    assert "num_rounds" not in full["gs-wgan"].settings
    assert small["wgan-gp"].settings["steps"] == 700
    assert full["wgan-gp"].settings == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--print"], "output = .*out: no cells are stored there; give --output"),
        (["--only=nope"], "only = 'nope': .* METHOD of staged, .*, dp-merf"),
        (["--device=cuda"], "device = cuda: no GPU is here"),
        (["--data=npz:/no.npz"], "data = 'npz:/no.npz': .* does not exist"),
    ],
)
def test_what_would_fail_every_cell_is_refused_and_stores_nothing(
    call, tmp_path, monkeypatch, words, said
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(call(*words), said)
    assert not (tmp_path / "out").exists()


def test_the_page_in_the_documentation_is_that_of_the_stored_lines():
    # Else: fedgs benchmark --print --output docs/benchmark; its page is the end.
    known = lines.read_lines(DOCS / "benchmark")
    rows = rows_of(grid.grid(BenchmarkRequest(), {}).of_seeds([0]), known)
    assert (DOCS / "benchmark.md").read_text().endswith(f"-->\n\n{markdown(rows)}")


def test_rows_that_were_tuned_on_what_they_are_scored_on_are_marked():
    known = lines.read_lines(DOCS / "benchmark")
    rows = rows_of(grid.grid(BenchmarkRequest(), {}).of_seeds([0]), known)
    digits = {"staged", "staged-parts", "staged-fonts"}
    digits |= {"gs-wgan", "fedavg-gan"}
    expected = dict.fromkeys(grid.DATA, digits)
    expected["fashion-mnist"] = {"staged", "staged-parts"}
    for data, names in expected.items():
        for table in (overview(data, "user", rows), details(data, "user", rows)):
            first = [row[0].split(" ") for row in table.rows]
            marked = {name for name, *marks in first if "‡" in marks}
            assert marked == names & {name for name, *_ in first}
    page = " ".join((DOCS / "benchmark.md").read_text().split())
    for said in (
        "**‡**: settings that were chosen with test accuracies on these data in view",
        "all cells of a table together cost more",
        "`fedavg-gan` has other rates, steps and clip bound since its first cell",
    ):
        assert said in page


def test_an_empty_benchmark_has_a_page():
    assert "## Where fedgs' own methods lose" in markdown(rows_of([], {}))
