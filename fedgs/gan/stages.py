"""Staged embeddings on the server: feature networks, and what a release says.

    make_stage -> (the noisy sum of the clients' embeddings) -> released

`fedgs.gan.moments` makes a Gaussian generator of it. All of it is post-processing of
releases and of what is public.

Source: docs/privacy.md, "Embedding releases".
"""

import math
from collections.abc import Sequence

from torch import Tensor

from fedgs.config.run_config import GsWganConfig
from fedgs.config.stages import MASS
from fedgs.gan.features import StageRelease
from fedgs.gan.moments import Model, expected, in_parts, model_of
from fedgs.shapes import TensorDict

LEAST_SHARE = 0.2  # of a group, of what it has where all are alike
LEAST_WEIGHT = 1e-6  # of all clients, of the most that they can have


def make_stage(
    config: GsWganConfig,
    releases: Sequence[StageRelease],
    round: int,
    start: Model | None = None,
) -> tuple[tuple[TensorDict, ...], Tensor]:
    """Makes the feature network of a round's stage, and what clients subtract.

    Clients subtract what the model so far expects.

    Privacy: post-processing of DP output.

    Returns:
        The network, and the centre: shape (1, groups, features), float32.

    Source: docs/privacy.md, "Embedding releases".
    """
    kind = config.stage_list[round - 1].kind
    _, groups, columns = config.terms(round).shape[1:]
    model = model_of(config, releases, start)
    if kind == "parts":
        model = in_parts(model)
    return (model.network,), expected(model, kind, groups, columns - 1)


def released(
    config: GsWganConfig,
    round: int,
    networks: tuple[TensorDict, ...],
    centre: Tensor,
    total: Tensor,
    noise_std: float,
) -> StageRelease:
    """Makes means of the images' features out of the noisy sum of all embeddings.

    Embeddings are equally long, so each counts by what its clipping left of it, C / its
    norm. The sum of those weights, and each group's share of the images, stand in the
    first feature: dividing by it gives a mean over images, weighted by client, whatever
    the clip bound is. Only a group with less than LEAST_SHARE of what all have on
    average stays nearer to the centre than that, for its noise would be large.

    Privacy: post-processing of DP output.

    Args:
        config: the resolved configuration.
        round: of the stage.
        networks: that the clients had.
        centre: that they subtracted.
        total: sum over clients, shape (networks, groups, 1 + features), float64.
        noise_std: of each number in `total`, at least 0.

    Source: docs/privacy.md, "Embedding releases".
    """
    copies = math.sqrt(len(networks) * total.shape[1])  # of the mass
    mass = total[:, :, 0].mean(0) / MASS  # of every group; noise may make it negative
    # Clipping leaves this at most, and a weight below its own noise says nothing.
    most = config.num_clients * config.clip_bound / (MASS * copies)
    least = max(LEAST_WEIGHT * most, noise_std / (MASS * copies))
    weight = float(mass.mean().clamp(least, most))
    shares = (mass / weight).clamp_min(LEAST_SHARE)  # 1 where all are alike
    target = centre.double() + total[:, :, 1:] / (weight * shares[:, None])
    noise = noise_std / (weight * shares)
    kind = config.stage_list[round - 1].kind
    of_parts = shares.float() if kind == "parts" else None
    return StageRelease(kind, networks, target.float(), noise.float(), of_parts)
