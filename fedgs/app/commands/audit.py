"""What `fedgs audit` does: attacks a run's guarantee.

The run is read, never altered; everything goes to RUN/audit/.
"""

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedgs.app.commands.audit_report import conclude
from fedgs.app.commands.audit_request import AuditRequest
from fedgs.app.commands.terminal import Progress, say
from fedgs.audit.canaries import Canaries
from fedgs.audit.crafted_releases import audited
from fedgs.audit.finding import Check, Finding
from fedgs.audit.mechanism import MOST_DRAWS, audit_rounds, recorded_plan
from fedgs.audit.membership import audit_samples
from fedgs.audit.one_run import as_audited, audit_run
from fedgs.audit.worst_case import check_mechanism, check_method
from fedgs.config.run_config import GsWganConfig, ResolvedConfig, of_gs_wgan
from fedgs.data.federated import FederatedImages, to_float
from fedgs.data.load import federate, load_test_data
from fedgs.data.records import Records
from fedgs.data.sources import load_kept_records
from fedgs.errors import UserError
from fedgs.privacy.accountant import SEEDED
from fedgs.privacy.ledger import Event
from fedgs.privacy.plan import Plan
from fedgs.privacy.rounding import upper
from fedgs.randomness import secret
from fedgs.round.run import RunStopped, stop_on_signal
from fedgs.runs import sample as samples
from fedgs.runs.other_runs import open_other
from fedgs.runs.run_folder import RunFolder

QUICK_DRAWS = 1.2e8  # of noise: one node's million rounds of 32 fakes, three times
CANARIES = 100
FEWEST_CANARIES = 10
NUM_SYNTHETIC = 5000
NUM_RECORDS = 2500
NOT_RUN = "not run: give --full"
Outcome = tuple[list[Finding], list[Check], dict[str, Any], list[str]]  # and notes
NO_STAGES = "not run: it has canaries for gradients only, the run releases others"


def audit(request: AuditRequest, as_json: bool) -> bool:
    """Attacks a run and returns whether its epsilons hold.

    Raises:
        UserError: no run folder, a broken ledger, too few clients for --full, or a
            method without an attack.
    """
    folder = RunFolder.open(request.run)
    torch.set_num_threads(1)  # workers are threads, one for each of num_workers
    if folder.is_baseline:
        attacks = _attack_baseline
    else:
        attacks = _attack_run
    started = time.monotonic()
    with Progress() as progress:
        findings, checks, report, notes = attacks(folder, request, progress)
    report["seconds"] = round(time.monotonic() - started, 1)
    return conclude(folder.path, report, findings, checks, notes, as_json)


def _attack_baseline(
    folder: RunFolder,
    request: AuditRequest,
    progress: Progress,
) -> Outcome:
    """Attacks one release of each kind; the worst case is the method's own."""
    run = open_other(folder.path)
    if request.full:
        raise UserError(
            "full = True: only a run of `fedgs train` can be trained again; leave "
            "out --full"
        )
    guarantees = run.guarantees()
    if not guarantees:
        raise UserError(
            f"RUN = {folder.path}: {run.name} states no epsilon that an attack "
            "could refute; give a run that does"
        )
    progress.say(f"Attack A: {request.trials} releases of each kind")
    findings = list(run.attack(request.trials))
    if not findings:
        raise UserError(
            f"RUN = {folder.path}: {run.name} has no attack yet; `fedgs privacy of "
            "RUN` states its epsilons"
        )
    whole = upper(guarantees[0].epsilon)
    notes = [f"one release each; the whole run claims {whole}"]
    return findings, [], {"method": run.name}, notes


def _attack_run(
    folder: RunFolder,
    request: AuditRequest,
    progress: Progress,
) -> Outcome:
    """Attacks and checks one round of each kind; with --full, a whole run as well."""
    # First, because a published folder has no ledger and does not know its clients.
    events = folder.read_ledger().events
    config = folder.config
    clients = config.num_clients
    if request.full and clients < FEWEST_CANARIES:
        raise UserError(
            f"num_clients = {clients}: --full needs a run with at least "
            f"{FEWEST_CANARIES} clients; leave it out"
        )
    output = folder.path / "audit"
    output.mkdir(exist_ok=True)
    # The canaries of attack B are made for GS-WGAN's gradients, so B needs a run whose
    # only phase is GS-WGAN.
    is_possible = isinstance(config, GsWganConfig) and len(config.phases) == 1
    has_b = request.full and is_possible
    progress.say(f"Attack A: up to {request.trials} rounds of each kind")
    # The bounds of A and B are to hold together with the stated confidence, so A has to
    # know that B's bounds stand beside its own.
    findings, notes_of_a = _one_round(config, events, request, num_more=int(has_b))
    progress.say("Checks of noise, clipping and the method, with invented clients")
    checks, notes = _checks(config, events)
    notes += notes_of_a
    records = None
    if has_b:
        config = of_gs_wgan(config)
        records = load_kept_records(config)
        data = federate(config, records)
        rounds = request.rounds or config.num_rounds
        # The claims under attack are those of the recorded run, not of the settings.
        plan = recorded_plan(config, events)
        more, one_run = _one_run(config, plan, data, rounds, output, progress)
        findings += more
    elif request.full:
        one_run = NO_STAGES
    else:
        one_run = NOT_RUN
    membership = _membership(folder, records, progress)
    is_seeded = folder.config.noise_seed is not None
    report = {"is_seeded": is_seeded, "one_run": one_run, "membership": membership}
    notes.append(f"B, one run with canaries: {one_run}")
    if isinstance(membership, str):  # the reason why C could not run
        notes.append(f"C, membership inference: {membership}")
    if is_seeded:
        say(f"Note: the noise of this run was {SEEDED}.", is_error=True)
    return findings, checks, report, notes


def _one_round(
    config: ResolvedConfig,
    events: Sequence[Event],
    request: AuditRequest,
    num_more: int,
) -> tuple[list[Finding], list[str]]:
    """Attack A on one round of each kind; the findings, and notes on them."""
    if request.full:
        most_draws = MOST_DRAWS
    else:
        most_draws = QUICK_DRAWS
    findings = audit_rounds(config, events, request.trials, most_draws, num_more)
    # Only tests against whole releases of the run's shape have these details.
    whole_releases = [
        finding.details["whole_releases"]
        for finding in findings
        if "mu" in finding.details
    ]
    if not whole_releases:
        return findings, []
    note = (
        f"A: best of rounds of one coordinate and of {min(whole_releases):g} or more "
        "whole releases in each of four directions"
    )
    return findings, [note]


def _checks(
    config: ResolvedConfig,
    events: Sequence[Event],
) -> tuple[list[Check], list[str]]:
    """Checks what all claims rest on; the checks, and why some could not run."""
    config = audited(config)
    found = check_mechanism(config, events)
    try:
        return found + check_method(config), []
    except UserError as error:
        # The run's public data may be gone by now. The other checks do not need them,
        # so the audit goes on and says what is missing.
        return found, [f"the method with made-up clients: not run: {error}"]


def _one_run(
    config: GsWganConfig,
    plan: Plan,
    data: FederatedImages,
    num_rounds: int,
    output: Path,
    progress: Progress,
) -> tuple[list[Finding], str]:
    """Attack B; the findings and whether it ran."""
    config = as_audited(dataclasses.replace(config, num_rounds=num_rounds))
    # Another secret than the run's draws who takes part, so that the report tells
    # nothing about who took part in the run.
    config = dataclasses.replace(config, selection_key=secret())
    count = min(CANARIES, config.num_clients)
    drawn = Canaries.draw(config, count, config.relation, np.random.default_rng())
    progress.say(f"Attack B: training again with {count} canaries")
    with (
        # The second run trains on private data without being charged to anybody, so
        # nothing of it may stay. It lies in the run folder, which is its owner's alone.
        tempfile.TemporaryDirectory(prefix="one-run-", dir=output) as temporary,
        stop_on_signal() as stop,
    ):
        config = dataclasses.replace(config, output=f"{temporary}/run")
        report = progress.rounds(num_rounds, "B: round")
        try:
            found = audit_run(
                config,
                plan,
                data,
                drawn,
                config.delta,
                report,
                stop,
                num_audits=2,  # A of gradients, and B
            )
        except RunStopped as error:
            return [], f"not finished: {error}"
    return found, f"ran: {count} canaries, {num_rounds} rounds"


def _membership(
    folder: RunFolder,
    read: Records | None,
    progress: Progress,
) -> dict[str, Any] | str:
    """Attack C; why not, if it cannot run.

    Args:
        folder: the run's folder.
        read: the records of the run's data, where an attack before has read them.
        progress: the progress of the attacks.
    """
    progress.say("Attack C: membership inference on samples")
    config = folder.config
    if config.nodes is not None:
        return "skipped: the images of a deployed run are its clients', and not here"
    try:
        generator = samples.load_generator(folder)
        records = read or load_kept_records(config)
        test, _ = load_test_data(config, records)
        data = federate(config, records)
        # A fixed seed: two audits of the same run give the same numbers.
        rng = np.random.default_rng(0)
        members = rng.permutation(np.concatenate(data.client_records))
        test = test[rng.permutation(len(test))]
        # As many members as others, so that guessing at random is right half the time.
        count = min(len(members), len(test), NUM_RECORDS)
        labels = samples.uniform_labels(config, NUM_SYNTHETIC, seed=0)
        drawn = samples.draw(config, generator, labels, seed=0)
        trained_on = to_float(data.images[members[:count]])
        return audit_samples(drawn, trained_on, test[:count])
    except UserError as error:
        # For example a run without a generator yet, or data without test images. The
        # audit of the guarantee does not depend on this attack.
        return f"skipped: {error}"
