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

    run: Path = flag(MISSING, "Run folder: the --output of the training.", metavar="")
    output: str = flag(
        MISSING,
        "File or folder to create: npz:FILE, png:FILE (one grid), folder:DIR "
        "(CLASS/NUMBER.png) or hf:DIR (Hugging Face data set). FILE.npz, FILE.png and"
        " DIR alone mean the same.",
        names=("-o", "--output"),
    )
    count: int | None = flag(
        None,
        "Number of images. Default: 80.",
        names=("-n", "--count"),
        at_least=1,
    )
    per_class: int | None = flag(
        None,
        "Number of images of each class, or of each label in --labels.",
        at_least=1,
    )
    labels: str | None = flag(
        None, "Labels to draw in turn. Default: random ones. Example: 3,7."
    )
    seed: int = flag(0, "Seed of the generator's random input.")

    def __post_init__(self) -> None:
        """Checks what needs no run."""
        check_ranges(self)
        if None not in (self.per_class, self.count):
            refuse(self, [("per_class", "--count says how many; leave out one")])
