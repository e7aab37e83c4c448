"""Partitions: disjoint, of the promised sizes, and a function of the seed."""

import numpy as np
import pytest

from fedgs.config.run_config import RunConfig
from fedgs.data.partition import DIGITS_NUM_CLIENTS, by_client, dirichlet, iid, split
from refusals import assert_refused

LABELS = np.arange(600) % 10
OWNERS = np.array(["bob", "ann", "bob", "cleo", "ann", "bob"])


def rng(seed=0):
    return np.random.default_rng(seed)


def config(**settings):
    settings = {"data": "npz:toy.npz", "seed": 0, **settings}
    return RunConfig(**settings)


def assert_disjoint(groups, num_records):
    records = np.concatenate(groups)
    assert records.dtype == np.int64
    assert len(np.unique(records)) == len(records)
    assert records.min() >= 0
    assert records.max() < num_records


def test_iid_of_mnist_is_1000_clients_with_60_records():
    groups = iid(60_000, 1000, rng())  # GS-WGAN, Algorithm 1
    assert {len(group) for group in groups} == {60}
    assert_disjoint(groups, 60_000)


def test_iid_leaves_the_remainder_out():
    groups = iid(1797, 180, rng())
    assert [len(group) for group in groups] == [9] * 180
    assert_disjoint(groups, 1797)


def test_iid_shuffles_before_it_cuts():
    first = iid(1000, 10, rng())[0]
    assert first.max() > 500


def test_by_client_keeps_owners_in_name_order_and_records_in_data_order():
    groups, names = by_client(OWNERS)
    assert names == ["ann", "bob", "cleo"]
    assert [group.tolist() for group in groups] == [[1, 4], [0, 2, 5], [3]]


def test_by_client_sorts_integers_as_numbers():
    assert by_client(np.array([100, 9, 20]))[1] == ["9", "20", "100"]


def test_dirichlet_deals_every_record_once():
    groups = dirichlet(LABELS, 10, 30, 0.5, rng())
    assert_disjoint(groups, 600)
    assert sum(len(group) for group in groups) == 600


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 0.1, 1.0, 1e300])
@pytest.mark.parametrize("num_clients", [1, 7, 300, 600])
def test_dirichlet_gives_every_client_a_record(alpha, num_clients):
    groups = dirichlet(LABELS, 10, num_clients, alpha, rng())
    assert len(groups) == num_clients
    assert min(len(group) for group in groups) >= 1
    assert_disjoint(groups, 600)


def test_dirichlet_with_large_alpha_is_near_uniform():
    # Shares of 1/10 with a standard deviation of 1e-4: 6 of 60 records, rounded.
    for group in dirichlet(LABELS, 10, 10, 1e5, rng()):
        counts = np.bincount(LABELS[group], minlength=10)
        assert counts.min() >= 5
        assert counts.max() <= 7


def test_dirichlet_with_small_alpha_gives_few_labels_per_client():
    def labels_per_client(alpha):
        groups = dirichlet(LABELS, 10, 10, alpha, rng())
        return np.mean([len(np.unique(LABELS[group])) for group in groups])

    assert labels_per_client(0.05) < 5 < 9 < labels_per_client(100.0)


def test_dirichlet_accepts_a_label_that_no_record_has():
    groups = dirichlet(np.zeros(20, np.int64), 3, 4, 0.5, rng())
    assert sum(len(group) for group in groups) == 20


@pytest.mark.parametrize("rule", ["iid", "dirichlet"])
def test_split_is_a_function_of_the_seed(rule):
    def records(seed):
        settings = config(partition=rule, num_clients=5, seed=seed)
        groups, _ = split(settings, LABELS, 10, None)
        return [group.tolist() for group in groups]

    assert records(1) == records(1)
    assert records(1) != records(2)


def test_auto_is_by_client_where_the_data_has_clients():
    groups, names = split(config(), LABELS[:6], 10, OWNERS)
    assert names == ("ann", "bob", "cleo")
    assert len(groups) == 3


def test_auto_is_iid_where_it_has_none():
    settings = config(num_clients=4)
    groups, names = split(settings, LABELS, 10, None)
    expected, _ = split(config(num_clients=4, partition="iid"), LABELS, 10, None)
    assert names == ("0", "1", "2", "3")
    assert all(map(np.array_equal, groups, expected))


def test_fewer_clients_are_the_first_in_name_order():
    groups, names = split(config(num_clients=2), LABELS[:6], 10, OWNERS)
    assert names == ("ann", "bob")
    assert [group.tolist() for group in groups] == [[1, 4], [0, 2, 5]]


def test_iid_may_override_the_clients_of_the_data():
    settings = config(partition="iid", num_clients=6)
    assert len(split(settings, LABELS[:6], 10, OWNERS)[0]) == 6


def test_digits_default_to_180_clients():
    groups, _ = split(config(data="digits"), LABELS, 10, None)
    assert len(groups) == DIGITS_NUM_CLIENTS == 180


@pytest.mark.parametrize(
    ("settings", "owners", "message"),
    [
        (
            {},
            None,
            r"num_clients is unset: .*; add 'clients', the owner of each image, or "
            "give --num-clients for shards, no people",
        ),
        ({"data": "mnist"}, None, r"mnist names .* this partition; give --num-clients"),
        ({"partition": "iid"}, OWNERS, "no number of clients for this partition; give"),
        ({"num_clients": 601}, None, r"num_clients = 601: .*600 records.*at most 600"),
        (
            {"num_clients": 601, "partition": "dirichlet"},
            None,
            r"num_clients = 601: .*600 records.*at most 600",
        ),
        ({"num_clients": 4}, OWNERS, r"num_clients = 4: .*3 clients.*at most 3"),
        (
            {"partition": "by-client"},
            None,
            "= by-client: .*no clients; add 'clients', the .*--partition iid",
        ),
        ({"privacy_unit": "record"}, OWNERS, r"privacy_unit = record: .*partition iid"),
        ({"num_clients": 2, "seed": None}, None, r"seed is unset: .*--seed"),
    ],
)
def test_split_refuses_what_does_not_suit_the_data(settings, owners, message):
    labels = LABELS if owners is None else LABELS[: len(owners)]
    assert_refused(message, split, config(**settings), labels, 10, owners)
