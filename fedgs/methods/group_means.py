"""Group means: the class means of every group of clients, in one release.

    server                                        node, for its clients
    begin --- nothing but the settings -------->  answer: mean features, in the block of
                                                    the client's own group, else zero
    finish <----- the sum over all clients -----  (each clipped as a whole, then
                                                    shortened where its group is
                                                    small; noise once)

A client is in one group at most, so that its answer is one vector however many groups
there are: one clip bound, one sensitivity and one noise are those of all groups. Which
group it is in, only its node knows (`fedgs.cohorts.client_groups`). Where nodes are
compared, each node's own release is looked at, and its noise alone protects.

What the groups differ in says `fedgs.diagnosis`.

Source: docs/privacy.md, "One release for all groups".
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedgs.cohorts.client_groups import (
    CohortOfClient,
    InGroup,
    groups_of,
    weighted,
)
from fedgs.config.feature_settings import GroupMeansSettings
from fedgs.config.plugins import GROUP_MEANS
from fedgs.config.run_config import GroupMeansConfig
from fedgs.config.terms import Terms
from fedgs.errors import UserError
from fedgs.gan.features import (
    LEAST_SHARE,
    MeanFeatures,
    embedding,
    frequency_weights,
    mean_features,
)
from fedgs.gan.models import build_generator
from fedgs.gan.moments import blank, in_pixels, set_generator
from fedgs.methods.base import Declared, Method, OneClient, Released, Request, State
from fedgs.methods.schedule import EVERYONE
from fedgs.randomness import derived_seed
from fedgs.shapes import Images, Labels, TensorDict

TARGET = "target"
SEEN = "seen"
IS_KNOWN = "is_known"


class GroupMeans(Method[GroupMeansConfig]):
    """Clients answer once, each in the block of its own group."""

    Settings = GroupMeansSettings
    # The one release is all that the run has.
    commits_every_round = True
    # A client embeds all its images, so the time would tell how many it has.
    hides_duration = True

    def terms(self, config: GroupMeansConfig, round: int) -> Terms:
        """Returns one embedding of all groups, clipped to C."""
        return config.phase_terms(round)

    def state(self, config: GroupMeansConfig) -> State:
        """Makes the generator of all groups together, which knows nothing yet."""
        seed = derived_seed(config.seed, "generator")
        return State.of(build_generator(config, seed).to(config.device))

    def declared(self, config: GroupMeansConfig, round: int) -> Mapping[str, Declared]:
        """Returns no tensors: the settings say everything."""
        return {}

    def begin(self, config: GroupMeansConfig, state: State) -> tuple[Request, None]:
        """Asks all clients for their features.

        Privacy: public.
        """
        return Request(state.round + 1, {}), None

    def check(self, config: GroupMeansConfig, request: Request) -> None:
        """Refuses a release of some clients only."""
        if (request.participants, request.trainees) != (EVERYONE, EVERYONE):
            raise UserError("request for group means that is not to all: refused")

    def groups(
        self,
        config: GroupMeansConfig,
        names: Sequence[str],
        cohorts: Sequence[CohortOfClient | None],
        least: int,
    ) -> Sequence[InGroup | None]:
        """Returns `fedgs.cohorts.client_groups.groups_of`, with weights."""
        return weighted(config, groups_of(config, names, cohorts), least)

    def answer(
        self,
        config: GroupMeansConfig,
        client: OneClient,
        request: Request,
    ) -> Tensor:
        """Returns the client's embedding in the block of its group, all else zero.

        Privacy: reads private data; output private.
        """
        images, labels = client.tensors(config.device)
        network = {"weights": frequency_weights(config).to(config.device)}
        # Nothing is taken off the features.
        centre = images.new_zeros(config.num_groups, config.num_features)
        own = embedding(GROUP_MEANS, network, centre, images, labels).cpu()
        answered = torch.zeros(config.phase_terms(1).shape, dtype=torch.float64)
        # Last, so that the time tells nothing of who is in a group.
        if client.group is not None:
            answered[0, client.group] = own
        return answered

    def finish(
        self,
        config: GroupMeansConfig,
        state: State,
        pending: None,
        released: Released,
    ) -> None:
        """Keeps the means of each group, and draws the generator from all of them.

        Privacy: post-processing of DP output.
        """
        blocks = released.total[0]
        noise_std = released.noise_std
        if config.compares_nodes:
            # The groups of a node stand in its own release, with its own noise.
            in_order = sorted(released.by_node)
            blocks = torch.cat([released.by_node[node][0] for node in in_order])
            noise_std = config.phase_terms(1).noise_std
        means = [_mean_features(config, block, noise_std) for block in blocks]
        targets = torch.stack([found.target for found in means])
        noise = torch.stack([found.noise_std for found in means])
        is_known = _is_known(blocks[:, :, 0])
        if not config.compares_nodes:
            targets = _equally_noisy(config, targets, noise, is_known)
        # In their own units again: no frequency has a weight any more.
        targets = targets / frequency_weights(config)
        kept = {TARGET: targets, SEEN: _seen(blocks, noise_std), IS_KNOWN: is_known}
        state.released.append((GROUP_MEANS, kept))
        model = dataclasses.replace(blank(config), mean=targets.double().mean(0))
        set_generator(config, model, state.generator, state.ema)
        state.round += 1


METHOD = GroupMeans()


class Group(NamedTuple):
    """One group of clients, as the release shows it.

    Attributes:
        cohort: the node's name, or the cohort's value.
        part: which of the cohort's groups it is, from 0.
        images: the mean picture of each class that the group has, in order, shape
            (classes, C, S, S). Of low frequencies alone and with noise, so not cut off
            at 0 and 1.
        labels: the labels of these pictures, shape (classes,).
        seen: by how many standard deviations of its noise the release shows clients in
            it; about a standard normal number where there is none.
    """

    cohort: str
    part: int
    images: Images
    labels: Labels
    seen: float


def groups_released(
    config: GroupMeansConfig,
    releases: Sequence[tuple[str, TensorDict]],
) -> list[Group]:
    """Returns what a run has released of every group; nothing before its release.

    Privacy: post-processing of DP output.

    Args:
        config: the configuration of the run's one phase.
        releases: as in `State.released`.
    """
    found = [own for method, own in releases if method == GROUP_MEANS]
    if not found:
        return []
    cohorts = config.site_names
    if config.healthy is not None and config.suspicious is not None:
        cohorts = (config.healthy, config.suspicious)
    pictures = in_pixels(config, found[-1][TARGET])
    is_known = found[-1][IS_KNOWN]
    seen = found[-1][SEEN].tolist()
    return [
        Group(
            cohort=cohorts[number // config.groups],
            part=number % config.groups,
            images=pictures[number, is_known[number]],
            labels=is_known[number].nonzero().flatten(),
            seen=seen[number],
        )
        for number in range(len(pictures))
    ]


def _seen(blocks: Tensor, noise_std: float) -> Tensor:
    """Returns `Group.seen` of every group, from the length of its block.

    Clipped answers are about equally long, and point in one direction: together they
    are longer than noise. Of noise alone the squares add up to n noise_std^2, with a
    standard deviation of sqrt(2 n) noise_std^2.
    """
    squares = blocks.square().flatten(1)
    if noise_std:
        count = squares.shape[1]
        excess = squares.sum(1) / noise_std**2 - count
        return (excess / (2 * count) ** 0.5).float()
    return torch.where(squares.sum(1) > 0, torch.inf, 0.0)


def _equally_noisy(
    config: GroupMeansConfig,
    targets: Tensor,
    noise: Tensor,
    is_known: Tensor,
) -> Tensor:
    """Adds noise, so that every group has as much as the one that has most.

    A cohort of few clients has more in its means, and noise looks like a bug: cohorts
    of other sizes would differ where their images do not.

    Args:
        config: the phase's configuration; its seed decides the noise, which protects
            nobody.
        targets: mean features, shape (groups, classes, features).
        noise: the standard deviation of the noise in them, shape (groups, classes).
        is_known: which classes each group has, of the same shape.
    """
    rng = torch.Generator().manual_seed(derived_seed(config.seed, "equal-noise"))
    most = noise.where(is_known, 0).amax(0)
    more = (most.square() - noise.square()).clamp_min(0).sqrt()
    return targets + more[:, :, None] * torch.randn(targets.shape, generator=rng)


def _is_known(mass: Tensor) -> Tensor:
    """Tells which classes each group has: no mean can be made of noise alone.

    Args:
        mass: how much each group's classes weigh, shape (groups, classes); noise may
            make it negative.
    """
    is_largest = mass == mass.amax(1, keepdim=True)  # so that there is one
    return is_largest | (mass >= LEAST_SHARE * mass.mean(1, keepdim=True))


def _mean_features(
    config: GroupMeansConfig,
    block: Tensor,
    noise_std: float,
) -> MeanFeatures:
    """Returns the weighted mean features of a group's classes, (classes, features)."""
    centre = torch.zeros(config.num_groups, config.num_features)
    most = config.num_clients
    if config.compares_nodes:
        most = config.group_size
    return mean_features(
        config,
        {},
        centre,
        total=block,
        noise_std=noise_std,
        num_clients=most,
    )
