"""Partitions: disjoint, of the promised sizes, and a function of the seed."""

import numpy as np
import pytest

from fedgs.data.partition import by_client, dirichlet, iid, split
from refusals import assert_refused
from tiny import run_config

LABELS = np.arange(600) % 10
OWNERS = np.array(["bob", "ann", "bob", "cleo", "ann", "bob"])


def rng(seed=0):
    return np.random.default_rng(seed)


def config(**settings):
    settings = {"data": "npz:toy.npz", "seed": 0, **settings}
    return run_config(**settings)


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
    groups = iid(1797, 180, rng())  # the remainder is left out
    assert [len(group) for group in groups] == [9] * 180
    assert_disjoint(groups, 1797)
    assert groups[0].max() > 500  # shuffled before it is cut


def test_by_client_keeps_owners_in_name_order_and_records_in_data_order():
    groups, names = by_client(OWNERS)
    assert names == ["ann", "bob", "cleo"]
    assert [group.tolist() for group in groups] == [[1, 4], [0, 2, 5], [3]]
    assert by_client(np.array([100, 9, 20]))[1] == ["9", "20", "100"]


@pytest.mark.parametrize("num_clients", [1, 7, 300, 600])
def test_dirichlet_gives_every_client_a_record(num_clients):
    for labels in (LABELS, np.zeros(600, np.int64)):  # classes that no record has
        groups = dirichlet(labels, 10, num_clients, rng())
        assert len(groups) == num_clients
        assert min(len(group) for group in groups) >= 1
        assert_disjoint(groups, 600)
        assert sum(len(group) for group in groups) == 600


@pytest.mark.parametrize("rule", ["iid", "dirichlet"])
def test_split_is_a_function_of_the_seed(rule):
    def records(seed):
        settings = config(partition=rule, num_clients=5, seed=seed)
        groups, _ = split(settings, LABELS, 10, None)
        return [group.tolist() for group in groups]

    assert records(1) == records(1)
    assert records(1) != records(2)


@pytest.mark.parametrize(
    ("settings", "owners", "names"),
    [
        ({"num_clients": 2}, OWNERS, ("ann", "bob")),  # the first in name order
        ({"partition": "iid", "num_clients": 6}, OWNERS, tuple("012345")),
        ({"num_clients": 4}, None, tuple("0123")),
    ],
)
def test_auto_is_by_client_where_the_data_has_clients_else_iid(settings, owners, names):
    labels = LABELS if owners is None else LABELS[: len(owners)]
    groups, found = split(config(**settings), labels, 10, owners)
    assert (found, len(groups)) == (names, len(names))
    assert_disjoint(groups, len(labels))


@pytest.mark.parametrize(
    ("settings", "owners", "message"),
    [
        ({}, None, "num_clients is unset: .*; add 'clients', the .*--num-clients"),
        ({"num_clients": 601}, None, r"num_clients = 601:"),
        ({"num_clients": 4}, OWNERS, r"num_clients = 4:"),
        (
            {"partition": "by-client"},
            None,
            "= by-client: .*no clients; add 'clients', the .*--partition iid",
        ),
        ({"privacy_unit": "record"}, OWNERS, r"privacy_unit = record:"),
    ],
)
def test_split_refuses_what_does_not_suit_the_data(settings, owners, message):
    labels = LABELS if owners is None else LABELS[: len(owners)]
    assert_refused(message, split, config(**settings), labels, 10, owners)
