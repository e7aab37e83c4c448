"""`fedgs debug`: one run, its verdict and its pictures, and what it refuses before."""

import dataclasses
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from command_line import flags, plain_flags, printed, refused
from fedgs.app.commands import train
from fedgs.app.debug import power, verdict
from fedgs.app.debug.debug_request import OF_DEBUG
from fedgs.app.python import debug as debug_from_python
from fedgs.app.report.page import read_page, render
from fedgs.app.report.run import read_run
from fedgs.app.report.settings_tables import train_command
from fedgs.cohorts.cohort_file import BY_THE_USER, Cohort, selection_costs, write_cohort
from fedgs.config.method_settings import settings_with
from fedgs.config.recipes import group_means
from fedgs.config.run_config import ResolvedConfig
from fedgs.data import sources
from fedgs.data.load import load_data
from fedgs.data.transformations import TRANSFORMATIONS
from fedgs.diagnosis import conclusion
from fedgs.files import read_json
from fedgs.privacy.budget import calibrate_noise
from fedgs.privacy.plan import Plan
from fedgs.privacy.selection_cost import SelectionCost
from fedgs.round import local
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import RunFolder
from groups import write_cohorts
from tiny import BY_COHORT, record_calls, tiny_config

OWNERS = 48  # of 12 pictures each: two cohorts of four groups of six, or two nodes
NAMES = tuple(f"o{number:02}" for number in range(OWNERS))
SMALL = {"image_size": 16, "seed": 3, "noise_multiplier": 0.05}
EACH = {"each": True, "clients_per_node": 24}
VALUES = {"healthy": "v1", "suspicious": "v2"}
POSSIBLE = {"invert", "rotate", "blur"}  # the whole catalogue takes seconds


@pytest.fixture(scope="module", autouse=True)
def _few_bugs() -> Iterator[None]:
    few = [t for t in TRANSFORMATIONS if t.name in POSSIBLE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conclusion, "TRANSFORMATIONS", few)
        yield


def pictures(colours: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Strokes that no turn or inversion leaves as they are, with faint noise."""
    rng = np.random.default_rng(0)
    labels = np.tile([0, 1, 2], OWNERS * 4)
    images = rng.integers(0, 30, (len(labels), 16, 16, colours), dtype=np.uint8)
    for label, column in enumerate((7, 4, 10)):
        images[labels == label, 2:9, column : column + 2] = 230
        images[labels == label, 2:4, 3 : 6 + label] = 200
    if colours == 1:
        images = images[..., 0]
    return images, labels, np.repeat(NAMES, 12)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    images, labels, owners = pictures()
    path = tmp_path_factory.mktemp("data") / "strokes.npz"
    np.savez(path, images=images, labels=labels, clients=owners)
    return f"npz:{path}"


def spoilt(folder: Path, bug: Callable, owners: range | tuple[int, ...]) -> str:
    """Writes the same data with a bug in all images of some owners."""
    images, labels, names = pictures()
    rows = np.isin(names, [NAMES[owner] for owner in owners])
    images[rows] = bug(images[rows])
    path = folder / "spoilt.npz"
    np.savez(path, images=images, labels=labels, clients=names)
    return f"npz:{path}"


def inverted(images: np.ndarray) -> np.ndarray:
    return 255 - images


def turned(images: np.ndarray) -> np.ndarray:
    return np.rot90(images, axes=(1, 2))


def make_files(folder: Path, healthy=range(24), suspicious=range(24, 48), **selection):
    """Writes two files of client names."""
    found = {}
    for name, numbers in (("healthy", healthy), ("suspicious", suspicious)):
        found[name] = folder / f"{name}.txt"
        own = tuple(f"o{number:02}" for number in numbers)
        write_cohort(found[name], Cohort(own, **selection), name)
    return found


@pytest.fixture
def files(tmp_path):
    return make_files(tmp_path)


@pytest.fixture
def own_cohorts(tmp_path) -> dict[str, str]:
    """A file in which half of the owners are v1, and the other half v2."""
    values = {name: "v1" if i < 24 else "v2" for i, name in enumerate(NAMES)}
    return {"cohorts": write_cohorts(tmp_path / "own.csv", values)} | VALUES


def words_of(**settings: object) -> list[str]:
    """`fedgs debug` has other flags than `fedgs train`: --set gives the rest."""
    words: list[str] = []
    for name in ("image_size", "noise_multiplier"):
        value = settings.pop(name, None)
        if value is not None:
            words += ["--set", f"{name}={value}"]
    own = {
        n: settings.pop(n)
        for n in ("healthy", "suspicious", *OF_DEBUG)
        if n in settings
    }
    return [*flags(**settings), *plain_flags(**own), *words]


@pytest.fixture
def debug(fedgs, data, tmp_path):
    """Runs `fedgs debug` on the small problem."""

    def debug(**settings: object) -> tuple[int, str, str]:
        output = {"data": data, "output": tmp_path / "out"}
        return fedgs("debug", *words_of(**output | SMALL | settings))

    return debug


@pytest.fixture(scope="module")
def original(data, tmp_path_factory, exit_code):
    """A finished run on two files of names; not to be changed."""
    path = tmp_path_factory.mktemp("original")
    given = {"data": data, "output": path / "out"} | SMALL | make_files(path)
    assert exit_code("debug", *words_of(**given)) == 0
    return path / "out"


@pytest.fixture
def done(original, tmp_path):
    """A copy of it."""
    return shutil.copytree(original, tmp_path / "out")


@pytest.fixture
def no_training(monkeypatch):
    def fail(*arguments: object) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(local, "train", fail)


def found_in(path: Path) -> dict:
    return read_json(path / "diagnosis.json")


# ------------------------------------------------------------------ the whole


def test_two_files_of_names_become_one_run_and_a_diagnosis(fedgs, done):
    out = printed(fedgs("debug", "--output", done), "")  # is finished: shows it again
    config = RunFolder.open(done).config
    assert config.recipe == "group-means"
    assert (config.num_clients, config.num_nodes) == (48, 1)
    assert len(RunFolder.open(done).read_ledger().events) == 1
    content = found_in(done)
    assert content["rows"] == ["healthy", "suspicious"]
    (found,) = content["comparisons"]
    assert (found["suspicious"], found["healthy"]) == ("suspicious", "healthy")
    assert found["num_splits"] == 35
    # The noise has no seed: one split of 35 is the most extreme, so it may be "other".
    assert found["verdict"] in ("none", "undecided", "other")
    assert [row["bug"] for row in found["ranking"]][-1] == "other"
    for row in content["rows"]:
        for part in range(4):
            with np.load(done / "groups" / f"{row}-{part}.npz") as group:
                assert group["images"].shape == (3, 1, 16, 16)
                assert group["labels"].tolist() == [0, 1, 2]
    assert (done / "diagnosis.png").read_bytes().startswith(b"\x89PNG")
    text = " ".join(out.split())
    assert f"Verdict of suspicious: {found['verdict']}" in text
    assert found["sentence"] in text
    assert "picture" in text


def test_groups_of_two_files_are_of_one_size_and_no_client_is_in_two(done):
    path = done / "private" / "cohorts.csv"
    header, *rows = path.read_text().splitlines()
    assert header == "owner,cohort,part"
    owners = [row.split(",")[0] for row in rows]
    assert sorted(owners) == sorted(NAMES)
    groups = [row.split(",", 1)[1] for row in rows]
    assert {groups.count(group) for group in groups} == {6}
    assert len({*groups}) == 8


@pytest.mark.parametrize(("bug", "name"), [(inverted, "invert"), (turned, "rotate")])
def test_a_bug_of_one_cohort_is_named(debug, files, tmp_path, bug, name):
    data = spoilt(tmp_path, bug, range(24, 48))
    out = printed(debug(data=data, **files))
    (found,) = found_in(tmp_path / "out")["comparisons"]
    assert found["verdict"] == name
    assert f"Verdict of suspicious: {name}" in out
    # The same cohorts without a bug: nobody is accused.
    printed(debug(**files, output=tmp_path / "clean"))
    (clean,) = found_in(tmp_path / "clean")["comparisons"]
    assert clean["verdict"] in ("none", "undecided", "other")


def test_values_of_the_clients_file_are_compared_on_nodes_they_share(
    debug, own_cohorts, tmp_path
):
    data = spoilt(tmp_path, inverted, range(24, 48))
    given = own_cohorts | {"data": data, "clients_per_node": 16}
    out = printed(debug(**given))
    config = RunFolder.open(tmp_path / "out").config
    assert config.num_nodes == 3
    (found,) = found_in(tmp_path / "out")["comparisons"]
    assert (found["suspicious"], found["healthy"]) == ("v2", "v1")
    assert found["verdict"] == "invert"
    assert "1.73 times this noise, because each of the 3 nodes adds its own" in out


@pytest.mark.parametrize("asked", [{"each": True}, {"suspicious": "1"}])
def test_nodes_are_compared_each_with_all_others(debug, tmp_path, asked):
    data = spoilt(tmp_path, inverted, range(16, 32))
    out = printed(debug(data=data, clients_per_node=16, **asked))
    content = found_in(tmp_path / "out")
    assert content["rows"] == ["0", "1", "2"]
    by_name = {found["suspicious"]: found for found in content["comparisons"]}
    assert [*by_name] == (["0", "1", "2"] if "each" in asked else ["1"])
    assert by_name["1"]["verdict"] == "invert"
    if "each" in asked:
        assert by_name["1"]["p"] <= 0.05
        assert "Every site against all others" in out
        rate = "any of them is named, or said to differ, with probability at most 0.05"
        assert all(rate in found["sentence"] for found in by_name.values())
        # The one with the bug is taken out before the two others are compared.
        assert (by_name["1"]["healthy"], by_name["0"]["healthy"]) == ("all others", "2")
    # What was released is averages of groups, of which nobody makes a data set.
    for words in ("Samples:", "To publish:", "can be evaluated"):
        assert words not in out
    # Rows of the picture: one for each node, whoever was compared.
    assert len([*(tmp_path / "out" / "groups").glob("*.npz")]) == 12


def test_an_experiment_plants_its_bug_in_one_node_or_in_clients(debug, files, tmp_path):
    printed(debug(**EACH, bug="flip"))
    planted = found_in(tmp_path / "out")["planted"]
    assert planted["bug"] == "invert"
    assert planted["where"] in ("0", "1")
    config = RunFolder.open(tmp_path / "out").config
    assert config.corruption_unit == "node"
    out = printed(debug(**files, bug="flip", fraction=0.5, output=tmp_path / "other"))
    planted = found_in(tmp_path / "other")["planted"]
    assert planted == {"bug": "invert", "where": "0.5 of the clients"}
    assert "invert in 0.5 of the clients" in out


def test_data_are_read_once_and_their_bug_is_planted_once(
    debug, files, tmp_path, monkeypatch
):
    """The files' clients are looked for in the records that the run then splits."""
    read = record_calls(monkeypatch, sources, "read_records")
    trained = record_calls(monkeypatch, local, "train")
    printed(debug(**files, bug="flip", fraction=0.5))
    assert len(read) == 1
    ((folder, data, *_),) = trained
    again = load_data(folder.config)
    assert (data.images == again.images).all()


@pytest.mark.parametrize("asked", ["files", "values", "each", "node"])
def test_the_reports_command_makes_the_same_comparison(
    debug, fedgs, data, files, own_cohorts, tmp_path, monkeypatch, asked
):
    """It is followed to the letter, with the same files in the working directory."""
    settings: dict[str, object] = {
        "files": {**files, "bug": "flip", "fraction": 0.4},
        "values": own_cohorts,
        "each": {**EACH, "bug": "flip"},
        "node": {"suspicious": "1", "clients_per_node": 24},
    }[asked]
    printed(debug(**settings))
    facts = read_run(tmp_path / "out")
    words = shlex.split(train_command(facts), comments=True)
    assert words[:2] == ["fedgs", "debug"]
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(data.removeprefix("npz:"), again / "FILE")
    for name in ("healthy", "suspicious"):
        shutil.copy(files[name], again / f"{name}.txt")
    shutil.copy(own_cohorts["cohorts"], again / "cohorts.csv")
    monkeypatch.chdir(again)
    printed(fedgs(*words[1:]))
    made = RunFolder.open("out").config.to_flat()
    expected = facts.config.to_flat()
    for name in ("data", *settings_with("path"), "output"):
        assert bool(made.pop(name, None)) == bool(expected.pop(name, None)), name
    assert made == expected
    for name in ("cohort.txt", "private/cohorts.csv"):
        path = tmp_path / "out" / name
        if path.exists():
            assert (again / "out" / name).read_text() == path.read_text()


def test_a_comparison_is_shown_by_its_mean_pictures_alone(fedgs, done):
    """A grid of its generator would be of noise, and nobody gets images of it."""
    page = render(read_page([done]))
    assert "Mean picture of each class" in page
    assert "After round 1" not in page
    words = "a run of `fedgs debug` compares groups of clients"
    elsewhere = done.parent / "elsewhere"
    for command in ("sample", "publish"):
        refused(fedgs(command, done, "-n", 5, "-o", elsewhere), words)
    own = ("--data", "digits", "--test-fraction", 0.1)
    refused(fedgs("evaluate", done, *own, "--metrics", "cnn"), words)
    assert not elsewhere.exists()


def test_a_private_selection_is_in_the_epsilon_once(debug, tmp_path):
    cost = SelectionCost(4.0, 2, 2, 2.0, 3.0)
    private = {"selection": "private", "cost": cost, "selection_id": "one and the same"}
    printed(debug(**make_files(tmp_path, **private)), "")
    config = RunFolder.open(tmp_path / "out").config
    assert selection_costs([config]) == (cost,)


def test_a_program_gets_the_same_diagnosis(data, files, tmp_path):
    given = {"data": data, "output": tmp_path / "out", "seed": 0, "image_size": 16}
    given |= {"noise_multiplier": 0.05}
    assert debug_from_python(dry_run=True, **given, **files) is None
    assert not (tmp_path / "out").exists()
    found = debug_from_python(**given, **files)
    assert found == json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    again = debug_from_python(output=tmp_path / "out")
    assert again["comparisons"] == found["comparisons"]


# ------------------------------------------------------------------ going on


def test_a_released_verdict_is_judged_anew_at_no_epsilon(fedgs, done):
    ledger = (done / "ledger.jsonl").read_bytes()
    weights = (done / "generator.safetensors").read_bytes()
    for rule in ({"alpha": 0.2}, {"min_effect": 0.5}):
        printed(fedgs("debug", "--output", done, *plain_flags(**rule)), "")
        (found,) = found_in(done)["comparisons"]
        for name, value in rule.items():
            assert found[name] == value
    refused(fedgs("debug", "--output", done, "--min-effect", 7), "min_effect = 7.0:")
    assert (done / "ledger.jsonl").read_bytes() == ledger
    assert (done / "generator.safetensors").read_bytes() == weights


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_run_goes_on_with_its_output_alone(
    debug, fedgs, files, tmp_path, monkeypatch, when
):
    """Before its release it is made; after it, it is not made again."""
    path = tmp_path / "out"

    def stopped(*arguments: object) -> None:
        raise RunStopped("stopped")

    with monkeypatch.context() as patch:
        if when == "before":
            patch.setattr(local, "train", stopped)
        else:
            patch.setattr(train, "conclude", stopped)
        assert debug(**files)[0] == 1
    assert not (path / "diagnosis.json").exists()
    assert len(RunFolder.open(path).read_ledger().events) == int(when == "after")
    printed(fedgs("debug", "--output", path))
    assert found_in(path)["rows"] == ["healthy", "suspicious"]
    assert len(RunFolder.open(path).read_ledger().events) == 1


def test_a_folder_that_is_not_there_or_of_another_kind_is_said(fedgs, tmp_path, debug):
    refused(fedgs("debug", "--output", tmp_path / "out"), ".*out")
    given = {"image_size": 16, "seed": 0, "noise_multiplier": 1, "num_rounds": 3}
    path = tmp_path / "other"
    images, labels, owners = pictures()
    arrays = {"images": images, "labels": labels, "clients": owners}
    np.savez(tmp_path / "a.npz", **arrays)
    given |= {"data": f"npz:{tmp_path}/a.npz", "output": path, "recipe": "moments"}
    printed(fedgs("train", *flags(**given)))
    refused(fedgs("debug", "--output", path), f"{path}: ")


@pytest.mark.parametrize("content", ["", "{}", '{"format": 4}', "[1]"])
def test_a_diagnosis_that_cannot_be_read_is_made_again_at_no_cost(fedgs, done, content):
    expected = found_in(done)
    (done / "diagnosis.json").write_text(content)
    printed(fedgs("debug", "--output", done))
    assert found_in(done) == expected


def test_a_cohorts_name_too_long_for_its_files_is_refused_first(debug, tmp_path):
    values = {n: ("v" * 244 if i < 24 else "w") for i, n in enumerate(NAMES)}
    file = write_cohorts(tmp_path / "long.csv", values)
    named = {"healthy": "v" * 244, "suspicious": "w", "cohorts": file}
    refused(debug(**named), "healthy = 'vvv.*at most 220 bytes")
    assert not (tmp_path / "out").exists()


def test_a_folder_goes_on_with_no_other_settings(fedgs, done):
    given = ("debug", "--output", done)
    refused(fedgs(*given, "--groups", 5), "groups = 5", "leave out --groups")
    refused(fedgs(*given, "--set", "clip_bound=2"), "clip_bound = 2")
    refused(fedgs(*given, "--each"), "each = True")
    refused(fedgs(*given, "--dry-run"), "dry_run = True")


def test_an_undecided_verdict_names_the_step_that_decides_it(fedgs, data, tmp_path):
    """A bug in some clients of one cohort: the same release shows it in fewer."""
    bad = spoilt(tmp_path, inverted, tuple(range(24, 48, 3)))
    given = {"data": bad, "output": tmp_path / "out", "seed": 0, "image_size": 16}
    given |= make_files(tmp_path) | {"target_epsilon": 99, "noise_seed": 1}
    # Two of the six clients of each group of v2 have it.
    values = {n: ("v1" if i < 24 else "v2", i // 6 % 4) for i, n in enumerate(NAMES)}
    given |= VALUES | {"cohorts": write_cohorts(tmp_path / "own.csv", values)}
    out = printed(fedgs("debug", *words_of(**given, min_effect=0.6)))
    assert re.search("^Verdict of v2: undecided$", out, re.MULTILINE)
    step = re.search(
        r"Next step: inverted is significant.* fedgs (debug.*)$", out, re.M
    )
    assert step, out
    out = printed(fedgs(*shlex.split(step[1])))
    assert re.search("^Verdict of v2: (one of )?invert", out, re.MULTILINE)


def test_a_smaller_share_is_advised_unless_accuracy_selected_the_cohorts(tmp_path):
    best = {
        "title": "inverted",
        "interval": [0.12, 0.2],
        "adjusted_p": 0.03,
        "fit": 0.9,
    }
    comparison = {"verdict": "undecided", "ranking": [best]}
    comparison |= {"min_effect": 0.25, "alpha": 0.05}
    for selection, is_advised in ((BY_THE_USER, True), ("not private", False)):
        path = tmp_path / "cohort.txt"
        write_cohort(path, Cohort(("ann", "bob"), selection), "two")
        config = dataclasses.replace(group_means(), cohort=str(path))
        step = verdict.next_step(config, comparison, "out")
        assert ("--min-effect 0.1" in step) == is_advised
        assert ("less noise" in step) != is_advised
    assert verdict.next_step(config, comparison | {"verdict": "none"}, "out") == ""


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"healthy": range(24), "suspicious": range(23, 47)}, "'o23' (1 clients)"),
        ({"healthy": range(24), "suspicious": range(40, 64)}, "no client 'o48'"),
        ({"healthy": range(24), "suspicious": range(24, 31)}, "7 clients are too few"),
    ],
)
@pytest.mark.usefixtures("no_training")
def test_cohorts_that_do_not_fit_are_refused(debug, tmp_path, settings, words):
    refused(debug(**make_files(tmp_path, **settings)), re.escape(words))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_training")
def test_cohorts_of_different_sources_are_refused(debug, tmp_path, files):
    names = NAMES[24:]
    write_cohort(files["suspicious"], Cohort(names, "not private"), "selected")
    refused(debug(**files), "suspicious = .*: the epsilons of two selections")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "suspicious is unset: "),
        ({"fraction": 0.5, "each": True}, "needs --bug"),
        ({"bug": "no", "each": True}, "bug = 'no': give --bug one of flip"),
        (EACH | {"bug": "flip", "fraction": 2}, "at most 1"),
        (EACH | {"groups": 3}, "--groups at least 4"),
        (EACH | {"clients_per_group": 7}, "has 24 clients for 4 groups"),
        (EACH | {"healthy": "a"}, "healthy = a: --each compares every node"),
        (EACH | {"cohort": "c.txt"}, "leave out --set cohort"),
        (
            EACH | {"secure_aggregation": True, "engine": "flower"},
            "secure_aggregation = ",
        ),
        ({"each": True, "clients_per_node": 48}, "num_clients = 48: "),
        ({"each": True, "clients_per_node": 1}, "has 1 clients for 4 groups"),
        ({"suspicious": "9", "clients_per_node": 24}, "give --suspicious one of 0, 1"),
        ({"healthy": "/nowhere"}, "give --suspicious too"),
        ({"healthy": "/no", "suspicious": "/no"}, "healthy = /no:"),
        (
            {"bug": "flip", "healthy": "/h", "suspicious": "/s", "seed": None},
            "seed is unset: ",
        ),
    ],
)
@pytest.mark.usefixtures("no_training")
def test_bad_flags_are_refused_before_any_work(debug, tmp_path, settings, words):
    assert refused(debug(**settings), re.escape(words)).count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"suspicious": "v9"}, "suspicious = v9: 0 clients have it"),
        ({"healthy": "v9"}, "healthy = v9: 0 clients have it"),
        ({"num_clients": 30}, "suspicious = v2: 6 clients have it, too few for 4"),
        ({"suspicious": "v1"}, "suspicious = 'v1': .*give another --suspicious"),
        ({"healthy": "a/b"}, "healthy = 'a/b': give a plain name"),
        ({"partition": "iid", "num_clients": 48}, "cohorts = .*: partition = iid"),
        ({"cohorts": "/nowhere.csv"}, "cohorts = /nowhere.csv: it cannot be read"),
    ],
)
@pytest.mark.usefixtures("no_training")
def test_values_that_too_few_clients_have_are_refused(
    debug, own_cohorts, tmp_path, settings, words
):
    refused(debug(**own_cohorts | settings), words)
    assert not (tmp_path / "out").exists()


def test_settings_of_a_file_are_the_users_as_well(debug, own_cohorts, tmp_path):
    """The file of cohorts may stand in it, and where clients live."""
    file = tmp_path / "debug.toml"
    cohorts = own_cohorts.pop("cohorts")
    file.write_text(f'cohorts = "{cohorts}"\nclients_per_node = 24\n')
    printed(debug(**own_cohorts, config=file))
    config = RunFolder.open(tmp_path / "out").config
    assert config.num_nodes == 2
    assert found_in(tmp_path / "out")["rows"] == ["v1", "v2"]


def test_a_suspect_that_fails_is_said_before_any_training(
    debug, files, tmp_path, no_training
):
    (tmp_path / "own.py").write_text("def half(x):\n    return x[:1]\n")
    suspect = f"{tmp_path / 'own.py'}:half"
    refused(debug(**files, suspect=suspect), "return images of the same shape")
    assert not (tmp_path / "out").exists()


def test_a_suspect_of_ones_own_is_named(debug, files, tmp_path):
    (tmp_path / "own.py").write_text(
        "def striped(x):\n    x[..., ::2] = 1\n    return x\n"
    )

    def striped(images: np.ndarray) -> np.ndarray:
        images = images.copy()
        images[..., ::2] = 255
        return images

    data = spoilt(tmp_path, striped, range(24, 48))
    suspect = f"{tmp_path / 'own.py'}:striped"
    printed(debug(data=data, **files, suspect=suspect))
    (found,) = found_in(tmp_path / "out")["comparisons"]
    assert suspect in [row["bug"] for row in found["ranking"]]


# ------------------------------------------------------------------ power


@pytest.mark.usefixtures("no_training")
def test_a_hopeless_plan_is_refused_with_what_would_suffice(debug, files, tmp_path):
    given = files | {"noise_multiplier": None, "target_epsilon": 0.1}
    refused(debug(**given), "target_epsilon", "clients in each group")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_training")
def test_a_dry_run_says_what_can_be_found_and_writes_nothing(debug, files, tmp_path):
    given = {"noise_multiplier": None, "target_epsilon": 100, "dry_run": True}
    text = printed(debug(**given | files))
    assert "6 clients in each group and epsilon 100" in text
    assert re.search(r"^ +always found: \w", text, re.M)
    assert "found even in half of the clients:" in text
    text = printed(debug(**given | EACH))
    assert "6 clients in each group and epsilon 100" in text
    # What writes nothing needs no name of a folder.
    text = printed(debug(**given | EACH | {"output": None}))
    assert "6 clients in each group and epsilon 100" in text
    assert not (tmp_path / "out").exists()


def test_of_unequal_cohorts_the_smaller_one_says_what_can_be_found(debug, tmp_path):
    given = {"noise_multiplier": None, "target_epsilon": 100, "dry_run": True}
    # Of 48 owners 12 are of neither cohort.
    sizes = ["v1"] * 24 + ["v2"] * 12 + ["v3"] * 12
    values = dict(zip(NAMES, sizes, strict=True))
    file = write_cohorts(tmp_path / "unequal.csv", values)
    text = printed(debug(**given | VALUES, cohorts=file))
    assert "3 clients in each group and epsilon 100" in text
    assert "equally large" not in text


def test_where_nobody_knows_the_cohorts_it_is_said_what_power_supposes(capsys):
    config = tiny_config(**BY_COHORT | {"num_clients": 240, "clients_per_node": 240})
    power.show(config)
    said = " ".join(capsys.readouterr().out.split())
    assert "30 clients in each group" in said
    assert "if every client is in one of the two cohorts" in said


def test_power_is_read_between_the_levels_of_the_table():
    right = {"a": [0, 1, 2], "b": [2, 2, 2], "c": [0, 0, 0], "d": [0, 0, 1]}
    table = {"signals": [10, 20, 40], "right": right}
    table["trials"] = {bug: [2, 2, 2] for bug in right}
    table["narrowed"] = {bug: [0, 0, 0] for bug in "abc"} | {"d": [0, 2, 1]}
    wanted = {5: "npnn", 10: "nynn", 15: "pynp", 20: "pyna", 40: "yyna"}
    wanted[math.inf] = "yyna"
    letters = {power.YES: "y", power.ALIKE: "a", power.PERHAPS: "p", power.NO: "n"}
    for signal, text in wanted.items():
        found = power.of_plan(signal, table)
        assert "".join(letters[p.now] for p in found.values()) == text, signal
        assert [p.needed for p in found.values()] == [40, 10, None, None]


def test_the_stored_table_knows_all_bugs_at_all_levels_in_all_and_in_half():
    table, names = power.stored(), {t.name for t in TRANSFORMATIONS}
    for rows, known in ((table, {"none", *names}), (table["of_half"], names)):
        for part in ("trials", "right", "narrowed", "wrong"):
            assert rows[part].keys() == known
            assert {len(v) for v in rows[part].values()} == {len(table["signals"])}


def test_what_half_of_the_clients_show_all_of_them_show(monkeypatch, capsys):
    """Both tables are of few trials, and need not agree on a bug."""
    table = power.stored()
    bug = next(iter(table["of_half"]["right"]))
    for part in ("right", "trials"):
        table["of_half"][part][bug] = [400] * len(table["signals"])
    table["right"][bug] = [0] * len(table["signals"])
    monkeypatch.setattr(power, "stored", lambda: table)
    power.show(tiny_config(**BY_COHORT | {"num_clients": 240, "clients_per_node": 240}))
    (line,) = [
        line for line in capsys.readouterr().out.split("  always") if "in half" in line
    ]
    assert bug not in line.partition("\n")[0]


def test_the_epsilon_that_suffices_is_that_of_its_noise():
    given = {"num_clients": 64, "clients_per_node": 32, "clients_per_round": 64}
    given |= {"noise_multiplier": 0.7, "seed": 0, "num_classes": 10}
    given |= {"image_size": 28, "image_channels": 1}
    config = ResolvedConfig.from_flat(given, group_means())
    noise = calibrate_noise(Plan.from_config(config), 3.0, 1e-5, "release", "zero-out")
    assert power.epsilon_of(config, noise) == pytest.approx(3.0, rel=1e-3)
    # Of nodes that are compared, one's own noise counts, and not both's.
    both = dataclasses.replace(Plan.from_config(config), is_by_node=False)
    assert calibrate_noise(both, 3.0, 1e-5, "release", "zero-out") < noise


# ------------------------------------------------------------------ odd data


@pytest.mark.parametrize("size", [None, 28, 64])
def test_images_of_every_size_and_in_colour_are_compared(debug, tmp_path, size):
    images, labels, owners = pictures(colours=3)
    np.savez(tmp_path / "c.npz", images=images, labels=labels, clients=owners)
    given = EACH | {"data": f"npz:{tmp_path}/c.npz", "image_size": size}
    printed(debug(**given))
    with np.load(tmp_path / "out" / "groups" / "1-0.npz") as group:
        side = size or 16  # of the data
        assert group["images"].shape[1:] == (3, side, side)


def test_data_of_one_class_are_compared(debug, tmp_path):
    images, labels, owners = pictures()
    kept = labels == 1
    arrays = {"images": images[kept], "labels": labels[kept] * 0}
    np.savez(tmp_path / "one.npz", **arrays, clients=owners[kept])
    printed(debug(data=f"npz:{tmp_path}/one.npz", **EACH))
    assert found_in(tmp_path / "out")["rows"] == ["0", "1"]
