"""What a deployed client agrees to by joining a run, in words for its own log."""

import dataclasses

from fedgs.config.feature_settings import PretrainedSettings
from fedgs.config.phases import written
from fedgs.config.rounds import rounds_alike
from fedgs.config.run_config import ResolvedConfig
from fedgs.privacy.accountant import in_short
from fedgs.privacy.client_limits import Limits
from fedgs.privacy.rounding import upper
from fedgs.round.node import Node

_COUNTED = ("client_epsilon", "delta", "relation")  # said only with an epsilon


def agreement(title: str, node: Node) -> str:
    """Returns a few lines: the run's noise and cost, the limits, what was released.

    Privacy: public; settings, and a count that depends on no data.

    Args:
        title: the client's name.
        node: the node of the run, with the limits and the count of its clients.

    Raises:
        UserError: the count is broken.
    """
    config = node.config
    limits = node.limits.permitted
    count = node.limits.count
    noise = f"noise_multiplier {config.noise_multiplier:g}"
    if config.noise_seed is not None:
        noise += " (seeded: not private)"
    spent = limits.epsilon_of(count.largest())
    return "\n".join(
        (
            f"{title} takes part in a run, on these terms:",
            f"  phases {written(config.phases)}, {noise}, clip_bound "
            f"{config.clip_bound:g}, batch_size {_largest_batch(config)}, "
            f"{config.num_rounds} rounds",
            f"  unit: {_unit(node)}",
            *_phases(config),
            *_network(config),
            *_masks(node),
            f"  cost against the server: {cost_in_words(config, limits)}",
            f"  limits: {_in_force(limits)}",
            f"  released so far: epsilon {upper(spent)} in all runs that are counted "
            f"in {count.folder}",
        )
    )


def _unit(node: Node) -> str:
    """Returns what a client of the run is here; a warning where it is no owner."""
    unit = in_short(node.config.unit_condition)
    if not node.limits.count.is_whole:
        return unit
    return (
        f"{unit}. Warning: the run's clients here ({len(node.hosted)}) are all of this "
        "client's data or shards of them, not persons; they are counted as one"
    )


def _largest_batch(config: ResolvedConfig) -> int:
    return max(alike.terms.batch_size for alike in rounds_alike(config))


def _masks(node: Node) -> list[str]:
    """Returns a line on the masks that the client's releases leave under, if any."""
    if node.peers is None:
        return []
    pinned = ", ".join(sorted(node.peers.pinned))
    return [
        f"  under masks: the server learns the sum of at least {node.peers.least} "
        f"nodes; peers {pinned}"
    ]


def _phases(config: ResolvedConfig) -> list[str]:
    """Returns a line on the embeddings that some rounds release, if any do."""
    noises: list[str] = []
    for alike in rounds_alike(config):
        if alike.terms.release == "embedding":
            noises += [f"{alike.terms.noise_multiplier:.4g}"] * alike.num_rounds
    if not noises:
        return []
    return [
        f"  {len(noises)} of the rounds release embeddings, with "
        f"noise_multiplier {', '.join(noises)}"
    ]


def _network(config: ResolvedConfig) -> list[str]:
    """Returns a line on the network that was chosen for features, if one was."""
    if not isinstance(config, PretrainedSettings) or config.features is None:
        return []
    digest = config.features_sha256
    return [f"  features of {config.features}, its weights by SHA-256 {digest}"]


def cost_in_words(config: ResolvedConfig, limits: Limits) -> str:
    """Returns what all rounds cost whom the server asks in each, and what bounds it."""
    # All rounds, because a server alone decides whom it asks.
    costs = [
        alike.num_rounds * limits.cost_of(config, alike.terms)
        for alike in rounds_alike(config)
    ]
    epsilon = limits.epsilon_of(sum(costs))
    # Nothing else bounds a server that asks for the same round again and again.
    bound = "without a bound"
    if limits.client_epsilon is not None:
        bound = f"up to client_epsilon = {limits.client_epsilon:g}"
    return (
        f"epsilon {upper(epsilon)} ({limits.relation}, delta {limits.delta:g}) if the "
        f"server asks once in each of {config.num_rounds} rounds; each repetition of a "
        f"round adds to it, {bound}"
    )


def _in_force(limits: Limits) -> str:
    values = {
        spec.name: getattr(limits, spec.name)
        for spec in dataclasses.fields(limits)
        if spec.name != "state_dir"
    }
    least = values.pop("min_noise_multiplier")
    if least is None:
        least = "unset: above 0"
    if limits.client_epsilon is None:
        # Delta and relation say nothing without the epsilon that they belong to.
        values = {name: v for name, v in values.items() if name not in _COUNTED}
    shown = {name: value for name, value in values.items() if value is not None}
    shown["min_noise_multiplier"] = least
    text = ", ".join(f"{name} = {value}" for name, value in shown.items())
    if limits.client_epsilon is None:
        return f"no client_epsilon, {text}"
    return text
