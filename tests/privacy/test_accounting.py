"""Statements of a plan and of a ledger: literal figures, conditions, adversaries."""

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.privacy.accounting import SEEDED, statements, statements_from_ledger
from fedgs.privacy.gaussian import binomial_epsilon, delta_from_mu, epsilon_from_mu
from fedgs.privacy.oracle import as_published
from fedgs.privacy.participation import COUNT_THEOREM, MIXTURE_THEOREM
from fedgs.privacy.plan import ADVERSARIES, RELATIONS, Plan, noise_ratio, noise_shares
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
    theorems,
)
from refusals import assert_refused

# --------------------------------------------- figures of docs/privacy.md and the paper


def test_table_2_against_every_adversary():
    # privacy.md, "The paper's federated figure"; one client, so the columns agree.
    stated = statements(TABLE_2, 1.15e-3)
    for selection, expected in (
        ("uniform", [774.31, 206.70]),
        ("balanced", [583.52, 169.04]),
    ):
        for adversary in ADVERSARIES:
            found = epsilons(stated, adversary=adversary, client_selection=selection)
            assert found == pytest.approx(expected, abs=0.006)
    assert all(s.guarantee for s in stated)
    assert len(stated) == 12


def test_table_2_as_published():
    release, server = as_published(TABLE_2, 1.15e-3)
    assert (release.adversary, server.adversary) == ("release", "server")
    assert server.epsilon == pytest.approx(598.605, abs=0.001)  # the paper's 5.99e2
    assert release.epsilon == pytest.approx(12.602, abs=0.001)  # methods.md 9.1
    for statement in (release, server):
        assert not statement.guarantee
        assert statement.relation == "replace-one"
        assert "not a bound" in statement.conditions[0]


def test_table_1_as_published_and_as_it_is():
    (published,) = as_published(TABLE_1, 1e-5)  # a local run has no server
    assert published.epsilon == pytest.approx(9.9926, abs=1e-4)
    stated = statements(TABLE_1, 1e-5)
    found = epsilons(stated, client_selection="uniform")
    assert found == pytest.approx([610.34, 168.82], abs=0.006)
    assert {s.adversary for s in stated} == {"release"}


def test_as_published_is_only_for_the_papers_selection():
    assert as_published(replace(TABLE_2, clients_per_round=2), 1e-5) == ()
    assert as_published(replace(TABLE_2, client_selection="balanced"), 1e-5) == ()
    zero = as_published(replace(TABLE_2, noise_multiplier=0.0), 1e-5)
    assert [s.epsilon for s in zero] == [None, None]


def test_as_published_prints_nothing(capsys):
    as_published(replace(TABLE_2, noise_multiplier=1e-3, num_rounds=1), 1e-5)
    assert capsys.readouterr() == ("", "")


# --------------------------------------------------------------- relations, adversaries


def test_noise_ratios_of_the_table():
    # privacy.md section 2: sigma/sqrt(B) and 2 sigma/sqrt(B) for one node.
    assert noise_ratio(1.07, 32, "replace-one", 1) == pytest.approx(0.18915, abs=1e-5)
    assert noise_ratio(1.07, 32, "zero-out", 1) == pytest.approx(2 * 0.18915, abs=2e-5)
    assert noise_ratio(1.0, 1, "replace-one", 9) == 3.0


def test_noise_shares_of_the_adversaries():
    assert noise_shares("release", 11) == 11
    assert noise_shares("server", 11) == 1
    assert noise_shares("secagg", 11) == 11
    assert noise_shares("secagg", 11, colluding=3) == 8
    assert noise_shares("secagg", 2, colluding=3) == 0


def test_collusion_multiplies_z_by_the_root_of_the_honest_share():
    stated = statements(FULL, 1e-5, colluding=100)
    mu = math.sqrt(150) * math.sqrt(32) / (1.2 * math.sqrt(539 - 100))
    found = epsilon(stated, adversary="secagg", relation="replace-one")
    assert found == pytest.approx(epsilon_from_mu(mu, 1e-5))
    assert found > epsilon(stated, adversary="release", relation="replace-one")
    everyone = statements(FULL, 1e-5, colluding=539)
    assert epsilons(everyone, adversary="secagg") == [None, None]


def test_nodes_that_sum_first_protect_against_the_server_only_by_their_own_noise():
    silos = replace(FULL, clients_per_node=49)  # 11 nodes
    assert silos.counted_nodes == 11
    stated = statements(silos, 1e-5)
    mu = math.sqrt(150 * 32) / 1.2
    release = epsilon(stated, adversary="release", relation="replace-one")
    assert server_epsilon(stated) == pytest.approx(epsilon_from_mu(mu, 1e-5))
    assert release == pytest.approx(epsilon_from_mu(mu / math.sqrt(11), 1e-5))


@pytest.mark.parametrize(
    ("per_round", "per_node", "min_nodes", "counted"),
    [
        (1, 1, None, 1),
        (100, 1, None, 100),
        (100, 1, 80, 80),
        (100, 49, None, 3),  # ceil(100/49): the fewest nodes that 100 clients live on
        (98, 49, None, 2),
        (30, 49, 5, 1),
        (539, 49, 10, 10),
    ],
)
def test_only_nodes_that_must_answer_are_counted(
    per_round, per_node, min_nodes, counted
):
    nodes = {"clients_per_node": per_node, "min_nodes": min_nodes}
    plan = replace(
        FULL, client_selection="uniform", clients_per_round=per_round, **nodes
    )
    assert plan.counted_nodes == counted


@settings(max_examples=25, deadline=None)
@given(
    selection=st.sampled_from(["uniform", "balanced", "all"]),
    rounds=st.integers(1, 3000),
    noise=st.floats(0.05, 50.0),
    per_node=st.integers(1, 60),
)
def test_server_is_worst_and_replace_one_is_worse(selection, rounds, noise, per_node):
    plan = Plan(
        num_clients=60,
        clients_per_round=60 if selection == "all" else 12,
        num_rounds=rounds,
        batch_size=8,
        noise_multiplier=noise,
        client_selection=selection,
        clients_per_node=per_node,
    )
    stated = statements(plan, 1e-5)
    value = {(s.adversary, s.relation): s.epsilon for s in stated}
    for relation in RELATIONS:
        assert value["release", relation] <= value["server", relation]
        assert value["release", relation] == value["secagg", relation]
    for adversary in ADVERSARIES:
        assert value[adversary, "zero-out"] <= value[adversary, "replace-one"]


# -------------------------------------------------------------------- plans, conditions


def test_a_plan_that_selects_everybody_is_full_participation():
    everyone = replace(FULL, client_selection="uniform")
    assert epsilons(statements(everyone, 1e-5)) == epsilons(statements(FULL, 1e-5))


def test_without_noise_epsilon_is_unbounded_and_null():
    stated = statements(replace(TABLE_2, noise_multiplier=0.0), 1.15e-3)
    assert {s.epsilon for s in stated} == {None}
    assert not any(s.guarantee for s in stated)


@pytest.mark.parametrize(
    "call",
    [
        lambda: statements(TABLE_2, 0.0),
        lambda: statements(replace(TABLE_2, noise_multiplier=None), 1e-5),
        lambda: replace(TABLE_2, clients_per_round=867),
        lambda: replace(TABLE_2, noise_source="dice"),
        lambda: replace(FULL, min_nodes=540),
    ],
)
def test_impossible_plans_are_user_errors(call):
    with pytest.raises(UserError):
        call()


def test_a_seeded_plan_says_so_and_guarantees_nothing():
    for statement in statements(replace(FULL, noise_source="seeded"), 1e-5):
        assert SEEDED in statement.conditions
        assert not statement.guarantee
    assert not any(SEEDED in s.conditions for s in statements(FULL, 1e-5))


def test_a_mixture_says_that_its_seed_must_have_been_drawn():
    planned = statements(TABLE_2, 1e-5)
    found = statements_from_ledger([event(t) for t in range(1, 9)], 1e-5)
    for statement in (*planned, *found):
        said = "seed that was drawn at random, independent of data" in " ".join(
            statement.conditions
        )
        assert said == (statement.theorem == MIXTURE_THEOREM)
    assert theorems(found) == {MIXTURE_THEOREM}
    assert theorems(planned) == {MIXTURE_THEOREM, COUNT_THEOREM}


def test_record_level_zero_out_says_what_it_protects():
    for statement in statements(replace(FULL, privacy_unit="record"), 1e-5):
        assert statement.unit == "record"
        text = " ".join(statement.conditions)
        assert ("whole shard" in text) == (statement.relation == "zero-out")


def test_statement_as_json():
    first = statements(TABLE_2, 1.15e-3)[0].to_json()
    assert list(first) == [
        *("adversary", "relation", "unit", "delta", "epsilon", "asked", "theorem"),
        *("conditions", "guarantee", "client_selection", "num_rounds"),
    ]
    assert first["theorem"] == MIXTURE_THEOREM
    assert first["conditions"][0].startswith("delta is too large to read: 0.00115")
    assert first["conditions"][1].startswith("mixture: uniform selection of 1 of 866")


def test_plan_from_config():
    settings = {"num_clients": 180, "client_selection": "all", "clients_per_node": 49}
    settings |= {"clients_per_round": None, "noise_multiplier": 0.5, "num_rounds": 300}
    plan = Plan.from_config(RunConfig(**settings, engine="flower", noise_seed=7))
    assert (plan.clients_per_round, plan.counted_nodes) == (180, 4)
    assert (plan.noise_source, plan.noise_multiplier) == ("seeded", 0.5)
    assert_refused("num_clients", Plan.from_config, RunConfig())


# --------------------------------------------------------------------------- the ledger


def test_a_ledger_of_everybody_agrees_with_the_plan():
    plan = replace(FULL, clients_per_node=49, min_nodes=10, num_rounds=20)
    nodes = {"planned_nodes": 11, "counted_nodes": 10}
    sums = nodes | {"noise_std": 2.4, "batch_size": 32}
    events = [everybody(t, 539, **sums) for t in range(1, 21)]
    found = statements_from_ledger(events, 1e-5, colluding=3)
    expected = statements(plan, 1e-5, colluding=3)
    assert epsilons(found) == pytest.approx(epsilons(expected))
    assert theorems(found) == {COUNT_THEOREM}


def test_a_uniform_ledger_has_the_mixture_of_its_events():
    found = statements_from_ledger([event(t) for t in range(1, 51)], 1e-5)
    z = 40.0 / (2 * math.sqrt(4))
    expected = binomial_epsilon(50, 1 / 10, z, 1e-5)
    assert theorems(found) == {MIXTURE_THEOREM}
    assert epsilons(found, relation="replace-one") == pytest.approx([expected] * 3)


def test_repeated_rounds_count_again_for_the_same_clients():
    # An attempt asks the clients of its round again, so tries are one draw counted
    # twice: n = 2 * Binomial(25, 1/10), more than 50 independent draws would cost.
    # All rounds are repeated after a crash without a checkpoint.
    events = [event(t, attempt=a) for a in (1, 2) for t in range(1, 26)]
    found = statements_from_ledger(events, 1e-5)
    z = 40.0 / (2 * math.sqrt(4))
    pairs = binomial_epsilon(25, 1 / 10, z / math.sqrt(2), 1e-5)
    assert epsilons(found, relation="replace-one") == pytest.approx([pairs] * 3)
    assert pairs > binomial_epsilon(50, 1 / 10, z, 1e-5) + 0.1


def test_one_repeated_round_shifts_the_mixture():
    events = [*(event(t) for t in range(1, 20)), event(18, attempt=2), event(20)]
    at, z = 1.0, 40.0 / (2 * math.sqrt(4))
    expected = sum(
        binom.pmf(n, 19, 0.1) * weight * delta_from_mu(math.sqrt(n + extra) / z, at)
        for n in range(20)
        for extra, weight in ((0, 0.9), (2, 0.1))
    )
    found = statements_from_ledger(events, expected)
    assert server_epsilon(found) == pytest.approx(at)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"noise_std": 41.0}, "noise, C, B"),
        ({"batch_size": 5}, "noise, C, B"),
        ({"participants": (1, 2)}, "noise, C, B"),
        ({"client_selection": "balanced"}, "the selection is balanced"),
        ({"round": 3, "participants": (1,)}, "a repeated round asked others"),
    ],
)
def test_an_irregular_uniform_ledger_is_charged_the_realised_count(changes, reason):
    events = [event(t) for t in range(1, 11)] + [event(**{"round": 11, **changes})]
    found = statements_from_ledger(events, 1e-5)
    assert theorems(found) == {COUNT_THEOREM}
    assert reason in found[0].conditions[0]
    first = (2 * math.sqrt(4) / 40.0) ** 2
    last = (2 * math.sqrt(events[-1].batch_size) / events[-1].noise_std) ** 2
    expected = epsilon_from_mu(math.sqrt(first + last), 1e-5)  # client 1 twice
    assert server_epsilon(found) == pytest.approx(expected)


def test_a_ledger_of_fewer_clients_than_were_drawn_is_charged_the_realised_count():
    # With secure aggregation a round is asked of those of a draw whose nodes are there.
    events = [frozen(t) for t in range(1, 11)]
    ask = {"clients_per_round": 2, "amplification": True}
    found = statements_from_ledger(events, 1e-5, **ask)
    assert theorems(found) == {COUNT_THEOREM}
    reason = "asked of fewer clients than were drawn"
    assert reason in found[0].conditions[0]
    assert any("amplif" in c and reason in c for c in found[0].conditions)
    assert server_epsilon(found) == pytest.approx(
        epsilon_from_mu(2 * math.sqrt(4) / 40.0, 1e-5)
    )


def test_the_busiest_client_decides():
    visits = (0, 1, 1, 2, 1)
    events = [
        event(t, participants=(client,), client_selection="balanced")
        for t, client in enumerate(visits, start=1)
    ]
    found = statements_from_ledger(events, 1e-5, engine="local")
    mu = math.sqrt(3) * 2 * math.sqrt(4) / 40.0
    assert epsilons(found) == pytest.approx(
        [epsilon_from_mu(mu, 1e-5), epsilon_from_mu(mu / 2, 1e-5)]
    )
    assert [s.adversary for s in found] == ["release", "release"]


def test_ledgers_without_events_with_seeds_and_with_other_clients():
    assert set(epsilons(statements_from_ledger([], 1e-5))) == {0.0}
    seeded = statements_from_ledger([event(1), event(2, noise_source="seeded")], 1e-5)
    assert all(SEEDED in s.conditions and not s.guarantee for s in seeded)
    silent = statements_from_ledger([event(1), event(2, noise_std=0.0)], 1e-5)
    assert set(epsilons(silent)) == {None}
    with pytest.raises(UserError, match="num_clients = 11"):
        statements_from_ledger([event(1), event(2, num_clients=11)], 1e-5)


def test_statements_are_quick():
    events = [event(t, participants=(t % 10,)) for t in range(1, 30_001)]
    start = time.process_time()
    statements(TABLE_2, 1.15e-3)
    assert time.process_time() - start < 1.0  # about 0.1 s
    start = time.process_time()
    statements_from_ledger(events, 1e-5)
    assert time.process_time() - start < 4.0  # about 0.6 s
