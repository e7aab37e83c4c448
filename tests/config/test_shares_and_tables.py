"""Phases: how they are read and written, whose rounds are whose, and their noise."""

import dataclasses
import json

import pytest

from fedgs.config.phases import MOST_PHASES, Phase, read_phases, written
from fedgs.config.recipes import configure, recipe, shares_of
from fedgs.config.rounds import rounds_alike
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.methods import phases_of
from refusals import assert_refused
from tiny import FULL_PARTICIPATION, MOMENTS, tiny_config

THREE = "means:0.2,scatter:0.3,gs-wgan*2:0.5"


def test_the_three_forms_are_the_same_phases(tmp_path):
    tables = [
        {"method": "means", "share": 0.2},
        {"method": "scatter", "share": 0.3},
        {"method": "gs-wgan", "rounds": 2, "share": 0.5},
    ]
    phases = read_phases(THREE)
    assert phases == read_phases(json.dumps(tables)) == read_phases(tables)
    file = tmp_path / "own.toml"
    lines = [
        "\n".join(["[[phases]]", *(f"{n} = {json.dumps(v)}" for n, v in each.items())])
        for each in tables
    ]
    file.write_text("\n".join(lines))
    given = {"generator": "gaussian"}
    assert configure("feature-means-gs-wgan", file, given).phases == phases
    assert phases[2] == Phase(method="gs-wgan", rounds=2, share=0.5)


@pytest.mark.parametrize(
    "phases",
    [
        (Phase("gs-wgan"),),
        read_phases(THREE),
        (Phase("means"), Phase("mine:METHOD", rounds=3, share=0.5)),
        (Phase("gs-wgan", rounds=2, settings=(("batch_size", 4),)),),
    ],
)
def test_what_is_written_is_read_again(phases):
    assert read_phases(written(phases)) == phases


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("", "phases = ''"),
        ("means:soon", "phases = 'means:soon'"),
        ("gs-wgan*x", r"phases = 'gs-wgan\*x'"),
        ("gs-wgan*0", "rounds = 0"),
        ("means:-1", "share = -1.0"),
        ("means:nan", "share = nan"),
        ("a" * 20_000, "^phases = 'aaa"),
        (",".join(["gs-wgan*1"] * (MOST_PHASES + 1)), "phases:"),
        ("[1", "phases = .*"),
        ("[1]", "phases:"),
        ([{"share": 1}], "phases:"),
        ([{"method": "gs-wgan", "rounds": "two"}], "rounds = 'two'"),
        ([{"method": "gs-wgan", "batch_size": [1]}], "batch_size = "),
        ([], "phases:"),
        (3, "phases = 3"),
    ],
)
def test_malformed_phases_are_refused_by_name(value, named):
    assert_refused(named, RunConfig.from_flat, {"phases": value})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"phases": "means*3"}, "phases:"),
        ({"phases": "gs-wgan,fedavg-gan"}, "phases = .*:"),
        ({"phases": "gs-wgan*3", "num_rounds": 4}, "num_rounds = 4:"),
        ({"phases": "gs-wgan*3,fedavg-gan", "num_rounds": 3}, "num_rounds = 3:"),
        ({"phases": "scatter,means"}, "phases .*order"),
        ({"phases": "moments"}, "phases .*order"),
        ({"phases": "means,parts"}, "phases .*order"),
        (
            {"phases": "pretrained-features", "generator": "refined"},
            "phases .*after mo",
        ),
        ({"phases": [{"method": "means", "delta": 0.1}]}, "delta:"),
        ({"phases": [{"method": "means", "batch_size": 2}]}, "batch_size:"),
        ({"phases": "means", "batch_size": 2}, "batch_size:"),
        ({"phases": "means", "client_selection": "uniform"}, "phases .*every client"),
        ({"phases": "nonsense"}, "phases = 'nonsense':"),
        ({"phases": "un.trusted:METHOD"}, "phases = 'un.trusted:METHOD': .* code"),
    ],
)
def test_phases_that_cannot_be_are_refused_by_name(settings, named):
    base = recipe("moments")
    assert_refused(named, lambda: RunConfig.from_flat(settings, base).validate())


def test_two_phases_with_discriminators_are_refused():
    two = FULL_PARTICIPATION | {"phases": "gs-wgan*1,gs-wgan*2", "num_rounds": 3}
    config = tiny_config(**two)
    assert_refused("phases = gs-wgan, gs-wgan:", phases_of, config)


def test_settings_of_a_table_are_the_runs_if_only_one_phase_has_them():
    table = {
        "method": "gs-wgan",
        "rounds": 2,
        "batch_size": 3,
        "discriminator_steps": 7,
    }
    base = recipe("feature-means-gs-wgan")
    phases = ["means", "scatter", table]
    own = {"phases": phases, "generator": "gaussian"}
    config = RunConfig.from_flat(own, base)
    flat = config.to_flat()
    assert (flat["batch_size"], flat["discriminator_steps"]) == (3, 7)
    assert flat["phases"] == "means,scatter,gs-wgan*2"
    # Both have discriminators' steps, so each keeps its own.
    other = {"method": "fedavg-gan", "rounds": 1, "discriminator_steps": 2}
    config = RunConfig.from_flat({"phases": [table, other], "spectral_norm": False})
    steps = [config.at_phase(index).discriminator_steps for index in range(2)]
    assert steps == [7, 2]
    assert config.to_flat()["batch_size"] == 3
    assert RunConfig.from_flat(config.to_flat()) == config


# ------------------------------------------------------------------ rounds


def test_whose_rounds_are_whose():
    config = tiny_config(
        **FULL_PARTICIPATION | MOMENTS | {"phases": "means,scatter,gs-wgan"},
        num_rounds=5,
    )
    assert config.first_rounds == (1, 2, 3, 6)
    methods = [config.at_round(round).method for round in range(1, 8)]
    assert methods == ["means", "scatter", *["gs-wgan"] * 5]
    assert [config.at_phase(index).rounds_before for index in range(3)] == [0, 1, 2]
    assert [config.terms(round).release for round in (1, 2, 3, 5)] == [
        *("embedding", "embedding"),
        *("gradient", "gradient"),
    ]


# ------------------------------------------------------------------ shares


def costs_of(config: ResolvedConfig) -> list[float]:
    """mu^2 of each phase, in units of one sample's release at noise 1."""
    found = [0.0] * len(config.phases)
    for alike in rounds_alike(config):
        index = config.at_round(alike.first).phase_index
        terms = alike.terms
        cost = terms.batch_size / terms.noise_multiplier**2
        found[index] += alike.num_rounds * cost
    return found


def test_noise_follows_from_the_shares():
    """Also of a phase with many rounds and several samples in each."""
    shares = "means:0.2,scatter:0.3,gs-wgan*3:0.5"
    own = FULL_PARTICIPATION | MOMENTS | {"phases": shares, "num_rounds": 5}
    costs = costs_of(tiny_config(**own))
    assert [cost / sum(costs) for cost in costs] == pytest.approx([0.2, 0.3, 0.5])


def test_without_a_share_a_phase_costs_what_its_releases_cost():
    own = FULL_PARTICIPATION | MOMENTS | {"phases": "means,scatter,gs-wgan"}
    config = tiny_config(**own, num_rounds=4, noise_multiplier=2.0)
    assert costs_of(config) == pytest.approx([1 / 4, 1 / 4, 2 * config.batch_size / 4])
    silent = dataclasses.replace(config, noise_multiplier=0.0)
    assert {silent.terms(round).noise_multiplier for round in range(1, 5)} == {0.0}


def test_shares_are_of_the_privacy_spent():
    """Feature means with four fifths of mu^2, then rounds."""
    found = shares_of(recipe("feature-means-gs-wgan"))
    assert found == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.2])
    assert shares_of(recipe("algorithm-1")) == [1.0]
