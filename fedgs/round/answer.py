"""The barrier: what a method answers becomes one sanitized release of a node.

The frame asks a method one client at a time, with that client's data alone. What it
answers has to have the shape of the round's terms; it is clipped to the round's C,
shortened where its group is small, summed over the node's participants, and gets noise
once. Nothing else of a client
leaves its node, so the guarantee of every method is that of its `Terms`.

Methods of fedgs may answer for several clients in one call, which is faster: tests
compare each of their rows with the answer of that client alone. A method of others is
never asked so, for whose data a row is made of cannot be seen from outside.

Source: docs/privacy.md, "The mechanism".
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedgs.config.rounds import terms_at
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.terms import Terms
from fedgs.mechanism.integer_sums import IntegerSum, sanitize_integers
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.quantization import release_step
from fedgs.mechanism.sanitizer import (
    ClippedGradients,
    PerSampleGradients,
    SanitizedGradients,
    clip,
    sanitize,
    shorten,
)
from fedgs.methods import phase_at
from fedgs.methods.base import Hosted, Method, OneClient, Released, Request
from fedgs.methods.schedule import Clients, clients_of


def answer_of(
    config: ResolvedConfig,
    hosted: Hosted,
    request: Request,
) -> SanitizedGradients | IntegerSum | None:
    """Returns a node's release of a round; None where none of its clients takes part.

    Privacy: releases (epsilon, delta)-DP output; event: one Gaussian release with the
    noise, the clip bound and the B of the round's terms.

    Args:
        config: the resolved configuration.
        hosted: what the node answers with; its discriminators are trained in place.
        request: what the server asks.
    """
    asked = len(clients_of(request.participants, hosted.clients))
    return release(
        config=config,
        terms=terms_at(config, request.round),
        answers=raw_answers(config, hosted, request),
        round=request.round,
        node_id=hosted.node_id,
        asked=asked,
        weights=weights_of(hosted, request),
    )


def weights_of(hosted: Hosted, request: Request) -> list[float]:
    """Returns what each participant's clipped answer is multiplied by, in their order.

    Where groups are compared this hides small ones; a method has no part in it
    (`fedgs.cohorts.client_groups.weight_of`). Else it is 1.

    Privacy: reads private data; output private.
    """
    asked = clients_of(request.participants, hosted.clients)
    return [hosted.weight_of(client) for client in asked]


def raw_answers(
    config: ResolvedConfig,
    hosted: Hosted,
    request: Request,
) -> Iterator[Tensor]:
    """Yields what a node's participants answer, in their order; trainees train first.

    Privacy: reads private data; output private.
    """
    method, own = phase_at(config, request.round)
    # All training before all answers, and not client by client: trainees need not be
    # participants.
    for group in _groups(method, own, hosted, request.trainees):
        method.train(own, group, request)
    for group in _groups(method, own, hosted, request.participants):
        if is_of_fedgs(method):
            values = method.answer_stacked(own, group, request)
        else:
            # A fresh copy of the method has nothing of the client before in itself.
            fresh = copy.deepcopy(method)
            values = torch.stack([fresh.answer(own, group[0], request)])
        yield _of_images(values, group, hosted)


def _of_images(values: Tensor, group: Sequence[OneClient], hosted: Hosted) -> Tensor:
    """Makes zero of what clients without images answer to the one in their place."""
    # Who has no images is private, so such a client is asked like all others, and what
    # it answers about none does not count.
    records = hosted.data.client_records
    rows: list[int] = []
    for row, own in enumerate(group):
        num_images = len(records[own.number])
        if num_images == 0:
            rows.append(row)
    index = torch.tensor(rows, dtype=torch.int64, device=values.device)
    return values.index_fill(0, index, 0)


def _groups(
    method: Method[Any],
    config: ResolvedConfig,
    hosted: Hosted,
    asked: Clients,
) -> Iterator[list[OneClient]]:
    """Yields the asked clients of a node with their data, in groups of one call each.

    One group at a time is in memory.
    """
    is_alone = not is_of_fedgs(method)
    if is_alone:
        size = 1
    else:
        size = method.stack_size(config)
    numbers = clients_of(asked, hosted.clients)
    for first in range(0, len(numbers), size):
        group = numbers[first : first + size]
        yield [hosted.only(client, is_alone) for client in group]


def is_of_fedgs(method: Method[Any]) -> bool:
    """Tells whether a method's code is part of fedgs, and of its tests."""
    return type(method).__module__.startswith("fedgs.")


def release(
    config: ResolvedConfig,
    terms: Terms,
    answers: Iterable[Tensor],
    round: int,
    node_id: int,
    asked: int,
    weights: Sequence[float] | None = None,
) -> SanitizedGradients | IntegerSum | None:
    """Clips and shortens each answer, sums them and adds the node's noise once.

    Privacy: releases (epsilon, delta)-DP output; event: one Gaussian release with the
    noise and clip bound of `terms`; with secure aggregation one of integers.

    Args:
        config: the resolved configuration.
        terms: the terms of the round.
        answers: of the node's participating clients, in order, each (n, B, ...) for n
            of them.
        round: the round.
        node_id: the node's index.
        asked: the number of these clients.
        weights: one for each of these clients, as `weights_of` returns them; 1 each
            if None.

    Raises:
        TypeError: a part that is not of the terms' shape, or another number of answers.
            Clipping bounds what one answer adds.
    """
    # One at a time: a node may host more clients than fit into memory.
    parts = _clipped(config, terms, answers, asked, weights or [1.0] * asked)
    if asked == 0:
        for _ in parts:  # of nobody; but trainees train before the first answer
            pass
        return None
    noise = NoiseStream(config.noise_seed, node_id, round)
    units = config.units(terms)
    if units:  # a secure aggregation adds integers
        return sanitize_integers(parts, units, terms.noise_std, noise, round, node_id)
    step = release_step(config, terms)
    return sanitize(parts, terms.noise_std, noise, round, node_id, step)


def _clipped(
    config: ResolvedConfig,
    terms: Terms,
    answers: Iterable[Tensor],
    asked: int,
    weights: Sequence[float],
) -> Iterator[ClippedGradients]:
    """Yields clipped answers; raises after the last one if there are not `asked`."""
    answered = 0
    for answer in answers:
        gradients = per_sample(config, terms, answer)
        first = answered
        answered += len(gradients.values)
        clipped = clip(gradients, terms.clip_bound)
        # After clipping, which would undo it.
        yield shorten(clipped, weights[first:answered])
    # Two answers of one client would add 2 C where C is accounted for.
    if answered != asked:
        raise TypeError(
            f"{config.methods}: each participating client must answer exactly once"
        )


def per_sample(
    config: ResolvedConfig,
    terms: Terms,
    values: Tensor,
) -> PerSampleGradients:
    """Returns what a method answered for some clients as the mechanism takes it.

    Privacy: reads private data; output private.

    Raises:
        TypeError: it has not the shape that the terms promise, or other numbers than
            real ones. The text quotes shapes alone, which are public.
    """
    # The bound of clipping is proved for real numbers.
    if not values.is_floating_point():
        raise TypeError(f"{config.methods}: the answer is no tensor of real numbers")
    if values.shape[1:] != terms.shape:
        raise TypeError(
            f"{config.methods}: answers with shape {tuple(values.shape[1:])} for each "
            f"client, the terms promise {terms.shape}"
        )
    return PerSampleGradients(values.detach())


def summed(
    config: ResolvedConfig,
    round: int,
    answers: Sequence[SanitizedGradients],
) -> Released:
    """Returns the sum of the nodes' releases.

    It does not depend on the order in which answers came. An opened sum of a secure
    aggregation is one answer with the noise of all.

    Privacy: post-processing of DP output.

    Args:
        config: the resolved configuration.
        round: the round that was answered.
        answers: at least one.
    """
    # Floating-point sums depend on their order, so answers are sorted: the same answers
    # make the same bytes. In 64 bits, since a sum over many nodes would lose digits in
    # 32.
    terms = terms_at(config, round)
    total = torch.zeros(terms.shape, dtype=torch.float64)
    for answer in sorted(answers, key=lambda answer: answer.node_id):
        total += answer.values.double()
    by_node: dict[int, Tensor] = {}
    if terms.is_by_node:
        by_node = {answer.node_id: answer.values.double() for answer in answers}
    # Every node's noise is equally large, and variances add.
    noise_std = answers[0].noise_std * len(answers) ** 0.5
    return Released(total, noise_std, by_node)


def most_signal_to_noise(config: ResolvedConfig, round: int) -> float:
    """Returns the ratio that `Released` estimates where all answer alike, as long as C.

    Privacy: public.

    Args:
        config: the resolved configuration; infinite without noise.
        round: the round whose terms count.
    """
    terms = terms_at(config, round)
    clients = config.clients_per_round
    nodes = min(config.num_nodes, clients)
    size = math.prod(terms.shape[1:])
    noise = 4 * terms.noise_multiplier**2 * nodes * size
    if noise == 0:
        return math.inf
    return clients**2 / noise
