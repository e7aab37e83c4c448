"""A run from its settings to its generator, whatever carries the messages.

    resolve    settings + data -> every value fixed and recorded
    run_rounds the loop: select, record the event, exchange, step, checkpoint

An engine supplies the exchange: `fedgs.local` calls the nodes in this process, the
Flower strategy sends messages to them.
"""

import dataclasses
import secrets
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from fedgs.accounting import Plan
from fedgs.budget import Budget, calibrate_noise
from fedgs.config import RunConfig, UserError
from fedgs.data import FederatedImages, load_data
from fedgs.ledger import Event, Ledger
from fedgs.messages import EVERYONE, Clients, FakeBatch
from fedgs.round import (
    ServerState,
    draw_fakes,
    new_server,
    public_fakes,
    server_round,
)
from fedgs.run_folder import RunFolder
from fedgs.sample import write_grid
from fedgs.sanitizer import SanitizedGradients
from fedgs.shapes import TensorDict

CHECKPOINT_SHARE = 0.05  # of the run's time, where checkpoint_every is unset
CHECKPOINT_SECONDS = 10.0  # and never more often than this
Report = Callable[[dict[str, Any]], None]


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

    def answers(self, request: FakeBatch) -> Sequence[SanitizedGradients]:
        """Sends the request to the nodes concerned and returns who answered."""
        ...

    def prepare(self, request: FakeBatch, nodes: Sequence[int]) -> None:
        """Has the nodes make their discriminators, however long that takes."""
        ...

    def save(self, keep_round: int) -> None:
        """Has the state of every node on disk when it returns."""
        ...


# ------------------------------------------------------------------ settings


def resolve(config: RunConfig) -> tuple[RunConfig, FederatedImages]:
    """Loads the data and fixes every open setting: K, m, seed, noise.

    Privacy: public, but for the data itself.

    Raises:
        UserError: settings that contradict each other, the data or the machine.
    """
    config.validate()
    if config.seed is None:
        config = dataclasses.replace(config, seed=secrets.randbelow(2**31))
    data = load_data(config)
    is_all = config.client_selection == "all"
    config = dataclasses.replace(
        config,
        num_clients=data.num_clients,
        num_classes=data.num_classes,
        clients_per_round=data.num_clients if is_all else config.clients_per_round,
    ).validate()
    return with_noise(config), data


def with_noise(config: RunConfig) -> RunConfig:
    """Returns the configuration with the noise that its target_epsilon asks for.

    A `noise_multiplier` given beside `target_epsilon` stays: the target is then a
    budget that stops the run.

    Privacy: public; computed from the plan, never from data.

    Raises:
        UserError: neither is given, or the target cannot be met.
    """
    if config.noise_multiplier is not None:
        return config
    if config.target_epsilon is None:
        raise UserError(
            "noise_multiplier is unset: give --noise-multiplier (0 for a run without "
            "privacy) or --target-epsilon"
        )
    noise_multiplier = calibrate_noise(
        Plan.from_config(dataclasses.replace(config, noise_multiplier=1.0)),
        config.target_epsilon,
        config.delta,
        config.adversary,
        config.relation,
    )
    return dataclasses.replace(config, noise_multiplier=noise_multiplier)


def check_capacity(config: RunConfig, folder: Path) -> None:
    """Refuses a run whose discriminators fit neither memory nor disk.

    Raises:
        UserError: with the estimate and what is there.
    """
    if config.device != "cpu" and not torch.cuda.is_available():
        raise UserError(f"device = {config.device}: no GPU is here; give --device cpu")
    state = state_bytes(config)
    copies = 1 if config.engine == "local" else 2  # workers overlap in what they hold
    if config.device == "cpu":
        limits = {"memory": (copies * state, available_memory())}
    else:
        limits = {"GPU memory": (state, torch.cuda.mem_get_info()[0])}
    while not folder.exists():
        folder = folder.parent
    limits["disk"] = (3 * state, shutil.disk_usage(folder).free)
    for what, (needed, there) in limits.items():
        if needed > there:
            raise UserError(
                f"discriminator_dim = {config.discriminator_dim}: the discriminators "
                f"of {clients_needed(config)} clients need about {needed / 1e9:.1f} GB "
                f"of {what}, {there / 1e9:.1f} GB are free; give a smaller "
                "--discriminator-dim, --num-clients or --num-rounds"
            )


def clients_needed(config: RunConfig) -> int:
    """Returns how many clients' discriminators the run makes at most."""
    num_clients = config.num_clients or 1
    if config.discriminator_training == "every_round" or config.warm_start == "public":
        return num_clients
    nodes = min(config.num_nodes, (config.clients_per_round or 1) * config.num_rounds)
    return min(num_clients, nodes * config.clients_per_node)


def state_bytes(config: RunConfig) -> int:
    """Returns the size of the run's discriminators with their Adam moments."""
    from fedgs.models import build_discriminator

    params = build_discriminator(config, 0).parameters()
    return clients_needed(config) * 3 * 4 * sum(param.numel() for param in params)


def available_memory() -> int:
    """Returns the bytes of memory that processes can still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


# ------------------------------------------------------------------ the loop


def run_rounds(
    folder: RunFolder, exchange: Exchange, report: Report, stop: Stop
) -> None:
    """Trains from the last checkpoint, or the start, to the last round.

    Order of a round: append the event and fsync; send; step; checkpoint when due.

    Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

    Args:
        folder: the run's folder, locked by the caller.
        exchange: the engine.
        report: called with the public metrics of each round.
        stop: when set, the run checkpoints after the current round and stops.

    Raises:
        RunStopped: too few nodes answered, the budget is spent, or `stop` was set.
    """
    with closing(folder.ledger()) as ledger:
        _run_rounds(folder, ledger, exchange, report, stop)


def _run_rounds(
    folder: RunFolder, ledger: Ledger, exchange: Exchange, report: Report, stop: Stop
) -> None:
    config = folder.config
    server = new_server(config)
    restore(folder, server, ledger)
    budget = _budget(config, ledger)
    attempts = Counter(event.round for event in ledger.events)
    checkpoints = _Checkpoints(folder, server, ledger, exchange)
    first_request = public_fakes(config)
    prepared: set[int] = set()
    while server.round < config.num_rounds:
        started = time.monotonic()
        before = {name: v.clone() for name, v in server.generator.named_buffers()}
        request, answered = draw_fakes(config, server)
        request = dataclasses.replace(request, keep_round=checkpoints.committed)
        new = set(nodes_of(config, request.trainees)) - prepared
        exchange.prepare(first_request, sorted(new))
        prepared |= new
        attempts[request.round] += 1
        event = make_event(config, request, attempts[request.round])
        if budget is not None and not budget.allows(event):
            checkpoints.commit(before)
            save_generator(folder, server)
            raise BudgetSpent(
                f"stopped before round {request.round}: its release would exceed "
                f"target_epsilon = {config.target_epsilon}; the generator is written"
            )
        ledger.append(event)
        if budget is not None:
            budget.add(event)
        answers = exchange.answers(request)
        required = min(config.min_nodes or event.planned_nodes, event.planned_nodes)
        if len(answers) < required:
            checkpoints.commit(before)
            raise RunStopped(
                f"round {request.round}: {len(answers)} of {event.planned_nodes} "
                f"nodes answered within round_timeout = {config.round_timeout:g} s, "
                f"min_nodes asks for {required}; the round is counted and discarded"
            )
        server_round(config, server, answered, answers)
        _report_round(folder, server, answers, started, report)
        checkpoints.commit_if_due(started)
        if stop.is_set() and server.round < config.num_rounds:
            checkpoints.commit()
            raise RunStopped(f"stopped after round {server.round}")
    checkpoints.commit()
    save_generator(folder, server)


def save_generator(folder: RunFolder, server: ServerState) -> None:
    """Writes the run's product: the generator and its average.

    Privacy: post-processing of DP output.
    """
    folder.save_generator(server.generator.state_dict(), server.ema.state_dict())


def make_event(config: RunConfig, request: FakeBatch, attempt: int) -> Event:
    """Returns the ledger's event of a request, before it is sent.

    Privacy: public.
    """
    participants = request.participants
    planned = len(nodes_of(config, participants))
    return Event(
        round=request.round,
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
    return sorted({int(client) // config.clients_per_node for client in clients})


def server_tensors(server: ServerState) -> TensorDict:
    """Returns everything the server needs to go on, under flat names.

    Privacy: post-processing of DP output.
    """
    flat = {f"generator.{n}": v for n, v in server.generator.state_dict().items()}
    averaged = server.ema.state_dict()
    flat |= {f"ema.{name}": value for name, value in averaged.items()}
    for index, moments in server.optimizer.state_dict()["state"].items():
        flat |= {f"adam.{index}.{name}": value for name, value in moments.items()}
    return flat


def restore(folder: RunFolder, server: ServerState, ledger: Ledger) -> None:
    """Puts the server into the state of the last checkpoint, if there is one.

    Raises:
        UserError: the checkpoint is corrupted or of another architecture.
    """
    found = folder.load_checkpoint(ledger)
    folder.truncate_metrics(found[0] if found else 0)
    if found is None:
        return
    round, tensors = found
    groups: dict[str, TensorDict] = {"generator": {}, "ema": {}, "adam": {}}
    for name, value in tensors.items():
        group, _, rest = name.partition(".")
        groups[group][rest] = value
    moments: dict[int, TensorDict] = {}
    for name, value in groups["adam"].items():
        index, _, rest = name.partition(".")
        moments.setdefault(int(index), {})[rest] = value
    try:
        server.generator.load_state_dict(groups["generator"])
        server.ema.load_state_dict(groups["ema"])
    except RuntimeError as error:
        raise UserError(
            f"{folder.path}: the checkpoint is of another generator than config.json "
            "says; restore config.json"
        ) from error
    adam = server.optimizer.state_dict()
    server.optimizer.load_state_dict({**adam, "state": moments})
    server.round = round


def _budget(config: RunConfig, ledger: Ledger) -> Budget | None:
    if config.target_epsilon is None:
        return None
    return Budget(
        Plan.from_config(config),
        config.target_epsilon,
        config.delta,
        config.adversary,
        config.relation,
        ledger.events,
    )


def _report_round(
    folder: RunFolder,
    server: ServerState,
    answers: Sequence[SanitizedGradients],
    started: float,
    report: Report,
) -> None:
    config = folder.config
    every = config.sample_every or max(1, config.num_rounds // 10)
    if server.round % every == 0 or server.round == config.num_rounds:
        write_grid(
            folder.path / "samples" / f"round-{server.round:07d}.png",
            config,
            server.ema,
        )
    total = torch.stack([answer.values.double() for answer in answers]).sum(0)
    metrics = {
        "round": server.round,
        "seconds": round(time.monotonic() - started, 4),
        "num_answers": len(answers),
        "release_norm": round(float(total.norm()), 6),
    }
    folder.append_metrics(metrics)
    report(metrics)


class _Checkpoints:
    """Commits checkpoints, as often as their cost allows."""

    def __init__(
        self,
        folder: RunFolder,
        server: ServerState,
        ledger: Ledger,
        exchange: Exchange,
    ) -> None:
        self.folder, self.server = folder, server
        self.ledger, self.exchange = ledger, exchange
        self.committed = server.round
        self.last, self.cost = time.monotonic(), 0.0

    def commit(self, buffers: TensorDict | None = None) -> None:
        """Saves the nodes, then commits the server's state.

        Args:
            buffers: the generator's, from before the drawing of a round that is
                discarded; a resumed run draws it again.
        """
        if buffers:
            self.server.generator.load_state_dict(buffers, strict=False)
        if self.committed == self.server.round and self.committed > 0:
            return
        started = time.monotonic()
        self.exchange.save(self.committed)
        self.folder.save_checkpoint(
            self.server.round, server_tensors(self.server), self.ledger
        )
        self.committed = self.server.round
        self.last = time.monotonic()
        self.cost = self.last - started

    def commit_if_due(self, started: float) -> None:
        every = self.folder.config.checkpoint_every
        if every is not None:
            is_due = self.server.round % every == 0
        else:
            wait = max(CHECKPOINT_SECONDS, self.cost / CHECKPOINT_SHARE)
            is_due = time.monotonic() - self.last > wait
        if is_due:
            self.commit()


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
