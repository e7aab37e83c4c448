"""What `fedgs audit` is asked for: its flags.

Imports no tensor library: the command line reads the flags from here at every start.
"""

from dataclasses import MISSING, dataclass
from pathlib import Path

from fedgs.config.fields import check_ranges, flag, refuse


@dataclass(frozen=True)
class AuditRequest:
    """One audit; each flag's help says what it is.

    Raises:
        UserError: a number out of range, or one that only --full takes.
    """

    run: Path = flag(MISSING, "Run folder: the --output of the training.", metavar="")
    full: bool = flag(
        False,
        "Also train again with canaries (images made to be recognised), and test more"
        " rounds if many nodes add noise. This takes long.",
        names=("--full/--quick",),
    )
    trials: int = flag(
        1_000_000,
        "Largest number of rounds in a test of the mechanism. Fewer are used if many "
        "nodes add noise.",
        at_least=1000,
        at_most=10_000_000,
    )
    rounds: int | None = flag(
        None,
        "Number of rounds to train with --full. Default: as many as the run has.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        """Checks what needs no run."""
        check_ranges(self)
        if self.rounds is not None and not self.full:
            refuse(
                self,
                [("rounds", "only --full trains; add --full, or leave out --rounds")],
            )
