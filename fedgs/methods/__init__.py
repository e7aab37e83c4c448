"""Methods of federated training, a file each: what a round asks and changes."""

from typing import Any, cast

from fedgs.config.plugins import GS_WGAN, load
from fedgs.config.run_config import ResolvedConfig
from fedgs.methods.base import Method, State
from fedgs.methods.moments import MOMENTS


def method_of(config: ResolvedConfig, round: int) -> Method[Any]:
    """Returns the method of a round: moments in the stages, then the run's own.

    Args:
        config: the resolved configuration.
        round: from 1; 0 is the preparation of the run's own method.

    Raises:
        UserError: the run is of a method that this process does not know or trust.
    """
    if config.method == GS_WGAN and 1 <= round <= config.num_stages:
        return MOMENTS
    return cast(Method[Any], load("method", config.method))


def new_state(config: ResolvedConfig) -> State:
    """Returns the server before the first round, from the run's seed."""
    return method_of(config, 0).state(config)
