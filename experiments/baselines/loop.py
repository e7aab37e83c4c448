"""The loop that every baseline trains in.

Nothing that depends on private data leaves the process before the event that pays for
it is on the disk: a commit appends the events of the steps since the last one, then
metrics, checkpoint and pictures. A crash in between loses the steps, not their price.
When to commit, and how, is the product's `Session`, as for a federated run.
"""

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from experiments.baselines.baseline import SECRET, Baseline
from fedgs.config.fields import coerce_fields, entry
from fedgs.errors import UserError
from fedgs.files import write_tensors
from fedgs.gan.models import Generator
from fedgs.privacy.ledger import Chain
from fedgs.round.checkpoint import Report, Session, under
from fedgs.round.node_state import CLIENTS, check_states, clients_hash
from fedgs.round.run import RunStopped, Stop
from fedgs.runs.run_folder import (
    RunFolder,
    node_folder,
    read_state,
    sealed,
    state_path,
    state_rounds,
)
from fedgs.shapes import TensorDict

PRIVATE_COSTS = "private/costs.jsonl"  # what the ledger must not tell of each release


@dataclass(frozen=True)
class BaselineRelease:
    """What one step of a baseline released: a line of its ledger.

    Attributes:
        event: what `Baseline.step` returned; the method alone knows what it costs.
        round: the outer step, from 1; a step that was repeated has two lines.

    Raises:
        UserError: a value of the wrong type or outside its range.
    """

    event: dict[str, Any]
    round: int = entry(at_least=1)

    def __post_init__(self) -> None:
        """Checks both fields."""
        coerce_fields(self)
        if not isinstance(self.event, dict):
            raise UserError(f"event = {self.event!r}: must be of type dict")


class BaselineLedger(Chain[BaselineRelease]):
    """The ledger of a run: fedgs' chain, with lines that its accountant refuses."""

    event_type = BaselineRelease


def train(
    folder: RunFolder,
    training: Baseline[Any],
    target_epsilon: float | None,
    report: Report,
    stop: Stop,
) -> None:
    """Takes the steps that are left, and writes the product.

    Privacy: releases what the method's `guarantees` say; events: in the ledger.

    Args:
        folder: the folder of the run, which the caller holds.
        training: made, and at its start.
        target_epsilon: None where none was promised.
        report: called with the public metrics of each step.
        stop: when set, the run checkpoints after the current step and stops.

    Raises:
        RunStopped: the run ended early with a checkpoint.
        UserError: the folder is corrupted, or a promised target would be exceeded.
    """
    torch.set_num_threads(1)
    last = training.num_steps
    with closing(folder.ledger(BaselineLedger)) as ledger:
        session = _Session(folder, training, ledger, report)
        # Without a target a step that is repeated simply counts twice.
        if target_epsilon is not None:
            _refuse_repeats(session, target_epsilon)
        for index in range(session.round, last):
            report(session.step(index))
            # After the last step there is nothing to stop: the run is complete.
            is_stopped = stop.is_set() and session.round < last
            if is_stopped or session.is_due or session.is_picture_due:
                session.commit()
            if is_stopped:
                raise RunStopped(f"stopped after step {session.round}")
        session.commit()
        session.save_generator()


class _Session(Session):
    """What a training of a baseline keeps in its run folder: its steps are rounds."""

    def __init__(
        self,
        folder: RunFolder,
        training: Baseline[Any],
        ledger: BaselineLedger,
        report: Report,
    ) -> None:
        """Goes on from the last checkpoint, if there is one."""
        self.training = training
        self._done = 0  # steps that are taken
        self._states = node_folder(folder.private, 0)
        self._clients = clients_hash(training.data.client_names)
        check_states(self._states, self._clients, str(folder.path))
        # Of the steps since the last commit:
        self._costs: list[dict[str, Any]] = []
        self._releases: list[BaselineRelease] = []
        self._metrics: list[dict[str, Any]] = []
        super().__init__(folder, ledger, report)

    @property
    def round(self) -> int:
        """The steps that are taken."""
        return self._done

    @property
    def networks(self) -> tuple[Generator, Generator]:
        """What images are drawn from, twice."""
        return self.training.generator, self.training.generator

    def restore(self, round: int, tensors: TensorDict) -> None:
        """Puts the training into the state of a checkpoint and its private part."""
        state = under("trainer.", tensors)
        # A method without secrets has written no private part.
        path = state_path(self._states, round)
        if path.exists():
            state |= read_state(path)[0]
        self.training.load(state)
        self._done = round

    def step(self, index: int) -> dict[str, Any]:
        """Takes a step and returns its public metrics; writes nothing."""
        started = time.monotonic()
        event = self.training.step(index)
        seconds = round(time.monotonic() - started, 4)
        self._done = index + 1
        if event is not None:
            secret, public = _split(event)
            release = BaselineRelease(event=public, round=self.round)
            self._releases.append(release)
            if secret:
                line = self.ledger.length + len(self._releases)
                self._costs.append({"line": line} | secret)
        metrics: dict[str, Any] = {"round": self.round}
        # A larger batch takes longer, and nobody may learn who was in it.
        if event is None or event.get("sampling_rate", 1) == 1:
            metrics["seconds"] = seconds
        metrics["events"] = self.ledger.length + len(self._releases)
        self._metrics.append(metrics)
        return metrics

    def tensors(self) -> TensorDict:
        """Writes the events since the last commit; returns what they paid for.

        What no release made public is written to the private folder.
        """
        # First, so that no line of the ledger is without its own; of two with the
        # same number a crash lost the first one's release before it was counted.
        for costs in self._costs:
            self.folder.append_metrics(costs, PRIVATE_COSTS)
        self.ledger.append(*self._releases)
        for metrics in self._metrics:
            self.folder.append_metrics(metrics)
        self._costs.clear()
        self._releases.clear()
        self._metrics.clear()
        secret, public = _split(self.training.state())
        if secret:
            path = state_path(self._states, self.round)
            about = {CLIENTS: self._clients}
            write_tensors(path, sealed(secret, about), about)
        tensors = {f"trainer.{name}": value for name, value in public.items()}
        # Copies: a file of tensors has none twice.
        for name, value in self.training.generator.state_dict().items():
            tensors[f"ema.{name}"] = value.clone()
        return tensors

    def commit(self) -> None:
        """Commits, removes what the checkpoint before needed, draws what is due."""
        is_new = self.round > self.committed
        super().commit()
        # Only now, for until the commit the checkpoint before counts.
        for round in state_rounds(self._states):
            if round < self.round:
                state_path(self._states, round).unlink()
        if is_new and self.is_picture_due:
            self.write_picture()


def _split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values whose names begin with `SECRET`, and the others."""
    secret: dict[str, Any] = {}
    public: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith(SECRET):
            secret[name] = value
        else:
            public[name] = value
    return secret, public


def _refuse_repeats(session: _Session, target_epsilon: float) -> None:
    """Refuses to spend twice where a target was promised.

    Raises:
        RunStopped: the generator of the last checkpoint is the product.
        UserError: there is none.
    """
    done = session.round
    # Are there lines of the ledger that no checkpoint has?
    if max(session.attempts, default=0) <= done:
        return
    problem = (
        f"{session.folder.path}: a crash lost step {done + 1} after its release was "
        f"counted; repeating it would exceed target_epsilon = {target_epsilon:g}"
    )
    if done == 0:
        raise UserError(f"{problem}; start anew with another --output")
    session.save_generator()
    raise RunStopped(f"{problem}; the generator of step {done} is written")
