"""Which records belong to which client, and which of them are held out of training.

`iid` cuts shuffled records into equal shards (GS-WGAN Algorithm 1: 1000 x 60 records of
MNIST), `by-client` keeps the owners that the data names, `dirichlet` skews the labels.

Every owner holds out `test_fraction` of its own images, or `test_owners` holds out all
images of some owners. Either is drawn by the owner's name alone: neither the run's
seed, nor its partition, nor other owners change the choice. An evaluation therefore
never meets an image that a run with the same setting trained on.

Source:
    Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Algorithm 1.
    Yurochkin et al., "Bayesian nonparametric federated learning of neural networks",
    ICML 2019, section 4 (label skew by a Dirichlet draw per class over clients).
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedgs.config.fields import Problem, refuse
from fedgs.config.recipes import OWNERS_HELD_OUT
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.config.settings import GIVEN
from fedgs.data.records import LEFT_OUT, Records, plain_name
from fedgs.errors import UserError
from fedgs.randomness import stream

DIGITS_NUM_CLIENTS = 180  # about 10 images each: noise on the average falls as 1/K
DIRICHLET_ALPHA = 0.5  # label skew of `dirichlet`; smaller is more
HELD_OUT_SEED = 0  # one for all runs
NOBODY = ""  # the owner of all records of a source that names none

Groups = list[NDArray[np.int64]]


def split(
    config: RunConfig,
    labels: NDArray[np.int64],
    num_classes: int,
    clients: NDArray[np.generic] | None,
    owners: NDArray[np.generic] | None = None,
) -> tuple[Groups, tuple[str, ...]]:
    """Applies `config.partition` to N records.

    Privacy: reads private data; output private. `iid` depends on N alone.

    Args:
        config: with `seed`; uses `partition` and `num_clients`.
        labels: shape (N,), int64, in [0, num_classes) or `LEFT_OUT`.
        num_classes: number of labels, at least 1.
        clients: owner of each record, shape (N,), integers or strings; None without.
        owners: all of them, where some have no record.

    Returns:
        The record numbers of each client (disjoint, int64) and its name.

    Raises:
        UserError: the partition does not suit the data, or num_clients is unset,
            larger than the records, or larger than the clients of the data.
    """
    chosen = rule(config, clients)
    # Nothing is drawn here, so that owners do not depend on the seed.
    if chosen == "by-client":
        return _named(config, clients, owners)
    num_clients = _num_clients(config, len(labels))
    if config.seed is None:
        raise UserError(f"seed is unset: partition = {chosen} needs --seed")
    rng = stream(config.seed, "partition")
    # An equal cut counts records of left-out classes too: no label moves another.
    if chosen == "iid":
        groups = iid(len(labels), num_clients, rng)
    else:
        kept = np.flatnonzero(labels != LEFT_OUT)  # these shards follow the labels
        dealt = dirichlet(
            labels[kept],
            num_classes=num_classes,
            num_clients=num_clients,
            rng=rng,
        )
        groups = [kept[own] for own in dealt]
    names = [str(client_id) for client_id in range(num_clients)]
    return groups, tuple(names)


def rule(config: RunConfig, clients: NDArray[np.generic] | None) -> str:
    """Returns by-client, iid or dirichlet: what `config.partition` means here.

    Privacy: public. Only whether the data names owners is read.
    """
    if config.partition != "auto":
        return config.partition
    # An owner is a person, and a shard protects nobody as a whole.
    if clients is not None:
        return "by-client"
    return "iid"


def iid(num_records: int, num_clients: int, rng: np.random.Generator) -> Groups:
    """Shuffles once and cuts floor(N / K) consecutive records per client.

    The N mod K records left over belong to nobody, so that all clients are equal.

    Privacy: public. The records themselves are not read.

    Args:
        num_records: N, at least num_clients.
        num_clients: K, at least 1.
        rng: the stream of the partition.

    >>> [len(group) for group in iid(11, 3, np.random.default_rng(0))]
    [3, 3, 3]
    """
    size = num_records // num_clients
    order = rng.permutation(num_records).astype(np.int64)
    dealt = order[: num_clients * size]
    return list(dealt.reshape(num_clients, size))


def by_client(
    clients: NDArray[np.generic],
    owners: NDArray[np.generic] | None = None,
) -> tuple[Groups, list[str]]:
    """Groups records by owner; clients in sorted order, records in the data's.

    Privacy: reads private data; output private.

    Args:
        clients: owner of each record, shape (N,), integers (sorted as numbers) or
            strings.
        owners: all that there are, each at least once; those of `clients` when None.

    >>> by_client(np.array([10, 9, 10]))
    ([array([1]), array([0, 2])], ['9', '10'])
    """
    if owners is None:
        owners = clients
    found = np.unique(owners)
    owner = np.searchsorted(found, clients)
    names = [str(name) for name in found]
    return _grouped(owner, len(found)), names


def _grouped(owner: NDArray[np.int64], num_owners: int) -> Groups:
    """Returns the record numbers of each owner.

    Args:
        owner: the owner of each record, shape (N,), in [0, num_owners).
        num_owners: some of them may have no record.
    """
    # Stable, so that records stay in the data's order.
    order = np.argsort(owner, kind="stable").astype(np.int64)
    sizes = np.bincount(owner, minlength=num_owners)
    ends = np.cumsum(sizes)
    return np.split(order, ends[:-1])


def dirichlet(
    labels: NDArray[np.int64],
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
) -> Groups:
    """Deals each class to the clients in proportions drawn from a Dirichlet.

    All N records are dealt; sizes differ too. A client left without any takes one
    record from the largest, where that has another. With a single class only the sizes
    are skewed.

    Privacy: reads private data; output private.

    Args:
        labels: shape (N,), int64, in [0, num_classes).
        num_classes: number of labels; each has its own draw, used or not.
        num_clients: K, at least 1.
        rng: the stream of the partition.
    """
    owner = np.zeros(len(labels), np.int64)
    concentration = np.full(num_clients, DIRICHLET_ALPHA)
    for label in range(num_classes):
        shares = rng.dirichlet(concentration)
        of_class = np.flatnonzero(labels == label)
        members = rng.permutation(of_class)
        # The last client has all that is left, so that its end is not computed.
        ends = np.cumsum(shares)[:-1] * len(members)
        cuts = np.rint(ends).astype(np.int64)
        dealt = np.split(members, cuts)
        for client_id, records in enumerate(dealt):
            owner[records] = client_id
    sizes = np.bincount(owner, minlength=num_clients)
    # A shard without any record would be a client without images: it gets one of the
    # largest shard's.
    for client_id in np.flatnonzero(sizes == 0):
        largest = sizes.argmax()
        if sizes[largest] < 2:
            break
        first_record = np.flatnonzero(owner == largest)[0]
        owner[first_record] = client_id
        sizes[largest] -= 1
        sizes[client_id] = 1
    return _grouped(owner, num_clients)


def _named(
    config: RunConfig,
    clients: NDArray[np.generic] | None,
    owners: NDArray[np.generic] | None,
) -> tuple[Groups, tuple[str, ...]]:
    """Returns the data's own clients, the first `num_clients` in name order."""
    if clients is None:
        raise UserError(
            f"partition = by-client: data = {config.data} names no clients; "
            f"{_way_to_clients(config)}give --partition iid or dirichlet"
        )
    if config.privacy_unit == "record":
        raise UserError(
            f"privacy_unit = record: partition = {config.partition} keeps the clients "
            "of the data; give --partition iid or --privacy-unit client"
        )
    groups, names = by_client(clients, owners)
    check_num_clients(
        config,
        most=len(groups),
        who_has=f"data = {config.data} has",
        what=f"clients{_beside_held_out(config)}",
    )
    # A run that goes on has the same clients as before, in the same order.
    counted = ""
    if isinstance(config, ResolvedConfig):
        counted = config.counted
    if "num_clients" in counted.split(",") and len(groups) != config.num_clients:
        raise UserError(
            f"data = {config.data!r}: it has {len(groups)} clients now, and the run "
            f"began with {config.num_clients}; give it the same data again, or start "
            "another run"
        )
    kept = slice(config.num_clients)  # all of them where it is unset
    return groups[kept], tuple(names[kept])


def _beside_held_out(config: RunConfig) -> str:
    """Returns words for an error that counts owners, if some are held out."""
    if not config.test_owners:
        return ""
    return f" beside those that test_owners = {config.test_owners:g} holds out"


def _num_clients(config: RunConfig, num_records: int) -> int:
    """Returns K for a partition that does not take it from the data."""
    check_num_clients(
        config,
        most=num_records,
        who_has=f"data = {config.data} has",
        what="records",
    )
    if config.num_clients is not None:
        return config.num_clients
    if config.data == "digits":
        return DIGITS_NUM_CLIENTS
    way = ""
    if config.partition == "auto":  # the user has not asked for shards
        way = _way_to_clients(config)
    raise UserError(
        f"num_clients is unset: data = {config.data} names no number of clients for "
        f"this partition; {way}give --num-clients to divide the images into shards, "
        "which are not people"
    )


def _way_to_clients(config: RunConfig) -> str:
    """Returns how a source can name the owners of its images, if it can."""
    if config.data == GIVEN or config.data.startswith("npz:"):
        return "add 'clients', the owner of each image, or "
    return ""


def check_num_clients(config: RunConfig, most: int, who_has: str, what: str) -> None:
    """Refuses more clients than there are to choose from.

    Raises:
        UserError: `num_clients` is set and larger than `most`.
    """
    if config.num_clients is not None and config.num_clients > most:
        remedy = f"give --num-clients at most {most}"
        problem = f"{who_has} {most} {what}; {remedy}"
        refuse(config, [("num_clients", problem)])


def with_test_owners(config: RunConfig, records: Records) -> RunConfig:
    """Returns settings that say which share of owners is held out.

    If the share is left to the data, it is `OWNERS_HELD_OUT` where most owners that
    have images have so few that `test_fraction` of them is none. Then it takes the
    place of `test_fraction`. Else it is 0.

    Privacy: reads private data; the share is published, as other numbers of the data.

    Args:
        config: uses `test_owners`, `test_fraction`.
        records: the source's.
    """
    if config.test_owners is not None:
        return config
    owners = 0.0
    fraction = config.test_fraction
    if records.clients is not None:
        _, counts = np.unique(records.clients, return_counts=True)
        has_none = np.rint(fraction * counts) == 0
        if has_none.mean() > 0.5:
            owners = OWNERS_HELD_OUT
            fraction = 0.0
    return dataclasses.replace(config, test_owners=owners, test_fraction=fraction)


def held_out(config: RunConfig, records: Records) -> NDArray[np.bool_]:
    """Tells for every record whether it is held out.

    With `test_owners` all records of some owners are. With `test_fraction`, of n
    records of an owner test_fraction * n are, rounded, and at most n - 1.

    Privacy: reads private data; output private.

    Args:
        config: uses `test_owners`, which is set, `test_fraction`, `privacy_unit`, and
            the names of all in errors.
        records: the source's.

    Returns:
        Shape (N,).

    Raises:
        UserError: privacy_unit = record with data that names owners, or nobody is left
            to train on.
    """
    refuse(config, _record_problems(config, records))
    if config.test_owners:
        return _of_held_out_owners(config, records)
    is_held_out = np.zeros(len(records.labels), bool)
    if not config.test_fraction:
        return is_held_out
    # Without owners all records are held out from as if one owner had them.
    if records.clients is None:
        groups = [np.arange(len(records.labels))]
        names = [NOBODY]
    else:
        groups, names = by_client(records.clients, records.owners)
    for own, name in zip(groups, names, strict=True):
        num_records = len(own)
        # By the owner's name alone, so that no other owner changes the choice.
        rng = stream(HELD_OUT_SEED, f"held-out/{plain_name(name)}")
        order = rng.permutation(num_records)
        count = round(config.test_fraction * num_records)
        count = min(count, num_records - 1)  # each owner trains on at least one
        chosen = own[order[:count]]
        is_held_out[chosen] = True
    return is_held_out


def _record_problems(config: RunConfig, records: Records) -> Iterator[Problem]:
    """Yields why a guarantee of records allows to hold out nothing by owners."""
    if records.clients is None or config.privacy_unit != "record":
        return
    for name in ("test_fraction", "test_owners"):
        if getattr(config, name):
            yield (
                name,
                "privacy_unit = record, and by the owners of the data one record would "
                f"decide on others; leave out --{name.replace('_', '-')}",
            )


def _of_held_out_owners(config: RunConfig, records: Records) -> NDArray[np.bool_]:
    """Tells for every record whether its owner is held out; each has one, or is one."""
    if records.clients is None:
        numbers = np.arange(len(records.labels))
        is_held_out = owners_held_out(config, numbers)
    else:
        owners = np.unique(records.clients)
        is_of_test = owners_held_out(config, owners)
        of_test = owners[is_of_test]
        is_held_out = np.isin(records.clients, of_test)
    if is_held_out.all():
        remedy = "give a smaller --test-owners, or data of more owners"
        problem = f"all owners would be held out; {remedy}"
        refuse(config, [("test_owners", problem)])
    return is_held_out


def owners_held_out(
    config: RunConfig,
    owners: NDArray[np.generic],
) -> NDArray[np.bool_]:
    """Tells which owners `test_owners` holds out, by a hash of the name of each.

    Each owner is drawn alone, so the number of those held out is about the share of
    all, and an owner who joins or leaves moves nobody else. Those of a smaller share
    are among those of a larger one.

    Privacy: public, as the names are: neighbouring data have the same owners.

    Args:
        config: uses `test_owners`.
        owners: their names, shape (n,), integers or strings.

    Returns:
        Shape (n,).
    """
    share = config.test_owners or 0.0
    is_held_out = np.zeros(len(owners), bool)
    # A stream for each owner: one stream for all would depend on who else is there.
    for index, owner in enumerate(owners):
        name = plain_name(str(owner))
        draw = stream(HELD_OUT_SEED, f"held-out-owner/{name}").random()
        is_held_out[index] = draw < share
    return is_held_out
