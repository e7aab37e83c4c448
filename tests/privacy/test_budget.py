"""Calibrated noise, the number of rounds, and a budget that stops in time."""

import math
from dataclasses import replace

import pytest

from fedgs.errors import UserError
from fedgs.privacy.accounting import statements, statements_from_ledger
from fedgs.privacy.amplification import PLD_THEOREM
from fedgs.privacy.budget import Budget, calibrate_noise, largest_num_rounds
from fedgs.privacy.gaussian import epsilon_from_mu, mu_from_epsilon
from fedgs.privacy.plan import ADVERSARIES, RELATIONS, Plan
from plans import (
    FULL,
    TABLE_1,
    TABLE_2,
    epsilon,
    epsilons,
    event,
    everybody,
    frozen,
    server_epsilon,
)
from refusals import assert_refused

BUDGET_PLAN = Plan(
    num_clients=10, clients_per_round=1, num_rounds=1000, batch_size=4, engine="flower"
)


def run_until_refused(budget, events):
    done = []
    for candidate in events:
        if not budget.allows(candidate):
            return done, candidate
        budget.add(candidate)
        done.append(candidate)
    raise AssertionError("the budget never stopped")


def events(**changes):
    """More events than any budget here allows."""
    return (event(t, **changes) for t in range(1, 10_000))


def with_repeats(repeated, make=event, **changes):
    """Rounds of which some are attempted twice."""
    for t in range(1, 10_000):
        yield make(t, **changes)
        if t in repeated:
            yield make(t, attempt=2, **changes)


def spent(events, adversary="server", relation="replace-one"):
    stated = statements_from_ledger(events, 1e-5)
    return epsilon(stated, adversary=adversary, relation=relation)


# -------------------------------------------------------------------------- calibration


def next_smaller(noise):
    """The next smaller number of four digits; the noise must have no more."""
    assert float(f"{noise:.4g}") == noise
    return noise - 10.0 ** (math.floor(math.log10(noise)) - 3)


def test_epsilon_10_for_the_release_is_1926_for_the_server():
    # privacy.md section 3: 539 one-client nodes, delta 1/539, the same relation twice.
    for relation in RELATIONS:
        noise = calibrate_noise(FULL, 10.0, 1 / 539, "release", relation)
        stated = statements(replace(FULL, noise_multiplier=noise), 1 / 539)
        release = epsilon(stated, adversary="release", relation=relation)
        server = epsilon(stated, adversary="server", relation=relation)
        assert 9.99 < release <= 10.0
        assert server == pytest.approx(1926, abs=2)  # the noise has 4 digits
    exact = mu_from_epsilon(10.0, 1 / 539) * math.sqrt(539)
    assert epsilon_from_mu(exact, 1 / 539) == pytest.approx(1926.26, abs=0.01)


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("selection", ["uniform", "balanced", "all"])
def test_calibrated_noise_is_the_smallest_of_4_digits(adversary, relation, selection):
    per_round = 539 if selection == "all" else 20
    plan = replace(FULL, client_selection=selection, clients_per_round=per_round)
    noise = calibrate_noise(plan, 3.0, 1e-5, adversary, relation, colluding=2)

    def reached(value):
        stated = statements(replace(plan, noise_multiplier=value), 1e-5, colluding=2)
        return epsilon(stated, adversary=adversary, relation=relation)

    assert reached(noise) <= 3.0 < reached(next_smaller(noise))


def test_calibration_of_the_prototype():
    # sigma = sqrt(T B) / (2 mu sqrt(K)) = 0.5847 for zero-out, mu = 2.5521, rounded up.
    noise = calibrate_noise(FULL, 10.0, 1 / 539, "release", "zero-out")
    assert noise == pytest.approx(math.sqrt(150 * 32 / 539) / 2 / 2.5521, abs=1.1e-4)


@pytest.mark.parametrize("adversary", ["server", "secagg"])
def test_a_local_run_has_no_server_to_calibrate_against(adversary):
    with pytest.raises(UserError, match="engine = local has only release"):
        calibrate_noise(TABLE_1, 10.0, 1e-5, adversary, "zero-out")
    with pytest.raises(UserError, match="engine = local has only release"):
        Budget(TABLE_1, 10.0, 1e-5, adversary, "zero-out")


@pytest.mark.parametrize(
    ("plan", "arguments", "message"),
    [
        (TABLE_2, (10.0, 1e-5, "server", "zero-out"), "client_selection is unknown"),
        (FULL, (10.0, 1e-5, "server", "add-or-remove"), "relation = 'add-or-remove'"),
        (FULL, (10.0, 1e-5, "client", "zero-out"), "adversary = 'client'"),
        (FULL, (math.inf, 1e-5, "server", "zero-out"), "finite"),
        (FULL, (10.0, 1.5, "server", "zero-out"), "delta = 1.5"),
        (FULL, (10.0, 1e-5, "secagg", "zero-out", 539), "colluding = 539"),
        (
            replace(TABLE_2, client_selection="uniform", num_rounds=1),
            (10.0, 0.01, "server", "zero-out"),
            "a client's chance to take part, 0.00115",
        ),
    ],
)
def test_impossible_calibrations_are_user_errors(plan, arguments, message):
    assert_refused(message, calibrate_noise, plan, *arguments)


@pytest.mark.parametrize("selection", ["uniform", "balanced", "all"])
def test_largest_num_rounds_is_the_last_within_the_target(selection):
    per_round = 539 if selection == "all" else 20
    plan = replace(
        FULL,
        client_selection=selection,
        clients_per_round=per_round,
        noise_multiplier=12.0,
    )
    most = largest_num_rounds(plan, 3.0, 1e-5, "server", "zero-out")

    def reached(rounds):
        stated = statements(replace(plan, num_rounds=rounds), 1e-5)
        return epsilon(stated, adversary="server", relation="zero-out")

    assert reached(most) <= 3.0 < reached(most + 1)


def test_no_round_fits_without_noise():
    plan = replace(FULL, noise_multiplier=0.0)
    assert largest_num_rounds(plan, 3.0, 1e-5, "release", "zero-out") == 0
    everyone = event(participants="all", num_clients=539, noise_std=0.0)
    assert not Budget(plan, 3.0, 1e-5, "release", "zero-out").allows(everyone)


# ------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("selection", ["uniform", "balanced"])
def test_a_budget_stops_before_it_is_exceeded(relation, adversary, selection):
    plan = replace(BUDGET_PLAN, client_selection=selection)
    budget = Budget(plan, 3.0, 1e-5, adversary, relation)
    nodes = {"planned_nodes": 3, "counted_nodes": 2, "client_selection": selection}
    done, refused = run_until_refused(budget, events(**nodes))
    assert len(done) > 20
    assert spent(done, adversary, relation) <= 3.0
    assert spent([*done, refused], adversary, relation) > 3.0


def test_a_budget_counts_the_earlier_events():
    arguments = (BUDGET_PLAN, 3.0, 1e-5, "server", "replace-one")
    done, refused = run_until_refused(Budget(*arguments), events())
    assert not Budget(*arguments, events=done).allows(refused)
    assert Budget(*arguments, events=done[:-1]).allows(done[-1])
    far_beyond = [event(t) for t in range(1, 200)]
    assert not Budget(BUDGET_PLAN, 1.0, *arguments[2:], far_beyond).allows(event(200))


@pytest.mark.parametrize("repeated", [range(1, 11), range(5, 10_000, 5)])
def test_a_budget_charges_repeated_rounds_for_the_same_clients(repeated):
    budget = Budget(BUDGET_PLAN, 3.0, 1e-5, "server", "replace-one")
    done, refused = run_until_refused(budget, with_repeats(repeated))
    assert spent(done) <= 3.0 < spent([*done, refused])


def test_a_budget_falls_back_to_counts_when_the_noise_changes():
    budget = Budget(BUDGET_PLAN, 3.0, 1e-5, "server", "replace-one")
    events = (event(t, noise_std=40.0 if t < 30 else 60.0) for t in range(1, 10_000))
    done, refused = run_until_refused(budget, events)
    assert len(done) > 30
    assert spent(done) <= 3.0 < spent([*done, refused])


def test_a_budget_counts_rounds_of_fewer_clients_than_were_drawn():
    plan = replace(BUDGET_PLAN, clients_per_round=2)
    budget = Budget(plan, 3.0, 1e-5, "server", "replace-one")
    done, refused = run_until_refused(budget, events())
    stated = [
        server_epsilon(statements_from_ledger(asked, 1e-5, clients_per_round=2))
        for asked in (done, [*done, refused])
    ]
    assert stated[0] <= 3.0 < stated[1]


def test_a_calibrated_run_uses_its_whole_budget():
    noise = calibrate_noise(FULL, 10.0, 1e-5, "release", "replace-one")
    plan = replace(FULL, noise_multiplier=noise)
    sums = {"noise_std": 2 * noise, "batch_size": 32}
    budget = Budget(plan, 10.0, 1e-5, "release", "replace-one")
    done, _ = run_until_refused(
        budget, (everybody(t, 539, **sums) for t in range(1, 999))
    )
    assert len(done) == 150


def test_a_budget_refuses_other_clients():
    budget = Budget(BUDGET_PLAN, 3.0, 1e-5, "server", "replace-one")
    assert_refused("num_clients = 11", budget.allows, event(num_clients=11))
    assert_refused("num_clients = 11", budget.add, event(num_clients=11))


# ------------------------------------------------------------------------ amplification

SAMPLED = replace(
    BUDGET_PLAN,
    num_rounds=60,
    client_selection="uniform",
    discriminator_training="frozen",
    amplification=True,
)


def least(stated, relation):
    """The better one of the amplified and the plain statement of the release."""
    return min(
        s.epsilon for s in stated if s.adversary == "release" and s.relation == relation
    )


@pytest.mark.usefixtures("coarse_grid")
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("target", [0.5, 3.0, 40.0])
def test_amplified_noise_is_the_smallest_of_4_digits(relation, target):
    arguments = (target, 1e-5, "release", relation)
    noise = calibrate_noise(SAMPLED, *arguments)
    reached, with_less = (
        least(statements(replace(SAMPLED, noise_multiplier=n), 1e-5), relation)
        for n in (noise, next_smaller(noise))
    )
    assert reached <= target < with_less
    plain = calibrate_noise(replace(SAMPLED, amplification=False), *arguments)
    assert noise < plain if relation == "replace-one" else noise <= plain


@pytest.mark.usefixtures("coarse_grid")
def test_largest_num_rounds_uses_amplification():
    plan = replace(SAMPLED, noise_multiplier=4.0)
    arguments = (3.0, 1e-5, "release", "replace-one")
    most = largest_num_rounds(plan, *arguments)
    reached = [
        least(statements(replace(plan, num_rounds=n), 1e-5), "replace-one")
        for n in (most, most + 1)
    ]
    assert reached[0] <= 3.0 < reached[1]
    assert most > largest_num_rounds(replace(plan, amplification=False), *arguments)


@pytest.mark.usefixtures("coarse_grid")
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("repeated", [(), range(1, 11)])
def test_an_amplified_budget_agrees_with_the_ledger(relation, repeated):
    budget = Budget(SAMPLED, 3.0, 1e-5, "release", relation)
    candidates = with_repeats(repeated, frozen, noise_std=16.0)
    done, refused = run_until_refused(budget, candidates)
    assert len(done) > 20
    spent = [
        least(statements_from_ledger(events, 1e-5, amplification=True), relation)
        for events in (done, [*done, refused])
    ]
    assert spent[0] <= 3.0 < spent[1]


def test_an_amplified_budget_falls_back_when_a_condition_fails():
    plain = Budget(BUDGET_PLAN, 3.0, 1e-5, "release", "replace-one")
    amplified = Budget(SAMPLED, 3.0, 1e-5, "release", "replace-one")
    done, refused = run_until_refused(plain, events())
    for earlier in done:
        assert amplified.allows(earlier)
        amplified.add(earlier)
    assert not amplified.allows(refused)
    assert not amplified.allows(frozen(len(done) + 1))
    stated = statements_from_ledger(done, 1e-5, amplification=True)
    assert epsilons(stated, theorem=PLD_THEOREM) == []


@pytest.mark.parametrize("adversary", ["server", "secagg"])
def test_only_the_release_is_amplified(adversary):
    with pytest.raises(UserError, match=f"adversary = {adversary}: sees who takes"):
        calibrate_noise(SAMPLED, 3.0, 1e-5, adversary, "replace-one")


def test_a_budget_counts_colluding_nodes():
    nodes = {"planned_nodes": 4, "counted_nodes": 4, "participants": (1, 2, 3, 4)}
    plan = replace(BUDGET_PLAN, clients_per_round=4)
    stops = []
    for colluding in (0, 3):
        budget = Budget(plan, 3.0, 1e-5, "secagg", "replace-one", (), colluding)
        done, _ = run_until_refused(budget, events(**nodes))
        stated = statements_from_ledger(done, 1e-5, colluding=colluding)
        assert epsilon(stated, adversary="secagg", relation="replace-one") <= 3.0
        stops.append(len(done))
    assert stops[0] > 2 * stops[1]
