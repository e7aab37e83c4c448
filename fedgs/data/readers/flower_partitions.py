"""The partitioners of flwr-datasets, as settings: who owns which rows.

`partitioner` names a class of `flwr_datasets.partitioner`, `partitioner_options` its
arguments in TOML. What is not given is the run's: its seed and the column of labels.
"""

import contextlib
import inspect
import io
import tomllib
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, explained

UNSUITED = ("Partitioner", "IdToSizeFncPartitioner")  # abstract; takes a function


def partitions(
    config: RunConfig, dataset: Any, client: str | None, label: str | None
) -> Iterator[tuple[str | int, Any]]:
    """Yields every client and its rows.

    Privacy: reads private data; output private.

    Args:
        config: uses the partitioner's settings and `seed`.
        dataset: a `datasets.Dataset`.
        client: the column of clients, which needs no partitioner.
        label: the column that partitioners of labels use unless told otherwise.

    Yields:
        The client's name or number, and a `datasets.Dataset`; one of everything where
        neither a column nor a partitioner is given.

    Raises:
        UserError: an unknown partitioner, or one that does not suit its options or the
            data.
    """
    from flwr_datasets import partitioner as partitioners

    shown = f"partitioner = {config.partitioner!r}"
    if client is not None:
        partitioner = partitioners.NaturalIdPartitioner(client)
        shown = f"hf_options = {config.hf_options!r}"
    elif config.partitioner is not None:
        partitioner = _partitioner(config, label)
        dataset = dataset.shuffle(seed=config.seed)  # as FederatedDataset does
    else:
        partitioner = partitioners.IidPartitioner(1)
    errors = (ValueError, TypeError, KeyError, IndexError)
    remedy = "give options and columns that fit it"
    with explained(errors, f"{shown}: does not suit the data", remedy):
        partitioner.dataset = dataset
        for index in range(partitioner.num_partitions):
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
                rows = partitioner.load_partition(index)
            names = getattr(partitioner, "partition_id_to_natural_id", {})
            yield names.get(index, index), rows


def _partitioner(config: RunConfig, label: str | None) -> Any:
    """Makes `config.partitioner`, which is set, from its options."""
    from flwr_datasets import partitioner as partitioners

    known = [
        name
        for name in partitioners.__all__
        if name not in UNSUITED and not name.startswith("Vertical")
    ]
    if config.partitioner not in known:
        raise UserError(
            f"partitioner = {config.partitioner!r}: give --partitioner one of "
            f"{', '.join(known)}"
        )
    maker = getattr(partitioners, config.partitioner)
    wanted = inspect.signature(maker).parameters
    given = parse_toml("partitioner_options", config.partitioner_options)
    defaults = {"seed": config.seed, "partition_by": label}
    arguments = {name: defaults[name] for name in defaults if name in wanted} | given
    if "distribution_array" in given:
        arguments["distribution_array"] = np.array(given["distribution_array"])
    problem = f"partitioner_options = {config.partitioner_options!r}: do not suit"
    remedy = f"{config.partitioner} takes {', '.join(wanted)}"
    with explained((TypeError, ValueError), problem, remedy):
        return maker(**arguments)


def parse_toml(name: str, text: str | None) -> dict[str, Any]:
    """Parses `a = 1, b = 'c'`, the value of a setting.

    Raises:
        UserError: not TOML.
    """
    remedy = "write it as in TOML, for example num_partitions=10, partition_by='label'"
    with explained(tomllib.TOMLDecodeError, f"{name} = {text!r}: no TOML", remedy):
        return tomllib.loads(f"options = {{{text or ''}}}")["options"]
