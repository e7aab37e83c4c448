"""Amplified statements, several runs together, and delta at an epsilon."""

import math
from dataclasses import replace

import pytest
from scipy.stats import binom

import plans
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError
from fedgs.federation.training import new_event
from fedgs.privacy.accounting import (
    Run,
    statements,
    statements_from_ledger,
    statements_of_runs,
)
from fedgs.privacy.amplification import PLD_THEOREM, RDP_THEOREM, Sampled, SampledBound
from fedgs.privacy.budget import (
    Budget,
    calibrate_noise,
    is_spent,
    largest_num_rounds,
)
from fedgs.privacy.gaussian import (
    LEAST_DELTA,
    binomial_epsilon,
    delta_from_mu,
    epsilon_from_mu,
)
from fedgs.privacy.participation import COUNT_THEOREM, MIXTURE_THEOREM
from fedgs.privacy.plan import RELATIONS, Plan
from plans import FULL, TABLE_1, epsilons, event, everybody, frozen, theorems
from refusals import assert_refused

# ------------------------------------------------------------------------ amplification

SAMPLED = replace(
    TABLE_1,
    client_selection="uniform",
    discriminator_training="every_round",
    amplification=True,
    engine="flower",
)


def conditions(stated, adversary="release"):
    return " ".join(c for s in stated if s.adversary == adversary for c in s.conditions)


def test_amplification_is_stated_beside_the_other_rows():
    stated = statements(SAMPLED, 1e-5)
    plain = statements(replace(SAMPLED, amplification=False), 1e-5)
    assert epsilons(stated)[:6] == epsilons(plain)
    more = stated[6:]
    assert [(s.adversary, s.theorem) for s in more] == [
        *[("release", PLD_THEOREM)] * 2,
        *[("release", RDP_THEOREM)] * 2,
    ]
    assert [round(s.epsilon, 2) for s in more[:2]] == [346.66, 346.66]
    assert {s.relation for s in more} == set(RELATIONS)
    for statement in more:
        text = " ".join(statement.conditions)
        for word in ("(a)", "(b)", "fixed in advance", "2C sqrt(B)", "20000 rounds"):
            assert word in text
        assert statement.guarantee


WHY_NOT = {  # what is refused is named with its reason
    "discriminator_training = selected: only the selected client": (
        {"discriminator_training": "selected"}
    ),
    "client_selection = balanced": {"client_selection": "balanced"},
    "every client takes part": {"clients_per_round": 1000},
    "clients_per_node": {"clients_per_node": 2},
}


@pytest.mark.parametrize("reason", ["not requested", *WHY_NOT])
def test_release_rows_say_why_nothing_is_amplified(reason):
    changes = {"amplification": False} | WHY_NOT.get(reason, {})
    stated = statements(replace(SAMPLED, **changes), 1e-5)
    said = reason if reason == "not requested" else f"refused: {reason}"
    assert f"no amplification by sampling: {said}" in conditions(stated)
    assert "no amplification" not in conditions(stated, "server")
    assert not any(s.theorem == PLD_THEOREM for s in stated)


@pytest.mark.parametrize("reason", WHY_NOT)
def test_a_request_whose_conditions_fail_is_refused(reason):
    with pytest.raises(UserError, match=f"amplification = True: refused: {reason}"):
        replace(SAMPLED, **WHY_NOT[reason])


def test_a_ledger_has_the_amplified_rows_of_its_plan():
    rule = {"discriminator_training": "frozen", "amplification": True}
    sizes = {"num_clients": 10, "clients_per_round": 1, "num_rounds": 30}
    plan = Plan(**sizes, batch_size=4, noise_multiplier=20.0, **rule)
    events = [frozen(t) for t in range(1, 31)]
    found = statements_from_ledger(events, 1e-5, amplification=True)
    assert epsilons(found) == pytest.approx(epsilons(statements(plan, 1e-5)), rel=1e-6)
    silent = statements_from_ledger(events, 1e-5)
    assert "not requested" in conditions(silent)


def test_a_run_that_ended_early_is_not_amplified():
    events = [frozen(t) for t in range(1, 7)]
    early = statements_from_ledger(events, 1e-5, num_rounds=20, amplification=True)
    assert {row.theorem for row in early} == {COUNT_THEOREM}
    assert "refused: the events end after 6 of 20 planned rounds" in conditions(early)


TURNS = range(1, 21)
NODES = {"participants": (1, 2, 3), "planned_nodes": 3, "counted_nodes": 2}
AMPLIFIED = {
    "all nodes that must answer hide the release": (
        [frozen(t, **NODES) for t in TURNS],
        [Sampled(10, 3, 10.0 * math.sqrt(2), 20)],
    ),
    "attempts are one draw of more noisy answers": (
        [frozen(t, attempt=a) for t in TURNS for a in (1, 2)],
        [Sampled(10, 1, 40.0 / (2 * math.sqrt(4)) / math.sqrt(2), 20)],
    ),
    "preset changes of noise are composed": (
        [frozen(t, noise_std=40.0 if t < 11 else 20.0) for t in TURNS],
        [Sampled(10, 1, 10.0, 10), Sampled(10, 1, 5.0, 10)],
    ),
}


@pytest.mark.parametrize("case", AMPLIFIED)
def test_events_are_amplified_as_the_rounds_that_they_are(case):
    events, rounds = AMPLIFIED[case]
    found = statements_from_ledger(events, 1e-5, amplification=True)
    expected = SampledBound((*rounds,)).epsilon(1e-5)
    assert epsilons(found, theorem=PLD_THEOREM) == pytest.approx([expected] * 2)


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (event(11), "discriminator_training = selected: only the selected"),
        (frozen(11, client_selection="balanced"), "client_selection = balanced"),
        (frozen(10, attempt=2, participants=(5,)), "a repeated round asked others"),
        (frozen(11, participants="all"), "every client takes part"),
    ],
)
def test_events_that_break_a_condition_end_amplification(last, reason):
    events = [*(frozen(t) for t in range(1, 11)), last]
    found = statements_from_ledger(events, 1e-5, amplification=True)
    assert len(found) == 6
    assert f"no amplification by sampling: refused: {reason}" in conditions(found)


def test_more_kinds_of_rounds_than_are_composed_end_amplification():
    events = [frozen(t, noise_std=40.0 + t) for t in range(1, 41)]
    found = statements_from_ledger(events, 1e-5, amplification=True)
    assert "rounds of 40 kinds; at most 32" in conditions(found)


# ------------------------------------------------------------------------- several runs


def run(events, **settings):
    """A run that planned no more rounds than its events have, unless told otherwise."""
    planned = {"num_rounds": max(e.round for e in events)}
    known = {"engine": "flower", "seed": 1, **planned, **settings}
    return Run(RunConfig(**known), tuple(events))


def server_epsilon(runs, **options):
    return plans.server_epsilon(statements_of_runs(runs, 1e-5, **options))


def test_runs_of_everybody_add_their_mu_squared():
    everyone = {"participants": "all", "client_selection": "all"}
    one = run([event(t, **everyone) for t in range(1, 6)])
    two = run([event(t, **everyone, noise_std=20.0) for t in range(1, 4)])
    mu_squared = 5 * (2 * 2 / 40.0) ** 2 + 3 * (2 * 2 / 20.0) ** 2
    expected = epsilon_from_mu(math.sqrt(mu_squared), 1e-5)
    assert server_epsilon([one, two]) == pytest.approx(expected)
    assert "2 runs on the same clients" in conditions(
        statements_of_runs([one, two], 1e-5)
    )


@pytest.mark.parametrize("noise", [40.0, 23.0])
def test_mixtures_of_runs_with_different_seeds_are_convolved(noise):
    runs = [
        run([event(t) for t in range(1, 21)]),
        run([event(t, noise_std=noise) for t in range(1, 11)], seed=2),
    ]
    at, first, second = 1.0, (4 / 40.0) ** 2, (4 / noise) ** 2
    delta = sum(
        binom.pmf(n, 20, 0.1)
        * binom.pmf(m, 10, 0.1)
        * delta_from_mu(math.sqrt(n * first + m * second), at)
        for n in range(21)
        for m in range(11)
    )
    found = statements_of_runs(runs, 1e-5, at_epsilon=at)
    (statement,) = [
        s for s in found if (s.adversary, s.relation) == ("server", "replace-one")
    ]
    assert statement.delta == pytest.approx(delta, rel=1e-6)
    assert statement.asked == "delta"
    assert statement.theorem == MIXTURE_THEOREM


def test_runs_with_one_seed_are_one_draw_with_both_costs():
    one = run([event(t) for t in range(1, 21)])
    two = run([event(t, noise_std=30.0) for t in range(1, 21)])
    z = 1 / math.sqrt((4 / 40.0) ** 2 + (4 / 30.0) ** 2)
    expected = binomial_epsilon(20, 0.1, z, 1e-5)
    assert server_epsilon([one, two]) == pytest.approx(expected)
    assert expected > server_epsilon([one, run(two.events, seed=2)])


def test_runs_with_one_seed_and_other_cohorts_are_charged_the_count():
    one = run([event(t) for t in range(1, 21)])
    two = run([event(t, participants=(t % 10, 9)) for t in range(1, 9)])
    mu_squared = (2 + 9 - 1) * (4 / 40.0) ** 2  # client 9: twice, and in 1 to 8
    expected = epsilon_from_mu(math.sqrt(mu_squared), 1e-5)
    assert server_epsilon([one, two]) == pytest.approx(expected)
    found = statements_of_runs([one, two], 1e-5)
    assert "runs with the same seed 1 asked others" in conditions(found)


def test_a_counted_run_is_added_to_a_mixture():
    mixed = run([event(t) for t in range(1, 21)])
    balanced = run(
        [event(t, client_selection="balanced") for t in range(1, 31)], seed=2
    )
    at, cost = 1.0, (4 / 40.0) ** 2
    delta = sum(
        binom.pmf(n, 20, 0.1) * delta_from_mu(math.sqrt((n + 3) * cost), at)
        for n in range(21)
    )
    found = statements_of_runs([mixed, balanced], 1e-5, at_epsilon=at)
    assert found[2].delta == pytest.approx(delta, rel=1e-6)
    shared = run(balanced.events, seed=1)  # balanced draws from another stream
    assert server_epsilon([mixed, shared]) == server_epsilon([mixed, balanced])


def test_an_irregular_run_with_the_seed_of_a_mixture_voids_it():
    mixed = run([event(t) for t in range(1, 21)])
    changed = run([event(t, noise_std=40.0 + t) for t in range(1, 21)])
    found = statements_of_runs([mixed, changed], 1e-5)
    assert theorems(found) == {COUNT_THEOREM}
    assert "runs share the selection seed 1" in conditions(found)


def test_records_that_are_reshuffled_may_sit_in_the_worst_shard_of_every_run():
    one, two = (
        run([event(1, participants=(c,))], privacy_unit="record", seed=c)
        for c in (1, 2)
    )
    balanced = [
        Run(r.config, tuple(replace(e, client_selection="balanced") for e in r.events))
        for r in (one, two)
    ]
    apart, together = (
        server_epsilon(balanced, is_reshuffled=reshuffled)
        for reshuffled in (False, True)
    )
    assert apart == pytest.approx(epsilon_from_mu(4 / 40.0, 1e-5))
    assert together == pytest.approx(epsilon_from_mu(4 / 40.0 * math.sqrt(2), 1e-5))


def test_amplified_runs_compose():
    settings = {"amplification": True, "discriminator_training": "frozen"}
    one = run([frozen(t) for t in range(1, 21)], **settings)
    two = run([frozen(t, noise_std=20.0) for t in range(1, 6)], seed=2, **settings)
    rounds = (Sampled(10, 1, 10.0, 20), Sampled(10, 1, 5.0, 5))
    found = statements_of_runs([one, two], 1e-5)
    expected = SampledBound(rounds).epsilon(1e-5)
    assert epsilons(found, theorem=PLD_THEOREM) == pytest.approx([expected] * 2)
    plain = run(two.events, seed=2)
    assert "not requested" in conditions(statements_of_runs([one, plain], 1e-5))


def test_a_local_run_among_others_leaves_the_release_only():
    events = [event(t) for t in range(1, 6)]
    found = statements_of_runs([run(events), run(events, engine="local")], 1e-5)
    assert {s.adversary for s in found} == {"release"}
    assert "so there is no server or secagg row" in conditions(found)


def test_runs_of_other_units_or_sizes_are_refused():
    records = run([event(1)], privacy_unit="record")
    with pytest.raises(UserError, match="privacy_unit = client and record"):
        statements_of_runs([run([event(1)]), records], 1e-5)
    other = run([event(1, num_clients=11)])
    with pytest.raises(UserError, match=r"num_clients = \[10, 11\]"):
        statements_of_runs([run([event(1)]), other], 1e-5)


# ------------------------------------------------------------- runs that ended early

# Client 3 was drawn four times before its own count ended the run.
ENDED = [event(t, participants=(c,)) for t, c in enumerate((3, 1, 3, 3, 5, 3), 1)]


def test_a_run_that_ended_early_is_charged_the_realised_count():
    found = statements_of_runs([run(ENDED, num_rounds=20)], 1e-5)
    assert theorems(found) == {COUNT_THEOREM}
    expected = epsilon_from_mu(math.sqrt(4) * 4 / 40.0, 1e-5)
    assert plans.server_epsilon(found) == pytest.approx(expected)
    assert "the events end after 6 of 20 planned rounds" in conditions(found)
    assert "end were not chosen after seeing answers" in conditions(found)
    whole = statements_of_runs([run(ENDED)], 1e-5)
    assert theorems(whole) == {MIXTURE_THEOREM}
    assert plans.server_epsilon(whole) < expected


def test_a_run_in_progress_has_not_ended():
    runs = [run([event(t) for t in range(1, n + 1)], num_rounds=20) for n in (19, 20)]
    found = [theorems(statements_of_runs([r], 1e-5)) for r in runs]
    assert found == [{COUNT_THEOREM}, {MIXTURE_THEOREM}]


def test_a_run_that_ended_early_is_counted_beside_a_whole_one():
    whole = run([event(t) for t in range(1, 21)], seed=2)
    found = statements_of_runs([run(ENDED, num_rounds=20), whole], 1e-5)
    assert theorems(found) == {MIXTURE_THEOREM}
    assert "because the events end after 6 of 20" in conditions(found)
    same = statements_of_runs([run(ENDED, num_rounds=20, seed=2), whole], 1e-5)
    assert theorems(same) == {COUNT_THEOREM}


TARGET = (3.0, 1e-5, "server", "replace-one")
PLANNED = {
    "num_rounds": 1000,
    "num_clients": 10,
    "clients_per_round": 1,
    "batch_size": 4,
    "noise_multiplier": 20.0,
    "adversary": "server",
    "target_epsilon": 3.0,
}


@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_a_run_that_its_budget_ended_keeps_the_mixture(delta):
    """The budget is of the run's own delta, whichever one is asked for."""
    budget, events = Budget(RunConfig(engine="flower", **PLANNED), *TARGET), []
    while budget.allows(new := event(len(events) + 1)):
        budget.add(new)
        events.append(new)
    assert 20 < len(events) < 1000
    for done, theorem in ((events, MIXTURE_THEOREM), (events[:-1], COUNT_THEOREM)):
        found = statements_of_runs([run(done, **PLANNED)], delta)
        assert theorems(found) == {theorem}
    no_target = run(events, **{**PLANNED, "target_epsilon": None})
    assert theorems(statements_of_runs([no_target], delta)) == {COUNT_THEOREM}


def test_a_round_that_was_asked_again_at_once_may_depend_on_who_was_drawn():
    """A node that is away, or a client that refuses, ends its round: count it."""
    again = [*ENDED, event(6, participants=(3,), attempt=2)]
    found = statements_of_runs([run(again)], 1e-5)
    assert theorems(found) == {COUNT_THEOREM}
    expected = epsilon_from_mu(math.sqrt(5) * 4 / 40.0, 1e-5)
    assert plans.server_epsilon(found) == pytest.approx(expected)
    assert "a round was asked again at once" in conditions(found)


# ------------------------------------------------------------- runs of one deployment


def deployed(events, nodes, **settings):
    return run(events, nodes=nodes, num_clients=10, **settings)


ALL = {"client_selection": "all", "participants": "all"}


@pytest.mark.parametrize("sizes", ["9,1", "5,5"])
def test_deployed_runs_are_added_by_client_not_by_number(sizes):
    """Client 0 of the one run is the first of node b in the other."""
    turned = ",".join(reversed(sizes.split(",")))
    first = [event(t, participants=(0,), client_selection="balanced") for t in (1, 2)]
    place = int(turned.split(",")[0])
    again = [replace(e, participants=(place,)) for e in first]
    both = [
        deployed(first, "a,b", node_sizes=sizes),
        deployed(again, "b,a", node_sizes=turned),
    ]
    assert server_epsilon(both) == pytest.approx(epsilon_from_mu(2 * 4 / 40.0, 1e-5))
    other = deployed(first, "b,a", node_sizes=turned)
    apart = pytest.approx(epsilon_from_mu(math.sqrt(2) * 4 / 40.0, 1e-5))
    assert server_epsilon([both[0], other]) == apart
    text = conditions(statements_of_runs(both, 1e-5))
    assert "by the name of its node and its place there" in text


def test_deployed_runs_with_one_seed_and_another_order_asked_others():
    events = [event(t) for t in range(1, 21)]
    runs = [deployed(events, n, node_sizes="5,5") for n in ("a,b", "b,a")]
    found = statements_of_runs(runs, 1e-5)
    assert theorems(found) == {COUNT_THEOREM}
    same = statements_of_runs([runs[0], runs[0]], 1e-5)
    assert theorems(same) == {MIXTURE_THEOREM}


@pytest.mark.parametrize(
    ("nodes", "sizes", "named"),
    [
        ("a,c", "4,6", r"nodes = a \(4\), b \(6\) and a \(4\), c \(6\)"),
        ("b,a", "4,6", r"nodes = a \(4\), b \(6\) and b \(4\), a \(6\)"),
        (None, "4,6", r"nodes = a \(4\), b \(6\) and unset: .*account the runs apart"),
    ],
)
def test_deployed_runs_whose_clients_cannot_be_matched_are_refused(nodes, sizes, named):
    one, two = (
        deployed([event(1)], names, node_sizes=own)
        for names, own in (("a,b", "4,6"), (nodes, sizes))
    )
    for runs in ([one, two], [two, one]) if nodes else ([one, two],):
        with pytest.raises(UserError, match=named if runs[0] is one else "nodes = "):
            statements_of_runs(runs, 1e-5)


# ---------------------------------------------------------------- delta at an epsilon


def test_delta_at_an_epsilon_inverts_epsilon_at_a_delta():
    for stated in statements(SAMPLED, 1e-5):
        (same,) = [
            s
            for s in statements(SAMPLED, 0.5, at_epsilon=stated.epsilon)
            if (s.adversary, s.relation, s.theorem)
            == (stated.adversary, stated.relation, stated.theorem)
        ]
        assert (same.asked, stated.asked) == ("delta", "epsilon")
        assert same.delta == pytest.approx(1e-5, rel=1e-3)
        assert same.epsilon == stated.epsilon


def test_without_noise_delta_is_one():
    stated = statements(replace(FULL, noise_multiplier=0.0), 1e-5, at_epsilon=3.0)
    assert {(s.delta, s.guarantee) for s in stated} == {(1.0, False)}


@pytest.mark.parametrize("epsilon_asked", [-1.0, math.inf, math.nan])
def test_impossible_epsilons_are_user_errors(epsilon_asked):
    with pytest.raises(UserError, match="give a finite number"):
        statements(FULL, 1e-5, at_epsilon=epsilon_asked)


# ------------------------------------------------------------------------ stages

STAGED = ResolvedConfig(
    client_selection="all",
    clients_per_round=539,
    num_clients=539,
    num_classes=10,
    clients_per_node=49,
    num_rounds=6,
    stages="means:0.5,scatter:2",
    batch_size=4,
    noise_multiplier=0.7,
    engine="flower",
    seed=0,
)


def staged_events(config=STAGED, rounds=6):
    return [new_event(config, round, "all", 1) for round in range(1, rounds + 1)]


@pytest.mark.parametrize("rounds", [1, 2, 3, 6])
def test_plan_and_ledger_of_embeddings_and_gradients_are_the_closed_form(rounds):
    """mu^2 = (f / 2)^2 (weights + gradient rounds * B) / (nodes * sigma^2)."""
    config = replace(STAGED, num_rounds=max(rounds, 2))
    weight = {1: 0.5, 2: 2.5, 3: 2.5 + 4, 6: 2.5 + 4 * 4}[rounds]
    stated = {
        (row.adversary, row.relation): row
        for row in statements_from_ledger(staged_events(rounds=rounds), 1e-5)
    }
    for (adversary, relation), row in stated.items():
        nodes = 1 if adversary == "server" else 11
        factor = {"replace-one": 1.0, "zero-out": 0.5}[relation]
        mu = factor * math.sqrt(weight / nodes) / 0.7
        assert row.epsilon == pytest.approx(epsilon_from_mu(mu, 1e-5), rel=1e-9)
        assert row.theorem == COUNT_THEOREM
    if rounds > 1:
        planned = statements(Plan.from_config(config), 1e-5)
        assert len(planned) == len(stated) == 6
        for row in planned:
            exact = stated[row.adversary, row.relation].epsilon
            assert row.epsilon == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("rounds", [2, 6])
@pytest.mark.parametrize("adversary", ["release", "server"])
def test_noise_for_embeddings_and_gradients_is_the_least_within_the_target(
    rounds, adversary
):
    config = replace(STAGED, num_rounds=rounds)
    plan, asked = Plan.from_config(config), (10.0, 1e-5, adversary, "zero-out")
    noise = calibrate_noise(plan, *asked)

    def epsilon(noise):
        return next(
            row.epsilon
            for row in statements(replace(plan, noise_multiplier=noise), 1e-5)
            if (row.adversary, row.relation) == (adversary, "zero-out")
        )

    assert epsilon(noise) <= 10.0 < epsilon(noise * 0.999)
    enough = replace(config, noise_multiplier=noise, target_epsilon=10.0)
    enough = replace(enough, adversary=adversary, relation="zero-out")
    budget = Budget(enough, *asked)
    for number in range(1, rounds + 1):
        event = new_event(enough, number, "all", 1)
        assert budget.allows(event)
        budget.add(event)
    assert not budget.allows(new_event(enough, rounds, "all", 2))


@pytest.mark.parametrize("target", [1.0, 2.2, 4.0, 8.0])
def test_the_most_rounds_within_a_target_count_stages_first(target):
    plan = Plan.from_config(STAGED)
    most = largest_num_rounds(plan, target, 1e-5, "release", "zero-out")
    within = [
        rounds
        for rounds in range(1, 30)
        if statements_from_ledger(staged_events(rounds=rounds), 1e-5)[1].epsilon
        <= target
    ]
    assert most == len(within) == max(within, default=0)


def test_a_budget_that_ends_before_a_stage_is_spent_before_it():
    """The next event is another kind of release than the last one."""
    config = replace(STAGED, target_epsilon=1.0, relation="zero-out")
    (first, second) = staged_events(config, rounds=2)
    stated = [statements_from_ledger(e, 1e-5)[1] for e in ([first], [first, second])]
    assert stated[0].epsilon < 0.9 < 1.0 < stated[1].epsilon
    assert is_spent(config, [first])
    cheap = replace(config, stages="means:0.5,scatter:0.01")
    assert not is_spent(cheap, [new_event(cheap, 1, "all", 1)])


def test_what_a_plan_needs_to_know_of_stages_is_checked():
    with pytest.raises(
        UserError, match=r"stages = 'means:1,scatter' .*give --stages a"
    ):
        replace(Plan.from_config(STAGED), stages="means:1,scatter")
    with pytest.raises(UserError, match=r"clip_bound = 3\.0: .* at most 2"):
        replace(Plan.from_config(STAGED), clip_bound=3.0)


def test_a_plan_of_moments_needs_no_generator_to_be_named():
    plan = Plan.from_config(STAGED)
    with pytest.raises(UserError, match="moments come in the order means, scatter"):
        replace(plan, stages="scatter,means")


def test_statements_say_that_embeddings_were_released():
    stated = statements_from_ledger(staged_events(rounds=5), 1e-5)
    said = "2 of 5 events release embeddings"
    assert all(any(said in c for c in row.conditions) for row in stated)
    plain = statements_from_ledger(staged_events(rounds=5)[2:], 1e-5)
    assert "embeddings" not in conditions(plain)


@pytest.mark.parametrize("stages", ["means:0.5,scatter:2", "means,scatter"])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_a_plan_that_ends_early_costs_what_its_first_rounds_do(rounds, stages):
    config = replace(STAGED, stages=stages)
    ended = Plan.from_config(config).ended_after(rounds)
    exact = statements_from_ledger(staged_events(config, rounds), 1e-5)
    assert epsilons(statements(ended, 1e-5)) == pytest.approx(epsilons(exact))


# ------------------------------------------------------------ what no row may leave out


@pytest.mark.parametrize(
    ("delta", "is_large"), [(0.3, True), (1 / 5390, True), (1 / 5391, False)]
)
def test_a_delta_of_a_tenth_of_1_over_k_is_too_large_in_every_row(delta, is_large):
    planned = statements(FULL, delta)
    done = statements_from_ledger([everybody(1, 539)], delta)
    assert len(planned) == len(done) == 6
    for row in (*planned, *done):
        first = row.conditions[0]
        assert first.startswith("delta is too large to read") == is_large
        assert ("K = 539" in first) == is_large


def test_a_delta_that_was_computed_is_too_large_as_well():
    rows = statements(replace(FULL, noise_multiplier=0.1), 1e-5, at_epsilon=1.0)
    assert all(row.conditions[0].startswith("delta is too large") for row in rows)


def test_a_delta_below_all_numbers_is_stated_as_their_bound():
    rows = statements(replace(FULL, noise_multiplier=100.0), 1e-5, at_epsilon=50.0)
    assert {row.delta for row in rows} == {LEAST_DELTA}
    assert all(row.guarantee for row in rows)
    assert_refused(
        "delta = 1e-301: give --delta at least 1e-300", epsilon_from_mu, 1, 1e-301
    )


def hypothetical(rows):
    text = "hypothetical: as if all rounds were aggregated securely"
    found = [r.adversary for r in rows if any(c.startswith(text) for c in r.conditions)]
    return set(found)


def test_secagg_is_hypothetical_unless_every_round_was_aggregated():
    assert hypothetical(statements(FULL, 1e-5)) == {"secagg"}
    masked = replace(FULL, secure_aggregation=True)
    assert hypothetical(statements(masked, 1e-5)) == set()
    plain, aggregated = everybody(1), everybody(2, kind="discrete")
    for events, expected in (
        ([plain], {"secagg"}),
        ([plain, aggregated], {"secagg"}),
        ([aggregated], set()),
    ):
        assert hypothetical(statements_from_ledger(events, 1e-5)) == expected


def test_next_to_no_noise_is_no_error():
    rows = statements(replace(TABLE_1, noise_multiplier=1e-100), 1e-5)
    assert {row.epsilon for row in rows} == {None}
    assert_refused(
        "noise_multiplier = 1e-300: give --noise-multiplier 0, or at least 1e-100",
        replace,
        TABLE_1,
        noise_multiplier=1e-300,
    )
