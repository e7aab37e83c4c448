"""The settings of a selection of cohorts: what it asks for, and the flags that set it.

Imports neither torch nor scipy: the command line reads the flags from here.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedgs.config.fields import LARGEST_NOISE, check_ranges, flag
from fedgs.errors import UserError

if TYPE_CHECKING:
    from fedgs.privacy.selection_cost import SelectionCost

# The cohorts.
SELECTED = "selected"
ABOVE = "above"
REST = "rest"
SEARCH_STEPS = 8  # questions per percentile: the threshold is a multiple of 1/256
# Of a private selection.
CLIP_BOUND = 1.0  # the largest norm of an update
MEMBERSHIP_EPSILON = 3.0  # of a client's randomised answer
STATED_DELTA = 1e-5  # of the epsilon that is stated


@dataclass(frozen=True)
class Thresholds:
    """What divides the cohorts, and how their classifier is trained.

    `selected` are the clients of an accuracy at most `below`, `above` those of more
    than `above`, `rest` all others and those that hold out no image. A percentile is
    the accuracy that this share of all clients does not exceed; both are, or none is.

    Attributes:
        below: accuracy, in [0, 1], or a percentile, in (0, 100).
        above: likewise, at least `below`.
        are_percentiles: whether they are percentiles.
        num_rounds: rounds of federated averaging.
        noise_per_clip: z, noise_std of the sum / `CLIP_BOUND`; None: not private.

    Raises:
        UserError: a value out of range, or thresholds that contradict each other.
    """

    below: float | None = flag(
        None, "Accuracy, from 0 to 1, up to which clients form the cohort `selected`."
    )
    above: float | None = flag(
        None, "Accuracy, from 0 to 1, above which clients form the cohort `above`."
    )
    are_percentiles: bool = flag(
        False,
        "Read --below and --above as percentiles of all clients' accuracies.",
        names=("--percentiles",),
    )
    num_rounds: int = flag(40, "Number of rounds of federated averaging.", at_least=1)
    noise_per_clip: float | None = flag(
        None,
        "Noise of a private selection: its standard deviation divided by the clip"
        " bound. Default: the selection is not private.",
        at_least=1e-3,
        at_most=LARGEST_NOISE,
    )

    def __post_init__(self) -> None:
        """Checks everything that can be checked without the data."""
        check_ranges(self)
        self._check_threshold("below", self.below)
        self._check_threshold("above", self.above)
        if self.below is None and self.above is None:
            raise UserError(
                "below is unset: give --below or --above, accuracies or --percentiles"
            )
        low = self.below
        high = self.above
        if low is not None and high is not None and low > high:
            raise UserError(
                f"below = {low}: exceeds above = {high}, so that a client would be in "
                f"both; give --below at most {high}"
            )

    def _check_threshold(self, name: str, value: float | None) -> None:
        if value is None:
            return
        if self.are_percentiles:
            # At an edge nobody, or everybody, would be on one side.
            is_inside = 0 < value < 100
            wanted = "a percentile, above 0 and below 100"
        else:
            is_inside = 0 <= value <= 1
            wanted = "an accuracy, from 0 to 1"
        if not is_inside:
            raise UserError(f"{name} = {value}: give --{name} {wanted}")

    @property
    def is_private(self) -> bool:
        """Whether the classifier and all answers carry noise."""
        return self.noise_per_clip is not None

    @property
    def cohorts(self) -> tuple[str, ...]:
        """The cohorts that a client can be in, two or three."""
        found: list[str] = []
        if self.below is not None:
            found.append(SELECTED)
        if self.above is not None:
            found.append(ABOVE)
        return (*found, REST)

    @property
    def bounds(self) -> dict[str, float]:
        """What is set of `below` and `above`, by these names, in this order."""
        both = {"below": self.below, "above": self.above}
        return {name: value for name, value in both.items() if value is not None}

    @property
    def num_questions(self) -> int:
        """How often thresholds are asked about: for a search, and for the cohorts."""
        if self.are_percentiles:
            return SEARCH_STEPS + 1
        return 1


@dataclass(frozen=True)
class Selection(Thresholds):
    """All settings of a selection in a simulation, beside the data's.

    What is asked of a client: updates of the classifier (in private mode clipped, with
    its share of the noise); with percentiles `SEARCH_STEPS` times per percentile
    whether its accuracy exceeds a threshold, truthfully in private mode too; its
    cohort. The threshold that is chosen was asked about, so the server then knows the
    membership exactly, and more.

    Attributes:
        clients_per_round: of a round, in a balanced schedule; all if there are fewer.
        train_corrupted: train on corrupted images as well; else the bug is planted
            after the training, as in the paper.

    Raises:
        UserError: as `Thresholds`.
    """

    clients_per_round: int = flag(50, "Number of clients in each round.", at_least=1)
    train_corrupted: bool = flag(
        False,
        "Train the classifier on images with the planted bug, too. Default: the "
        "bug appears only afterwards.",
    )

    def cost(self, num_clients: int) -> "SelectionCost | None":
        """Returns what the selection costs each of K clients; None if not private.

        The noise of a count is sqrt(K) / 2, as much as the number of clients below a
        median varies by chance.
        """
        if self.noise_per_clip is None:
            return None
        # Here, because it imports scipy.
        from fedgs.privacy.selection_cost import SelectionCost

        per_round = min(self.clients_per_round, num_clients)
        # The cohorts of a simulation are not counted, but stated.
        counts = (self.num_questions - 1) * len(self.bounds)
        return SelectionCost(
            noise_per_clip=self.noise_per_clip,
            num_releases=math.ceil(self.num_rounds * per_round / num_clients),
            num_counts=counts,
            count_noise_std=math.sqrt(num_clients) / 2 if counts else 0.0,
            membership_epsilon=MEMBERSHIP_EPSILON,
        )
