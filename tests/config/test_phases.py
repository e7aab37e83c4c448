"""Phases: how they are read and written, which settings and noise each has."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgs.config import method_settings
from fedgs.config.phases import MOST_PHASES, MOST_TEXT, Phase, read_phases, written
from fedgs.config.recipes import configure
from fedgs.config.rounds import MOST_ROUNDS, rounds_alike
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.config.terms import Terms
from fedgs.errors import UserError
from fedgs.methods import new_state, phases_of
from fedgs.privacy.accountant import statements
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.plan import Plan
from refusals import assert_refused
from tiny import (
    MOMENTS,
    REFINED,
    WITH_RELEASES,
    run_config,
    tiny_config,
)

OF_MOMENTS = "means,scatter,moments"

# ------------------------------------------------------------------ read and written


@pytest.mark.parametrize(
    "form",
    [
        "means:0.2, gs-wgan*40:0.8",
        '["means:0.2", "gs-wgan*40:0.8"]',
        '[{"method": "means", "share": 0.2}, "gs-wgan*40:0.8"]',
        ["means:0.2", "gs-wgan*40:0.8"],
        [
            {"method": "means", "share": 0.2},
            {"method": "gs-wgan", "rounds": 40, "share": 0.8},
        ],
        (Phase("means", share=0.2), Phase("gs-wgan", 40, 0.8)),
    ],
    ids=str,
)
def test_every_form_says_the_same_phases(form):
    means, rounds = read_phases(form)
    assert (means.method, means.rounds, means.share) == ("means", None, 0.2)
    assert (rounds.method, rounds.rounds, rounds.share) == ("gs-wgan", 40, 0.8)
    assert written((means, rounds)) == "means:0.2,gs-wgan*40:0.8"


def test_the_place_of_a_method_has_a_colon_and_may_have_a_share():
    texts = ["a.b:METHOD", "a.b:METHOD:0.5", "a.b:METHOD*3", "a.b:METHOD*3:2"]
    assert [*read_phases(",".join(texts))] == [
        Phase("a.b:METHOD"),
        Phase("a.b:METHOD", share=0.5),
        Phase("a.b:METHOD", rounds=3),
        Phase("a.b:METHOD", rounds=3, share=2.0),
    ]


PHASES = st.builds(
    Phase,
    method=st.sampled_from(["means", "gs-wgan", "module:METHOD"]),
    rounds=st.none() | st.integers(1, 10**9),
    share=st.none() | st.floats(1e-6, 1e6),
    settings=st.dictionaries(
        st.text(max_size=9).filter(lambda n: n not in ("method", "rounds", "share")),
        st.text(max_size=9) | st.integers(-9, 9) | st.booleans() | st.just(0.5),
        max_size=2,
    ).map(lambda own: tuple(sorted(own.items()))),
)


@given(st.lists(PHASES, min_size=1, max_size=4).map(tuple))
def test_what_is_written_is_read_as_the_same_phases(phases):
    text = written(phases)
    assert read_phases(text) == phases
    assert written(read_phases(text)) == text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        MOMENTS,
        WITH_RELEASES,
        REFINED,
        {"phases": "gs-wgan*3:0.5"},
        {"phases": '[{"method": "gs-wgan", "rounds": 3, "batch_size": 2}]'},
        {
            **MOMENTS,
            "phases": [
                {"method": "means", "moment_size": 3},
                {"method": "scatter", "moment_size": 3, "share": 2},
                "moments",
            ],
        },
    ],
    ids=str,
)
def test_a_configuration_with_phases_is_the_same_after_its_flat_form(settings):
    config = tiny_config(**settings, selection_key="")
    flat = json.loads(json.dumps(config.to_flat()))
    assert isinstance(flat["phases"], str)
    again = ResolvedConfig.from_flat(flat)
    assert again == config
    assert rounds_alike(again) == rounds_alike(config)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "value",
    [
        # Too long, too deep, too many.
        "means," * (MOST_TEXT // 6 + 1),
        "[" * (MOST_TEXT - 1),
        '[{"method": ' + "[" * 4000 + "]" * 4000 + "}]",
        ",".join(["gs-wgan*1"] * (MOST_PHASES + 1)),
        # No phases.
        *("", ",", "means,", "[]", "{}", "[1]", "[null]", '["', '[{"rounds": 3}]'),
        *(3, None, True, {"method": "means"}, [["means"]], [{"method": 1}]),
        # Rounds.
        *("gs-wgan*0", "gs-wgan*-1", "gs-wgan*1.5", "gs-wgan*", "gs-wgan*x"),
        *("gs-wgan*" + "9" * 30, "gs-wgan*" + "9" * 5000),
        *([{"method": "gs-wgan", "rounds": rounds}] for rounds in (1.0, True, "x")),
        # Shares.
        *("gs-wgan:0", "gs-wgan:-1", "gs-wgan:nan", "gs-wgan:inf", "gs-wgan:1e999"),
        *("gs-wgan:", "gs-wgan:x", "gs-wgan:1e-7", "gs-wgan:1e7"),
        *([{"method": "gs-wgan", "share": share}] for share in (math.nan, True, "x")),
        # Methods and settings.
        *("magic", "os:system", "\ud800", "a\0b", "x" * 5000),
        [{"method": "gs-wgan", "batch_size": [1]}],
        [{"method": "gs-wgan", "batch_size": None}],
    ],
    ids=lambda value: repr(value)[:40],
)
def test_hostile_phases_are_refused_in_one_short_line(value):
    with pytest.raises(UserError) as caught:
        RunConfig.from_flat({"phases": value}).validate()
    text = str(caught.value)
    assert text.startswith("phases")
    assert text.isprintable()
    assert len(text) < 500


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (MOMENTS | {"phases": "means*3,scatter"}, "phases: "),
        ({"phases": "gs-wgan,fedavg-gan"}, "phases = "),
        ({"phases": "gs-wgan*4", "num_rounds": 5}, "num_rounds = 5: "),
        ({"phases": "gs-wgan*4,fedavg-gan", "num_rounds": 4}, "num_rounds = 4: "),
        (MOMENTS | {"phases": "scatter,means"}, "phases = scatter,means: "),
        (MOMENTS | {"phases": "means,moments"}, "phases = "),
        (MOMENTS | {"phases": "means,means"}, "phases = "),
        (
            {
                **{"phases": "features", "client_selection": "all"},
                **{"generator": "refined", "latent": "normal"},
            },
            "phases = ",
        ),
        (
            REFINED | {"phases": "means,scatter,gs-wgan*2,features", "num_rounds": 5},
            "phases = ",
        ),
        # A table has its method's own settings alone, and each in its range.
        ({"phases": [{"method": "gs-wgan", "clip_bound": 2}]}, "clip_bound: "),
        ({"phases": [{"method": "gs-wgan", "phases": "means"}]}, "phases: "),
        ({"phases": [{"method": "gs-wgan", "phase_index": 0}]}, "phase_index: "),
        (
            {"phases": [{"method": "gs-wgan", "moment_size": 4}]},
            "moment_size: ",
        ),
        ({"phases": [{"method": "gs-wgan", "magic": 4}]}, "magic: "),
        ({"phases": [{"method": "gs-wgan", "batch_size": 0}]}, "batch_size = 0: "),
        ({"phases": [{"method": "gs-wgan", "batch_size": "x"}]}, "batch_size = 'x': "),
        # Which phase is at hand is no setting.
        ({"phase_index": 0}, "phase_index: "),
        # Many rounds are refused before they are asked for, one after the other.
        ({"phases": f"gs-wgan*{10**9}:1"}, "num_rounds = 1000000000: "),
        ({"phases": "gs-wgan:1", "num_rounds": 10**9}, "num_rounds = 1000000000: "),
    ],
    ids=str,
)
def test_phases_that_contradict_are_refused_by_a_settings_name(settings, named):
    assert_refused(f"^{named}", tiny_config, **settings)


def test_two_phases_with_discriminators_are_refused_before_anything_is_made():
    config = tiny_config(phases="gs-wgan*2,gs-wgan*3")
    assert_refused("^phases = gs-wgan, gs-wgan: ", phases_of, config)
    assert_refused("^phases = gs-wgan, gs-wgan: ", new_state, config)


# ------------------------------------------------------------------ tables of a file


def test_tables_of_a_file_are_phases_with_their_own_settings(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'num_clients = 6\nlatent = "normal"\ngenerator = "gaussian"\n'
        '[[phases]]\nmethod = "means"\nmoment_size = 4\nshare = 0.25\n'
        '[[phases]]\nmethod = "scatter"\nmoment_size = 4\n'
        '[[phases]]\nmethod = "fedavg-gan"\nrounds = 5\n'
        "spectral_norm = false\ndiscriminator_steps = 3\n"
    )
    config = configure("gs-wgan", file, {"noise_multiplier": 1.0})
    assert config.methods == "means, scatter, fedavg-gan"
    assert config.num_rounds == 7
    # Two phases have a moment_size, so each keeps its own; the rest is the run's.
    assert [config.at_phase(index).moment_size for index in (0, 1)] == [4, 4]
    assert [dict(phase.settings) for phase in config.phases] == [
        {"moment_size": 4},
        {"moment_size": 4},
        {},
    ]
    assert config.discriminator_steps == config.at_phase(2).discriminator_steps == 3
    # So a flag changes it.
    given = {"noise_multiplier": 1.0, "discriminator_steps": 4}
    assert configure("gs-wgan", file, given).at_phase(2).discriminator_steps == 4
    assert not hasattr(config.at_phase(0), "discriminator_steps")


def test_a_setting_that_several_phases_have_is_each_ones_own():
    phases = [
        {"method": "gs-wgan", "rounds": 2, "batch_size": 2, "discriminator_steps": 1},
        {"method": "fedavg-gan", "rounds": 2, "spectral_norm": False},
    ]
    config = tiny_config(phases=phases, discriminator_steps=3)
    assert config.batch_size == 2  # of one phase alone
    assert [config.at_phase(i).discriminator_steps for i in (0, 1)] == [1, 3]
    assert [config.at_phase(i).spectral_norm for i in (0, 1)] == [True, False]
    again = ResolvedConfig.from_flat({"discriminator_steps": 4}, config)
    assert [again.at_phase(i).discriminator_steps for i in (0, 1)] == [1, 4]


# ------------------------------------------------------------------ rounds


def test_a_phase_without_a_number_has_what_the_others_leave():
    config = tiny_config(**WITH_RELEASES | {"num_rounds": 9})
    assert config.first_rounds == (1, 2, 3, 10)
    methods = [config.at_round(round).method for round in (1, 2, 3, 9)]
    assert methods == ["means", "scatter", "gs-wgan", "gs-wgan"]
    assert [config.at_phase(index).rounds_before for index in range(3)] == [0, 1, 2]
    # Beside the borders: before the first round, and after the last one.
    assert config.at_round(0).method == "means"
    assert config.at_round(10).method == "gs-wgan"
    assert config.at_round(2) == config.at_phase(1)
    assert [alike.num_rounds for alike in rounds_alike(config)] == [1, 1, 7]


def test_an_open_phase_may_stand_anywhere_and_num_rounds_follows_from_closed_ones():
    open_first = tiny_config(
        **{"phases": "fedavg-gan,gs-wgan*4", "num_rounds": 10, "spectral_norm": False}
    )
    assert open_first.first_rounds == (1, 7, 11)
    closed = tiny_config(phases="fedavg-gan*3,gs-wgan*4", spectral_norm=False)
    assert (closed.num_rounds, closed.first_rounds) == (7, (1, 4, 8))


# ------------------------------------------------------------------ noise of shares


def cost(config, index: int) -> float:
    """mu^2 of one node with replace-one over all rounds of a phase, by its terms."""
    first, after = config.first_rounds[index : index + 2]
    terms = [config.terms(round) for round in range(first, after)]
    return sum(each.batch_size / each.noise_multiplier**2 for each in terms)


@pytest.mark.parametrize(
    ("phases", "shares"),
    [
        ("means:0.2,scatter:0.3,moments:0.5", [0.2, 0.3, 0.5]),
        ("means:1,scatter:1,gs-wgan*6:2", [1, 1, 2]),
        ("means:0.2,scatter:0.4,gs-wgan:2.4", [0.2, 0.4, 2.4]),
    ],
)
@pytest.mark.parametrize("clip_bound", [1.0, 0.5])
def test_phases_spend_mu_squared_in_the_ratio_of_their_shares(
    phases, shares, clip_bound
):
    """Also a phase of many rounds, each of B = 4 samples."""
    base = WITH_RELEASES if "gs-wgan" in phases else MOMENTS
    own = {"phases": phases, "clip_bound": clip_bound, "noise_multiplier": 0.7}
    if phases.endswith("gs-wgan:2.4"):
        own["num_rounds"] = 8
    config = tiny_config(**base | own, engine="flower")
    for index, share in enumerate(shares):
        assert cost(config, index) == pytest.approx(share / 0.7**2, rel=1e-12)
    # The epsilon of the run is that of the sum of all shares.
    rows = statements(Plan.from_config(config), 1e-5)
    mu = math.sqrt(sum(shares)) / 0.7
    (epsilon,) = [
        row.epsilon
        for row in rows
        if (row.adversary, row.relation) == ("server", "replace-one")
    ]
    assert epsilon == pytest.approx(epsilon_from_mu(mu, 1e-5), rel=1e-9)


def test_a_phase_without_a_share_costs_its_releases_at_the_runs_noise():
    config = tiny_config(**WITH_RELEASES | {"phases": "means,scatter:3,gs-wgan*5"})
    noises = [config.terms(round).noise_multiplier for round in (1, 2, 3, 7)]
    assert noises == [0.5, pytest.approx(0.5 / 3**0.5), 0.5, 0.5]
    assert cost(config, 2) == pytest.approx(5 * 4 / 0.5**2)


def test_without_noise_no_phase_has_any():
    config = tiny_config(**WITH_RELEASES | {"noise_multiplier": 0.0})
    assert {config.terms(round).noise_multiplier for round in (1, 2, 3)} == {0.0}


def test_the_most_rounds_can_have_a_share():
    phases = f"gs-wgan*{MOST_ROUNDS}:2"
    assert cost(tiny_config(phases=phases, noise_multiplier=1.0), 0) == pytest.approx(2)


def test_the_terms_of_a_million_rounds_alike_are_made_once_for_each_use(monkeypatch):
    made = []

    def counted(**values):
        made.append(values)
        return Terms(**values)

    monkeypatch.setattr(method_settings, "Terms", counted)
    phases = f"gs-wgan*{MOST_ROUNDS}:2"
    config = tiny_config(phases=phases, noise_multiplier=1.0, seed=57)
    config.validate()
    [alike] = rounds_alike(config)
    assert (alike.first, alike.num_rounds) == (1, MOST_ROUNDS)
    # At the run's noise, to weigh the phase by its share, and at the phase's own.
    assert len(made) == 2


# ------------------------------------------------------------------ whose settings


@pytest.mark.parametrize(
    ("phases", "name", "value"),
    [
        (OF_MOMENTS, "batch_size", 4),
        (OF_MOMENTS, "discriminator_dim", 4),
        (OF_MOMENTS, "dct_size", 8),
        ("gs-wgan", "moment_size", 4),
        ("fedavg-gan", "fakes_per_round", 8),
        ("dp-merf", "warm_start_rounds", 1),
    ],
)
def test_a_setting_that_no_phase_has_is_refused_by_its_name(phases, name, value):
    given = {"phases": phases, name: value}
    assert_refused(f"^{name}: ", run_config, **given)
    assert not hasattr(run_config(phases=phases), name) or name in (
        "batch_size",
        "warm_start_rounds",
    )
