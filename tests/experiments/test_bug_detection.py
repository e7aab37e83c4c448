"""`fedgs debug`: cohorts, groups, resuming, the folder, and what it refuses."""

import dataclasses
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from command_line import flags, printed, refused
from experiments.debug import bug_detection, bug_table, power
from experiments.debug import cohorts as debug_cohorts
from experiments.debug import plan as debug_plan
from experiments.debug.bug_table import Cell, cells, is_done, table
from experiments.debug.plan import change_rule, read_debug
from experiments.debug.request import DebugRequest
from experiments.store import Store
from fedgs.cohorts.files import (
    EXCLUDED,
    Cohort,
    read_cohort,
    selection_costs,
    write_cohort,
)
from fedgs.config.recipes import class_means
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data.corruption import corrupted_clients
from fedgs.data.load import load_data
from fedgs.data.transformations import TRANSFORMATIONS
from fedgs.diagnosis.diagnosis import Rule
from fedgs.federation import local
from fedgs.federation.training import RunStopped
from fedgs.privacy.accounting import statements
from fedgs.privacy.budget import calibrate_noise
from fedgs.privacy.plan import Plan
from fedgs.privacy.selection_cost import SelectionCost
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder
from plans import epsilon
from refusals import assert_refused
from runs import generator

OWNERS = 24  # two cohorts of 12, groups of 3
SMALL = {
    "engine": "local",
    "image_size": 16,
    "seed": 3,
    "num_rounds": 2,
    "noise_multiplier": 0.5,
    "batch_size": 4,
    "discriminator_batch_size": 4,
    "fakes_per_round": 8,
    "warm_start_rounds": 1,
    "generator_dim": 4,
    "discriminator_dim": 4,
    "latent_dim": 4,
    "dct_size": 8,
    "samples_per_group": 60,
}


OF_GROUPS = {"image_size": 16, "seed": 3, "clients_per_round": 1}


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


def make_files(folder, healthy=range(12), suspicious=range(12, 24)):
    found = {}
    for name, numbers in (("healthy", healthy), ("suspicious", suspicious)):
        found[name] = folder / f"{name}.txt"
        names = tuple(f"o{i:02}" for i in numbers)
        write_cohort(found[name], Cohort(names), name)
    return found


@pytest.fixture
def debug(fedgs, data, tmp_path):
    """Runs `fedgs debug` on the small problem."""

    def debug(**settings: object) -> tuple[int, str, str]:
        output = {"data": data, "output": tmp_path / "out"}
        return fedgs("debug", *flags(**output | SMALL | settings))

    return debug


@pytest.fixture(scope="module")
def original(data, tmp_path_factory, exit_code):
    """A finished folder on own cohorts; not to be changed."""
    path = tmp_path_factory.mktemp("original")
    given = {"data": data, "output": path / "out"} | SMALL | make_files(path)
    assert exit_code("debug", *flags(**given)) == 0
    return path / "out"


@pytest.fixture
def done(original, tmp_path):
    """A copy of it."""
    return shutil.copytree(original, tmp_path / "out")


@pytest.fixture
def no_training(monkeypatch):
    def fail(*arguments: object) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(bug_detection, "_train", fail)
    monkeypatch.setattr(debug_cohorts, "select", fail)


# ------------------------------------------------------------------ the whole


def test_own_cohorts_from_files_to_diagnosis(fedgs, done):
    path = done
    code, out, err = fedgs("debug", "--output", path)  # is finished: shows it again
    assert (code, err) == (0, "")
    plan, found = read_debug(path)
    assert plan["clients_per_group"] == 3
    assert plan["clients"] == {"healthy": 12, "suspicious": 12}
    assert plan["source"] == "the user's own files"
    assert (plan["planted"], found["planted"], found["outcome"]) == (None, None, None)
    runs = [run for cohort in plan["cohorts"] for run in plan["runs"][cohort]]
    assert runs == [f"{c}-{i}" for c in ("healthy", "suspicious") for i in range(4)]
    names = [read_cohort(path / "groups" / f"{run}.txt").names for run in runs]
    assert [len(own) for own in names] == [3] * 8
    assert len({name for own in names for name in own}) == 24
    configs = [RunFolder.open(path / run).config for run in runs]
    assert {c.num_nodes for c in configs} == {1}
    assert {c.num_clients for c in configs} == {3}
    assert len({c.seed for c in configs}) == 8
    assert {c.corruption_seed for c in configs} == {3}
    assert (path / "diagnosis.png").read_bytes().startswith(b"\x89PNG")
    with np.load(path / "samples" / "suspicious-3.npz") as samples:
        assert samples["images"].shape == (60, 1, 16, 16)
        assert samples["images"].dtype == np.float32
        assert np.bincount(samples["labels"]).tolist() == [20, 20, 20]
    assert found["verdict"] in ("none", "undecided")
    assert found["attainable_p"] == pytest.approx(1 / 35)
    assert [row["bug"] for row in found["ranking"]][-1] == "other"
    text = " ".join(out.split())
    assert f"verdict {found['verdict']}" in text
    assert found["sentence"] in text
    assert "attainable p 0.0286" in text
    assert "parallel" not in err


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
    config = RunConfig(num_clients=3, clients_per_round=3, noise_multiplier=2)
    few, more = (
        statements(Plan.from_config(dataclasses.replace(config, num_rounds=n)), 1e-5)
        for n in (2, 4)
    )
    found = bug_detection.worst_case([few, more, few])
    assert {(r.relation, r.epsilon) for r in more} <= {
        (r.relation, r.epsilon) for r in found
    }
    assert len(found) == len(few)


@pytest.mark.parametrize("bug", ["flip", pytest.param("none", marks=pytest.mark.slow)])
def test_an_experiment_plants_its_bug_everywhere(debug, data, tmp_path, bug):
    fraction = 0.5 if bug == "flip" else None
    settings = {"bug": bug, "selection_rounds": 2, "clients_per_group": 2}
    printed(debug(fraction=fraction, **settings), "")
    path = tmp_path / "out"
    plan, found = read_debug(path)
    wanted = {"flip": "invert", "none": "none"}[bug]
    assert plan["planted"]["corruption"] == wanted == found["planted"]["bug"]
    assert plan["source"] == "selected by accuracy"
    selected = read_cohort(path / "cohorts" / "selected.txt")
    config = RunFolder.open(path / "suspicious-0").config
    names = read_cohort(path / "groups" / "suspicious-0.txt").names
    assert set(names) <= set(selected.names)
    original = RunConfig(**OF_GROUPS, data=data, corruption=wanted)
    if bug == "flip":
        spoilt = corrupted_clients(original, names)
        assert corrupted_clients(config, names).tolist() == spoilt.tolist()
        both = [
            read_cohort(path / "groups" / f"{run}.txt").names
            for run in plan["runs"]["healthy"]
        ]
        counted = corrupted_clients(original, [n for own in both for n in own]).sum()
        assert found["planted"]["counts"]["healthy"]["corrupted"] == counted
    expected = {wanted: "right", "undecided": "undecided", "other": "undecided"}
    assert found["outcome"] == expected.get(found["verdict"], "wrong")
    assert all(EXCLUDED in " ".join(row["conditions"]) for row in found["privacy"])
    assert not any(row["guarantee"] is None for row in found["privacy"])


def test_a_private_selection_is_in_the_epsilon_once(debug, data, tmp_path):
    folder = tmp_path / "own"  # as `fedgs cohorts` writes it; its noise has no seed
    folder.mkdir()
    cost = SelectionCost(4.0, 2, 2, 2.0, 3.0)
    for name, numbers in (("above", range(12)), ("selected", range(12, 24))):
        names = tuple(f"o{i:02}" for i in numbers)
        cohort = Cohort(names, "private", cost, "one and the same")
        write_cohort(folder / f"{name}.txt", cohort, name)
    own = {"config": RunConfig(data=data, seed=3).to_flat()}
    (folder / "cohorts.json").write_text(json.dumps(own))
    printed(debug(cohorts=folder, clients_per_group=2), "")
    path = tmp_path / "out"
    _, found = read_debug(path)
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
    given = {"data": data, "bug": "rotate", "selection_rounds": 2, "noise_seed": 7}
    given |= SMALL | {"clients_per_group": 2}
    found = {}
    for engine in ("local", "flower"):
        path = tmp_path / engine
        own = given | {"engine": engine, "output": path}
        printed(fedgs("debug", *flags(**own)))
        plan, diagnosis = read_debug(path)
        runs = [run for own in plan["runs"].values() for run in own]
        assert {RunFolder.open(path / run).config.engine for run in runs} == {engine}
        found[engine] = [generator(path / run) for run in runs]
        found[engine].append(diagnosis["ranking"])
    assert found["flower"] == found["local"]


def test_masks_over_groups_of_one_node_are_refused_before_any_selection(
    debug, tmp_path
):
    asked = {"bug": "rotate", "engine": "flower", "secure_aggregation": True}
    refused(debug(**asked), "secure_aggregation = True: a round may be of one node")
    assert not (tmp_path / "out").exists()


def test_group_data_are_the_corrupted_images(data):
    config = RunConfig(**OF_GROUPS, data=data, corruption="invert")
    everyone = load_data(config)
    group = debug_cohorts.group_settings(config, everyone.num_clients, 5)
    assert group.seed != config.seed
    assert np.array_equal(load_data(group).images, everyone.images)


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
    code, _, err = debug(**files)
    path = tmp_path / "out"
    assert code == 1
    assert f"continue with: fedgs debug --output {path}" in err
    assert read_debug(path)[1] is None
    first = (path / "healthy-0" / "generator.safetensors").read_bytes()
    printed(fedgs("debug", "--output", path), "")
    rest = [f"{cohort}-{i}" for i in (1, 2, 3) for cohort in ("healthy", "suspicious")]
    assert trained[2:] == ["healthy-1", *rest]
    assert (path / "healthy-0" / "generator.safetensors").read_bytes() == first
    found = read_debug(path)[1]
    assert found is not None
    printed(fedgs("debug", "--output", path))
    again = read_debug(path)[1]
    assert again == found


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


def test_a_folder_that_is_not_there_or_damaged_is_said(fedgs, tmp_path):
    path = tmp_path / "out"
    refused(fedgs("debug", "--output", path), "debug.json is missing")
    path.mkdir()
    (path / "debug.json").write_text('{"format": 1, "runs": {}}')
    refused(fedgs("debug", "--output", path), "lacks clients_per_group, config")


@pytest.mark.usefixtures("no_training")
def test_a_suspect_that_fails_is_said_before_any_training(debug, files, tmp_path):
    (tmp_path / "own.py").write_text("def half(x):\n    return x[:1]\n")
    suspect = f"{tmp_path / 'own.py'}:half"
    refused(debug(**files, suspect=suspect), "return images of the same shape")
    assert not (tmp_path / "out").exists()


def test_a_folder_goes_on_with_no_other_settings(fedgs, done):
    given = ("debug", "--output", done)
    refused(fedgs(*given, "--groups", 5), "groups = 5", "leave out --groups")
    refused(fedgs(*given, "--num-rounds", 9), "num_rounds = 9")


def test_runs_that_exist_are_compared(fedgs, runs, original, tmp_path):
    printed(compare(fedgs, tmp_path, runs, samples_per_group=60), "")
    found = read_debug(original)[1]
    again = read_debug(tmp_path / "two")[1]
    assert again["ranking"] == found["ranking"]
    assert again["runs"]["healthy"][0] == str(runs["healthy"][0])


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
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_training")
def test_relative_paths_hold_from_any_working_directory(
    debug, data, files, tmp_path, monkeypatch
):
    source = Path(data.removeprefix("npz:"))
    monkeypatch.chdir(source.parent)
    with pytest.raises(AssertionError, match="trained"):
        debug(data=f"npz:{source.name}", **files)
    assert read_debug(tmp_path / "out")[0]["config"]["data"] == data


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("content", ['engine = "local"', ""])
def test_the_engine_is_flower_unless_a_file_has_one(debug, files, tmp_path, content):
    (tmp_path / "own.toml").write_text(content)
    with pytest.raises(AssertionError, match="trained"):
        debug(engine=None, config=tmp_path / "own.toml", **files)
    engine = read_debug(tmp_path / "out")[0]["config"]["engine"]
    assert engine == ("local" if content else "flower")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bug": "melt"}, "give --bug one of flip, rotate, "),
        ({"fraction": 0.5}, "needs --bug"),
        ({"bug": "flip", "fraction": 2}, "at most 1"),
        ({"bug": "flip", "groups": 3}, "--groups at least 4"),
        ({"bug": "flip", "groups": 4, "clients_per_group": 4}, ".npz: 24 clients are"),
        ({"bug": "flip", "alpha": 0}, "--alpha"),
        ({"bug": "flip", "min_effect": 1}, "--min-effect"),
        ({"bug": "flip", "samples_per_group": 5}, "at least 50"),
        ({"bug": "flip", "samples_per_group": 5000}, "at most 1000"),
        ({"bug": "flip", "clients_per_group": 0}, "give --clients-per-group at least"),
        ({"bug": "flip", "cohort": "c.txt"}, "leave out --cohort"),
        ({"suspect": "melt"}, "give --suspect MODULE:FUNCTION"),
        ({"bug": "flip", "output": None}, "give --output"),
        ({"bug": "flip", "noise_multiplier": None, "target_epsilon": -1}, "above 0"),
        ({"bug": "flip", "percentile_below": 80, "percentile_above": 60}, "exceeds"),
        ({"bug": "flip", "percentile_below": 100}, "below 100"),
        ({"bug": "flip", "percentile_below": 10}, "percentile_below = 10: 3 clients"),
        ({"bug": "flip", "percentile_above": 90}, "percentile_above = 90: 3 clients"),
        ({"bug": "flip", "data": "digits"}, "cohorts are of people"),
        ({"bug": "none", "cohorts": "/nowhere"}, "no folder of `fedgs cohorts`"),
        ({"bug": "flip", "cohorts": "/nowhere"}, "leave out --bug"),
        ({"healthy": "/nowhere"}, "give --suspicious too"),
        ({"healthy": "/no", "suspicious": "/no"}, "healthy = /no: cannot be read (No"),
        ({"bug": "flip", "healthy": "/h", "suspicious": "/s"}, "leave out --bug"),
        ({"healthy": "/h", "suspicious": "/s", "cohorts": "/c"}, "give one of them"),
        ({"healthy_run": ["/a"]}, "equally often"),
        ({"healthy_run": ["/a"], "suspicious_run": ["/b"]}, "at least 4 times each"),
    ],
)
@pytest.mark.usefixtures("no_training")
def test_bad_flags_are_refused_before_any_work(debug, tmp_path, settings, words):
    assert refused(debug(**settings), re.escape(words)).count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_training")
def test_an_output_that_is_something_else_is_refused(debug, files, tmp_path):
    (tmp_path / "out").mkdir()
    refused(debug(**files), "exists already")


@pytest.mark.usefixtures("no_training")
def test_cohorts_of_other_data_are_refused(debug, tmp_path, monkeypatch):
    folder = tmp_path / "cohorts"
    folder.mkdir()
    config = RunConfig(data="digits", seed=1, corruption="invert")
    (folder / "cohorts.json").write_text(json.dumps({"config": config.to_flat()}))
    refused(debug(cohorts=folder), "give --data digits")


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
    done = debug(**files, dry_run=True)
    assert "power: not measured for these settings" in printed(done)
    given = dict.fromkeys(SMALL) | {"target_epsilon": 100, "engine": "local"}
    text = printed(debug(**given | files, dry_run=True))
    assert "power: 3 clients in each group, epsilon 100" in text
    assert "found: invert, shift\n" in text
    assert "found in half of the clients as well: nothing\n" in text
    assert all(len(line) <= 80 for line in text.splitlines())
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
    table = power.stored()
    names = {t.name for t in TRANSFORMATIONS}
    for part in ("trials", "right", "wrong"):
        assert table[part].keys() == {"none", *names}
        assert table["of_half"][part].keys() == names
        for rows in (table[part], table["of_half"][part]):
            assert all(len(v) == len(table["signals"]) for v in rows.values())


def test_the_epsilon_that_suffices_is_that_of_its_noise():
    sizes = dict.fromkeys(("num_clients", "clients_per_node", "clients_per_round"), 67)
    given = {**sizes, "noise_multiplier": 0.7, "seed": 0, "num_classes": 10}
    config = ResolvedConfig.from_flat(given, class_means())
    noise = calibrate_noise(Plan.from_config(config), 3.0, 1e-5, "release", "zero-out")
    assert power.epsilon_of(config, noise) == pytest.approx(3.0, rel=1e-3)


@pytest.mark.slow
def test_alpha_below_the_attainable_p_is_noted_and_undecided(fedgs, runs, tmp_path):
    done = compare(fedgs, tmp_path, runs, alpha=0.02)
    assert "0.02857, the least p of 4 groups: no bug can be named" in done[2]
    found = read_debug(tmp_path / "two")[1]
    assert (found["bugs"], found["verdict"]) == ([], "undecided")


@pytest.fixture
def runs(done):
    return {c: [done / f"{c}-{i}" for i in range(4)] for c in ("healthy", "suspicious")}


def compare(fedgs, tmp_path, runs, **settings):
    arguments = flags(**settings)
    for cohort, own in runs.items():
        for run in own:
            arguments += [f"--{cohort}-run", run]
    return fedgs("debug", "--output", tmp_path / "two", *arguments)


def change_config(run, **settings):
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def with_config(**settings):
    """Two runs with settings that they should not share or have."""

    def spoil(runs):
        for run in (runs["healthy"][1], runs["suspicious"][2]):
            change_config(run, **settings)

    return spoil


def without_generator(runs):
    for name in ("generator.safetensors", "generator_ema.safetensors"):
        (runs["healthy"][1] / name).unlink()


def without_checkpoint(runs):
    without_generator(runs)
    for file in (runs["healthy"][1] / "checkpoint").iterdir():
        file.unlink()


def interrupted(runs):
    without_generator(runs)
    commit = runs["healthy"][1] / "checkpoint" / "checkpoint.json"
    commit.write_text(json.dumps(json.loads(commit.read_text()) | {"round": 1}))


SPOILT = {
    "other data": (
        lambda runs: change_config(runs["suspicious"][1], data="digits"),
        ["runs of different data"],
    ),
    "other settings": (
        lambda runs: change_config(runs["suspicious"][1], num_rounds=7),
        ["runs of different settings"],
    ),
    "all clients": (with_config(cohort=""), ["a run on all clients"]),
    # Random starts in common would look like strokes in common.
    "one seed": (
        with_config(seed=17),
        ["seed = 17 in HEALTHY and SUSPICIOUS", "with a --seed of its own"],
    ),
    "one noise seed": (
        with_config(noise_seed=17),
        ["noise_seed = 17 in HEALTHY and SUSPICIOUS", "with a --noise-seed of its own"],
    ),
    "interrupted": (
        interrupted,
        ["HEALTHY: ended after round 1, ", "continue with `fedgs resume HEALTHY`"],
    ),
    "no generator": (without_checkpoint, ["no generator yet"]),
    "the same clients": (
        lambda runs: runs["suspicious"].__setitem__(3, runs["healthy"][0]),
        ["is in", "belongs to one group"],
    ),
    "no run": (
        lambda runs: runs["healthy"].__setitem__(2, runs["healthy"][2].parent),
        ["is a folder of `fedgs debug`, whose runs are in it"],
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_runs_that_cannot_be_compared_are_refused(fedgs, runs, tmp_path, how):
    spoil, words = SPOILT[how]
    names = {"HEALTHY": runs["healthy"][1], "SUSPICIOUS": runs["suspicious"][2]}
    spoil(runs)
    for name, run in names.items():
        words = [text.replace(name, str(run)) for text in words]
    refused(compare(fedgs, tmp_path, runs), *map(re.escape, words))
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("program", "given", "seed", "expected"),
    [
        ("fedgs", ["debug", "--bug", "flip"], 7, "fedgs debug --bug flip --seed 7"),
        ("fedgs", ["debug", "--seed=3"], 3, "fedgs debug --seed=3"),
        ("fedgs", ["debug", "--healthy-run", "a"], None, "fedgs debug --healthy-run a"),
        ("x/bug_table.py", ["--a"], 0, "python -m experiments.debug.bug_table --a"),
    ],
)
def test_the_command_that_is_kept_can_be_typed_again(
    monkeypatch, program, given, seed, expected
):
    monkeypatch.setattr(sys, "argv", [program, *given])
    assert debug_plan._command(seed) == expected


@pytest.mark.parametrize(
    "settings",
    [{"num_rounds": 5}, {"data": "nothing"}, {"recipe": "demo"}, {"seed": 3}],
)
def test_settings_beside_runs_that_exist_are_refused(fedgs, runs, tmp_path, settings):
    (name,) = settings
    done = compare(fedgs, tmp_path, runs, **settings)
    refused(done, rf"{name} = .*: the runs exist and have their")


def test_read_debug_refuses_other_folders(tmp_path):
    assert_refused("no folder of `fedgs debug`", read_debug, tmp_path)
    (tmp_path / "debug.json").write_text('{"format": 9}')
    assert_refused("format 9", read_debug, tmp_path)


@pytest.mark.parametrize(
    ("verdict", "bug", "wanted"),
    [
        ("invert", "invert", "right"),
        ("none", "none", "right"),
        ("undecided", "none", "undecided"),
        ("none", "rotate", "wrong"),
        ("invert", "rotate", "wrong"),
        ("invert and rotate", "rotate", "wrong"),
        ("rotate", "none", "wrong"),
    ],
)
def test_outcome_of_an_experiment(verdict, bug, wanted):
    assert bug_detection.outcome(verdict, bug) == wanted


# ------------------------------------------------------------------ the table


def test_cells_of_the_table_come_seed_by_seed(monkeypatch):
    monkeypatch.setattr(bug_table, "NONE_SEEDS", 2)
    found = [cell.name for cell in cells(["flip", "none"], [None, 1.0], 1)]
    wanted = [("flip", 0), ("none", 0), ("none", 1)]
    noise = ("noise-free", "epsilon-1")
    assert found == [f"{bug}-{seed}-{level}" for bug, seed in wanted for level in noise]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bugs", "melt"], "bugs = ['melt']: give --bugs of flip, rotate, "),
        (["--epsilons", "none,x"], "; give --epsilons like none,10,3,1"),
        (["--epsilons", "-1"], "target_epsilon = -1.0: give --target-epsilon"),
        (["--config", "none.toml"], "none.toml"),
    ],
)
def test_bad_input_of_the_table_is_refused(
    tmp_path, monkeypatch, capsys, arguments, words
):
    given = ["bug_table", *arguments, "--output", str(tmp_path / "table")]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        bug_table.command()
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1)
    assert words in err
    assert not (tmp_path / "table").exists()


def test_table_counts_outcomes():
    rows = [
        {"cell": "a", "bug": "flip", "epsilon": None, "outcome": "right"},
        {"cell": "b", "bug": "flip", "epsilon": None, "outcome": "wrong"},
        {"cell": "c", "bug": "none", "epsilon": 1.0, "outcome": "undecided"},
    ]
    assert table(rows).splitlines()[2:] == [
        "| noise-free | 1 / 0 / 1 | 0 / 0 / 0 |",
        "| 1 | 0 / 0 / 0 | 0 / 1 / 0 |",
    ]


def test_a_cell_is_computed_again_for_another_rule_only(tmp_path):
    cell, store = Cell(0, "flip", 3.0), Store(tmp_path / "table.jsonl")
    assert not is_done(store, cell)
    store.add(cell.name, dataclasses.asdict(Rule(min_effect=0.3)))
    assert not is_done(store, cell)
    store.add(cell.name, dataclasses.asdict(Rule()))
    assert is_done(store, cell)
    assert not is_done(store, Cell(1, "flip", 3.0))


def test_another_rule_keeps_the_generators(done):
    before = (done / "healthy-0" / "generator.safetensors").stat().st_mtime_ns
    change_rule(done, Rule(alpha=0.5, min_effect=0.1))
    found = bug_detection.resume(done, as_json=True)
    assert (found["alpha"], found["min_effect"]) == (0.5, 0.1)
    after = (done / "healthy-0" / "generator.safetensors").stat().st_mtime_ns
    assert before == after


def test_a_selection_replaces_what_an_interrupted_one_left(tmp_path, monkeypatch):
    left: list[bool] = []
    monkeypatch.setattr(
        debug_cohorts.selecting,
        "cohorts",
        lambda config, *_, **__: left.append(Path(config.output).exists()),
    )
    (tmp_path / "cohorts").mkdir()
    debug_cohorts.select(tmp_path / "cohorts", RunConfig(), DebugRequest())
    assert left == [False]
