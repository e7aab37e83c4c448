"""The lines of a baseline's ledger: one for each step that released something.

The file is `fedgs.privacy.ledger`'s, with the same chain of hashes. The lines have
other fields than those of rounds, so code that knows one of the two refuses the other.
"""

from dataclasses import dataclass, field
from typing import Any

from fedgs.config.fields import coerce_fields, entry
from fedgs.errors import UserError
from fedgs.privacy.ledger import Chain


@dataclass(frozen=True, kw_only=True)
class BaselineRelease:
    """What one step of a baseline released.

    Attributes:
        round: the outer step, from 1.
        attempt: 1 for the first time that the step was taken, then 2, 3, ...
        noise_source: "os" (operating system's entropy) or "seeded" (not private).
        event: what `Baseline.step` returned; the method alone knows what it costs.

    Raises:
        UserError: a value of the wrong type or outside its range.
    """

    round: int = entry(at_least=1)
    attempt: int = entry(at_least=1)
    noise_source: str = entry(choices=("os", "seeded"))
    event: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Checks every field."""
        coerce_fields(self)
        if not isinstance(self.event, dict):
            raise UserError(f"event = {self.event!r}: must be of type dict")


class BaselineLedger(Chain[BaselineRelease]):
    """The ledger of a run of one method."""

    event_type = BaselineRelease
