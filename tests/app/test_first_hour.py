"""The first hour of a new user: own data, a target, and nothing else."""

import dataclasses
import io
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fedgs as library
from command_line import flags, printed
from fedgs.app.commands import forecast
from fedgs.app.tables import folded
from fedgs.config.recipes import HELD_OUT, configure, moments_for, overridden, recipe
from fedgs.methods import new_state, phases_of
from fedgs.privacy.accountant import statements
from fedgs.privacy.plan import Plan
from fedgs.round import answer, local
from fedgs.round.preparation import with_noise
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from runs import train
from tiny import FULL_PARTICIPATION, REFINED, run_config, tiny_config, tiny_data

PAGE = Path(__file__).resolve().parents[2] / "docs" / "first-hour.md"
OWNERS, EACH = 30, 8


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def given_images(side: int = 28, channels: int = 1):
    """Bars of two directions: images, labels and owners."""
    rng = np.random.default_rng(1)
    labels = np.arange(OWNERS * EACH) % 2
    images = np.zeros((len(labels), side, side, channels), np.uint8)
    for image, label in zip(images, labels, strict=True):
        start = rng.integers(4, side - 7)
        image[start : start + 3] = 200
        if label:
            image[:] = image.swapaxes(0, 1).copy()
    images = images[..., 0] if channels == 1 else images
    return images, labels, np.repeat(np.arange(OWNERS), EACH)


def write_own(path: Path, side: int = 28, channels: int = 1) -> str:
    """Writes them; returns the value of `data`."""
    images, labels, owners = given_images(side, channels)
    np.savez(path, images=images, labels=labels, clients=owners)
    return f"npz:{path}"


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> str:
    return write_own(tmp_path_factory.mktemp("own") / "mine.npz")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, own, exit_code) -> Path:
    path = tmp_path_factory.mktemp("first") / "run"
    assert exit_code("train", *flags(data=own, target_epsilon=100, output=path)) == 0
    return path


# ------------------------------------------------------------------ the recipe


def epsilon_of(config) -> float:
    plan = Plan.from_config(config)
    rows = statements(plan, config.delta)
    asked = (config.adversary, config.relation)
    return next(r.epsilon for r in rows if (r.adversary, r.relation) == asked)


# The cells of docs/benchmark.md, experiments/comparison/methods.toml.
@pytest.mark.parametrize(
    ("clients", "per_node", "epsilon", "side", "has_parts"),
    [
        (539, 49, 10, 12, True),
        (539, 49, 3, 8, False),
        (1000, 50, 3, 10, True),
        (1000, 50, 1, 6, False),
    ],
)
def test_the_moments_are_those_of_the_best_row_of_the_table_of_pictures(
    clients, per_node, epsilon, side, has_parts
):
    given = {"num_clients": clients, "clients_per_node": per_node, "num_classes": 10}
    given |= {"target_epsilon": epsilon, "clients_per_round": clients, "seed": 0}
    given |= {"image_size": 28, "image_channels": 1}
    config = with_noise(overridden(recipe("moments"), given))
    found = moments_for(config)
    assert found["moment_size"] == side
    colour = dataclasses.replace(config, image_channels=3)
    in_colour = moments_for(colour)["moment_size"]
    assert 3 * in_colour**2 == pytest.approx(side**2, rel=0.3)
    fitted = dataclasses.replace(config, **found).validate()
    assert (fitted.num_parts > 1) == has_parts
    assert epsilon_of(fitted) == pytest.approx(epsilon_of(config), rel=1e-9)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"target_epsilon": 3, "relation": "replace-one"},
        {"noise_multiplier": 2.0, "clip_bound": 0.5},
        {"moment_size": 4, "latent_dim": 8},
        {"num_rounds": 4},
    ],
    ids=str,
)
def test_a_flag_changes_a_setting_of_the_default_and_never_the_algorithm(given):
    plain, changed = configure(None, None, {}), configure(None, None, given)
    named = configure("feature-means", None, given)
    assert changed == named
    assert changed.recipe == plain.recipe == "feature-means"
    assert changed.phases == plain.phases
    assert changed.client_selection == "all"
    for name, value in given.items():
        assert getattr(changed, name) == value


@pytest.mark.parametrize(
    "given",
    [
        {"num_rounds": 60},
        {"num_rounds": 3},
        {"batch_size": 16},
        {"warm_start_rounds": 3},
        {"discriminator_steps": 1},
        {"discriminator_training": "frozen"},
        {"clients_per_round": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [None, "feature-means", "moments"])
def test_a_setting_of_rounds_that_a_recipe_has_not_is_refused(given, name):
    if name == "moments" and given == {"num_rounds": 3}:
        given = {"num_rounds": 4}
    (setting,) = given
    values = given | {"num_clients": 9}
    assert_refused(f"^{setting}( =|:) ", configure, name, None, values)
    more = {"num_rounds": 60, "batch_size": 16}
    assert configure("feature-means-gs-wgan", None, more).num_rounds == 60


def test_phases_of_ones_own_are_as_many_rounds():
    own = {"phases": "means:0.5,scatter:0.5", "generator": "gaussian"}
    assert configure("moments", None, own).num_rounds == 2


def test_target_alone_trains_the_best_recipe_of_own_data(trained):
    config = RunFolder.open(trained).config
    kinds = [phase.method for phase in config.phases]
    assert kinds == ["means", "scatter", "moments", "pretrained-features"]
    assert (config.num_clients, config.num_classes) == (OWNERS, 2)
    assert (config.image_size, config.image_channels) == (28, 1)
    assert config.moment_size == moments_for(config)["moment_size"] == 6
    assert (config.target_epsilon, config.relation) == (100, "zero-out")
    assert config.test_fraction == HELD_OUT


def test_python_chooses_the_same_recipe_and_holds_nothing_out(tmp_path, trained):
    images, labels, clients = given_images()
    run = library.train(
        images, labels, clients, target_epsilon=100, output=tmp_path / "run", seed=0
    )
    same = ("phases", "num_rounds", "moment_size", "image_size", "noise_multiplier")
    cli = RunFolder.open(trained).config
    assert [getattr(run.config, n) for n in same] == [getattr(cli, n) for n in same]
    assert run.config.test_fraction == 0
    assert run.is_finished


def test_text_is_broken_between_words_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    line = f"epsilon      9.998 {'word ' * 20}/a/path-that-is-never-broken"
    shown = folded(line, Terminal()).splitlines()
    assert max(map(len, shown)) <= 80
    assert all(re.match(r" {13}\S", later) for later in shown[1:])
    assert " ".join(map(str.strip, shown)) == line
    assert folded(line, io.StringIO()) == line


# ------------------------------------------------------------------ the end


def test_training_ends_with_picture_epsilon_and_where_the_rest_is(fedgs, tmp_path):
    data, run = write_own(tmp_path / "rgb.npz", side=32, channels=3), tmp_path / "run"
    given = flags(data=data, target_epsilon=10, output=run, test_fraction=0.25)
    out = printed(fedgs("train", *given), "")
    assert re.search("0.25 of every owner's images", out)
    end = " ".join(out.splitlines()[-5:])
    for line in (
        f"{run}/samples/round-0000003.png",
        r"epsilon 9\.\d+ \(zero-out, delta 1e-05\) for one client \(an owner .*"
        rf"fedgs privacy of {run}",
        f"fedgs publish {run} -o FOLDER",
        f"fedgs report {run} -o",
    ):
        assert re.search(line, end)
    config = RunFolder.open(run).config  # colours are taken from the images
    assert (config.image_size, config.image_channels) == (32, 3)
    # So small a budget has no features; moments have as many numbers as grey ones.
    assert (config.generator, config.moment_size) == ("gaussian", 2)


def test_spent_budget_is_a_success_with_pictures(fedgs, own, tmp_path):
    run = tmp_path / "run"
    given = {"data": own, "num_rounds": 9, "target_epsilon": 6, "noise_multiplier": 3}
    given |= {"clients_per_round": OWNERS, "batch_size": 4, "discriminator_steps": 1}
    given |= {"warm_start_rounds": 1, "generator": "upsample", "generator_dim": 4}
    given |= {"recipe": "algorithm-2"}
    given |= {"discriminator_dim": 4, "clients_per_node": 30, "fakes_per_round": 32}
    out = printed(
        fedgs("train", *flags(**given, client_selection="all", output=run)), ""
    )
    words = r"budget is spent, so the run is complete: The run ended before round (\d)"
    last = int(re.search(words, out)[1]) - 1
    assert last > 0  # else there would be no product
    assert f"{run}/samples/round-{last:07d}.png" in out
    assert "is finished" in printed(fedgs("resume", run), "")


def test_ctrl_c_speaks_at_once_and_a_second_one_ends(
    own, tmp_path, exit_code, monkeypatch, capfd
):
    """The process does not wait for its threads, which may compute for long."""

    def interrupted(*arguments: object) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(local, "train", interrupted)
    monkeypatch.setattr(os, "_exit", sys.exit)
    given = {"data": own, "noise_multiplier": 1, "recipe": "moments"}
    assert exit_code("train", *flags(**given, output=tmp_path / "run")) == 130
    first, second = capfd.readouterr().err.split("ending now")
    assert "after the round in progress" in first
    assert "Ctrl-C" in first
    assert f"fedgs resume {tmp_path}/run" in second


# ------------------------------------------------------------------ the dry run


def test_what_cannot_be_evaluated_is_said_before_an_epsilon_is_spent():
    none = np.array([], int)
    data = SimpleNamespace(
        labels=np.arange(4) % 2,
        client_records=(np.array([0, 1]), np.array([2, 3])),
        holds_out_owners=False,
    )
    for share, held_out, said in (
        (0.0, None, "give --test-owners or"),
        (0.05, none, "not be possible, because test_fraction 0.05"),
    ):
        data.held_out_records = held_out
        config = run_config(data="npz:a.npz", test_fraction=share)
        assert said in forecast.evaluation_note(config, data)


def test_named_recipe_keeps_its_settings(fedgs, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        forecast, "TIMED_SECONDS", 1e-9
    )  # a round is timed all the same
    given = flags(data=own, target_epsilon=10, recipe="algorithm-2", test_fraction=0.25)
    small = flags(discriminator_dim=4, generator_dim=4)
    out = printed(fedgs("train", *given, *small, "--dry-run"), "")
    assert "algorithm-2: 30000 rounds of gs-wgan" in out
    assert "1 of 30 clients" in out
    assert "will not be possible" not in out
    assert re.search(r"time: +about \d+ (days|hours|minutes) .*timed here", out)
    for word in ("memory:", "disk:", "noise: +at most gradient ", "zero-out"):
        assert re.search(word, out)
    assert list(tmp_path.iterdir()) == []


ROUNDS = {"num_clients": 40, "clients_per_node": 8, "num_rounds": 100}
ROUNDS |= {"clients_per_round": 10, "warm_start_rounds": 3, "seed": 0, "num_workers": 1}
ROUNDS |= {"image_size": 28, "image_channels": 1}


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        # 100 rounds of a server's part (2 s) and 10 clients' (0.1 s); a warm start of
        # 40 clients in 3 rounds, with generators of their own.
        ({}, 100 * (2 + 10 * 0.1) + 40 * 3 * (0.1 + 2)),
        ({"fakes_per_round": 32}, 100 * (2 + 10 * 0.1) + 40 * 3 * 0.1),
        (
            {"fakes_per_round": 32, "discriminator_training": "every_round"},
            100 * (2 + 40 * 0.1) + 40 * 3 * 0.1,
        ),
    ],
)
def test_time_of_gradients_counts_every_clients_steps(monkeypatch, given, seconds):
    config = with_noise(
        run_config(**ROUNDS | {"num_classes": 2, "noise_multiplier": 1.0} | given)
    )
    monkeypatch.setattr(forecast, "timed_round", lambda *_: (2.0, 0.1))
    (phase,) = phases_of(config)
    found = forecast.seconds_of_rounds(config, phase, None)
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(("noise", "steps"), [(0.0, 3000), (4.0, 6)])
def test_time_of_a_fit_is_that_of_its_steps(monkeypatch, noise, steps):
    clock = SimpleNamespace(all=0.0, alone=0.0)
    monkeypatch.setattr(forecast.time, "process_time", lambda: clock.all)
    monkeypatch.setattr(forecast.time, "thread_time", lambda: clock.alone)
    monkeypatch.setattr(forecast.os, "cpu_count", lambda: 8)
    # An embedding of three classes' numbers alone is 2 sqrt(3) long, so the sum of six
    # has the weight sqrt(3). Noise: 8 / sqrt(2) of each of three nodes, twice over it.
    monkeypatch.setattr(forecast.refinement, "STEPS", 3000)
    monkeypatch.setattr(forecast.refinement, "FOR_ALL", 0.021)

    def refine(phase, release, generator, average, fit):
        # The first step also allocates what later ones reuse.
        for step, seconds in enumerate((5.0, 3.0, 2.0, 2.0, 4.0), start=1):
            clock.all += seconds
            clock.alone += 0.5
            fit.done(step, steps)

    monkeypatch.setattr(forecast.refinement, "refine", refine)
    config = tiny_config(**REFINED | {"noise_multiplier": noise})
    found = forecast.seconds_of_fit(config, config.at_round(config.num_rounds))
    # Two threads share all of a step but the half second.
    assert found == pytest.approx(steps * (0.5 + (2.0 - 0.5) / 2))


@pytest.mark.parametrize("workers", [1, 2])
def test_time_of_a_release_is_that_of_all_images(monkeypatch, workers):
    config = tiny_config(**REFINED | {"num_workers": workers})
    data = tiny_data(config)
    seconds = 0.0
    monkeypatch.setattr(forecast.time, "process_time", lambda: seconds)
    monkeypatch.setattr(forecast.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(forecast, "TIMED_IMAGES", int(data.sizes[:2].sum()))

    def answer_of(config, hosted, request):
        nonlocal seconds
        assert list(hosted.clients) in ([0], [0, 1])
        seconds += 0.01 * data.sizes[list(hosted.clients)].sum()
        return answer.answer_of(config, hosted, request)

    monkeypatch.setattr(forecast, "answer_of", answer_of)
    server = new_state(config)
    # Each phase of the run needs what the ones before it have released.
    for phase in phases_of(config):
        found = forecast.seconds_of_release(config, phase, data, server)
        assert found == pytest.approx(0.01 * data.sizes.sum() / workers)
    assert len(server.released) == len(config.phases)


@pytest.mark.parametrize(
    ("engine", "said"), [("local", "3.0 GB"), ("flower", "5.0 GB")]
)
def test_memory_counts_what_a_fit_was_seen_to_need(monkeypatch, engine, said):
    """One process fits; the four others of a simulation hold half a gigabyte each."""
    config = tiny_config(**REFINED | {"engine": engine, "num_workers": 2})
    monkeypatch.setattr(forecast, "duration", lambda *_: "about 20 seconds")
    monkeypatch.setattr(forecast, "most_bytes_held", lambda: 3e9)
    found = forecast.lines(config, tiny_data(config))
    assert found["memory"] == f"about {said}"


@pytest.mark.parametrize(
    "settings",
    [
        REFINED | {"engine": "local"},
        FULL_PARTICIPATION | {"discriminator_dim": 4, "generator_dim": 64},
    ],
)
def test_disk_is_that_of_a_finished_run_within_a_third(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(forecast, "FEW_BYTES", 0)  # else they would be most of it
    config = tiny_config(**settings, output=str(tmp_path / "run"))
    folder = RunFolder.create(config)
    train(folder, data=tiny_data(config))
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    found = sum(path.stat().st_size for path in files)
    assert found > 3e5
    assert forecast.bytes_on_disk(config) == pytest.approx(found, rel=1 / 3)


@pytest.mark.parametrize(
    ("change", "more", "named"),
    [
        ({}, {"target_epsilon": 1e9}, r"target_epsilon = 1e\+09 protects nobody"),
        (
            {"clients": np.zeros(8, int)},
            {"noise_multiplier": 0.0, "recipe": "moments"},
            "num_clients = 1:",
        ),
        (
            {},
            {"target_epsilon": 10, "delta": 0.3},
            "delta is too large to read: 0.3 is",
        ),
        ({"labels": np.zeros(8, int)}, {}, "num_classes = 1:"),
        ({"labels": np.arange(8) % 2 + 1}, {}, "No image has label 0.* subtract 1"),
        ({"labels": np.arange(8) % 2 * 3}, {}, "No image has label 1, 2, "),
    ],
)
def test_what_is_hardly_meant_is_warned_of(fedgs, tmp_path, change, more, named):
    columns = {"labels": np.arange(8) % 2, "clients": np.arange(8) // 2} | change
    images = np.zeros((8, 16, 16), np.uint8)
    np.savez(tmp_path / "odd.npz", images=images, **columns)
    given = {"data": f"npz:{tmp_path}/odd.npz"} | (more or {"target_epsilon": 10})
    code, _, err = fedgs("train", *flags(**given), "--dry-run")
    assert code == 0
    assert re.fullmatch(f"Warning: {named}.*\n", err)


# ------------------------------------------------------------------ the page

FEWER = {"OWNERS, EACH = 200, 40": "OWNERS, EACH = 20, 8", "-n 2000": "-n 60"}
FEWER |= {"new.txt --target-epsilon 10": "new.txt --target-epsilon 100"}


@pytest.fixture
def walk(fedgs, tmp_path, monkeypatch):
    """Makes the page's data, with fewer owners; runs some of its commands."""
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    for found, small in FEWER.items():
        assert found in page
        page = page.replace(found, small)
    names: dict[str, object] = {}
    for made in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(made, names)
    commands = re.findall(r"^    fedgs (.+)$", page, re.MULTILINE)
    assert len(commands) == 12

    def walk(which: slice) -> list[str]:
        return [printed(fedgs(*shlex.split(words))) for words in commands[which]]

    return walk


def test_every_command_of_the_page_works(walk):
    out = walk(slice(9))
    assert "npz:mine.npz" in out[0]
    of_folder = out[1].replace("folder:mine", "npz:mine.npz")
    assert of_folder.splitlines()[1:] == out[0].splitlines()[1:]
    assert "feature-means: means (25 % of the privacy), scatter (25 %)" in out[2]
    assert "all of 20 clients" in out[2]
    assert "will not be possible" not in out[2]
    assert "epsilon 9.9" in out[3]
    assert len([*Path("drawn").glob("*/*.png")]) == 4 * 100
    assert (Path("for-others") / "README.md").exists()
    assert "downstream_cnn_accuracy" in out[7]
    assert Path("report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_bug_of_the_page_gets_a_verdict_and_a_page(walk):
    local, _, flower = walk(slice(9, None))
    for verdict in (local, flower):
        pattern = r"^Verdict of suspicious: (invert|one of invert, .*|undecided)$"
        assert re.search(pattern, verdict, re.MULTILINE)
    assert "engine flower" in flower
    assert Path("verdict.html").stat().st_size > 10_000
