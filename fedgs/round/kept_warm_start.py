"""A node's warm start, kept beside its states, so that an interrupted one goes on.

The warm start of the paper takes hours, and nothing else is written before its end.
Nothing depends on what is kept: without it the warm start begins anew, to the same
bytes.

Privacy: discriminators and generators that saw private images; the file is as private
as a node's state, and gone as soon as there is one.
"""

import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from fedgs.errors import UserError, wrap_error
from fedgs.files import write_tensors
from fedgs.gan.discriminators import ModuleStack
from fedgs.gan.warm_start import OnStep, Steps
from fedgs.round.checkpoint import (
    CHECKPOINT_SHARE,
    FIT_SECONDS,
    STEP,
    dispensable,
    load_tensors,
    tensors_of,
)
from fedgs.runs.run_folder import read_state, sealed, warm_start_path
from fedgs.shapes import TensorDict


class KeptSteps(Steps):
    """The steps of a node's warm start."""

    def __init__(self, folder: Path, of: dict[str, str], on_step: OnStep) -> None:
        """Reads what is kept, if it is of the same warm start.

        Args:
            folder: of the node's states.
            of: what the steps depend on beside the run's settings.
            on_step: called after each step. What it raises ends the warm start, which
                is kept.
        """
        super().__init__(on_step)
        self.path = warm_start_path(folder)
        self.of = of
        self.step = 0
        self.parts: Mapping[str, ModuleStack] = {}
        self._found = self._read()
        self._last = time.monotonic()
        self._cost = 0.0

    def begin(self, parts: Mapping[str, ModuleStack], first: int, last: int) -> int:
        """Goes on where the warm start was kept, if it was.

        Raises:
            UserError: what is kept is of other networks.
        """
        self.parts = parts
        kept = 0
        if self._found is not None:
            kept = int(self._found[STEP])
        if first < kept <= last:
            problem = f"{self.path}: it is of another warm start"
            kinds = (KeyError, RuntimeError, ValueError)
            with wrap_error(kinds, problem, "remove it, then resume the run"):
                load_tensors(parts, self._found or {})
            self._found = None  # the chunks after this one begin anew
        # What is kept of a later chunk has this chunk's clients too, all trained. It is
        # loaded when that chunk begins.
        self.step = min(max(kept, first), last)
        return self.step

    def done(self, step: int, steps: int) -> None:
        """Keeps the steps from time to time, and tells of this one."""
        self.step = step
        # Large networks are written less often, so that it stays a small share.
        wait = max(FIT_SECONDS, self._cost / CHECKPOINT_SHARE)
        if time.monotonic() - self._last > wait:
            self.keep()
        try:
            super().done(step, steps)
        except Exception:
            self.keep()
            raise

    def keep(self) -> None:
        """Writes where the warm start is."""
        if self._found is not None:
            return  # what is kept is of a later chunk, which has not begun again
        started = time.monotonic()
        # A tensor as the others, so that the file's hash is of it too.
        tensors = tensors_of(self.parts) | {STEP: torch.tensor(self.step)}
        with dispensable(self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_tensors(self.path, sealed(tensors, self.of), self.of)
        self._last = time.monotonic()
        self._cost = self._last - started

    def _read(self) -> TensorDict | None:
        """Returns what `keep` wrote of the same warm start, None if nothing."""
        if not self.path.exists():
            return None
        try:
            tensors, of = read_state(self.path)
        except UserError as error:
            text = f"{error}; the warm start begins anew"
            warnings.warn(text, RuntimeWarning, stacklevel=1)
            return None
        if of != self.of:
            return None
        return tensors
