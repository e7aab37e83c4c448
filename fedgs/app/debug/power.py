"""Which bugs can a plan of `fedgs debug` find at all? Said before any training.

Looked up in power.json, which a script of the experiments makes: how often each bug was
named on digits of fonts and on clothes, by what the noise leaves of a group's average.
It assumes that the bug is in all images of one cohort and in none of the other's, and
that owners have ten images; docs/debugging.md says more.

Privacy: public. Reads settings and the number of clients.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedgs.app.commands.forecast import target
from fedgs.app.commands.privacy_words import ABSURD_EPSILON
from fedgs.app.commands.terminal import say
from fedgs.config.plugins import GROUP_MEANS
from fedgs.config.run_config import GroupMeansConfig, ResolvedConfig
from fedgs.errors import UserError
from fedgs.files import read_json
from fedgs.privacy.accountant import statements
from fedgs.privacy.plan import Plan
from fedgs.privacy.rounding import upper

POWER_FILE = Path(__file__).with_name("power.json")
CLASSES = 10  # of the table's data
YES = "always found"
ALIKE = "always found, or taken for a bug that looks like it"
PERHAPS = "sometimes found"
NO = "never found"


class Power(NamedTuple):
    """What is known of one bug.

    Attributes:
        now: found in all trials at this noise, alone or with others that look like it;
            in none, or perhaps.
        needed: the least signal from which on all trials found it; None where none did.
    """

    now: str
    needed: float | None


def of_plan(signal: float, table: Mapping[str, Any]) -> dict[str, Power]:
    """Returns the power for every bug; the table's next level is read on each side.

    Args:
        signal: K / noise multiplier of one group, infinite without noise.
        table: power.json.
    """
    levels = table["signals"]
    # Between two levels nothing was measured. So a bug is said to be found only if it
    # was found at the level below (-1: there is none), and not to be found only if it
    # was never found at the level above.
    below = sum(level <= signal for level in levels) - 1
    above = below + 1
    if signal in levels:
        above = below
    above = min(above, len(levels) - 1)
    found: dict[str, Power] = {}
    for bug, right in table["right"].items():
        first = _first_sure(right, table["trials"][bug])
        needed = None
        if first is not None:
            needed = levels[first]
        narrowed = table["narrowed"][bug]
        either = [one + other for one, other in zip(right, narrowed, strict=True)]
        first_of_either = _first_sure(either, table["trials"][bug])
        if first is not None and below >= first:
            now = YES
        elif first_of_either is not None and below >= first_of_either:
            now = ALIKE
        elif either[above]:
            now = PERHAPS
        else:
            now = NO
        found[bug] = Power(now, needed)
    return found


def _first_sure(right: Sequence[int], trials: Sequence[int]) -> int | None:
    """Returns the level from which on every trial was right; None where none is."""
    first = None
    # From the largest signal down, as far as all trials were right.
    for level in reversed(range(len(right))):
        if right[level] < trials[level]:
            break
        first = level
    return first


def is_measured(config: ResolvedConfig) -> bool:
    """Tells whether the table is of such runs: group means and nothing else."""
    return [phase.method for phase in config.phases] == [GROUP_MEANS]


def show(config: ResolvedConfig, size: int | None = None) -> None:
    """Prints which bugs a plan can find, and what would suffice for the others.

    Args:
        config: the run's configuration.
        size: clients of a group of the smaller cohort; None if that is not known.

    Raises:
        UserError: it can find none.
    """
    if not is_measured(config):
        say(f"Which bugs can be found was measured for {GROUP_MEANS} only.")
        return
    table = stored()
    plan = _Plan(config, size or group_size(config))
    powers = of_plan(plan.signal, table)
    least = min(p.needed for p in powers.values() if p.needed is not None)
    # "none" is no bug: its row tells how often two cohorts alike were called so.
    clean = powers.pop("none")
    # Training would spend the clients' epsilon for a verdict that is known already.
    if all(power.now == NO for power in powers.values()):
        raise UserError(
            f"target_epsilon = {config.target_epsilon or 'unset'}: the noise hides "
            f"every bug if a group has {plan.size} clients; to find at least one kind "
            f"of bug, use {plan.reaching(least)} (docs/debugging.md)"
        )
    for line in _lines(plan, powers, clean, table):
        say(line)
    if size is None and not _phase(config).compares_nodes:
        say(
            "  if every client is in one of the two cohorts and these are equally "
            "large; else in fact less, as for cohorts of the smaller one's size"
        )


def stored() -> dict[str, Any]:
    """Returns power.json."""
    return read_json(POWER_FILE)


def _lines(
    plan: "_Plan",
    powers: Mapping[str, Power],
    clean: Power,
    table: Mapping[str, Any],
) -> Iterator[str]:
    config = plan.config
    # Of the level with the fewest trials, so that no number here is too large.
    trials = min(min(counts) for counts in table["trials"].values())
    noise = f"noise multiplier {config.noise_multiplier:g}"
    if config.target_epsilon is not None:
        noise = target(config)
    yield (
        f"What can be found with {plan.size} clients in each group and "
        f"{noise}{_of_nodes(config)}. This was measured in {trials} trials of each "
        "bug on digits and clothes with as much noise, where all images of one "
        "cohort had the bug:"
    )
    for now in (YES, ALIKE, PERHAPS, NO):
        bugs = [bug for bug, power in powers.items() if power.now == now]
        yield f"  {now}: {', '.join(bugs) or 'nothing'}"
    half_table = {**table, **table["of_half"]}
    of_half = of_plan(plan.signal, half_table)
    # A bug in all clients is easier to find. But the tables are of few trials, so that
    # one of them may miss what the other one found.
    bugs = [
        bug
        for bug, power in of_half.items()
        if power.now == YES and powers[bug].now == YES
    ]
    yield f"  always found even in half of the clients: {', '.join(bugs) or 'nothing'}"
    yield f"  if both cohorts were alike, {CLEAN[clean.now]}"
    # Bugs that need the same signal share a line.
    levels: dict[float | None, list[str]] = {}
    for bug, power in powers.items():
        if power.now in (PERHAPS, NO):
            levels.setdefault(power.needed, []).append(bug)
    never = levels.pop(None, [])
    for level in sorted(filter(None, levels)):
        yield f"  to find {', '.join(levels[level])}: use {plan.reaching(level)}"
    if never:
        yield f"  not always found, however little noise was tried: {', '.join(never)}"


CLEAN = {
    YES: "the verdict was none in these trials",
    PERHAPS: "the verdict was none or undecided in these trials",
    NO: "the verdict was undecided in these trials",
}


def _share(config: ResolvedConfig) -> float:
    """Returns what each class has of the table's signal: more classes, more noise."""
    return min(1.0, math.sqrt(CLASSES / config.num_classes))


def group_size(config: ResolvedConfig) -> int:
    """Returns how many clients a group has: of cohorts, if they are equally large."""
    own = _phase(config)
    if own.compares_nodes:
        return own.group_size
    return config.num_clients // own.num_blocks


def _noise_of_group(config: ResolvedConfig) -> float:
    """Returns the noise multiplier of one group's sum.

    Every node adds noise to the block of every group, also of those of which it hosts
    few clients; where nodes are compared, a group has the noise of its own node alone.
    """
    if _phase(config).compares_nodes:
        return config.noise_multiplier
    return config.noise_multiplier * config.num_nodes**0.5


def _of_nodes(config: ResolvedConfig) -> str:
    """Returns what more than one node costs, in words."""
    factor = _noise_of_group(config) / (config.noise_multiplier or 1.0)
    if factor <= 1:
        return ""
    return (
        f" (in each group {factor:.3g} times this noise, because each of the "
        f"{config.num_nodes} nodes adds its own)"
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A run, and how many clients a group of its smaller cohort has.

    Groups of the larger cohort get noise until they have as much as those of the
    smaller one, so that a bug is as hard to find as in cohorts of this size.
    """

    config: ResolvedConfig
    size: int

    @property
    def signal(self) -> float:
        """Clients of a group over its noise multiplier; see `of_plan`."""
        noise = _noise_of_group(self.config)
        if not noise:
            return math.inf
        return self.size / noise * _share(self.config)

    def reaching(self, level: float) -> str:
        """Returns what reaches a signal: more clients, or a larger epsilon."""
        # The inverse of `signal`: what the run's own signal must be for this level.
        level = level / _share(self.config)
        clients = math.ceil(level * _noise_of_group(self.config))
        # Of all nodes together the noise is so much less.
        factor = level * _noise_of_group(self.config) / self.size
        epsilon = epsilon_of(self.config, self.config.noise_multiplier / factor)
        text = f"{clients} clients in each group"
        if epsilon is None or epsilon > ABSURD_EPSILON:
            return text
        return f"{text}, or epsilon {upper(epsilon, 2)} with {self.size} clients"


def _phase(config: ResolvedConfig) -> GroupMeansConfig:
    own = config.at_phase(0)
    assert isinstance(own, GroupMeansConfig)
    return own


def epsilon_of(config: ResolvedConfig, noise_multiplier: float) -> float | None:
    """Returns the epsilon of the run with other noise, for its own adversary."""
    other = dataclasses.replace(config, noise_multiplier=noise_multiplier)
    rows = statements(Plan.from_config(other), config.delta)
    found: list[float] = []
    for row in rows:
        is_own = row.adversary == config.adversary and row.relation == config.relation
        if row.guarantee and is_own and row.epsilon is not None:
            found.append(row.epsilon)
    return max(found, default=None)
