"""The privacy label: one function from a run folder, never more than is guaranteed."""

import json
import shutil
from pathlib import Path

import pytest

from fedgs.audit.finding import Finding
from fedgs.cohorts.cohort_file import EXCLUDED
from fedgs.files import write_json
from fedgs.privacy.accountant import SEEDED
from fedgs.privacy_label import ALL_RELEASED, LABEL_HOLDS, UNFINISHED, privacy_label
from fedgs.runs import epsilons
from fedgs.runs.data_card import NO_GUARANTEE
from fedgs.runs.run_folder import RunFolder
from report_folders import PRIVATE, make_run
from runs import keep_lines
from tiny import MOMENTS, tiny_config


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("label") / "run")


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A private run that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def flaw(path: Path) -> str:
    """Why a label says that nothing is guaranteed; it has no epsilon then."""
    label = privacy_label(path)
    assert next(iter(label)) == "guarantee"
    assert label["epsilon"] is None
    for entry in label["who_sees_what"]:
        assert set(entry["epsilon"].values()) == {None}
    start, _, why = label["guarantee"].partition("; ")
    assert start == NO_GUARANTEE
    return why


def test_the_label_is_what_privacy_states(made):
    label, stated = privacy_label(made), epsilons.of_run(made)
    assert json.loads(json.dumps(label)) == label
    assert label["guarantee"] == LABEL_HOLDS
    asked = next(row for row in stated if row.relation == "replace-one")
    assert (label["epsilon"], label["delta"]) == (asked.epsilon, asked.delta)
    assert (label["adversary"], label["relation"]) == ("release", "replace-one")
    assert label["composition"] == asked.theorem
    (entry,) = label["who_sees_what"]
    assert (entry["adversary"], entry["unit"]) == ("release", "client")
    assert entry["epsilon"] == {row.relation: row.epsilon for row in stated}
    assert {*label["conditions"]} == {c for row in stated for c in row.conditions}
    assert label["versions"] == json.loads((made / "versions.json").read_text())
    assert "release gradient, noise_std" in label["mechanism"][1]
    assert (label["audit"], label["audited_bound"]) == ("not audited", None)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"noise_multiplier": 0.0}, "epsilon is unbounded"),
        ({"noise_seed": 7}, f"noise {SEEDED}"),
        (None, "nothing was released yet"),  # which has no epsilon of zero
    ],
)
def test_a_run_that_is_not_private_has_no_guarantee(tmp_path, settings, why):
    if settings is None:
        RunFolder.create(tiny_config(output=str(tmp_path / "run"), **PRIVATE))
        assert epsilons.of_run(tmp_path / "run")[0].epsilon == 0
    else:
        make_run(tmp_path / "run", **settings)
    assert flaw(tmp_path / "run") == why


def test_an_unfinished_a_refuted_and_a_broken_run_say_so(run, monkeypatch):
    audited(run, finding("A takes part", 10.0), holds=False)
    assert flaw(run) == "`fedgs audit` refuted it"
    assert privacy_label(run)["audited_bound"]["lower_bound"] == 10.0
    shutil.rmtree(run / "audit")
    (run / "generator.safetensors").unlink()
    config = RunFolder.open(run).config
    for last_round in range(config.num_rounds + 1):
        monkeypatch.setattr(RunFolder, "last_round", last_round)
        caveat = ALL_RELEASED if last_round == config.num_rounds else UNFINISHED
        assert privacy_label(run)["guarantee"] == f"{LABEL_HOLDS}; {caveat}"
    keep_lines(run / "ledger.jsonl", -1)
    with pytest.raises(ValueError, match="ledger"):
        privacy_label(run)


def test_every_adversary_of_a_federation_is_named(tmp_path):
    path = make_run(tmp_path / "run", engine="flower", adversary="server")
    label = privacy_label(path)
    known = {entry["adversary"]: entry["epsilon"] for entry in label["who_sees_what"]}
    assert known.keys() == {"release", "server", "secagg"}
    assert label["epsilon"] == known["server"]["replace-one"]
    assert known["release"]["zero-out"] < label["epsilon"]


def test_a_selection_that_is_not_covered_stands_in_the_first_field(run, monkeypatch):
    row = epsilons.of_run(run)[0]
    more = [type(row)(**vars(row) | {"conditions": (*row.conditions, EXCLUDED)})]
    monkeypatch.setattr(epsilons, "of_run", lambda path: more)
    assert privacy_label(run)["guarantee"] == f"{LABEL_HOLDS}; {EXCLUDED}"


SAMPLED = {"clients_per_round": 1, "client_selection": "uniform", "amplification": True}
SAMPLED |= {"discriminator_training": "every_round"}
PUBLIC = {"phases": "moments", "public_data": "npz:/home/ada/public.npz"}


@pytest.mark.parametrize("settings", [SAMPLED, MOMENTS | PUBLIC])
def test_the_label_tells_no_seed_and_no_path(tmp_path, settings):
    secrets = {"seed": 271828, "data": "npz:/home/ada/a.npz"}
    settings = secrets | {"clients_per_node": 1} | settings
    label = privacy_label(make_run(tmp_path / "secret-place", **settings))
    assert label["guarantee"] == LABEL_HOLDS
    text = json.dumps(label)
    words = ("271828", "secret-place", "/home", "a.npz", "participants")
    assert not [secret for secret in words if secret in text]
    assert "public.npz" not in text
    assert ("the images of a file of" in text) == ("public_data" in settings)


def audited(run: Path, *found: Finding, holds: bool = True) -> None:
    """Writes what `fedgs audit` writes."""
    (run / "audit").mkdir()
    findings = [finding.to_json() for finding in found]
    write_json(run / "audit" / "report.json", {"findings": findings, "holds": holds})


def finding(attack: str, bound: float, **more: str) -> Finding:
    about = {"adversary": "release", "relation": "replace-one"} | more
    numbers = {"rounds": 1, "delta": 1e-5, "lower_bound": bound, "epsilon": 9.0}
    return Finding(attack=attack, theorem="", **about, **numbers)


def test_the_audited_bound_is_the_largest_of_its_row_that_read_no_images(run):
    others = [finding("B canaries", 5.0), finding("A drawn", 4.0, relation="zero-out")]
    audited(run, finding("A drawn", 2.0), finding("A takes part", 3.0), *others)
    label = privacy_label(run)
    bound = label["audited_bound"]
    assert (bound["attack"], bound["lower_bound"]) == ("A takes part", 3.0)
    assert bound["rounds"] == 1  # it is no bound of the whole run
    assert (label["audit"], label["guarantee"]) == ("one release attacked", LABEL_HOLDS)


def test_where_the_data_may_name_no_owners_a_client_may_be_no_person(tmp_path):
    for partition, unit in (
        ("iid", "one shard of the data, not a person"),
        ("by-client", "one client (an owner with all images)"),
        (
            "auto",
            "one client (an owner with all images, or a shard, which is no person",
        ),
    ):
        label = privacy_label(make_run(tmp_path / partition, partition=partition))
        assert label["unit_of_privacy"].startswith(unit)
