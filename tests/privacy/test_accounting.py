"""Statements of a plan: literal figures, relations, adversaries, conditions."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgs.privacy.accountant import SEEDED, statements
from fedgs.privacy.amplification import PLD_THEOREM
from fedgs.privacy.gaussian import LEAST_DELTA, epsilon_from_mu
from fedgs.privacy.oracle import as_published
from fedgs.privacy.participation import COUNT_THEOREM, MIXTURE_THEOREM
from fedgs.privacy.plan import ADVERSARIES, SENSITIVITIES, Plan
from plans import FULL, TABLE_1, TABLE_2, epsilon, epsilons, everybody, theorems
from refusals import assert_refused
from tests.support.ledgers import statements_from_ledger
from tiny import run_config

DRAWN = {"client_selection": "uniform", "engine": "flower"}
EVERY = {"discriminator_training": "every_round"}
SAMPLED = replace(TABLE_1, amplification=True, **DRAWN, **EVERY)

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
    assert theorems(stated) == {MIXTURE_THEOREM, COUNT_THEOREM}
    first = stated[0].to_json()
    assert list(first) == [
        *("label", "unit", "relation", "epsilon", "delta", "theorem", "conditions"),
        *("adversary", "asked", "client_selection", "num_rounds", "guarantee"),
    ]
    assert first["conditions"][0].startswith("delta is too large to read: 0.00115")
    assert first["conditions"][1].startswith("mixture: 1 of 866 clients")


def test_the_papers_figures_as_published(capsys):
    release, server = as_published(TABLE_2, 1.15e-3)
    assert server.epsilon == pytest.approx(598.605, abs=0.001)  # the paper's 5.99e2
    assert release.epsilon == pytest.approx(12.602, abs=0.001)  # methods.md 9.1
    (local,) = as_published(TABLE_1, 1e-5)  # a local run has no server
    assert local.epsilon == pytest.approx(9.9926, abs=1e-4)
    for statement in (release, server, local):
        assert not statement.guarantee
        assert "not a bound" in statement.conditions[0]
    zero = as_published(replace(TABLE_2, noise_multiplier=0.0), 1e-5)
    assert [s.epsilon for s in zero] == [None, None]
    for others in ({"clients_per_round": 2}, {"client_selection": "balanced"}):
        assert as_published(replace(TABLE_2, **others), 1e-5) == ()
    as_published(replace(TABLE_2, noise_multiplier=1e-3, num_rounds=1), 1e-5)
    assert capsys.readouterr() == ("", "")


# --------------------------------------------------------------- relations, adversaries


def test_an_adversary_faces_the_noise_of_the_nodes_that_it_cannot_take_away():
    silos = replace(FULL, clients_per_node=49, min_answers=10)
    mu = math.sqrt(150 * 32) / 1.2
    nodes = {"planned_nodes": 11, "counted_nodes": 10}
    sums = nodes | {"noise_std": 2.4, "batch_size": 32}
    events = [everybody(t, 539, **sums) for t in range(1, 151)]
    for stated in (
        statements(silos, 1e-5, colluding=3),
        statements_from_ledger(events, 1e-5, colluding=3),
    ):
        for adversary, shares in (("release", 10), ("server", 1), ("secagg", 7)):
            found = epsilon(stated, adversary=adversary, relation="replace-one")
            expected = epsilon_from_mu(mu / math.sqrt(shares), 1e-5)
            assert found == pytest.approx(expected)
    everyone = statements(FULL, 1e-5, colluding=539)
    assert epsilons(everyone, adversary="secagg") == [None, None]


@settings(max_examples=25)
@given(
    selection=st.sampled_from(["uniform", "balanced", "all"]),
    rounds=st.integers(1, 3000),
    noise=st.floats(0.05, 50.0),
    per_node=st.integers(1, 60),
)
def test_server_is_worst_and_replace_one_is_worse(selection, rounds, noise, per_node):
    sizes = {"num_clients": 60, "clients_per_round": 60 if selection == "all" else 12}
    sizes |= {"num_rounds": rounds, "clients_per_node": per_node}
    plan = replace(FULL, client_selection=selection, noise_multiplier=noise, **sizes)
    stated = statements(plan, 1e-5)
    value = {(s.adversary, s.relation): s.epsilon for s in stated}
    for relation in SENSITIVITIES:
        assert value["release", relation] <= value["server", relation]
        assert value["release", relation] == value["secagg", relation]
    for adversary in ADVERSARIES:
        assert value[adversary, "zero-out"] <= value[adversary, "replace-one"]


# ------------------------------------------------------------------------ amplification


def test_amplification_is_stated_beside_the_other_rows():
    stated = statements(SAMPLED, 1e-5)
    plain = statements(replace(SAMPLED, amplification=False), 1e-5)
    assert epsilons(stated)[:6] == epsilons(plain)
    more = {(s.adversary, s.theorem, s.guarantee, s.relation) for s in stated[6:]}
    assert more == {
        ("release", PLD_THEOREM, True, relation) for relation in SENSITIVITIES
    }
    assert [round(s.epsilon, 2) for s in stated[6:]] == [346.66, 346.66]


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("discriminator_training = selected", {"discriminator_training": "selected"}),
        ("client_selection = balanced", {"client_selection": "balanced"}),
        ("every client takes part", {"clients_per_round": 1000}),
        ("clients_per_node", {"clients_per_node": 2}),
    ],
)
def test_what_cannot_be_amplified_is_refused_and_said(reason, changes):
    stated = statements(replace(SAMPLED, amplification=False, **changes), 1e-5)
    said = f"no amplification by sampling: {reason}"
    assert said in " ".join(c for row in stated for c in row.conditions)
    words = f"amplification = True: refused: {reason}"
    assert_refused(words, replace, SAMPLED, **changes)


# -------------------------------------------------------------------- plans, conditions


def test_a_plan_that_selects_everybody_is_full_participation():
    everyone = replace(FULL, client_selection="uniform")
    assert epsilons(statements(everyone, 1e-5)) == epsilons(statements(FULL, 1e-5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: statements(TABLE_2, 0.0), "delta = 0"),
        (lambda: statements(replace(TABLE_2, noise_multiplier=None), 1e-5), "noise_mu"),
        (lambda: replace(TABLE_2, clients_per_round=867), "clients_per_round"),
        (lambda: replace(TABLE_2, noise_source="dice"), "noise_source"),
        (lambda: replace(FULL, min_answers=540), "min_answers"),
        (lambda: Plan.from_config(run_config()), "num_clients"),
        (lambda: replace(TABLE_1, noise_multiplier=1e-300), "1e-300: .* least 1e-100"),
        (lambda: epsilon_from_mu(1, 1e-301), "1e-301: give --delta at least 1e-300"),
        *[
            (lambda e=e: statements(FULL, 1e-5, at_epsilon=e), "give a finite number")
            for e in (-1.0, math.nan)
        ],
    ],
)
def test_impossible_plans_are_refused(make, message):
    assert_refused(message, make)


def test_no_noise_next_to_none_and_seeded_noise_guarantee_nothing():
    for noise in (0.0, 1e-100):
        silent = replace(FULL, noise_multiplier=noise)
        stated = statements(silent, 1e-5)
        assert {(s.epsilon, s.guarantee) for s in stated} == {(None, False)}
        stated = statements(silent, 1e-5, at_epsilon=3.0)
        assert {(s.delta, s.guarantee) for s in stated} == {(1.0, False)}
    for statement in statements(replace(FULL, noise_source="seeded"), 1e-5):
        assert SEEDED in statement.conditions
        assert not statement.guarantee
    assert not any(SEEDED in s.conditions for s in statements(FULL, 1e-5))


# ---------------------------------------------------------------- delta at an epsilon


@pytest.mark.parametrize(
    ("delta", "is_large"), [(0.3, True), (1 / 5390, True), (1 / 5391, False)]
)
def test_a_delta_of_a_tenth_of_1_over_k_is_too_large_in_every_row(delta, is_large):
    rows = [
        *statements(FULL, delta),
        *statements_from_ledger([everybody(1, 539)], delta),
    ]
    if is_large:  # one that was computed is, too
        rows += statements(replace(FULL, noise_multiplier=0.1), 1e-5, at_epsilon=1.0)
    for row in rows:
        first = row.conditions[0]
        assert first.startswith("delta is too large to read") == is_large
        assert ("K = 539" in first) == is_large


def test_a_delta_below_all_numbers_is_stated_as_their_bound():
    rows = statements(replace(FULL, noise_multiplier=100.0), 1e-5, at_epsilon=50.0)
    assert {row.delta for row in rows} == {LEAST_DELTA}
    assert all(row.guarantee for row in rows)
