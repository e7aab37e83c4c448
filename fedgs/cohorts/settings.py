"""The settings of a selection of cohorts: what it asks for, and the flags that set it.

Imports neither torch nor scipy: the command line reads the flags from here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedgs.config.fields import check_ranges, flag
from fedgs.errors import UserError, reject

if TYPE_CHECKING:
    from fedgs.privacy.selection_cost import SelectionCost

SELECTED, ABOVE, REST = "selected", "above", "rest"
SEARCH_STEPS = 8  # questions per percentile: the threshold is a multiple of 1/256
OF_PRIVACY = ("clip_bound", "membership_epsilon", "delta")


@dataclass(frozen=True)
class Selection:
    """All settings of a selection, beside the data's.

    `selected` are the clients of an accuracy at most `below`, `above` those of more
    than `above`, `rest` all others and those that hold out no image. A percentile is
    the accuracy that this share of all clients does not exceed.

    What a client sends: the trained classifier (clipped in private mode); with
    percentiles `SEARCH_STEPS` times per percentile whether its accuracy exceeds a
    threshold, truthfully in private mode too; its cohort. The threshold that is chosen
    was asked about, so the server then knows the membership exactly, and more.

    Attributes:
        below: accuracy, in [0, 1].
        above: accuracy, in [0, 1], at least `below`.
        percentile_below: instead of `below`, above 0 and below 100.
        percentile_above: instead of `above`, at least `percentile_below`.
        num_rounds: rounds of federated averaging.
        clients_per_round: of a round, in a balanced schedule; all if there are fewer.
        steps: SGD steps of a client in a round.
        batch_size: images of a step, drawn with replacement.
        learning_rate: of the clients.
        held_out_fraction: share of a client's images that it evaluates itself on.
        train_corrupted: train on corrupted images as well; else the bug is planted
            after the training, as in the paper.
        noise_per_clip: Flower's z, noise_std of the sum / clip_bound; None: not
            private.
        clip_bound: C, the largest L2 norm of a client's update, in private mode.
        membership_epsilon: epsilon of the randomised response, in private mode.
        delta: of the epsilon stated.
        keep_accuracies: in a simulation, write every client's accuracy to `private/`.

    Raises:
        UserError: a value out of range, or thresholds that contradict each other.
    """

    below: float | None = flag(
        None, "Select clients of at most this accuracy.", at_least=0, at_most=1
    )
    above: float | None = flag(
        None, "And those of more than this accuracy.", at_least=0, at_most=1
    )
    percentile_below: float | None = flag(
        None, "Of accuracy, instead of --below.", above=0, below=100
    )
    percentile_above: float | None = flag(
        None, "Of accuracy, instead of --above.", above=0, below=100
    )
    num_rounds: int = flag(40, "Of federated averaging.", at_least=1)
    clients_per_round: int = flag(50, "In each of them.", at_least=1)
    steps: int = field(default=5, metadata={"at_least": 1})
    batch_size: int = field(default=20, metadata={"at_least": 1})
    learning_rate: float = field(default=0.1, metadata={"above": 0})
    held_out_fraction: float = field(default=0.3, metadata={"above": 0, "below": 1})
    train_corrupted: bool = flag(
        False, "The planted bug is there in training, not only afterwards."
    )
    noise_per_clip: float | None = flag(
        None,
        "Select privately: noise on a sum of updates / clip bound.",
        above=0,
    )
    clip_bound: float = flag(1.0, "Largest norm of an update, if private.", above=0)
    membership_epsilon: float = flag(
        3.0, "Of a client's randomised answer, likewise.", above=0
    )
    delta: float = flag(1e-5, "Of the epsilon, if private.", at_least=1e-300, below=1)
    keep_accuracies: bool = flag(
        False,
        "In this simulation, write and draw every client's accuracy.",
        names=("--private-diagnostics",),
    )

    def __post_init__(self) -> None:
        """Checks everything that can be checked without the data."""
        check_ranges(self)
        self._check_thresholds()

    def _check_thresholds(self) -> None:
        low = (self.below, self.percentile_below)
        high = (self.above, self.percentile_above)
        for name, pair in (("below", low), ("above", high)):
            if None not in pair:
                raise UserError(
                    f"{name} = {pair[0]}: percentile_{name} = {pair[1]} says the same "
                    "otherwise; leave one of the two out"
                )
        if low == high == (None, None):
            raise UserError(
                "below is unset: give --below or --above (accuracies), or "
                "--percentile-below or --percentile-above"
            )
        for one, other, name in zip(low, high, ("", "percentile_"), strict=True):
            if one is not None and other is not None and one > other:
                raise UserError(
                    f"{name}below = {one}: exceeds {name}above = {other}, so that a "
                    f"client would be in both; give --{name.replace('_', '-')}below at "
                    f"most {other}"
                )

    @property
    def is_private(self) -> bool:
        """Whether the classifier and all answers carry noise."""
        return self.noise_per_clip is not None

    @property
    def cohorts(self) -> tuple[str, ...]:
        """The cohorts that a client can be in, two or three."""
        has_low = self.below is not None or self.percentile_below is not None
        has_high = self.above is not None or self.percentile_above is not None
        return (SELECTED,) * has_low + (ABOVE,) * has_high + (REST,)

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles whose accuracies have to be found."""
        found = (self.percentile_below, self.percentile_above)
        return tuple(value for value in found if value is not None)

    @property
    def num_questions(self) -> int:
        """How often every client is asked something after the training."""
        return 2 + SEARCH_STEPS * bool(self.percentiles)

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
        counts = SEARCH_STEPS * len(self.percentiles)
        return SelectionCost(
            self.noise_per_clip,
            math.ceil(self.num_rounds * per_round / num_clients),
            counts,
            math.sqrt(num_clients) / 2 if counts else 0.0,
            self.membership_epsilon,
        )


def selection_of(given: Mapping[str, Any]) -> Selection:
    """Returns the selection of the command's flags, as far as they are given.

    Raises:
        UserError: as of `Selection`, or settings of privacy without the noise.
    """
    if "noise_per_clip" not in given:
        reject(
            {name: given.get(name) for name in OF_PRIVACY},
            "is for a private selection, this one is not; give "
            "--noise-per-clip, or leave out",
        )
    return Selection(**given)
