"""The numbers of `fedgs report`: curves, bytes on the wire, the command."""

import dataclasses
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedgs.app.commands import train
from fedgs.app.report import curves as report_curves
from fedgs.app.report import words as report_words
from fedgs.app.report.communication import communication, release_bytes
from fedgs.app.report.phase_tables import phase_tables
from fedgs.app.report.run import RunFacts, read_run
from fedgs.app.report.settings_tables import (
    OF_CLIENTS,
    shown_data,
    shown_settings,
    train_command,
)
from fedgs.cohorts.cohort_file import EXCLUDED
from fedgs.config.phases import read_phases
from fedgs.config.run_config import RunConfig
from fedgs.methods import new_state
from fedgs.methods.schedule import EVERYONE
from fedgs.privacy.accountant import statements
from fedgs.privacy.gaussian import fixed_law
from fedgs.privacy.plan import Plan
from fedgs.privacy.rounding import upper
from fedgs.round.messages import encode_answer, encode_request
from fedgs.round.run import new_event
from fedgs.runs.epsilons import by_round
from report_folders import make_run
from tiny import (
    BY_NODE,
    FULL_PARTICIPATION,
    MOMENTS,
    NUM_CLASSES,
    SIDE,
    WITH_RELEASES,
    embedding_round,
    next_request,
    tiny_config,
    tiny_data,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A private run."""
    return make_run(tmp_path_factory.mktemp("report") / "private")


@pytest.fixture
def facts(run) -> RunFacts:
    return read_run(run)


# ------------------------------------------------------------------ curves


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_no_epsilon_of_the_curve_is_rounded_down(facts, monkeypatch, num_rounds):
    rows = [dataclasses.replace(facts.headline, epsilon=9.99712)]
    spent = [(round, rows) for round in range(1, num_rounds + 1)]
    monkeypatch.setattr(report_curves, "by_round", lambda *_: spent)
    curve = report_curves.curves([facts])[0]
    assert curve.labels == ["release: 9.998"]
    words = ["9.998 at round 1", "9.998 at round 2"][:num_rounds]
    assert curve.description == f"Privacy spent. release: {', '.join(words)}."


def test_every_point_of_a_run_by_count_is_by_count():
    """One client is in 6 of the 8 rounds: the mixture states less than that costs.

    The counts decide for the run because it ended early.
    """
    chosen = (0, 0, 0, 0, 0, 1, 0, 1)
    noise = {"noise_seed": None, "noise_multiplier": 4.0, "adversary": "release"}
    config = tiny_config(num_rounds=20, clients_per_round=1, **noise)
    events = [new_event(config, n, [client], 1) for n, client in enumerate(chosen, 1)]
    found = by_round(config, events, 16)
    points = [rows[0].epsilon for _, rows in found]
    ratio = Plan.from_config(config).ratio("release", config.relation, 0)
    assert len(points) == len(chosen)
    for end, epsilon in enumerate(points, 1):
        most = max(chosen[:end].count(0), chosen[:end].count(1))
        counted = fixed_law(most, ratio).epsilon(config.delta)
        assert epsilon == pytest.approx(counted)


def test_repeated_rounds_are_one_point_each_that_counts_all_attempts():
    config = tiny_config(num_rounds=20, noise_seed=None, **FULL_PARTICIPATION)
    attempts = [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)]
    events = [new_event(config, n, EVERYONE, attempt) for n, attempt in attempts]
    points = [(n, rows[0].epsilon) for n, rows in by_round(config, events, 16)]
    ratio = Plan.from_config(config).ratio("release", config.relation, 0)
    assert points == [
        (n, pytest.approx(fixed_law(count, ratio).epsilon(config.delta)))
        for n, count in ((1, 1), (2, 4), (3, 5))
    ]


def test_curve_of_epsilon_ends_at_the_stated_one(facts):
    curve = report_curves.curves([facts])[0]
    (line,) = curve.lines
    assert [x for x, _ in line.points] == [1, 2, 3]
    assert line.points[-1][1] == pytest.approx(facts.headline.epsilon)
    assert f"{upper(facts.headline.epsilon)} at round 3" in curve.description


def test_grid_images_are_the_cells(run, facts):
    images = report_curves.grid_images(facts.grids[-1], facts)
    assert images.shape == (8 * NUM_CLASSES, SIDE * SIDE)
    with Image.open(run / "samples" / "round-0000003.png") as png:
        pixels = np.asarray(png)
    second = pixels[2 : 2 + SIDE, SIDE + 4 : 2 * SIDE + 4, 0] / 255
    assert np.array_equal(images[1].reshape(SIDE, SIDE), second)


# ------------------------------------------------------------------ other numbers


def test_headline_is_the_best_guarantee_for_the_run_s_own_adversary(facts):
    (own, other) = facts.statements
    rows = [
        dataclasses.replace(own, epsilon=1.0, label="as published"),
        dataclasses.replace(own, adversary="server", epsilon=2.0),
        dataclasses.replace(own, epsilon=3.0),
        dataclasses.replace(own, epsilon=4.0),
        dataclasses.replace(other, epsilon=0.5),
    ]
    assert (own.relation, own.guarantee) == (facts.config.relation, True)
    assert dataclasses.replace(facts, statements=rows).headline is rows[2]


def test_communication_of_exact_messages_follows_from_shapes(facts):
    found = communication(facts)
    pixels = SIDE * SIDE
    fakes = 2 * 4  # n_dis batches; float32 images and int64 labels, and a header
    assert found.request - fakes * (4 * pixels + 8) in range(8, 300)
    assert found.reply - 4 * 4 * pixels in range(8, 300)  # B = 4
    assert (found.requests, found.replies, found.rounds) == (2, 2, 3)
    assert found.total == 3 * 2 * (found.request + found.reply)
    config = dataclasses.replace(facts.config, message_precision="compact")
    found = communication(dataclasses.replace(facts, config=config))
    assert found.reply in range(1, 2 * 4 * SIDE * SIDE)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (None, {}),
        # What is a default of all runs, but not of the method's recipe.
        ("fedavg-gan", {"spectral_norm": False, "clip_bound": 1.0, "num_rounds": 1000}),
        ("fedavg-gan", {"spectral_norm": False, "target_epsilon": 10.0}),
    ],
)
def test_train_command_makes_the_same_configuration(
    facts, recipe, settings, exit_code, monkeypatch
):
    if recipe:
        facts = dataclasses.replace(
            facts, config=tiny_config(phases=recipe, **settings)
        )
    config = facts.config
    made: list[RunConfig] = []
    monkeypatch.setattr(train, "train", lambda config, *_: made.append(config))
    words = shlex.split(train_command(facts))
    assert "--secure-noise" not in words  # is the default
    assert exit_code(*words[1:]) == 0
    named = recipe or "algorithm-2"
    own = {"output": Path(config.output).name, "recipe": named, "selection_hash": ""}
    expected = dataclasses.replace(config, **own)
    assert made[0].to_flat() == expected.to_flat()


def test_the_command_of_a_deployed_run_is_one_for_a_deployment(facts, fedgs):
    """It needs keys, and where the data lie is not the server's to say."""
    settings = {"engine": "flower", "nodes": "ward-1,ward-2", "clients_per_node": 3}
    deployed = tiny_config(**settings)
    facts = dataclasses.replace(facts, config=deployed)
    command = train_command(facts)
    assert command.startswith("fedgs deploy submit --server HOST:PORT --recipe ")
    assert "ward" not in command
    assert "--data" not in command
    words = shlex.split(command.replace("HOST:PORT", "localhost:1"), comments=True)
    _, _, error = fedgs(*words[1:])
    assert error.startswith("Error: client is unset"), error
    shown = shown_settings(facts)
    assert (shown["data"], shown["test_fraction"]) == (OF_CLIENTS, OF_CLIENTS)


@pytest.mark.parametrize(
    "asked",
    [{}, {"suspicious": "ward-2"}, {"healthy": "v1", "suspicious": "v2"}],
)
def test_the_command_of_a_deployed_comparison_is_one_for_a_deployment(
    facts, fedgs, asked
):
    nodes = {"engine": "flower", "nodes": "ward-1,ward-2,ward-3"}
    config = tiny_config(**BY_NODE | nodes | asked)
    facts = dataclasses.replace(facts, config=config)
    command = train_command(facts)
    assert command.startswith("fedgs deploy debug --server HOST:PORT --")
    words = shlex.split(command.replace("HOST:PORT", "localhost:1"), comments=True)
    _, _, error = fedgs(*words[1:])
    assert error.startswith("Error: client is unset"), error


def test_settings_are_shown_as_set_reads_them(tmp_path):
    facts = read_run(make_run(tmp_path / "phases", **WITH_RELEASES))
    shown = shown_settings(facts)["phases"]
    assert shown.startswith("means:")
    assert read_phases(shown) == facts.config.phases


def test_data_is_shown_without_its_place():
    assert shown_data("folder:/home/ada/scans") == "folder:FILE"
    assert shown_data("hf:/home/ada/scans?label=x") == "hf:FILE?label=x"
    assert shown_data("hf:ylecun/mnist") == "hf:ylecun/mnist"


@pytest.mark.parametrize(
    ("epsilon", "text", "kind", "kind_excluded"),
    [
        (9.9, "limits a typical attack", "good", "unsure"),
        (None, "no guarantee", "bad", "bad"),
    ],
)
def test_an_epsilon_says_at_a_glance_that_it_excludes_the_selection(
    epsilon, text, kind, kind_excluded
):
    config = tiny_config(num_clients=3, clients_per_round=3, noise_multiplier=1.0)
    conditions = statements(Plan.from_config(config), 1e-5)[0].conditions
    assert report_words.reading(epsilon, conditions) == (text, kind)
    words = f"{text}; excludes cohort selection"
    found = report_words.reading(epsilon, (*conditions, EXCLUDED))
    assert found == (words, kind_excluded)


def test_a_delta_too_large_and_a_hypothetical_row_have_no_good_badge():
    settings = {"engine": "flower", "noise_multiplier": 200.0, "noise_seed": None}
    plan = Plan.from_config(tiny_config(**settings))
    for delta, adversary, words in (
        (1e-5, "release", ("strong", "good")),
        (0.3, "release", ("strong; delta is too large to read", "unsure")),
        (1e-5, "secagg", ("strong; hypothetical", "unsure")),
    ):
        rows = statements(plan, delta)
        row = next(row for row in rows if row.adversary == adversary)
        assert report_words.reading(row.epsilon, row.conditions) == words


def test_releases_are_told_apart_from_gradients(facts, tmp_path):
    """Signal to noise is 3, 2 and 1; the first two phases release once."""
    assert phase_tables([facts]) == []
    facts = read_run(make_run(tmp_path / "phases", **WITH_RELEASES))
    (table,) = phase_tables([facts])
    # 6 clients on 3 nodes: (6 C)^2 / (numbers * 3 * (2 C noise)^2), noise^2 by share.
    assert [[*row[:2], *row[4:]] for row in table.rows] == [
        ["1 (means)", "51", "3", f"{36 / (51 * 3 * 0.5 * 4):.4g}"],
        ["2 (scatter)", "137", "2", f"{36 / (137 * 3 * 0.125 * 4):.4g}"],
    ]
    (curve,) = (c for c in report_curves.curves([facts]) if "Signal" in c.title)
    assert [line.points for line in curve.lines] == [[(3, 1.0)]]
    found = communication(facts)
    assert found.rounds == 1
    of_client = [release_bytes(facts.config, round) for round in (1, 2)]
    assert found.releases == 3 * sum(of_client)


@pytest.mark.parametrize("settings", [WITH_RELEASES, MOMENTS])
@pytest.mark.parametrize("round", [1, 2])
def test_the_bytes_of_a_release_are_those_of_its_messages(settings, round):
    config = tiny_config(**settings)
    server = new_state(config)
    server.round = round - 1
    request = next_request(config, server)
    sent = encode_request(request, config)["tensors"]
    reply = embedding_round(config, tiny_data(config), range(2), request, 0)
    answered = encode_answer(reply, config, request)["tensors"]
    assert release_bytes(config, round) == len(sent) + len(answered)
