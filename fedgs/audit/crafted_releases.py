"""Releases of worst-case clients through the frame, which the attacks and checks read.

Every release here is made by `fedgs.round.answer.release`, with the run's clip bound,
B and noise: it checks shapes, clips, sums over a node's clients and adds noise. A bug
in any of that shows in what comes out.

Privacy: public; no data are read.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from fedgs.audit.bounds import Scores
from fedgs.config.rounds import terms_at
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.terms import Terms
from fedgs.mechanism.integer_sums import real_values
from fedgs.randomness import secret
from fedgs.round.answer import release

FAR = 1e6  # length of a worst-case answer, in C: of a million numbers, too
NUMBERS_AT_ONCE = 1 << 16
_ONE_COORDINATE = torch.ones(1, 1, 1)


def audited(config: ResolvedConfig) -> ResolvedConfig:
    """Returns the settings by which a run's releases are checked, before any rounding.

    Rounding after the noise protects nobody, and would hide what is looked for. Who
    takes part is drawn by another secret, so that a report tells nothing of the run's.
    """
    return dataclasses.replace(
        config,
        message_precision="exact",
        device="cpu",
        selection_key=secret(),
    )


def directions(shape: tuple[int, ...]) -> Tensor:
    """Returns four random directions of one sample, of norm 1, shape (4, *shape).

    The first is of all coordinates, the others of one channel, row and coordinate. A
    clip that bounds another norm, or that of a part of a sample, lets one of them pass.

    Args:
        shape: (channels, rows, columns).
    """
    rng = np.random.default_rng()
    place = [int(rng.integers(side)) for side in shape]
    found = torch.zeros((len(shape) + 1, *shape), dtype=torch.float64)
    for known, direction in enumerate(found):
        # A view: of all, of one channel, of one row of it, of one coordinate.
        inside = direction[tuple(place[:known])]
        drawn = rng.standard_normal(inside.shape)
        inside += torch.from_numpy(np.asarray(drawn))
        direction /= direction.norm()
    return found


def node_scores(
    config: ResolvedConfig,
    signs: Scores,
    node_id: int = 0,
    round: int = 1,
    direction: Tensor = _ONE_COORDINATE,
) -> Scores:
    """Returns <release, e>, summed over the B samples, of one round for each sign.

    A node with several clients answers with two: the attacked one, and one that
    contributes -C e whatever the sign.

    Privacy: public; reads no data.

    Args:
        config: the run's; decides C, B and the noise. Noise is never seeded here.
        signs: shape (trials,); the client's answer is sign * FAR C e.
        node_id: whose release it is.
        round: a round of the kind that is meant.
        direction: e, of the shape of one sample, or of samples of one coordinate.
    """
    terms = terms_at(config, round)

    def scores_of(part: Scores) -> Scores:
        return _scores_of_part(config, terms, node_id, direction, part)

    # In parts, because a million rounds do not fit into memory at once.
    numbers_of_each = terms.batch_size * direction.numel()
    size = max(1, NUMBERS_AT_ONCE // numbers_of_each)
    cuts = range(size, len(signs), size)
    parts = np.split(signs, cuts)
    with ThreadPoolExecutor(config.num_workers) as pool:
        scores = list(pool.map(scores_of, parts))
    return np.concatenate(scores)


def _scores_of_part(
    config: ResolvedConfig,
    terms: Terms,
    node_id: int,
    direction: Tensor,
    signs: Scores,
) -> Scores:
    one = (direction * FAR * terms.clip_bound).float()
    grads = torch.from_numpy(signs.repeat(terms.batch_size)).float()
    grads = grads.view(1, -1, 1, 1, 1) * one
    if config.largest_node > 1 and config.clients_per_round > 1:
        beside = (-one).expand_as(grads)
        grads = torch.cat([grads, beside])
    # With a seed every part would get the same noise again.
    unseeded = dataclasses.replace(config, noise_seed=None)
    # Trials lie along the axis of the samples, with B samples for each.
    shape = (grads.shape[1], *one.shape)
    of_trials = dataclasses.replace(terms, shape=shape)
    found = released(
        unseeded,
        of_trials,
        [grads],
        asked=len(grads),
        node_id=node_id,
    )
    along = found.flatten(1) @ direction.flatten().double()
    by_trial = along.numpy().reshape(len(signs), -1)
    return by_trial.sum(1)


def released(
    config: ResolvedConfig,
    terms: Terms,
    answers: Iterable[Tensor],
    asked: int,
    round: int = 1,
    node_id: int = 0,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Returns what a node releases for given answers, float64; zeros where none is due.

    Privacy: public, where the answers are those of made-up clients.

    Args:
        config: the run's.
        terms: the terms of the round.
        answers: as `fedgs.round.answer.release` takes them.
        asked: number of clients that answer.
        round: with the node, it decides the noise of a seeded run.
        node_id: the node's index.
        weights: one for each of these clients, as `fedgs.round.answer.release` takes
            them.
    """
    found = release(config, terms, answers, round, node_id, asked, weights)
    if found is None:
        return torch.zeros(terms.shape, dtype=torch.float64)
    return real_values(found)


def without_noise(terms: Terms) -> Terms:
    """Returns terms by which a release is the clipped sum alone."""
    return dataclasses.replace(terms, noise_multiplier=0.0)


def rounding(config: ResolvedConfig, terms: Terms, clients: int) -> float:
    """Returns the most by which rounding moves a sample of a sum, in units of C.

    Sums become float32; the integers of a secure aggregation are rounded before, by
    client and coordinate.
    """
    units = config.units(terms)
    of_float32 = 1e-6
    of_integers = 0.0
    if units:
        # Each of d coordinates is rounded by less than a unit.
        size = math.prod(terms.shape[1:])
        of_integers = math.sqrt(size) / units
    return clients * (of_float32 + of_integers)
