"""The loop of a run: select, record the event, exchange, step, checkpoint.

An engine supplies the exchange: `fedgs.federation.local` calls the nodes in this
process, the Flower strategy sends messages to them.
"""

import dataclasses
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from fedgs.cohorts.files import selection_costs
from fedgs.config.run_config import RunConfig
from fedgs.federation.checkpoint import Checkpoints, indispensable, restore
from fedgs.federation.messages import EVERYONE, Clients, FakeBatch
from fedgs.federation.round import (
    ServerState,
    draw_fakes,
    new_server,
    public_fakes,
    server_round,
)
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.privacy.accounting import Plan
from fedgs.privacy.budget import budget_of
from fedgs.privacy.ledger import Event, Ledger
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import write_grid
from fedgs.shapes import TensorDict

Report = Callable[[dict[str, Any]], None]
Unrecorded = Callable[[Ledger], Sequence[Event]]
_SHOWN_FAILURES = 3


class Stop(Protocol):
    """A request to stop: a `threading.Event`, or a file that another process writes."""

    def is_set(self) -> bool:
        """Returns whether the run should stop."""
        ...


class RunStopped(RuntimeError):
    """The run ended early with a checkpoint; `fedgs resume` continues it."""


class BudgetSpent(RunStopped):
    """The next release would exceed target_epsilon; the run ends before it."""


class Exchange(Protocol):
    """How an engine reaches the nodes."""

    @property
    def failures(self) -> Sequence[str]:
        """Why nodes did not answer the last request; public texts."""
        ...

    def answers(self, request: FakeBatch) -> Sequence[SanitizedGradients]:
        """Sends the request to the nodes concerned and returns who answered."""
        ...

    def prepare(self, request: FakeBatch, nodes: Sequence[int]) -> None:
        """Has the nodes make their discriminators, however long that takes."""
        ...

    def save(self, keep_round: int) -> None:
        """Has the state of every node on disk when it returns."""
        ...


def run_rounds(
    folder: RunFolder,
    exchange: Exchange,
    report: Report,
    stop: Stop,
    unrecorded: Unrecorded = lambda ledger: (),
) -> None:
    """Trains from the last checkpoint, or the start, to the last round.

    Order of a round: append the event and fsync; send; step; checkpoint when due.

    Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

    Args:
        folder: the run's folder, locked by the caller.
        exchange: the engine.
        report: called with the public metrics of each round.
        stop: when set, the run checkpoints after the current round and stops.
        unrecorded: returns what nodes tell that they released and the ledger lacks,
            each event once, and then none; raises `RunStopped` where the run may not
            go on with it.

    Raises:
        RunStopped: too few nodes answered, the budget is spent, or `stop` was set.
    """
    with closing(folder.ledger()) as ledger:
        _Run(folder, ledger, exchange, report, unrecorded).train(stop)


class _Run:
    """One run in progress: what its rounds share."""

    def __init__(
        self,
        folder: RunFolder,
        ledger: Ledger,
        exchange: Exchange,
        report: Report,
        unrecorded: Unrecorded,
    ) -> None:
        self.folder, self.config = folder, folder.config
        self.ledger, self.exchange, self.report = ledger, exchange, report
        self.unrecorded = unrecorded
        self.server = new_server(self.config)
        restore(folder, self.server)
        selections = selection_costs([self.config])
        self.budget = budget_of(self.config, ledger.events, selections)
        self.attempts = Counter(event.round for event in ledger.events)
        self.checkpoints = Checkpoints(folder, self.server, ledger, exchange.save)
        self.first_request = public_fakes(self.config)
        self.prepared = nodes_with_state(self.config, ledger, self.server.round)

    def train(self, stop: Stop) -> None:
        """Trains to the last round, unless asked to stop before."""
        self._add_unrecorded()
        while self.server.round < self.config.num_rounds:
            self.round()
            self.checkpoints.commit_if_due()
            self._add_unrecorded()
            if stop.is_set() and self.server.round < self.config.num_rounds:
                self.checkpoints.commit()
                raise RunStopped(f"stopped after round {self.server.round}")
        self.checkpoints.commit()
        self._save_generator()

    def round(self) -> None:
        """Draws, records the event, exchanges, steps and reports."""
        buffers = {n: v.clone() for n, v in self.server.generator.named_buffers()}
        request, answered = draw_fakes(self.config, self.server)
        request = dataclasses.replace(request, keep_round=self.checkpoints.committed)
        try:
            self._prepare(request)
        except RunStopped:
            self.checkpoints.commit(buffers)
            raise
        started = time.monotonic()
        event = self._charge(request, buffers)
        answers = self.exchange.answers(request)
        required = min(
            self.config.min_nodes or event.planned_nodes, event.planned_nodes
        )
        if len(answers) < required:
            self.checkpoints.commit(buffers)
            raise RunStopped(
                f"round {request.round}: {len(answers)} of {event.planned_nodes} nodes "
                f"answered within round_timeout = {self.config.round_timeout:g} s, "
                f"min_nodes asks for {required}; the round is counted and discarded"
                + _reasons(self.exchange.failures)
            )
        server_round(self.config, self.server, answered, answers)
        _report_round(
            self.folder, self.server, answers, started, self.ledger, self.report
        )

    def _add_unrecorded(self) -> None:
        """Adds what a ledger that was restored from a backup lacks."""
        while events := self._unrecorded():
            for event in events:
                self.ledger.append(event)
                self.attempts[event.round] += 1
                if self.budget is not None:
                    self.budget.add(event)
            with indispensable(self.folder, "the ledger's length"):
                self.folder.record(self.ledger)

    def _unrecorded(self) -> Sequence[Event]:
        try:
            return self.unrecorded(self.ledger)
        except RunStopped:
            self.checkpoints.commit()
            raise

    def _prepare(self, request: FakeBatch) -> None:
        """Has nodes that are needed for the first time make discriminators."""
        needed = set(nodes_of(self.config, request.trainees))
        self.exchange.prepare(self.first_request, sorted(needed - self.prepared))
        self.prepared |= needed

    def _charge(self, request: FakeBatch, buffers: TensorDict) -> Event:
        """Writes the event ahead of the request, or ends the run if it may not."""
        self.attempts[request.round] += 1
        event = make_event(self.config, request, self.attempts[request.round])
        if self.budget is not None and not self.budget.allows(event):
            self.checkpoints.commit(buffers)
            self._save_generator()
            raise BudgetSpent(
                f"stopped before round {request.round}: its release would exceed "
                f"target_epsilon = {self.config.target_epsilon:g}; the generator is "
                "written"
            )
        self.ledger.append(event)
        if self.budget is not None:
            self.budget.add(event)
        return event

    def _save_generator(self) -> None:
        generator, ema = self.server.generator, self.server.ema
        states = generator.state_dict(), ema.state_dict()
        with indispensable(self.folder, "the generator"):
            self.folder.save_generator(*states, self.ledger)


def nodes_with_state(config: RunConfig, ledger: Ledger, round: int) -> set[int]:
    """Returns the nodes that took part up to a committed round.

    Their state is on disk; where it is lost, they refuse instead of starting anew.

    Privacy: public.
    """
    done = [event for event in ledger.events if event.round <= round]
    if done and config.discriminator_training == "every_round":
        return set(range(config.num_nodes))
    return {node for event in done for node in nodes_of(config, event.participants)}


def make_event(config: RunConfig, request: FakeBatch, attempt: int) -> Event:
    """Returns the ledger's event of a request, before it is sent.

    Privacy: public.
    """
    return new_event(config, request.round, request.participants, attempt)


def new_event(
    config: RunConfig, round: int, participants: Clients, attempt: int
) -> Event:
    """Returns the ledger's event of a round with given participants.

    Privacy: public.
    """
    planned = len(nodes_of(config, participants))
    return Event(
        round=round,
        attempt=attempt,
        participants=EVERYONE if participants == EVERYONE else tuple(participants),
        num_clients=config.num_clients or 1,
        planned_nodes=planned,
        counted_nodes=Plan.from_config(config).counted_nodes,
        noise_std=config.noise_std,
        clip_bound=config.clip_bound,
        batch_size=config.batch_size,
        client_selection=config.client_selection,
        discriminator_training=config.discriminator_training,
        noise_source="os" if config.noise_seed is None else "seeded",
    )


def nodes_of(config: RunConfig, clients: Clients) -> list[int]:
    """Returns the nodes that host the given clients, increasing.

    Privacy: public.
    """
    if clients == EVERYONE:
        return list(range(config.num_nodes))
    return sorted({config.hosting.node_of(int(client)) for client in clients})


def _reasons(failures: Sequence[str]) -> str:
    """Returns the first failures and the number of others, to follow a sentence."""
    shown = "".join(f"\n{failure}" for failure in failures[:_SHOWN_FAILURES])
    others = len(failures) - _SHOWN_FAILURES
    return shown + (f"\nand {others} others" if others > 0 else "")


def _report_round(
    folder: RunFolder,
    server: ServerState,
    answers: Sequence[SanitizedGradients],
    started: float,
    ledger: Ledger,
    report: Report,
) -> None:
    config = folder.config
    every = config.sample_every or max(1, config.num_rounds // 10)
    if server.round % every == 0 or server.round == config.num_rounds:
        samples = folder.path / "samples"
        with _dispensable(samples):
            write_grid(samples / f"round-{server.round:07d}.png", config, server.ema)
    total = torch.stack([answer.values.double() for answer in answers]).sum(0)
    metrics = {
        "round": server.round,
        "seconds": round(time.monotonic() - started, 4),
        "num_answers": len(answers),
        "events": ledger.length,
        "release_norm": round(float(total.norm()), 6),
    }
    with _dispensable(folder.path / "metrics.jsonl"):
        folder.append_metrics(metrics)
    report(metrics)


@contextmanager
def _dispensable(path: Path) -> Iterator[None]:
    """Warns of a file that cannot be written, once: nothing depends on it."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); the run goes on without"
        warnings.warn(f"{path}: {problem}", RuntimeWarning, stacklevel=1)


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C or SIGTERM into an event, the second one into an end."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
