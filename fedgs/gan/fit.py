"""A fit: many steps to what was released, which an interrupted run need not repeat."""

from collections.abc import Callable, Mapping

from torch import nn
from torch.optim import Optimizer


class Fit:
    """What a fit tells of its steps. This one keeps nothing; a run's does.

    Privacy: post-processing of DP output.
    """

    def __init__(
        self,
        report: Callable[[int, int], None] = lambda step, steps: None,
    ) -> None:
        """Takes who is told of each finished step and their number.

        What `report` raises ends the fit.
        """
        self.report = report

    def begin(self, parts: Mapping[str, nn.Module | Optimizer]) -> int:
        """Returns how many steps are done, and puts the parts where these left them.

        Args:
            parts: all that a step changes, by name. Adam has one group of parameters.
        """
        return 0

    def done(self, step: int, steps: int) -> None:
        """Tells of a finished step, from 1, and of their number."""
        self.report(step, steps)
