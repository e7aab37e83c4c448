"""`fedgs debug`: cohorts, groups, resuming, the folder, and what it refuses."""

import dataclasses
import math
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import tiny
from command_line import flags, printed, refused
from fedgs.app.debug import bug_detection, power
from fedgs.app.debug import cohorts as debug_cohorts
from fedgs.app.debug import debug_folder as debug_plan
from fedgs.app.debug.debug_folder import read_debug
from fedgs.cohorts.cohort_file import (
    EXCLUDED,
    Cohort,
    read_cohort,
    selection_costs,
    write_cohort,
)
from fedgs.config.recipes import class_means
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.corruption import corrupted_clients
from fedgs.data.transformations import TRANSFORMATIONS
from fedgs.privacy.accountant import statements
from fedgs.privacy.budget import calibrate_noise
from fedgs.privacy.plan import Plan
from fedgs.privacy.selection_cost import SelectionCost
from fedgs.round import local
from fedgs.round.run import RunStopped
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder
from plans import epsilon
from runs import generator
from tiny import run_config

OWNERS = 24  # two cohorts of 12, groups of 3
SMALL = {
    "recipe": "class-means",
    "engine": "local",
    "image_size": 16,
    "seed": 3,
    "noise_multiplier": 0.05,
    "samples_per_group": 60,
}
GAN = {n: v for n, v in tiny.SETTINGS.items() if n.endswith(("_dim", "batch_size"))}
GAN |= {"recipe": "gs-wgan", "num_rounds": 2, "warm_start_rounds": 1}
GAN |= {"fakes_per_round": 8, "dct_size": 8}
OF_NO_SEED = {"bug": "flip", "healthy": "/h", "suspicious": "/s", "seed": None}
MASKED = {"bug": "rotate", "engine": "flower", "secure_aggregation": True}


@pytest.fixture(scope="module", autouse=True)
def _few_bugs():
    """The whole catalogue takes seconds."""
    few = [t for t in TRANSFORMATIONS if t.name in ("invert", "rotate", "blur")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bug_detection, "TRANSFORMATIONS", few)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """24 owners of 24 pictures of strokes each."""
    rng = np.random.default_rng(0)
    labels = np.tile([0, 1, 2], OWNERS * 8)
    images = rng.integers(0, 30, (len(labels), 16, 16), dtype=np.uint8)
    images[labels == 0, 3:13, 7:9] = 230
    images[labels == 1, 3:13, 4:6] = 230
    images[labels == 2, 3:13, 10:12] = 230
    owners = np.repeat([f"o{i:02}" for i in range(OWNERS)], 24)
    path = tmp_path_factory.mktemp("data") / "strokes.npz"
    np.savez(path, images=images, labels=labels, clients=owners)
    return f"npz:{path}"


@pytest.fixture
def files(tmp_path):
    return make_files(tmp_path)


def make_files(folder, healthy=range(12), suspicious=range(12, 24), **selection):
    found = {}
    for name, numbers in (("healthy", healthy), ("suspicious", suspicious)):
        found[name] = folder / f"{name}.txt"
        names = tuple(f"o{i:02}" for i in numbers)
        write_cohort(found[name], Cohort(names, **selection), name)
    return found


def debug_flags(**settings: object) -> list[str]:
    """`fedgs debug` has fewer flags than `fedgs train`: --set gives these as well."""
    words = []
    for name in ("image_size", "num_rounds", "noise_multiplier", "test_fraction"):
        value = settings.pop(name, None)
        if value is not None:
            words += ["--set", f"{name}={value}"]
    return [*flags(**settings), *words]


@pytest.fixture
def debug(fedgs, data, tmp_path):
    """Runs `fedgs debug` on the small problem."""

    def debug(**settings: object) -> tuple[int, str, str]:
        output = {"data": data, "output": tmp_path / "out"}
        return fedgs("debug", *debug_flags(**output | SMALL | settings))

    return debug


@pytest.fixture(scope="module")
def original(data, tmp_path_factory, exit_code):
    """A finished folder on own cohorts; not to be changed."""
    path = tmp_path_factory.mktemp("original")
    given = {"data": data, "output": path / "out"} | SMALL | make_files(path)
    assert exit_code("debug", *debug_flags(**given)) == 0
    return path / "out"


@pytest.fixture
def done(original, tmp_path):
    """A copy of it."""
    return shutil.copytree(original, tmp_path / "out")


@pytest.fixture
def no_training(monkeypatch):
    def fail(*arguments: object) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(bug_detection, "train_group", fail)
    monkeypatch.setattr(debug_cohorts, "select", fail)


# ------------------------------------------------------------------ the whole


def test_own_cohorts_from_files_to_diagnosis(fedgs, done):
    path = done
    out = printed(fedgs("debug", "--output", path), "")  # is finished: shows it again
    plan, found = read_debug(path)
    assert plan["clients_per_group"] == 3
    assert plan["clients"] == {"healthy": 12, "suspicious": 12}
    assert plan["source"] == "the user's own files"
    assert (found["planted"], found["outcome"]) == (None, None)
    runs = [run for runs in plan["runs"].values() for run in runs]
    assert runs == [f"{c}-{i}" for c in ("healthy", "suspicious") for i in range(4)]
    names = [read_cohort(path / "groups" / f"{run}.txt").names for run in runs]
    assert [len(own) for own in names] == [3] * 8
    assert len({name for own in names for name in own}) == 24
    configs = [RunFolder.open(path / run).config for run in runs]
    of_group = {(c.num_nodes, c.num_clients, c.corruption_seed) for c in configs}
    assert of_group == {(1, 3, 3)}
    assert len({c.seed for c in configs}) == 8
    assert (path / "diagnosis.png").read_bytes().startswith(b"\x89PNG")
    with np.load(path / "samples" / "suspicious-3.npz") as samples:
        assert samples["images"].shape == (60, 1, 16, 16)
        assert np.bincount(samples["labels"]).tolist() == [20, 20, 20]
    # The noise has no seed: one split of 35 is the most extreme, so it may be "other".
    assert found["verdict"] in ("none", "undecided", "other")
    assert found["num_splits"] == 35
    assert [row["bug"] for row in found["ranking"]][-1] == "other"
    text = " ".join(out.split())
    assert f"verdict {found['verdict']}" in text
    assert found["sentence"] in text


def test_epsilon_is_that_of_one_group(original):
    _, found = read_debug(original)
    config = RunFolder.open(original / "healthy-0").config
    wanted = {s.relation: s.epsilon for s in statements(Plan.from_config(config), 1e-5)}
    rows = {row["relation"]: row for row in found["privacy"]}
    assert set(rows) == {"replace-one", "zero-out"}
    for relation, row in rows.items():
        assert row["epsilon"] == pytest.approx(wanted[relation])
        assert bug_detection.PARALLEL in row["conditions"]
        assert any("own" in condition for condition in row["conditions"])


def test_the_largest_epsilon_of_the_groups_counts():
    config = run_config(num_clients=3, clients_per_round=3, noise_multiplier=2)
    configs = [dataclasses.replace(config, num_rounds=count) for count in (2, 4, 2)]
    groups = [statements(Plan.from_config(each), 1e-5) for each in configs]
    found = bug_detection.worst_case(groups)
    assert [r.epsilon for r in found] == [r.epsilon for r in groups[1]]


def test_an_experiment_plants_its_bug_everywhere(debug, data, tmp_path, monkeypatch):
    short = dataclasses.replace(debug_cohorts.SELECTION, num_rounds=2)
    monkeypatch.setattr(debug_cohorts, "SELECTION", short)
    printed(debug(bug="flip", fraction=0.5, clients_per_group=2), "")
    path = tmp_path / "out"
    plan, found = read_debug(path)
    assert found["planted"]["bug"] == "invert"
    assert plan["source"] == "selected by accuracy"
    selected = read_cohort(path / "cohorts" / "selected.txt")
    config = RunFolder.open(path / "suspicious-0").config
    names = read_cohort(path / "groups" / "suspicious-0.txt").names
    assert set(names) <= set(selected.names)
    of_all = {"image_size": 16, "seed": 3, "clients_per_round": 1}
    original = run_config(**of_all, data=data, corruption="invert")
    spoilt = corrupted_clients(original, names)
    assert corrupted_clients(config, names).tolist() == spoilt.tolist()
    groups = [path / "groups" / f"{run}.txt" for run in plan["runs"]["healthy"]]
    healthy = [name for group in groups for name in read_cohort(group).names]
    counted = corrupted_clients(original, healthy).sum()
    assert found["planted"]["counts"]["healthy"]["corrupted"] == counted
    expected = {"invert": "right", "undecided": "undecided", "other": "undecided"}
    assert found["outcome"] == expected.get(found["verdict"], "wrong")
    assert all(EXCLUDED in " ".join(row["conditions"]) for row in found["privacy"])
    assert not any(row["guarantee"] is None for row in found["privacy"])


def test_a_private_selection_is_in_the_epsilon_once(debug, tmp_path):
    cost = SelectionCost(4.0, 2, 2, 2.0, 3.0)
    private = {"selection": "private", "cost": cost, "selection_id": "one and the same"}
    printed(debug(**make_files(tmp_path, **private), clients_per_group=2), "")
    path = tmp_path / "out"
    plan, found = read_debug(path)
    assert plan["source"] == "selected by accuracy"
    config = RunFolder.open(path / "healthy-0").config
    assert selection_costs([config]) == (cost,)
    alone = {s.relation: s.epsilon for s in statements(Plan.from_config(config), 1e-5)}
    for row in found["privacy"]:
        assert "a randomised response of epsilon 3" in " ".join(row["conditions"])
        asked = {"relation": row["relation"], "adversary": row["adversary"]}
        stated = epsilons.of_run(path / "suspicious-1")
        assert row["epsilon"] == pytest.approx(epsilon(stated, **asked))
        assert row["epsilon"] > alone[row["relation"]]


@pytest.mark.slow
@pytest.mark.flower
def test_flower_gives_the_generators_and_the_verdict_of_the_local_engine(
    fedgs, data, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    given = {"data": data, "bug": "rotate", "noise_seed": 7}
    given |= SMALL | GAN | {"clients_per_group": 2}
    found = {}
    for engine in ("local", "flower"):
        path = tmp_path / engine
        own = given | {"engine": engine, "output": path}
        printed(fedgs("debug", *debug_flags(**own)))
        plan, diagnosis = read_debug(path)
        runs = [run for own in plan["runs"].values() for run in own]
        assert {RunFolder.open(path / run).config.engine for run in runs} == {engine}
        found[engine] = [generator(path / run) for run in runs]
        found[engine].append(diagnosis["ranking"])
    assert found["flower"] == found["local"]


@pytest.mark.slow
def test_an_interrupted_folder_goes_on_with_its_output_alone(
    debug, fedgs, files, tmp_path, monkeypatch
):
    trained = []
    train = local.train

    def stop_in_the_third(folder, data, report, stop):
        trained.append(folder.path.name)
        if len(trained) == 3:
            raise RunStopped("stopped after round 0")
        train(folder, data, report, stop)

    monkeypatch.setattr(local, "train", stop_in_the_third)
    path = tmp_path / "out"
    assert debug(**files)[0] == 1
    assert read_debug(path)[1] is None
    first = (path / "healthy-0" / "generator.safetensors").read_bytes()
    printed(fedgs("debug", "--output", path), "")
    rest = [f"{cohort}-{i}" for i in (1, 2, 3) for cohort in ("healthy", "suspicious")]
    assert trained[2:] == ["healthy-1", *rest]
    assert (path / "healthy-0" / "generator.safetensors").read_bytes() == first
    assert read_debug(path)[1] is not None


def test_a_stop_in_a_groups_last_round_trains_no_further_group(
    debug, files, tmp_path, monkeypatch
):
    trained = []

    def stop(folder, data, report, stop):
        trained.append(folder.path.name)
        stop.set()  # as a signal does, when no round is left

    monkeypatch.setattr(local, "train", stop)
    code, _, err = debug(**files)
    assert code == 1
    assert "stopped after generator 1 of 8" in err
    assert f"continue with: fedgs debug --output {tmp_path / 'out'}" in err
    assert trained == ["healthy-0"]


def test_a_folder_that_is_not_there_or_of_another_version_is_said(fedgs, tmp_path):
    path = tmp_path / "out"
    refused(fedgs("debug", "--output", path), "debug.json is missing")
    path.mkdir()
    (path / "debug.json").write_text('{"format": 1}')
    refused(fedgs("debug", "--output", path), ".*debug folder of format 1")


def test_a_client_in_two_groups_is_refused(fedgs, done):
    shutil.rmtree(done / "healthy-1")
    shutil.copytree(done / "healthy-0", done / "healthy-1")
    refused(fedgs("debug", "--output", done), ".*a client is in two groups")


@pytest.mark.usefixtures("no_training")
def test_a_suspect_that_fails_is_said_before_any_training(debug, files, tmp_path):
    (tmp_path / "own.py").write_text("def half(x):\n    return x[:1]\n")
    suspect = f"{tmp_path / 'own.py'}:half"
    refused(debug(**files, suspect=suspect), "return images of the same shape")
    assert not (tmp_path / "out").exists()


def test_a_folder_goes_on_with_no_other_settings(fedgs, done):
    given = ("debug", "--output", done)
    refused(fedgs(*given, "--groups", 5), "groups = 5", "leave out --groups")
    refused(fedgs(*given, "--set", "num_rounds=9"), "num_rounds = 9")


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"healthy": range(12), "suspicious": range(11, 23)}, "'o11' (1 clients)"),
        ({"healthy": range(12), "suspicious": range(20, 32)}, "no client 'o24'"),
        ({"healthy": range(12), "suspicious": range(12, 19)}, "7 clients are too few"),
    ],
)
@pytest.mark.usefixtures("no_training")
def test_cohorts_that_do_not_fit_are_refused(debug, tmp_path, settings, words):
    refused(debug(**make_files(tmp_path, **settings)), re.escape(words))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_training")
def test_cohorts_of_different_sources_are_refused(debug, tmp_path, files):
    names = read_cohort(files["suspicious"]).names
    write_cohort(files["suspicious"], Cohort(names, "not private"), "selected")
    refused(debug(**files), "their epsilons cannot be stated together")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fraction": 0.5}, "needs --bug"),
        (MASKED, "secure_aggregation = True:"),
        ({"bug": "flip", "fraction": 2}, "at most 1"),
        ({"bug": "flip", "groups": 3}, "--groups at least 4"),
        ({"bug": "flip", "groups": 4, "clients_per_group": 4}, ".npz: 24 clients are"),
        ({"bug": "flip", "cohort": "c.txt"}, "leave out --set cohort"),
        ({"healthy": "/nowhere"}, "give --suspicious too"),
        ({"healthy": "/no", "suspicious": "/no"}, "healthy = /no:"),
        (OF_NO_SEED, "give the --seed that they were selected with"),
    ],
)
@pytest.mark.usefixtures("no_training")
def test_bad_flags_are_refused_before_any_work(debug, tmp_path, settings, words):
    assert refused(debug(**settings), re.escape(words)).count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_hopeless_plan_is_refused_with_what_would_suffice(
    debug, files, tmp_path, no_training
):
    given = dict.fromkeys(SMALL) | {"engine": "local", "recipe": "class-means"}
    for hopeless, words in (
        ({"target_epsilon": 0.1}, ("target_epsilon", "clients in each group")),
        ({"target_epsilon": 100, "alpha": 0.02}, ("alpha", "--groups")),
    ):
        refused(debug(**given | files | hopeless), *words)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_can_be_found_and_writes_nothing(
    debug, files, tmp_path, no_training
):
    done = debug(**files, **GAN, dry_run=True)
    assert "power: not measured for these settings" in printed(done)
    given = dict.fromkeys(SMALL) | {"target_epsilon": 100, "engine": "local"}
    text = printed(debug(**given | files, dry_run=True))
    assert "power: 3 clients in each group, epsilon 100" in text
    assert "found: invert\n" in text
    assert "found in half of the clients as well: nothing\n" in text
    assert not (tmp_path / "out").exists()


def test_power_is_read_between_the_levels_of_the_table():
    right = {"a": [0, 1, 2], "b": [2, 2, 2], "c": [0, 0, 0]}
    table = {"signals": [10, 20, 40], "right": right}
    table["trials"] = {bug: [2, 2, 2] for bug in right}
    wanted = {5: "npn", 10: "nyn", 15: "pyn", 20: "pyn", 40: "yyn", math.inf: "yyn"}
    letters = {power.YES: "y", power.PERHAPS: "p", power.NO: "n"}
    for signal, text in wanted.items():
        found = power.of_plan(signal, table)
        assert "".join(letters[p.now] for p in found.values()) == text, signal
        assert [p.needed for p in found.values()] == [40, 10, None]


def test_the_stored_table_knows_all_bugs_at_all_levels_in_all_and_in_half():
    table, names = power.stored(), {t.name for t in TRANSFORMATIONS}
    for rows, known in ((table, {"none", *names}), (table["of_half"], names)):
        for part in ("trials", "right", "wrong"):
            assert rows[part].keys() == known
            assert {len(v) for v in rows[part].values()} == {len(table["signals"])}


def test_the_epsilon_that_suffices_is_that_of_its_noise():
    sizes = dict.fromkeys(("num_clients", "clients_per_node", "clients_per_round"), 67)
    given = {**sizes, "noise_multiplier": 0.7, "seed": 0, "num_classes": 10}
    given |= {"image_size": 28, "image_channels": 1}
    config = ResolvedConfig.from_flat(given, class_means())
    noise = calibrate_noise(Plan.from_config(config), 3.0, 1e-5, "release", "zero-out")
    assert power.epsilon_of(config, noise) == pytest.approx(3.0, rel=1e-3)


def test_the_command_that_is_kept_can_be_typed_again(monkeypatch):
    for given, seed in (("--bug flip", " --seed 7"), ("--seed=3", "")):
        monkeypatch.setattr(sys, "argv", ["fedgs", "debug", *given.split()])
        assert debug_plan._command(7) == f"fedgs debug {given}{seed}"


def test_outcome_of_an_experiment():
    for verdict, bug, wanted in (
        ("invert", "invert", "right"),
        ("undecided", "none", "undecided"),
        ("none", "rotate", "wrong"),
        ("invert and rotate", "rotate", "wrong"),
        ("rotate", "none", "wrong"),
    ):
        assert bug_detection.outcome(verdict, bug) == wanted


def test_a_selection_replaces_what_an_interrupted_one_left(tmp_path, monkeypatch):
    left: list[bool] = []
    look = lambda config, _: left.append(Path(config.output).exists())  # noqa: E731
    monkeypatch.setattr(debug_cohorts, "select_clients", look)
    (tmp_path / "cohorts").mkdir()
    debug_cohorts.select(tmp_path / "cohorts", run_config())
    assert left == [False]


def test_an_undecided_verdict_names_the_step_that_decides_it(fedgs, data, tmp_path):
    """A bug in some clients of one cohort: the same samples show it in fewer."""
    arrays = dict(np.load(data.removeprefix("npz:")))
    is_bad = np.isin(arrays["clients"], ["o12", "o13", "o14", "o15", "o16"])
    arrays["images"][is_bad] = 255 - arrays["images"][is_bad]
    np.savez(tmp_path / "some.npz", **arrays)
    given = {"data": f"npz:{tmp_path}/some.npz", "output": tmp_path / "out", "seed": 0}
    given |= make_files(tmp_path) | {"target_epsilon": 99, "noise_seed": 1}
    given |= {"engine": "local", "image_size": 16, "samples_per_group": 60}
    out = printed(fedgs("debug", *debug_flags(**given, min_effect=0.4)))
    assert re.search("^verdict +undecided$", out, re.MULTILINE)
    step = re.search(r"^Next step: inverted is significant.* fedgs (.*)$", out, re.M)
    assert step
    weights = {p: p.read_bytes() for p in (tmp_path / "out").rglob("generator*")}
    out = printed(fedgs(*shlex.split(step[1])))
    assert re.search("^verdict +(one of )?invert", out, re.MULTILINE)
    assert all(path.read_bytes() == kept for path, kept in weights.items())
    refused(fedgs(*shlex.split(step[1])[:-1], 7), "min_effect = 7.0:")
