"""What one unit is, wherever an epsilon stands; and that of a record only one holds."""

import csv
import dataclasses
import io
import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedgs as library
from command_line import flags, printed, refused
from experiments.baselines import dp_sgd
from experiments.baselines.baseline import Facts
from experiments.baselines.central_dp_merf import CentralDPMerf, CentralDPMerfSettings
from fedgs.app.commands import forecast, run_outcome
from fedgs.app.commands.privacy_words import explained, protection
from fedgs.audit.mechanism import claims_of_one_round
from fedgs.config.recipes import RECIPES, configure, overridden, recipe
from fedgs.config.run_config import RunConfig
from fedgs.data.given import read_given
from fedgs.data.load import federate
from fedgs.data.records import DataWarning, fit
from fedgs.privacy.accountant import statements
from fedgs.privacy.budget import Budget, calibrate_noise, largest_num_rounds
from fedgs.privacy.client_limits import ClientRefused, Limits
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.plan import Plan
from fedgs.privacy.selection_cost import Target
from fedgs.privacy_label import privacy_label
from fedgs.round.preparation import resolve
from fedgs.runs import epsilons
from fedgs.runs.data_card import in_words
from fedgs.runs.publication import publish
from fedgs.runs.run_folder import RunFolder
from plans import FULL, WITH_RELEASES
from refusals import assert_refused
from report_folders import make_run
from tiny import FULL_PARTICIPATION, SETTINGS, run_config, tiny_config, write_tiny_npz

RECORD = {"privacy_unit": "record", "partition": "iid"}
OF_RECORDS = replace(FULL, privacy_unit="record")
UNSEEDED = {"noise_seed": None, "relation": "zero-out"}

# ------------------------------------------------------------------ records


def relations(rows) -> set[str]:
    return {row.relation for row in rows}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"secure_aggregation": True, "clients_per_node": 49},
        {"client_selection": "uniform", "clients_per_round": 3},
        {"client_selection": "uniform", "clients_per_round": 3, "amplification": True}
        | {"discriminator_training": "frozen"},
        {"engine": "local"},
    ],
)
def test_only_replace_one_is_stated_of_a_record(changes):
    plan = replace(OF_RECORDS, **changes)
    rows = statements(plan, 1e-5)
    assert relations(rows) == {"replace-one"}
    clients = statements(replace(plan, privacy_unit="client"), 1e-5)
    assert relations(clients) == {"replace-one", "zero-out"}
    whole = [row.epsilon for row in clients if row.relation == "replace-one"]
    assert [row.epsilon for row in rows] == whole
    for row in rows:  # a shard's number of images is fixed, so N is
        assert any("the number of records" in text for text in row.conditions)
    claims = claims_of_one_round(plan, 1e-5)
    assert relations(claims) == {"replace-one"}


def test_embeddings_of_records_are_of_replace_one():
    plan = Plan.from_config(dataclasses.replace(WITH_RELEASES, **RECORD))
    assert relations(statements(plan, 1e-5)) == {"replace-one"}


def test_no_noise_and_no_budget_is_calibrated_to_zero_out_of_a_record():
    words = "relation = 'zero-out': give replace-one"
    asked = (10.0, 1e-5, "release", "zero-out")
    assert_refused(words, calibrate_noise, OF_RECORDS, *asked)
    assert_refused(words, largest_num_rounds, OF_RECORDS, Target(*asked))
    assert_refused(words, Budget, OF_RECORDS, Target(*asked))
    assert calibrate_noise(FULL, *asked) > 0


@pytest.mark.parametrize("name", RECIPES)
def test_the_relation_of_a_record_is_replace_one_unless_it_is_given(name, tmp_path):
    config = overridden(recipe(name), RECORD)
    assert config.relation == "replace-one"
    assert_refused("relation = 'zero-out'", configure, name, None, RECORD | ZERO_OUT)
    file = tmp_path / "own.toml"
    file.write_text('relation = "zero-out"\n')
    assert_refused("relation = 'zero-out'", configure, name, file, RECORD)
    file.write_text('privacy_unit = "record"\npartition = "iid"\n')
    assert configure(name, file, {}).relation == "replace-one"
    assert_refused("relation = 'zero-out'", configure, name, file, ZERO_OUT)


ZERO_OUT = {"relation": "zero-out"}
IMAGES = np.random.default_rng(0).integers(0, 256, (60, 16, 16), np.uint8)
SMALL = {"image_size": 16, "num_clients": 6, "target_epsilon": 9.0, "moment_size": 4}
SMALL |= {"recipe": "moments", "background": "dark", "latent_dim": 4}
SMALL["image_channels"] = 1


def test_a_program_and_the_command_line_agree_on_records(tmp_path, fedgs):
    run = library.train(IMAGES, **SMALL, **RECORD, output=tmp_path / "run")
    assert run.config.relation == "replace-one"
    assert run.epsilon() <= 9.0
    assert_refused("adversary, relation = release, zero", run.epsilon, **ZERO_OUT)
    label = privacy_label(run.path)
    assert [*label["who_sees_what"][0]["epsilon"]] == ["replace-one"]
    told = "unit: one record (an image with its label)"
    assert told in repr(run)
    assert told in explained(label)[0]
    assert told.removeprefix("unit: ") in protection(label)
    given = SMALL | RECORD | ZERO_OUT | {"output": tmp_path / "no"}
    assert_refused("relation = 'zero-out':", library.train, IMAGES, **given)
    npz = tmp_path / "a.npz"
    np.savez(npz, images=IMAGES)
    words = flags(data=f"npz:{npz}", **given)
    refused(fedgs("train", *words), "relation = 'zero-out':")
    plan = flags(recipe="moments", num_clients=6, privacy_unit="record")
    rows = json.loads(printed(fedgs("privacy", "plan", *plan, "--json")))
    assert {row["relation"] for row in rows} == {"replace-one"}


def test_an_old_run_of_records_has_replace_one_only_and_goes_no_further(tmp_path):
    """Its noise was for zero-out: its target is exceeded, so it ends."""
    old = FULL_PARTICIPATION | UNSEEDED | {"num_rounds": 2, "warm_start_rounds": 0}
    old |= {"privacy_unit": "record", "partition": "iid", "target_epsilon": 15.0}
    data = write_tiny_npz(tmp_path / "a.npz")
    flat = SETTINGS | old | {"data": data, "output": str(tmp_path / "run")}
    flat |= {"clients_per_round": 6}
    path = tmp_path / "run"
    RunFolder.create(type(tiny_config()).from_flat(flat, run_config()))
    assert json.loads((path / "config.json").read_text())["relation"] == "zero-out"
    of_round = 4 / (3 * 0.5**2)  # B fakes, 3 nodes
    one, two = (epsilon_from_mu((n * of_round) ** 0.5, 1e-5) for n in (1, 2))
    assert one < 15 < two
    run = library.load(path).resume()
    assert run.config.relation == "replace-one"
    assert len(run.folder.read_ledger().events) == 1
    rows = [*run.statements(), *epsilons.of_run(path)]
    assert relations(rows) == {"replace-one"}
    assert run.epsilon() == pytest.approx(one)


def test_a_client_limits_records_by_replace_one_only():
    config = tiny_config(
        **RECORD, client_selection="all", engine="flower", data="npz:a"
    )
    limits = Limits(client_epsilon=1e9, relation="zero-out", allow_seeded_noise=True)
    with pytest.raises(ClientRefused, match="relation = zero-out") as caught:
        limits.check_run(config)
    assert caught.value.setting == "relation"
    replace(limits, relation="replace-one").check_run(config)
    limits.check_run(dataclasses.replace(config, privacy_unit="client"))


def test_a_record_of_a_central_method_moves_its_own_part_alone():
    """Sums over records: there zero-out of a record is what it says."""
    event = dp_sgd.event(1.0, 2.0, what="embedding")
    facts = Facts(3, 30, None, 2, (1, 16, 16))
    rows = CentralDPMerf.guarantees(
        CentralDPMerfSettings(noise_multiplier=2.0), facts, [event], 1e-5
    )
    valid = {r.relation: r.epsilon for r in rows if r.label == "valid"}
    assert valid["zero-out"] == pytest.approx(epsilon_from_mu(0.5, 1e-5))


# ------------------------------------------------------------------ units in words

WRITER = "one client (a writer with all images)"
OWNER = "one client (an owner with all images)"
SHARD = "one shard of the data, not a person"


@pytest.mark.parametrize(
    ("settings", "unit"),
    [
        ({"partition": "by-client", "data": "mnist-by-writer"}, WRITER),
        ({"partition": "by-client", "data": "femnist:/home/x"}, WRITER),
        ({"partition": "by-client", "data": "npz:a"}, OWNER),
        ({"partition": "iid", "data": "mnist-by-writer"}, SHARD),
        ({"partition": "dirichlet"}, SHARD),
        ({"data": "hf:a/b?partitioner=IidPartitioner&num_partitions=9"}, SHARD),
        ({"data": "hf:a/b?partitioner=NaturalIdPartitioner&partition_by=w"}, "or a sh"),
        ({"data": "hf:a/b?client=writer", "partition": "by-client"}, OWNER),
        (
            {"data": "npz:a"},
            "one client (an owner with all images, or a shard, which",
        ),
        ({"nodes": "a,b", "engine": "flower"}, "if a node's data name no owners"),
        (RECORD, "one record (an image with its label)"),
    ],
)
def test_the_unit_is_told_by_settings_in_every_row(settings, unit):
    config = run_config(num_clients=6, clients_per_round=1, noise_multiplier=1.0)
    config = dataclasses.replace(config, **settings)
    for row in statements(Plan.from_config(config), 1e-5):
        assert unit in row.unit_in_words
        (condition,) = [c for c in row.conditions if row.unit_in_words in c]
        assert condition.startswith(f"{row.unit}: ")
        is_shard = unit == SHARD
        assert ("k of them cost k times mu" in condition) == is_shard


@pytest.mark.parametrize("partition", ["auto", "by-client", "iid", "dirichlet"])
@pytest.mark.parametrize("has_owners", [False, True])
def test_a_run_records_how_its_clients_were_made_and_warns_of_cut_owners(
    partition, has_owners
):
    if partition == "by-client" and not has_owners:
        return
    config = RunConfig.from_flat(
        {"data": "given", "image_size": 16, "background": "dark", "seed": 0}
        | {"partition": partition, "noise_multiplier": 1.0}
        | (
            {}
            if has_owners and partition in ("auto", "by-client")
            else {"num_clients": 5}
        )
    )
    owners = np.repeat(np.arange(10), 6) if has_owners else None
    data = federate(config, fit(config, read_given(config, IMAGES, None, owners)))
    is_cut = has_owners and partition in ("iid", "dirichlet")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolved, _ = resolve(config, data)
    assert [w.category for w in caught] == [DataWarning] * is_cut
    if is_cut:  # and no number of the data is told
        text = str(caught[0].message)
        assert text.startswith(f"partition = {partition}: a client is a shard, not")
        assert not any(letter.isdigit() for letter in text)
    made = partition if partition != "auto" else "by-client" if has_owners else "iid"
    assert resolved.partition == made
    unit = OWNER if made == "by-client" else SHARD
    assert resolved.unit_condition.startswith(f"client: {unit}")


def test_a_partitioner_that_makes_shards_is_warned_of():
    data = "hf:a/b?partitioner=IidPartitioner&num_partitions=6"
    config = run_config(data=data, num_clients=6, noise_multiplier=1.0, seed=0)
    config = dataclasses.replace(config, clients_per_round=1)
    given = dataclasses.replace(config, data="given", image_size=16, background="dark")
    owners = np.repeat(np.arange(6), 10)
    found = federate(given, fit(given, read_given(given, IMAGES, None, owners)))
    with pytest.warns(DataWarning, match="data = 'hf:a/b.*a client is a shard"):
        resolved, _ = resolve(dataclasses.replace(config, image_size=16), found)
    assert SHARD in resolved.unit_condition


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> Path:
    """A run of a file with owners whose numbers nobody has given."""
    folder = tmp_path_factory.mktemp("units")
    data = write_tiny_npz(folder / "Ward-3.npz")
    given = {n: v for n, v in SMALL.items() if n != "num_clients"}
    public = np.random.default_rng(7).integers(0, 256, (30, 16, 16), np.uint8)
    np.savez(folder / "Ada.npz", images=public, labels=np.arange(30) % 3)
    given |= {"public_data": f"npz:{folder / 'Ada.npz'}", "noise_multiplier": 0.9}
    given |= {"recipe": "moments", "phases": "moments"}
    del given["target_epsilon"]
    return library.train(data=data, output=folder / "run", **given).path


PUBLIC = "num_classes = 3, test_owners = 0.0, taken from the private data"
OF_FILE = "the images of a file of the run's owner belong to nobody"


def test_unit_and_public_numbers_stand_wherever_an_epsilon_does(counted, fedgs):
    config = RunFolder.open(counted).config
    label, run = privacy_label(counted), library.load(counted)
    code, columns, told = fedgs("privacy", "of", counted, "--csv")
    assert code == 0
    heads = next(csv.reader(io.StringIO(columns)))[1:]
    assert all(head.endswith(f"unit: {OWNER}") for head in heads)
    shown = "\n".join(f"{n} {v}" for n, v in forecast.lines(config, data()).items())
    places = {
        "repr": repr(run),
        "label": in_words(label),
        "privacy": printed(fedgs("privacy", "of", counted)),
        "csv": columns + told,
        "dry run": shown,
        "as JSON": json.dumps(label),
    }
    for name, text in places.items():
        for words in (OWNER, PUBLIC, OF_FILE):
            assert words in text, name


def data():
    config = run_config(data="given", image_size=16, background="dark")
    return federate(
        config, fit(config, read_given(config, IMAGES, None, IMAGES[:, 0, 0]))
    )


def test_the_end_of_a_training_tells_the_unit_and_where_the_rest_is(
    counted, capsys, fedgs
):
    run_outcome.show_end(counted)
    out = capsys.readouterr().out
    assert out.count("\n") <= 5
    assert f"for {OWNER}" in out
    assert f"fedgs privacy of {counted}" in out
    told = printed(fedgs("privacy", "of", counted))
    for words in (f"unit: {OWNER})", f"whether {OWNER} ", PUBLIC, OF_FILE, "6 clients"):
        assert words in told


def test_no_name_of_a_file_is_published(counted, tmp_path, fedgs):
    pytest.importorskip("datasets")
    publish(RunFolder.open(counted), tmp_path / "out", privacy_label(counted), 3)
    for path in (tmp_path / "out").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not [w for w in (b"Ward-3", b"Ada.npz", b"units") if w in content], path
    assert fedgs("report", counted, "-o", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert not [word for word in ("Ward-3", "Ada.npz", str(counted)) if word in page]
    assert OWNER in page


@pytest.mark.parametrize(
    ("public", "name"),
    [
        ("fonts", "fonts"),
        ("mnist", "mnist"),
        ("npz:/home/ada/her.npz", "a file of the run's owner"),
        ("folder:/home/ada/pictures", "a file of the run's owner"),
        ("femnist:/home/ada/f.h5", "a file of the run's owner"),
        ("hf:ada/private-scans?label=x", "a file of the run's owner"),
    ],
)
def test_public_data_are_named_only_where_the_name_is_public(public, name):
    config = dataclasses.replace(tiny_config(), public_data=public)
    (text,) = config.public_conditions
    assert text.startswith(f"public data: the images of {name} belong to nobody")


def test_a_baseline_tells_what_its_user_is(tmp_path):
    path = make_run(tmp_path / "run", partition="iid")
    assert privacy_label(path)["unit_of_privacy"] == SHARD
