"""What clips otherwise, sums otherwise or has other terms is refuted."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch

import planted
from fedgs.audit.crafted_releases import audited
from fedgs.audit.finding import HOLDS, REFUTED
from fedgs.audit.mechanism import audit_rounds
from fedgs.audit.worst_case import check_clipping, check_mechanism, check_terms
from fedgs.mechanism import sanitizer
from fedgs.mechanism.noise import NoiseStream
from fedgs.round import answer as rounds
from fedgs.round.run import new_event
from planted import of_method
from tiny import FULL_PARTICIPATION, MOMENTS, WITH_RELEASES, tiny_config

INTEGERS = FULL_PARTICIPATION | {"secure_aggregation": True}


@pytest.fixture
def given(monkeypatch):
    """Makes an object of a class the method of a run."""
    return partial(planted.given, monkeypatch)


def event_of(config, round=1):
    return new_event(config, round, "all", 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("settings", [FULL_PARTICIPATION, INTEGERS], ids=["", "int"])
def test_clipping_of_samples_holds(settings, channels):
    config = tiny_config(**settings, image_channels=channels)
    check = check_clipping(audited(config), event_of(config))
    assert (check.verdict, check.check) == (HOLDS, "clipping, gradient")


@pytest.mark.parametrize("name", planted.CLIPS)
@pytest.mark.parametrize("settings", [FULL_PARTICIPATION, INTEGERS], ids=["", "int"])
def test_every_other_clipping_is_refuted(name, settings, monkeypatch):
    monkeypatch.setattr(rounds, "clip", planted.by(planted.CLIPS[name]))
    config = tiny_config(**settings, image_channels=3)
    check = check_clipping(audited(config), event_of(config))
    # Integers that are too long become zero, which is no leak, but not the mechanism.
    assert check.verdict == REFUTED
    if settings is FULL_PARTICIPATION:
        assert check.found > 0.1


@pytest.mark.parametrize("name", ["row", "RMS", "coordinate"])
@pytest.mark.parametrize("settings", [MOMENTS, {"method": "fedavg-gan"}], ids=str)
def test_so_it_is_for_embeddings_and_updates(name, settings, monkeypatch):
    if "method" in settings:
        config, one_row = of_method(**settings), True
    else:
        config, one_row = tiny_config(**settings), False
    event = event_of(config, 3 if settings is MOMENTS else 1)
    assert check_clipping(audited(config), event).verdict == HOLDS
    monkeypatch.setattr(rounds, "clip", planted.by(planted.CLIPS[name]))
    expected = HOLDS if one_row and name == "row" else REFUTED
    assert check_clipping(audited(config), event).verdict == expected


def test_a_release_that_keeps_what_is_not_finite_is_refuted(monkeypatch):
    def clip(grads, clip_bound):
        clipped = sanitizer.clip(grads, clip_bound)
        clipped.values[~grads.values.isfinite()] = torch.inf
        return clipped

    monkeypatch.setattr(rounds, "clip", clip)
    config = tiny_config(**FULL_PARTICIPATION)
    assert check_clipping(audited(config), event_of(config)).verdict == REFUTED


@pytest.mark.parametrize("who", ["first client", "last client", "first part"])
def test_a_sum_that_counts_some_clients_otherwise_is_refuted(who, monkeypatch):
    def sanitize(coming, *others):
        parts = list(coming)
        if who == "first client":
            parts[0].values[0] *= 2
        elif who == "last client":
            parts[-1].values[-1] *= 0
        else:
            again = sanitizer.ClippedGradients(
                parts[0].values, parts[0].clip_bound, sanitizer._MADE_BY_SANITIZER
            )
            parts = [*parts, again]
        return sanitizer.sanitize(parts, *others)

    monkeypatch.setattr(rounds, "sanitize", sanitize)
    config = tiny_config(**FULL_PARTICIPATION)
    assert check_clipping(audited(config), event_of(config)).verdict == REFUTED


@pytest.fixture
def seeded(monkeypatch):
    """Noise of the operating system becomes reproducible."""
    seeds = itertools.count()

    def make(noise_seed, *rest):
        seed = next(seeds) if noise_seed is None else noise_seed
        return NoiseStream(seed, *rest)

    monkeypatch.setattr(rounds, "NoiseStream", make)


@pytest.mark.parametrize(
    "settings",
    [FULL_PARTICIPATION, MOMENTS, {"method": "fedavg-gan"}],
    ids=["gradient", "embedding", "update"],
)
@pytest.mark.parametrize("name", ["row", "RMS", "largest number"])
def test_the_attack_with_whole_releases_refutes_it_too(
    settings, name, seeded, monkeypatch
):
    """Rounds of one coordinate are clipped as they should be."""
    make = of_method if "method" in settings else tiny_config
    config = make(**settings | {"noise_seed": "", "engine": "flower"})
    draws = 4e7
    (honest,) = {f.verdict for f in audit_rounds(config, [], 2000, draws)}
    assert honest == HOLDS
    monkeypatch.setattr(rounds, "clip", planted.by(planted.CLIPS[name]))
    found = audit_rounds(config, [], 2000, draws)
    found = [f for f in found if f.attack.startswith("A takes part")]
    if (name, settings.get("method")) == ("row", "fedavg-gan"):
        return  # an update is one row
    assert {finding.verdict for finding in found} == {REFUTED}
    for finding in found:
        details = finding.details
        assert 1 <= details["whole_releases"] <= 2000
        assert details["mu_of_whole_releases"] == details["mu_lower_bound"]


# ------------------------------------------------------------------ terms


def test_terms_that_change_are_refuted_and_those_of_a_round_are_not(given):
    for kind, expected in (
        (planted.Honest, HOLDS),
        (planted.Falls, HOLDS),
        (planted.Alternates, REFUTED),
        (planted.ChangesItsMind, REFUTED),
    ):
        config = given(kind)
        events = [new_event(config, round, "all", 1) for round in (1, 2, 3)]
        check = check_terms(config, events)
        assert check.verdict == expected, kind
        assert check.tested.startswith("3 rounds: ")


@pytest.mark.parametrize(
    "change",
    [
        {"noise_std": 0.9},
        {"clip_bound": 0.5},
        {"batch_size": 3},
        {"release": "embedding", "batch_size": 1},
        {"kind": "discrete"},
    ],
    ids=str,
)
def test_terms_that_are_not_the_ledgers_are_refuted(change):
    config = tiny_config(**FULL_PARTICIPATION)
    event = event_of(config)
    assert check_terms(config, [event]).verdict == HOLDS
    changed = dataclasses.replace(event, **change)
    assert check_terms(config, [event, changed]).found == 1


def test_every_kind_of_release_is_checked():
    config = audited(tiny_config(**WITH_RELEASES, noise_seed=None))
    events = [event_of(config, round) for round in (1, 2, 3)]
    found = [check.check for check in check_mechanism(config, events)]
    kinds = ("embedding", "gradient")
    of_kinds = [f"{name}, {kind}" for kind in kinds for name in ("clipping", "noise")]
    assert sorted(found) == sorted(["terms", *of_kinds])
    silent = audited(tiny_config(**FULL_PARTICIPATION, noise_multiplier=0.0))
    found = [check.check for check in check_mechanism(silent, [])]
    assert found == ["terms", "clipping, gradient"]  # no noise is claimed
