"""Bytes between server and nodes: measured where a run counted them, else computed."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from experiments.report_curves import grid_images
from experiments.report_run import RunFacts
from fedgs.config import RunConfig
from fedgs.transport import (
    pack_fakes,
    pack_release,
    release_step,
    round_fakes,
    to_grid,
)


@dataclass(frozen=True)
class Communication:
    """What the messages of a run weigh.

    Attributes:
        how: measured, computed or estimated.
        request: bytes of one request to one node.
        reply: bytes of one reply.
        requests, replies: messages of one round.
        rounds: rounds attempted, repeats included.
        is_remote: False in the local engine, where nothing crosses a network.
    """

    how: str
    request: int
    reply: int
    requests: int
    replies: int
    rounds: int
    is_remote: bool

    @property
    def per_round(self) -> int:
        """Bytes of one round, both directions, all nodes."""
        return self.request * self.requests + self.reply * self.replies

    @property
    def total(self) -> int:
        """Bytes of all rounds, without the warm start."""
        return self.per_round * self.rounds


def communication(facts: RunFacts) -> Communication:
    """Returns the size of a run's messages.

    Measured: Flower's serialised messages. Computed: the tensors in the run's own
    encoding, whose size is that of any others of their shape. Estimated: with the
    compact transport it depends on the content, so fakes are those of the last sample
    grid and releases are noise.

    Privacy: post-processing of DP output.
    """
    config, events = facts.config, facts.events
    planned = max((event.planned_nodes for event in events), default=config.num_nodes)
    trains_all = config.discriminator_training == "every_round"
    how, request, reply = _sizes(facts)
    return Communication(
        how=how,
        request=request,
        reply=reply,
        requests=config.num_nodes if trains_all else planned,
        replies=planned,
        rounds=len(events),
        is_remote=config.engine != "local",
    )


def _sizes(facts: RunFacts) -> tuple[str, int, int]:
    """Returns how the sizes were found, and those of a request and of a reply."""
    if facts.measured is not None:
        return "measured", facts.measured["bytes_down"], facts.measured["bytes_up"]
    config = facts.config
    how = "computed" if config.transport == "exact" else "estimated"
    return how, len(_fakes(facts)), len(_release(config))


def _fakes(facts: RunFacts) -> bytes:
    """Returns a request's tensors, with images of the last grid, repeated."""
    config, count = facts.config, facts.config.fakes_sent
    shape = (config.image_size, config.image_size, config.image_channels)
    drawn = grid_images(facts.grids[-1], facts).reshape(-1, *shape)
    tiled = drawn[np.arange(count) % len(drawn)].transpose(0, 3, 1, 2)
    images = torch.tensor(tiled, dtype=torch.float32).contiguous()
    labels = torch.arange(count) % (config.num_classes or 1)
    return pack_fakes(round_fakes(images, config), labels, config)


def _release(config: RunConfig) -> bytes:
    """Returns a reply's tensors, of noise and a gradient at the clip bound."""
    size = math.prod(config.release_shape[1:])
    deviation = math.hypot(config.noise_std, config.clip_bound / math.sqrt(size))
    values = np.random.default_rng(0).normal(0, deviation, config.release_shape)
    release, step = torch.tensor(values), release_step(config)
    if step is not None:
        release = to_grid(release, step)
    return pack_release(release.float(), config)
