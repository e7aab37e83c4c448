"""Whether a node's sum is bounded as its ledger claims, whoever its clients are.

    terms      a round's terms stay what they were, and are what the ledger records
    clipping   a node's sum of answers that are far too long, in all coordinates and in
               few, is that of samples clipped to C one by one
    noise      `fedgs.audit.noise_check`
    method     its own rounds are asked, through the frame, of clients that are made up:
               one image or many, black, white or random, of one class or of all.
        one part      no sample of one client's part is longer than C
        asked alone   every sum, in any order, of any of the clients, is that of the
                      parts of clients that are asked alone: what a method remembers of
                      one client for another one, wherever, changes a part
        one replaced  a sample of the sum moves by at most 2C, so all by 2C sqrt(B)
        one left out  by at most C
        outside its group   where groups are compared, a client's part is zero. There
                      all of this is asked for every group; the client that is replaced
                      has another cohort as well, and one that is left out has none

Sums are without noise, so these numbers are exact.

Privacy: public; no data are read.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgs.audit.crafted_releases import (
    FAR,
    directions,
    released,
    rounding,
    without_noise,
)
from fedgs.audit.finding import OF_NOISE, Check
from fedgs.audit.mechanism import weakest_rounds
from fedgs.audit.noise_check import check_noise
from fedgs.cohorts.client_groups import CohortOfClient, InGroup
from fedgs.config.rounds import rounds_alike, terms_at
from fedgs.config.run_config import GroupMeansConfig, ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.discriminators import Discriminators
from fedgs.methods import new_state, phase_at, phases_of
from fedgs.methods.base import Hosted, Released, Request, State
from fedgs.methods.schedule import EVERYONE
from fedgs.privacy.ledger import Event, agreed_values
from fedgs.round.answer import is_of_fedgs, raw_answers
from fedgs.round.codec import rounded
from fedgs.round.run import new_event

MOST_CLIENTS = 5
MOST_KINDS = 8  # of rounds that are asked
MOST_PLAYED = 20  # rounds that are played to come to one that is asked
# Of C: what it may change that methods of fedgs compute several clients in one call.
STACKED = 1e-2
# What is measured with made-up clients: its limit, and what the number is.
MEASURED = {
    "one part": (1.0, "the longest sample of one client's part"),
    "asked alone": (0.0, "what sums differ from the parts of clients asked alone"),
    "one replaced": (2.0, "how far a sample of the sum moves"),
    "one left out": (1.0, "how far a sample of the sum moves"),
}
# The same of methods that compare groups only.
OF_GROUPS = {
    "outside its group": (0.0, "the longest sample of a part without its own block"),
}
LEAST = 3  # clients of a group, where small ones are not told


def check_mechanism(config: ResolvedConfig, events: Sequence[Event]) -> list[Check]:
    """Checks terms, clipping and noise of each kind of release that a run has.

    Privacy: public; reads no data.

    Args:
        config: of the run, as `fedgs.audit.crafted_releases.audited`.
        events: of its ledger.
    """
    recorded = {event.round: event for event in events}
    found = [check_terms(config, list(recorded.values()))]
    weakest = weakest_rounds(config, events)
    for round in weakest.values():
        event = recorded.get(round) or new_event(config, round, EVERYONE, 1)
        found.append(check_clipping(config, event))
        if event.noise_std > 0:
            found.append(check_noise(config, event, OF_NOISE / len(weakest)))
    return found


def check_terms(config: ResolvedConfig, events: Sequence[Event]) -> Check:
    """Asks for the terms of every recorded round again, twice.

    Privacy: public; reads no data.
    """
    others = [event for event in events if not _is_agreed(config, event)]
    return Check(
        check="terms",
        tested=f"{len(events)} rounds: those whose terms change when they are asked "
        "for again, or are not those of the ledger",
        found=len(others),
        allowed=0,
    )


def _is_agreed(config: ResolvedConfig, event: Event) -> bool:
    known = terms_at(config, event.round)
    # Of the method itself: `terms_at` repeats what it was told the first time.
    again = [config.terms(event.round) for _ in range(2)]
    agreed = agreed_values(config, event.round)
    is_recorded = all(getattr(event, name) == agreed[name] for name in agreed)
    return is_recorded and again == [known, known]


def check_clipping(config: ResolvedConfig, event: Event) -> Check:
    """Clips and sums answers that are far too long, and some that are not.

    Privacy: public; reads no data.

    Args:
        config: of the run, as audited.
        event: of the kind of release that is meant.
    """
    terms = without_noise(terms_at(config, event.round))
    bound = terms.clip_bound
    # One sample in two is short: it stays as it is, whatever stands beside it.
    lengths = torch.full(terms.shape, FAR * bound, dtype=torch.float64)
    lengths[1::2] = bound / 2
    along = directions(terms.shape[1:])[:, None] * lengths
    broken = along[:1].clone()
    broken[0, 0, 0, 0, 0] = torch.inf
    answers = torch.cat([along, broken])
    # What clipping should make of them, computed without the code that is checked.
    norms = torch.linalg.vector_norm(answers, dim=(2, 3, 4), keepdim=True)
    parts = answers * (bound / norms).clamp(max=1.0)
    parts[~norms.isfinite().expand_as(parts)] = 0.0
    differences: list[Tensor] = []
    for answer, part in zip(answers, parts, strict=True):
        alone = released(config, terms, [answer[None]], asked=1)
        differences.append(alone - part)
    # In two batches, as workers hand them in.
    together = released(config, terms, [answers[:2], answers[2:]], asked=len(answers))
    differences.append(together - parts.sum(0))
    return Check(
        check=f"clipping, {event.release}",
        tested="clients that answer far beyond the clip bound or with half of it, in "
        "all coordinates or few: what sums differ from those of samples clipped one by "
        "one, in clip bounds",
        found=max(map(_longest, differences)) / bound,
        allowed=rounding(config, terms, len(answers)),
    )


def _longest(values: Tensor) -> float:
    """Returns the largest norm of a sample, infinite where one is no number."""
    norms = values.flatten(1).norm(dim=1)
    return float(norms.nan_to_num(nan=math.inf).max())


# ------------------------------------------------------------------ made-up clients


def check_method(config: ResolvedConfig) -> list[Check]:
    """Asks the method's own `answer` for made-up clients, in its first rounds.

    Privacy: public; reads no data.

    Args:
        config: of the run, as audited.

    Raises:
        UserError: the run's public data cannot be read.
    """
    requests, data = _requests(config, new_state(config)), made_up(config)
    are_stacked = any(is_of_fedgs(phase.method) for phase in phases_of(config))
    of_stacks = STACKED if are_stacked else 0.0
    measured = dict(MEASURED)
    if any(alike.terms.num_groups > 1 for alike in rounds_alike(config)):
        measured |= OF_GROUPS
    found = dict.fromkeys(measured, 0.0)
    slack = 0.0
    rounds: list[str] = []
    try:
        for request in requests:
            rounds.append(str(request.round))
            terms = terms_at(config, request.round)
            slack = max(slack, of_stacks + rounding(config, terms, data.num_clients))
            of_request = _measured(config, request, data)
            for name in measured:
                value = of_request[name] / terms.clip_bound
                found[name] = max(found[name], value)
    # Whatever a method of others raises is a finding, not the end of the audit.
    except Exception as error:
        text = f"made-up clients: {type(error).__name__}: {error}"
        return [Check(check="method, answers", tested=text, found=1, allowed=0)]
    asked = f"made-up clients in round {', '.join(rounds)}"
    return [
        Check(
            check=f"method, {name}",
            tested=f"{asked}: {text}, in clip bounds",
            found=found[name],
            allowed=limit + slack,
        )
        for name, (limit, text) in measured.items()
    ]


def _requests(config: ResolvedConfig, state: State) -> Iterator[Request]:
    """Yields the requests of phases that release once, and one of each kind of terms.

    What clients answer to them, and to the rounds in between, is noise alone.
    """
    first: dict[tuple[object, ...], int] = {}
    for alike in rounds_alike(config):
        terms = alike.terms
        first.setdefault((terms.release, terms.clip_bound, terms.shape), alike.first)
    others = list(first.values())[:MOST_KINDS]
    once = [
        config.first_rounds[index]
        for index in range(len(config.phases))
        if config.at_phase(index).releases_once
    ]
    for wanted in sorted({*once, *others}):
        state.round = max(state.round, wanted - 1 - MOST_PLAYED)
        for round in range(state.round + 1, wanted + 1):
            method, own = phase_at(config, round)
            terms = terms_at(config, round)
            request, pending = method.begin(own, state)
            if round == wanted:
                request = rounded(request, config)
                method.check(own, request)
                yield request
            silent = torch.zeros(1, *terms.shape)
            noise = released(config, terms, [silent], 1, round)
            by_node = dict.fromkeys(range(config.num_nodes), noise)
            answered = Released(noise, terms.noise_std, by_node)
            method.finish(own, state, pending, answered)


class _World(NamedTuple):
    """The made-up clients of a node.

    Attributes:
        data: of these and others.
        clients: that answer.
        groups: of all clients, by their numbers; empty where none are compared.
    """

    data: FederatedImages
    clients: Sequence[int]
    groups: Sequence[InGroup | None]


def _measured(
    config: ResolvedConfig, request: Request, data: FederatedImages
) -> dict[str, float]:
    """Returns the largest norm of a sample for each name of what is measured.

    Args:
        config: of the run, as audited.
        request: of a round.
        data: made up; the last client is another one in the place of the first.
    """
    *everyone, spare = range(data.num_clients)
    records = list(data.client_records)
    records[0], records[spare] = records[spare], records[0]
    other = dataclasses.replace(data, client_records=tuple(records))
    found = dict.fromkeys([*MEASURED, *OF_GROUPS], 0.0)
    for groups, of_other, of_rest in _groupings(config, request, len(everyone)):
        worlds = (
            _World(data, everyone, groups),
            _World(other, everyone, of_other),
            _World(data, everyone[1:], of_rest),
        )
        lengths = _lengths(config, request, worlds)
        found = {name: max(found[name], lengths[name]) for name in found}
    return found


def _lengths(
    config: ResolvedConfig, request: Request, worlds: Sequence[_World]
) -> dict[str, float]:
    """Returns `_measured` of a node, of it with another client, and without the one."""
    of_worlds: list[Tensor] = []
    longest = dict.fromkeys([*MEASURED, *OF_GROUPS], 0.0)
    for world in worlds:
        # Of clients that are asked alone.
        parts = [_sum(config, request, world, [client]) for client in world.clients]
        # Of clients that are asked together.
        total = _sum(config, request, world, world.clients)
        backwards = _sum(config, request, world, world.clients[::-1])
        of_worlds.append(total)
        alone = sum(parts, start=torch.zeros_like(total))
        measured = {
            "one part": parts,
            "asked alone": [total - alone, backwards - alone],
            "outside its group": _outside(parts, world),
        }
        for name, values in measured.items():
            longest[name] = max(longest[name], *map(_longest, values), 0.0)
    total, replaced, left_out = of_worlds
    longest["one replaced"] = _longest(total - replaced)
    longest["one left out"] = _longest(total - left_out)
    return longest


def _outside(parts: Sequence[Tensor], world: _World) -> Iterator[Tensor]:
    """Yields the parts of a node's clients without the blocks of their groups."""
    for client, part in zip(world.clients, parts, strict=True):
        beside = part.clone()
        group = None
        if world.groups:
            group = world.groups[client]
        if group is not None:
            beside[:, group.number] = 0
        yield beside


def _groupings(
    config: ResolvedConfig, request: Request, count: int
) -> Iterator[Sequence[Sequence[InGroup | None]]]:
    """Yields the groups of all made-up clients in each of the three worlds.

    Together they put the first client into every group, and the one in its place into
    the same group or the next one.
    """
    method, own = phase_at(config, request.round)
    if not isinstance(own, GroupMeansConfig):
        yield (), (), ()
        return
    if own.compares_nodes:
        # Names decide, and a client keeps its name: those of a real node's size.
        names = [str(client) for client in range(config.hosting.smallest)]
        kinds = list(dict.fromkeys(method.groups(own, names, (), least=1)))
        for first in range(len(kinds)):
            groups = [kinds[(first + client) % len(kinds)] for client in range(count)]
            yield groups, groups, groups
        return
    names = [str(client) for client in range(count)]
    blocks = [
        CohortOfClient(str(value), part)
        for value in (own.healthy, own.suspicious)
        for part in range(own.groups)
    ]
    for least in (1, LEAST):
        for here, beyond in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
            # With the first client, its group has as many as are needed, or more.
            rest = [here] * (LEAST - 1) + [beyond] * (count - LEAST)
            groups, of_other, of_rest = [
                method.groups(own, names, [mine, *rest][:count], least)
                for mine in (here, beyond, None)
            ]
            yield groups, groups, groups
            yield groups, of_other, of_rest


def _sum(
    config: ResolvedConfig, request: Request, world: _World, clients: Sequence[int]
) -> Tensor:
    """Returns the sum that a node of these clients releases, but for the noise."""
    nets = None
    method, own = phase_at(config, request.round)
    if method.has_discriminators and clients:
        nets = Discriminators(own, clients)
    chosen = EVERYONE if request.participants == EVERYONE else tuple(clients)
    request = dataclasses.replace(request, participants=chosen, trainees=chosen)
    groups = [world.groups[client] for client in clients if world.groups]
    hosted = Hosted(world.data, clients, 0, nets, groups)
    answers = raw_answers(config, hosted, request)
    terms = without_noise(terms_at(config, request.round))
    return released(config, terms, answers, len(clients), request.round)


def made_up(config: ResolvedConfig) -> FederatedImages:
    """Returns clients with one image or many, random, black or white, of one class.

    The last one, of white images, is to replace the first one.
    """
    rng = np.random.default_rng(0)
    side = config.image_size
    count = min(config.num_clients, MOST_CLIENTS)
    sizes = [20, 1, 10, 1, 5]
    sizes = [*sizes[:count], 40]
    owners = np.repeat(np.arange(count + 1), sizes)
    shape = (len(owners), config.image_channels, side, side)
    images = rng.integers(256, size=shape, dtype=np.uint8)
    labels = rng.integers(config.num_classes, size=len(owners))
    images[owners == 2] = 0
    images[(owners == 3) | (owners == count)] = 255
    labels[owners >= 2] = config.num_classes - 1
    return FederatedImages(
        images=images,
        labels=labels,
        client_records=tuple(
            np.flatnonzero(owners == client) for client in range(count + 1)
        ),
        client_names=tuple(str(client) for client in range(count + 1)),
        num_classes=config.num_classes,
        name="made up",
    )
