"""Attack A: true claims hold, broken mechanisms and the paper's claim do not."""

import dataclasses
import itertools

import numpy as np
import pytest

from fedgs.audit import mechanism as mechanism_module
from fedgs.audit.crafted_releases import NUMBERS_AT_ONCE, node_scores
from fedgs.audit.finding import (
    CONFIDENCE,
    HOLDS,
    NO_CLAIM,
    OF_BOUNDS,
    REFUTED,
    Finding,
)
from fedgs.audit.mechanism import (
    CHOICE_SHARE,
    asked,
    audit_round,
    bound_epsilon,
    claims_of_one_round,
    recorded_plan,
    weakest_rounds,
)
from fedgs.config.run_config import GsWganConfig, RunConfig
from fedgs.mechanism import sanitizer
from fedgs.mechanism.noise import NoiseStream
from fedgs.methods.schedule import select
from fedgs.privacy.accountant import statements
from fedgs.privacy.amplification import PLD_THEOREM
from fedgs.privacy.gaussian import binomial_law
from fedgs.privacy.oracle import autodp_epsilon
from fedgs.privacy.plan import ADVERSARY_COLUMNS, Plan, noise_ratio
from fedgs.round import answer as rounds
from fedgs.round.run import new_event
from tiny import FULL_PARTICIPATION, WITH_RELEASES, record_calls, tiny_config

DELTA = 1e-5
TRIALS = 20_000
MECHANISMS = {
    "full participation": {**FULL_PARTICIPATION, "noise_multiplier": 1.2},
    "one of six": {"clients_per_round": 1, "noise_multiplier": 1.07},
}
each_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


def config_of(mechanism: str, **settings: object) -> RunConfig:
    defaults = {"engine": "flower", "noise_seed": None}
    return tiny_config(**defaults | MECHANISMS[mechanism] | settings)


def audited(config: RunConfig, plan: Plan | None = None, **settings) -> list[Finding]:
    claims = claims_of_one_round(plan or Plan.from_config(config), DELTA)
    return audit_round(config, claims, DELTA, TRIALS, **settings)


def verdicts(findings: list[Finding]) -> set[str]:
    return {finding.verdict for finding in findings}


@pytest.fixture(autouse=True)
def _same_noise_every_time(monkeypatch):
    """Noise of the operating system becomes reproducible: no test fails by chance."""
    seeds = itertools.count()

    def make(noise_seed, *rest):
        seed = next(seeds) if noise_seed is None else noise_seed
        return NoiseStream(seed, *rest)

    # Of the directions, too, which differ from one audit to the next.
    draws = itertools.count()
    default_rng = np.random.default_rng

    def seeded(seed=None):
        return default_rng(next(draws) if seed is None else seed)

    monkeypatch.setattr(rounds, "NoiseStream", make)
    monkeypatch.setattr(mechanism_module, "secret", lambda: "5")
    monkeypatch.setattr(np.random, "default_rng", seeded)


@pytest.fixture
def no_clipping(monkeypatch):
    """A sanitizer that says it clips."""

    def keep(grads, clip_bound):
        made_by = sanitizer._MADE_BY_SANITIZER
        return sanitizer.ClippedGradients(grads.values.double(), clip_bound, made_by)

    monkeypatch.setattr(rounds, "clip", keep)


def scale_noise(monkeypatch, factor: float) -> None:
    normal = NoiseStream.normal

    def scaled(self, shape, noise_std):
        return normal(self, shape, factor * noise_std)

    monkeypatch.setattr(NoiseStream, "normal", scaled)


@each_mechanism
def test_true_claims_hold_and_are_nearly_met(mechanism, monkeypatch):
    calls = record_calls(monkeypatch, rounds, "sanitize")
    config = config_of(mechanism)
    findings = audited(config)
    assert verdicts(findings) == {HOLDS}
    assert {f.adversary for f in findings} == {"release", "server", "secagg"}
    gaussian = [f.details for f in findings if "mu" in f.details]
    assert len(gaussian) == 6
    for details in gaussian:
        assert 0.75 * details["mu"] < details["mu_lower_bound"] < details["mu"]
    # Every trial runs the real sanitizer with the run's noise.
    assert {call[1] for call in calls} == {config.noise_std}
    plan = dataclasses.replace(Plan.from_config(config), num_rounds=1)
    expected = {(s.adversary, s.relation): s.epsilon for s in statements(plan, DELTA)}
    drawn = [f for f in findings if f.attack == "A drawn"]
    assert len(drawn) == (6 if mechanism == "one of six" else 0)
    for finding in drawn:  # by the mixture of one round
        assert finding.epsilon == expected[finding.adversary, finding.relation]
        assert 0.5 < finding.lower_bound < finding.epsilon


def test_true_claims_of_many_audits_hold():
    """Noise and draws differ from one to the next."""
    config = config_of("full participation", noise_multiplier=2.0)
    claims = claims_of_one_round(Plan.from_config(config), DELTA)
    found = [audit_round(config, claims, DELTA, 500, 2e6) for _ in range(20)]
    assert set().union(*map(verdicts, found)) == {HOLDS}
    bounds = {finding.details["mu_of_whole_releases"] for (finding, *_) in found}
    assert len(bounds) > 1


@pytest.mark.parametrize(
    ("mechanism", "factor"), [*zip(MECHANISMS, (None, 0.9), strict=True)]
)
def test_a_sanitizer_that_does_not_clip_or_adds_less_noise_is_caught(
    mechanism, factor, request, monkeypatch
):
    if factor is None:
        request.getfixturevalue("no_clipping")
    else:
        scale_noise(monkeypatch, factor)
    found = audited(config_of(mechanism))
    caught = {f.adversary for f in found if "mu" in f.details and f.verdict == REFUTED}
    assert caught >= ({"server"} if factor == 0.9 else {f.adversary for f in found})


AMPLIFIED = {"amplification": True, "discriminator_training": "frozen"}


def test_amplified_claim_holds_unless_there_is_less_noise(monkeypatch):
    config = config_of("one of six", noise_multiplier=2.0, **AMPLIFIED)
    claims = claims_of_one_round(Plan.from_config(config), DELTA)
    claims = [claim for claim in claims if claim.theorem == PLD_THEOREM]
    findings = audit_round(config, claims, DELTA, TRIALS)
    assert {f.relation for f in findings} == {"replace-one", "zero-out"}
    assert {f.attack for f in findings} == {"A drawn, unseen"}
    for finding in findings:
        assert 0 < finding.lower_bound < finding.epsilon
    scale_noise(monkeypatch, 0.2)
    assert verdicts(audit_round(config, claims, DELTA, TRIALS)) == {REFUTED}


def test_less_noise_than_the_ledger_records_is_caught():
    honest = config_of("full participation")
    event = new_event(honest, 1, select(honest, 1), 1)
    config = dataclasses.replace(honest, noise_multiplier=0.6)
    plan = recorded_plan(config, [event])
    assert plan.noise_multiplier == honest.noise_multiplier
    assert REFUTED in verdicts(audited(config, plan, max_draws=4 * 3 * 6000))
    events = [dataclasses.replace(event, noise_std=std) for std in (6.0, 3.0, 5.0)]
    assert recorded_plan(config, events).noise_multiplier == 1.5  # the least decides
    assert recorded_plan(config, []) == Plan.from_config(config)


def test_without_noise_there_is_nothing_to_refute():
    config = config_of("full participation", noise_multiplier=0.0)
    claims = claims_of_one_round(Plan.from_config(config), DELTA)
    assert [c.shares for c in claims if c.adversary == "secagg"] == [3, 3]
    findings = audit_round(config, claims, DELTA, 1000, max_draws=4 * 3 * 600)
    assert verdicts(findings) == {NO_CLAIM}
    assert all(finding.lower_bound > 2 for finding in findings)
    assert {f.details["trials"] for f in findings if f.adversary == "server"} == {500}


def test_integers_of_a_secure_aggregation_are_attacked_with_every_share_of_noise(
    monkeypatch,
):
    own = {"secure_aggregation": True, "clients_per_node": 2}  # three nodes
    config = config_of("full participation", **own)
    findings = audited(config)
    assert verdicts(findings) == {HOLDS}
    mu = {(f.adversary, f.relation): f.details["mu_lower_bound"] for f in findings}
    assert {adversary for adversary, _ in mu} == {*ADVERSARY_COLUMNS}
    for finding in findings:
        assert finding.details["mu_lower_bound"] > 0.75 * finding.details["mu"]
    # Three nodes' noise protects from the server, as long as masking does not fail.
    ratio = mu["unmasked", "replace-one"] / mu["server", "replace-one"]
    assert ratio == pytest.approx(3**0.5, rel=0.2)
    discrete = NoiseStream.discrete

    def half(self, *given):
        return discrete(self, *given) // 2

    monkeypatch.setattr(NoiseStream, "discrete", half)
    assert verdicts(audited(config)) == {REFUTED}


@each_mechanism
def test_bounds_share_the_chance_that_one_of_them_is_wrong(mechanism, monkeypatch):
    """A row that takes the best of three bounds pays for all of them."""
    calls = record_calls(monkeypatch, mechanism_module.bounds, "error_rates")
    means = record_calls(monkeypatch, mechanism_module.bounds, "mu_of_means")
    config = config_of(mechanism)
    claims = claims_of_one_round(Plan.from_config(config), DELTA)
    audit_round(config, claims, DELTA, 100)
    # Of an array of thresholds one is chosen: no bound, on other trials.
    alphas = [alpha for *_, chosen, alpha in calls if np.ndim(chosen) == 0]
    gaussian = sum(claim.mu is not None for claim in claims)
    assert len(alphas) == len(claims) + gaussian > len(claims)
    alphas += [alpha for *_, alpha in means]  # one for each direction
    assert len(means) == 4 * gaussian
    assert sum(alphas) == pytest.approx(OF_BOUNDS)


def test_scores_are_the_clipped_gradient_over_all_fakes():
    config = config_of("one of six", noise_multiplier=0.0, clip_bound=0.5)
    found = node_scores(config, np.array([1.0, -1.0, 0.0]))
    assert found.tolist() == [4 * 0.5, -4 * 0.5, 0.0]
    config = config_of("full participation", noise_multiplier=0.0)  # two on the node
    assert node_scores(config, np.array([1.0, -1.0])).tolist() == [0.0, -8.0]


def test_seeded_noise_is_not_reused_between_trials():
    config = config_of("one of six", noise_seed=7)
    size = NUMBERS_AT_ONCE // config.batch_size  # trials of one release
    first, second = np.split(node_scores(config, np.zeros(2 * size)), 2)
    assert (first != second).mean() > 0.99


def test_participants_are_drawn_by_the_run():
    config = config_of("one of six")
    expected = [0 in select(config, round) for round in range(1, 201)]
    assert asked(config, 200).tolist() == expected
    assert 10 < sum(expected) < 60


def test_one_round_refutes_the_published_composition():
    """The adversary sees the release only; who is drawn instead answers -C e.

    The bound is log(1e-3 / 3.7e-5): a client is drawn once in 1000 rounds, and 100,000
    trials without an error bound a rate by 3.7e-5.
    """
    num_clients, noise_multiplier, batch_size, trials = 1000, 1.07, 32, 100_000
    rate = 1 / num_clients
    claimed = autodp_epsilon(noise_multiplier, batch_size, rate, DELTA)
    drawn = {"num_clients": num_clients, "clients_per_round": 1, "num_classes": 10}
    noise = {"noise_multiplier": noise_multiplier, "batch_size": batch_size}
    images = {"image_size": 28, "image_channels": 1}
    config = GsWganConfig(**drawn, **noise, **images, seed=0)
    total = int(trials * (1 + CHOICE_SHARE))
    is_asked = np.random.default_rng(0).random(total) < rate
    inside = node_scores(config, np.where(is_asked, 1.0, -1.0))
    outside = node_scores(config, np.full(total, -1.0))
    bound, _ = bound_epsilon(outside, inside, total - trials, DELTA, 1 - CONFIDENCE)
    assert claimed == pytest.approx(0.78, abs=0.005)  # by the paper's accountant
    assert claimed < 0.8 < bound < 3.4
    z = noise_ratio(noise_multiplier, batch_size, "replace-one", 1)
    assert bound < binomial_law({1: 1}, rate, z).epsilon(DELTA) < 25.5  # what holds


# ------------------------------------------------------------------ mean features


def with_releases(**settings: object) -> RunConfig:
    defaults = {"engine": "flower", "noise_seed": None, "noise_multiplier": 0.5}
    return tiny_config(**WITH_RELEASES | defaults | settings)


def findings_of(config: RunConfig, round: int, recorded=None) -> list[Finding]:
    event = new_event(recorded or config, round, "all", 1)
    claims = claims_of_one_round(recorded_plan(config, [event]), DELTA)
    return audit_round(config, claims, DELTA, TRIALS, round=round)


def test_the_claims_of_an_embedding_hold_and_are_nearly_met(request):
    """One client whose embedding has norm C, against zero or its negative."""
    findings = findings_of(with_releases(), round=2)
    assert verdicts(findings) == {HOLDS}
    assert {f.attack for f in findings} == {"A takes part, embedding"}
    assert len(findings) == 6
    for finding in findings:
        nodes = 1 if finding.adversary == "server" else 3
        factor = {"replace-one": 1.0, "zero-out": 0.5}[finding.relation]
        mu = factor * 2**0.5 / 0.5 / nodes**0.5  # share 2, noise_multiplier 0.5
        assert finding.details["mu"] == pytest.approx(mu)
        assert 0.75 * mu < finding.details["mu_lower_bound"] < mu
    louder = with_releases(phases="means:0.5,scatter:8,gs-wgan")
    assert REFUTED in verdicts(findings_of(louder, 2, recorded=with_releases()))
    request.getfixturevalue("no_clipping")
    assert REFUTED in verdicts(findings_of(with_releases(), round=1))


def test_the_weakest_round_of_each_kind_of_release_is_attacked():
    config = with_releases(num_rounds=5)
    assert weakest_rounds(config, []) == {"embedding": 2, "gradient": 3}
    events = [new_event(config, round, "all", 1) for round in (1, 2)]
    assert weakest_rounds(config, events) == {"embedding": 2}
    louder = dataclasses.replace(events[0], noise_std=0.5)
    assert weakest_rounds(config, [louder, events[1]]) == {"embedding": 1}
