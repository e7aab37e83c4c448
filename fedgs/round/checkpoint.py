"""Checkpoints: what the server needs to go on, and when it is written."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.gan.features import StageRelease
from fedgs.methods.base import State
from fedgs.privacy.ledger import Ledger
from fedgs.runs.run_folder import RunFolder
from fedgs.shapes import TensorDict

CHECKPOINT_SHARE = 0.05  # of the run's time, where checkpoint_every is unset
CHECKPOINT_SECONDS = 10.0  # and never more often than this


def server_tensors(server: State) -> TensorDict:
    """Returns everything the server needs to go on, under flat names.

    Privacy: post-processing of DP output.
    """
    flat = tensors_of(server.parts)
    for index, release in enumerate(server.stages):
        flat |= {f"stage.{index}.{n}": v for n, v in _stage_tensors(release).items()}
    return flat


def _stage_tensors(release: StageRelease) -> TensorDict:
    tensors = {"target": release.target, "noise_std": release.noise_std}
    if release.shares is not None:
        tensors["shares"] = release.shares
    for at, net in enumerate(release.networks):
        tensors |= {f"network.{at}.{name}": value for name, value in net.items()}
    return tensors


def _restored_stages(config: ResolvedConfig, tensors: TensorDict) -> list[StageRelease]:
    """Returns the stages of a checkpoint; their kinds are those of the settings."""
    releases: list[StageRelease] = []
    for index, stage in enumerate(config.stage_list):
        own = under(f"stage.{index}.", tensors)
        if not own:
            break
        networks = tuple(
            under(f"network.{at}.", own) for at in range(len(own["target"]))
        )
        released = own["target"], own["noise_std"], own.get("shares")
        releases.append(StageRelease(stage.kind, networks, *released))
    return releases


def restore(folder: RunFolder, server: State) -> None:
    """Puts the server into the state of the last checkpoint, if there is one.

    Privacy: post-processing of DP output.

    Raises:
        UserError: the checkpoint is corrupted or of another architecture.
    """
    checkpoint = folder.load_checkpoint()
    round, tensors = checkpoint or (0, {})
    # Rounds that are repeated would have two lines.
    folder.truncate_metrics(round)
    if checkpoint is None:
        return
    try:
        load_tensors(server.parts, tensors)
    except RuntimeError as error:
        raise UserError(
            f"{folder.path}: the checkpoint is of another generator than config.json "
            "says; restore config.json"
        ) from error
    server.round = round
    server.stages = _restored_stages(folder.config, tensors)


def tensors_of(parts: Mapping[str, nn.Module | Optimizer]) -> TensorDict:
    """Returns the tensors of networks, and Adam's, each under "<part>.<name>"."""
    flat: TensorDict = {}
    for key, part in parts.items():
        if isinstance(part, Optimizer):
            flat |= moments_of(f"{key}.", part)
        else:
            flat |= {f"{key}.{n}": v for n, v in part.state_dict().items()}
    return flat


def load_tensors(
    parts: Mapping[str, nn.Module | Optimizer], tensors: TensorDict
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
    moments = {index: under(f"{prefix}{index}.", tensors) for index in range(number)}
    state = {index: values for index, values in moments.items() if values}
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


class Checkpoints:
    """Commits checkpoints, as often as their cost allows.

    Privacy: post-processing of DP output; the nodes' states go to the private folder.

    Attributes:
        committed: the round of the last committed checkpoint, 0 before the first.
    """

    def __init__(
        self,
        folder: RunFolder,
        server: State,
        ledger: Ledger,
        save_nodes: Callable[[int], None],
    ) -> None:
        """Starts the clock; `save_nodes(keep_round)` has all node states on disk."""
        self.folder, self.server = folder, server
        self.ledger, self.save_nodes = ledger, save_nodes
        self.committed = server.round
        self.last, self.cost = time.monotonic(), 0.0

    def commit(self) -> None:
        """Saves the nodes, then commits the server's state."""
        if self.server.round == self.committed > 0:
            with indispensable(self.folder, "the ledger's length"):
                self.folder.record(self.ledger)  # a discarded round has an event
            return
        started = time.monotonic()
        with indispensable(self.folder, f"the checkpoint of round {self.server.round}"):
            # Nodes first: a checkpoint without their states could not be resumed.
            self.save_nodes(self.committed)
            tensors = server_tensors(self.server)
            self.folder.save_checkpoint(self.server.round, tensors, self.ledger)
        self.committed = self.server.round
        self.last = time.monotonic()
        self.cost = self.last - started

    def commit_if_due(self) -> None:
        """Commits when the interval has passed: in rounds, or by its measured cost."""
        every = self.folder.config.checkpoint_every
        if is_due(every, self.server.round, self.last, self.cost):
            self.commit()


def is_due(every: int | None, round: int, last: float, cost: float) -> bool:
    """Tells whether a checkpoint is due: by rounds, or by what the last one cost.

    Args:
        every: rounds between checkpoints, None to go by their cost.
        round: that was just finished.
        last: when the last one was finished, of `time.monotonic`.
        cost: how many seconds it took.
    """
    if every is not None:
        return round % every == 0
    wait = max(CHECKPOINT_SECONDS, cost / CHECKPOINT_SHARE)
    return time.monotonic() - last > wait
