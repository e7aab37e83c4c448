"""A server that was restored from a backup: what its ledger lacks, and what that costs.

Nodes say at joining how often they released each round of the run. What a restored
ledger lacks follows from it: who takes part in a round, and its noise, follow from the
settings. One node's releases are a lower bound for the run, so the largest number
counts: a client of any node is then charged no less than it released.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from fedgs.cohorts.files import selection_costs
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.federation.round import select
from fedgs.federation.training import new_event, nodes_of
from fedgs.privacy.accounting import Run, statements_of_runs
from fedgs.privacy.ledger import Event

MOST_LOST = 20  # times that one round may be missing: a bound on what a node may claim


def lost_rounds(
    config: ResolvedConfig, node: int, released: object, counted: Mapping[int, int]
) -> Counter[int]:
    """Returns how much more often a node released a round than the ledger says.

    Args:
        config: the run's.
        node: who says so.
        released: how often it released round 1, 2, ..., asked by earlier starts of
            the server; anything may come.
        counted: round -> events in the ledger that asked the node, of earlier starts.

    Raises:
        UserError: malformed, or more than can be.
    """
    if not isinstance(released, list) or len(released) > config.num_rounds:
        raise UserError("joined without saying what it has released")
    lost: Counter[int] = Counter()
    for round, times in enumerate(released, start=1):
        known = counted.get(round, 0)
        if type(times) is not int or not 0 <= times <= known + MOST_LOST:
            raise UserError(
                f"says that it released round {round} more than {MOST_LOST} times "
                "above the ledger"
            )
        if times > known:
            # An event of that round would be charged to other nodes' clients.
            if node not in nodes_of(config, select(config, round)):
                raise UserError(
                    f"says that it released round {round}, for which the run does not "
                    "select it"
                )
            lost[round] = times - known
    return lost


def missing_events(
    config: ResolvedConfig, events: Sequence[Event], lost: Mapping[int, int]
) -> list[Event]:
    """Returns the events that make a ledger hold what nodes say, in order of rounds.

    Args:
        config: the run's.
        events: the ledger's.
        lost: round -> how many are missing.
    """
    attempts = Counter(event.round for event in events)
    return [
        new_event(config, round, select(config, round), attempts[round] + number)
        for round, times in sorted(lost.items())
        for number in range(1, times + 1)
    ]


def cost_text(
    config: ResolvedConfig, events: Sequence[Event], missing: Sequence[Event]
) -> str:
    """Returns what is missing in a ledger and what it costs, as sentences."""
    epsilons = [_epsilon(config, some) for some in (events, [*events, *missing])]
    return lost_text(config, Counter(event.round for event in missing), *epsilons)


def lost_text(
    config: ResolvedConfig,
    lost: Mapping[int, int],
    epsilon: float | None,
    with_lost: float | None,
) -> str:
    """Returns what is missing in a ledger and what it costs, as sentences.

    Args:
        config: the run's.
        lost: round -> how many of its releases are missing.
        epsilon: of the ledger as it is; None is unbounded.
        with_lost: of the ledger with them.
    """
    return (
        f"the nodes have released {sum(lost.values())} times more than the ledger says "
        f"({ranges(sorted(lost))}): this server was restored from a backup. Epsilon "
        f"so far is {_shown(with_lost)} with these releases, {_shown(epsilon)} without "
        f"({config.adversary} adversary, {config.relation}, delta {config.delta:g})"
    )


def _shown(epsilon: float | None) -> str:
    return "unbounded" if epsilon is None else f"{epsilon:.4g}"


def _epsilon(config: ResolvedConfig, events: Sequence[Event]) -> float | None:
    costs = selection_costs([config])
    run = Run(config, events, costs)
    stated = statements_of_runs([run], config.delta, selections=costs)
    against = config.adversary, config.relation
    epsilons = {(s.adversary, s.relation): s.epsilon for s in stated}
    return epsilons[against]


def ranges(rounds: Sequence[int]) -> str:
    """Writes increasing rounds in few words.

    >>> ranges([1, 2, 3, 7])
    'rounds 1 to 3, 7'
    """
    grouped = itertools.groupby(enumerate(rounds), lambda pair: pair[1] - pair[0])
    parts = [[round for _, round in group] for _, group in grouped]
    shown = [f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts]
    more = ", ..." if len(shown) > 10 else ""
    return f"rounds {', '.join(shown[:10])}{more}"
