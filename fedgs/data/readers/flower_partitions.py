"""The partitioners of flwr-datasets: who owns which rows.

`hf:NAME?partitioner=CLASS&...` names a class of `flwr_datasets.partitioner` and its
arguments. What is not given is the run's: its seed and the column of labels.
"""

import contextlib
import inspect
import io
from collections.abc import Iterator
from typing import Any

from fedgs.config.hub import HubSource
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, wrap_error


def partitions(
    config: RunConfig,
    dataset: Any,
    source: HubSource,
    label: str | None,
) -> Iterator[tuple[str | int, Any]]:
    """Yields every client and its rows.

    Privacy: reads private data; output private.

    Args:
        config: uses `data` and `seed`.
        dataset: a `datasets.Dataset`.
        source: whose `client` is a column, or else its partitioner's arguments.
        label: the column that partitioners of labels use unless told otherwise.

    Yields:
        The client's name or number, and a `datasets.Dataset`; one of everything where
        neither a column nor a partitioner is given.

    Raises:
        UserError: an unknown partitioner, or one that does not suit its options or the
            data.
    """
    from flwr_datasets import partitioner as partitioners

    if source.client is not None:
        partitioner = partitioners.NaturalIdPartitioner(source.client)
    elif source.partitioner is not None:
        partitioner = _partitioner(config, source, label)
        dataset = dataset.shuffle(seed=config.seed)  # as FederatedDataset does
    else:
        partitioner = partitioners.IidPartitioner(1)
    remedy = "give options and columns that fit it"
    problem = f"data = {config.data!r}: it does not suit the data"
    with wrap_error(Exception, problem, remedy):
        partitioner.dataset = dataset
        for index in range(partitioner.num_partitions):
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
                rows = partitioner.load_partition(index)
            names = getattr(partitioner, "partition_id_to_natural_id", {})
            yield names.get(index, index), rows


def _partitioner(config: RunConfig, source: HubSource, label: str | None) -> Any:
    """Makes the partitioner, which is set, from its arguments."""
    from flwr_datasets import partitioner as partitioners

    name = source.partitioner or ""
    if name not in partitioners.__all__ or name.startswith("Vertical"):
        raise UserError(
            f"data = {config.data!r}: partitioner {name!r}; give a class of "
            "flwr_datasets.partitioner that deals rows, such as DirichletPartitioner"
        )
    maker = getattr(partitioners, name)
    wanted = inspect.signature(maker).parameters
    arguments: dict[str, Any] = {}
    if "seed" in wanted:
        arguments["seed"] = config.seed
    if "partition_by" in wanted:
        arguments["partition_by"] = label
    arguments |= source.arguments  # what the user gives counts
    problem = f"data = {config.data!r}: the partitioner's arguments do not suit"
    remedy = f"{name} takes {', '.join(wanted)}"
    with wrap_error(Exception, problem, remedy):
        return maker(**arguments)
