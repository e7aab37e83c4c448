"""The barrier: what a method answers becomes one sanitized release of a node.

Whatever `Method.answer` yields is clipped to the round's C, summed over the node's
participants, and gets noise once. Nothing else of a client leaves its node, so the
guarantee of every method is that of its `Terms`.

Source: docs/privacy.md, "The mechanism".
"""

from collections.abc import Iterable

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
from fedgs.methods.base import Hosted, Request


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
    return release(
        config, config.terms(request.round), answers, request.round, hosted.node_id
    )


def release(
    config: ResolvedConfig,
    terms: Terms,
    answers: Iterable[PerSampleGradients],
    round: int,
    node_id: int,
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
    """
    parts = [clip(answer, terms.clip_bound) for answer in answers]
    if not parts:
        return None
    noise = NoiseStream(config.noise_seed, node_id, round)
    place = (terms.noise_std, noise, round, node_id)
    if units := config.units(terms):
        return sanitize_integers(parts, units, *place)
    return sanitize(parts, *place, release_step(config, terms))
