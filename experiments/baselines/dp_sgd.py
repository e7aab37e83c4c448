"""DP-SGD, for the methods that need it: Poisson batches, clipped sums, noise.

Opacus computes the gradients of single records; sampling, clipping and noise are here,
so that they are fedgs' own.

Source: Abadi et al., "Deep learning with differential privacy", CCS 2016, Algorithm 1,
with Poisson batches; https://github.com/pytorch/opacus (per-sample gradients).
"""

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.baselines.baseline import AuditScores, Facts, StepEvent
from fedgs.config.run_config import NetworkConfig
from fedgs.data.federated import FederatedImages, to_float
from fedgs.errors import imported
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.accountant import Statement
from fedgs.privacy.oracle import autodp_epsilon
from fedgs.privacy.poisson import PoissonReleases, epsilon, theorem
from fedgs.randomness import stream
from fedgs.shapes import Images, Labels

SAMPLES_AT_ONCE = 256  # each has a gradient as large as the network
_BELOW = 1 - 1e-6  # of the clip bound: float32 must not round a norm above it

Losses = Callable[[Tensor], Tensor]  # rows -> one loss for each


def pooled(data: FederatedImages) -> tuple[Images, Labels]:
    """Returns all clients' images in [0, 1] and labels, as a curator has them.

    Privacy: reads private data; output private.
    """
    records = np.concatenate(data.client_records)
    images = torch.from_numpy(to_float(data.images[records]))
    return images, torch.from_numpy(data.labels[records])


def poisson_batch(noise_seed: int | None, step: int, count: int, rate: float) -> Tensor:
    """Draws a batch: each of `count` records by itself with chance `rate`.

    Privacy: what sampling gains is lost to whoever can tell who was drawn. So the run's
    public seed never decides it: it comes from the system, or from the noise's seed.

    Returns:
        Record numbers, possibly none, int64.
    """
    if noise_seed is None:
        # 64 random bits of each record, as a number in [0, 1).
        bits = os.urandom(8 * count)
        chances = np.frombuffer(bits, np.uint64) * 2.0**-64
    else:
        rng = stream(noise_seed, "poisson-batch", step)
        chances = rng.random(count)
    drawn = np.flatnonzero(chances < rate)
    return torch.from_numpy(drawn)


def per_sample(network: nn.Module) -> Any:
    """Wraps a network of torch's own layers so that it has per-sample gradients.

    Raises:
        UserError: Opacus is not installed.
    """
    opacus = imported("opacus.grad_sample", "baseline", "'fedgs[baselines]'")
    return opacus.GradSampleModule(network, loss_reduction="sum")


def clipped_rows(
    network: Any,
    losses: Losses,
    records: Tensor,
    clip_bound: float,
) -> Iterator[Tensor]:
    """Yields records' gradients, each clipped over all weights together.

    Privacy: reads private data; output private.

    Differs from the reference: one norm over all variables. DP-CGAN clips each of its
    four to C, so a record moves the sum by 2 C, and C was accounted.

    Args:
        network: a network that `per_sample` has wrapped.
        losses: the losses of the records that it gets.
        records: numbers, shape (n,), int64; may be none.
        clip_bound: C, above 0.

    Yields:
        Some of n rows of all weights, float32, on the network's device.
    """
    for rows in records.split(SAMPLES_AT_ONCE):
        if not len(rows):
            continue  # torch splits no records into one empty part
        network.zero_grad(set_to_none=True)
        with quiet():
            losses(rows).sum().backward()
        grads = [param.grad_sample.flatten(1) for param in network.parameters()]
        of_all_weights = torch.cat(grads, dim=1)
        yield clipped(of_all_weights, clip_bound)
    network.zero_grad(set_to_none=True)


def clipped_sum(
    network: Any,
    losses: Losses,
    records: Tensor,
    clip_bound: float,
) -> Tensor:
    """Returns the sum of `clipped_rows`: all weights in one vector.

    Nobody may have been drawn: the sum is 0, and is released with noise as any other.

    Privacy: reads private data; output private, sensitivity `clip_bound` if a record is
    added or removed.
    """
    params = list(network.parameters())
    # A sum at a time: the rows of a whole batch would not fit into memory.
    num_weights = sum(param.numel() for param in params)
    total = torch.zeros(num_weights, device=params[0].device)
    for grads in clipped_rows(network, losses, records, clip_bound):
        total += grads.sum(0)
    return total


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Mutes torch's warning that images need no gradient; Opacus needs no such."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield


def clipped(grads: Tensor, clip_bound: float) -> Tensor:
    """Clips rows to norm C; a row that is not finite counts as 0.

    Privacy: reads private data; output private.
    """
    is_finite = grads.isfinite().all(1, keepdim=True)
    finite = torch.where(is_finite, grads, 0.0)
    norms = finite.norm(dim=1, keepdim=True).clamp_min(1e-30)
    factors = _BELOW * clip_bound / norms
    # A short row stays as it is: clipping shortens, and never lengthens.
    return finite * factors.clamp(max=1.0)


def noisy(total: Tensor, noise_std: float, source: NoiseStream) -> Tensor:
    """Returns a sum with its noise, the release of one step.

    Privacy: reads private data; output DP if `noise_std` is meant for the sensitivity.

    Args:
        total: any shape.
        noise_std: the standard deviation of the noise in every number, at least 0.
        source: the source of this release alone.
    """
    noise = torch.from_numpy(source.normal(tuple(total.shape), noise_std))
    # In float64, as the sanitizer adds it.
    released = total.cpu().double() + noise
    return released.float().to(total.device)


def noise_source(config: NetworkConfig, step: int) -> NoiseStream:
    """Returns the noise of one step of a training."""
    return NoiseStream(config.noise_seed, 0, step)


def set_grads(network: nn.Module, gradient: Tensor) -> None:
    """Gives a network's weights the gradient that one vector holds, for an optimizer.

    Privacy: post-processing of DP output.
    """
    params = list(network.parameters())
    sizes = [param.numel() for param in params]
    parts = gradient.split(sizes)
    for param, part in zip(params, parts, strict=True):
        param.grad = part.view_as(param)


def event(rate: float, noise_per_clip: float, **more: Any) -> dict[str, Any]:
    """Returns the ledger's event of one release of a Poisson batch (rate 1: of all)."""
    cost = {"sampling_rate": rate, "noise_per_clip": noise_per_clip, "count": 1}
    return {"kind": "gaussian-sum"} | more | cost


def releases(events: Sequence[StepEvent]) -> tuple[PoissonReleases, ...]:
    """Returns what events of `event` cost, for `fedgs.privacy.poisson`."""
    counts = Counter[tuple[float, float]]()
    for each in events:
        rate = float(each["sampling_rate"])
        noise = float(each["noise_per_clip"])
        counts[rate, noise] += int(each["count"])
    found: list[PoissonReleases] = []
    for (rate, noise), count in counts.items():
        found.append(PoissonReleases(rate, noise, count))
    return tuple(found)


def units(facts: Facts) -> list[tuple[str, int]]:
    """Returns whom a guarantee is of, and of how many records: a user, if capped."""
    found = [("record", 1)]
    # Without a cap nobody knows how many records a user has.
    if facts.max_images_per_user is not None:
        found.append(("user", facts.max_images_per_user))
    return found


def add_or_remove(
    facts: Facts,
    events: Sequence[StepEvent],
    delta: float,
) -> list[Statement]:
    """Returns the valid lines of sums over Poisson batches: of a record, of a user.

    The user's line adds or removes all records of a user, `max_images_per_user` at
    most, and is left out where there is no such cap.
    """
    made = releases(events)
    lines: list[Statement] = []
    for unit, size in units(facts):
        line = Statement(
            label="valid",
            unit=unit,
            relation="add-or-remove",
            epsilon=epsilon(made, delta, size),
            delta=delta,
            theorem=theorem(made, size),
            conditions=("nobody learns who was in a batch",),
        )
        lines.append(line)
    return lines


def published(
    sigma: float,
    events: Sequence[StepEvent],
    delta: float,
    code: str,
) -> list[Statement]:
    """Returns the line that GS-WGAN's table made of a method, by autodp; or none.

    Its bound is of batches without replacement (rate 1: of no sampling), as if every
    release had the noise multiplier `sigma`.

    Args:
        sigma: as the published code means it, above 0.
        events: all of one sampling rate, or there is no line.
        delta: above 0 and below 1.
        code: whose call it is, in a few words.
    """
    made = releases(events)
    rates = {each.rate for each in made}
    if len(rates) != 1 or sigma == 0:
        return []
    count = sum(each.times for each in made)
    rate = rates.pop()
    sampled: float | None = rate
    if rate == 1:  # autodp is then asked for no sampling at all
        sampled = None
    return [
        Statement(
            label="as published",
            unit="record",
            relation="replace-one",
            epsilon=autodp_epsilon(sigma, count, sampled, delta),
            delta=delta,
            theorem=f"autodp: {code}",
        )
    ]


def audit_scores(event: StepEvent, trials: int) -> AuditScores:
    """Plays one release with and without a record whose gradient is clipped.

    The score is the release along that gradient, whose other numbers are noise alone.
    """
    rate = float(event["sampling_rate"])
    multiplier = float(event["noise_per_clip"])
    record = clipped(torch.tensor([[100.0]]), 1.0)  # its gradient has norm C = 1

    def released(rows: Tensor, trial: int) -> float:
        return float(noisy(rows.sum(0), multiplier, NoiseStream(None, 0, trial)))

    inside = np.empty(trials)
    outside = np.empty(trials)
    for trial in range(trials):
        batch = poisson_batch(None, trial, 1, rate)
        inside[trial] = released(record[batch], trial)
        outside[trial] = released(record[:0], trial)
    return outside, inside
