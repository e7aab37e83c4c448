"""Groups of clients that are compared: which one each client of a node is in.

A client is in a cohort: that of its node, or the value that the node's own file of
cohorts has for it. A cohort is divided into G groups by a hash of the clients' names
and the run's public seed. The file is CSV, with a header:

    owner,cohort
    ann,v1
    bob,v2

A third column, part, from 0 to G - 1, says itself which group it is.

Of a small group nothing is told, and of a larger one the less the smaller it is. Were
it left out as a whole, one client would decide whether the answers of many are told,
and a release tell more of its cohort than the noise hides (`weight_of`). This module
imports no tensor library.

Source: docs/privacy.md, "One release for all groups".
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedgs.config.feature_settings import MOST_GROUPS, GroupMeansSettings
from fedgs.errors import UserError, wrap_error
from fedgs.files import read_text
from fedgs.randomness import derived_seed

HEADER = ["owner", "cohort"]
PART = "part"
PARTS = tuple(map(str, range(MOST_GROUPS)))  # what a cell of it may be


class CohortOfClient(NamedTuple):
    """What a file of cohorts says of one client.

    Attributes:
        value: the value of its cohort.
        part: which of the cohort's groups it is in; None: its name decides.
    """

    value: str
    part: int | None = None


class InGroup(NamedTuple):
    """Where a client answers, and how much of its answer is told.

    Attributes:
        number: the number of its group, from 0.
        weight: what its clipped answer is multiplied by, above 0 and at most 1; the
            same for all of the group's clients on this node.
    """

    number: int
    weight: float = 1.0


def read_client_cohorts(path: Path) -> dict[str, CohortOfClient]:
    """Reads a file of cohorts.

    Privacy: reads private data; output private. It stays with who owns the file.

    Args:
        path: the path of the CSV file.

    Returns:
        Client name to its cohort.

    Raises:
        UserError: unreadable, of other columns, empty, or a client twice.
    """
    where = f"cohorts = {path}"
    remedy = "give --cohorts a CSV file whose first line is owner,cohort"
    with wrap_error(Exception, f"{where}: it cannot be read", remedy):
        # By csv itself: a name in quotes may contain the end of a line.
        lines = io.StringIO(read_text(path), newline="")
        table = csv.reader(lines, strict=True)
        rows = [(table.line_num, row) for row in table]
    if not rows:
        raise UserError(f"{where}: it is empty; {remedy}")
    _, header = rows.pop(0)
    if header not in (HEADER, [*HEADER, PART]):
        raise UserError(f"{where}: the first line is {','.join(header)!r}; {remedy}")
    found: dict[str, CohortOfClient] = {}
    for number, row in rows:
        if not row:  # a blank line
            continue
        if len(row) != len(header):
            raise UserError(f"{where}: line {number}: give {','.join(header)}")
        owner, value, *part = row
        if owner in found:
            raise UserError(f"{where}: line {number}: the owner is there twice")
        if value != value.strip():
            problem = f"the cohort {value!r} begins or ends with blanks"
            raise UserError(f"{where}: line {number}: {problem}; leave them out")
        if any(text not in PARTS for text in part):
            raise UserError(
                f"{where}: line {number}: give part a number from 0 to {PARTS[-1]}: "
                "which of the cohort's groups the owner is in"
            )
        found[owner] = CohortOfClient(value, *map(int, part))
    if not found:
        raise UserError(f"{where}: it names no owner; give a line for each")
    return found


def groups_of(
    config: GroupMeansSettings,
    names: Sequence[str],
    cohorts: Sequence[CohortOfClient | None],
) -> list[int | None]:
    """Returns the group of each client of a node, None of one that is in none.

    Where nodes are compared, all groups of all nodes have the same number of clients,
    so that they are exchangeable as long as nodes do not differ. In cohorts, a
    client's group follows from its own cohort, and from all names of the node.

    Privacy: reads private data; output private: it stays on the node.

    Args:
        config: what is compared, and the public seed.
        names: public names of the node's clients, in their order.
        cohorts: the cohorts of each client; empty where nodes are compared.

    Returns:
        For each client a number below `num_blocks`: those of the suspicious cohort come
        after those of the healthy one.

    Raises:
        UserError: cohorts are compared, and the node has no file of them.
    """
    seed = config.seed or 0
    order = sorted(
        range(len(names)),
        key=lambda place: derived_seed(seed, f"group/{names[place]}"),
    )
    ranks = {place: rank for rank, place in enumerate(order)}
    if config.compares_nodes:
        return _of_ranks(config, [ranks[place] for place in range(len(names))])
    return _of_cohorts(config, cohorts, ranks)


def weighted(
    config: GroupMeansSettings,
    groups: Sequence[int | None],
    least: int,
) -> list[InGroup | None]:
    """Returns the groups of a node's clients with their weights.

    Privacy: reads private data; output private: it stays on the node.

    Args:
        config: what is compared.
        groups: the groups that `groups_of` returned.
        least: clients of a group on this node, below which nothing of it is told.
    """
    sizes = Counter(groups)
    found: list[InGroup | None] = []
    for group in groups:
        weight = 1.0
        # Where nodes are compared sizes are public, and the clients' limits look.
        if not config.compares_nodes:
            weight = weight_of(sizes[group], least)
        if group is None or weight == 0:
            found.append(None)
        else:
            found.append(InGroup(group, weight))
    return found


def weight_of(size: int, least: int) -> float:
    """Returns the weight of the clients of a group: 0 of one that is too small.

    Times the size of the group it is `size - least + 1`, or 0. That grows by 1 at most
    with each client, so whoever joins or leaves a group moves the sum of its answers by
    C at most, though the weights of all others in it change. If small groups were left
    out and all others told in full, one client could move `least` C.

    Args:
        size: clients of the group on this node, at least 1.
        least: the fewest of which anything is told, at least 1.

    Source: docs/privacy.md, "One release for all groups".
    """
    return max(0, size - least + 1) / size


def _of_ranks(config: GroupMeansSettings, ranks: Sequence[int]) -> list[int | None]:
    """Returns groups of one size; who is left over is in none."""
    groups: list[int | None] = []
    for rank in ranks:
        group = rank // config.group_size
        groups.append(group if group < config.groups else None)
    return groups


def _of_cohorts(
    config: GroupMeansSettings,
    cohorts: Sequence[CohortOfClient | None],
    ranks: Mapping[int, int],
) -> list[int | None]:
    """Returns groups by the values of the node's own file."""
    if not cohorts:
        raise UserError(
            f"healthy = {config.healthy}: cohorts is unset, so that nothing says which "
            "cohort a client is in; give --cohorts, a CSV file of owner,cohort"
        )
    first_of = {config.healthy: 0, config.suspicious: config.groups}
    groups: list[int | None] = []
    for place, cohort in enumerate(cohorts):
        if cohort is None or cohort.value not in first_of:
            groups.append(None)
            continue
        # By the rank among all clients of the node, whatever cohorts these are in.
        part = cohort.part
        if part is None:
            part = ranks[place]
        # Of fewer groups than the file has parts, some have several: a refusal here
        # would tell the server something of one owner.
        groups.append(first_of[cohort.value] + part % config.groups)
    return groups
