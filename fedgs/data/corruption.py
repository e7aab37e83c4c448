"""Bugs put into the data on purpose, for experiments that have to find them.

A bug of the list in `transformations` is put into all images of a client that is drawn
with probability `corruption_fraction`, into every image by its own draw, or into all
clients of one node. A client's
draw depends on the seed and its name alone, so that a cohort of some clients, or a run
of the first K, has the same ones corrupted. Nothing here reaches the server.

Source: Augenstein et al., "Generative models for effective ML on private,
decentralized datasets", ICLR 2020, section 5 (pixel inversion of some users' images).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedgs.config.placement import hosting
from fedgs.config.run_config import RunConfig
from fedgs.data.federated import to_float
from fedgs.data.records import Records
from fedgs.data.transformations import TRANSFORMATIONS
from fedgs.errors import UserError
from fedgs.randomness import stream


def corrupted(config: RunConfig, name: str, count: int) -> NDArray[np.bool_]:
    """Tells which of a client's images the settings corrupt.

    Privacy: public; a function of settings and names. Keep it from the server of an
    experiment that has to find these clients.

    Args:
        config: with `seed` or `corruption_seed`; uses the settings of corruption.
        name: the client's, of `FederatedImages.client_names`.
        count: number of images, those held out last.

    Returns:
        Shape (count,).

    Raises:
        UserError: the seed is unset.
    """
    if config.corruption == "none":
        return np.zeros(count, bool)
    # The caller asks for the clients of the spoilt node only.
    if config.corruption_unit == "node":
        return np.ones(count, bool)
    seed = _seed(config)
    # Of its name alone, so that it does not matter who else is there.
    rng = stream(seed, f"corruption/{name}")
    if config.corruption_unit == "client":
        is_corrupted = rng.random() < config.corruption_fraction
        return np.full(count, is_corrupted)
    return rng.random(count) < config.corruption_fraction


def spoilt_node(config: RunConfig, num_nodes: int) -> int:
    """Returns the node whose clients have the bug, where the settings spoil one.

    Privacy: public, as `corrupted`.

    Raises:
        UserError: the seed is unset.
    """
    rng = stream(_seed(config), "corruption-node")
    return int(rng.integers(num_nodes))


def _seed(config: RunConfig) -> int:
    """Returns the seed of the corruption's own, or else that of the run."""
    if config.corruption_seed is not None:
        return config.corruption_seed
    if config.seed is not None:
        return config.seed
    raise UserError(f"seed is unset: corruption = {config.corruption} needs --seed")


def corrupted_clients(config: RunConfig, names: Sequence[str]) -> NDArray[np.bool_]:
    """Tells for every client whether all its images are corrupted.

    Privacy: public, as `corrupted`.

    Args:
        config: with `seed` and corruption_unit = client.
        names: `FederatedImages.client_names`.

    Returns:
        Shape (K,).

    Raises:
        UserError: single images are corrupted, or the seed is unset.
    """
    if config.corruption != "none" and config.corruption_unit != "client":
        unit = config.corruption_unit
        raise UserError(f"corruption_unit = {unit}: no client is corrupted as a whole")
    is_corrupted = np.zeros(len(names), bool)
    for number, name in enumerate(names):
        # All images of a client share its draw, so that one of them tells it.
        is_corrupted[number] = corrupted(config, name, 1)[0]
    return is_corrupted


def corrupt(
    config: RunConfig,
    records: Records,
    client_records: Sequence[NDArray[np.int64]],
    names: Sequence[str],
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Corrupts the images or labels of clients.

    Privacy: reads private data; output private.

    Args:
        config: as for `corrupted`.
        records: the records of all clients.
        client_records: all record numbers of each client, those held out last.
        names: the clients', in the same order.

    Returns:
        Images and labels: the records' own arrays without corruption; else the images
        are changed in place where they can be written.
    """
    images = records.images
    # Without a copy: this is every run but those of experiments.
    if config.corruption == "none":
        return images, records.labels
    if not images.flags.writeable:  # as those that the process keeps
        images = images.copy()
    labels = records.labels.copy()  # they may be shared as well, and are small
    if config.corruption_unit == "node":
        # The seed draws one node, all of whose clients have the bug.
        nodes = hosting(len(names), config.clients_per_node, config.node_sizes)
        node = spoilt_node(config, nodes.num_nodes)
        hosted = nodes.hosted(node)
        names = [names[client] for client in hosted]
        client_records = [client_records[client] for client in hosted]
    bugs = {bug.name: bug for bug in TRANSFORMATIONS}
    bug = bugs[config.corruption]
    for own, name in zip(client_records, names, strict=True):
        is_corrupted = corrupted(config, name, len(own))
        chosen = own[is_corrupted]
        spoilt, relabelled = bug.apply(
            to_float(images[chosen]),
            labels[chosen],
            records.num_classes,
        )
        images[chosen] = np.round(255 * spoilt)
        labels[chosen] = relabelled
    return images, labels
