"""Terms: what one round's release is agreed to be.

Accounting, clients' limits, budgets and audits ask a run for nothing else. This module
imports no tensor library.
"""

from dataclasses import dataclass

from fedgs.config.fields import SMALLEST_CLIP, coerce_fields, entry
from fedgs.errors import UserError


@dataclass(frozen=True)
class Terms:
    """What one round's release is agreed to be.

    Attributes:
        release: the kind of release: "gradient", "embedding", "update" or "count".
        noise_multiplier: one node's noise_std / (2 * clip_bound), at least 0.
        clip_bound: C > 0, the largest L2 norm of what one client adds to one sample.
        shape: (B, channels, rows, columns): B gradients in their basis, or, with B = 1,
            one embedding by network, class and feature, or one update, or one count
            for each threshold, as a row.
        num_groups: the number of groups of clients that are compared; 1 where all
            clients are one group.
        clients_per_group: the number of clients in each group of a node, where that is
            public; else None.
    is_by_node: each node's release is used and published by itself, and not only
        the sum over nodes, so that no other node's noise protects its clients.
    """

    release: str = entry(choices=("gradient", "embedding", "update", "count"))
    noise_multiplier: float = entry(at_least=0)
    clip_bound: float = entry(at_least=SMALLEST_CLIP)
    shape: tuple[int, int, int, int] = entry()
    num_groups: int = entry(1, at_least=1)
    clients_per_group: int | None = entry(None, at_least=1)
    is_by_node: bool = False

    def __post_init__(self) -> None:
        """Refuses terms that bound nothing, whichever method they are of."""
        coerce_fields(self)
        sides = self.shape
        is_whole = all(type(side) is int and side > 0 for side in sides)
        if type(sides) is not tuple or len(sides) != 4 or not is_whole:
            remedy = "give (B, channels, rows, columns), whole numbers above 0"
            raise UserError(f"terms: shape = {sides!r}: {remedy}")

    @property
    def batch_size(self) -> int:
        """B, the samples of one release, each clipped by itself."""
        return self.shape[0]

    @property
    def noise_std(self) -> float:
        """Standard deviation of one node's noise, 2 * clip_bound * noise_multiplier."""
        return 2.0 * self.clip_bound * self.noise_multiplier
