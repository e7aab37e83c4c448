"""Attack A: true claims hold, broken mechanisms and the paper's claim do not."""

import dataclasses
import itertools
import secrets

import numpy as np
import pytest

from fedgs.audit import mechanism as mechanism_module
from fedgs.audit.finding import CONFIDENCE, HOLDS, NO_CLAIM, REFUTED, Finding
from fedgs.audit.mechanism import (
    _FAKES_AT_ONCE,
    CHOICE_SHARE,
    MAX_DRAWS,
    Claim,
    _Simulation,
    asked,
    audit_round,
    bound_epsilon,
    claims_of_one_round,
    node_scores,
    recorded_plan,
    weakest_rounds,
)
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.federation import round as rounds
from fedgs.federation.round import select
from fedgs.federation.training import new_event
from fedgs.mechanism import sanitizer
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.accounting import statements
from fedgs.privacy.amplification import PLD_THEOREM
from fedgs.privacy.gaussian import binomial_epsilon
from fedgs.privacy.oracle import autodp_epsilon
from fedgs.privacy.plan import COLUMNS, Plan, noise_ratio
from tiny import FULL_PARTICIPATION, STAGED, record_calls, tiny_config

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

    monkeypatch.setattr(rounds, "NoiseStream", make)
    monkeypatch.setattr(secrets, "randbelow", lambda bound: 5)


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
def test_true_claims_hold_and_are_nearly_met(mechanism):
    findings = audited(config_of(mechanism))
    assert verdicts(findings) == {HOLDS}
    assert {f.adversary for f in findings} == {"release", "server", "secagg"}
    gaussian = [f.details for f in findings if "mu" in f.details]
    assert len(gaussian) == 6
    for details in gaussian:
        assert 0.75 * details["mu"] < details["mu_lower_bound"] < details["mu"]


def test_integers_of_a_secure_aggregation_are_attacked_with_every_share_of_noise(
    monkeypatch,
):
    own = {"secure_aggregation": True, "clients_per_node": 2}  # three nodes
    config = config_of("full participation", **own)
    findings = audited(config)
    assert verdicts(findings) == {HOLDS}
    mu = {(f.adversary, f.relation): f.details["mu_lower_bound"] for f in findings}
    assert {adversary for adversary, _ in mu} == {*COLUMNS}
    for finding in findings:
        assert finding.details["mu_lower_bound"] > 0.75 * finding.details["mu"]
    # Three nodes' noise protects from the server, as long as masking does not fail.
    ratio = mu["unmasked", "replace-one"] / mu["server", "replace-one"]
    assert ratio == pytest.approx(3**0.5, rel=0.2)
    discrete = NoiseStream.discrete
    monkeypatch.setattr(
        NoiseStream, "discrete", lambda self, *args: discrete(self, *args) // 2
    )
    assert verdicts(audited(config)) == {REFUTED}


@each_mechanism
def test_bounds_share_the_chance_that_one_of_them_is_wrong(mechanism, monkeypatch):
    """A row that takes the better of two bounds pays for both."""
    calls = record_calls(monkeypatch, mechanism_module.bounds, "error_rates")
    config = config_of(mechanism)
    claims = claims_of_one_round(Plan.from_config(config), DELTA)
    audit_round(config, claims, DELTA, 100)
    # Of an array of thresholds one is chosen: no bound, on other trials.
    alphas = [alpha for *_, chosen, alpha in calls if np.ndim(chosen) == 0]
    gaussian = sum(claim.mu is not None for claim in claims)
    assert len(alphas) == len(claims) + gaussian > len(claims)
    assert sum(alphas) == pytest.approx(1 - CONFIDENCE)


@each_mechanism
def test_sanitizer_that_does_not_clip_is_caught(mechanism, no_clipping):
    findings = audited(config_of(mechanism))
    assert {f.verdict for f in findings if "mu" in f.details} == {REFUTED}


@each_mechanism
@pytest.mark.parametrize("factor", [0.5, 0.9])
def test_too_little_noise_is_caught(mechanism, factor, monkeypatch):
    scale_noise(monkeypatch, factor)
    found = audited(config_of(mechanism))
    caught = {f.adversary for f in found if "mu" in f.details and f.verdict == REFUTED}
    assert caught >= ({"server"} if factor == 0.9 else {f.adversary for f in found})


def test_larger_noise_holds_by_far(monkeypatch):
    scale_noise(monkeypatch, 2.0)
    for finding in audited(config_of("full participation")):
        assert finding.verdict == HOLDS
        assert finding.details["mu_lower_bound"] < 0.55 * finding.details["mu"]


def test_less_noise_than_the_ledger_records_is_caught():
    honest = config_of("full participation")
    event = new_event(honest, 1, select(honest, 1), 1)
    config = dataclasses.replace(honest, noise_multiplier=0.6)
    plan = recorded_plan(config, [event])
    assert plan.noise_multiplier == honest.noise_multiplier
    assert REFUTED in verdicts(audited(config, plan))


def test_event_with_the_least_noise_decides_the_claim():
    config = config_of("full participation")
    event = new_event(config, 1, select(config, 1), 1)
    events = [dataclasses.replace(event, noise_std=std) for std in (6.0, 3.0, 5.0)]
    assert recorded_plan(config, events).noise_multiplier == 1.5
    assert recorded_plan(config, []) == Plan.from_config(config)


def test_every_trial_runs_the_real_sanitizer(monkeypatch):
    calls = record_calls(monkeypatch, rounds, "sanitize")
    config = config_of("full participation")
    node_scores(config, np.ones(70_000))
    values = sum(len(call[0][0].values[0]) for call in calls)
    assert values == 70_000 * config.batch_size
    assert {call[1] for call in calls} == {config.noise_std}


def test_scores_are_the_clipped_gradient_over_all_fakes():
    config = config_of("one of six", noise_multiplier=0.0, clip_bound=0.5)
    found = node_scores(config, np.array([1.0, -1.0, 0.0]))
    assert found.tolist() == [4 * 0.5, -4 * 0.5, 0.0]
    config = config_of("full participation", noise_multiplier=0.0)  # two on the node
    assert node_scores(config, np.array([1.0, -1.0])).tolist() == [0.0, -8.0]


def test_seeded_noise_is_not_reused_between_trials():
    config = config_of("one of six", noise_seed=7)
    size = _FAKES_AT_ONCE // config.batch_size  # trials of one release
    first, second = np.split(node_scores(config, np.zeros(2 * size)), 2)
    assert (first != second).mean() > 0.99


def test_participants_are_drawn_by_the_run():
    config = config_of("one of six")
    expected = [0 in select(config, round) for round in range(1, 201)]
    assert asked(config, 200).tolist() == expected
    assert 10 < sum(expected) < 60


def test_drawn_rows_claim_the_mixture_of_one_round():
    config = config_of("one of six")
    plan = dataclasses.replace(Plan.from_config(config), num_rounds=1)
    expected = {(s.adversary, s.relation): s.epsilon for s in statements(plan, DELTA)}
    drawn = [f for f in audited(config) if f.attack == "A drawn"]
    assert {(f.adversary, f.relation): f.epsilon for f in drawn} == expected
    for finding in drawn:
        assert 0.5 < finding.lower_bound < finding.epsilon


AMPLIFIED = {"amplification": True, "discriminator_training": "frozen"}


def amplified_findings() -> list[Finding]:
    config = config_of("one of six", noise_multiplier=2.0, **AMPLIFIED)
    return [f for f in audited(config) if f.theorem == PLD_THEOREM]


def test_amplified_claim_holds_for_frozen_discriminators():
    findings = amplified_findings()
    assert {f.relation for f in findings} == {"replace-one", "zero-out"}
    assert {f.attack for f in findings} == {"A drawn, unseen"}
    for finding in findings:
        assert 0 < finding.lower_bound < finding.epsilon


def test_unseen_draw_shows_the_release_of_somebody_else():
    config = config_of("one of six", noise_multiplier=0.0, **AMPLIFIED)
    claim = Claim("release", "zero-out", 1, 1.0, PLD_THEOREM, None, "hidden")
    simulation = _Simulation(config, [claim], 100, MAX_DRAWS, lambda text: None, 1)
    outside, inside = simulation.scores(claim)
    is_asked = asked(config, 100)
    full = config.batch_size * config.clip_bound
    assert set(inside[is_asked]) == {full}
    assert set(outside[is_asked]) == {0.0}
    assert set(inside[~is_asked]) == set(outside[~is_asked]) == {-full}


def test_amplified_claim_of_a_broken_mechanism_is_caught(monkeypatch):
    scale_noise(monkeypatch, 0.2)
    assert verdicts(amplified_findings()) == {REFUTED}


def test_colluding_nodes_take_their_noise_away():
    config = config_of("full participation")
    plan = Plan.from_config(config)
    all_three = claims_of_one_round(plan, DELTA)
    one_left = claims_of_one_round(plan, DELTA, colluding=2)
    assert [c.shares for c in all_three if c.adversary == "secagg"] == [3, 3]
    assert [c.shares for c in one_left if c.adversary == "secagg"] == [1, 1]
    assert verdicts(audit_round(config, one_left, DELTA, TRIALS)) == {HOLDS}


@pytest.mark.parametrize("colluding", [0, 3])
def test_without_noise_there_is_nothing_to_refute(colluding):
    config = config_of("full participation", noise_multiplier=0.0)
    claims = claims_of_one_round(Plan.from_config(config), DELTA, colluding)
    findings = audit_round(config, claims, DELTA, 1000)
    assert verdicts(findings) == {NO_CLAIM}
    assert all(finding.lower_bound > 4 for finding in findings)


def test_draws_limit_the_trials():
    config = config_of("full participation")
    findings = audited(config, max_draws=4 * 3 * 6000)
    assert {f.details["trials"] for f in findings if f.adversary == "server"} == {5000}


def test_local_run_has_the_release_adversary_only():
    findings = audited(config_of("full participation", engine="local"))
    assert {finding.adversary for finding in findings} == {"release"}


@pytest.mark.parametrize(
    ("trials", "least", "most"),
    [
        # log(1e-3 / 3.7e-5): the client is drawn once in 1000 rounds, and 100,000
        # trials without an error bound a rate by 3.7e-5.
        (100_000, 0.8, 3.4),
        pytest.param(1_000_000, 3.0, 25.5, marks=pytest.mark.slow),
    ],
)
def test_one_round_refutes_the_published_composition(trials, least, most):
    """The adversary sees the release only; who is drawn instead answers -C e."""
    num_clients, noise_multiplier, batch_size = 1000, 1.07, 32
    rate = 1 / num_clients
    claimed = autodp_epsilon(noise_multiplier, batch_size, rate, DELTA)
    config = ResolvedConfig(
        num_clients=num_clients,
        clients_per_round=1,
        num_classes=10,
        noise_multiplier=noise_multiplier,
        batch_size=batch_size,
        seed=secrets.randbelow(2**31),
    )
    total = int(trials * (1 + CHOICE_SHARE))
    inside = node_scores(config, np.where(asked(config, total), 1.0, -1.0))
    outside = node_scores(config, np.full(total, -1.0))
    split = total - trials
    bound, _ = bound_epsilon(outside, inside, split, DELTA, 1 - CONFIDENCE)
    assert claimed == pytest.approx(0.78, abs=0.005)  # by the paper's accountant
    assert claimed < least < bound < most
    z = noise_ratio(noise_multiplier, batch_size, "replace-one", 1)
    assert bound < binomial_epsilon(1, rate, z, DELTA) < 25.5  # what holds


# ------------------------------------------------------------------ stages


def staged_config(**settings: object) -> RunConfig:
    defaults = {"engine": "flower", "noise_seed": None, "noise_multiplier": 0.5}
    return tiny_config(**STAGED | defaults | settings)


def staged_findings(config: RunConfig, round: int, recorded=None) -> list[Finding]:
    event = new_event(recorded or config, round, "all", 1)
    claims = claims_of_one_round(recorded_plan(config, [event]), DELTA)
    return audit_round(config, claims, DELTA, TRIALS, round=round)


def test_the_claims_of_an_embedding_hold_and_are_nearly_met():
    """One client whose embedding has norm C, against zero or its negative."""
    findings = staged_findings(staged_config(), round=2)
    assert verdicts(findings) == {HOLDS}
    assert {f.attack for f in findings} == {"A takes part, embedding"}
    assert len(findings) == 6
    for finding in findings:
        nodes = 1 if finding.adversary == "server" else 3
        factor = {"replace-one": 1.0, "zero-out": 0.5}[finding.relation]
        mu = factor * 2**0.5 / 0.5 / nodes**0.5  # weight 2, noise_multiplier 0.5
        assert finding.details["mu"] == pytest.approx(mu)
        assert 0.75 * mu < finding.details["mu_lower_bound"] < mu


def test_gradients_after_stages_are_attacked_as_without_stages():
    findings = staged_findings(staged_config(), round=3)
    assert verdicts(findings) == {HOLDS}
    plain = audited(staged_config(stages=None))
    assert [f.details["mu"] for f in findings] == [f.details["mu"] for f in plain]


def test_embeddings_that_are_not_clipped_are_caught(no_clipping):
    assert REFUTED in verdicts(staged_findings(staged_config(), round=1))


def test_less_noise_in_a_stage_than_the_ledger_records_is_caught():
    honest = staged_config()
    config = dataclasses.replace(honest, stages="means:0.5,scatter:8")
    assert REFUTED in verdicts(staged_findings(config, 2, recorded=honest))


def test_the_weakest_round_of_each_kind_of_release_is_attacked():
    config = staged_config(num_rounds=5)
    assert weakest_rounds(config, []) == {"embedding": 2, "gradient": 3}
    events = [new_event(config, round, "all", 1) for round in (1, 2)]
    assert weakest_rounds(config, events) == {"embedding": 2}
    louder = dataclasses.replace(events[0], noise_std=0.5)
    assert weakest_rounds(config, [louder, events[1]]) == {"embedding": 1}
