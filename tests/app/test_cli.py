"""The command line: commands, the frozen flags, the issue's numbers and bad input."""

import csv
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import settings_page
import tiny
from command_line import flags, printed, refused
from fedgs import library
from fedgs.app.cli import main as cli
from fedgs.app.commands import train as running
from fedgs.app.flags import MOST_USED
from fedgs.config.method_settings import settings_of
from fedgs.config.recipes import FITTED, configure, recipe
from fedgs.config.run_config import RunConfig
from fedgs.files import write_json
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Ledger
from fedgs.runs.run_folder import RunFolder
from plans import TABLE_2
from refusals import assert_refused
from runs import generator, keep_lines, rewrite
from tiny import NUM_CLASSES, SIDE, tiny_config, write_tiny_npz

OF_DATA = ("data", "num_clients", "num_classes")
TINY = {n: v for n, v in tiny.SETTINGS.items() if n not in OF_DATA}
TINY |= {"discriminator_steps": 1, "warm_start_rounds": 1, "recipe": "algorithm-2"}
# privacy.md, "The paper's federated figure".
OF_PLAN = ("num_clients", "clients_per_round", "num_rounds", "batch_size")
PAPER = {name: getattr(TABLE_2, name) for name in (*OF_PLAN, "noise_multiplier")}
PAPER |= {"delta": "1.15e-3", "recipe": "algorithm-2"}
FEW = {"num_clients": 10, "num_rounds": 5, "batch_size": 4, "recipe": "algorithm-2"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_tiny_npz(tmp_path_factory.mktemp("data") / "tiny.npz")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data, exit_code) -> Path:
    """A finished run, made by the command line."""
    path = tmp_path_factory.mktemp("trained") / "run"
    assert exit_code("train", *flags(data=data, output=path, **TINY)) == 0
    return path


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(entry.relative_to(path)): entry.read_bytes() if entry.is_file() else b""
        for entry in path.rglob("*")
    }


# ------------------------------------------------------------------ flags


def test_train_has_flags_for_the_most_used_settings_and_the_page_has_all():
    command = cli.typer.main.get_command(cli.app).commands["train"]
    names = {*MOST_USED, "recipe", "config", "dry_run", "set"}
    flags = {f"--{name.replace('_', '-')}" for name in names}
    assert {flag for param in command.params for flag in param.opts} == flags
    page = settings_page.page()
    assert all(f"| `{spec.name}` |" in page for spec in settings_of())


def test_help_fits_two_screens_and_its_flags_are_the_most_used(fedgs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = printed(fedgs("train", "--help"))
    assert out.count("\n") <= 73  # lines of 80 characters
    assert "--ema-decay" not in out
    assert "Default: 0.1" in out


@pytest.mark.parametrize(
    ("words", "recipe_name"),
    [
        ("train", "feature-means"),
        ("privacy plan", "feature-means"),
        ("privacy rounds", "feature-means"),
        ("deploy submit", "feature-means"),
        ("debug", "group-means"),
        ("deploy debug", "group-means"),
        ("deploy select-clients", "cohort-counts"),
    ],
)
def test_a_default_in_a_help_is_the_one_that_the_command_takes(words, recipe_name):
    shown = defaults_in_help(words)
    configured = recipe(recipe_name)
    known = {spec.name for spec in settings_of()}
    taken = {name: str(getattr(configured, name)) for name in shown.keys() & known}
    assert {name: shown[name] for name in taken} == taken
    assert shown["relation"] == "zero-out"
    # Elsewhere the clients decide it, so the help has no number.
    assert ("num_rounds" in shown) == (recipe_name == "group-means")


def test_a_help_has_no_default_of_what_a_command_takes_from_elsewhere():
    assert not {"data", "fit", "image_size"} & defaults_in_help("evaluate").keys()
    assert not {"data", "clients_per_node"} & defaults_in_help("compare").keys()
    assert "target_epsilon" not in defaults_in_help("privacy rounds")
    assert defaults_in_help("select-clients")["engine"] == "flower"


def defaults_in_help(words: str) -> dict[str, str]:
    """What the help of a command says is the default, by the flag's name."""
    command = cli.typer.main.get_command(cli.app)
    for word in words.split():
        command = command.commands[word]
    found = {}
    for param in command.params:
        text = re.search(r"\[default: ([^]]*)\]", getattr(param, "help", None) or "")
        if text:
            found[param.name] = text[1]
    return found


def test_the_printed_settings_are_a_file_that_configures_the_same(fedgs, tmp_path):
    for recipe_name in ("feature-means-gs-wgan", "algorithm-2", "fedavg-gan"):
        out = printed(fedgs("settings", recipe_name))
        (tmp_path / "all.toml").write_text(out)
        found = configure(None, tmp_path / "all.toml", {})
        assert found == configure(recipe_name, None, {})
    changed = printed(fedgs("settings", "gs-wgan", "--set", "gs-wgan.batch_size=7"))
    assert tomllib.loads(changed)["gs-wgan"]["batch_size"] == 7
    assert "# Share of each owner" in changed


def test_the_file_of_the_default_leaves_to_the_clients_what_follows_from_them(fedgs):
    written = tomllib.loads(printed(fedgs("settings")))
    assert written["recipe"] == "feature-means"
    assert "phases" not in written
    assert not {*FITTED} & {name for group in written.values() for name in group}
    chosen = tomllib.loads(printed(fedgs("settings", "--set", "moment_size=7")))
    assert chosen["training"]["moment_size"] == 7


def test_a_file_of_another_recipe_is_refused(fedgs, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(printed(fedgs("settings", "moments")))
    done = fedgs("train", "--recipe", "gs-wgan", "--config", file, "--dry-run")
    refused(done, "recipe = 'moments': .*own.toml is a file of .* leave out --recipe")
    assert 'recipe = "moments"' in printed(fedgs("settings", "--config", file))
    file.write_text("recipe = 3")
    refused(fedgs("train", "--config", file, "--dry-run"), "recipe = 3: ")


def test_the_settings_of_a_run_are_printed(fedgs, trained):
    found = tomllib.loads(printed(fedgs("settings", trained)))
    assert found["training"]["num_rounds"] == TINY["num_rounds"]
    refused(fedgs("settings", trained, "--set", "seed=1"), "seed = 1:")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--set", "deltaa=1"], "deltaa:"),
        (["--set", "data.delta=0.1"], r"set = 'data.delta=0.1':"),
        (["--set", "delta"], "set = 'delta':"),
        (["--set", "delta=2"], "delta = 2"),
        (["--set", "delta=soon"], "delta = 'soon':"),
        (["--set", "seed=1", "--seed", 2], "seed:"),
        (["--set", "batch_size=8"], "batch_size:"),
        (["--num-rounds", 60], "num_rounds = 60:"),
        (["--set", "client_selection=some"], "client_selection = 'some':"),
    ],
)
def test_a_setting_that_cannot_be_set_is_refused_by_name(fedgs, words, named):
    refused(fedgs("train", "--data", "digits", *words), named)


def test_tables_of_a_file_are_checked(fedgs, tmp_path):
    for text, named in (
        ("[data]\ndelta = 0.1\n", r"delta: it is in \[data\].*give it in \[privacy\]"),
        ("[nonsense]\ndelta = 0.1\n", r"config = .*: \[nonsense\] is no table"),
        (
            '[[phases]]\nmethod = "means"\ndelta = 0.1\n',
            "delta: it is in a table of ph",
        ),
        ("[[phases]]\nshare = 1\n", "phases: a phase has no method"),
    ):
        (tmp_path / "own.toml").write_text(text)
        done = fedgs("train", "--data", "digits", "--config", tmp_path / "own.toml")
        refused(done, named)


def test_version_is_that_of_the_package(fedgs):
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    version = tomllib.loads(pyproject)["project"]["version"]
    assert fedgs("--version") == (0, f"fedgs {version}\n", "")


# ------------------------------------------------------------------ train and resume


def test_privacy_reads_the_engine_of_a_config_file(tmp_path, fedgs):
    (tmp_path / "own.toml").write_text('engine = "local"\n')
    plan = [*flags(**FEW, noise_multiplier=1.0), "--json"]
    unset = statements(fedgs("privacy", "plan", *plan))
    local = statements(
        fedgs("privacy", "plan", "--config", tmp_path / "own.toml", *plan)
    )
    assert {row["adversary"] for row in unset} >= {"server", "release"}
    assert {row["adversary"] for row in local} == {"release"}


def test_a_run_without_output_is_accused_and_goes_on_after_an_interrupt(
    trained, fedgs, tmp_path, monkeypatch
):
    def stopping(metrics: dict) -> None:
        if metrics["round"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    write_tiny_npz(tmp_path / "tiny.npz")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(running.Progress, "rounds", lambda *arguments: stopping)
        code, out, err = fedgs("train", *flags(data="npz:tiny.npz", **TINY))
    (path,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"algorithm-2-npz-\d{8}T\d{6}Z", path.name)
    assert "6 clients (nodes: 6, rounds: 3, clients in each: 2)" in out
    go_on = f"continue with: fedgs resume runs/{path.name}"
    assert (code, err) == (1, f"The run was told to stop, after round 1\n{go_on}\n")
    config = RunFolder.open(path).config  # its paths hold from any working directory
    assert (config.data, config.output) == (f"npz:{tmp_path}/tiny.npz", str(path))
    out = printed(fedgs("resume", path), "")
    assert "round 3 of 3" in out
    assert "Privacy:     none; NO GUARANTEE; noise seeded: not private" in out
    assert "To publish" not in out  # it would be refused
    assert generator(path) == generator(trained)
    before = tree(path)
    assert "is finished" in printed(fedgs("resume", path))
    assert tree(path) == before


# ------------------------------------------------------------------ sample


def test_sampled_npz_holds_images_and_labels(trained, fedgs, tmp_path):
    before = tree(trained)
    out = printed(fedgs("sample", trained, "-n", 300, "-o", tmp_path / "s.npz"))
    assert f"300 images to {tmp_path}/s.npz" in out
    with np.load(tmp_path / "s.npz", allow_pickle=False) as found:
        images, labels = found["images"], found["labels"]
    assert (images.shape, images.dtype) == ((300, 1, SIDE, SIDE), np.float32)
    assert 0 <= images.min() < images.max() <= 1
    assert np.bincount(labels, minlength=NUM_CLASSES).min() > 60  # 100 expected
    given = ["--per-class", 2, "--labels", "2,0", "-o", tmp_path / "t.npz"]
    printed(fedgs("sample", trained, *given), "")
    assert np.load(tmp_path / "t.npz")["labels"].tolist() == [2, 0, 2, 0]
    assert tree(trained) == before  # sampling changes nothing in the run


def test_sampled_png_is_a_grid(trained, fedgs, tmp_path):
    fedgs("sample", trained, "-n", 20, "-o", tmp_path / "s.png")
    picture = np.asarray(Image.open(tmp_path / "s.png"))
    assert picture.shape[:2] == (2 * (SIDE + 2) + 2, 10 * (SIDE + 2) + 2)


@pytest.mark.parametrize("form", ["npz", "folder"])
def test_sample_replaces_nothing(trained, fedgs, tmp_path, form):
    given = ["sample", trained, "-n", 4, "-o", f"{form}:{tmp_path}/out"]
    printed(fedgs(*given), "")
    before = tree(tmp_path)
    refused(fedgs(*given, "--seed", 1), "output = .*out:")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-o", "s.jpg"], "output = s.jpg:"),
        (["-o", "no/s.png"], "output = no/s.png:"),
        (["-o", "s.png", "-n", "0"], "count = 0:"),
        (["-o", "s.png", "--labels", "3"], "labels = 3:"),
        (["-o", "s.png", "--labels", "a"], "labels = 'a' .*; give numbers like 3,7"),
        (["-o", "s.png", "-n", 3, "--per-class", 3], "per_class = 3:"),
        ([], "Missing option '-o' / '--output'"),
    ],
)
def test_bad_sampling_is_refused(
    trained, fedgs, monkeypatch, tmp_path, arguments, named
):
    monkeypatch.chdir(tmp_path)
    refused(fedgs("sample", trained, *arguments), named)
    assert tree(tmp_path) == {}


# ------------------------------------------------------------------ privacy


def statements(done: tuple[int, str, str]) -> list[dict]:
    """What a command with --json printed."""
    return json.loads(printed(done))


def test_the_paper_s_setting_is_stated_as_it_is_and_as_published(fedgs):
    rows = statements(fedgs("privacy", "plan", *flags(**PAPER), "--json"))
    server = [s for s in rows if s["adversary"] == "server"]
    (published,) = [s for s in server if not s["guarantee"]]
    assert "as published" in published["theorem"]
    assert published["epsilon"] == pytest.approx(598.605, abs=0.005)
    assert {s["client_selection"] for s in server} == {"uniform"}


MASKED = "--set secure_aggregation=true"


def test_secure_aggregation_gives_the_server_the_epsilon_of_the_release(fedgs):
    """The table of docs/privacy.md, "What the 539 writers' run costs"."""
    run = ["privacy", "plan", "--recipe", "gs-wgan", "--json"]
    run += ["--target-epsilon", 10, "--num-clients", 539, "--clients-per-node", 49]
    release, masked, bare = [24.373, 9.994], [30.284, 12.181], [143.654, 49.501]
    for more, expected in (
        ("", (release, bare, release)),
        (MASKED, (release, release, release, bare)),
        (f"{MASKED} --colluding-nodes=3", (release, masked, masked, bare)),
    ):
        found = [row["epsilon"] for row in statements(fedgs(*run, *more.split()))]
        assert found == pytest.approx([e for row in expected for e in row], abs=1e-3)


def test_privacy_of_a_run_is_that_of_its_ledger(trained, fedgs):
    found = statements(fedgs("privacy", "of", trained, "--json"))
    assert [(s["adversary"], s["relation"]) for s in found] == [
        ("release", "replace-one"),  # local: one curator, no other column
        ("release", "zero-out"),
    ]
    assert found[0]["epsilon"] > found[1]["epsilon"] > 0
    assert any("seeded" in condition for condition in found[0]["conditions"])
    strict = statements(fedgs("privacy", "of", trained, "--delta", 1e-6, "--json"))
    assert (strict[0]["delta"], found[0]["delta"]) == (1e-6, 1e-5)
    assert strict[0]["epsilon"] > found[0]["epsilon"]
    given = ["privacy", "of", trained, "--at-epsilon"]
    refused(fedgs(*given, 3, "--delta", 1e-3), "delta:")
    refused(fedgs(*given, -1), "-1.0: give a finite")


def test_what_is_published_is_a_new_folder(fedgs, trained, tmp_path):
    done = fedgs("publish", trained, "-n", 4, "-o", tmp_path / "out")
    refused(done, ".*/run: NO GUARANTEE; noise seeded: not private; publish a run")
    assert not (tmp_path / "out").exists()


def server_row(rows: list[dict], theorem: str = "") -> dict:
    wanted = {"adversary": "server", "relation": "replace-one", "guarantee": True}
    of_server = [s for s in rows if s.items() >= wanted.items()]
    (row,) = [s for s in of_server if theorem in s["theorem"]]
    return row


def test_delta_at_an_epsilon(fedgs):
    given = flags(**{n: v for n, v in PAPER.items() if n != "delta"})
    given += ["--at-epsilon", 774.31]
    rows = statements(fedgs("privacy", "plan", *given, "--json"))
    found = server_row(rows, "mixture")
    assert (found["asked"], found["epsilon"]) == ("delta", 774.31)
    assert found["delta"] == pytest.approx(1.15e-3, rel=1e-3)
    assert "delta at epsilon 774.31" in fedgs("privacy", "plan", *given)[1]
    less = [*flags(**FEW, noise_multiplier=100), "--at-epsilon", 50]
    assert "< 1e-300" in printed(fedgs("privacy", "plan", *less))  # where it underflows


@pytest.mark.parametrize(
    ("clients", "more", "num_rounds"),
    [
        (3118, [], 5),  # parts of classes as well
        (539, [], 4),
        (20, [], 3),  # moments alone
        (3118, ["--set", "phases=means,pretrained-features"], 2),
    ],
)
def test_the_plan_of_the_default_is_fitted_as_its_run_is(
    fedgs, clients, more, num_rounds
):
    given = flags(target_epsilon=3, num_clients=clients)
    rows = statements(fedgs("privacy", "plan", *given, *more, "--json"))
    assert {row["num_rounds"] for row in rows} == {num_rounds}
    said = {f"count: every client takes part in all {num_rounds} rounds"}
    if not more:
        said = {f"{text}, of which {num_rounds} release embeddings" for text in said}
    assert said <= {*rows[0]["conditions"]}
    shown = printed(fedgs("privacy", "plan", *given, *more))
    # Sums alone: not what the server of such a run sees.
    assert len(re.findall(r"secagg\W.*\bhypothetical\b.*\ba\b", shown)) == 2
    assert not re.search(r"(release|server)\W.*\bhypothetical\b.*\ba\b", shown)


def test_the_demo_is_the_run_that_its_help_says_it_is(fedgs, monkeypatch):
    made: list[RunConfig] = []
    monkeypatch.setattr(running, "train", lambda config, *others: made.append(config))
    assert fedgs("demo", "--output", "runs/demo")[0] == 0
    twin = ("--recipe", "demo", "--engine", "flower", "--output", "runs/demo")
    assert fedgs("train", *twin)[0] == 0
    demo, same = made
    assert demo == same
    assert demo.test_fraction > 0


OTHER_PLATFORM = {"noise_std": 4.8e-5, "clip_bound": 1, "num_rounds": 100}


def test_noise_of_another_platform_is_stated_for_one_round_and_for_all(fedgs):
    given = ["privacy", "plan", *flags(**OTHER_PLATFORM)]
    rows = statements(fedgs(*given, "--json"))
    found = {(row["num_rounds"], row["relation"]): row["epsilon"] for row in rows}
    # A Gaussian's epsilon is about mu^2 / 2 + mu t at delta = Phi(-t), if mu is large.
    for num_rounds in (1, 100):
        for relation, sensitivity in (("zero-out", 1), ("replace-one", 2)):
            mu = num_rounds**0.5 * sensitivity / 4.8e-5
            expected = mu**2 / 2 + mu * 4.265
            assert found[num_rounds, relation] == pytest.approx(expected, rel=1e-6)
    shown = printed(fedgs(*given))
    assert shown.startswith("What one round costs a client, and what all rounds")
    assert "2.172e+08" in shown
    assert "protects nobody (server, replace-one; server, zero-out)" in shown
    # What counts is the noise over the clip.
    scaled = OTHER_PLATFORM | {"noise_std": 2.4, "clip_bound": 2, "num_rounds": 1}
    rows = statements(fedgs("privacy", "plan", *flags(**scaled), "--json"))
    epsilons = {row["relation"]: row["epsilon"] for row in rows}
    assert epsilons["zero-out"] == pytest.approx(epsilon_from_mu(1 / 1.2, 1e-5))
    shown = printed(fedgs("privacy", "plan", *flags(**scaled)))
    assert "protects nobody" not in shown
    assert shown.startswith("epsilon at delta")  # one round alone needs no word


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"clip_bound": None}, "clip_bound"),
        ({"num_rounds": None}, "num_rounds"),
        ({"noise_std": -1}, "noise_std"),
        ({"clip_bound": 0}, "clip_bound"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"noise_std": 1e-200}, "noise_std"),
        ({"noise_std": 1e300, "clip_bound": 1e-29}, "noise_std"),
        ({"num_clients": 10}, "num_clients"),
        ({"recipe": "gs-wgan"}, "recipe"),
        ({"delta": 1e-5, "at_epsilon": 3}, "delta"),
    ],
)
def test_noise_of_another_platform_is_asked_about_alone(fedgs, changed, named):
    asked = OTHER_PLATFORM | changed
    given = {name: value for name, value in asked.items() if value is not None}
    refused(fedgs("privacy", "plan", *flags(**given)), named)


def test_noise_and_target_give_the_largest_number_of_rounds(fedgs):
    given = {"num_clients": 1000, "recipe": "algorithm-2"}
    given |= {"client_selection": "uniform", "discriminator_training": "frozen"}
    given |= {"noise_multiplier": 1.07, "target_epsilon": 100, "adversary": "server"}
    done = fedgs("privacy", "rounds", *flags(**given), "--json")
    most = int(re.match(r"num_rounds (\d+) is the largest number with", done[2])[1])
    found = statements(done)
    assert {s["num_rounds"] for s in found} == {most}
    assert 99 < server_row(found)["epsilon"] <= 100


def test_phases_of_fixed_rounds_all_fit_or_fewer(fedgs):
    given = {"num_clients": 50, "recipe": "moments", "noise_multiplier": 1.07}
    _, _, said = fedgs("privacy", "rounds", *flags(**given, target_epsilon=100))
    assert said.startswith("all 3 rounds of moments fit with noise_multiplier 1.07")
    given |= {"recipe": "gs-wgan", "noise_multiplier": 1e90}
    _, _, said = fedgs("privacy", "rounds", *flags(**given, target_epsilon=100))
    assert said.startswith("num_rounds 1000000 is the largest number")


def test_a_clip_bound_that_leaves_no_digits_is_refused(fedgs):
    given = flags(num_clients=50, target_epsilon=10, recipe="moments")
    done = fedgs("privacy", "plan", *given, "--clip-bound", "1e-50")
    refused(done, "clip_bound = 1e-50: give --clip-bound at least 1e-30")


def test_a_sample_is_of_a_run_whose_ledger_is_whole(fedgs, trained, tmp_path):
    for name in ("ledger.jsonl", "config.json"):
        run = shutil.copytree(trained, tmp_path / name / "run")
        if name == "ledger.jsonl":
            keep_lines(run / name, 2)
        else:
            settings = json.loads((run / name).read_text())
            write_json(run / name, settings | {"delta": 1e-3})
        done = fedgs("sample", run, "-n", 5, "-o", tmp_path / "a.npz")
        refused(done, f".*{name}")
        assert not (tmp_path / "a.npz").exists()


def copy_of(run: Path, target: Path, **changes: object) -> Path:
    """A run folder with the ledger of another one and changed settings."""
    target.mkdir()
    (target / "versions.json").write_bytes((run / "versions.json").read_bytes())
    config = json.loads((run / "config.json").read_text()) | changes
    write_json(target / "config.json", config)
    source = "os" if config["noise_seed"] == "" else "seeded"
    events = Ledger.read(run / "ledger.jsonl").events
    rewrite(target, [dataclasses.replace(e, noise_source=source) for e in events])
    return target


def test_runs_on_the_same_clients_add_up(fedgs, trained, tmp_path):
    other = copy_of(trained, tmp_path / "other", seed=6)
    one, both = (
        statements(fedgs("privacy", "of", *runs, "--same-clients", "--json"))
        for runs in ([trained], [trained, other])
    )
    assert both[0]["epsilon"] > 1.2 * one[0]["epsilon"]
    assert both[0]["num_rounds"] == 2 * one[0]["num_rounds"]
    assert "2 runs are on the same clients" in " ".join(both[0]["conditions"])


def test_a_flag_without_a_value_is_refused(fedgs):
    """As of a variable that is unset in a script; it would count as not given."""
    named = "output is empty: give it a value, or leave the flag out"
    refused(fedgs("train", "--data", "digits", "--output", ""), named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (None, ".*: it is given twice"),
        ({"data": "digits"}, "data = .*:"),
        ({"partition": "iid"}, "partition = by-client in .*, iid in"),
        ({"privacy_unit": "record", "partition": "iid"}, "partition = "),
        ({"delta": 0.1}, "delta = .*:"),
    ],
)
def test_runs_on_other_clients_are_refused(fedgs, trained, tmp_path, changes, named):
    is_other = changes is not None
    other = copy_of(trained, tmp_path / "other", **changes) if is_other else trained
    refused(fedgs("privacy", "of", trained, other), named)


WITHOUT_TORCH = """
import runpy, sys
try:
    runpy.run_module("fedgs", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code
import fedgs
fedgs.Plan, fedgs.statements, fedgs.RunConfig
print(sorted({"torch", "flwr", "ray"} & set(sys.modules)))
"""


def test_python_m_fedgs_states_privacy_without_torch(trained):
    command = [sys.executable, "-c", WITHOUT_TORCH, "privacy", "of", str(trained)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "release" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("reader", ["privacy of", "report", "audit"])
def test_no_reader_states_an_epsilon_of_a_shortened_ledger(
    trained, fedgs, tmp_path, monkeypatch, reader
):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("private"))
    keep_lines(run / "ledger.jsonl", 1)
    before = tree(run)
    said = r".*ledger.jsonl: line \d is the last, .* saw 3; restore the file"
    refused(fedgs(*reader.split(), run), said)
    assert tree(run) == before


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"recipe": "nope"}, "recipe = 'nope':"),
        ({"num_rounds": "ten"}, "Invalid value for '--num-rounds': 'ten' is not a"),
        ({"rounds": 3}, r"No such option '?--rounds'?"),
        ({"data": str(Path(__file__).parent)}, "data = .*:"),
        ({"data": __file__}, r"data = .*:"),
        ({"data": "npz:/"}, "data = 'npz:/': it is a folder; give --data folder:/"),
        (
            {"clients_per_round": 7},
            "clients_per_round = 7:",
        ),
        ({"amplification": True}, "amplification = True:"),
        ({"config": "no.toml"}, "config = no.toml:"),
    ],
)
def test_bad_setting_is_refused_before_anything_is_written(
    fedgs, monkeypatch, tmp_path, data, settings, named
):
    monkeypatch.chdir(tmp_path)
    given = {"data": data, "output": "new/run", **TINY} | settings
    refused(fedgs("train", *flags(**given)), named)
    assert tree(tmp_path) == {}


def test_existing_run_folder_is_refused_and_kept(fedgs, trained, data):
    before = tree(trained)
    done = fedgs("train", *flags(data=data, output=trained, **TINY))
    named = rf"output = {trained}: it exists already; choose another --output, or"
    refused(done, named, f"fedgs resume {trained}")
    assert tree(trained) == before


def test_a_dry_run_refuses_the_outputs_that_the_run_refuses(fedgs, data, tmp_path):
    (tmp_path / "file").touch()
    for output, named in (("file", "exists already"), ("file/run", "is a file")):
        given = flags(data=data, output=tmp_path / output, **TINY)
        refused(fedgs("train", *given, "--dry-run"), f"output = .*{output}: .*{named}")
    assert tree(tmp_path) == {"file": b""}


def test_a_run_goes_on_with_its_own_clients_only(fedgs, tmp_path, monkeypatch):
    """A patient left and another one came: nothing is charged, and nothing lost."""

    def stopping(metrics: dict) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    source = tmp_path / "tiny.npz"
    write_tiny_npz(source)
    with np.load(source) as file:
        arrays = dict(file)
    given = flags(data=f"npz:{source}", output=tmp_path / "run", **TINY)
    with monkeypatch.context() as patch:
        patch.setattr(running.Progress, "rounds", lambda *arguments: stopping)
        assert fedgs("train", *given)[0] == 1
    np.savez(source, **arrays | {"clients": arrays["clients"] + 1})
    before = tree(tmp_path / "run")
    code, _, error = fedgs("resume", tmp_path / "run")
    assert code == 2
    assert re.search("Error: node .: the data have other clients than those", error)
    assert tree(tmp_path / "run") == before
    np.savez(source, **arrays)
    printed(fedgs("resume", tmp_path / "run"), "")


COMMANDS = {"resume": [], "sample": ["-o", "s.npz"], "privacy of": []}
COMMANDS["evaluate"] = ["--data", "mnist", "--data-dir", "no"]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_run_or_another_version_is_refused(
    fedgs, tmp_path, trained, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_json(copy_of(trained, tmp_path / "run") / "versions.json", {"format": 99})
    before = tree(tmp_path)
    for run, named in (
        ("run", r".*/run: run folder of format 99, .*reads 3; use the version"),
        ("nowhere", r".*/nowhere: .*no run folder .*; give the --output of"),
    ):
        refused(fedgs(*command.split(), run, *COMMANDS[command]), named)
    assert tree(tmp_path) == before


def test_an_unfinished_run_is_sampled_from_its_checkpoint_unless_in_use(
    trained, fedgs, tmp_path
):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    for path in run.glob("generator*"):
        path.unlink()
    code, _, err = fedgs("sample", run, "-o", tmp_path / "s.npz")
    assert (code, (tmp_path / "s.npz").exists()) == (0, True)
    assert re.match("Warning: .*run is not finished, .* go on with `fedgs resume", err)
    with RunFolder.open(run).locked():
        done = fedgs("resume", run)
    refused(done, r".*/run: another process trains in this folder; wait")
    shutil.rmtree(run / "checkpoint")
    done = fedgs("sample", run, "-o", tmp_path / "t.npz")
    refused(done, r".*/run: no generator yet; run `fedgs resume")


def test_a_deployed_run_is_continued_where_its_clients_are(fedgs, tmp_path):
    own = {"nodes": "a,b", "node_sizes": "3,3", "output": str(tmp_path / "run")}
    RunFolder.create(tiny_config(engine="flower", **own))
    go_on = "fedgs deploy submit ... --resume run --client NAME=KEY.pub ..."
    for words in (["resume"], ["sample", "-o", tmp_path / "s.npz"]):
        command, *more = words
        refused(fedgs(command, tmp_path / "run", *more), f".*`{re.escape(go_on)}`")
    loaded = library.load(tmp_path / "run")
    assert_refused(f"engine = flower: .*`{re.escape(go_on)}`", loaded.resume)


def test_epsilon_by_round_as_csv_ends_with_what_privacy_states(
    fedgs, trained, tmp_path
):
    lines = printed(fedgs("privacy", "of", trained, "--csv")).splitlines()
    last = next(csv.DictReader([lines[0], lines[-1]]))
    stated = json.loads(printed(fedgs("privacy", "of", trained, "--json")))
    assert len(lines) == 1 + int(last.pop("round")) == 1 + TINY["num_rounds"]
    assert [*map(float, last.values())] == [row["epsilon"] for row in stated]
    for name, row in zip(last, stated, strict=True):
        assert name.startswith(f"{row['adversary']} {row['relation']} at delta 1e-05")
    refused(fedgs("privacy", "of", "--csv"), "Missing argument 'RUNS...'")
    refused(fedgs("privacy", "of", trained, "--csv", "--delta", 0.1), "delta = 0.1:")


def test_privacy_of_a_run_and_its_reproduction_take_no_other_settings(fedgs, trained):
    for flag in ("--noise-multiplier", "--recipe"):
        refused(fedgs("privacy", "of", trained, flag, 9), f"No such option '{flag}'")
    refused(fedgs("privacy", "reproduce", "--delta", 0.1), "No such option '--delta'")
    # A setting without a flag is said to be one.
    refused(fedgs("train", "--fit", "crop"), "--set fit=VALUE")
    # So does an error; a setting that is on or off has its value there.
    fetched = fedgs("train", "--data", "digits", "--set", "download=true")
    refused(fetched, "leave out --set download=true$")
    normalised = fedgs("train", "--recipe", "fedavg-gan", "--set", "spectral_norm=true")
    refused(normalised, "give --set spectral_norm=false$")


def test_noise_and_target_are_a_question_of_rounds(fedgs):
    both = {"num_clients": 500, "noise_multiplier": 2.0, "target_epsilon": 10.0}
    refused(fedgs("privacy", "plan", *flags(**both)), "noise_multiplier = 2.*rounds")
    for name in ("noise_multiplier", "target_epsilon"):
        one = flags(**{n: v for n, v in both.items() if n != name})
        refused(fedgs("privacy", "rounds", *one), f"{name} is unset")


# ------------------------------------------------------------------ Ctrl-C


@pytest.mark.parametrize("moment", ["typer", "torch.nn", "reading folder"])
def test_ctrl_c_ends_in_one_line_while_a_command_starts(tmp_path, moment):
    """While it is imported, and while it reads data: large pictures, for seconds."""
    (tmp_path / "owner" / "0").mkdir(parents=True)
    first = tmp_path / "owner" / "0" / "000.png"
    Image.new("L", (4000, 4000)).save(first)
    for number in range(1, 100):
        os.link(first, first.with_name(f"{number:03}.png"))
    command = [sys.executable, "-X", "importtime", "-m", "fedgs", "train"]
    command += ["--data", f"folder:{tmp_path}", "--target-epsilon", "10"]
    # A shell's background job ignores SIGINT, and so would the command.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stderr is not None
        next(line for line in process.stderr if moment in line)
        process.send_signal(signal.SIGINT)
        lines = process.stderr.read().splitlines()
    said = [line for line in lines if line and not line.startswith("import time:")]
    assert (process.returncode, said) == (130, ["Interrupted."])
