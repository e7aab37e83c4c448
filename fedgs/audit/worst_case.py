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
import itertools
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
from fedgs.round.answer import is_of_fedgs, raw_answers, weights_of
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
        config: the configuration of the run, as `fedgs.audit.crafted_releases.audited`.
        events: the events of its ledger.
    """
    recorded = {event.round: event for event in events}
    found = [check_terms(config, list(recorded.values()))]
    weakest = weakest_rounds(config, events)
    for round in weakest.values():
        event = recorded.get(round)
        if event is None:
            event = new_event(config, round, EVERYONE, 1)
        found.append(check_clipping(config, event))
        if event.noise_std > 0:
            # The union bound: all kinds together are refuted by chance that rarely.
            alpha = OF_NOISE / len(weakest)
            found.append(check_noise(config, event, alpha))
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
    for _ in range(2):
        # Of the method itself: `terms_at` repeats what it was told the first time.
        again = config.terms(event.round)
        if again != known:
            return False
    agreed = agreed_values(config, event.round)
    recorded = {name: getattr(event, name) for name in agreed}
    return recorded == agreed


def check_clipping(config: ResolvedConfig, event: Event) -> Check:
    """Clips and sums answers that are far too long, and some that are not.

    Privacy: public; reads no data.

    Args:
        config: the run's configuration, as audited.
        event: the event of the kind of release that is meant.
    """
    terms = without_noise(terms_at(config, event.round))
    bound = terms.clip_bound
    # One sample in two is short: it stays as it is, whatever stands beside it.
    lengths = torch.full(terms.shape, FAR * bound, dtype=torch.float64)
    lengths[1::2] = bound / 2
    along = directions(terms.shape[1:])
    # One client for each direction, whose samples have the lengths above.
    long = along[:, None] * lengths
    # And one whose answer has a number that is none.
    broken = long[:1].clone()
    first_number = (0,) * broken.dim()
    broken[first_number] = torch.inf
    answers = torch.cat([long, broken])
    parts = _clipped(answers, bound)
    longest = 0.0
    for answer, part in zip(answers, parts, strict=True):
        alone = released(config, terms, [answer[None]], asked=1)
        difference = _longest(alone - part)
        longest = max(longest, difference)
    # In two batches, as workers hand them in.
    batches = [answers[:2], answers[2:]]
    together = released(config, terms, batches, asked=len(answers))
    sum_of_parts = parts.sum(0)
    difference = _longest(together - sum_of_parts)
    longest = max(longest, difference)
    return Check(
        check=f"clipping, {event.release}",
        tested="clients that answer far beyond the clip bound or with half of it, in "
        "all coordinates or few: what sums differ from those of samples clipped one by "
        "one, in clip bounds",
        found=longest / bound,
        allowed=rounding(config, terms, len(answers)),
    )


def _clipped(answers: Tensor, bound: float) -> Tensor:
    """Returns what clipping should make, computed without the code that is checked."""
    norms = torch.linalg.vector_norm(answers, dim=(2, 3, 4), keepdim=True)
    factors = (bound / norms).clamp(max=1.0)
    parts = answers * factors
    # A sample with a number that is none, or is infinite, counts as no answer.
    is_finite = norms.isfinite().expand_as(parts)
    parts[~is_finite] = 0.0
    return parts


def _longest(values: Tensor) -> float:
    """Returns the largest norm of a sample, infinite where one is no number."""
    norms = values.flatten(1).norm(dim=1)
    norms = norms.nan_to_num(nan=math.inf)
    return float(norms.max())


# ------------------------------------------------------------------ made-up clients


def check_method(config: ResolvedConfig) -> list[Check]:
    """Asks the method's own `answer` for made-up clients, in its first rounds.

    Privacy: public; reads no data.

    Args:
        config: the run's configuration, as audited.

    Raises:
        UserError: the run's public data cannot be read.
    """
    state = new_state(config)
    data = made_up(config)
    of_stacks = 0.0
    is_stacked = any(is_of_fedgs(phase.method) for phase in phases_of(config))
    if is_stacked:
        of_stacks = STACKED
    measured = dict(MEASURED)
    has_groups = any(alike.terms.num_groups > 1 for alike in rounds_alike(config))
    if has_groups:
        measured |= OF_GROUPS
    found = dict.fromkeys(measured, 0.0)
    slack = 0.0
    rounds: list[str] = []
    try:
        for request in _requests(config, state):
            rounds.append(str(request.round))
            terms = terms_at(config, request.round)
            of_round = of_stacks + rounding(config, terms, data.num_clients)
            slack = max(slack, of_round)
            of_request = _measured(config, request, data)
            for name in measured:
                value = of_request[name] / terms.clip_bound
                found[name] = max(found[name], value)
    # Whatever a method of others raises is a finding, not the end of the audit.
    except Exception as error:
        kind = type(error).__name__
        text = f"made-up clients: {kind}: {error}"
        check = Check(
            check="method, answers",
            tested=text,
            found=1,
            allowed=0,
        )
        return [check]
    asked = f"made-up clients in round {', '.join(rounds)}"
    checks: list[Check] = []
    for name, (limit, text) in measured.items():
        check = Check(
            check=f"method, {name}",
            tested=f"{asked}: {text}, in clip bounds",
            found=found[name],
            allowed=limit + slack,
        )
        checks.append(check)
    return checks


def _requests(config: ResolvedConfig, state: State) -> Iterator[Request]:
    """Yields the requests of phases that release once, and one of each kind of terms.

    What clients answer to them, and to the rounds in between, is noise alone.
    """
    first: dict[tuple[object, ...], int] = {}
    for alike in rounds_alike(config):
        terms = alike.terms
        kind = (terms.release, terms.clip_bound, terms.shape)
        first.setdefault(kind, alike.first)
    first_rounds = list(first.values())
    chosen = set(first_rounds[:MOST_KINDS])
    for index in range(len(config.phases)):
        if config.at_phase(index).releases_once:
            chosen.add(config.first_rounds[index])
    for wanted in sorted(chosen):
        before = wanted - 1
        state.round = max(state.round, before - MOST_PLAYED)
        for round in range(state.round + 1, wanted + 1):
            method, own = phase_at(config, round)
            terms = terms_at(config, round)
            request, pending = method.begin(own, state)
            if round == wanted:
                request = rounded(request, config)
                method.check(own, request)
                yield request
            silent = torch.zeros(1, *terms.shape)
            noise = released(config, terms, [silent], asked=1, round=round)
            by_node = dict.fromkeys(range(config.num_nodes), noise)
            answered = Released(
                total=noise,
                noise_std=terms.noise_std,
                by_node=by_node,
            )
            method.finish(own, state, pending, answered)


class _World(NamedTuple):
    """The made-up clients of a node.

    Attributes:
        data: the data of these and others.
        clients: that answer.
        groups: the group of each client, by its number; empty where none are compared.
    """

    data: FederatedImages
    clients: Sequence[int]
    groups: Sequence[InGroup | None]


def _measured(
    config: ResolvedConfig,
    request: Request,
    data: FederatedImages,
) -> dict[str, float]:
    """Returns the largest norm of a sample for each name of what is measured.

    Args:
        config: the run's configuration, as audited.
        request: the request of a round.
        data: made up; the last client is another one in the place of the first.
    """
    *everyone, spare = range(data.num_clients)
    # In the other world the spare client has the first one's number.
    records = list(data.client_records)
    first_ones = records[0]
    records[0] = records[spare]
    records[spare] = first_ones
    other = dataclasses.replace(data, client_records=tuple(records))
    found = dict.fromkeys([*MEASURED, *OF_GROUPS], 0.0)
    for groups, of_other, of_rest in _groupings(config, request, len(everyone)):
        worlds = (
            _World(data=data, clients=everyone, groups=groups),
            _World(data=other, clients=everyone, groups=of_other),
            _World(data=data, clients=everyone[1:], groups=of_rest),
        )
        lengths = _lengths(config, request, worlds)
        for name, length in lengths.items():
            found[name] = max(found[name], length)
    return found


def _lengths(
    config: ResolvedConfig,
    request: Request,
    worlds: Sequence[_World],
) -> dict[str, float]:
    """Returns `_measured` of a node, of it with another client, and without the one."""
    of_worlds: list[Tensor] = []
    longest = dict.fromkeys([*MEASURED, *OF_GROUPS], 0.0)
    for world in worlds:
        # Of clients that are asked alone.
        parts: list[Tensor] = []
        for client in world.clients:
            part = _sum(config, request, world, [client])
            parts.append(part)
        # Of clients that are asked together.
        total = _sum(config, request, world, world.clients)
        reversed_order = world.clients[::-1]
        backwards = _sum(config, request, world, reversed_order)
        of_worlds.append(total)
        alone = sum(parts, start=torch.zeros_like(total))
        measured = {
            "one part": parts,
            "asked alone": [total - alone, backwards - alone],
            "outside its group": _outside(parts, world),
        }
        for name, values in measured.items():
            for value in values:
                length = _longest(value)
                longest[name] = max(longest[name], length)
    total, replaced, left_out = of_worlds
    longest["one replaced"] = _longest(total - replaced)
    longest["one left out"] = _longest(total - left_out)
    return longest


def _outside(parts: Sequence[Tensor], world: _World) -> Iterator[Tensor]:
    """Yields the parts of a node's clients without the blocks of their groups."""
    for client, part in zip(world.clients, parts, strict=True):
        beside = part.clone()
        if world.groups:
            group = world.groups[client]
            if group is not None:
                beside[:, group.number] = 0
        yield beside


def _groupings(
    config: ResolvedConfig,
    request: Request,
    count: int,
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
        size = config.hosting.smallest
        names = [str(client) for client in range(size)]
        of_names = method.groups(own, names, (), least=1)
        kinds = list(dict.fromkeys(of_names))
        for first in range(len(kinds)):
            from_first = kinds[first:] + kinds[:first]
            in_turn = itertools.cycle(from_first)
            groups = list(itertools.islice(in_turn, count))
            yield groups, groups, groups
        return
    names = [str(client) for client in range(count)]
    blocks: list[CohortOfClient] = []
    for value in (own.healthy, own.suspicious):
        for part in range(own.groups):
            block = CohortOfClient(str(value), part)
            blocks.append(block)
    following = [*blocks[1:], blocks[0]]
    for least in (1, LEAST):
        for here, beyond in zip(blocks, following, strict=True):
            # With the first client, its group has as many as are needed, or more.
            rest = [here] * (LEAST - 1)
            rest += [beyond] * (count - LEAST)
            of_worlds: list[Sequence[InGroup | None]] = []
            for mine in (here, beyond, None):
                cohorts = [mine, *rest]
                of_world = method.groups(own, names, cohorts[:count], least)
                of_worlds.append(of_world)
            groups, of_other, of_rest = of_worlds
            yield groups, groups, groups
            yield groups, of_other, of_rest


def _sum(
    config: ResolvedConfig,
    request: Request,
    world: _World,
    clients: Sequence[int],
) -> Tensor:
    """Returns the sum that a node of these clients releases, but for the noise."""
    nets = None
    method, own = phase_at(config, request.round)
    if method.has_discriminators and clients:
        nets = Discriminators(own, clients)
    chosen = request.participants
    if chosen != EVERYONE:
        chosen = tuple(clients)
    request = dataclasses.replace(
        request,
        participants=chosen,
        trainees=chosen,
    )
    groups: list[InGroup | None] = []
    if world.groups:
        groups = [world.groups[client] for client in clients]
    hosted = Hosted(
        data=world.data,
        clients=clients,
        node_id=0,
        discriminators=nets,
        groups=groups,
    )
    answers = raw_answers(config, hosted, request)
    terms = without_noise(terms_at(config, request.round))
    return released(
        config,
        terms,
        answers,
        asked=len(clients),
        round=request.round,
        weights=weights_of(hosted, request),
    )


def made_up(config: ResolvedConfig) -> FederatedImages:
    """Returns clients with one image or many, random, black or white, of one class.

    The last one, of white images, is to replace the first one.
    """
    rng = np.random.default_rng(0)
    side = config.image_size
    spare = min(config.num_clients, MOST_CLIENTS)
    sizes = [20, 1, 10, 1, 5]
    sizes = [*sizes[:spare], 40]
    clients = range(spare + 1)
    owners = np.repeat(clients, sizes)
    num_images = len(owners)
    shape = (num_images, config.image_channels, side, side)
    images = rng.integers(256, size=shape, dtype=np.uint8)
    labels = rng.integers(config.num_classes, size=num_images)
    is_black = owners == 2
    is_white = (owners == 3) | (owners == spare)
    images[is_black] = 0
    images[is_white] = 255
    # The first two clients have images of several classes.
    is_of_one_class = owners >= 2
    labels[is_of_one_class] = config.num_classes - 1
    records = [np.flatnonzero(owners == client) for client in clients]
    names = [str(client) for client in clients]
    return FederatedImages(
        images=images,
        labels=labels,
        client_records=tuple(records),
        client_names=tuple(names),
        num_classes=config.num_classes,
        name="made up",
    )
