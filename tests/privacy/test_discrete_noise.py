"""What secure aggregation costs: a theorem by brute force, and every row that uses it.

The theorem of docs/privacy.md, "Integers": discrete Gaussian noise of standard
deviation s protects at least as well as Gaussian noise of variance s^2 - 4, whatever
integers it is added to, and so does the sum of n shares of it as one of n (s^2 - 4).
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from fedgs.config.integers import LEAST_NOISE, PROVEN, clip_units, noise_units
from fedgs.privacy.accountant import statements
from fedgs.privacy.client_ledger import ClientLedger, release_event
from fedgs.privacy.client_limits import ClientRefused, Limits
from fedgs.privacy.gaussian import delta_from_mu, epsilon_from_mu
from plans import FULL, epsilon, epsilons, event
from refusals import assert_refused
from tests.support.ledgers import statements_from_ledger
from tiny import run_config, tiny_config

DELTA = 1e-5
OF_NODES = {"clients_per_node": 49, "secure_aggregation": True}
SILOS = replace(FULL, noise_multiplier=4.0, **OF_NODES)

MASKED = {"secure_aggregation": True, "engine": "flower", "clients_per_node": 1}


def law(std: float, width: int) -> np.ndarray:
    """The discrete Gaussian on -width .. width."""
    points = np.arange(-width, width + 1)
    weights = np.exp(-(points**2) / (2 * std**2))
    return weights / weights.sum()


def hockey_stick(one: np.ndarray, other: np.ndarray, epsilon: float) -> float:
    """The exact delta of two laws on the same points."""
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum())


# ------------------------------------------------------------------ the theorem


@pytest.mark.parametrize(("std", "shift"), [(3.0, 1), (5.0, 12), (40.0, 60)])
def test_one_coordinate_is_as_private_as_the_theorem_says(std, shift):
    width = math.ceil(12 * std) + shift
    one = law(std, width)
    other = np.roll(one, shift)
    for epsilon_ in (0.0, 0.5, 2.0, 5.0):
        exact = hockey_stick(one, other, epsilon_)
        assert exact <= delta_from_mu(shift / math.sqrt(std**2 - 4), epsilon_) + 1e-15
    # A Gaussian of the same variance is no bound for the coarsest of them.
    if std == 3.0:
        points = [hockey_stick(one, other, e) for e in np.arange(0.0, 0.7, 0.01)]
        same = [delta_from_mu(shift / std, e) for e in np.arange(0.0, 0.7, 0.01)]
        assert any(a > b for a, b in zip(points, same, strict=True))


def test_many_coordinates_cost_what_their_norm_does():
    std, shift = 16.0, (12, 16)  # norm 20
    laws = [law(std, 180) for _ in shift]
    one = np.outer(*laws)
    other = np.roll(one, shift, axis=(0, 1))
    for epsilon_ in (0.0, 1.0, 4.0):
        exact = hockey_stick(one, other, epsilon_)
        above = delta_from_mu(20 / math.sqrt(std**2 - 4), epsilon_)
        assert 0.85 * above < exact <= above


def test_a_sum_of_shares_is_the_discrete_gaussian_of_all_but_for_a_trace():
    share, num = law(5.0, 80), 4
    total = share
    for _ in range(num - 1):
        total = np.convolve(total, share)
    expected = law(5.0 * math.sqrt(num), len(total) // 2)
    middle = expected > 1e-12  # beyond, the shares were cut off
    assert total[middle] == pytest.approx(expected[middle], rel=1e-11)


def test_what_is_enforced_is_what_the_accountant_assumes():
    assert math.sqrt(LEAST_NOISE**2 - 4) / LEAST_NOISE == PROVEN
    for multiplier, clients in itertools.product((0.01, 1.2, 40.0), (2, 539, 3400)):
        units = clip_units(multiplier, clients)
        noise = noise_units(multiplier, units)
        assert noise >= max(LEAST_NOISE, 2 * multiplier * units)
        # No sum wraps: all clients at the bound, and 16 standard deviations of noise.
        assert clients * units + 16 * math.sqrt(clients) * noise < 2**31


# ------------------------------------------------------------------ the rows


def test_rows_agree_with_another_accountant_of_the_discrete_gaussian():
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    # z = 2 for one node under replace-one: noise 2048 units, a sensitivity of 1024.
    plan = replace(SILOS, batch_size=4, num_rounds=6, clients_per_node=270)
    for adversary, nodes in (("server", 2), ("unmasked", 1)):
        one = pld.from_discrete_gaussian_mechanism(
            2048 * math.sqrt(nodes), 1024, value_discretization_interval=1e-3
        )
        # Its grid rounds each of the 6 losses up by at most 1e-3.
        found = one.self_compose(6).get_epsilon_for_delta(DELTA)
        stated = statements(plan, DELTA)
        own = epsilon(stated, adversary=adversary, relation="replace-one")
        assert own <= found * (1 + 1e-6) <= own + 6e-3 + 1e-3 * own


def test_the_server_row_is_secagg_and_the_bare_node_stays():
    stated = statements(SILOS, DELTA, colluding=2)
    plain = statements(replace(SILOS, secure_aggregation=False), DELTA, colluding=2)
    ratio = 4.0 * PROVEN / math.sqrt(32)
    for adversary, nodes in (("release", 11), ("server", 9), ("secagg", 9)):
        expected = epsilon_from_mu(math.sqrt(150 / nodes) / ratio, DELTA)
        asked = {"adversary": adversary, "relation": "replace-one"}
        assert epsilon(stated, **asked) == pytest.approx(expected, rel=1e-9)
    bare = epsilons(stated, adversary="unmasked")
    assert bare == pytest.approx(epsilons(plain, adversary="server"), rel=1e-6)
    assert not epsilons(plain, adversary="unmasked")
    (server, *_) = (s for s in stated if s.adversary == "server")
    assert "computational" in server.conditions[1]
    assert "2 help it; this holds while at least two nodes" in server.conditions[1]
    assert any("discrete Gaussian" in c for c in server.conditions)


def _attempt(round, attempt, nodes, **changes):
    """An attempt that asks so many of 11 nodes, of one client each."""
    everyone = nodes == 11
    asked = {"participants": "all" if everyone else tuple(range(nodes))}
    counts = {"planned_nodes": nodes, "counted_nodes": nodes, "num_clients": 11}
    values = {"kind": "discrete", "client_selection": "all", "attempt": attempt}
    return event(round, **values | asked | counts | changes)


def test_every_attempt_counts_with_the_nodes_that_it_asked():
    # A node drops out of round 2: the voided attempt counts, and so does its repeat.
    events = [_attempt(1, 1, 11), _attempt(2, 1, 11), _attempt(2, 2, 10)]
    stated = statements_from_ledger(events, DELTA, num_rounds=2, colluding=3)
    z = 20.0 * PROVEN / math.sqrt(4)  # of one node, replace-one
    for adversary, shares in (
        ("release", (11, 11, 10)),
        ("server", (8, 8, 7)),
        ("secagg", (8, 8, 7)),
        ("unmasked", (1, 1, 1)),
    ):
        mu = math.sqrt(sum(1 / (n * z**2) for n in shares))
        found = epsilon(stated, adversary=adversary, relation="replace-one")
        assert found == pytest.approx(epsilon_from_mu(mu, DELTA), rel=1e-9)


def test_rounds_with_and_without_masks_are_added_as_the_server_saw_them():
    plain, masked = _attempt(2, 1, 11, kind="gaussian"), _attempt(1, 1, 11)
    both = statements_from_ledger([masked, plain], 0.1)
    assert any("1 of 2 events" in c for c in both[0].conditions)
    z = 20.0 / math.sqrt(4)
    mu = math.sqrt(1 / (11 * (z * PROVEN) ** 2) + 1 / z**2)
    found = epsilon(both, adversary="server", relation="replace-one")
    assert found == pytest.approx(epsilon_from_mu(mu, 0.1), rel=1e-9)


# ------------------------------------------------------------- a client's own count


@pytest.mark.parametrize(("trusted", "shares"), [(None, 1), (2, 2)])
def test_a_count_keeps_the_own_noise_unless_its_limits_trust(tmp_path, trusted, shares):
    config = tiny_config(**MASKED)
    limits = Limits(min_honest_nodes=trusted, allow_seeded_noise=True)
    assert limits.shares(config) == shares
    for nobody in ({"secure_aggregation": False}, {"engine": "local"}):
        assert limits.shares(tiny_config(**MASKED | nobody)) == 1
    few = replace(limits, min_honest_nodes=config.num_clients + 1)
    with pytest.raises(ClientRefused, match="min_honest_nodes"):
        few.check_run(config)
    count = ClientLedger(tmp_path, ("ann",))
    count.charge(release_event(config, 1, (0,), 1, shares), limits)
    z = config.noise_multiplier * PROVEN * math.sqrt(shares / config.batch_size)
    assert ClientLedger(tmp_path, ("ann",)).largest() == pytest.approx(z**-2)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_answers": 1}, "a round may have only one node"),
        ({"clients_per_node": 600}, "a round may have only one node"),
        ({"noise_multiplier": 1e-6}, "too little noise"),
        ({"num_clients": 10**9, "clients_per_node": 10**8}, "too coarse"),
    ],
)
def test_sums_that_hide_nothing_or_say_nothing_are_refused(changes, message):
    values = {"num_clients": 539, "client_selection": "all", "engine": "flower"}
    values |= {"clients_per_round": None, "noise_multiplier": 1.0}
    values |= {"clients_per_node": 49, "secure_aggregation": True}
    run_config(**values).validate()
    assert_refused(message, run_config(**values | changes).validate)
