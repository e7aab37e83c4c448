"""Which clients live on which node: consecutive numbers, in the order of the nodes.

>>> silos = hosting(8, 1, "5,1,2")
>>> [list(silos.hosted(node)) for node in range(silos.num_nodes)]
[[0, 1, 2, 3, 4], [5], [6, 7]]
>>> silos.fewest_nodes(6), silos.most_clients(2)
(2, 7)

This module imports no tensor library.
"""

import bisect
import itertools
import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fedgs.config.fields import shortened
from fedgs.errors import UserError

MOST_CHARACTERS = 100_000  # of a text that may come from a hostile server


@dataclass(frozen=True)
class Placement:
    """The nodes of a run.

    Privacy: public.

    Attributes:
        num_clients: K, at least 1.
        clients_per_node: P, at least 1; the last node may have fewer.
        sizes: how many clients each node hosts, each at least 1; empty: P.
    """

    num_clients: int
    clients_per_node: int
    sizes: tuple[int, ...] = ()

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(self.sizes))

    @cached_property
    def _largest_first(self) -> list[int]:
        return list(itertools.accumulate(sorted(self.sizes, reverse=True)))

    @property
    def num_nodes(self) -> int:
        """Number of nodes that all clients live on."""
        if self.sizes:
            return len(self.sizes)
        return math.ceil(self.num_clients / self.clients_per_node)

    @property
    def largest(self) -> int:
        """Most clients on one node."""
        return max(self.sizes, default=min(self.clients_per_node, self.num_clients))

    @property
    def smallest(self) -> int:
        """Fewest clients on one node."""
        if self.sizes:
            return min(self.sizes)
        return len(self.hosted(self.num_nodes - 1))

    def hosted(self, node_id: int) -> range:
        """Returns the clients of a node, from 0 to `num_nodes` - 1."""
        if self.sizes:
            end = self._ends[node_id]
            return range(end - self.sizes[node_id], end)
        first = node_id * self.clients_per_node
        return range(first, min(first + self.clients_per_node, self.num_clients))

    def node_of(self, client: int) -> int:
        """Returns the node that hosts a client, from 0 to K - 1."""
        if self.sizes:
            return bisect.bisect_right(self._ends, client)
        return client // self.clients_per_node

    def fewest_nodes(self, clients: int) -> int:
        """Returns the fewest nodes that so many clients, 1 to K, can live on."""
        if self.sizes:
            return bisect.bisect_left(self._largest_first, clients) + 1
        return math.ceil(clients / self.clients_per_node)

    def most_clients(self, nodes: int) -> int:
        """Returns the most clients that so many nodes, at least 1, can host."""
        if self.sizes:
            return self._largest_first[min(nodes, self.num_nodes) - 1]
        return min(self.num_clients, nodes * self.clients_per_node)


# Cached with its sums over nodes: it is asked for each client of each round.
@lru_cache(maxsize=4)
def hosting(
    num_clients: int,
    clients_per_node: int,
    node_sizes: str | None,
) -> Placement:
    """Returns the nodes of a run; settings as in `RunConfig`.

    Privacy: public.

    Raises:
        UserError: `node_sizes` that cannot be read.
    """
    return Placement(num_clients, clients_per_node, read_sizes(node_sizes))


@lru_cache(maxsize=4)
def read_sizes(node_sizes: str | None) -> tuple[int, ...]:
    """Returns how many clients each node hosts; empty when unset.

    Privacy: public.

    Raises:
        UserError: something else than numbers from 1, comma-separated, or too long.
    """
    if node_sizes is None:
        return ()
    # Cut before it is split: a hostile text must not take the memory of the process.
    cut = node_sizes[: MOST_CHARACTERS + 1]
    parts = [part.strip() for part in cut.split(",")]
    valid = all(re.fullmatch("[1-9][0-9]{0,8}", part) for part in parts)
    if not valid or len(node_sizes) > MOST_CHARACTERS:
        raise UserError(
            f"node_sizes = {shortened(node_sizes)!r}: give --node-sizes the number of "
            "clients of each node, at least 1, comma-separated: 120,45,300; at most "
            f"{MOST_CHARACTERS} characters"
        )
    return tuple(map(int, parts))
