"""Which clients live on which node, with nodes of one size and of any sizes."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import runs
from fedgs.config.placement import Placement, hosting, read_sizes
from fedgs.config.recipes import overridden
from fedgs.methods.schedule import nodes_of
from fedgs.privacy.accountant import statements
from fedgs.round.preparation import (
    clients_needed,
    copies_in_memory,
    nodes_in_memory,
    resolve_deployed,
)
from fedgs.runs.run_folder import RunFolder
from plans import FULL
from refusals import assert_refused
from tiny import FULL_PARTICIPATION, run_config, tiny_config, tiny_data

PLAN = dataclasses.replace(FULL, num_clients=10, clients_per_round=10)

some_nodes = st.one_of(
    st.builds(Placement, st.integers(1, 12), st.integers(1, 14)),
    st.lists(st.integers(1, 9), min_size=1, max_size=6).map(
        lambda sizes: Placement(sum(sizes), 1, tuple(sizes))
    ),
)


@given(some_nodes)
def test_every_client_lives_on_one_node(nodes):
    parts = [nodes.hosted(node) for node in range(nodes.num_nodes)]
    assert all(parts)
    assert list(itertools.chain(*parts)) == list(range(nodes.num_clients))
    assert max(map(len, parts)) == nodes.largest
    for node, part in enumerate(parts):
        assert {nodes.node_of(client) for client in part} == {node}


@given(some_nodes)
def test_fewest_nodes_and_most_clients_are_those_of_the_best_choice(nodes):
    sizes = [len(nodes.hosted(node)) for node in range(nodes.num_nodes)]
    for count in range(1, nodes.num_nodes + 1):
        best = max(map(sum, itertools.combinations(sizes, count)))
        assert nodes.most_clients(count) == best
    for clients in range(1, nodes.num_clients + 1):
        counts = range(1, nodes.num_nodes + 1)
        least = next(n for n in counts if nodes.most_clients(n) >= clients)
        assert nodes.fewest_nodes(clients) == least


@pytest.mark.parametrize(
    "text", ["0,3", "3,", ",", "-1,2", "1.5", "3;4", "a", "٣", "1" * 5000, "01"]
)
def test_sizes_that_are_no_numbers_are_refused(text):
    assert_refused(r"node_sizes = .*--node-sizes", read_sizes, text)
    assert_refused(r"node_sizes = .*--node-sizes", lambda: run_config(node_sizes=text))


def test_a_later_source_decides_how_nodes_are_described():
    first = run_config(clients_per_node=3, num_clients=6)
    sizes = overridden(first, {"node_sizes": "5,2"})
    assert (sizes.num_clients, sizes.num_nodes) == (7, 2)
    again = overridden(sizes, {"node_sizes": "5,3"})
    assert (again.num_clients, again.num_nodes) == (8, 2)
    assert overridden(again, {"clients_per_node": 1}).num_nodes == 8
    both = overridden(first, {"clients_per_node": 1, "node_sizes": "5,2"})
    assert both.num_nodes == 2


def test_a_worker_may_hold_the_largest_node():
    sizes = {"num_clients": 12, "node_sizes": "9,1,1,1", "engine": "flower"}
    assert nodes_in_memory(tiny_config(**sizes, num_workers=4)) == 2
    for workers, copies in ((1, 1), (2, 2), (4, 4 * 10 / 12)):
        config = tiny_config(**sizes, num_workers=workers)
        assert copies_in_memory(config) == pytest.approx(copies)


def test_sizes_replace_clients_per_node():
    config = run_config(num_clients=8, clients_per_node=49, node_sizes="5, 1,2")
    assert (config.num_nodes, config.largest_node) == (3, 5)
    assert nodes_of(config.validate(), (0, 4, 7)) == [0, 2]
    assert hosting(8, 49, "5, 1,2").sizes == (5, 1, 2)
    assert run_config(node_sizes="5, 1 ,2").num_clients == 8
    assert run_config(node_sizes="5, 1 ,2") == run_config(node_sizes="5,1,2")


def test_sizes_of_another_number_of_clients_are_refused():
    words, config = r"= '5,1'.* 6 clients.* is 8.*--node", {"node_sizes": "5,1"}
    assert_refused(words, lambda: run_config(num_clients=8, **config).validate())


def test_a_deployment_has_the_clients_of_its_silos():
    settings = {"engine": "flower", "num_classes": 2, "noise_multiplier": 1.0}
    settings["image_size"] = 16
    config = run_config(nodes="a,b", node_sizes="5,1", **settings)
    assert resolve_deployed(config).num_clients == 6
    words = "2 names.*node_sizes = 5,1,2 needs 3 nodes"
    config = run_config(nodes="a,b", node_sizes="5,1,2", **settings)
    assert_refused(words, resolve_deployed, config)


@pytest.mark.parametrize(
    ("per_round", "min_answers", "counted"),
    [(10, None, 3), (10, 2, 2), (7, None, 1), (8, None, 2), (10, 3, 3), (1, None, 1)],
)
def test_the_noise_of_the_fewest_nodes_is_counted(per_round, min_answers, counted):
    selection = "all" if per_round == 10 else "uniform"
    changes = {"client_selection": selection, "clients_per_round": per_round}
    sizes = {"node_sizes": "1,7,2", "min_answers": min_answers}
    plan = dataclasses.replace(PLAN, **changes, **sizes)
    assert plan.counted_nodes == counted
    # That the nodes differ matters to nobody: three of one size have its epsilons.
    equal = dataclasses.replace(PLAN, clients_per_node=4)
    if counted == 3:
        assert statements(plan, 1e-5) == statements(equal, 1e-5)


def test_amplification_needs_nodes_of_one_client():
    changes = {"client_selection": "uniform", "clients_per_round": 2}
    changes |= {"discriminator_training": "frozen", "amplification": True}
    for sizes in (",".join("1" * 10), "10"):
        sampled = dataclasses.replace(PLAN, node_sizes=sizes, **changes)
    words, uneven = "node_sizes: a node hosts up to 9 clients", {"node_sizes": "1,9"}
    assert_refused(words, dataclasses.replace, sampled, **uneven)


def test_the_largest_nodes_may_be_selected_first():
    config = tiny_config(node_sizes="1,4,1", clients_per_round=1, num_rounds=2)
    assert clients_needed(config) == 5
    assert clients_needed(tiny_config(node_sizes="1,4,1", clients_per_round=3)) == 6


def test_sizes_that_are_all_the_same_change_no_byte(tmp_path):
    products = set()
    for name, sizes in ("sizes", {"node_sizes": "2,2,2"}), ("same", {}):
        own = FULL_PARTICIPATION | sizes | {"num_rounds": 1, "warm_start_rounds": 0}
        config = tiny_config(output=str(tmp_path / name), **own)
        folder = RunFolder.create(config)
        runs.train(folder, data=tiny_data(config))
        products.add(runs.generator(folder.path))
    assert len(products) == 1
