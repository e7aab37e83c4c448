"""Who takes part follows from a secret of the run that nothing published tells.

A generator's first weights follow from `seed`, so that a published one tells it. What
follows from `seed` is public for that reason, and no epsilon may rest on its secrecy.
"""

import dataclasses
import itertools
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from command_line import flags, printed, refused
from fedgs import gs_wgan
from fedgs.app.commands import audit
from fedgs.app.report.page import read_page
from fedgs.cohorts import selection
from fedgs.cohorts.selection_settings import Selection
from fedgs.files import read_metadata
from fedgs.methods import new_state
from fedgs.methods.schedule import select
from fedgs.privacy.accountant import SEEDED
from fedgs.privacy.ledger import Ledger
from fedgs.privacy.participation import COUNT_THEOREM, MIXTURE_THEOREM
from fedgs.privacy_label import privacy_label
from fedgs.round.messages import encode_request
from fedgs.round.run import new_event
from fedgs.runs import epsilons, publication
from fedgs.runs.epsilons import of_run, of_runs
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from runs import attempts, events, interrupt_at, rewrite, train
from server.roll_call import public_settings
from tests.support.report_folders import make_run
from tiny import (
    next_request,
    record_calls,
    tiny_config,
    tiny_data,
    write_tiny_npz,
)

KEY = "private/selection.key"
DRAWN = {"client_selection": "uniform", "clients_per_round": 2, "noise_seed": None}
AMPLIFIED = DRAWN | {"amplification": True, "discriminator_training": "every_round"}
AMPLIFIED |= {"clients_per_node": 1, "engine": "local", "noise_multiplier": 4.0}
ROUNDS = range(1, 21)  # of 2 of 6: nobody guesses them all
LOST = r"private/selection.key: it is missing, or is not this run's: .* restore it"
PUBLIC = "who takes part follows from seed, which a published generator tells"


@pytest.fixture
def create(tmp_path):
    """Makes run folders by name and settings; the seed is the same in all of them."""
    data = write_tiny_npz(tmp_path / "tiny.npz")

    def create(name: str = "run", **settings: object) -> RunFolder:
        own = DRAWN | {"data": data, "output": str(tmp_path / name)} | settings
        return RunFolder.create(tiny_config(**own))

    return create


def schedule(folder: RunFolder) -> list:
    return [select(folder.config, round) for round in ROUNDS]


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything that is not private, by its path."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    public = (name for name in names if not name.startswith(("private", ".")))
    return {n: (folder / n).read_bytes() for n in public if (folder / n).is_file()}


def make_old(folder: RunFolder, **more: object) -> RunFolder:
    """Makes a folder one of an earlier version, whose selection its seed decided."""
    done = events(folder)
    settings = json.loads((folder.path / "config.json").read_text())
    del settings["selection_hash"]
    settings |= {"selection_seed": "", **more}
    (folder.path / "config.json").write_text(json.dumps(settings))
    (folder.path / KEY).unlink(missing_ok=True)
    for name in ("ledger.json", "metrics.jsonl", "checkpoint/checkpoint.json"):
        (folder.path / name).unlink(missing_ok=True)
    for path in folder.path.glob("generator*.safetensors"):
        path.unlink()
    rewrite(folder.path, done)
    return RunFolder.open(folder.path)


# ------------------------------------------------------------------ a secret


@pytest.mark.parametrize("selection", ["uniform", "balanced"])
def test_runs_of_one_seed_ask_other_clients(create, selection):
    runs = [create(name, client_selection=selection) for name in "ab"]
    assert runs[0].config.seed == runs[1].config.seed
    first, second = map(schedule, runs)
    assert first != second
    # What whoever has found the seed expects.
    by_seed = dataclasses.replace(runs[0].config, noise_seed=0)
    assert [select(by_seed, round) for round in ROUNDS] not in (first, second)
    assert schedule(RunFolder.open(runs[0].path)) == first


def test_the_ledger_of_a_run_is_not_what_its_seed_tells(create):
    runs = [create(name, num_rounds=20, warm_start_rounds=0) for name in "ab"]
    for run in runs:
        train(run)
        asked = [event.participants for event in events(run)]
        by_seed = dataclasses.replace(run.config, noise_seed=0)
        told = [select(by_seed, round) for round in ROUNDS]
        right = sum(a == b for a, b in zip(asked, told, strict=True))
        assert asked == schedule(run)
        assert right < 10  # of 20, where one in 15 is right by chance


def test_the_secret_is_256_bits_of_the_system_and_another_in_every_run(
    create, monkeypatch
):
    system, sizes = random._urandom, []

    def urandom(size: int) -> bytes:
        sizes.append(size)
        return system(size)

    monkeypatch.setattr(random, "_urandom", urandom)
    keys = {(create(name).path / KEY).read_text() for name in "abc"}
    assert [len(bytes.fromhex(key)) for key in keys] == [32] * 3
    assert sizes.count(32) >= 3
    random.seed(0)  # no state of this process decides it
    again = create("d").config.selection_key
    random.seed(0)
    assert create("e").config.selection_key != again


def test_only_the_private_folder_has_the_secret(create, tmp_path, coarse_grid):
    run = create(**AMPLIFIED)
    key = run.config.selection_key
    train(run)
    publication.publish(run, tmp_path / "out", privacy_label(run.path), 4)
    config = RunFolder.open(run.path).config
    assert config.selection_key == key
    server = new_state(config)
    request = next_request(config, server)
    texts = [repr(config), str(config), repr(run), str(privacy_label(run.path))]
    texts += [str(of_run(run.path)), json.dumps(config.to_flat())]
    texts += [repr(encode_request(request, config)), str(public_settings(config))]
    texts += [str(read_page([run.path]))]
    written = files_of(run.path) | files_of(tmp_path / "out")
    assert {"config.json", "ledger.jsonl", "README.md"} <= written.keys()
    for form in (key.encode(), bytes.fromhex(key)):
        assert [name for name, content in written.items() if form in content] == []
        assert [text for text in texts if str(form)[2:-1] in text] == []
    assert (run.private.stat().st_mode & 0o777) == 0o700


def test_the_head_in_a_generator_does_not_tell_who_took_part(create, tmp_path):
    """One round of 2 of 6 has 15 outcomes: whoever has config.json tries them all."""
    run = create(num_rounds=1)
    train(run)
    told = read_metadata(run.path / "generator.safetensors")["ledger"].split()[1]
    heads = set()
    for pair in itertools.combinations(range(6), 2):
        rewrite(run.path, [new_event(run.config, 1, pair, 1)])
        heads.add(Ledger.read(run.path / "ledger.jsonl").head)
    assert len(heads) == 15
    assert told not in heads


def test_the_page_of_the_paper_draws_anew(monkeypatch):
    config = tiny_config(**DRAWN, num_rounds=12, warm_start_rounds=0)
    drawn, plain = [], gs_wgan.select
    monkeypatch.setattr(
        gs_wgan, "select", lambda *args: drawn.append(plain(*args)) or drawn[-1]
    )
    for _ in range(2):
        gs_wgan.train(config, tiny_data(config))
    assert drawn[:12] != drawn[12:]


def test_an_audit_draws_by_another_secret_than_its_run(create, monkeypatch, tmp_path):
    config = create(**AMPLIFIED).config
    made = record_calls(monkeypatch, audit.Canaries, "draw")
    monkeypatch.setattr(audit, "audit_run", lambda *arguments, **named: [])
    progress = type("", (), {"say": print, "rounds": print})
    audit._one_run(config, None, None, 3, tmp_path, progress())
    (used,) = (arguments[0] for arguments in made)
    assert used.selection_key not in ("", config.selection_key)
    assert used.is_drawn_in_secret


def test_noise_of_counts_is_of_the_systems_entropy(monkeypatch):
    asked = record_calls(monkeypatch, random, "_urandom")
    private = Selection(below=50, are_percentiles=True, noise_per_clip=1.0)
    searches = record_calls(monkeypatch, selection, "thresholds_after")
    for _ in range(2):
        selection.divided(private, np.full(4, 0.5))
    # The first count of each search, whose last step has all of them.
    counts = {counts[0][0] for _, _, counts in searches}
    assert len(counts) == 2
    assert [size for (size,) in asked].count(32) == 2


# ------------------------------------------------------------------ resume


def test_a_resumed_run_goes_on_with_its_own_selection(create):
    run = create(num_rounds=12, discriminator_steps=1, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        train(run, interrupt_at(7))
    train(RunFolder.open(run.path))
    asked = {event.round: event.participants for event in events(run)}
    assert [asked[round] for round in range(1, 13)] == schedule(run)[:12]
    assert attempts(run)[0] == (1, 1)


@pytest.mark.parametrize("fate", ["lost", "another", "no text"])
def test_a_run_whose_secret_is_lost_ends_and_is_still_stated(create, fedgs, fate):
    run = create(num_rounds=4, checkpoint_every=1, **{"engine": "local"})
    with pytest.raises(KeyboardInterrupt):
        train(run, interrupt_at(3))
    before = [(row.epsilon, row.theorem) for row in of_run(run.path)]
    path = run.path / KEY
    {
        "lost": path.unlink,
        "another": lambda: path.write_text("0" * 64),
        "no text": lambda: path.write_bytes(b"\xff\xfe"),
    }[fate]()
    known = files_of(run.path)
    refused(fedgs("resume", run.path), LOST)
    now = files_of(run.path)
    assert [name for name in {*now, *known} if now.get(name) != known.get(name)] == []
    assert [(row.epsilon, row.theorem) for row in of_run(run.path)] == before
    printed(fedgs("privacy", "of", run.path))


def test_a_folder_of_which_nobody_may_read_the_private_part_is_stated(
    create, monkeypatch
):
    run = create()
    train(run)

    plain = Path.read_text

    def forbidden(self: Path, *arguments: object) -> str:
        if self.parent.name == "private":
            raise PermissionError(13, "Permission denied", str(self))
        return plain(self, *arguments)

    monkeypatch.setattr(Path, "read_text", forbidden)
    opened = RunFolder.open(run.path)
    assert opened.config.selection_key == ""
    assert {row.theorem for row in of_run(run.path)} == {MIXTURE_THEOREM}


def test_a_run_that_asks_everybody_has_no_secret_and_resumes(create):
    run = create(client_selection="all", clients_per_round=6, num_rounds=2)
    assert not (run.path / KEY).exists()
    assert run.config.selection_hash == ""
    with pytest.raises(KeyboardInterrupt):
        train(run, interrupt_at(1))
    train(RunFolder.open(run.path))
    assert run.is_finished


# ------------------------------------------------------------------ what is stated


def test_a_run_is_amplified_by_its_own_secret(create, coarse_grid):
    run = create(**AMPLIFIED)
    train(run)
    theorems = [row.theorem.partition(" by ")[0] for row in of_run(run.path)]
    assert theorems == [MIXTURE_THEOREM] * 2 + ["amplification"] * 2
    conditions = [text for row in of_run(run.path) for text in row.conditions]
    assert any("nobody publishes private/, the ledger" in text for text in conditions)
    assert any("by a secret of the system's entropy" in text for text in conditions)


@pytest.mark.parametrize("more", [{}, {"selection_seed": 7}])
def test_an_old_run_is_charged_by_what_its_seed_drew(create, fedgs, coarse_grid, more):
    run = create(**AMPLIFIED, num_rounds=6)
    train(run)
    old = make_old(run, **more)
    rows = of_run(old.path)
    assert {row.theorem for row in rows} == {COUNT_THEOREM}
    said = f"no amplification by sampling: {PUBLIC}"
    for row in rows:
        assert any(text.startswith(said) for text in row.conditions)
        assert any(f"decides because {PUBLIC}" in text for text in row.conditions)
        assert row.guarantee
    printed(fedgs("privacy", "of", old.path))
    assert_refused(LOST, old.ledger)
    refused(fedgs("resume", old.path), LOST)


def test_a_seeded_run_can_be_made_again_and_says_so(create, coarse_grid):
    runs = [create(name, **AMPLIFIED | {"noise_seed": 3}) for name in "ab"]
    assert schedule(runs[0]) == schedule(runs[1])
    assert not (runs[0].path / KEY).exists()
    train(runs[0])
    rows = of_run(runs[0].path)
    assert {row.theorem for row in rows} == {COUNT_THEOREM}
    assert {row.label for row in rows} == {SEEDED}
    assert all(any(PUBLIC in text for text in row.conditions) for row in rows)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_amplification_of_a_seeded_run_is_refused_before_it_starts(
    fedgs, tmp_path, dry
):
    asked = {n: v for n, v in AMPLIFIED.items() if n != "noise_seed"}
    asked |= {"data": write_tiny_npz(tmp_path / "tiny.npz"), "noise_seed": 3}
    asked |= {"output": tmp_path / "run", "num_rounds": 2, "warm_start_rounds": 0}
    given = flags(recipe="algorithm-2", **asked)
    refused(fedgs("train", *given, *dry), "amplification = True")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.npz"]


def test_copies_of_a_run_are_one_selection_and_others_are_not(create):
    run, other = create(), create("other")
    copy = Path(shutil.copytree(run.path, run.path.with_name("copy")))
    for path in (run.path, copy, other.path):
        train(RunFolder.open(path))
    together = of_runs([run.path, copy], {}, same_clients=True)
    apart = of_runs([run.path, other.path], {}, same_clients=True)
    assert {row.theorem for row in (*together, *apart)} == {MIXTURE_THEOREM}
    # Who is drawn twice as hard, or once each: the first has the heavier tail.
    pairs = zip(together, apart, strict=True)
    assert all(one.epsilon > two.epsilon for one, two in pairs)


def test_a_finished_run_of_a_report_keeps_no_secret_in_its_page(tmp_path):
    run = make_run(tmp_path / "run")
    key = (run / KEY).read_text()
    assert key not in str(read_page([run]))


def test_seeds_of_deployed_runs_count_unless_the_user_knows_better():
    """Where a node's data name no owners, the seed deals them out."""
    given = {"nodes": "a,b", "clients_per_node": 3, "engine": "flower"}
    runs = {str(seed): tiny_config(**given, seed=seed) for seed in (1, 2)}
    words = "seed = 1 in 1, 2 in 2: it decides which images make a client where a node"
    assert_refused(words, epsilons._check_same_clients, runs, False)
