"""What a client agrees to: its file, what it refuses, and that nothing happens then."""

import dataclasses
import json
from pathlib import Path

import pytest

from fedgs.config.run_config import RunConfig
from fedgs.privacy.client_limits import ClientRefused, Limits, release_cost
from fedgs.privacy.gaussian import epsilon_from_mu
from groups import of_cohorts, of_nodes
from refusals import assert_refused
from tiny import tiny_config


def _write(folder: Path, text: str) -> Path:
    path = folder / "limits.toml"
    path.write_text(text)
    return path


# ------------------------------------------------------------------ the file


KEYS = {
    "client_epsilon": 10.0,
    "delta": 1e-5,
    "relation": "zero-out",
    "clip_bound": 1.0,
    "min_noise_multiplier": 0.25,
}
KEYS |= dict.fromkeys(("max_batch_size", "image_size", "image_channels"), 32)
KEYS |= dict.fromkeys(("num_classes", "num_clients", "max_fakes"), 3)
KEYS |= dict.fromkeys(("allow_seeded_noise", "allow_embeddings", "allow_updates"), True)
KEYS |= {"allow_selection": True}
KEYS |= {"min_honest_nodes": 5, "state_dir": "counts"}
KEYS |= {"allow_groups": True, "allow_one_cohort": True, "min_clients_per_group": 3}


def test_every_key_of_the_file_is_read(tmp_path, monkeypatch):
    (tmp_path / "counts").mkdir()
    # JSON's numbers, strings and truth values are TOML's.
    lines = [f"{name} = {json.dumps(value)}" for name, value in KEYS.items()]
    path = _write(tmp_path, "\n".join(lines))
    monkeypatch.chdir("/")  # state_dir is relative to the file
    expected = Limits(**KEYS | {"state_dir": tmp_path / "counts"})
    assert Limits.read(path) == expected
    assert KEYS.keys() == {spec.name for spec in dataclasses.fields(Limits)}


def test_an_empty_file_limits_nothing_but_seeded_noise_and_none(tmp_path):
    limits = Limits.read(_write(tmp_path, ""))
    assert limits == Limits()
    limits.check_run(tiny_config(noise_seed=None, noise_multiplier=0.01))
    with pytest.raises(ClientRefused, match="min_noise_multiplier = unset"):
        limits.check_run(tiny_config(noise_seed=None, noise_multiplier=0.0))
    with pytest.raises(ClientRefused, match="allow_seeded_noise"):
        limits.check_run(tiny_config(noise_seed=7))


ALONE = "give client_epsilon, delta and relation together"
SAID = {  # what is wrong with a file, by what must be said
    "max_batch_size = ": ("0", "1.5", "true", '"32"'),
    "min_noise_multiplier = ": ("-1.0", "inf", "nan"),
    "clip_bound = ": ("0.0", '""'),
    "image_size = ": ("-28",),
    "max_fakes = ": ("false",),
    "allow_seeded_noise = ": ("1",),
    "allow_groups = ": ("1", '"yes"'),
    "min_clients_per_group = ": ("0", "2.5"),
    "state_dir = ": ("5", '"absent"'),
}
WRONG = [(name + value, name) for name, values in SAID.items() for value in values] + [
    ('client_epsilon = 10\ndelta = 1.0\nrelation = "zero-out"', "delta = 1"),
    ('client_epsilon = 0\ndelta = 1e-5\nrelation = "zero-out"', "client_epsilon = 0"),
    ('client_epsilon = 10\ndelta = 1e-5\nrelation = "add"', "relation = 'add'"),
    ("max_batchsize = 32", "unknown max_batchsize; give client_epsilon, delta"),
    ("max_batch_size 32", "give a TOML file"),
    ("client_epsilon = 10", f"client_epsilon cannot .*; {ALONE}"),
    ('client_epsilon = 1\nrelation = "zero-out"', f"n, relation cannot .*; {ALONE}"),
    (None, r"No such file.*; give a TOML"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG)
def test_a_wrong_file_is_refused_by_its_name(tmp_path, text, problem):
    path = tmp_path / "limits.toml"
    if text:
        path.write_text(text)
    assert_refused(f"limits.toml: .*{problem}", Limits.read, path)


# ------------------------------------------------------------------ what is refused

# B = 4, sigma = 0.5, C = 1, 16 x 16, 1 channel, 3 classes, 8 fakes.
HOLDS = {
    "max_batch_size": 4,
    "min_noise_multiplier": 0.5,
    "clip_bound": 1.0,
    "image_size": 16,
    "image_channels": 1,
    "num_classes": 3,
    "max_fakes": 8,
}
FAILS = {
    "max_batch_size": (3, "batch_size = 4"),
    "min_noise_multiplier": (0.5001, "noise_multiplier = 0.5"),
    "clip_bound": (1.001, "clip_bound = 1.0"),
    "image_size": (28, "image_size = 16"),
    "image_channels": (3, "image_channels = 1"),
    "num_classes": (10, "num_classes = 3"),
    "max_fakes": (7, "fakes_sent = 8"),
}


def _config(**settings: object) -> RunConfig:
    return tiny_config(**{"noise_seed": None} | settings)


def test_a_run_at_the_limits_is_accepted():
    Limits(**HOLDS).check_run(_config())


@pytest.mark.parametrize("name", FAILS)
def test_a_run_beyond_a_limit_is_refused(name):
    limit, setting = FAILS[name]
    limits = Limits(**HOLDS | {name: limit})
    words = rf"{setting}: .* limit {name} = {limit} forbids it; give "
    with pytest.raises(ClientRefused, match=words) as refused:
        limits.check_run(_config())
    assert refused.value.setting == name


def test_one_release_costs_what_the_analysis_says():
    # privacy.md: z = sigma / sqrt(B); 1.07 and 32 are the paper's.
    assert release_cost(1.07, 32) == pytest.approx(32 / 1.07**2, rel=1e-12)
    assert release_cost(0.0, 32) == float("inf")


@pytest.mark.parametrize(("relation", "factor"), [("replace-one", 1), ("zero-out", 2)])
def test_the_largest_count_is_that_of_the_epsilon(relation, factor):
    # privacy.md: epsilon 10 at 1e-5 is mu = 2.0004; zero-out halves a release's mu.
    limits = Limits(client_epsilon=10.0, delta=1e-5, relation=relation)
    assert limits.most_mu_squared == pytest.approx((factor * 2.0004) ** 2, rel=1e-4)
    assert Limits().most_mu_squared == float("inf")


def test_an_epsilon_without_room_for_one_release_refuses_the_run():
    one = epsilon_from_mu(release_cost(0.5, 4) ** 0.5, 1e-5)
    Limits(client_epsilon=1.01 * one).check_run(_config())
    for room, noise in ((0.99 * one, 0.5), (1e6, 0.0)):
        config = _config(noise_multiplier=noise)
        words = f"noise_multiplier = {noise:g}"
        assert_refused(words, Limits(client_epsilon=room).check_run, config)


# ------------------------------------------------------------------ groups of clients

TWELVE = {"noise_seed": None}  # clients of a node, so three in each of four groups
GROUPED = Limits(allow_embeddings=True, allow_groups=True, min_clients_per_group=3)


def test_a_client_compares_groups_only_if_its_file_says_so():
    of_one = tiny_config(**TWELVE, cohorts="own.csv", cohort_value="v1")
    alone = dataclasses.replace(GROUPED, allow_one_cohort=True)
    runs = {
        "allow_groups": [(of_nodes(**TWELVE), "phases")],
        "allow_one_cohort": [(of_one, "cohort_value")],
    }
    runs["allow_groups"].append((of_cohorts("own.csv", **TWELVE), "phases"))
    for key, asked in runs.items():
        limits = dataclasses.replace(alone, **{key: False})
        for config, setting in asked:
            alone.check_run(config)
            words = rf"{setting} = .*limit {key} = False.*; give .*{key} = true"
            with pytest.raises(ClientRefused, match=words) as refused:
                limits.check_run(config)
            assert refused.value.setting == key
    # Nothing of groups is asked of a run that has none.
    Limits().check_run(tiny_config(**TWELVE))


@pytest.mark.parametrize(
    "hostile",
    [
        {"clients_per_group": 2},
        {"node_sizes": "16,8"},
        {"groups": 6},
        {"clients_per_node": 8},
    ],
)
def test_a_server_that_asks_for_smaller_groups_of_a_node_is_refused(hostile):
    """By what is public of every node: the size that the settings give its groups."""
    with pytest.raises(ClientRefused, match="min_clients_per_group = 3") as refused:
        GROUPED.check_run(of_nodes(**TWELVE, **hostile))
    assert refused.value.setting == "min_clients_per_group"
    Limits(allow_embeddings=True, allow_groups=True, min_clients_per_group=2).check_run(
        of_nodes(**TWELVE, **hostile)
    )


def test_a_client_that_says_nothing_permits_no_group_of_fewer_than_five():
    assert Limits().min_clients_per_group == 5
    limits = Limits(allow_embeddings=True, allow_groups=True)
    with pytest.raises(ClientRefused, match="min_clients_per_group = 5"):
        limits.check_run(of_nodes(**TWELVE))
    limits.check_run(of_nodes(**TWELVE, num_clients=40, clients_per_node=20))


def test_a_run_on_one_cohort_of_few_clients_is_refused():
    limits = dataclasses.replace(GROUPED, num_clients=None)
    limits.check_num_clients(3, "v1")
    limits.check_num_clients(2, None)  # of everybody, as of any run
    with pytest.raises(
        ClientRefused, match=r"cohort_value = v1: .* 2 clients"
    ) as refused:
        limits.check_num_clients(2, "v1")
    assert refused.value.setting == "min_clients_per_group"
