"""Attack B: the run trained again, with many clients that are in or out by a coin.

m canaries take the slots of clients, so that K stays. Canary i answers every fake with
the same gradient, +10 C e_i if its coin says "in"; else -10 C e_i (replace-one) or 0
(zero-out). The directions e_i are orthonormal where there is room, so that canaries do
not hide each other. This is a worst-case client, not one that trained on odd images: no
image moves a discriminator's gradient further than the clip bound. All other clients
train on their own records.

Afterwards every coin is guessed from what an adversary has:

    node releases  <release of the canary's node - known, e_i>, over fakes and rounds
    sums           <sum of all releases - known, e_i>: the most that any published
                   generator or secure aggregation can tell
    generator      -<mean image of the final generator - of the first one, e_i>

and the share of right guesses bounds epsilon: Eq. 3 of `fedgs.audit.bounds`. "Known" is
what all other clients contribute: the definition of differential privacy grants the
adversary their data. Who takes part is public, so only canaries that were asked are
guessed, and the claim is that of the busiest canary's participation count.

Source: Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", NeurIPS
2023; Andrew et al., "One-shot empirical privacy estimation for federated learning",
ICLR 2024 (canary clients).
"""

import dataclasses
from typing import Any

import numpy as np

from fedgs.audit.bounds import Scores, one_run_epsilon
from fedgs.audit.canaries import INSIDE_SIGN, OUTSIDE_SIGNS, Canaries, CanaryNodes
from fedgs.audit.finding import OF_BOUNDS, Finding, none_if_infinite
from fedgs.config.run_config import GsWganConfig
from fedgs.data.federated import FederatedImages
from fedgs.methods import new_state
from fedgs.privacy.gaussian import fixed_law
from fedgs.privacy.participation import COUNT_THEOREM
from fedgs.privacy.plan import Plan
from fedgs.round.local import train_nodes
from fedgs.round.run import Report, Stop
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import draw, load_generator, uniform_labels

GUESSED = (1.0, 0.5, 0.25)  # shares of the canaries that are guessed, each tried
_IMAGES_IN_MEAN = 2000


def audit_run(
    config: GsWganConfig,
    plan: Plan,
    data: FederatedImages,
    canaries: Canaries,
    delta: float,
    report: Report,
    stop: Stop,
    num_audits: int = 1,
) -> list[Finding]:
    """Trains once with canaries and bounds epsilon from guesses of their coins.

    All bounds of all audits hold together with probability 0.95. Noise is never seeded
    here, and no client's own count is charged: nothing of this run may be published.

    Privacy: reads private data; the findings are about the canaries only.

    Args:
        config: resolved; `output` is the folder to train in, which the caller deletes.
        plan: the plan of the run under attack, from its record; decides the claims.
        data: the run's data.
        canaries: drawn for this configuration.
        delta: the claims' delta.
        report: called with the public metrics of each round.
        stop: when set, training ends early by `RunStopped`.
        num_audits: this one and those whose bounds stand beside it.

    Raises:
        RunStopped: `stop` was set.
    """
    config = as_audited(config)
    # The secret of the canaries' draw, which is not that of the audited run.
    folder = RunFolder.create(config, selection_key=config.selection_key)
    before = _mean_image(config, new_state(config).ema)
    with folder.locked(), CanaryNodes(config, data, canaries) as nodes:
        train_nodes(folder, nodes, report, stop)
    moved = _mean_image(config, load_generator(folder)) - before
    # A generator moves against the gradient.
    by_generator = -np.tensordot(canaries.images(config).numpy(), moved, axes=3)
    sums = _centred(config, canaries, nodes.sums)
    by_node = _centred(config, canaries, nodes.releases)
    if plan.engine == "local":
        # One curator sees everything: there is no server to tell nodes apart.
        views = [("release", "sums", sums)]
    else:
        sees_nodes = "server"
        if plan.secure_aggregation:
            sees_nodes = "unmasked"
        views = [(sees_nodes, "node releases", by_node), ("secagg", "sums", sums)]
    views.append(("release", "generator", by_generator))
    # The union bound: all findings hold together.
    alpha = OF_BOUNDS / len(views) / num_audits
    return [
        guess_coins(
            plan,
            canaries,
            delta,
            alpha,
            rounds=config.num_rounds,
            adversary=adversary,
            view=view,
            scores=scores,
        )
        for adversary, view, scores in views
    ]


def as_audited(config: GsWganConfig) -> GsWganConfig:
    """Returns the settings with which a run is trained again: nothing that ends it."""
    return dataclasses.replace(
        config,
        engine="local",
        target_epsilon=None,
        min_answers=None,
        noise_seed=None,
        checkpoint_every=config.num_rounds,
    )


def _centred(config: GsWganConfig, canaries: Canaries, sums: Scores) -> Scores:
    """Returns scores whose sign is the likelier coin."""
    outside = OUTSIDE_SIGNS[canaries.relation]
    middle = (INSIDE_SIGN + outside) / 2
    length = config.clip_bound * config.batch_size  # of one round
    return sums - middle * length * canaries.counts


def _mean_image(config: GsWganConfig, generator: Any) -> Scores:
    # The same labels and latents before and after, so that only training moves it.
    labels = uniform_labels(config, _IMAGES_IN_MEAN, seed=0)
    images = draw(config, generator, labels, seed=0)
    return images.mean(0, dtype=np.float64)


# ------------------------------------------------------------------ guesses


def guess_coins(
    plan: Plan,
    canaries: Canaries,
    delta: float,
    alpha: float,
    rounds: int,
    adversary: str,
    view: str,
    scores: Scores,
) -> Finding:
    """Guesses the canaries' coins from scores and bounds the epsilon of a claim.

    Privacy: public; of canaries only.

    Args:
        plan: the plan of the run under attack.
        canaries: the attacked clients.
        delta: the claim's delta.
        alpha: the chance that the bound is wrong.
        rounds: that the run had.
        adversary: who has the scores.
        view: what they were computed from, in words.
        scores: above 0 for "in", shape (m,).
    """
    # Who takes part is public, so a canary that was not asked is no guess at all.
    was_asked = canaries.counts > 0
    scores = scores[was_asked]
    is_in = canaries.is_in[was_asked]
    if view == "generator":  # has no natural centre
        scores = scores - np.median(scores)
    bound, guesses, correct = best_guesses(
        scores,
        is_in,
        num_canaries=len(canaries.clients),
        delta=delta,
        alpha=alpha,
    )
    # The claim is that of the busiest canary: it covers all others.
    count = int(canaries.counts.max())
    is_right = (scores > 0) == is_in
    ratio = plan.ratio(adversary, canaries.relation, colluding=0)
    epsilon = fixed_law(count, ratio).epsilon(delta)
    return Finding(
        attack=f"B {view}",
        adversary=adversary,
        relation=canaries.relation,
        rounds=rounds,
        delta=delta,
        lower_bound=bound,
        epsilon=none_if_infinite(epsilon),
        theorem=COUNT_THEOREM,
        details={
            "canaries": len(canaries.clients),
            "canaries_asked": int(was_asked.sum()),
            "most_participations": count,
            "guesses": guesses,
            "correct": correct,
            "correct_of_all": int(is_right.sum()),
        },
    )


def best_guesses(
    scores: Scores,
    is_in: Any,
    num_canaries: int,
    delta: float,
    alpha: float,
) -> tuple[float, int, int]:
    """Returns the best bound of a few preset numbers of guesses, r and v with it.

    The coins with the largest |score| are guessed, by its sign. Each number of guesses
    gets its share of alpha, so that the best of them may be reported.

    Privacy: public; of canaries only.

    Args:
        scores: above 0 for "in", shape (n,), at least one.
        is_in: the coins, shape (n,), bool.
        num_canaries: m, at least n; the others are abstentions.
        delta: the claim's delta.
        alpha: the chance that the bound is wrong.
    """
    surest_first = np.argsort(-np.abs(scores), kind="stable")
    is_right = (scores > 0) == is_in
    is_right = is_right[surest_first]
    tries: list[tuple[float, int, int]] = []
    of_each = alpha / len(GUESSED)
    for share in GUESSED:
        guesses = max(1, round(share * len(scores)))
        correct = int(is_right[:guesses].sum())
        bound = one_run_epsilon(
            num_canaries,
            guesses=guesses,
            correct=correct,
            delta=delta,
            alpha=of_each,
        )
        tries.append((bound, guesses, correct))
    return max(tries)
