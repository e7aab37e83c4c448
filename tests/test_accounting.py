"""Epsilons: literal figures, independent oracles, and a budget that stops in time."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import binom, norm

from fedgs.accounting import (
    ADVERSARIES,
    COUNT_THEOREM,
    MIXTURE_THEOREM,
    RELATIONS,
    SEEDED,
    Budget,
    Plan,
    _binomial,
    as_published,
    binomial_delta,
    binomial_epsilon,
    calibrate_noise,
    delta_from_mu,
    epsilon_from_mu,
    largest_num_rounds,
    mu_from_epsilon,
    noise_ratio,
    noise_shares,
    statements,
    statements_from_ledger,
)
from fedgs.config import RunConfig, UserError
from fedgs.ledger import Event

# The paper's federated run (Table 2), and its central run (Table 1).
TABLE_2 = Plan(
    num_clients=866,
    clients_per_round=1,
    num_rounds=30_000,
    batch_size=32,
    noise_multiplier=1.07,
    client_selection=None,
    engine="flower",
)
TABLE_1 = replace(TABLE_2, num_clients=1000, num_rounds=20_000, engine="local")
# Everybody in every round, as in the design's prototype.
FULL = Plan(
    num_clients=539,
    clients_per_round=539,
    num_rounds=150,
    batch_size=32,
    noise_multiplier=1.2,
    client_selection="all",
)
Z = 1.07 / math.sqrt(32)  # one release, replace-one


def event(round=1, **changes):
    values = {
        "round": round,
        "attempt": 1,
        "participants": (round % 10,),
        "num_clients": 10,
        "planned_nodes": 1,
        "counted_nodes": 1,
        "noise_std": 40.0,
        "clip_bound": 1.0,
        "batch_size": 4,
        "client_selection": "uniform",
        "discriminator_training": "selected",
        "noise_source": "os",
    }
    return Event(**{**values, **changes})


def epsilons(stated, **wanted):
    """The epsilons of the statements with these fields, in order."""
    return [
        s.epsilon
        for s in stated
        if all(getattr(s, name) == value for name, value in wanted.items())
    ]


def epsilon(stated, **wanted):
    (found,) = epsilons(stated, **wanted)
    return found


# --------------------------------------------- figures of docs/privacy.md and the paper


@pytest.mark.parametrize(
    ("target", "delta", "mu"),
    [  # privacy.md, "Targets in mu"
        (10, 1e-5, 2.0004),
        (10, 1 / 866, 2.4827),
        (10, 1 / 539, 2.5521),
        (3, 1e-5, 0.7191),
        (1, 1e-5, 0.2681),
        (4.3772, 1e-5, 1.0),
    ],
)
def test_mu_of_an_epsilon(target, delta, mu):
    assert mu_from_epsilon(target, delta) == pytest.approx(mu, abs=6e-5)


@pytest.mark.parametrize(
    ("mu", "expected"),
    [  # privacy.md section 2: the prototype, zero-out then replace-one, delta 1e-5
        (2.552095, 13.56),
        (2 * 2.552095, 34.07),
        (0.5, 1.99),
        (1.0, 4.38),
    ],
)
def test_epsilon_of_a_mu(mu, expected):
    assert epsilon_from_mu(mu, 1e-5) == pytest.approx(expected, abs=0.006)


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


def test_table_2_with_the_average_participation_exactly():
    # privacy.md: [578.03] and [167.55] zero-out; no bounds, so no statement has them.
    mu = math.sqrt(30_000 / 866) / Z
    assert epsilon_from_mu(mu, 1.15e-3) == pytest.approx(578.03, abs=0.006)
    assert epsilon_from_mu(mu / 2, 1.15e-3) == pytest.approx(167.55, abs=0.006)


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


# --------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("mu", [0.1, 0.7, 2.0, 6.0])
@pytest.mark.parametrize("at", [0.0, 0.5, 3.0])
def test_delta_is_the_integral_of_the_hockey_stick(mu, at):
    def stick(x):
        return max(0.0, norm.pdf(x, mu) - math.exp(at) * norm.pdf(x))

    kink = at / mu + mu / 2  # where the densities' ratio is e^epsilon
    integral, error = quad(stick, kink, kink + mu + 12, epsabs=1e-13)
    assert error < 1e-9
    assert delta_from_mu(mu, at) == pytest.approx(integral, abs=2e-9)


@pytest.mark.parametrize(("ratio", "count"), [(2.0, 1), (5.0, 40), (Z, 3)])
def test_composed_gaussian_is_dp_accountings_pld(ratio, count):
    distribution = privacy_loss_distribution.from_gaussian_mechanism(
        ratio / math.sqrt(count), value_discretization_interval=1e-3
    )
    expected = distribution.get_epsilon_for_delta(1e-5)
    # The PLD is pessimistic by at most its interval.
    found = epsilon_from_mu(math.sqrt(count) / ratio, 1e-5)
    assert expected - 1.1e-3 <= found <= expected + 1e-6


def test_the_mixture_is_the_sum_over_participation_counts():
    total, rate, ratio = 40, 0.3, 1.7
    expected = sum(
        binom.pmf(n, total, rate) * delta_from_mu(math.sqrt(n) / ratio, 2.0)
        for n in range(total + 1)
    )
    assert binomial_delta(total, rate, ratio, 2.0) == pytest.approx(expected, rel=1e-9)
    found = binomial_epsilon(total, rate, ratio, expected)
    assert found == pytest.approx(2.0, abs=1e-8)


@pytest.mark.parametrize(
    ("rounds", "rate"),
    [(30_000, 1 / 866), (1, 0.1), (7, 1.0), (7, 0.0), (10**6, 0.5), (2000, 0.999)],
)
def test_truncation_keeps_the_law_but_not_its_tails(rounds, rate):
    law = _binomial({1: rounds}, rate)
    assert 0 <= law.tail < 2e-18
    assert law.weights.sum() == pytest.approx(1.0, abs=1e-9)
    assert law.weights @ law.counts == pytest.approx(rounds * rate, rel=1e-9)
    spread = math.sqrt(rounds * rate * (1 - rate))
    assert len(law.counts) < 30 * spread + 30  # fast: not all of 0..T


def test_the_mixture_is_the_mean_of_simulated_participation():
    counts = np.random.default_rng(0).binomial(2000, 0.01, size=20_000)
    values, times = np.unique(counts, return_counts=True)
    deltas = [delta_from_mu(math.sqrt(n) / 4.0, 1.0) for n in values]
    mean = np.average(deltas, weights=times)
    # Standard error below 0.0009 (deltas spread by 0.12 at most): 5 of them.
    assert binomial_delta(2000, 0.01, 4.0, 1.0) == pytest.approx(mean, abs=0.0045)


# ---------------------------------------------------------------------------- limits


def test_limits_of_mu():
    assert epsilon_from_mu(0.0, 1e-5) == 0.0
    assert epsilon_from_mu(math.inf, 1e-5) == math.inf
    assert (delta_from_mu(0.0, 1.0), delta_from_mu(math.inf, 1.0)) == (0.0, 1.0)
    assert epsilon_from_mu(1e-9, 1e-5) == 0.0
    assert delta_from_mu(1e-310, 1.0) == 0.0  # no overflow warning


def test_large_epsilons_are_stable():
    # Phi(-eps/mu + mu/2) = delta to first order: eps = mu^2/2 + mu * 4.2649 (1e-5).
    assert epsilon_from_mu(1000.0, 1e-5) == pytest.approx(504_264, rel=1e-4)


def test_certain_selection_is_no_selection():
    assert binomial_epsilon(50, 1.0, 9.0, 1e-5) == pytest.approx(
        epsilon_from_mu(math.sqrt(50) / 9.0, 1e-5)
    )
    everyone = replace(FULL, client_selection="uniform")
    assert epsilons(statements(everyone, 1e-5)) == epsilons(statements(FULL, 1e-5))


def test_without_noise_epsilon_is_unbounded_and_null():
    stated = statements(replace(TABLE_2, noise_multiplier=0.0), 1.15e-3)
    assert {s.epsilon for s in stated} == {None}
    assert not any(s.guarantee for s in stated)
    # Also where a client hardly ever takes part: delta = 1e-5 > 1/K.
    assert binomial_epsilon(1, 1e-6, 0.0, 1e-5) == math.inf


@pytest.mark.parametrize(
    "call",
    [
        lambda: delta_from_mu(-1.0, 1.0),
        lambda: delta_from_mu(math.nan, 1.0),
        lambda: delta_from_mu(1.0, -1.0),
        lambda: delta_from_mu(1.0, math.inf),
        lambda: epsilon_from_mu(1.0, 0.0),
        lambda: epsilon_from_mu(1.0, 1.0),
        lambda: mu_from_epsilon(math.inf, 1e-5),
        lambda: binomial_epsilon(10, 1.5, 1.0, 1e-5),
        lambda: statements(TABLE_2, 0.0),
        lambda: statements(replace(TABLE_2, noise_multiplier=None), 1e-5),
        lambda: replace(TABLE_2, clients_per_round=867),
        lambda: replace(TABLE_2, noise_source="dice"),
        lambda: replace(FULL, min_nodes=540),
    ],
)
def test_impossible_arguments_are_user_errors(call):
    with pytest.raises(UserError):
        call()


# ------------------------------------------------------------- relations, adversaries


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
    server = epsilon(stated, adversary="server", relation="replace-one")
    release = epsilon(stated, adversary="release", relation="replace-one")
    assert server == pytest.approx(epsilon_from_mu(mu, 1e-5))
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
    plan = replace(
        FULL,
        client_selection="uniform",
        clients_per_round=per_round,
        clients_per_node=per_node,
        min_nodes=min_nodes,
    )
    assert plan.counted_nodes == counted


def test_a_seeded_plan_says_so_and_guarantees_nothing():
    for statement in statements(replace(FULL, noise_source="seeded"), 1e-5):
        assert SEEDED in statement.conditions
        assert not statement.guarantee
    assert not any(SEEDED in s.conditions for s in statements(FULL, 1e-5))


def test_record_level_zero_out_says_what_it_protects():
    for statement in statements(replace(FULL, privacy_unit="record"), 1e-5):
        assert statement.unit == "record"
        text = " ".join(statement.conditions)
        assert ("whole shard" in text) == (statement.relation == "zero-out")


def test_statement_as_json():
    first = statements(TABLE_2, 1.15e-3)[0].to_json()
    assert list(first) == [
        *("adversary", "relation", "unit", "delta", "epsilon", "theorem"),
        *("conditions", "guarantee", "client_selection"),
    ]
    assert first["theorem"] == MIXTURE_THEOREM
    assert first["conditions"][0].startswith("mixture: uniform selection of 1 of 866")


def test_plan_from_config():
    config = RunConfig(
        num_clients=180,
        clients_per_round=None,
        client_selection="all",
        noise_multiplier=0.5,
        num_rounds=300,
        clients_per_node=49,
        engine="flower",
        noise_seed=7,
    )
    plan = Plan.from_config(config)
    assert (plan.clients_per_round, plan.counted_nodes) == (180, 4)
    assert (plan.noise_source, plan.noise_multiplier) == ("seeded", 0.5)
    with pytest.raises(UserError, match="num_clients"):
        Plan.from_config(RunConfig())


# ------------------------------------------------------------------------ the ledger


def test_a_ledger_of_everybody_agrees_with_the_plan():
    plan = replace(FULL, clients_per_node=49, min_nodes=10, num_rounds=20)
    events = [
        event(
            t,
            participants="all",
            num_clients=539,
            planned_nodes=11,
            counted_nodes=10,
            noise_std=2.4,
            batch_size=32,
            client_selection="all",
        )
        for t in range(1, 21)
    ]
    found = statements_from_ledger(events, 1e-5, colluding=3)
    expected = statements(plan, 1e-5, colluding=3)
    assert epsilons(found) == pytest.approx(epsilons(expected))
    assert {s.theorem for s in found} == {COUNT_THEOREM}


def test_a_uniform_ledger_has_the_mixture_of_its_events():
    found = statements_from_ledger([event(t) for t in range(1, 51)], 1e-5)
    z = 40.0 / (2 * math.sqrt(4))
    expected = binomial_epsilon(50, 1 / 10, z, 1e-5)
    assert {s.theorem for s in found} == {MIXTURE_THEOREM}
    assert epsilons(found, relation="replace-one") == pytest.approx([expected] * 3)


def test_repeated_rounds_count_again_for_the_same_clients():
    # An attempt asks the clients of its round again, so tries are one draw counted
    # twice: n = 2 * Binomial(25, 1/10), more than 50 independent draws would cost.
    events = [event(t, attempt=a) for t in range(1, 26) for a in (1, 2)]
    found = statements_from_ledger(events, 1e-5)
    z = 40.0 / (2 * math.sqrt(4))
    pairs = binomial_epsilon(25, 1 / 10, z / math.sqrt(2), 1e-5)
    assert epsilons(found, relation="replace-one") == pytest.approx([pairs] * 3)
    assert pairs > binomial_epsilon(50, 1 / 10, z, 1e-5) + 0.1


def test_one_repeated_round_shifts_the_mixture():
    events = [event(t) for t in range(1, 21)] + [event(20, attempt=2)]
    at, z = 1.0, 40.0 / (2 * math.sqrt(4))
    expected = sum(
        binom.pmf(n, 19, 0.1) * weight * delta_from_mu(math.sqrt(n + extra) / z, at)
        for n in range(20)
        for extra, weight in ((0, 0.9), (2, 0.1))
    )
    found = statements_from_ledger(events, expected)
    assert epsilon(found, adversary="server", relation="replace-one") == pytest.approx(
        at
    )


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
    assert {s.theorem for s in found} == {COUNT_THEOREM}
    assert reason in found[0].conditions[0]
    first = (2 * math.sqrt(4) / 40.0) ** 2
    last = (2 * math.sqrt(events[-1].batch_size) / events[-1].noise_std) ** 2
    expected = epsilon_from_mu(math.sqrt(first + last), 1e-5)  # client 1 twice
    server = epsilon(found, adversary="server", relation="replace-one")
    assert server == pytest.approx(expected)


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


# ----------------------------------------------------------------- calibration, budget


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("selection", ["uniform", "balanced", "all"])
def test_calibrated_noise_is_the_smallest_of_4_digits(adversary, relation, selection):
    per_round = 539 if selection == "all" else 20
    plan = replace(FULL, client_selection=selection, clients_per_round=per_round)
    noise = calibrate_noise(plan, 3.0, 1e-5, adversary, relation, colluding=2)
    digits = f"{noise:.4g}"
    assert float(digits) == noise
    less = noise - 10.0 ** (math.floor(math.log10(noise)) - 3)

    def reached(value):
        stated = statements(replace(plan, noise_multiplier=value), 1e-5, colluding=2)
        return epsilon(stated, adversary=adversary, relation=relation)

    assert reached(noise) <= 3.0 < reached(less)


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
    with pytest.raises(UserError, match=message):
        calibrate_noise(plan, *arguments)


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


def spent(events, adversary="server", relation="replace-one"):
    stated = statements_from_ledger(events, 1e-5)
    return epsilon(stated, adversary=adversary, relation=relation)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("selection", ["uniform", "balanced"])
def test_a_budget_stops_before_it_is_exceeded(relation, adversary, selection):
    plan = replace(BUDGET_PLAN, client_selection=selection)
    budget = Budget(plan, 3.0, 1e-5, adversary, relation)
    nodes = {"planned_nodes": 3, "counted_nodes": 2, "client_selection": selection}
    candidates = (event(t, **nodes) for t in range(1, 10_000))
    done, refused = run_until_refused(budget, candidates)
    assert len(done) > 20
    assert spent(done, adversary, relation) <= 3.0
    assert spent([*done, refused], adversary, relation) > 3.0


def test_a_budget_counts_the_earlier_events():
    done, refused = run_until_refused(
        Budget(BUDGET_PLAN, 3.0, 1e-5, "server", "replace-one"),
        (event(t) for t in range(1, 10_000)),
    )
    resumed = Budget(BUDGET_PLAN, 3.0, 1e-5, "server", "replace-one", events=done)
    assert not resumed.allows(refused)
    shorter = Budget(BUDGET_PLAN, 3.0, 1e-5, "server", "replace-one", events=done[:-1])
    assert shorter.allows(done[-1])


@pytest.mark.parametrize("repeated", [range(1, 11), range(5, 10_000, 5)])
def test_a_budget_charges_repeated_rounds_for_the_same_clients(repeated):
    def attempts():
        for t in range(1, 10_000):
            yield event(t)
            if t in repeated:
                yield event(t, attempt=2)

    budget = Budget(BUDGET_PLAN, 3.0, 1e-5, "server", "replace-one")
    done, refused = run_until_refused(budget, attempts())
    assert spent(done) <= 3.0 < spent([*done, refused])


def test_a_budget_falls_back_to_counts_when_the_noise_changes():
    budget = Budget(BUDGET_PLAN, 3.0, 1e-5, "server", "replace-one")
    events = (event(t, noise_std=40.0 if t < 30 else 60.0) for t in range(1, 10_000))
    done, refused = run_until_refused(budget, events)
    assert len(done) > 30
    assert spent(done) <= 3.0 < spent([*done, refused])


def test_a_calibrated_run_uses_its_whole_budget():
    noise = calibrate_noise(FULL, 10.0, 1e-5, "release", "replace-one")
    plan = replace(FULL, noise_multiplier=noise)
    everyone = {
        "participants": "all",
        "num_clients": 539,
        "planned_nodes": 539,
        "counted_nodes": 539,
        "noise_std": 2 * noise,
        "batch_size": 32,
        "client_selection": "all",
    }
    budget = Budget(plan, 10.0, 1e-5, "release", "replace-one")
    done, _ = run_until_refused(budget, (event(t, **everyone) for t in range(1, 999)))
    assert len(done) == 150


def test_a_budget_refuses_other_clients():
    budget = Budget(BUDGET_PLAN, 3.0, 1e-5, "server", "replace-one")
    with pytest.raises(UserError, match="num_clients = 11"):
        budget.allows(event(num_clients=11))
    with pytest.raises(UserError, match="num_clients = 11"):
        budget.add(event(num_clients=11))


# ------------------------------------------------------------------------- properties

MUS = st.floats(0.01, 50.0)
DELTAS = st.floats(1e-9, 0.5)


@settings(max_examples=60, deadline=None)
@given(mu=MUS, delta=DELTAS)
def test_epsilon_and_delta_are_inverse(mu, delta):
    found = epsilon_from_mu(mu, delta)
    assert delta_from_mu(mu, found) <= delta
    if found > 0:
        assert delta_from_mu(mu, found) == pytest.approx(delta, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(mu=MUS, factor=st.floats(1.01, 5.0), delta=DELTAS)
def test_epsilon_grows_with_mu_and_falls_with_delta(mu, factor, delta):
    assert epsilon_from_mu(mu * factor, delta) >= epsilon_from_mu(mu, delta)
    assert epsilon_from_mu(mu, delta / factor) >= epsilon_from_mu(mu, delta)


@settings(max_examples=40, deadline=None)
@given(
    rounds=st.integers(1, 2000),
    rate=st.floats(0.001, 1.0),
    ratio=st.floats(0.2, 20.0),
    delta=st.floats(1e-8, 0.1),
)
def test_the_mixture_grows_with_rounds_and_lies_below_full_participation(
    rounds, rate, ratio, delta
):
    found = binomial_epsilon(rounds, rate, ratio, delta)
    slack = 1e-9 * (1 + found)
    assert found <= binomial_epsilon(rounds + 1, rate, ratio, delta) + slack
    assert found <= binomial_epsilon(rounds, rate, ratio * 0.9, delta) + slack
    assert found <= epsilon_from_mu(math.sqrt(rounds) / ratio, delta) + slack


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
