"""Checkpoints: what a run needs to go on, and when it is written."""

import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, wrap_error
from fedgs.gan.discriminators import ModuleStack
from fedgs.gan.fit import Fit
from fedgs.methods.base import State
from fedgs.privacy.ledger import Chain
from fedgs.runs.run_folder import KEPT_FIT, RunFolder
from fedgs.runs.sample import write_grid
from fedgs.shapes import TensorDict

Report = Callable[[dict[str, Any]], None]
Part = nn.Module | Optimizer | ModuleStack
CHECKPOINT_SHARE = 0.05  # of the run's time, at most
CHECKPOINT_SECONDS = 1.0  # and never more often than this
FIT_SECONDS = 15.0  # between two times that a fit is kept
STEP = "step"  # of a fit that is kept, beside its parts


def server_tensors(server: State) -> TensorDict:
    """Returns everything the server needs to go on, under flat names.

    Privacy: post-processing of DP output.
    """
    flat = tensors_of(server.parts)
    for index, (_, tensors) in enumerate(server.released):
        for name, value in tensors.items():
            flat[f"released.{index}.{name}"] = value
    return flat


def restored_releases(
    config: ResolvedConfig,
    tensors: TensorDict,
) -> list[tuple[str, TensorDict]]:
    """Returns `State.released` of a checkpoint, with the methods of the settings."""
    found: list[tuple[str, TensorDict]] = []
    # Phases that hand nothing on come after all that do.
    for index, phase in enumerate(config.phases):
        own = under(f"released.{index}.", tensors)
        if own:
            found.append((phase.method, own))
    return found


def tensors_of(parts: Mapping[str, Part]) -> TensorDict:
    """Returns the tensors of networks, and Adam's, each under "<part>.<name>".

    Privacy: as private as the parts.
    """
    # Tensors only, in a format that runs no code when it is read (safetensors).
    flat: TensorDict = {}
    for key, part in parts.items():
        if isinstance(part, Optimizer):
            flat |= moments_of(f"{key}.", part)
        else:
            for name, value in part.state_dict().items():
                flat[f"{key}.{name}"] = value
    return flat


def load_tensors(
    parts: Mapping[str, Part],
    tensors: TensorDict,
) -> None:
    """Puts networks and optimizers into the state of `tensors_of`."""
    for key, part in parts.items():
        if isinstance(part, Optimizer):
            load_moments(f"{key}.", part, tensors)
        else:
            part.load_state_dict(under(f"{key}.", tensors))


def moments_of(prefix: str, optimizer: Optimizer) -> TensorDict:
    """Returns Adam's tensors, named prefix, number of the parameter, name.

    Privacy: as private as the gradients.
    """
    return {
        f"{prefix}{index}.{name}": value
        for index, moments in optimizer.state_dict()["state"].items()
        for name, value in moments.items()
    }


def load_moments(prefix: str, optimizer: Optimizer, tensors: TensorDict) -> None:
    """Puts an optimizer of one group into the state of `moments_of`."""
    adam = optimizer.state_dict()
    number = len(adam["param_groups"][0]["params"])
    # A parameter that no step has changed yet has no moments.
    state: dict[int, TensorDict] = {}
    for index in range(number):
        values = under(f"{prefix}{index}.", tensors)
        if values:
            state[index] = values
    # Rates and betas are those of the settings: only moments are in a checkpoint.
    optimizer.load_state_dict({**adam, "state": state})


def under(prefix: str, tensors: TensorDict) -> TensorDict:
    """Returns the tensors whose names begin so, without the prefix."""
    return {
        n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)
    }


@contextmanager
def indispensable(folder: RunFolder, what: str) -> Iterator[None]:
    """Says which part of a run could not be written, and what to do then.

    Raises:
        UserError: the system's reason.
    """
    try:
        yield
    except OSError as error:
        problem = f"{what} cannot be written ({error.strerror})"
        raise UserError(
            f"{folder.path}: {problem}; free the disk, then resume the run"
        ) from error


@contextmanager
def dispensable(path: Path) -> Iterator[None]:
    """Warns of a file that cannot be written, once: nothing depends on it."""
    try:
        yield
    except OSError as error:
        problem = f"it cannot be written ({error.strerror}); the run goes on without"
        warnings.warn(f"{path}: {problem}", RuntimeWarning, stacklevel=1)


class Session(ABC):
    """A training in a run folder that is held: what every kind of it writes, and when.

    The ledger has the events of what a checkpoint, a picture or a generator tells
    before one of them is written; how, is the kind's.

    Privacy: post-processing of DP output; what is not goes to the private folder.

    Attributes:
        config: the run's configuration, resolved.
        ledger: the run's ledger, open.
        report: called with the public metrics of each round.
        committed: the round of the last committed checkpoint, 0 before the first.
        attempts: the number of times that each round is in the ledger.
    """

    def __init__(self, folder: RunFolder, ledger: Chain[Any], report: Report) -> None:
        """Goes on from the last checkpoint, if there is one.

        Raises:
            UserError: the checkpoint is corrupted or of another architecture.
        """
        self.folder = folder
        self.config = folder.config
        self.ledger = ledger
        self.report = report
        checkpoint = folder.load_checkpoint()
        self.committed, tensors = checkpoint or (0, {})
        # Rounds that are repeated would have two lines.
        folder.truncate_metrics(self.committed)
        if checkpoint is not None:
            try:
                self.restore(self.committed, tensors)
            except (KeyError, RuntimeError, ValueError) as error:
                raise UserError(
                    f"{folder.path}: the checkpoint is of another generator than the "
                    "settings say, or its part in private/ is missing; restore "
                    "config.json and private/"
                ) from error
        self.attempts = Counter(event.round for event in ledger.events)
        self.last = time.monotonic()
        self.cost = 0.0

    @property
    @abstractmethod
    def round(self) -> int:
        """The last finished round."""

    @property
    @abstractmethod
    def networks(self) -> tuple[nn.Module, nn.Module]:
        """The generator, and the average of it that images are drawn from."""

    @abstractmethod
    def restore(self, round: int, tensors: TensorDict) -> None:
        """Goes on from a checkpoint."""

    @abstractmethod
    def tensors(self) -> TensorDict:
        """Returns what a checkpoint needs; all that it builds on is on the disk."""

    def commit(self) -> None:
        """Commits a checkpoint of the last finished round."""
        if self.round == self.committed > 0:
            with indispensable(self.folder, "the ledger's length"):
                self.folder.record(self.ledger)  # a discarded round has an event
            return
        # The ledger's length goes along, so that an older, shorter copy of it is
        # noticed.
        started = time.monotonic()
        with indispensable(self.folder, f"the checkpoint of round {self.round}"):
            self.folder.save_checkpoint(self.round, self.tensors(), self.ledger)
        self.committed = self.round
        self.last = time.monotonic()
        self.cost = self.last - started

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint: by rounds, or by what the last cost."""
        every = self.config.checkpoint_every
        if every is not None:
            return self.round % every == 0
        # Large states are written less often, so that writing stays a small share of
        # the run's time.
        wait = max(CHECKPOINT_SECONDS, self.cost / CHECKPOINT_SHARE)
        return time.monotonic() - self.last > wait

    @property
    def is_picture_due(self) -> bool:
        """Whether this is one of the ten rounds with a picture, or the last."""
        last = self.config.num_rounds
        if self.round == last:
            return True
        between = max(1, last // 10)
        return self.round % between == 0

    def write_picture(self) -> None:
        """Writes a grid of samples of the last finished round."""
        samples = self.folder.path / "samples"
        average = self.networks[1]
        is_training = average.training  # a picture changes nothing of the training
        with dispensable(samples):
            path = samples / f"round-{self.round:07d}.png"
            write_grid(path, self.config, average.eval())
        average.train(is_training)

    def save_generator(self) -> None:
        """Writes the run's product: afterwards it is finished."""
        generator, average = self.networks
        with indispensable(self.folder, "the generator"):
            self.folder.save_generator(
                generator.state_dict(), average.state_dict(), self.ledger
            )


class KeptFit(Fit):
    """A fit of a session, kept beside the checkpoint that it starts from.

    Nothing depends on what is kept: without it the fit begins anew, to the same bytes.

    Privacy: post-processing of DP output.
    """

    def __init__(self, session: Session, report: Callable[[int, int], None]) -> None:
        """Keeps the fit of a session's last round."""
        super().__init__(report)
        self.session = session
        self.begun = 0  # how many steps were done when it went on
        self.step = 0
        self.parts: Mapping[str, nn.Module | Optimizer] = {}
        self.last = time.monotonic()

    def begin(self, parts: Mapping[str, nn.Module | Optimizer]) -> int:
        """Goes on where the fit to the last checkpoint was kept, if it was."""
        self.session.commit()
        self.parts = parts
        try:
            kept = self.session.folder.load_fit()
        except UserError as error:
            warnings.warn(f"{error}; the fit begins anew", RuntimeWarning, stacklevel=1)
            kept = None
        if kept is not None:
            path = self.session.folder.path / KEPT_FIT
            problem = f"{path}: it is of another fit"
            kinds = (KeyError, RuntimeError, ValueError)
            with wrap_error(kinds, problem, "remove it, then resume the run"):
                self.begun = int(kept[STEP])
                load_tensors(parts, kept)
        self.step = self.begun
        return self.begun

    def done(self, step: int, steps: int) -> None:
        """Keeps the fit from time to time, and tells of the step."""
        self.step = step
        if time.monotonic() - self.last > FIT_SECONDS:
            self.keep()
        super().done(step, steps)

    def keep(self) -> None:
        """Writes where the fit is."""
        folder = self.session.folder
        with dispensable(folder.path / KEPT_FIT):
            # A tensor as the others, so that the file's seal is of it too.
            step = {STEP: torch.tensor(self.step)}
            folder.save_fit(tensors_of(self.parts) | step)
        self.last = time.monotonic()
