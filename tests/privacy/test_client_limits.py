"""What a client agrees to: its file, what it refuses, and that nothing happens then."""

import dataclasses
from pathlib import Path

import pytest

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.federation.round import draw_fakes, new_server
from fedgs.privacy.client_limits import ClientRefused, Limits, release_cost
from fedgs.privacy.gaussian import epsilon_from_mu
from refusals import assert_refused
from tiny import tiny_config

WHOLE = """
client_epsilon = 10
delta = 1e-5
relation = "zero-out"
max_batch_size = 32
min_noise_multiplier = 0.25
clip_bound = 1.0
image_size = 16
image_channels = 1
num_classes = 3
num_clients = 2
max_fakes = 160
allow_seeded_noise = true
allow_embeddings = true
allow_updates = true
min_honest_nodes = 5
state_dir = "counts"
"""
EPSILON = 'client_epsilon = {}\ndelta = 1e-5\nrelation = "replace-one"\n'


def _write(folder: Path, text: str) -> Path:
    path = folder / "limits.toml"
    path.write_text(text)
    return path


# ------------------------------------------------------------------ the file


def test_every_key_of_the_file_is_read(tmp_path, monkeypatch):
    (tmp_path / "counts").mkdir()
    path = _write(tmp_path, WHOLE)
    monkeypatch.chdir("/")  # state_dir is relative to the file
    assert Limits.read(path) == Limits(
        client_epsilon=10,
        delta=1e-5,
        relation="zero-out",
        max_batch_size=32,
        min_noise_multiplier=0.25,
        clip_bound=1.0,
        image_size=16,
        image_channels=1,
        num_classes=3,
        num_clients=2,
        max_fakes=160,
        allow_seeded_noise=True,
        allow_embeddings=True,
        allow_updates=True,
        min_honest_nodes=5,
        state_dir=tmp_path / "counts",
    )
    keys = {line.split(" =")[0] for line in WHOLE.split("\n") if line}
    assert keys == {spec.name for spec in dataclasses.fields(Limits)}


def test_an_empty_file_limits_nothing_but_seeded_noise_and_none(tmp_path):
    limits = Limits.read(_write(tmp_path, ""))
    assert limits == Limits()
    limits.check_run(tiny_config(noise_seed=None, noise_multiplier=0.01))
    with pytest.raises(ClientRefused, match="min_noise_multiplier = unset"):
        limits.check_run(tiny_config(noise_seed=None, noise_multiplier=0.0))
    with pytest.raises(ClientRefused, match="allow_seeded_noise"):
        limits.check_run(tiny_config(noise_seed=7))


@pytest.mark.parametrize(
    "line",
    [
        "max_batch_size = 0",
        "max_batch_size = 1.5",
        "max_batch_size = true",
        'max_batch_size = "32"',
        "min_noise_multiplier = -1.0",
        "min_noise_multiplier = inf",
        "min_noise_multiplier = nan",
        "clip_bound = 0.0",
        'clip_bound = ""',
        "image_size = -28",
        "image_channels = 0",
        "num_classes = 0",
        "num_clients = 0",
        "max_fakes = false",
        "allow_seeded_noise = 1",
        "state_dir = 5",
        'state_dir = "absent"',
        'client_epsilon = 10\ndelta = 1.0\nrelation = "zero-out"',
        'client_epsilon = 10\ndelta = 1\nrelation = "zero-out"',
        'client_epsilon = 0\ndelta = 1e-5\nrelation = "zero-out"',
        'client_epsilon = 10\ndelta = 1e-5\nrelation = "add-or-remove"',
    ],
)
def test_a_wrong_value_is_refused_by_its_name(tmp_path, line):
    path = _write(tmp_path, line)
    names = "|".join(part.split(" =")[0] for part in line.split("\n"))
    assert_refused(rf"limits.toml: ({names}) = .*; |: ({names}) =", Limits.read, path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_batchsize = 32", "unknown max_batchsize; give client_epsilon, delta"),
        ("max_batch_size 32", "give a TOML file"),
        ("client_epsilon = 10", "client_epsilon alone; give client_epsilon, delta and"),
        ("delta = 1e-5", "delta alone"),
        ('client_epsilon = 1\nrelation = "zero-out"', "client_epsilon, relation alone"),
    ],
)
def test_a_file_with_another_content_is_refused(tmp_path, text, problem):
    assert_refused(problem, Limits.read, _write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"absent.toml: .*No such file.*; give a TOML"):
        Limits.read(tmp_path / "absent.toml")


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


def _fakes(config: RunConfig) -> tuple[tuple[int, ...], list[int]]:
    request = draw_fakes(config, new_server(config))[0]
    return tuple(request.images.shape), request.labels.tolist()


def test_a_run_at_the_limits_is_accepted():
    config = _config()
    Limits(**HOLDS).check_run(config)
    Limits(**HOLDS).check_fakes(*_fakes(config))


@pytest.mark.parametrize("name", FAILS)
def test_a_run_beyond_a_limit_is_refused(name):
    limit, setting = FAILS[name]
    with pytest.raises(
        ClientRefused, match=rf"{setting}: outside .* {name} = {limit}; give "
    ) as refused:
        Limits(**HOLDS | {name: limit}).check_run(_config())
    assert refused.value.setting == name


@pytest.mark.parametrize("name", ["image_size", "image_channels", "max_fakes"])
def test_fakes_outside_the_limits_are_refused(name):
    limits = Limits(**HOLDS | {name: FAILS[name][0]})
    with pytest.raises(ClientRefused, match=name) as refused:
        limits.check_fakes(*_fakes(_config()))
    assert refused.value.setting == name


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_outside_the_limits_are_refused(label):
    shape, labels = _fakes(_config())
    labels[2] = label
    with pytest.raises(ClientRefused, match=r"labels of the fakes outside \[0, 3\)"):
        Limits(**HOLDS).check_fakes(shape, labels)


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


@pytest.mark.parametrize("room", [0.99, 1.01])
def test_an_epsilon_without_room_for_one_release_refuses_the_run(room):
    one = epsilon_from_mu(release_cost(0.5, 4) ** 0.5, 1e-5)
    limits = Limits(client_epsilon=room * one)
    if room > 1:
        limits.check_run(_config())
    else:
        with pytest.raises(ClientRefused, match=r"noise_multiplier = 0.5: .* single"):
            limits.check_run(_config())


def test_no_noise_is_refused_by_any_epsilon():
    with pytest.raises(ClientRefused, match="noise_multiplier = 0"):
        Limits(client_epsilon=1e6).check_run(_config(noise_multiplier=0.0))
