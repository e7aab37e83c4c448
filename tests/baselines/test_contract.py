"""What holds for every baseline: folder, ledger, resume, guarantees, samples."""

import dataclasses
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baselines import DIGITS, SMALL, small_run, train
from fedgs.baselines import METHODS, find
from fedgs.baselines import run as frame
from fedgs.baselines.contract import SECRET, UNITS
from fedgs.baselines.releases import Release, ReleaseLedger
from fedgs.baselines.run import Asked, load_run_data, made_settings, open_run, unit_of
from fedgs.errors import UserError
from fedgs.files import read_tensors
from fedgs.privacy.accounting import SEEDED
from fedgs.runs.run_folder import RunFolder, read_state
from fedgs.runs.sample import draw_samples
from runs import at_round, interrupt_at

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


def generator(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "generator.safetensors")[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )


def test_every_method_has_a_small_training_here():
    assert {method for method, _ in SMALL.values()} == set(METHODS)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_says_what_it_is(name):
    method = find(name)
    assert method.name == name
    assert method.title
    assert method.unit in UNITS
    assert isinstance(method.central, bool)
    specs = dataclasses.fields(method.Settings)
    flags = [spec for spec in specs if "help" in spec.metadata]
    assert 0 < len(flags) <= 6
    assert all(spec.metadata["help"].strip() for spec in flags)
    assert unit_of(method, made_settings(method, {})) == method.unit


@pytest.mark.parametrize("name", SMALL)
def test_a_run_leaves_a_folder_that_samples_and_is_read_again(name, finished):
    run = open_run(finished(name))
    assert frame.is_finished(run)
    samples = draw_samples(run.folder, 6, seed=1)
    assert samples.images.shape == (6, 1, 16, 16)
    assert 0 <= samples.images.min() <= samples.images.max() <= 1
    rounds = [line["round"] for line in run.folder.metrics()]
    assert rounds == list(range(1, run.config.num_rounds + 1))
    assert (run.folder.path / f"samples/round-{rounds[-1]:07d}.png").exists()
    method = run.method.trainer(run.settings, run.config, load_run_data(run), 3)
    before = {n: v.clone() for n, v in method.generator.state_dict().items()}
    assert not same(before, generator(finished(name)))
    rates = {r.step: r.event.get("sampling_rate", 1) for r in run.releases}
    for line in run.folder.metrics():  # no time tells how many were drawn
        assert ("seconds" in line) == (rates.get(line["round"], 1) == 1)
    folder = RunFolder.open(finished(name))  # no code of GS-WGAN accounts it
    for read in (folder.read_ledger, folder.ledger):
        with pytest.raises(UserError, match="is a run of `fedgs baseline`"):
            read()
    assert folder.config.noise_multiplier == 0


@pytest.mark.parametrize("name", SMALL)
def test_a_stopped_run_resumes_to_the_same_bytes(name, finished, tmp_path):
    run, data = small_run(name, tmp_path / "run")
    if run.config.num_rounds == 1:
        pytest.skip("one step: nothing to stop between")
    stop = threading.Event()
    middle = run.config.num_rounds // 2
    with pytest.raises(frame.RunStopped, match=f"stopped after step {middle}"):
        train(run, data, at_round(middle, stop.set), stop)
    again = open_run(tmp_path / "run")
    train(again, load_run_data(again))
    assert same(generator(tmp_path / "run"), generator(finished(name)))
    assert _events(tmp_path / "run") == _events(finished(name))


@pytest.mark.parametrize("name", SMALL)
def test_a_killed_run_has_released_nothing_that_its_ledger_lacks(
    name, finished, tmp_path
):
    run, data = small_run(name, tmp_path / "run", checkpoint_every=10**6)
    with pytest.raises(KeyboardInterrupt):
        train(run, data, interrupt_at(run.config.num_rounds))
    committed = max((line["round"] for line in run.folder.metrics()), default=0)
    assert committed < run.config.num_rounds
    assert all(release.step <= committed for release in run.releases)
    train(run, data)
    assert same(generator(tmp_path / "run"), generator(finished(name)))


def _events(folder: Path) -> Sequence[Release]:
    return ReleaseLedger.read(folder / "ledger.jsonl").events


@pytest.mark.parametrize("name", SMALL)
def test_what_no_release_made_public_is_in_the_private_folder(name, finished, tmp_path):
    run, data = small_run(name, tmp_path / "run")
    state = run.method.trainer(run.settings, run.config, data, 3).state()
    secret = {key for key in state if key.startswith(SECRET)}
    assert bool(secret) == (name.split()[0] in ("g-pate", "pate-gan", "wgan-gp"))
    folder = finished(name)
    (public,) = (folder / "checkpoint").glob("*.safetensors")
    assert not any(SECRET in key for key in read_tensors(public)[0])
    kept = list((folder / "private").glob("*/*.safetensors"))
    assert [set(read_state(path)[0]) for path in kept] == [secret] * bool(secret)
    assert (folder / "private").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("partition", "units"), [("iid", {"user", "record"}), ("dirichlet", {"user"})]
)
@pytest.mark.parametrize("name", ["fedavg-gan", "g-pate", "pate-gan"])
def test_a_record_is_promised_nothing_where_it_moves_others(
    name, partition, units, tmp_path
):
    run, _ = small_run(name, tmp_path / "run", num_clients=3, partition=partition)
    assert {row.unit for row in run.guarantees()} == units


@pytest.mark.parametrize("name", SMALL)
def test_guarantees_are_of_the_ledger_and_name_the_methods_unit(name, finished):
    run = open_run(finished(name))
    rows = run.guarantees()
    if run.unit == "none":
        assert rows == []
        assert {r.event["kind"] for r in run.releases} == {"not-private"}
        return
    assert run.releases
    first = rows[0]
    assert first.unit == run.unit
    assert {row.label for row in rows} <= {SEEDED, "as published"}
    assert first.label == SEEDED
    assert not any(row.is_guarantee for row in rows)
    assert {row.unit for row in rows} <= {"record", "user"}
    assert all("seeded" in row.conditions[0] for row in rows)
    assert all(frame.NUMBER in row.conditions for row in rows)
    events = [release.event for release in run.releases]
    direct = run.method.guarantees(run.settings, run.facts, events, run.config.delta)
    assert [row.epsilon for row in direct] == [row.epsilon for row in rows]
    more = run.method.guarantees(run.settings, run.facts, [*events, *events], 1e-5)
    assert (more[0].epsilon or 1e9) > (first.epsilon or 0)


COSTLY = {"dp-merf-ae", "dp-sgd-gan"}  # search with a numeric accountant, for seconds


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in COSTLY))
        for name in sorted(METHODS)
    ],
)
def test_a_target_is_met_or_refused_before_any_work(name, tmp_path):
    key = next(key for key, (method, _) in SMALL.items() if method == name)
    asked = Asked(target_epsilon=8.0, max_images_per_user=40)
    if name in NO_TARGET:
        with pytest.raises(UserError, match="target_epsilon = 8"):
            small_run(key, tmp_path / "run", asked)
        assert not (tmp_path / "run").exists()
        return
    train(*small_run(key, tmp_path / "run", asked))
    epsilon = open_run(tmp_path / "run").guarantees()[0].epsilon
    assert epsilon is not None
    assert 0.8 * 8 < epsilon <= 8 * (1 + 1e-6)


def test_a_line_of_a_baseline_is_refused_without_its_folders_mark(tmp_path):
    from fedgs.baselines.releases import Release, ReleaseLedger
    from fedgs.privacy.ledger import Ledger

    path = tmp_path / "ledger.jsonl"
    ledger = ReleaseLedger.open(path)
    ledger.append(Release(method="dp", step=1, attempt=1, noise_source="os", event={}))
    ledger.close()
    assert ReleaseLedger.read(path).events == ledger.events
    with pytest.raises(UserError, match="unknown or missing field"):
        Ledger.read(path)


def test_a_place_in_a_folder_is_code_and_is_not_run_unasked(tmp_path, monkeypatch):
    train(*small_run("wgan-gp", tmp_path / "run"))
    path = tmp_path / "run" / "baseline.json"
    place = "fedgs.baselines.wgan_gp:METHOD"
    content = json.loads(path.read_text()) | {"name": place}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"FEDGS_BASELINES={place}"):
        open_run(tmp_path / "run")
    monkeypatch.setenv("FEDGS_BASELINES", place)
    assert open_run(tmp_path / "run").method.name == "wgan-gp"


def test_a_user_over_the_cap_keeps_as_many_images_and_one_more_changes_one(tmp_path):
    with pytest.raises(UserError, match="max_images_per_user = 0: give"):
        small_run("wgan-gp", tmp_path / "run", Asked(max_images_per_user=0))
    run, data = small_run("wgan-gp", tmp_path / "run", Asked(max_images_per_user=7))
    assert set(data.sizes) == {7}
    assert (run.facts.num_records, run.facts.max_images_per_user) == (84, 7)
    whole = frame.load_data(run.config)
    shorter = dataclasses.replace(
        whole, client_records=(whole.client_records[0][1:], *whole.client_records[1:])
    )
    kept = [frame.capped(d, 7, 3).client_records[0] for d in (whole, shorter)]
    assert len({*kept[0]} ^ {*kept[1]}) in (0, 2)


def test_an_unknown_method_or_setting_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"NAME = 'wgan': give one of .*wgan-gp"):
        find("wgan")
    with pytest.raises(UserError, match="noise: wgan-gp has discriminators, steps"):
        frame.new_run("wgan-gp", {"noise": 1}, Asked(), DIGITS)
    with pytest.raises(UserError, match="No module named 'nowhere'"):
        find("nowhere:METHOD", is_typed=True)
    with pytest.raises(UserError, match="'os:path': is no method, it has no name"):
        find("os:path", is_typed=True)


@pytest.mark.parametrize("name", SMALL)
def test_a_guarantee_that_a_method_cannot_give_is_refused(name, tmp_path):
    method = find(SMALL[name][0])
    settings = made_settings(method, SMALL[name][1])
    known = getattr(method, "adversaries", ("release",))
    if frame.is_central(method, settings) or "server" not in known:
        with pytest.raises(UserError, match=r"adversary = server: .*fedgs train"):
            small_run(name, tmp_path / "run", adversary="server")
    unit = unit_of(method, settings)
    for other in {"record", "user"} - {unit}:
        with pytest.raises(UserError, match=f"unit = {other}: .*(leave out|fedgs)"):
            small_run(name, tmp_path / "run", Asked(unit=other))
    assert not (tmp_path / "run").exists()
