"""Where nodes are compared, only one node's noise counts, for whoever looks."""

import dataclasses
import itertools
import math

import pytest

from fedgs.errors import UserError
from fedgs.privacy.accountant import statements, statements_of_runs
from fedgs.privacy.client_ledger import ClientLedger, release_event
from fedgs.privacy.client_limits import ClientRefused, Limits
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.plan import ADVERSARIES, Plan, noise_shares
from fedgs.privacy.same_clients import Run
from fedgs.round.run import new_event
from plans import epsilon, epsilons
from tiny import BY_COHORT, BY_NODE, tiny_config

DELTA = 1e-5
NOISE = 2.0
NODES = 3
# A client moves the sum by 2 C under replace-one, for which the noise is 2 C NOISE.
MU = {"replace-one": 1 / NOISE, "zero-out": 1 / (2 * NOISE)}
OF_GROUPS = {"allow_groups": True, "allow_embeddings": True, "allow_seeded_noise": True}
OF_GROUPS |= {"min_clients_per_group": 2}


def config(settings=BY_NODE, **others):
    own = {"engine": "flower", "noise_multiplier": NOISE, "noise_seed": None}
    return tiny_config(**settings | own | others)


def ran(settings=BY_NODE, **others) -> Run:
    """A run of one release, as its ledger has it."""
    resolved = config(settings, **others)
    return Run(resolved, (new_event(resolved, 1, "all", 1),))


@pytest.mark.parametrize("relation", MU)
def test_a_plan_has_the_same_epsilon_for_everybody_who_looks(relation):
    stated = statements(Plan.from_config(config()), DELTA)
    expected = epsilon_from_mu(MU[relation], DELTA)
    for adversary in ADVERSARIES:
        found = epsilon(stated, adversary=adversary, relation=relation)
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("relation", MU)
def test_cohorts_that_are_summed_over_nodes_have_the_noise_of_the_sum(relation):
    stated = statements(Plan.from_config(config(BY_COHORT)), DELTA)
    of_sum = epsilon_from_mu(MU[relation] / math.sqrt(NODES), DELTA)
    of_node = epsilon_from_mu(MU[relation], DELTA)
    expected = {"release": of_sum, "server": of_node, "secagg": of_sum}
    for adversary, wanted in expected.items():
        found = epsilon(stated, adversary=adversary, relation=relation)
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("engine", ["local", "flower"])
def test_what_was_released_is_stated_as_it_was_planned(engine):
    run = ran(engine=engine)
    assert run.events[0].counted_nodes == 1
    assert run.events[0].planned_nodes == NODES
    planned = statements(Plan.from_config(config(engine=engine)), DELTA)
    found = statements_of_runs([run], DELTA)
    assert epsilons(found) == pytest.approx(epsilons(planned))
    assert {row.adversary for row in found} >= {"release"}
    for row in (*planned, *found):
        said = " ".join(row.conditions)
        assert "each node's own release, for nodes are compared" in said
    (cohorts,) = statements_of_runs([ran(BY_COHORT, engine="local")], DELTA)[:1]
    assert "nodes are compared" not in " ".join(cohorts.conditions)


def test_several_runs_on_the_same_clients_add_up():
    runs = [ran(), ran(selection_hash="another"), ran(BY_COHORT)]
    stated = statements_of_runs(runs, DELTA)
    costs = {"release": 2 + 1 / NODES, "server": 3, "secagg": 2 + 1 / NODES}
    for adversary, cost in costs.items():
        wanted = epsilon_from_mu(MU["replace-one"] * math.sqrt(cost), DELTA)
        found = epsilon(stated, adversary=adversary, relation="replace-one")
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("colluding", range(NODES))
def test_colluding_nodes_change_nothing_for_the_clients_of_another_node(colluding):
    """Each node's own release is published, and no other node knows its noise."""
    plan = Plan.from_config(config())
    event = ran().events[0]
    honest = statements(plan, DELTA)
    for stated in (
        statements(plan, DELTA, colluding=colluding),
        statements_of_runs([ran()], DELTA, colluding=colluding),
    ):
        for adversary in ADVERSARIES:
            of_one = epsilons(honest, adversary=adversary)
            assert epsilons(stated, adversary=adversary) == pytest.approx(of_one)
    assert event.planned_nodes == NODES


def test_no_client_is_protected_if_all_nodes_collude():
    stated = statements(Plan.from_config(config()), DELTA, colluding=NODES)
    assert epsilons(stated, adversary="secagg") == [None, None]
    found = statements_of_runs([ran()], DELTA, colluding=NODES)
    assert epsilons(found, adversary="secagg") == [None, None]


@pytest.mark.parametrize(
    ("colluding", "shares"), [(0, 2), (1, 1), (2, 1), (3, 1), (4, 0)]
)
def test_the_node_that_hosts_a_client_is_never_among_those_that_collude(
    colluding, shares
):
    """By brute force: 2 or more of 4 nodes answer, and the client's own is one."""
    others = range(1, 4)
    left: list[int] = []
    for count in range(1, 4):
        for answering in itertools.combinations(others, count):
            # With `colluding` of all four nodes, of which the client's own is none.
            for known in itertools.combinations(others, min(colluding, 3)):
                left.append(1 + len({*answering} - {*known}))
    least = min(left) if colluding < 4 else 0
    assert noise_shares("secagg", 2, 4, colluding) == shares == least


# ------------------------------------------------------------------ the clients' limits


def test_no_trust_in_others_softens_what_a_client_counts(tmp_path):
    """Sums are not masked here, so nobody else's noise is in what is published."""
    run = config()
    trusting = Limits(**OF_GROUPS, min_honest_nodes=NODES)
    assert trusting.shares(run) == 1
    event = release_event(run, 1, range(8), 8, trusting.shares(run))
    names = [f"owner {number}" for number in range(8)]
    count = ClientLedger(tmp_path, names)
    count.charge(event, trusting)
    assert count.largest() == pytest.approx(MU["replace-one"] ** 2)
    count.charge(event, trusting)
    assert count.largest() == pytest.approx(2 * MU["replace-one"] ** 2)
    # Nor are masks to be had: they would hide what is to be compared.
    with pytest.raises(UserError, match="secure_aggregation = True: "):
        config(secure_aggregation=True)
    masked = dataclasses.replace(run, secure_aggregation=True)
    with pytest.raises(ClientRefused, match="min_honest_nodes = 3"):
        trusting.check_run(masked)


def test_a_client_takes_part_only_if_its_limits_say_so():
    others = {name: OF_GROUPS[name] for name in OF_GROUPS if name != "allow_groups"}
    for settings in (BY_NODE, BY_COHORT):
        Limits(**OF_GROUPS).check_run(config(settings))
        with pytest.raises(ClientRefused, match="allow_groups = False"):
            Limits(**others).check_run(config(settings))


def test_groups_whose_size_is_public_are_as_large_as_the_client_wants():
    limits = Limits(**OF_GROUPS | {"min_clients_per_group": 10})
    for size in (2, 9):
        small = config(num_clients=120, clients_per_node=40, clients_per_group=size)
        with pytest.raises(ClientRefused, match="min_clients_per_group = 10"):
            limits.check_run(small)
    limits.check_run(config(num_clients=120, clients_per_node=40))
    assert Limits().min_clients_per_group == 5
    # A node that has one client fewer makes all groups smaller.
    uneven = config(num_clients=119, node_sizes="40,40,39")
    with pytest.raises(ClientRefused, match="min_clients_per_group = 10"):
        limits.check_run(uneven)


def test_the_limit_of_a_client_is_that_of_one_node():
    enough = epsilon_from_mu(MU["zero-out"], DELTA)
    own = {"delta": DELTA, "relation": "zero-out"}
    Limits(**OF_GROUPS, **own, client_epsilon=enough * 1.001).check_run(config())
    with pytest.raises(ClientRefused, match="client_epsilon"):
        Limits(**OF_GROUPS, **own, client_epsilon=enough * 0.999).check_run(config())
