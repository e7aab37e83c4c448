"""What `fedgs sample` is asked for: its flags.

Imports no tensor library: the command line reads the flags from here at every start.
"""

from dataclasses import MISSING, dataclass
from pathlib import Path

from fedgs.config.fields import check_ranges, flag, refuse

DEFAULT_COUNT = 80


@dataclass(frozen=True)
class SampleRequest:
    """One drawing; each flag's help says what it is.

    Raises:
        UserError: a number out of range, or both --count and --per-class.
    """

    run: Path = flag(MISSING, "The run folder.", metavar="")
    output: str = flag(
        MISSING,
        "npz:FILE, png:FILE (one grid), folder:DIR (CLASS/NUMBER.png) or hf:DIR "
        "(Hugging Face); or a name that ends in .npz or .png, or of a new folder.",
        names=("-o", "--output"),
    )
    count: int | None = flag(
        None, "Images; 80 when unset.", names=("-n", "--count"), at_least=1
    )
    per_class: int | None = flag(
        None, "Images of every class, or of every one of --labels.", at_least=1
    )
    labels: str | None = flag(None, "Labels in turn, e.g. 3,7; uniform when unset.")
    seed: int = flag(0, "Seed of the latents.")

    def __post_init__(self) -> None:
        """Checks what needs no run."""
        check_ranges(self)
        if None not in (self.per_class, self.count):
            refuse(self, [("per_class", "--count says how many; leave out one")])
