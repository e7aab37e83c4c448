"""Ranges, contradictions, flat form and precedence of the settings."""

import dataclasses
import math

import pytest

from fedgs.config.fields import Trait
from fedgs.config.recipes import configure
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.config.settings import (
    FREE,
    GROUPS,
    IMAGES,
    MACHINE,
    MECHANISM,
    NO_RESULT,
    OF_CLIENT,
    OWNERS,
    PATH,
    RESULT,
    ROUNDING,
    SEED,
    STAYS,
    field_type,
    settings_with,
)
from fedgs.errors import UserError
from fedgs.privacy.plan import Plan
from refusals import assert_refused
from tiny import tiny_config

FIELDS = {spec.name: spec for spec in dataclasses.fields(RunConfig)}


def message(settings: dict[str, object]) -> str:
    with pytest.raises(UserError) as caught:
        RunConfig(**settings).validate()
    return str(caught.value)


def outside(spec) -> list[object]:
    """Values just outside each limit that a field declares."""
    limits, kind = spec.metadata, field_type(spec.name)[0]
    values: list[object] = ["no such choice"] if limits["choices"] else []
    values += [kind(limits[key]) for key in ("above", "below") if key in limits]
    if "at_least" in limits:
        values.append(kind(limits["at_least"] - 1))
    if "zero_or_at_least" in limits:
        values += [limits["zero_or_at_least"] / 2, -1.0]
    if "at_most" in limits:
        most = limits["at_most"]
        values.append(math.nextafter(most, math.inf) if kind is float else most + 1)
    return values + ([float("nan"), float("inf")] if kind is float else [])


OUTSIDE = [(name, value) for name in FIELDS for value in outside(FIELDS[name])]


def test_every_setting_has_a_group_and_a_help_text():
    assert {spec.metadata["group"] for spec in FIELDS.values()} == set(GROUPS)
    assert all(spec.metadata["help"].endswith(".") for spec in FIELDS.values())


def test_every_setting_is_classified():
    groups = {Trait[group.upper()] for group in GROUPS}
    for spec in FIELDS.values():
        traits = set(spec.metadata["traits"])
        assert len(traits & groups) == 1
        assert len(traits & {RESULT, ROUNDING, NO_RESULT}) == 1


def test_what_decides_the_epsilons_is_a_plan():
    told = {"noise_source", "public_conditions"}
    of_plan = {spec.name for spec in dataclasses.fields(Plan)} - told
    assert set(settings_with(MECHANISM)) == of_plan


# What old clients, old stored runs and old submissions rely on.
@pytest.mark.parametrize(
    ("traits", "names"),
    [
        (STAYS, "client_limits cohort data data_dir hf_options output selection_seed"),
        (FREE, "checkpoint_every fast_messages num_workers sample_every"),
        (SEED, "noise_seed seed selection_seed"),
        (PATH, "client_limits cohort data_dir output"),
        (OWNERS, "classes data hf_options test_fraction"),
        (
            MACHINE,
            "data_dir device download engine fast_messages gpu_fraction num_threads "
            "num_workers output",
        ),
        (
            OF_CLIENT,
            "classes cohort data data_dir device dirichlet_alpha download hf_options "
            "partition partitioner partitioner_options polarity test_fraction",
        ),
        (
            IMAGES,
            "classes data hf_options image_channels image_size num_classes polarity",
        ),
    ],
)
def test_settings_with_a_trait(traits, names):
    assert sorted(settings_with(traits)) == names.split()


def test_number_of_declared_limits():
    assert len(OUTSIDE) > 60  # the next test's cases come from the declarations


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_value_outside_its_range_is_refused_by_name_value_and_remedy(name, value):
    text = message({name: value})
    assert text.startswith(f"{name} = {value!r}")
    assert f"give --{name.replace('_', '-')}" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_rounds", 0),
        ("clip_bound", 0.0),
        ("delta", 1.0),
        ("delta", 0.0),
        ("generator_beta1", 1.0),
        ("gpu_fraction", 1.5),
        ("noise_multiplier", -0.1),
        ("target_epsilon", 0.0),
    ],
)
def test_limits_of_what_decides_an_epsilon_are_as_stated(name, value):
    assert f"{name} = {value}" in message({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_rounds", 1.0),
        ("num_rounds", "10"),
        ("num_rounds", True),
        ("clip_bound", "1"),
        ("clip_bound", True),
        ("conditional", 1),
        ("data", 3),
    ],
)
def test_value_of_another_type_is_refused(name, value):
    kind = field_type(name)[0].__name__
    assert message({name: value}) == f"{name} = {value!r}: must be of type {kind}"


def test_whole_numbers_have_64_bits():
    most = 2**63 - 1
    assert RunConfig(gradient_penalty_every=most).gradient_penalty_every == most
    assert "give at most 2^63 - 1" in message({"gradient_penalty_every": most + 1})


@pytest.mark.parametrize("value", [None, ""])
def test_a_setting_that_is_never_unset_needs_a_value(value):
    assert message({"num_rounds": value}) == "num_rounds is unset: give --num-rounds"


def test_whole_numbers_serve_as_floats():
    config = RunConfig(clip_bound=2, delta=1e-3)
    assert isinstance(config.clip_bound, float)
    assert config.clip_bound == 2.0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"image_size": 20}, ["image_size = 20", "--image-size"]),
        ({"image_channels": 2}, ["image_channels = 2", "--image-channels"]),
        ({"device": "tpu"}, ["device = 'tpu'", "--device"]),
        ({"download": True}, ["download = True", "--data-dir"]),
        (
            {"client_selection": "all", "num_clients": 5},
            ["clients_per_round = 1", "5", "--clients-per-round"],
        ),
        ({"clients_per_round": None}, ["clients_per_round", "--clients-per-round"]),
        (
            {"clients_per_round": 7, "num_clients": 6},
            ["clients_per_round = 7", "num_clients = 6", "--clients-per-round"],
        ),
        (
            {"min_nodes": 4, "num_clients": 6, "clients_per_node": 2},
            ["min_nodes = 4", "3 nodes", "--min-nodes"],
        ),
        (
            {"privacy_unit": "record", "partition": "dirichlet"},
            ["privacy_unit = 'record'", "partition = dirichlet", "--partition"],
        ),
        (
            {"privacy_unit": "record", "partition": "by-client"},
            ["privacy_unit = 'record'", "partition = by-client", "--privacy-unit"],
        ),
        (
            {"target_epsilon": 1.0, "noise_multiplier": 0.0},
            ["noise_multiplier = 0", "target_epsilon", "leave one"],
        ),
        (
            {"gradient_basis": "dct", "dct_size": 29},
            ["dct_size = 29", "image_size = 28", "--dct-size"],
        ),
        (
            {"fakes_per_round": 31},
            ["fakes_per_round = 31", "batch_size = 32", "--fakes-per-round"],
        ),
        ({"gpu_fraction": 0.5}, ["gpu_fraction = 0.5", "--device cuda"]),
    ],
)
def test_contradiction_names_both_settings_and_the_remedy(settings, named):
    text = message(settings)
    assert all(part in text for part in named), text


def test_defaults_are_valid():
    assert RunConfig().validate() == RunConfig()


def test_flat_form_is_scalars_and_comes_back_equal():
    config = tiny_config(clients_per_round=3, target_epsilon=2.5)
    flat = config.to_flat()
    assert list(flat) == list(FIELDS)
    assert all(isinstance(value, str | int | float | bool) for value in flat.values())
    assert flat["min_nodes"] == ""  # TOML has no null
    assert ResolvedConfig.from_flat(flat) == config


def test_empty_string_unsets_an_optional_setting_of_the_base():
    base = RunConfig(noise_multiplier=1.0, seed=3)
    config = RunConfig.from_flat({"noise_multiplier": ""}, base)
    assert (config.noise_multiplier, config.seed) == (None, 3)


def test_unknown_key_is_refused_by_name():
    with pytest.raises(UserError, match=r"^learning_rate: unknown .*train --help"):
        RunConfig.from_flat({"learning_rate": 0.1})


def test_flags_override_the_file_which_overrides_the_recipe(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("num_rounds = 7\nbatch_size = 8\n")
    config = configure("full-participation", file, {"batch_size": 4})
    assert config.num_rounds == 7  # the recipe says 320
    assert config.batch_size == 4  # the file says 8
    assert config.generator == "upsample"  # only the recipe says so


@pytest.mark.parametrize("name", ["noise_multiplier", "target_epsilon"])
def test_noise_and_target_of_a_later_source_replace_each_other(tmp_path, name):
    other = ({"noise_multiplier", "target_epsilon"} - {name}).pop()
    file = tmp_path / "run.toml"
    file.write_text(f"{other} = 1.5\n")
    config = configure(None, file, {name: 3.0})
    assert (getattr(config, name), getattr(config, other)) == (3.0, None)


def test_noise_beside_a_target_in_one_source_is_a_budget(tmp_path):
    given = {"noise_multiplier": 1.0, "target_epsilon": 3.0}
    config = configure("algorithm-1", None, given)
    assert (config.noise_multiplier, config.target_epsilon) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("num_rounds = ", "config = "),
        ("rounds = 3", "rounds: unknown setting; the nearest is num_rounds, and"),
        ("num_rounds = '3'", "num_rounds = '3'"),
        ("[train]\nnum_rounds = 3", r"config = .*: \[train\] is a table; give its"),
    ],
)
def test_bad_file_is_refused(tmp_path, content, named):
    file = tmp_path / "run.toml"
    file.write_text(content)
    assert_refused(named, configure, None, file, {})


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"config = .*no\.toml: cannot be read \(No such file.*--config"
    ):
        configure(None, tmp_path / "no.toml", {})


@pytest.mark.parametrize(
    ("settings", "stacked"),
    [
        ({"discriminator_dim": 32}, True),
        ({"discriminator_dim": 33}, False),
        ({"discriminator_dim": 64, "device": "cuda"}, True),
        ({"discriminator_dim": 8, "stacking": "loop"}, False),
        ({"discriminator_dim": 64, "stacking": "stacked"}, True),
    ],
)
def test_discriminators_are_stacked_where_that_is_faster(settings, stacked):
    assert RunConfig(**settings).stacked is stacked


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({}, 160),  # n_dis * B, the paper's five batches of 32
        ({"discriminator_steps": 1, "discriminator_batch_size": 8}, 32),
        ({"fakes_per_round": 512}, 512),
    ],
)
def test_number_of_fakes_sent(settings, sent):
    assert RunConfig(**settings).fakes_sent == sent


def test_nodes_are_the_clients_divided_upwards():
    assert RunConfig(num_clients=539, clients_per_node=49).num_nodes == 11
    assert RunConfig(num_clients=540, clients_per_node=49).num_nodes == 12
    with pytest.raises(UserError, match=r"num_clients is unset.*--num-clients"):
        _ = RunConfig().num_nodes


def test_noise_follows_the_published_code():
    assert RunConfig(noise_multiplier=1.07, clip_bound=0.5).noise_std == 1.07
    with pytest.raises(UserError, match=r"noise_multiplier is unset.*--noise"):
        _ = RunConfig().noise_std


def test_release_has_the_shape_of_the_gradient_basis():
    assert RunConfig().release_shape == (32, 1, 28, 28)
    assert RunConfig(gradient_basis="dct").release_shape == (32, 1, 14, 14)


# ------------------------------------------------------------------ resolved


RESOLVED = {
    "num_classes": 3,
    "num_clients": 6,
    "clients_per_round": 2,
    "noise_multiplier": 1.0,
    "seed": 5,
}


def test_a_resolved_configuration_is_written_and_read_like_any_other():
    config = ResolvedConfig(**RESOLVED)
    flat = RunConfig(**RESOLVED).to_flat()
    assert [*config.to_flat().items()] == [*flat.items()]
    assert ResolvedConfig.from_flat(flat) == config
    assert ResolvedConfig.from_flat({}, RunConfig(**RESOLVED)) == config


@pytest.mark.parametrize("name", RESOLVED)
@pytest.mark.parametrize("unset", [None, ""])
def test_what_a_run_uses_cannot_be_unset(name, unset):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(UserError, match=f"{name} is unset: give {flag}"):
        ResolvedConfig(**RESOLVED | {name: unset})
    with pytest.raises(UserError, match=f"{name} is unset"):
        dataclasses.replace(ResolvedConfig(**RESOLVED), **{name: None})
