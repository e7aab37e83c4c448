"""What a baseline's run is asked for, beside the settings of its method.

Imports no tensor library: the command line reads the flags from here at every start.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass
from typing import Any

from fedgs.config.fields import coerce_fields, flag
from fedgs.config.method_settings import settings_of
from fedgs.errors import reject

# Groups and names of the settings of `RunConfig` that a baseline's run has as well.
SHARED_SETTINGS = (
    "Data",
    "Model",
    "num_clients",
    "delta",
    "adversary",
    "noise_seed",
    "output",
    "seed",
    "device",
    "precision",
)


def settings_read(method: Any) -> list[Field[Any]]:
    """Returns the settings of a run that a method reads: its recipe's, and shared."""
    return settings_of(*SHARED_SETTINGS, *method.recipe)


# Settings of a method that say its noise: a target finds it.
NOISES = {"noise_multiplier", "noise_per_clip", "inverse_noise", "answer_noise"}


def check_noise(given: Mapping[str, object]) -> None:
    """Refuses noise beside a target, which would silently replace it.

    Raises:
        UserError: both are given.
    """
    if "target_epsilon" in given:
        noises = {name: given[name] for name in NOISES & given.keys()}
        reject(noises, "--target-epsilon finds the noise; leave out")


@dataclass(frozen=True)
class BaselineRequest:
    """What a baseline's run is asked for, beside the settings of the method."""

    target_epsilon: float | None = flag(
        None,
        "Privacy budget (epsilon) of the whole run, in the method's own unit. It "
        "sets the noise.",
        above=0,
    )
    max_images_per_user: int | None = flag(
        None,
        "Largest number of images of one user; further ones are not used. It lets a "
        "method that protects single images state an epsilon for users. It must be "
        "public.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        """Checks every field."""
        coerce_fields(self)
