"""From a target to noise, rounds and the last release: each is what statements say."""

import math
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from fedgs.config.run_config import ResolvedConfig
from fedgs.privacy.accountant import statements, statements_of_runs
from fedgs.privacy.budget import Budget, calibrate_noise, is_spent, largest_num_rounds
from fedgs.privacy.plan import Plan
from fedgs.privacy.same_clients import Run
from fedgs.privacy.selection_cost import Target
from fedgs.round.run import new_event
from plans import (
    COST,
    FULL,
    TABLE_1,
    TABLE_2,
    WITH_RELEASES,
    epsilons,
    event,
    everybody,
    frozen,
)
from refusals import assert_refused
from tiny import run_config

DELTA = 1e-5
DRAWN = replace(FULL, client_selection="uniform")
UNIFORM = replace(DRAWN, clients_per_round=20, noise_multiplier=12.0)
TEN = {"num_clients": 10, "clients_per_round": 1, "num_rounds": 60, "batch_size": 4}
SMALL = replace(DRAWN, **TEN, noise_multiplier=4.0, discriminator_training="frozen")
AMPLIFIED = replace(SMALL, amplification=True)
SILOS = replace(FULL, clients_per_node=49)
MASKED = replace(SILOS, noise_multiplier=4.0, secure_aggregation=True)


def least(stated, adversary, relation):
    """The better one of the amplified and the plain guarantee."""
    asked = {"adversary": adversary, "relation": relation}
    return min(epsilons(stated, guarantee=True, **asked))


# A plan, who looks, a target, and what else is asked.
QUESTIONS = {
    "uniform": (UNIFORM, "server", 3.0, {}),
    "balanced": (replace(UNIFORM, client_selection="balanced"), "release", 3.0, {}),
    "all, some collude": (FULL, "secagg", 3.0, {"colluding": 2}),
    "masked": (MASKED, "server", 10.0, {"colluding": 1}),
    "masking failed": (MASKED, "unmasked", 10.0, {}),
    "releases": (Plan.from_config(WITH_RELEASES), "release", 8.0, {}),
    "amplified": (AMPLIFIED, "release", 3.0, {}),
    "amplified, large target": (AMPLIFIED, "release", 40.0, {}),
    "with a selection": (SMALL, "release", 14.0, {"selections": [COST]}),
    "both": (AMPLIFIED, "release", 14.0, {"selections": [COST]}),
}


def rounds_within(plan, *asked, colluding=0, selections=()):
    return largest_num_rounds(plan, Target(*asked, tuple(selections)), colluding)


def budget_for(plan, epsilon, delta, adversary, relation, *more, selections=(), **how):
    target = Target(epsilon, delta, adversary, relation, tuple(selections))
    return Budget(plan, target, *more, **how)


each_question = pytest.mark.parametrize("name", QUESTIONS)


@each_question
def test_calibrated_noise_is_the_smallest_of_4_digits(coarse_grid, name):
    plan, adversary, target, more = QUESTIONS[name]
    asked = (adversary, "zero-out")
    noise = calibrate_noise(plan, target, DELTA, *asked, **more)
    assert float(f"{noise:.4g}") == noise
    reached, with_less = (
        least(statements(replace(plan, noise_multiplier=n), DELTA, **more), *asked)
        for n in (noise, noise - 10.0 ** (math.floor(math.log10(noise)) - 3))
    )
    assert reached <= target < with_less


@each_question
def test_largest_num_rounds_is_the_last_within_the_target(coarse_grid, name):
    plan, adversary, target, more = QUESTIONS[name]
    asked = (adversary, "replace-one")
    most = rounds_within(plan, target, DELTA, *asked, **more)
    reached, beyond = (
        least(statements(plan.ended_after(n), DELTA, **more), *asked)
        for n in (most, most + 1)
    )
    assert reached <= target < beyond


@pytest.mark.parametrize(("target", "rounds"), [(1.0, 1), (0.1, 0)])
def test_rounds_within_a_small_target_are_releases(target, rounds):
    plan = Plan.from_config(WITH_RELEASES)
    asked = (target, DELTA, "release", "zero-out")
    assert rounds_within(plan, *asked) == rounds


each_user = pytest.mark.parametrize(
    "what", [calibrate_noise, rounds_within, budget_for]
)


@each_user
@pytest.mark.parametrize(
    ("plan", "asked", "message"),
    [
        (TABLE_2, (10.0, DELTA, "server", "zero-out"), "client_selection is unknown"),
        (FULL, (10.0, DELTA, "server", "add-or-remove"), "relation = 'add-or-remove'"),
        (FULL, (10.0, DELTA, "client", "zero-out"), "adversary = 'client'"),
        (FULL, (math.inf, DELTA, "server", "zero-out"), "finite"),
        (FULL, (10.0, 1.5, "server", "zero-out"), "delta = 1.5"),
        (FULL, (10.0, DELTA, "unmasked", "zero-out"), "--secure-aggregation"),
        (TABLE_1, (10.0, DELTA, "server", "zero-out"), "engine = local has only relea"),
        (AMPLIFIED, (3.0, DELTA, "secagg", "zero-out"), "secagg:"),
    ],
)
def test_impossible_targets_are_refused(what, plan, asked, message):
    assert_refused(message, what, plan, *asked)


@each_user
def test_targets_that_a_selection_alone_exceeds_are_refused(what):
    for target, adversary, message in (
        (2.0, "release", r"the private selection of the cohort alone costs \d"),
        (50.0, "server", "is unbounded for adversary = server, .* --adversary release"),
    ):
        asked = (FULL, target, DELTA, adversary, "replace-one")
        words = f"target_epsilon = {target:g}: .*{message}"
        assert_refused(words, what, *asked, selections=[COST])


def test_no_noise_can_and_none_need_not_reach_a_target():
    everyone = (10.0, DELTA, "secagg", "zero-out", 539)
    assert_refused("colluding = 539:", calibrate_noise, FULL, *everyone)
    rare = replace(TABLE_2, client_selection="uniform", num_rounds=1)
    words, asked = "chance to take part, 0.00115", (10.0, 0.01, "server", "zero-out")
    assert_refused(words, calibrate_noise, rare, *asked)
    silent = replace(FULL, noise_multiplier=0.0)
    assert rounds_within(silent, 3.0, DELTA, "release", "zero-out") == 0
    budget = budget_for(silent, 3.0, DELTA, "release", "zero-out")
    assert not budget.allows(everybody(1, 539, noise_std=0.0))


# ------------------------------------------------------------------------------- budget


def masked(round, attempt):
    """Of a round that is asked again, of fewer nodes."""
    nodes = {"counted_nodes": 11 - attempt}
    return everybody(round, kind="discrete", attempt=attempt, **nodes)


def quieter_later(round, attempt):
    return event(round, attempt=attempt, noise_std=40.0 if round < 30 else 60.0)


def trained_later(round, attempt):
    return (frozen if round < 9 else event)(round, attempt=attempt)


BALANCED, AMPLIFY = {"client_selection": "balanced"}, {"amplification": True}
SUMS = {"client_selection": "all", "clients_per_round": 10, "secure_aggregation": True}
FEWER, SELECTED = {"clients_per_round": 2}, {"selections": [COST]}
nodes = partial(event, planned_nodes=3, counted_nodes=2)
balanced, loud = partial(event, **BALANCED), partial(event, noise_std=6.0)
quiet = partial(frozen, noise_std=16.0)
EVERY, FIFTHS, FIRST = range(1, 9999), range(5, 9999, 5), range(1, 11)
# What differs from SMALL, who looks, the events, which rounds have two attempts, and
# what statements must know.
BUDGETS = {
    "drawn": ({}, "server", nodes, (), {}),
    "balanced": (BALANCED, "release", balanced, (), {}),
    "every fifth repeated": ({}, "server", event, FIFTHS, {}),
    "other noise": ({}, "server", quieter_later, (), {}),
    "fewer than drawn": (FEWER, "server", event, (), {}),
    "masked, some collude": (SUMS, "server", masked, EVERY, {"colluding": 3}),
    "amplified": (AMPLIFY, "release", quiet, (), {}),
    "amplified, repeated": (AMPLIFY, "release", quiet, FIRST, {}),
    "amplification ends": (AMPLIFY, "release", trained_later, (), {}),
    "selected": ({}, "release", loud, (), SELECTED),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_stops_before_it_is_exceeded(coarse_grid, name):
    """The same events, judged by the statements afterwards."""
    changes, adversary, make, repeated, more = BUDGETS[name]
    plan, done = replace(SMALL, **changes), []
    target = 14.0 if "selections" in more else 3.0
    relation = "zero-out" if name in ("balanced", "amplified") else "replace-one"
    budget = budget_for(plan, target, DELTA, adversary, relation, **more)
    tries = ((t, a) for t in count(1) for a in (1, 2) if a == 1 or t in repeated)
    for candidate in (make(t, attempt=a) for t, a in tries):
        if not budget.allows(candidate):
            break
        budget.add(candidate)
        done.append(candidate)

    def spent(events):
        own = {n: getattr(plan, n) for n in ("clients_per_round", "amplification")}
        own |= {"engine": "flower", "selection_hash": "one"}
        config = run_config(num_rounds=events[-1].round, **own)
        stated = statements_of_runs([Run(config, events)], DELTA, **more)
        return least(stated, adversary, relation)

    assert len(done) > 10
    assert spent(done) <= target < spent([*done, candidate])
    # Events of before count as those that it has seen.
    again = budget_for(plan, target, DELTA, adversary, relation, done, **more)
    assert not again.allows(candidate)
    assert_refused("num_clients = 11", budget.allows, event(num_clients=11))
    assert_refused("num_clients = 11", budget.add, event(num_clients=11))


@pytest.mark.parametrize("changes", [{}, {"phases": "gs-wgan"}])
def test_a_calibrated_run_uses_its_whole_budget(changes):
    asked = (10.0, DELTA, "release", "zero-out")
    config = ResolvedConfig.from_flat(changes, WITH_RELEASES)
    noise = calibrate_noise(Plan.from_config(config), *asked)
    config = replace(config, noise_multiplier=noise)
    planned = [new_event(config, t, "all", 1) for t in range(1, config.num_rounds + 1)]
    budget = budget_for(Plan.from_config(config), *asked, planned[:-1])
    assert budget.allows(planned[-1])
    budget.add(planned[-1])
    assert not budget.allows(new_event(config, config.num_rounds, "all", 2))


def test_a_budget_that_ends_before_a_release_is_spent_before_it():
    """The next event is another kind of release than the last one."""
    config = replace(WITH_RELEASES, target_epsilon=1.0, relation="zero-out")
    assert is_spent(config, [new_event(config, 1, "all", 1)])
    cheap = replace(config, phases="means:0.5,scatter:0.01,gs-wgan")
    assert not is_spent(cheap, [new_event(cheap, 1, "all", 1)])
