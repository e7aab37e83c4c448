"""What holds for every baseline: folder, ledger, resume, guarantees, samples."""

import dataclasses
import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baselines import FEW_IMAGES, SMALL, small_run, train
from experiments.baselines import BASELINES, dp_sgd
from experiments.baselines.baseline import SECRET
from experiments.baselines.baseline_run import NUMBER, capped, open_run
from experiments.baselines.loop import BaselineLedger, BaselineRelease
from fedgs.app.commands.privacy_words import protection
from fedgs.data.load import load_data
from fedgs.files import read_tensors
from fedgs.privacy.accountant import CHANGES, SEEDED
from fedgs.privacy.gaussian import mu_from_epsilon
from fedgs.privacy_label import privacy_label
from fedgs.round.run import RunStopped
from fedgs.runs.data_card import NO_GUARANTEE
from fedgs.runs.run_folder import RunFolder, read_state
from fedgs.runs.sample import draw_samples
from refusals import assert_refused
from runs import at_round, interrupt_at
from tiny import digest

pytestmark = pytest.mark.usefixtures("coarse_poisson")

NO_TARGET = {"bdp-gan", "wgan-gp"}  # no epsilon could be asked of them


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder of a finished small training, made once for each name."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("run") / "run"
            train(*small_run(name, made[name]))
        return made[name]

    return of


def bits(tensors: dict[str, torch.Tensor]) -> str:
    return digest(dict(sorted(tensors.items())))


def generator(folder: Path) -> str:
    return bits(read_tensors(folder / "generator.safetensors")[0])


def test_every_method_has_a_small_training_here():
    assert {key.split()[0] for key in SMALL} == set(BASELINES)


@pytest.mark.parametrize("name", SMALL)
def test_a_run_leaves_a_folder_that_samples_and_is_read_again(name, finished):
    run = open_run(finished(name))
    assert run.folder.is_finished
    samples = draw_samples(run.folder, 6, seed=1)
    assert samples.images.shape == (6, 1, 16, 16)
    assert 0 <= samples.images.min() <= samples.images.max() <= 1
    rounds = [line["round"] for line in run.folder.metrics()]
    assert rounds == list(range(1, run.config.num_rounds + 1))
    assert (run.folder.path / f"samples/round-{rounds[-1]:07d}.png").exists()
    training = run.training(run.load_data())
    assert bits(training.generator.state_dict()) != generator(finished(name))
    check_private(training.state(), run.folder.path)
    rates = {r.round: r.event.get("sampling_rate", 1) for r in releases(finished(name))}
    for line in run.folder.metrics():  # no time tells how many were drawn
        assert ("seconds" in line) == (rates.get(line["round"], 1) == 1)
    folder = RunFolder.open(finished(name))  # no code of GS-WGAN accounts it
    for read in (folder.read_ledger, folder.ledger):
        assert_refused("is a run of `fedgs baseline`", read)
    assert folder.config.noise_multiplier == 0


def releases(folder: Path) -> Sequence[BaselineRelease]:
    return BaselineLedger.read(folder / "ledger.jsonl").events


@pytest.mark.parametrize("name", SMALL)
def test_a_run_that_is_stopped_and_killed_ends_with_the_same_bytes(
    name, finished, tmp_path
):
    """What it released and lost has left no line, and nothing else either."""
    run, data = small_run(name, tmp_path / "run", checkpoint_every=10**6)
    stop, last = threading.Event(), run.config.num_rounds
    with pytest.raises(RunStopped, match="stopped after step 2"):
        train(run, data, at_round(2, stop.set), stop)
    again = open_run(tmp_path / "run")
    data = again.load_data()
    with pytest.raises(KeyboardInterrupt):
        train(again, data, interrupt_at(last))
    committed = [line["round"] for line in run.folder.metrics()]
    assert 2 in committed
    assert last not in committed
    assert {r.round for r in releases(tmp_path / "run")} <= {*committed}
    train(again, data)
    assert generator(tmp_path / "run") == generator(finished(name))
    assert releases(tmp_path / "run") == releases(finished(name))


@pytest.mark.parametrize("name", ["g-pate", "pate-gan"])
def test_what_one_owners_images_have_trained_is_not_anothers(name, tmp_path):
    run, data = small_run(name, tmp_path / "run")
    stop = threading.Event()
    with pytest.raises(RunStopped):
        train(run, data, at_round(2, stop.set), stop)
    first, *others = data.client_names
    moved = dataclasses.replace(data, client_names=(*others, first))
    again = open_run(tmp_path / "run")
    assert_refused("other clients than those that this run began", train, again, moved)
    train(again, data)


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_a_target_is_met_or_refused_before_any_work(name, tmp_path):
    key = next(key for key in SMALL if key.split()[0] == name)
    asked = tmp_path / "run", FEW_IMAGES | {"target_epsilon": 8.0}
    if name in NO_TARGET:
        assert_refused("target_epsilon = 8", small_run, key, *asked)
        assert not (tmp_path / "run").exists()
        return
    train(*small_run(key, *asked))
    epsilon = open_run(tmp_path / "run").guarantees()[0].epsilon
    assert epsilon is not None
    assert 0.8 * 8 < epsilon <= 8 * (1 + 1e-6)


def check_private(state: dict[str, torch.Tensor], folder: Path) -> None:
    """What no release made public is in the private folder alone."""
    secret = {key for key in state if key.startswith(SECRET)}
    name = open_run(folder).method.name
    assert bool(secret) == (name in ("g-pate", "pate-gan", "wgan-gp"))
    (public,) = (folder / "checkpoint").glob("*.safetensors")
    assert not any(SECRET in key for key in read_tensors(public)[0])
    kept = list((folder / "private").glob("*/*.safetensors"))
    assert [set(read_state(path)[0]) for path in kept] == [secret] * bool(secret)
    for private in (folder, folder / "private"):
        assert private.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", SMALL)
def test_guarantees_are_of_the_ledger_and_name_the_methods_unit(name, finished):
    run = open_run(finished(name))
    rows = run.guarantees()
    if run.unit == "none":
        assert rows == []
        assert {event["kind"] for event in run.events} == {"not-private"}
        return
    assert run.events
    first = rows[0]
    assert (first.label, first.unit) == (SEEDED, run.unit)
    assert {row.label for row in rows} <= {SEEDED, "as published"}
    # A method of users says nothing of a record, which may decide where others are.
    assert {row.unit for row in rows} <= {run.unit, "user"}
    assert {row.relation for row in rows} <= {*CHANGES}
    for row in rows:
        assert not row.guarantee
        assert {f"noise: {SEEDED}", NUMBER} <= {*row.conditions}
    label = privacy_label(run.folder.path)
    assert label["guarantee"] == f"{NO_GUARANTEE}; noise {SEEDED}"
    assert protection(label) == f"none; {NO_GUARANTEE}; noise {SEEDED}"
    released = list(run.events)

    def epsilons(events):
        rows = run.method.guarantees(run.settings, run.facts, events, 1e-5)
        # The published accountants read the settings' noise.
        valid = [row.epsilon for row in rows if row.label == "valid"]
        return [math.inf if epsilon is None else epsilon for epsilon in valid]

    assert epsilons(2 * released)[0] > (first.epsilon or 0)
    assert {*epsilons([])} == {0.0}
    silent = [{n: SILENT.get(n, x) for n, x in event.items()} for event in released]
    assert min(epsilons(silent)) > 1e50


NOISES = ("noise_per_clip", "noise_std", "threshold_std", "answer_std")
SILENT = dict.fromkeys(NOISES, 0.0) | {"noise_scale": 1e-51}
VOTES = {"threshold": 0, "threshold_std": 20, "answer_std": 4}


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("dp-merf", dp_sgd.event(1.0, 1.5)),
        ("dp-sgd-gan", dp_sgd.event(1.0, 0.8)),
        ("g-pate", {"num_queries": 16} | VOTES),
        ("pate-gan", {"num_queries": 4, "noise_scale": 2.0}),
    ],
)
def test_an_audit_finds_what_a_release_is_said_to_cost(name, event, finished):
    """In stds of the score: as far as the Gaussian of the same epsilon."""
    run = open_run(finished(name))
    asked = run.settings, run.facts
    claim = run.method.guarantees(*asked, [event], 1e-5)[0]
    play = run.method.audit_scores
    outside, inside = play(*asked, event, claim.relation, 400)
    distance = (inside.mean() - outside.mean()) / outside.std()
    mu = mu_from_epsilon(claim.epsilon or math.inf, 1e-5)
    assert 0.4 * mu < distance < 1.4 * mu


def test_a_place_in_a_folder_is_code_and_is_not_run_unasked(tmp_path, monkeypatch):
    train(*small_run("wgan-gp", tmp_path / "run"))
    path = tmp_path / "run" / "baseline.json"
    place = "experiments.baselines.wgan_gp:WganGp"
    content = json.loads(path.read_text()) | {"name": place}
    path.write_text(json.dumps(content))
    assert_refused(f"FEDGS_METHODS={place}", open_run, tmp_path / "run")
    monkeypatch.setenv("FEDGS_METHODS", place)
    assert open_run(tmp_path / "run").method.name == "wgan-gp"


def test_a_user_over_the_cap_keeps_as_many_images_and_one_more_changes_one(tmp_path):
    none = {"max_images_per_user": 0}
    assert_refused("max_images_per_user = 0", small_run, "wgan-gp", tmp_path, none)
    run, data = small_run("wgan-gp", tmp_path / "run", {"max_images_per_user": 7})
    assert set(data.sizes) == {7}
    assert (run.facts.num_records, run.facts.max_images_per_user) == (84, 7)
    whole = load_data(run.config)
    first, *others = whole.client_records
    shorter = dataclasses.replace(whole, client_records=(first[1:], *others))
    kept = [capped(d, 7, 3).client_records[0] for d in (whole, shorter)]
    assert len({*kept[0]} ^ {*kept[1]}) in (0, 2)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("nowhere:METHOD", {}, "No module named 'nowhere'"),
        ("os:path", {}, "'os:path': it is no method, it has no name"),
        ("wgan-gp", {"adversary": "server"}, "adversary = server:"),
        ("wgan-gp", {"engine": "flower"}, "engine = flower:"),
        ("wgan-gp", {"secure_aggregation": True}, "= True: wgan-gp is central"),
        ("fedavg-gan", {}, "baseline = 'fedavg-gan':"),
        ("dp-merf", {"noise_multiplier": None}, "noise_multiplier is unset: give"),
        ("dp-merf", {"num_features": 7}, "num_features = 7:"),
        ("dp-merf-ae", {"generator": "upsample"}, "give --generator coded"),
        ("dp-sgd-gan", {"noise_per_clip": None}, "noise_per_clip is unset: give"),
        ("dp-sgd-gan", {"expected_batch": 70_000}, "expected_batch = 70000:"),
    ],
)
def test_what_it_cannot_do_is_refused_before_any_work(name, given, message, tmp_path):
    assert_refused(message, small_run, name, tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
