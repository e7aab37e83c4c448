"""Plan, limits, budget and ledger add up the terms of every round of any method."""

import dataclasses
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

from fedgs.config.method_settings import NetworkSettings
from fedgs.config.rounds import MOST_ROUNDS, rounds_alike, terms_at
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.config.terms import Terms
from fedgs.errors import UserError
from fedgs.privacy.accountant import statements, statements_of_runs
from fedgs.privacy.budget import budget_of, calibrate_noise, is_spent
from fedgs.privacy.client_ledger import release_event
from fedgs.privacy.client_limits import ClientRefused, Limits
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Ledger
from fedgs.privacy.plan import Plan
from fedgs.privacy.same_clients import Run
from fedgs.round.preparation import check_answer, with_noise
from fedgs.round.run import new_event
from refusals import assert_refused

DELTA = 1e-5
ROUNDS = 6


def large(config, round):
    """The gradients of 32 fakes."""
    return 1.0, 32


def falling(config, round):
    """Less noise in every round."""
    return 1 / round, 1


def late(config, round):
    """A large batch with little noise in the last round alone."""
    return (0.25, 16) if round == config.num_rounds else (1.0, 1)


@pytest.fixture(params=[large, falling, late], ids=lambda law: law.__name__)
def law(request, monkeypatch):
    """What a method of others says: (factor of the noise, B) of a round."""
    own = request.param

    def terms(config, round):
        factor, batch = own(config, round)
        noise = config.known_noise * factor
        return Terms("gradient", noise, config.clip_bound, (batch, 1, 8, 8))

    module = ModuleType("others")
    parts = ("recipe", "state", "begin", "answer", "finish")
    module.METHOD = SimpleNamespace(
        terms=terms, Settings=NetworkSettings, **dict.fromkeys(parts)
    )
    monkeypatch.setitem(sys.modules, "others", module)
    monkeypatch.setenv("FEDGS_METHODS", "others:METHOD")
    rounds_alike.cache_clear()
    yield own
    rounds_alike.cache_clear()


def config_of(**settings):
    own = {"num_clients": 12, "client_selection": "all", "clients_per_round": 12}
    own |= {"num_rounds": ROUNDS, "noise_multiplier": 4.0, "num_classes": 3}
    own |= {"clients_per_node": 4, "seed": 1, "engine": "flower"}
    own |= {"phases": "others:METHOD", "image_size": 28, "image_channels": 1}
    return ResolvedConfig.from_flat(own | settings)


def mu_of(config, law, shares=1):
    """Mu under replace-one, by hand: sum of B / (shares sigma^2) over all rounds."""
    total = 0.0
    for round in range(1, config.num_rounds + 1):
        factor, batch = law(config, round)
        total += batch / (shares * (config.noise_multiplier * factor) ** 2)
    return math.sqrt(total)


def events_of(config):
    rounds = range(1, config.num_rounds + 1)
    return [new_event(config, round, "all", 1) for round in rounds]


def epsilon(rows, adversary):
    row = next(
        row
        for row in rows
        if (row.adversary, row.relation) == (adversary, "replace-one")
    )
    return row.epsilon


# ------------------------------------------------------------------ plans and runs


@pytest.mark.parametrize(("adversary", "shares"), [("server", 1), ("release", 3)])
def test_a_plan_costs_what_its_run_costs_then(law, adversary, shares):
    config = config_of()
    expected = epsilon_from_mu(mu_of(config, law, shares), DELTA)
    planned = statements(Plan.from_config(config), DELTA)
    assert epsilon(planned, adversary) == pytest.approx(expected, rel=1e-9)
    released = statements_of_runs([Run(config, events_of(config))], DELTA)
    assert epsilon(released, adversary) == pytest.approx(expected, rel=1e-9)


def test_a_plan_of_the_first_rounds_counts_these_alone(law):
    config = config_of()
    plan = Plan.from_config(config)
    for rounds in (1, 3, ROUNDS):
        cut = dataclasses.replace(config, num_rounds=rounds)
        if law is late and rounds < ROUNDS:
            expected = math.sqrt(rounds / config.noise_multiplier**2)
        else:
            expected = mu_of(cut, law)
        rows = statements(plan.ended_after(rounds), DELTA)
        expected = epsilon_from_mu(expected, DELTA)
        assert epsilon(rows, "server") == pytest.approx(expected, rel=1e-9)


def test_balanced_rounds_count_the_dearest(law):
    """Half of the clients in each round: three rounds each, whichever these are."""
    settings = {"client_selection": "balanced", "clients_per_round": 6}
    config = config_of(**settings)
    costs = []
    for round in range(1, ROUNDS + 1):
        factor, batch = law(config, round)
        costs.append(batch / (config.noise_multiplier * factor) ** 2)
    mu = math.sqrt(sum(sorted(costs)[-3:]))
    rows = statements(Plan.from_config(config), DELTA)
    expected = epsilon_from_mu(mu, DELTA)
    assert epsilon(rows, "server") == pytest.approx(expected, rel=1e-9)


def test_calibrated_noise_keeps_the_target_over_all_rounds(law):
    config = config_of(noise_multiplier=1.0)
    plan = Plan.from_config(config)
    noise = calibrate_noise(plan, 8.0, DELTA, "server", "replace-one")
    for multiplier, is_kept in ((noise, True), (noise * 0.998, False)):
        other = dataclasses.replace(config, noise_multiplier=multiplier)
        found = epsilon_from_mu(mu_of(other, law), DELTA)
        assert (found <= 8.0) == is_kept
        assert found == pytest.approx(8.0, rel=0.01)


def test_a_budget_stops_before_the_round_that_exceeds_it(law):
    config = config_of(target_epsilon=8.0, adversary="server")
    whole = epsilon_from_mu(mu_of(config, law), DELTA)
    events = events_of(config)
    for target, is_allowed in ((whole * 1.001, True), (whole * 0.999, False)):
        own = dataclasses.replace(config, target_epsilon=target)
        budget = budget_of(own, events[:-1])
        assert budget.allows(events[-1]) == is_allowed
        assert is_spent(own, events[:-1]) != is_allowed


# ------------------------------------------------------------------ clients


def test_the_limits_of_clients_hold_for_every_round(law):
    config = config_of()
    lowest = min(law(config, r)[0] for r in range(1, ROUNDS + 1)) * 4.0
    largest = max(law(config, r)[1] for r in range(1, ROUNDS + 1))
    Limits(min_noise_multiplier=lowest, max_batch_size=largest).check_run(config)
    with pytest.raises(ClientRefused, match="min_noise_multiplier"):
        Limits(min_noise_multiplier=lowest * 1.01).check_run(config)
    if largest > 1:
        with pytest.raises(ClientRefused, match=f"answers {largest} fakes"):
            Limits(max_batch_size=largest - 1).check_run(config)


def test_one_dear_round_exceeds_a_clients_epsilon(law):
    config = config_of()
    dearest = max(
        batch / (4.0 * factor) ** 2
        for factor, batch in (law(config, r) for r in range(1, ROUNDS + 1))
    )
    single = epsilon_from_mu(math.sqrt(dearest), DELTA)
    Limits(client_epsilon=single * 1.01).check_run(config)
    with pytest.raises(ClientRefused, match="noise_multiplier = 4"):
        Limits(client_epsilon=single * 0.99).check_run(config)


def test_another_clip_bound_in_one_round_is_refused(law, monkeypatch):
    config = config_of()
    method = sys.modules["others"].METHOD
    own = method.terms

    def terms(config, round):
        found = own(config, round)
        return dataclasses.replace(found, clip_bound=2.0) if round == 3 else found

    monkeypatch.setattr(method, "terms", terms)
    rounds_alike.cache_clear()
    with pytest.raises(ClientRefused, match="clip_bound"):
        Limits(clip_bound=1.0).check_run(config)


# ------------------------------------------------------------------ the ledger


def test_a_ledger_is_compared_with_the_terms_of_each_round(law, tmp_path):
    config = config_of()
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    events = events_of(config)
    ledger.append(*events)
    ledger.close()
    ledger.verify_terms(config)
    other = Ledger.open(tmp_path / "other.jsonl")
    last = dataclasses.replace(events[-1], noise_std=events[-1].noise_std * 2)
    other.append(*events[:-1], last)
    other.close()
    with pytest.raises(UserError, match=f"line {ROUNDS}: noise_std"):
        other.verify_terms(config)


def test_terms_that_change_when_asked_again_change_nothing(law, monkeypatch):
    config = config_of()
    method = sys.modules["others"].METHOD
    before = [terms_at(config, r) for r in range(1, ROUNDS + 1)]
    event = release_event(config, 2, [0], 4)

    def weaker(config, round):
        return Terms("gradient", 1e-3, 1.0, (1, 1, 8, 8))

    monkeypatch.setattr(method, "terms", weaker)
    assert [terms_at(config, r) for r in range(1, ROUNDS + 1)] == before
    assert release_event(config, 2, [0], 4) == event


# ------------------------------------------------------------------ noise of its own


def test_a_method_with_noise_of_its_own_cannot_be_calibrated(monkeypatch, law):
    def constant(config, round):
        return Terms("gradient", 0.5, config.clip_bound, (1, 1, 8, 8))

    monkeypatch.setattr(sys.modules["others"].METHOD, "terms", constant)
    rounds_alike.cache_clear()
    config = config_of(noise_multiplier=2.0)
    expected = epsilon_from_mu(math.sqrt(ROUNDS / 0.5**2), DELTA)
    rows = statements(Plan.from_config(config), DELTA)
    assert epsilon(rows, "server") == pytest.approx(expected, rel=1e-9)
    # Left open, it is compared with a noise multiplier of 1, which it does not follow.
    asked = {"noise_multiplier": "", "target_epsilon": 8.0, "adversary": "server"}
    unset = RunConfig.from_flat(config.to_flat() | asked)
    assert_refused("not proportional to noise_multiplier", with_noise, unset)
    given = RunConfig.from_flat(config.to_flat() | {"target_epsilon": 8.0})
    assert with_noise(given).noise_multiplier == 2.0


def test_a_method_without_noise_in_one_round_has_no_epsilon(monkeypatch, law):
    own = sys.modules["others"].METHOD.terms

    def bare(config, round):
        found = own(config, round)
        return dataclasses.replace(found, noise_multiplier=0.0) if round == 2 else found

    monkeypatch.setattr(sys.modules["others"].METHOD, "terms", bare)
    rounds_alike.cache_clear()
    rows = statements(Plan.from_config(config_of()), DELTA)
    assert all(row.epsilon is None and not row.guarantee for row in rows)


def test_the_answer_of_any_round_is_weighed(law, monkeypatch):
    config = config_of()
    check_answer(config)
    method = sys.modules["others"].METHOD
    own = method.terms

    def heavy(config, round):
        found = own(config, round)
        shape = (1, 1, 30_000, 30_000)
        return dataclasses.replace(found, shape=shape) if round == 5 else found

    monkeypatch.setattr(method, "terms", heavy)
    rounds_alike.cache_clear()
    assert_refused("batch_size = .*: an answer of this run", check_answer, config)


def test_more_rounds_than_can_be_asked_are_refused():
    config = config_of(phases="dp-merf", num_rounds=MOST_ROUNDS + 1)
    assert_refused("num_rounds = 1000001", rounds_alike, config)


def test_drawn_clients_cost_no_more_in_a_run_than_in_its_plan(law):
    """Where rounds differ no mixture is claimed, before a run or after it."""
    settings = {"client_selection": "uniform", "clients_per_round": 3, "num_rounds": 8}
    config = config_of(**settings, clients_per_node=1)
    planned = statements(Plan.from_config(config), DELTA)
    # The worst that may happen: the same clients in every round.
    events = [new_event(config, round, (0, 1, 2), 1) for round in range(1, 9)]
    released = statements_of_runs([Run(config, events)], DELTA)
    for adversary in ("server", "release"):
        if law is large:  # all rounds alike: the mixture is planned
            continue
        found = epsilon(released, adversary)
        assert found == pytest.approx(epsilon(planned, adversary), rel=1e-9)
