"""The barrier: what a method answers becomes one sanitized release of a node.

Whatever `Method.answer` yields is clipped to the round's C, summed over the node's
participants, and gets noise once. Nothing else of a client leaves its node, so the
guarantee of every method is that of its `Terms`.

Source: docs/privacy.md, "The mechanism".
"""

import math
from collections.abc import Iterable, Sequence

import torch

from fedgs.config.run_config import ResolvedConfig
from fedgs.config.stages import Terms
from fedgs.mechanism.integers import IntegerSum, sanitize_integers
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.quantization import release_step
from fedgs.mechanism.sanitizer import (
    PerSampleGradients,
    SanitizedGradients,
    clip,
    sanitize,
)
from fedgs.methods import method_of
from fedgs.methods.base import Hosted, Released, Request
from fedgs.methods.schedule import clients_of


def answer_of(
    config: ResolvedConfig, hosted: Hosted, request: Request
) -> SanitizedGradients | IntegerSum | None:
    """Returns a node's release of a round; None where none of its clients takes part.

    Privacy: releases (epsilon, delta)-DP output; event: one Gaussian release with the
    noise, the clip bound and the B of the round's terms.

    Args:
        config: the resolved configuration.
        hosted: what the node answers with; its discriminators are trained in place.
        request: of the server.
    """
    answers = method_of(config, request.round).answer(config, hosted, request)
    asked = len(clients_of(request.participants, hosted.clients))
    place = request.round, hosted.node_id
    return release(config, config.terms(request.round), answers, *place, asked)


def release(
    config: ResolvedConfig,
    terms: Terms,
    answers: Iterable[PerSampleGradients],
    round: int,
    node_id: int,
    asked: int,
) -> SanitizedGradients | IntegerSum | None:
    """Clips each answer, sums them in their order and adds the node's noise once.

    Privacy: releases (epsilon, delta)-DP output; event: one Gaussian release with the
    noise and clip bound of `terms`; with secure aggregation one of integers.

    Args:
        config: the resolved configuration.
        terms: of the round.
        answers: of the node's participating clients, in order.
        round: the round.
        node_id: the node's index.
        asked: the number of these clients.

    Raises:
        TypeError: another number of answers. Clipping bounds what one answer adds.
    """
    parts = [clip(answer, terms.clip_bound) for answer in answers]
    if sum(len(part.values) for part in parts) != asked:
        raise TypeError(f"method {config.method} answers other than once a client")
    if not parts:
        return None
    noise = NoiseStream(config.noise_seed, node_id, round)
    place = (terms.noise_std, noise, round, node_id)
    if units := config.units(terms):
        return sanitize_integers(parts, units, *place)
    return sanitize(parts, *place, release_step(config, terms))


def summed(
    config: ResolvedConfig, round: int, answers: Sequence[SanitizedGradients]
) -> Released:
    """Returns the sum of the nodes' releases.

    It does not depend on the order in which answers came. An opened sum of a secure
    aggregation is one answer with the noise of all.

    Privacy: post-processing of DP output.

    Args:
        config: the resolved configuration.
        round: that was answered.
        answers: at least one.
    """
    total = torch.zeros(config.terms(round).shape, dtype=torch.float64)
    for answer in sorted(answers, key=lambda answer: answer.node_id):
        total += answer.values.double()
    return Released(total, answers[0].noise_std * len(answers) ** 0.5)


def most_signal_to_noise(config: ResolvedConfig, round: int) -> float:
    """Returns the ratio that `Released` estimates where all answer alike, as long as C.

    Privacy: public.

    Args:
        config: the resolved configuration; infinite without noise.
        round: whose terms count.
    """
    terms, clients = config.terms(round), config.clients_per_round
    nodes = min(config.num_nodes, clients)
    noise = 4 * terms.noise_multiplier**2 * nodes * math.prod(terms.shape[1:])
    return clients**2 / noise if noise else math.inf
