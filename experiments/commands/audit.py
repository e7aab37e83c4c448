"""What `fedgs audit` does: attacks a run's guarantee; table, plot and JSON.

The run is read, never altered; everything goes to RUN/audit/.
"""

import dataclasses
import io
import tempfile
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from experiments.commands import audit_report
from experiments.commands.audit_request import AuditRequest
from experiments.commands.progress import Progress, say
from fedgs.audit.canaries import FEWEST, Canaries
from fedgs.audit.finding import CONFIDENCE, Finding
from fedgs.audit.masks import Masks, audit_masks
from fedgs.audit.mechanism import (
    MAX_DRAWS,
    audit_round,
    claims_of_one_round,
    recorded_plan,
    weakest_rounds,
)
from fedgs.audit.membership import audit_samples
from fedgs.audit.one_run import audit_run
from fedgs.audit.published import refute_published
from fedgs.data.federated import FederatedImages, to_float
from fedgs.data.load import load_data, load_test_data
from fedgs.errors import UserError
from fedgs.federation.messages import EVERYONE
from fedgs.federation.training import RunStopped, new_event, stop_on_signal
from fedgs.files import write_atomically, write_json
from fedgs.privacy.accounting import SEEDED
from fedgs.runs import sample as samples
from fedgs.runs.run_folder import RunFolder

QUICK_DRAWS = 1.2e8  # of noise: one node's million rounds of 32 fakes, three times
CANARIES = 100
NUM_SYNTHETIC = 5000
NUM_RECORDS = 2500
NOT_RUN = "not run: give --full"


def audit(request: AuditRequest, as_json: bool) -> bool:
    """Attacks a run and returns whether its epsilons hold.

    Raises:
        UserError: no run folder, a broken ledger, or a wrong number of canaries.
    """
    folder = RunFolder.open(request.run)
    clients = folder.config.num_clients
    canaries = request.canaries
    if canaries is None:
        canaries = min(CANARIES, clients)
    if request.full and not FEWEST <= canaries <= clients:
        raise UserError(
            f"canaries = {canaries}: --full needs --canaries from {FEWEST} to the "
            f"run's {clients} clients"
        )
    output = folder.path / "audit"
    torch.set_num_threads(1)  # workers are threads, one for each of num_workers
    started = time.monotonic()
    with Progress() as progress:
        attack = _Attack(folder, progress, request.full)
        output.mkdir(exist_ok=True)
        report: dict[str, Any] = {
            "run": str(folder.path),
            "confidence": CONFIDENCE,
            "is_seeded": folder.config.noise_seed is not None,
            "published": attack.published(request.trials),
        }
        most_draws = MAX_DRAWS if request.full else QUICK_DRAWS
        findings = attack.one_round(request.trials, most_draws)
        report["one_run"] = NOT_RUN
        if request.full:
            rounds = request.rounds or folder.config.num_rounds
            more, report["one_run"] = attack.one_run(canaries, rounds, output)
            findings += more
        report["membership"] = attack.membership()
        masks = attack.masks()
        report["masks"] = masks if isinstance(masks, str) else masks.to_json()
    report["findings"] = [finding.to_json() for finding in findings]
    report["holds"] = not any(finding.is_failure for finding in findings)
    report["holds"] &= isinstance(masks, str) or masks.holds
    report["seconds"] = round(time.monotonic() - started, 1)
    _write(output, report, findings, as_json)
    return report["holds"]


class _Attack:
    """The three attacks on one run."""

    def __init__(self, folder: RunFolder, progress: Progress, is_full: bool) -> None:
        self.folder, self.config, self.progress = folder, folder.config, progress
        self.events = folder.read_ledger().events
        self.weakest = weakest_rounds(self.config, self.events)
        # A of each kind, and B: their bounds hold together.
        self.num_audits = len(self.weakest) + (is_full and self.config.stages is None)

    @cached_property
    def data(self) -> FederatedImages:
        """The run's data, loaded once."""
        return load_data(self.config)

    def published(self, trials: int) -> dict[str, Any]:
        """Attack A against the paper's accounting."""
        self.progress.doing(f"A: {trials} rounds of the paper's setting")
        return refute_published(trials).to_json()

    def one_round(self, trials: int, max_draws: float) -> list[Finding]:
        """Attack A, on each kind of release that the run has."""
        config, found = self.config, list[Finding]()
        doing = self.progress.doing
        for release, round in sorted(self.weakest.items()):
            events = [event for event in self.events if event.release == release]
            events = events or [new_event(config, round, EVERYONE, 1)]
            plan = recorded_plan(config, events)
            claims = claims_of_one_round(plan, config.delta, config.colluding_nodes)
            asked = (config.delta, trials, max_draws, doing, round, self.num_audits)
            found += audit_round(config, claims, *asked)
        return found

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
            known = (report, stop, config.colluding_nodes, self.num_audits)
            try:
                found = audit_run(config, plan, data, drawn, config.delta, *known)
            except RunStopped as error:
                return [], f"not finished: {error}"
        return found, f"ran: {canaries} canaries, {num_rounds} rounds"

    def masks(self) -> Masks | str:
        """Attack on the masks; why not, if the run has none."""
        if not self.config.is_masked:
            return "not there: the nodes of this run send no masked sums"
        return audit_masks(self.config, max(self.weakest.values()))

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
            count = min(len(records), len(test) // 2, NUM_RECORDS)
            labels = samples.uniform_labels(config, NUM_SYNTHETIC, seed=0)
            return audit_samples(
                samples.draw(config, generator, labels, seed=0),
                to_float(data.images[records[:count]]),
                test[:count],
                test[count : count + NUM_SYNTHETIC],
            )
        except UserError as error:
            return f"skipped: {error}"


# ------------------------------------------------------------------ output


def _write(
    output: Path, report: dict[str, Any], findings: Sequence[Finding], as_json: bool
) -> None:
    text = io.StringIO()
    audit_report.show(Console(file=text, width=120), report)
    write_atomically(output / "table.txt", text.getvalue().encode())
    try:
        write_atomically(output / "plot.png", audit_report.plot(report))
        report["plot"] = "plot.png"
    except ImportError:
        report["plot"] = "skipped: needs matplotlib, pip install 'fedgs[report]'"
    write_json(output / "report.json", report)
    if as_json:
        print((output / "report.json").read_text(), end="")
    else:
        audit_report.show(Console(), report)
        print(f"plot         {report['plot']}\naudit folder {output}")
    if report["is_seeded"]:
        say(f"Note: the noise of this run was {SEEDED}", is_error=True)
    for finding in findings:
        if finding.is_failure:
            text = (
                f"REFUTED: {finding.attack}: {finding.adversary}, {finding.relation}, "
                f"rounds {finding.rounds}: epsilon is at least "
                f"{finding.lower_bound:.4g}, {finding.epsilon:.4g} is claimed"
            )
            say(text, is_error=True)
