"""The ledger of a baseline's run: one line for each step that released something.

The same chained file as GS-WGAN's (`fedgs.privacy.ledger`), with events of another
form: code that knows one of the two refuses the lines of the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedgs.config.fields import coerce_fields, entry
from fedgs.errors import UserError
from fedgs.privacy.ledger import Chain


@dataclass(frozen=True, kw_only=True)
class Release:
    """What one step of a baseline released.

    Attributes:
        kind: "baseline".
        method: the name of the method, which alone knows what the event costs.
        step: the outer step, from 1.
        attempt: 1 for the first time that the step was taken, then 2, 3, ...
        noise_source: "os" (operating system's entropy) or "seeded" (not private).
        event: what the method's trainer returned for the step.

    Raises:
        UserError: a value of the wrong type or outside its range.
    """

    kind: str = entry("baseline", choices=("baseline",))
    method: str
    step: int = entry(at_least=1)
    attempt: int = entry(at_least=1)
    noise_source: str = entry(choices=("os", "seeded"))
    event: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Checks every field."""
        coerce_fields(self)
        if not isinstance(self.event, dict):
            raise UserError(f"event = {self.event!r}: must be of type dict")

    @property
    def round(self) -> int:
        """The step."""
        return self.step

    @property
    def participants(self) -> Sequence[int] | Literal["all"]:
        """The clients that were asked, of a method that asks some; else "all"."""
        return self.event.get("participants", "all")


class ReleaseLedger(Chain[Release]):
    """The ledger of a run of one method."""

    event_type = Release
