"""What `data = hf:NAME?label=fine_label&client=writer` says: a Hugging Face data set.

>>> source = read_hub("hf:cifar?label=fine&partitioner=IidPartitioner&num_partitions=9")
>>> source.name, source.label, source.arguments
('cifar', 'fine', {'num_partitions': 9})

This module imports no tensor library.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from fedgs.errors import UserError, wrap_error

KIND = "hf:"
OPTIONS = ("image", "label", "client", "split", "test_split", "subset", "partitioner")
EXAMPLE = "write it as in hf:NAME?label=fine_label&client=writer"


@dataclass(frozen=True)
class HubSource:
    """One data set; unset columns are found by their type.

    Attributes:
        name: on the hub, or of a local folder.
        image: column of pictures.
        label: column of class labels or integers.
        client: column whose values are the clients.
        split: the split to train on.
        test_split: the split to test on.
        subset: the data set's configuration.
        partitioner: class of `flwr_datasets.partitioner` that makes the clients.
        arguments: the arguments of the partitioner.
    """

    name: str
    image: str | None = None
    label: str | None = None
    client: str | None = None
    split: str = "train"
    test_split: str = "test"
    subset: str | None = None
    partitioner: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@lru_cache(maxsize=16)
def read_hub(data: str) -> HubSource | None:
    """Returns what the setting `data` says of a Hugging Face data set, if it names one.

    Raises:
        UserError: an unknown option, or two sources of clients.
    """
    if not data.startswith(KIND):
        return None
    name, mark, query = data.removeprefix(KIND).partition("?")
    with wrap_error(ValueError, f"data = {data!r}: it cannot be read", EXAMPLE):
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(mark))
    # What is no option of fedgs is an argument of the partitioner, whose names only
    # `flwr_datasets` knows.
    given = {key: value for key, value in pairs if key in OPTIONS}
    arguments = {key: _value(text) for key, text in pairs if key not in OPTIONS}
    if arguments and "partitioner" not in given:
        raise UserError(
            f"data = {data!r}: {next(iter(arguments))} is unknown; give "
            f"{', '.join(OPTIONS)} or, with a partitioner, its arguments"
        )
    if "partitioner" in given and "client" in given:
        problem = "both client and partitioner say who owns what"
        raise UserError(f"data = {data!r}: {problem}; leave one of the two out")
    return HubSource(name, **given, arguments=arguments)


def _value(text: str) -> Any:
    """Returns a number, a list or true and false as such, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
