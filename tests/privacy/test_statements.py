"""What the events of one or several runs cost, and what each row says of itself."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from scipy.stats import binom

from fedgs.privacy.accountant import statements, statements_of_runs
from fedgs.privacy.amplification import PLD_THEOREM, Sampled, SampledBound
from fedgs.privacy.budget import Budget
from fedgs.privacy.gaussian import LEAST_DELTA, delta_from_mu, epsilon_from_mu
from fedgs.privacy.participation import COUNT_THEOREM, MIXTURE_THEOREM
from fedgs.privacy.plan import Plan
from fedgs.privacy.same_clients import Run
from fedgs.privacy.selection_cost import Target
from fedgs.round.run import new_event
from plans import WITH_RELEASES, epsilon, epsilons, event, everybody, frozen, theorems
from refusals import assert_refused
from tiny import run_config

AT = 1.0  # epsilon
COST = (2 * 2 / 40.0) ** 2  # mu^2 of one `event`: (2 C sqrt(B) / noise)^2
RATE = 0.1  # of being drawn
OTHER = {"selection_hash": "two"}
BALANCED = {"client_selection": "balanced"}
ALL = {"client_selection": "all", "participants": "all"}


def run(events, **settings):
    """A run that planned no more rounds than its events have, unless told otherwise."""
    planned = max((e.round for e in events), default=1)
    known = {"num_rounds": planned, "engine": "flower", "selection_hash": "one"}
    return Run(run_config(**known | settings), tuple(events))


def rounds(count, make=event, **changes):
    return [make(t, **changes) for t in range(1, count + 1)]


def of(*clients, **changes):
    """One round after the other, each of one client."""
    return [event(t, participants=(c,), **changes) for t, c in enumerate(clients, 1)]


def deployed(events, nodes, sizes, **settings):
    return run(events, nodes=nodes, node_sizes=sizes, num_clients=10, **settings)


def conditions(stated, adversary="release"):
    return " ".join(c for s in stated if s.adversary == adversary for c in s.conditions)


# ------------------------------------------------------ what a client may have released


def law(certain, *draws):
    """The law of mu^2: some is certain, some is drawn, rounds and cost of each kind."""
    total = Counter({certain: 1.0})
    for count, cost in draws:
        kind = [(n * cost, binom.pmf(n, count, RATE)) for n in range(count + 1)]
        pairs, total = product(total.items(), kind), Counter()
        for (value, chance), (more, other) in pairs:
            total[value + more] += chance * other
    return total


def ten_and(*events, **settings):
    return [run([*TEN, *events], **settings)]


def mixed_and(events, **settings):
    return [run(MIXED), run(events, **settings)]


LOUDER, QUIET = COST * (40 / 23) ** 2, {"noise_std": 23.0}
MIXED, TEN = rounds(20), rounds(10)
AGAIN = [*MIXED, event(18, attempt=2), event(21)]
OTHERS = event(3, participants=(1,))
ENDED = of(3, 1, 3, 3, 5, 3)  # client 3 was drawn four times before its count ended it
AT_ONCE = [*ENDED, event(6, participants=(3,), attempt=2)]
NINE = [event(t, participants=(t % 10, 9)) for t in range(1, 9)]
NOISES = [event(t, noise_std=40.0 + t) for t in range(1, 21)]
LATER = COST * ((40 / 41) ** 2 + (40 / 51) ** 2)  # of client 1, which is charged most
ONE, TWO = (of(c, c, **BALANCED) for c in (0, 1))
A_B, B_A = deployed(ONE, "a,b", "9,1"), deployed(TWO, "b,a", "1,9")
OTHER_ORDER = [deployed(MIXED, nodes, "5,5") for nodes in ("a,b", "b,a")]
ALL_IN_BOTH = [run(rounds(5, **ALL)), run(rounds(3, **ALL, **QUIET))]
TEN_QUIET = rounds(10, **QUIET)
ASKED = "asked of fewer clients than were drawn"
# Runs, the law of mu^2 that the server's row must have, and why no law is mixed.
CHARGED = {
    "nothing": ([run([])], law(0), ""),
    # An attempt asks the clients of its round again.
    "all twice": ([run(MIXED + rounds(20, attempt=2))], law(0, (20, 2 * COST)), ""),
    "one again": ([run(AGAIN)], law(0, (20, COST), (1, 2 * COST)), ""),
    "a busy client": ([run(of(0, 1, 1, 2, 1, **BALANCED))], law(3 * COST), "balanced"),
    "a louder round": (ten_and(event(11, **QUIET)), law(COST + LOUDER), "noise, C, B"),
    "one balanced": (ten_and(event(11, **BALANCED)), law(2 * COST), "is balanced"),
    "a repeat": (
        ten_and(OTHERS),
        law(2 * COST),
        "a repeated round asked other clients",
    ),
    "fewer than were drawn": (ten_and(clients_per_round=2), law(COST), ASKED),
    "ended early": ([run(ENDED, num_rounds=20)], law(4 * COST), "end after 6 of 20"),
    # A node that is away, or a client that refuses, ends its round.
    "asked at once": ([run(AT_ONCE)], law(5 * COST), "round was asked again at once"),
    "everybody in both": (
        ALL_IN_BOTH,
        law(5 * COST + 3 * LOUDER),
        "client_selection is all",
    ),
    "two secrets": (
        mixed_and(TEN_QUIET, **OTHER),
        law(0, (20, COST), (10, LOUDER)),
        "",
    ),
    "one secret": (mixed_and(rounds(20, **QUIET)), law(0, (20, COST + LOUDER)), ""),
    # Client 9: twice, and in 1 to 8.
    "others": (
        mixed_and(NINE),
        law(10 * COST),
        "copies of one run folder asked different",
    ),
    "irregular": (
        mixed_and(NOISES),
        law(2 * COST + LATER),
        "are copies of one",
    ),
    # Balanced draws are from another stream.
    "balanced": (mixed_and(rounds(30, **BALANCED)), law(3 * COST, (20, COST)), ""),
    # Client 0 of the one run is the first of node b, number 1, in the other.
    "deployed": ([A_B, B_A], law(4 * COST), "balanced"),
    "another place": ([A_B, B_A._replace(events=ONE)], law(2 * COST), "balanced"),
    "another order": (
        OTHER_ORDER,
        law(4 * COST),
        "copies of one run folder asked different",
    ),
}


@pytest.mark.parametrize("name", CHARGED)
def test_events_are_charged_by_the_theorem_that_fits_them(name):
    runs, expected, said = CHARGED[name]
    found = statements_of_runs(runs, 1e-5, at_epsilon=AT)
    asked = ("server", "replace-one")
    (row,) = [s for s in found if (s.adversary, s.relation) == asked]
    delta = sum(p * delta_from_mu(math.sqrt(m), AT) for m, p in expected.items())
    assert row.delta == pytest.approx(max(delta, LEAST_DELTA), rel=1e-6)
    text = conditions(found, "server")
    assert said in text
    assert (f"{len(runs)} runs are on the same clients" in text) == (len(runs) > 1)
    placed = "by the name of its node and its place there"
    assert (placed in text) == any(one.config.node_names for one in runs)
    is_mixed = len(expected) > 1
    assert theorems(found) == {MIXTURE_THEOREM if is_mixed else COUNT_THEOREM}
    drawn = "by a secret of the system's entropy"
    assert (drawn in conditions(found)) == is_mixed


def test_records_that_are_reshuffled_may_sit_in_the_worst_shard_of_every_run():
    runs = [run(of(c, **BALANCED), privacy_unit="record", seed=c) for c in (1, 2)]
    for is_reshuffled, count in ((False, 1), (True, 2)):
        found = statements_of_runs(runs, 1e-5, is_reshuffled=is_reshuffled)
        expected = epsilon_from_mu(math.sqrt(count * COST), 1e-5)
        cost = epsilon(found, adversary="server", relation="replace-one")
        assert cost == pytest.approx(expected)


def test_a_local_run_among_others_leaves_the_release_only():
    found = statements_of_runs([run(TEN), run(TEN, engine="local")], 1e-5)
    assert {s.adversary for s in found} == {"release"}
    assert "so there is no row server or secagg" in conditions(found)


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        (run(TEN), run(TEN, privacy_unit="record"), "privacy_unit = client and record"),
        (run(TEN), run([event(1, num_clients=11)]), r"num_clients = \[10, 11\]"),
        (A_B, deployed(ONE, "a,c", "9,1"), r"a \(9\), b \(1\) and a \(9\), c \(1\)"),
        (A_B, deployed(ONE, "b,a", "9,1"), r"a \(9\), b \(1\) and b \(9\), a \(1\)"),
        (A_B, run(TEN), r"b \(1\) and unset: .*one by one"),
    ],
)
def test_runs_whose_clients_cannot_be_matched_are_refused(one, two, message):
    assert_refused(message, statements_of_runs, [one, two], 1e-5)
    changed = run([event(1), event(2, num_clients=11)])
    assert_refused("num_clients = 11", statements_of_runs, [changed], 1e-5)


@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_a_run_that_its_budget_ended_keeps_the_mixture(delta):
    """The budget is of the run's own delta, whichever one is asked for."""
    asked = {"adversary": "server", "relation": "replace-one"}
    settings = {"num_rounds": 1000, "num_clients": 10, "clients_per_round": 1, **asked}
    settings |= {"batch_size": 4, "noise_multiplier": 20.0, "target_epsilon": 1.0}
    settings |= {"image_size": 28, "image_channels": 1}
    config, events = run([], **settings).config, []
    budget = Budget(Plan.from_config(config), Target(1.0, 1e-5, **asked))
    while budget.allows(new := event(len(events) + 1)):
        budget.add(new)
        events.append(new)
    assert 20 < len(events) < 1000
    for done, target, theorem in (
        (events, 1.0, MIXTURE_THEOREM),
        (events[:-1], 1.0, COUNT_THEOREM),
        (events, None, COUNT_THEOREM),
    ):
        ended = run(done, **settings | {"target_epsilon": target})
        assert theorems(statements_of_runs([ended], delta)) == {theorem}


# ------------------------------------------------------------------------ amplification

NODES = {"participants": (1, 2, 3), "planned_nodes": 3, "counted_nodes": 2}
TWICE = [frozen(t, attempt=a) for t in range(1, 21) for a in (1, 2)]
TWENTY, FIVE = rounds(20, frozen), rounds(5, frozen, noise_std=20.0)
ASK = {"amplification": True, "discriminator_training": "frozen"}
AMPLIFIED = {
    "all nodes that must answer hide the release": (
        [run(rounds(20, frozen, **NODES), **ASK)],
        [Sampled(10, 3, 10.0 * math.sqrt(2), 20)],
    ),
    "attempts are one draw of more noisy answers": (
        [run(TWICE, **ASK)],
        [Sampled(10, 1, 10.0 / math.sqrt(2), 20)],
    ),
    "runs are composed": (
        [run(TWENTY, **ASK), run(FIVE, **OTHER, **ASK)],
        [Sampled(10, 1, 10.0, 20), Sampled(10, 1, 5.0, 5)],
    ),
}


@pytest.mark.parametrize("name", AMPLIFIED)
def test_events_are_amplified_as_the_rounds_that_they_are(coarse_grid, name):
    runs, kinds = AMPLIFIED[name]
    found = statements_of_runs(runs, 1e-5)
    expected = SampledBound((*kinds,)).epsilon(1e-5)
    assert epsilons(found, theorem=PLD_THEOREM) == pytest.approx([expected] * 2)


FROZEN = rounds(10, frozen)
REPEAT = frozen(10, attempt=2, participants=(5,))
FORTY = [frozen(t, noise_std=40.0 + t) for t in range(1, 41)]
NOT_AMPLIFIED = {
    "it was not requested; the setting": [
        run(FROZEN, **ASK),
        run(FROZEN, **OTHER),
    ],
    "discriminator_training = selected": [run([*FROZEN, event(11)], **ASK)],
    "selection = balanced": [run([*FROZEN, frozen(11, **BALANCED)], **ASK)],
    "a repeated round asked other clients": [run([*FROZEN, REPEAT], **ASK)],
    "every client takes part": [run([*FROZEN, frozen(11, participants="all")], **ASK)],
    "the events end after 10 of 20": [run(FROZEN, **ASK, num_rounds=20)],
    "rounds are of 40 kinds, and at most 32": [run(FORTY, **ASK)],
}


@pytest.mark.parametrize("reason", NOT_AMPLIFIED)
def test_release_rows_say_why_events_are_not_amplified(coarse_grid, reason):
    found = statements_of_runs(NOT_AMPLIFIED[reason], 1e-5)
    assert len(found) == 6
    assert "no amplification by sampling: " in conditions(found)
    assert reason in conditions(found)
    assert "no amplification" not in conditions(found, "server")


# ----------------------------------------------------------------------------- phases


@pytest.mark.parametrize(
    ("phases", "first", "second"),
    [("means:0.5,scatter:2,gs-wgan", 0.5, 2), ("means,scatter,gs-wgan", 1, 1)],
)
@pytest.mark.parametrize("rounds", [1, 2, 3, 6])
def test_plan_and_ledger_of_embeddings_and_gradients_are_the_closed_form(
    rounds, phases, first, second
):
    """mu^2 = (f / 2)^2 (shares + gradient rounds * B) / (nodes * sigma^2)."""
    config = replace(WITH_RELEASES, phases=phases)
    events = [new_event(config, round, "all", 1) for round in range(1, rounds + 1)]
    mu_squared = first + second * (rounds > 1) + 4 * max(rounds - 2, 0)
    done = Run(config, events, planned_rounds=rounds)
    released = statements_of_runs([done], 1e-5)
    planned = statements(Plan.from_config(config).ended_after(rounds), 1e-5)
    assert len(planned) == len(released) == 6
    for row in (*planned, *released):
        nodes = 1 if row.adversary == "server" else 11
        factor = {"replace-one": 1.0, "zero-out": 0.5}[row.relation]
        mu = factor * math.sqrt(mu_squared / nodes) / 0.7
        assert row.epsilon == pytest.approx(epsilon_from_mu(mu, 1e-5), rel=1e-9)
        assert row.theorem == COUNT_THEOREM
    said = f"{min(rounds, 2)} of {rounds} events release embeddings"
    assert all(any(said in c for c in row.conditions) for row in released)


# ------------------------------------------------------------ what no row may leave out


def test_secagg_is_hypothetical_unless_every_round_was_aggregated():
    plain, masked = everybody(1), everybody(2, kind="discrete")
    text = "hypothetical: this row supposes"
    for events in ([plain], [plain, masked], [masked]):
        found = statements_of_runs([run(events)], 1e-5)
        assert (text in conditions(found, "secagg")) == (plain in events)
        marked = {row.adversary for row in found if row.is_hypothetical}
        assert marked == ({"secagg"} if plain in events else set())
        assert text not in conditions(found, "server")


@pytest.mark.parametrize(("noise_source", "noise_std"), [("seeded", 40.0), ("os", 0.0)])
def test_one_event_of_seeded_or_no_noise_ends_every_guarantee(noise_source, noise_std):
    events = [event(1), event(2, noise_source=noise_source, noise_std=noise_std)]
    found = statements_of_runs([run(events)], 1e-5)
    assert not any(s.guarantee for s in found)
    assert ("seeded: not private" in conditions(found)) == (noise_source == "seeded")
    assert ({s.epsilon for s in found} == {None}) == (noise_std == 0)
