"""Bytes between server and nodes, from the encoding of a run's tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedgs.app.report import words
from fedgs.app.report.curves import grid_images
from fedgs.app.report.run import RunFacts
from fedgs.app.tables import Table
from fedgs.config.run_config import ResolvedConfig
from fedgs.methods import phase_at, phase_with_discriminators
from fedgs.methods.base import Request
from fedgs.round.codec import pack_request, rounded, stated_release_bytes
from fedgs.shapes import TensorDict


@dataclass(frozen=True)
class Communication:
    """What the messages of a run weigh.

    Attributes:
        request: bytes of one request to one node.
        reply: bytes of one reply.
        requests, replies: messages of one round.
        rounds: rounds attempted, repeats included, of phases with many rounds.
        releases: bytes of the phases that release once, both directions, all nodes.
    """

    request: int
    reply: int
    requests: int
    replies: int
    rounds: int
    releases: int

    @property
    def per_round(self) -> int:
        """Bytes of one round, both directions, all nodes."""
        of_requests = self.request * self.requests
        of_replies = self.reply * self.replies
        return of_requests + of_replies

    @property
    def total(self) -> int:
        """Bytes of all rounds, without the warm start."""
        return self.per_round * self.rounds + self.releases


def communication(facts: RunFacts) -> Communication:
    """Returns the size of a run's messages.

    Computed: the tensors in the run's own encoding, whose size is that of any others of
    their shape. Estimated: with the compact precision it depends on the content, so
    fakes are those of the last sample grid and releases are noise.

    Privacy: post-processing of DP output.
    """
    config = facts.config
    events = facts.events
    of_rounds = [event.planned_nodes for event in events]
    planned = max(of_rounds, default=config.num_nodes)
    requests = planned
    # Then every node gets the fakes to train its discriminator, though only the nodes
    # that are drawn answer with a release.
    if config.discriminator_training == "every_round":
        requests = config.num_nodes
    # Phases that release once have requests of other sizes, each of its own. They are
    # added up by themselves, so that one round of many stands for all others.
    once = [event for event in events if config.at_round(event.round).releases_once]
    releases = 0
    for event in once:
        of_node = release_bytes(config, event.round)
        releases += of_node * event.planned_nodes
    return Communication(
        request=len(_request(facts)),
        reply=stated_release_bytes(config),
        requests=requests,
        replies=planned,
        rounds=len(events) - len(once),
        releases=releases,
    )


def _request(facts: RunFacts) -> bytes:
    """Returns a request's tensors, with images of the last grid, repeated."""
    config = facts.config
    count = facts.config.fakes_sent
    # Without discriminators no fakes are sent, so the size follows from the shapes.
    if phase_with_discriminators(config) is None:
        return pack_request(_zeros(config, config.num_rounds), config)
    side = config.image_size
    pixels = grid_images(facts.grids[-1], facts)
    drawn = pixels.reshape(-1, side, side, config.image_channels)
    # A grid has fewer images than a request, so they are repeated. The compact
    # precision compresses them, which is why its size is called an estimate.
    repeated = drawn[np.arange(count) % len(drawn)]
    channels_first = repeated.transpose(0, 3, 1, 2)
    images = torch.tensor(channels_first, dtype=torch.float32).contiguous()
    labels = torch.arange(count) % config.num_classes
    request = Request(0, {"images": images, "labels": labels})
    return pack_request(rounded(request, config).tensors, config)


def _zeros(config: ResolvedConfig, round: int) -> TensorDict:
    method, own = phase_at(config, round)
    # A method counts the rounds of its own phase.
    declared = method.declared(own, round - own.rounds_before)
    tensors: TensorDict = {}
    for name, (shape, dtype) in declared.items():
        tensors[name] = torch.zeros(shape, dtype=dtype)
    return tensors


def release_bytes(config: ResolvedConfig, round: int) -> int:
    """Returns the bytes of a round's request to one node and of its reply.

    Privacy: public; a function of the run's settings.
    """
    request = pack_request(_zeros(config, round), config)
    return len(request) + stated_release_bytes(config, config.terms(round))


def communication_table(runs: Sequence[RunFacts]) -> Table:
    """Returns the bytes of one round and of the run."""
    # Runs whose messages have the same sizes share a column.
    columns: dict[Communication, list[str]] = {}
    for facts in runs:
        columns.setdefault(communication(facts), []).append(facts.name)
    rows = {
        "request to a node": [words.num_bytes(run.request) for run in columns],
        "reply of a node": [words.num_bytes(run.reply) for run in columns],
        "one round, all nodes": [words.num_bytes(run.per_round) for run in columns],
        "all releases of mean features, all nodes": [
            words.num_bytes(run.releases) for run in columns
        ],
        "whole run": [words.num_bytes(run.total) for run in columns],
    }
    note = (
        "A request holds the fakes, or the feature network of a phase; a reply the "
        "node's release. Computed: the tensors in the run's own encoding, without the "
        "frames of Flower and gRPC; of the compact precision an estimate, for which a "
        "release counts as one of noise. The whole run counts repeated rounds, not the "
        "warm start. With the engine local nothing crosses a network."
    )
    head = [""]
    for names in columns.values():
        head.append(", ".join(names))
    lines = [[name, *cells] for name, cells in rows.items()]
    return Table("Bytes", head, lines, note)
