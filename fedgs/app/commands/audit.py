"""What `fedgs audit` does: attacks a run's guarantee.

The run is read, never altered; everything goes to RUN/audit/.
"""

import dataclasses
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedgs.app.commands.audit_report import conclude
from fedgs.app.commands.audit_request import AuditRequest
from fedgs.app.commands.terminal import Progress, say
from fedgs.audit.canaries import Canaries
from fedgs.audit.finding import Finding
from fedgs.audit.mechanism import MAX_DRAWS, audit_rounds, recorded_plan
from fedgs.audit.membership import audit_samples
from fedgs.audit.one_run import audit_run
from fedgs.data.federated import FederatedImages, to_float
from fedgs.data.load import load_data, load_test_data
from fedgs.errors import UserError
from fedgs.federation.training import RunStopped, stop_on_signal
from fedgs.privacy.accounting import SEEDED
from fedgs.runs import sample as samples
from fedgs.runs.run_folder import RunFolder

QUICK_DRAWS = 1.2e8  # of noise: one node's million rounds of 32 fakes, three times
CANARIES, FEWEST_CANARIES = 100, 10
NUM_SYNTHETIC = 5000
NUM_RECORDS = 2500
NOT_RUN = "not run: give --full"


def audit(request: AuditRequest, as_json: bool) -> bool:
    """Attacks a run and returns whether its epsilons hold.

    Raises:
        UserError: no run folder, a broken ledger, or too few clients for --full.
    """
    folder = RunFolder.open(request.run)
    clients = folder.config.num_clients
    if request.full and clients < FEWEST_CANARIES:
        raise UserError(
            f"num_clients = {clients}: --full needs a run of at least "
            f"{FEWEST_CANARIES} clients; leave it out"
        )
    output = folder.path / "audit"
    torch.set_num_threads(1)  # workers are threads, one for each of num_workers
    started = time.monotonic()
    with Progress() as progress:
        attack = _Attack(folder, progress, request.full)
        output.mkdir(exist_ok=True)
        most_draws = MAX_DRAWS if request.full else QUICK_DRAWS
        findings = attack.one_round(request.trials, most_draws)
        one_run = NOT_RUN
        if request.full:
            rounds = request.rounds or folder.config.num_rounds
            more, one_run = attack.one_run(min(CANARIES, clients), rounds, output)
            findings += more
        membership = attack.membership()
    is_seeded = folder.config.noise_seed is not None
    report = {
        "is_seeded": is_seeded,
        "one_run": one_run,
        "membership": membership,
        "seconds": round(time.monotonic() - started, 1),
    }
    notes = [f"B, one run with canaries: {one_run}"]
    if isinstance(membership, str):
        notes.append(f"C, membership inference: {membership}")
    if is_seeded:
        say(f"Note: the noise of this run was {SEEDED}", is_error=True)
    return conclude(folder.path, report, findings, notes, as_json)


class _Attack:
    """The three attacks on one run."""

    def __init__(self, folder: RunFolder, progress: Progress, is_full: bool) -> None:
        self.folder, self.config, self.progress = folder, folder.config, progress
        self.events = folder.read_ledger().events
        # A run with stages has no attack B. The bounds of A and B hold together.
        self.is_full = is_full and self.config.stages is None

    @cached_property
    def data(self) -> FederatedImages:
        """The run's data, loaded once."""
        return load_data(self.config)

    def one_round(self, trials: int, max_draws: float) -> list[Finding]:
        """Attack A, on each kind of release that the run has."""
        self.progress.doing(f"A: up to {trials} rounds of each kind")
        num_more = int(self.is_full)
        return audit_rounds(self.config, self.events, trials, max_draws, num_more)

    def one_run(
        self, canaries: int, num_rounds: int, output: Path
    ) -> tuple[list[Finding], str]:
        """Attack B; the findings and whether it ran."""
        if self.config.stages is not None:
            return [], "not run: it has canaries for gradients only, the run has stages"
        config = dataclasses.replace(self.config, num_rounds=num_rounds)
        rng = np.random.default_rng()
        drawn = Canaries.draw(config, canaries, config.relation, rng)
        data = self.data
        self.progress.doing(f"B: training again with {canaries} canaries")
        with (
            tempfile.TemporaryDirectory(prefix="one-run-", dir=output) as temporary,
            stop_on_signal() as stop,
        ):
            config = dataclasses.replace(config, output=f"{temporary}/run")
            report = self.progress.rounds(num_rounds, "B: round")
            plan = recorded_plan(self.config, self.events)
            known = (report, stop, 2)  # A of gradients, and B
            try:
                found = audit_run(config, plan, data, drawn, config.delta, *known)
            except RunStopped as error:
                return [], f"not finished: {error}"
        return found, f"ran: {canaries} canaries, {num_rounds} rounds"

    def membership(self) -> dict[str, Any] | str:
        """Attack C; why not, if it cannot run."""
        self.progress.doing("C: membership inference on samples")
        config = self.config
        try:
            generator = samples.load_generator(self.folder)
            test = load_test_data(config)[0]
            data = self.data
            rng = np.random.default_rng(0)
            records = rng.permutation(np.concatenate(data.client_records))
            test = test[rng.permutation(len(test))]
            count = min(len(records), len(test), NUM_RECORDS)
            labels = samples.uniform_labels(config, NUM_SYNTHETIC, seed=0)
            return audit_samples(
                samples.draw(config, generator, labels, seed=0),
                to_float(data.images[records[:count]]),
                test[:count],
            )
        except UserError as error:
            return f"skipped: {error}"
