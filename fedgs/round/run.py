"""A run in progress: `begin` makes a round's request, `finish` takes its answers.

What a round asks and learns is its method's (`fedgs.methods`); here is the rest, once
for all of them: the ledger before the request, budget, samples, checkpoints, resume.

Engines own the loop. They bring a request to the nodes and their answers back:
`fedgs.round.local` within this process, `server.strategy` as Flower's messages.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from torch import nn

from fedgs.cohorts.cohort_file import selection_costs
from fedgs.config.rounds import terms_at
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.gan.warm_start import OnStep
from fedgs.mechanism.masks import LEAST_NODES
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.methods import new_state, phase_at, phase_with_discriminators
from fedgs.methods.base import Released, Request
from fedgs.methods.schedule import (
    EVERYONE,
    Clients,
    clients_of,
    nodes_of,
    select,
    trainees,
)
from fedgs.privacy.budget import budget_of
from fedgs.privacy.ledger import Event, Ledger, agreed_values
from fedgs.privacy.plan import counted_nodes
from fedgs.process import CANNOT_GO_ON
from fedgs.round.answer import summed
from fedgs.round.checkpoint import (
    KeptFit,
    Report,
    Session,
    dispensable,
    load_tensors,
    restored_releases,
    server_tensors,
)
from fedgs.round.codec import rounded
from fedgs.round.messages import NodeRelease, sum_of
from fedgs.runs.run_folder import RunFolder
from fedgs.shapes import TensorDict

SaveNodes = Callable[[int], None]
_SHOWN_FAILURES = 3
TELL_SECONDS = 1.0  # between two reports of a warm start
STOPPING = """
The run stops with a checkpoint: after the round in progress, or at once in a fit or a
warm start. To end it now, press Ctrl-C (or send SIGTERM) again; what a round has cost
stays counted.
"""


class Stop(Protocol):
    """A request to stop: a `threading.Event`, or a file that another process writes."""

    def is_set(self) -> bool:
        """Returns whether the run should stop."""
        ...


class RunStopped(RuntimeError):
    """The run ended early with a checkpoint; `fedgs resume` continues it."""


class BudgetSpent(RunStopped):
    """The next release would exceed target_epsilon; the run ends before it."""


def _end_if_asked(stop: Stop, work: str, step: int, steps: int) -> None:
    """Ends long work after one of its steps if `stop` is set."""
    if stop.is_set():
        raise RunStopped(
            f"The run was told to stop, after step {step} of {steps} of the {work}"
        )


class RunSession(Session):
    """One run in progress.

        with RunSession.opened(folder, report, save_nodes) as training:
            training.settle(stop)
            while training.goes_on:
                ...  # `preparation` to the nodes of `unprepared`, and wait
                request = training.begin()
                ...  # the request to the nodes concerned, and their answers back
                training.finish(answers, failures)
                training.stop_if_asked(stop)
                training.settle(stop)
            training.save_generator()

    Attributes:
        server: generator, optimizer, average, and the last finished round.
    """

    ledger: Ledger

    def __init__(
        self,
        folder: RunFolder,
        ledger: Ledger,
        report: Report,
        save_nodes: SaveNodes,
    ) -> None:
        """Goes on from the last checkpoint, if there is one; `opened` calls this."""
        self.server = new_state(folder.config)
        self._save_nodes = save_nodes
        super().__init__(folder, ledger, report)
        # The selection of the cohort is paid from the same target as the releases.
        selections = selection_costs([self.config])
        self._budget = budget_of(self.config, ledger.events, selections)
        # Nodes that were prepared have their state on the disk. One that has lost it
        # refuses to start anew.
        gradients = [event for event in ledger.events if event.release == "gradient"]
        self._prepared = {*last_rounds(self.config, gradients, self.server.round)}
        self._round: _Round | None = None  # between `begin` and `finish`
        self._settled = 0  # the last round that was settled

    @classmethod
    @contextmanager
    def opened(
        cls,
        folder: RunFolder,
        report: Report,
        save_nodes: SaveNodes,
    ) -> Iterator["RunSession"]:
        """Holds the run's ledger open; a `RunStopped` inside commits a checkpoint.

        The round that it interrupts is discarded: its event stays counted, and a
        resumed run repeats it.

        Args:
            folder: the run's folder, locked by the caller.
            report: called with the public metrics of each round.
            save_nodes: has the nodes' states on disk when it returns; its argument is
                the committed round, whose states are kept.

        Raises:
            UserError: the ledger or the checkpoint is corrupted, or the disk is full.
        """
        with closing(folder.ledger()) as ledger:
            training = cls(folder, ledger, report, save_nodes)
            try:
                yield training
            except RunStopped as error:
                # First: the checkpoint must not have what an unfinished round changed.
                training._discard_round()
                training.commit()
                if isinstance(error, BudgetSpent):  # what it bought is the product
                    training.save_generator()
                    training.write_picture()
                raise

    @property
    def has_product(self) -> bool:
        """Whether the finished rounds have made a generator that draws images."""
        if self.server.round == 0:
            return False
        return phase_at(self.config, self.server.round).method.has_generator

    @property
    def round(self) -> int:
        """The last finished round."""
        return self.server.round

    @property
    def networks(self) -> tuple[nn.Module, nn.Module]:
        """The generator and its average."""
        return self.server.generator, self.server.ema

    def restore(self, round: int, tensors: TensorDict) -> None:
        """Puts the server into the state of a checkpoint."""
        load_tensors(self.server.parts, tensors)
        self.server.released = restored_releases(self.config, tensors)
        self.server.round = round

    def tensors(self) -> TensorDict:
        """Returns the server's state; a node's, without which it is void, is saved."""
        self._save_nodes(self.committed)
        return server_tensors(self.server)

    @property
    def goes_on(self) -> bool:
        """Whether a round is left."""
        return self.server.round < self.config.num_rounds

    def stop_if_asked(self, stop: Stop) -> None:
        """Ends the run between two rounds; after the last one it is complete.

        Raises:
            RunStopped: `stop` was set, and rounds are left.
        """
        if stop.is_set() and self.goes_on:
            raise RunStopped(
                f"The run was told to stop, after round {self.server.round}"
            )

    def settle(self, stop: Stop) -> None:
        """Has the method do its long work on the last round, once.

        An interrupted run goes on where the fit was kept, beside the checkpoint.

        Raises:
            RunStopped: `stop` was set.
        """
        # Engines call this before the first round as well: a run that was interrupted
        # in the fit resumes there.
        round = self.server.round
        if round <= self._settled:
            return
        method, own = phase_at(self.config, round)

        def check(step: int, steps: int) -> None:
            _end_if_asked(stop, "fit", step, steps)
            # A hundred reports: one for each of thousands of steps would flood whoever
            # listens. The first one tells where a fit goes on.
            is_first = step == fit.begun + 1
            if is_first or step % max(1, steps // 100) == 0:
                self.report(
                    {
                        "round": round,
                        "fit_step": step,
                        "fit_steps": steps,
                        "is_first": is_first,
                    }
                )

        fit = KeptFit(self, check)
        try:
            has_fitted = method.settle(own, self.server, fit)
        except RunStopped:
            fit.keep()
            raise
        if has_fitted:
            self.write_picture()
        self._settled = round

    def on_warm_start(self, stop: Stop) -> OnStep:
        """Returns what is called after each step of a warm start, and reports some.

        It raises `RunStopped` once `stop` is set.
        """
        last = begun = time.monotonic()

        def on_step(step: int, steps: int) -> None:
            nonlocal last
            _end_if_asked(stop, "warm start", step, steps)
            now = time.monotonic()
            is_end = step == steps and last > begun
            if is_end or now - last > TELL_SECONDS:  # a short one tells nothing
                last = now
                done = {"warm_start_step": step, "warm_start_steps": steps}
                self.report({"round": self.server.round, **done})

        return on_step

    # Kept, so that it is drawn and hashed once, however many nodes are prepared with
    # it, and whenever they are.
    @cached_property
    def preparation(self) -> Request:
        """The request of round 0, which has nodes make discriminators.

        After other phases its fakes are of the generator as it is when asked for first.

        Raises:
            UserError: no phase has discriminators.
        """
        phase = phase_with_discriminators(self.config)
        if phase is None:
            raise UserError(f"phases = {self.config.methods}: have no discriminators")
        request = phase.method.prepare(phase.config, self.server)
        return rounded(request, self.config)

    def unprepared(self) -> list[int]:
        """Returns the nodes that the next round needs for the first time, increasing.

        They make their discriminators before the round begins: nothing is released
        then, and nothing counted, however long it takes.
        """
        round = self.server.round + 1
        phase = phase_at(self.config, round)
        needs_none = not phase.method.has_discriminators
        if needs_none or len(self._prepared) == self.config.num_nodes:
            return []
        clients = trainees(phase.config, select(self.config, round))
        needed = set(nodes_of(self.config, clients))
        return sorted(needed - self._prepared)

    def begin(
        self,
        nodes: Sequence[int] | None = None,
        failures: Sequence[str] = (),
    ) -> Request:
        """Draws the next round's request; its event is on the disk before it is sent.

        After a voided attempt it is the same request, to the nodes that are left.

        Privacy: post-processing of DP output; event: one release of the participants,
        written ahead; of those on the listed nodes only, and with these nodes' noise.

        Args:
            nodes: the nodes that are asked, in increasing order, where masks are used.
            failures: public texts that say why other nodes cannot be asked.

        Raises:
            BudgetSpent: the release would exceed `target_epsilon`.
            RunStopped: fewer nodes are listed than `min_answers`.
        """
        # Stored first, because a refusal below puts back what was drawn.
        self._round = asked = self._round or self._draw()
        request = asked.request
        attempt = self.attempts[asked.request.round] + 1
        if nodes is not None:
            # A sum of one node would be its release in the open, so masks need more.
            least = max(self.required(request.participants), LEAST_NODES)
            if len(nodes) < least:
                raise RunStopped(
                    f"The run stopped before round {request.round}: {len(nodes)} nodes "
                    f"can be asked, and secure aggregation needs {least} of them "
                    "(min_answers). Resume the run when more are there"
                    + _reasons(failures)
                )
        event = new_event(
            self.config, request.round, request.participants, attempt, nodes
        )
        self._round = replace(asked, event=event)
        # The budget before the ledger: an event that is written counts for good, even
        # if nothing is sent.
        if not self._can_pay(event):
            exceeds = f"would exceed target_epsilon = {self.config.target_epsilon:g}"
            if not self.has_product:
                raise RunStopped(
                    f"{CANNOT_GO_ON}: the release of round {request.round} {exceeds}, "
                    "and nothing has been learned that is worth keeping. What was "
                    "released stays counted. Start a new run"
                )
            raise BudgetSpent(
                f"The run ended before round {request.round}, whose release {exceeds}. "
                "The generator is written"
            )
        self.ledger.append(event)  # durably, then counted
        self.attempts[event.round] += 1
        if self._budget is not None:
            self._budget.add(event)
        return request

    def _can_pay(self, event: Event) -> bool:
        """Tells whether `target_epsilon` has room for one more release."""
        return self._budget is None or self._budget.allows(event)

    def required(self, participants: Clients) -> int:
        """Returns how many nodes of a round must answer, by `min_answers`."""
        # A round may have fewer nodes than `min_answers`, where few clients are drawn.
        planned = len(nodes_of(self.config, participants))
        if not self.config.min_answers:
            return planned
        return min(self.config.min_answers, planned)

    def _draw(self) -> "_Round":
        # Spectral vectors move with each drawing; a discarded round puts them back.
        buffers: TensorDict = {}
        for name, value in self.server.generator.named_buffers():
            buffers[name] = value.clone()
        method, own = phase_at(self.config, self.server.round + 1)
        request, pending = method.begin(own, self.server)
        # From now on these nodes count as prepared: `unprepared` names each of them
        # once.
        if method.has_discriminators:
            self._prepared |= {*nodes_of(self.config, request.trainees)}
        # Rounded here and not only where it is sent, so that both engines compute with
        # the same numbers.
        request = rounded(request, self.config)
        request = replace(request, keep_round=self.committed)
        return _Round(
            event=None,
            request=request,
            pending=pending,
            buffers=buffers,
            started=time.monotonic(),
        )

    def finish(
        self,
        answers: Sequence[NodeRelease],
        failures: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Takes the generator's step from a round's answers; writes what is due.

        With masks a missing answer voids the attempt: nothing is learned, and the next
        `begin` returns the same round once more.

        Privacy: post-processing of DP output.

        Args:
            answers: the releases of some or all planned nodes, in any order.
            failures: public texts that say why other nodes did not answer.

        Returns:
            The public metrics of the round; an empty mapping for a voided attempt.

        Raises:
            RunStopped: fewer nodes than `min_answers` answered.
        """
        if self._round is None or self._round.event is None:
            raise RuntimeError("finish without begin")
        self._check_enough(self._round, self._round.event, len(answers), failures)
        # Masks of who is missing do not cancel: the sum cannot be opened.
        is_void = len(answers) < self._round.event.planned_nodes
        if self.config.secure_aggregation and is_void:
            return {}
        opened = self._opened(self._round, answers)
        released = self._learn(self._round, opened)
        metrics = self._metrics(self._round, len(answers), released)
        # From here on the round is finished: a stop discards nothing any more.
        self._round = None
        self._publish(metrics)
        method = phase_at(self.config, self.server.round).method
        if method.has_generator and self.is_picture_due:
            self.write_picture()
        if method.commits_every_round or self.is_due or not self.goes_on:
            self.commit()
        return metrics

    def _check_enough(
        self,
        asked: "_Round",
        event: Event,
        num_answers: int,
        failures: Sequence[str],
    ) -> None:
        """Discards a round that fewer nodes answered than `min_answers` asks for.

        Raises:
            RunStopped: they are too few.
        """
        required = self.required(asked.request.participants)
        if self.config.is_masked:
            required = max(required, LEAST_NODES)
        if num_answers < required:
            remedy = "Resume the run when more nodes are there"
            if not self._can_pay(event) and not self.has_product:
                remedy = (
                    f"{CANNOT_GO_ON}: a repetition would exceed target_epsilon = "
                    f"{self.config.target_epsilon:g}. Start a new run when more nodes "
                    "are there"
                )
            raise RunStopped(
                f"The run stopped in round {event.round}: {num_answers} of "
                f"{event.planned_nodes} nodes answered within round_timeout = "
                f"{self.config.round_timeout:g} s, and min_answers requires "
                f"{required}. The round is discarded, and its privacy cost is counted. "
                f"{remedy}{_reasons(failures)}"
            )

    def _opened(
        self,
        asked: "_Round",
        answers: Sequence[NodeRelease],
    ) -> list[SanitizedGradients]:
        """Returns the nodes' releases; of a secure aggregation their sum alone.

        Raises:
            RunStopped: the sum is none that honest nodes have.
        """
        if self.config.secure_aggregation:
            try:
                answers = [sum_of(self.config, asked.request, answers)]
            except UserError as error:
                # A node that lies spoils the sum, but not the run: it can be resumed.
                raise RunStopped(
                    f"The run stopped in round {asked.request.round}: {error}. The "
                    "round is discarded, and its privacy cost is counted"
                ) from error
        return [each for each in answers if isinstance(each, SanitizedGradients)]

    def _learn(
        self,
        asked: "_Round",
        answers: Sequence[SanitizedGradients],
    ) -> Released:
        """Has the method learn from the sum of the releases, and returns that sum."""
        round = asked.request.round
        released = summed(self.config, round, answers)
        method, own = phase_at(self.config, round)
        method.finish(own, self.server, asked.pending, released)
        return released

    def _metrics(
        self,
        asked: "_Round",
        num_answers: int,
        released: Released,
    ) -> dict[str, Any]:
        """Returns the public metrics of a round that is done."""
        # Metrics are published, so only what is public or DP output may be among them.
        metrics: dict[str, Any] = {"round": self.server.round}
        if not phase_at(self.config, self.server.round).method.hides_duration:
            metrics["seconds"] = round(time.monotonic() - asked.started, 4)
        metrics["num_answers"] = num_answers
        metrics["events"] = self.ledger.length
        metrics["release_norm"] = round(float(released.total.norm()), 6)
        ratio = released.signal_to_noise
        if ratio is not None:  # without noise there is none
            metrics["signal_to_noise"] = ratio
        return metrics

    def _publish(self, metrics: dict[str, Any]) -> None:
        """Writes and reports the metrics of a round."""
        with dispensable(self.folder.path / "metrics.jsonl"):
            self.folder.append_metrics(metrics)
        self.report(metrics)

    def _discard_round(self) -> None:
        """Puts the generator back to where the unfinished round began."""
        if self._round is not None:
            # Not strict, for these are the buffers alone: drawing changes no weights.
            buffers = self._round.buffers
            self.server.generator.load_state_dict(buffers, strict=False)


@dataclass(frozen=True)
class _Round:
    """What is kept between a round's request and its answers.

    Attributes:
        event: the release that was asked for last; None before the first one.
        request: the request that was sent.
        pending: what the method's `begin` returned beside the request.
        buffers: the generator's buffers as they were before the drawing.
        started: when the round began, by the monotonic clock.
    """

    event: Event | None
    request: Request
    pending: Any
    buffers: TensorDict
    started: float


def last_rounds(
    config: ResolvedConfig,
    events: Sequence[Event],
    committed: int,
) -> dict[int, int]:
    """Returns the last committed round of each node that was needed for one."""
    # Later events are of rounds that a resumed run repeats, from the nodes' states at
    # the checkpoint.
    last: dict[int, int] = {}
    for event in events:
        if event.round <= committed:
            for node in nodes_of(config, trainees(config, event.participants)):
                last[node] = max(last.get(node, 0), event.round)
    return last


def new_event(
    config: ResolvedConfig,
    round: int,
    participants: Clients,
    attempt: int,
    nodes: Sequence[int] | None = None,
) -> Event:
    """Returns the ledger's event of a round, before its request is sent.

    Args:
        config: the run's configuration.
        round: the number of the round.
        participants: the clients that are selected.
        attempt: the number of the attempt at this round, from 1.
        nodes: those that are listed in an attempt with masks, which needs all of them:
            only their clients are asked. None: those of the participants.
    """
    planned = nodes_of(config, participants)
    counted = counted_nodes(
        config.hosting,
        config.clients_per_round,
        config.min_answers,
        terms_at(config, round).is_by_node,
    )
    if nodes is not None:
        # Clients of the other nodes are not asked in this attempt, so nothing is
        # counted for them.
        if len(nodes) < len(planned):
            hosted: list[int] = []
            for node in nodes:
                hosted += config.hosting.hosted(node)
            participants = clients_of(participants, hosted)
        planned = nodes
        # Where clients are drawn, noise must not depend on who is: the mixture's
        # condition. Else all nodes count whose noise an opened sum has.
        is_drawn = config.client_selection == "uniform"
        if is_drawn:
            counted = min(counted, len(nodes))
        else:
            counted = len(nodes)
    if participants == EVERYONE:
        asked = EVERYONE
    else:
        asked = tuple(participants)
    return Event(
        round=round,
        attempt=attempt,
        participants=asked,
        num_clients=config.num_clients,
        planned_nodes=len(planned),
        counted_nodes=counted,
        **agreed_values(config, round),
    )


def _reasons(failures: Sequence[str]) -> str:
    """Returns the first failures and the number of others, to follow a sentence."""
    lines = [*failures[:_SHOWN_FAILURES]]
    others = len(failures) - _SHOWN_FAILURES
    if others > 0:
        lines.append(f"and {others} others")
    return "".join(f"\n{line}" for line in lines)


def _say(text: str) -> None:
    """Writes to standard error, if there is still one that takes it."""
    with suppress(OSError):
        os.write(2, text.encode())


@contextmanager
def stop_on_signal(go_on: str = "the same command") -> Iterator[threading.Event]:
    """Turns the first Ctrl-C or SIGTERM into an event, the second one into an end.

    It says on standard error which of the two it was.

    Args:
        go_on: the command that continues the run.

    Raises:
        KeyboardInterrupt: at the second one.
    """
    stop = threading.Event()
    heard = False

    def handle(number: int, frame: object) -> None:
        nonlocal heard  # set first: the next signal may interrupt any line below
        # No print: the signal may have interrupted one, which would fail.
        if heard:
            _say(f"\nending now; continue with: {go_on}\n")
            raise KeyboardInterrupt
        heard = True
        _say(STOPPING)
        stop.set()

    previous: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        # A program that trains twice, or has handlers of its own, gets them back.
        for number, handler in previous.items():
            signal.signal(number, handler)
