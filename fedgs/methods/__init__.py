"""Methods of federated training, a file each: what a round asks and changes."""

from typing import Any, NamedTuple, cast

from fedgs.config.plugins import load
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.methods.base import Method, State


class PhaseAt(NamedTuple):
    """A phase of a run at work.

    Attributes:
        method: the phase's method.
        config: the run's settings as this method sees them.
    """

    method: Method[Any]
    config: Any


def phase_at(config: ResolvedConfig, round: int) -> PhaseAt:
    """Returns the phase that a round of a run is in.

    Args:
        config: the configuration of the whole run.
        round: from 1.

    Raises:
        UserError: the phase is of a method that this process does not know or trust.
    """
    own = config.at_round(round)
    return PhaseAt(_method(own), own)


def phases_of(config: ResolvedConfig) -> list[PhaseAt]:
    """Returns all phases of a run, in their order.

    Raises:
        UserError: as of `phase_at`, or clients would keep two kinds of discriminators.
    """
    found: list[PhaseAt] = []
    for index in range(len(config.phases)):
        own = config.at_phase(index)
        found.append(PhaseAt(_method(own), own))
    # A client's state has one discriminator, which two phases would train in turn.
    if sum(phase.method.has_discriminators for phase in found) > 1:
        raise UserError(
            f"phases = {config.methods}: clients keep one discriminator each; give one "
            "phase with discriminators"
        )
    return found


def phase_with_discriminators(config: ResolvedConfig) -> PhaseAt | None:
    """Returns the phase whose clients keep discriminators; None without one."""
    for phase in phases_of(config):
        if phase.method.has_discriminators:
            return phase
    return None


def new_state(config: ResolvedConfig) -> State:
    """Returns the server before the first round, from the run's seed."""
    # All parts exist from the start, so that every checkpoint of a run has the same
    # ones and a resumed run needs to know no phase to read it.
    first, *others = phases_of(config)
    state = first.method.state(first.config)
    for phase in others:
        phase.method.join(phase.config, state)
    return state


def _method(config: ResolvedConfig) -> Method[Any]:
    return cast(Method[Any], load("phases", config.method))
