"""Ranges, contradictions, flat form and precedence of the settings."""

import dataclasses
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedgs.config.method_settings import field_type, settings_of, settings_with
from fedgs.config.phases import written
from fedgs.config.recipes import RECIPES, configure, recipe
from fedgs.config.run_config import GsWganConfig, ResolvedConfig, RunConfig, check_names
from fedgs.errors import UserError
from fedgs.privacy.plan import Plan
from refusals import assert_refused
from tiny import run_config, tiny_config

OF_MOMENTS = {"phases": "means"}
OF_GROUPS = {"phases": "group-means"}
OF_FEATURES = {"phases": "means,pretrained-features"}
ALL_PHASES = ({}, OF_MOMENTS, OF_GROUPS, OF_FEATURES)
OF_ALL = tuple(run_config(**phases) for phases in ALL_PHASES)
FIELDS = {spec.name: spec for config in OF_ALL for spec in dataclasses.fields(config)}
SETTINGS = [spec.name for spec in settings_of()]
INSIDE: dict[str, st.SearchStrategy[object]] = {
    "data": st.sampled_from(
        ["digits", "fonts", "npz:a.npz", "hf:x?label=y", "femnist"]
    ),
    "classes": st.sampled_from(["all", "digits", "cat,dog"]),
    "node_sizes": st.sampled_from(["2,3", "1,1,1,1,1"]),
    "phases": st.sampled_from(
        [
            *("gs-wgan", "means", "means:1,scatter:2", "means,scatter,parts,gs-wgan"),
            *("group-means", "group-means,means"),
            *(
                "gs-wgan*4:0.5",
                "fedavg-gan",
                "dp-merf",
                "gs-wgan,gs-wgan",
                "x",
                "means*2",
            ),
            '[{"method":"means"},{"method":"scatter","moment_size":4}]',
            '[{"method":"gs-wgan","rounds":3,"share":0.5,"batch_size":4}]',
        ]
    ),
    "public_data": st.just("fonts"),
    "device": st.sampled_from(["cpu", "cuda"]),
    "nodes": st.sampled_from(["a,b", "a"]),
    "image_size": st.sampled_from([16, 28]),
}
WRONG = st.sampled_from([True, -1, 0, 1.5, math.nan, 2**70, "", "x", ",", "9" * 300])


def inside(spec) -> st.SearchStrategy[object]:
    """Values that a field takes by itself."""
    kind, optional = field_type(spec.name)
    limits, choices = spec.metadata, spec.metadata.get("choices")
    unset = st.just("") if optional else st.nothing()
    if spec.name in INSIDE:
        return INSIDE[spec.name] | unset
    if choices:
        return st.sampled_from(choices) | unset
    if kind is bool:
        return st.booleans() | unset
    if kind is str:
        return st.just("text") | unset
    least = limits.get("at_least", limits.get("above", 0))
    most = min(limits.get("at_most", 9), limits.get("below", 9))
    if kind is int:
        return st.integers(int(least), max(int(least), int(most))) | unset
    is_open = "above" in limits or "zero_or_at_least" in limits
    return st.floats(least, most, exclude_min=is_open, exclude_max=most < 9) | unset


def phases_with(name: str) -> dict[str, str]:
    """Phases that have a setting, of the default ones where these do."""
    for phases in ALL_PHASES:
        if hasattr(run_config(**phases), name):
            return phases
    raise AssertionError(name)


def outside(spec) -> list[object]:
    """Values just outside each limit that a field declares."""
    limits, kind = spec.metadata, field_type(spec.name)[0]
    values: list[object] = ["no such choice"] if limits.get("choices") else []
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


# ------------------------------------------------------------------ any settings


@given(
    st.sampled_from([None, *RECIPES]),
    st.fixed_dictionaries({}, optional={n: inside(s) for n, s in FIELDS.items()}),
    st.dictionaries(st.sampled_from([*FIELDS]), WRONG, max_size=1),
)
@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
def test_any_settings_are_a_configuration_or_refused_by_name(name, chosen, wrong):
    base = None if name is None else recipe(name)
    try:
        config = RunConfig.from_flat(chosen | wrong, base).validate()
    except UserError as error:
        text = str(error)
        assert text.split()[0].rstrip(":") in FIELDS
        assert "\n" not in text
        assert len(text) < 1000
        return
    flat = config.to_flat()
    assert {*flat} <= {*FIELDS}
    assert all(isinstance(value, str | int | float | bool) for value in flat.values())
    assert RunConfig.from_flat(flat) == config
    for index, phase in enumerate(config.phases):
        own = config.at_phase(index)
        assert own.fakes_sent >= own.batch_size or phase.method != "gs-wgan"
    assert config.first_rounds[-1] == config.num_rounds + 1


@given(st.sampled_from(SETTINGS).flatmap(lambda n: st.tuples(st.just(n), WRONG)))
def test_a_wrong_value_is_refused_by_its_setting_alone(pair):
    name, value = pair
    kind, optional = field_type(name)
    try:
        found = getattr(RunConfig.from_flat({**phases_with(name), name: value}), name)
    except UserError as error:
        text = str(error)
    else:
        if name == "phases":
            found = written(found)
        is_kind = isinstance(found, kind) or (found is None and optional)
        text = f"{name} " if is_kind else ""
    assert text.startswith(f"{name} ")


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_value_outside_its_range_is_refused_by_name_value_and_remedy(name, value):
    with pytest.raises(UserError) as caught:
        run_config(**{**phases_with(name), name: value}).validate()
    text = str(caught.value)
    assert text.startswith(f"{name} = {value!r}")
    assert "give " in text
    assert (f"give --{name.replace('_', '-')}" in text) == (name in SETTINGS)
    assert "\n" not in text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"num_rounds": 1.0}, "num_rounds = 1.0:"),
        ({"num_rounds": True}, "num_rounds = True:"),
        ({"spectral_norm": 1}, "spectral_norm = 1:"),
        ({"num_rounds": 2**63}, "num_rounds = 9223372036.*give at most 2\\^63 - 1"),
        ({"delta": 10**400}, "delta = about 2.1328: give at most 2\\^63 - 1"),
        ({"delta": 10**5000}, "delta = about 2.16609: give at most 2\\^63 - 1"),
        ({"num_rounds": None}, "num_rounds is unset: give --num-rounds"),
        ({"num_rounds": ""}, "num_rounds is unset: give --num-rounds"),
        ({"image_size": 20}, "image_size = 20:"),
        ({"image_channels": 2}, "image_channels = 2:"),
        ({"device": "tpu"}, "device = 'tpu':"),
        ({"device": "cpu:0"}, "device = 'cpu:0': give --device cpu, cuda, or cuda:1"),
        ({"device": "cuda:x"}, "device = 'cuda:x': give --device cpu, cuda, or cuda:1"),
        ({"download": True}, "download = True:"),
        (
            {"client_selection": "all", "num_clients": 5},
            "clients_per_round = 1:",
        ),
        ({"clients_per_round": None}, "clients_per_round is unset: .*--clients-per-r"),
        (
            {"clients_per_round": 7, "num_clients": 6},
            "clients_per_round = 7:",
        ),
        (
            {"min_answers": 4, "num_clients": 6, "clients_per_node": 2},
            "min_answers = 4:",
        ),
        (
            {"privacy_unit": "record", "partition": "dirichlet"},
            "privacy_unit = 'record':",
        ),
        (
            {"target_epsilon": 1.0, "noise_multiplier": 0.0},
            "noise_multiplier = 0.0:",
        ),
        ({"dct_size": 29, "image_size": 28}, "dct_size = 29:"),
        ({"dct_size": 65}, "dct_size = 65:"),
        ({"fakes_per_round": 31}, "fakes_per_round = 31:"),
    ],
)
def test_what_cannot_be_is_refused_by_name_value_and_remedy(given, named):
    assert_refused(f"^{named}", lambda: run_config(**given).validate())


# ------------------------------------------------------------------ what hangs on them


def test_what_decides_the_epsilons_is_a_plan():
    told = {"noise_source", "public_conditions", "releases", "is_by_node"}
    of_plan = {spec.name for spec in dataclasses.fields(Plan)} - told
    assert {*settings_with("mechanism")} == of_plan


def test_no_server_learns_a_place_or_a_secret_and_no_client_is_told_its_data():
    assert {"data", "output", "cohort", "selection_hash"} <= {*settings_with("stays")}
    assert "data_dir" in settings_with("stays")
    own = {*settings_with("reading"), *settings_with("owners")} - {"num_classes"}
    assert own <= {*settings_with("of_client")}


@pytest.mark.parametrize("name", sorted({*FIELDS} - {*SETTINGS}))
def test_what_commands_set_is_no_setting_of_a_file(tmp_path, name):
    file = tmp_path / "run.toml"
    file.write_text(f"{name} = 1")
    if name != "recipe":  # of all settings in the file
        assert_refused(f"^{name}: ", configure, None, file, {})
    assert_refused(f"^{name}: ", check_names, [name])


# ------------------------------------------------------------------ sources


def test_empty_string_unsets_an_optional_setting_of_the_base():
    base = run_config(noise_multiplier=1.0, seed=3)
    config = RunConfig.from_flat({"noise_multiplier": "", "clip_bound": 2}, base)
    assert (config.noise_multiplier, config.seed) == (None, 3)
    assert isinstance(config.clip_bound, float)  # whole numbers serve as floats


def test_flags_override_the_file_which_overrides_the_recipe(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("num_rounds = 7\nbatch_size = 8\n")
    config = configure("gs-wgan", file, {"batch_size": 4})
    assert config.num_rounds == 7  # the recipe says 640
    assert config.batch_size == 4  # the file says 8
    assert config.generator == "upsample"  # only the recipe says so


@pytest.mark.parametrize("name", ["noise_multiplier", "target_epsilon"])
def test_noise_and_target_of_a_later_source_replace_each_other(tmp_path, name):
    other = ({"noise_multiplier", "target_epsilon"} - {name}).pop()
    file = tmp_path / "run.toml"
    file.write_text(f"{other} = 1.5\n")
    config = configure(None, file, {name: 3.0})
    assert (getattr(config, name), getattr(config, other)) == (3.0, None)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("num_rounds = ", "config = "),
        ("rounds = 3", "rounds:"),
        ("num_rounds = '3'", "num_rounds = '3'"),
        ("[seed]\nnum_rounds = 3", r"config = .*:"),
        (None, r"config = .*:"),
    ],
)
def test_bad_file_is_refused(tmp_path, content, named):
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_text(content)
    assert_refused(named, configure, None, file, {})


# ------------------------------------------------------------------ what follows


@pytest.mark.parametrize(
    ("given", "sent", "is_public"),
    [
        ({}, 160, False),  # n_dis * B, the paper's five batches of 32
        ({"discriminator_steps": 1, "discriminator_batch_size": 8}, 32, False),
        ({"fakes_per_round": 512}, 512, True),
    ],
)
def test_number_of_fakes_sent_and_what_the_warm_start_uses(given, sent, is_public):
    config = run_config(**given)
    assert (config.fakes_sent, config.is_warm_start_public) == (sent, is_public)


@pytest.mark.parametrize(
    ("name", "needs"), [("num_nodes", "num_clients"), ("noise_std", "noise_multiplier")]
)
def test_what_follows_from_an_unset_setting_is_refused(name, needs):
    assert_refused(f"^{needs} .*--", getattr, run_config(), name)


# ------------------------------------------------------------------ resolved


RESOLVED = {
    "image_size": 28,
    "image_channels": 1,
    "num_classes": 3,
    "num_clients": 6,
    "clients_per_round": 2,
    "noise_multiplier": 1.0,
    "seed": 5,
}


def test_a_resolved_configuration_is_written_and_read_like_any_other():
    config = GsWganConfig(**RESOLVED)
    flat = run_config(**RESOLVED).to_flat()
    assert [*config.to_flat().items()] == [*flat.items()]
    assert ResolvedConfig.from_flat(flat) == config
    assert ResolvedConfig.from_flat({}, run_config(**RESOLVED)) == config
    tiny = tiny_config(clients_per_round=3, target_epsilon=2.5)
    again = ResolvedConfig.from_flat(tiny.to_flat())
    assert dataclasses.replace(again, selection_key=tiny.selection_key) == tiny


@pytest.mark.parametrize("name", RESOLVED)
@pytest.mark.parametrize("unset", [None, ""])
def test_what_a_run_uses_cannot_be_unset(name, unset):
    flag = f"--{name.replace('_', '-')}"
    words, resolved = f"{name} is unset: give {flag}", GsWganConfig(**RESOLVED)
    assert_refused(words, lambda: GsWganConfig(**RESOLVED | {name: unset}))
    assert_refused(words, dataclasses.replace, resolved, **{name: None})


@pytest.mark.parametrize(
    "name",
    [
        *("generator_dim", "discriminator_dim", "num_classes"),
        *("discriminator_steps", "discriminator_batch_size"),
    ],
)
def test_a_number_whose_arrays_would_overflow_is_refused_at_once(name):
    given = {name: 10**18}
    assert_refused(f"^{name} = 1", configure, "gs-wgan", None, given)
