"""What a run would do and cost, said before it spends an epsilon: `train --dry-run`."""

import contextlib
import dataclasses
import itertools
import math
import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from fedgs.app.commands.privacy_words import ABSURD_EPSILON, legend, without_public
from fedgs.app.commands.run_outcome import in_words, near
from fedgs.app.commands.terminal import say
from fedgs.app.tables import Table
from fedgs.cohorts.cohort_file import selection_costs
from fedgs.config.feature_settings import OF_MOMENTS, OF_TRUNKS
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.data.sources import has_test_split
from fedgs.errors import first_n
from fedgs.gan import refinement
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.features import KINDS
from fedgs.gan.fit import Fit
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.methods import PhaseAt, new_state, phases_of
from fedgs.methods.base import Hosted, Method, State
from fedgs.methods.feature_means import refined
from fedgs.methods.schedule import EVERYONE
from fedgs.privacy.accountant import SEEDED, in_short, large_delta, statements
from fedgs.privacy.plan import Plan
from fedgs.privacy.rounding import upper
from fedgs.process import keep_freed_memory
from fedgs.randomness import secret
from fedgs.round.answer import answer_of, most_signal_to_noise, summed
from fedgs.round.checkpoint import server_tensors
from fedgs.round.preparation import clients_needed, copies_in_memory, state_bytes
from fedgs.runs.data_card import NO_GUARANTEE

PROCESS_BYTES = 5e8  # a process with torch
FLOAT_BYTES = 4
FEW_BYTES = 5e5  # of all small files of a run: ledger, settings, previews
# Start and end of a run, by engine
FEW_SECONDS = 5.0
FLOWER_SECONDS = 20.0
TIMED_SECONDS = 1.0  # of a few clients' rounds, by which all rounds are estimated
TIMED_IMAGES = 200  # of the first clients, by which a release of all is estimated
FEWEST_STEPS = 4  # of a fit that are timed, of which the shortest counts
# Noise of a release of features over what it would be if an embedding held nothing but
# numbers of images: 1.7 to 2.6 where owners have all classes.
LONGER = 2.0
OUTSIDE = "No epsilon covers the scores, because they are computed from private images."


def choice(config: ResolvedConfig) -> str:
    """Returns the line that says what was fitted to the clients."""
    clients = config.num_clients
    return f"Fitted to {clients} clients and {target(config)}: {_moments(config)}."


def _moments(config: ResolvedConfig) -> str:
    size = getattr(config, "moment_size", None)  # of phases of moments alone
    if size is None:
        return config.methods
    return f"moment_size {size}"


def target(config: ResolvedConfig) -> str:
    """Returns the target epsilon with all that it depends on."""
    return (
        f"epsilon {upper(config.target_epsilon, 6)} ({config.adversary}, "
        f"{config.relation}, delta {upper(config.delta, 6)}, unit: {unit_of(config)})"
    )


def unit_of(config: ResolvedConfig) -> str:
    """Returns what one unit of privacy of a run is, in a few words."""
    return in_short(config.unit_condition)


def _public(config: ResolvedConfig) -> str:
    """Returns what is public, without the word that every condition begins with."""
    conditions = config.public_conditions or ("nothing but the settings",)
    return "; ".join(without_public(text) for text in conditions)


def evaluation_note(config: ResolvedConfig, data: FederatedImages) -> str:
    """Returns what a run can be evaluated on, or what to do so that it can."""
    if problem := _why_without_scores(config, data):
        return f"Evaluation will not be possible, because {problem}. {OUTSIDE}"
    if data.holds_out_owners and data.held_out_records is not None:
        return _note_on_owners(data, len(data.held_out_records))
    if not config.test_fraction and has_test_split(config):
        return "The run can be evaluated on the data's own test images."
    if not config.test_fraction:
        return (
            "No images are held out, so the run can be evaluated only on other images "
            "(`fedgs evaluate RUN --test npz:FILE`). To hold some out, give "
            f"--test-owners or --test-fraction. {OUTSIDE}"
        )
    whose = "the"
    if data.owners:
        whose = "every owner's"
    return (
        f"The run can be evaluated on {config.test_fraction:g} of {whose} images, "
        f"which it does not see (--test-fraction 0 trains on all). {OUTSIDE}"
    )


def _why_without_scores(config: ResolvedConfig, data: FederatedImages) -> str:
    """Returns why an evaluation would refuse the data, with a remedy; "" else.

    Classifiers are trained on what the run sees and tested on what is held out, so both
    need two classes.
    """
    trained_on = np.concatenate(data.client_records)
    if _has_one_class(data, trained_on):
        problem = "the images to train on have one class only, and scores need two"
        if config.test_fraction or config.test_owners:
            problem += " (--test-fraction 0 trains on all)"
        return problem
    held_out = data.held_out_records
    if held_out is None:
        return ""
    if config.test_owners:
        share = f"test_owners {config.test_owners:g}"
        few = "owners"
        remedy = "Give a larger --test-owners"
    else:
        share = f"test_fraction {config.test_fraction:g}"
        few = "images"
        remedy = "Give --test-owners, or a larger --test-fraction"
    # A share of few is rounded down, so it may hold out none.
    if not len(held_out):
        return f"{share} of so few {few} is less than one. {remedy}"
    if _has_one_class(data, held_out):
        return f"what {share} holds out has one class only. {remedy}"
    return ""


def _has_one_class(data: FederatedImages, records: NDArray[np.int64]) -> bool:
    labels = data.labels[records]
    return len(np.unique(labels)) == 1


def _note_on_owners(data: FederatedImages, count: int) -> str:
    """Returns what a run that holds out whole owners can be evaluated on.

    Args:
        data: the run's data.
        count: the number of images of these owners.
    """
    owners = f"{len(data.test_owners)} owners"
    if not data.test_owners:  # the data name none, so each image is its own owner's
        owners = f"{count} images"
    return (
        f"The run can be evaluated on {owners} that it never sees (--test-owners 0 "
        f"trains on all). {OUTSIDE}"
    )


def warnings_of(
    config: ResolvedConfig,
    data: FederatedImages,
    target: float | None = None,
) -> Iterator[str]:
    """Yields what is allowed, but hardly what was meant.

    Privacy: reads labels; for their owner's eyes.

    Args:
        config: the run's configuration.
        data: the run's data.
        target: the epsilon that was asked for, where `config` does not say it.
    """
    yield from large_delta(config.delta, config.num_clients)
    epsilon = target or config.target_epsilon or 0.0
    if epsilon > ABSURD_EPSILON:
        yield f"target_epsilon = {epsilon:g} protects nobody; usual are 1 to 10"
    if config.num_clients == 1:
        yield "num_clients = 1: with one owner there is no privacy"
    if config.num_classes == 1:
        yield (
            "num_classes = 1: the data have no labels. In a folder, the outer names "
            "must be owners and the inner ones labels."
        )
    # Only images that are trained on count: a partition may leave others to nobody.
    owned = data.labels[np.concatenate(data.client_records)]
    per_class = np.bincount(owned, minlength=config.num_classes)
    is_used = per_class > 0
    empty = np.flatnonzero(~is_used)
    # Label 0 alone is missing: most likely the labels count from 1.
    if len(empty) and empty[0] == 0 and is_used[1:].all():
        yield "No image has label 0. Labels count from 0; subtract 1 if yours do not."
    elif len(empty):
        yield f"No image has label {first_n(empty)}, so such a class is only noise."


def duration(config: ResolvedConfig, data: FederatedImages) -> str:
    """Returns about how long a run takes on idle cores, in words.

    Privacy: reads images and their number; for their owner's eyes.
    """
    if config.engine == "local":
        seconds = FEW_SECONDS
    else:
        seconds = FLOWER_SECONDS
    server = new_state(config)
    for phase in phases_of(config):
        own = phase.config
        if own.method not in (*OF_MOMENTS, *OF_TRUNKS):
            seconds += seconds_of_rounds(config, phase, data)
            continue
        seconds += seconds_of_release(config, phase, data, server)
        if own.method in OF_TRUNKS:
            seconds += seconds_of_fit(config, own)
    by = "on idle cores, to judge by a small part of it that was timed here"
    return f"about {rounded_up(seconds)} {by}"


def rounded_up(seconds: float) -> str:
    """Returns a time in words.

    >>> rounded_up(61), rounded_up(200)
    ('70 seconds', '4 minutes')
    """
    # Rounded up, in the largest unit of which there are more than two: an estimate with
    # more digits would promise more than it can keep.
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds > 2 * size:
            return f"{math.ceil(seconds / size)} {unit}"
    return f"{math.ceil(seconds / 10) * 10} seconds"


def seconds_of_release(
    config: ResolvedConfig,
    phase: PhaseAt,
    data: FederatedImages,
    server: State,
) -> float:
    """Returns about how long a phase of one release takes, without its fit.

    The first clients answer for real, and the server learns from their noisy sum, so
    that the next phase finds what it needs.

    Privacy: reads private data; tells a time, for their owner's eyes. The sum is thrown
    away with the server's state.

    Args:
        config: the run's configuration.
        phase: whose clients answer once, in a time that grows with their images.
        data: the run's images.
        server: after the phases before; changed.
    """
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    clock = time.process_time  # does not grow with other work here
    config = _alone(config)
    own = config.at_phase(phase.config.phase_index)
    server.round = own.rounds_before
    images_so_far = data.sizes.cumsum()
    few = int(np.searchsorted(images_so_far, TIMED_IMAGES)) + 1
    few = min(few, data.num_clients)
    started = clock()
    request, pending = phase.method.begin(own, server)
    of_server = clock() - started
    # The first client's answer also loads and allocates what all others reuse.
    for clients in (range(1), range(few)):
        started = clock()
        answer = answer_of(config, Hosted(data, clients, 0), request)
        of_clients = clock() - started
    assert isinstance(answer, SanitizedGradients)  # without masks
    started = clock()
    released = summed(config, request.round, [answer])
    phase.method.finish(own, server, pending, released)
    of_server += clock() - started
    of_all = of_clients * images_so_far[-1] / max(images_so_far[few - 1], 1)
    return of_server + float(of_all) / _num_workers(config, config.num_nodes)


def _alone(config: ResolvedConfig) -> ResolvedConfig:
    """Returns a run's settings for a node that is asked here, and nowhere else."""
    # Masks need the keys of other nodes. A run's own secret is drawn when it is
    # created; this one is thrown away.
    return dataclasses.replace(config, secure_aggregation=False, selection_key=secret())


def _num_workers(config: ResolvedConfig, nodes: int) -> int:
    """Returns how many workers compute at a time for so many nodes."""
    if config.device != "cpu":
        return 1  # they share the card
    # More workers than nodes have nothing to do, and more than cores wait for each
    # other.
    return min(config.num_workers, nodes, os.cpu_count() or 1)


class _Timed(Exception):
    """Enough steps of a fit were timed."""


def seconds_of_fit(config: ResolvedConfig, phase: Any) -> float:
    """Returns about how long a refiner's fit takes: its steps, by a few real ones.

    Privacy: public. The steps fit to zeros, and change a generator of their own.

    Args:
        config: the run's configuration.
        phase: the phase of features.
    """
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    generator, average = refined(new_state(config))
    release = refinement.nothing_released(phase, LONGER)
    at = [(time.process_time(), time.thread_time())]

    def check(step: int, steps: int) -> None:
        at.append((time.process_time(), time.thread_time()))
        begun, _ = at[0]
        now, _ = at[-1]
        if step >= FEWEST_STEPS and now - begun > TIMED_SECONDS:
            raise _Timed

    with contextlib.suppress(_Timed):
        refinement.refine(phase, release, generator, average, Fit(check))
    cores = min(refinement.THREADS, os.cpu_count() or 1)
    times: list[float] = []
    for before, after in itertools.pairwise(at):
        of_all = after[0] - before[0]
        alone = after[1] - before[1]  # while the threads have nothing to do
        times.append(alone + (of_all - alone) / cores)
    steps, _, _ = refinement.schedule(release)
    return steps * min(times)


def seconds_of_rounds(
    config: ResolvedConfig,
    phase: PhaseAt,
    data: FederatedImages,
) -> float:
    """Returns about how long a phase of many rounds takes, with its warm start.

    A round is the server's part, and a client's for each client that trains. A round of
    the warm start is a client's part; a local one, with its own generator, is both.
    Discriminators that are frozen or do not answer are taken for ones that do.

    Privacy: reads private data; tells a time, for their owner's eyes.
    """
    if config.discriminator_training == "every_round":
        clients = config.num_clients
    else:
        clients = config.clients_per_round
    nodes = min(config.num_nodes, clients)
    of_server, of_client = timed_round(config, phase, data, clients // nodes)
    workers = _num_workers(config, nodes)
    warm = of_client
    if not config.is_warm_start_public:
        # Every client has a generator of its own, and draws what the server would.
        warm += of_server
    warm *= clients_needed(config) * config.warm_start_rounds
    starts = config.first_rounds
    index = phase.config.phase_index
    rounds = starts[index + 1] - starts[index]
    # The server's part runs alone; the clients' parts share the workers.
    of_all_clients = rounds * clients * of_client + warm
    return rounds * of_server + of_all_clients / workers


def timed_round(
    config: ResolvedConfig,
    phase: PhaseAt,
    data: FederatedImages,
    on_node: int,
) -> tuple[float, float]:
    """Returns seconds of the server's part of a round, and of each of a few clients."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    clock = time.process_time  # does not grow with other work here
    config = _alone(config)
    if phase.method.has_discriminators:
        config = dataclasses.replace(config, discriminator_training="selected")
    method: Method[Any] = phase.method
    own: Any = config.at_phase(phase.config.phase_index)
    # One stack of clients: a node with more of them trains stack after stack.
    hosted = range(min(on_node, method.stack_size(own)))
    if method.has_discriminators:
        nets = Discriminators(own, hosted)
    else:
        nets = None
    hosting = Hosted(data, hosted, 0, nets)
    server = new_state(config)
    server.round = own.rounds_before
    times: list[tuple[float, float]] = []
    while sum(map(sum, times)) < TIMED_SECONDS:
        started = clock()
        request, pending = method.begin(own, server)
        # Whoever the schedule chose, all hosted clients work, else no time is measured.
        asked = dataclasses.replace(request, participants=EVERYONE, trainees=EVERYONE)
        asked_at = clock()
        answer = answer_of(config, hosting, asked)
        of_clients = clock() - asked_at
        assert isinstance(answer, SanitizedGradients)  # without masks
        released = summed(config, request.round, [answer])
        method.finish(own, server, pending, released)
        of_server = clock() - started - of_clients
        times.append((of_server, of_clients / len(hosted)))
    # The least time, because the first round also allocates what later ones reuse.
    least_of_server = min(of_server for of_server, _ in times)
    least_of_client = min(of_client for _, of_client in times)
    return least_of_server, least_of_client


def show(config: ResolvedConfig, data: FederatedImages) -> None:
    """Prints what a run would do; nothing is written, nothing is spent."""
    _show(config, lines(config, data))
    say("This was a dry run: nothing was written, and no privacy was spent.")


def show_deployed(config: ResolvedConfig) -> None:
    """Prints what a run in a deployment would do; nothing is sent, nothing is spent.

    Privacy: public; whoever submits a run sees no data.
    """
    said = lines_of_settings(config)
    said["time"] = "depends on the clients' machines and images"
    fits = [phase.config for phase in phases_of(config)]
    fits = [own for own in fits if own.method in OF_TRUNKS]
    if fits:
        seconds = sum(seconds_of_fit(config, own) for own in fits)
        said["time"] += (
            f"; then about {rounded_up(seconds)} on the server, if it is an idle "
            "machine like this one"
        )
    _show(config, said)
    say("This was a dry run: nothing was sent, and no privacy was spent.")


def _show(config: ResolvedConfig, said: Mapping[str, str]) -> None:
    rows = stated(config)
    if not rows:
        said = {**said, "privacy": no_guarantee(config)}
    for name, value in said.items():
        say(f"{name + ':':15}{value}")
    if not rows:
        return
    caption = f"epsilon at delta {upper(config.delta, 6)}, unit: {unit_of(config)}"
    words = legend([row[0] for row in rows], [row[1] for row in rows])
    head = ["adversary", "relation", "epsilon"]
    Table(caption, head, rows, "\n".join(words)).show()


def signal_note(config: ResolvedConfig) -> str:
    """Returns the most signal-to-noise that each kind of release can have, in words.

    Privacy: public.
    """
    firsts = config.first_rounds[:-1]  # of each phase
    most = {round: most_signal_to_noise(config, round) for round in firsts}
    return f"at most {in_words(config, most)} (in power), if all clients agree"


def stated(config: ResolvedConfig) -> list[list[str]]:
    """Returns adversary, relation and epsilon of every guarantee that a plan has.

    What secure aggregation would give is none where it is not planned.
    """
    plan = Plan.from_config(config)
    costs = selection_costs([config])
    rows: list[list[str]] = []
    for row in statements(plan, config.delta, selections=costs):
        is_own = row.guarantee and not row.is_hypothetical
        if is_own and row.epsilon is not None:
            rows.append([row.adversary, row.relation, upper(row.epsilon)])
    return rows


def lines(config: ResolvedConfig, data: FederatedImages) -> dict[str, str]:
    """Returns what a run would do and need, in words by what they are about.

    Privacy: reads images and their number; for their owner's eyes.
    """
    state = state_bytes(config)
    if config.engine == "local":
        processes = 1
        copies = 1
    else:
        # Flower's own processes run beside the workers. Each worker loads the images
        # for itself, and this process has loaded them for the checks.
        processes = config.num_workers + 3
        copies = config.num_workers + 1
    said = lines_of_settings(config)
    said["time"] = duration(config, data)
    # This process holds the images and has just taken steps of the run's own fit, so
    # the most that it has held is what the process of a run that fits will hold.
    own_bytes = most_bytes_held() - data.images.nbytes
    held = (processes - 1) * PROCESS_BYTES + max(PROCESS_BYTES, own_bytes)
    held += copies * data.images.nbytes
    held += state * copies_in_memory(config)
    folder = near(Path(config.output))
    said["memory"] = f"about {held / 1e9:.1f} GB"
    said["disk"] = f"about {math.ceil(bytes_on_disk(config) / 1e6)} MB in {folder}"
    if not config.compares_groups:
        said["evaluation"] = evaluation_note(config, data)
    return said


def most_bytes_held() -> int:
    """Returns the most memory that this process has held so far."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux
    return kibibytes * 1024


def bytes_on_disk(config: ResolvedConfig) -> float:
    """Returns about how large the folder of a finished run is.

    Privacy: public; of the settings alone.
    """
    server = new_state(config)
    generator = _num_bytes(server.generator.state_dict().values())
    checkpoint = _num_bytes(server_tensors(server).values())
    for part in server.parts.values():
        if isinstance(part, Optimizer):
            for group in part.param_groups:  # Adam has two moments of each value
                checkpoint += 2 * _num_bytes(group["params"])
    for phase in phases_of(config):
        own = phase.config
        if own.method in KINDS:
            release = refinement.nothing_released(own, LONGER)
            checkpoint += _num_bytes(release.tensors().values())
    # A node keeps its last two answers, to send one again that was lost.
    answers = 0
    for round in range(max(1, config.num_rounds - 1), config.num_rounds + 1):
        shape = config.at_round(round).phase_terms(round).shape
        answers += FLOAT_BYTES * math.prod(shape)
    # Three copies of the discriminators: the committed ones, the newest, and those that
    # the next save overwrites.
    of_clients = 3 * state_bytes(config)
    of_nodes = config.num_nodes * answers
    return 2 * generator + checkpoint + of_nodes + of_clients + FEW_BYTES


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def lines_of_settings(config: ResolvedConfig) -> dict[str, str]:
    """Returns what the settings alone say of a run, in words by what they are about.

    Privacy: public.
    """
    size = config.image_size
    return {
        "rounds": (
            f"{config.num_rounds}, each with {config.clients_per_round} of "
            f"{config.num_clients} clients; engine {config.engine}"
        ),
        "images": (
            f"{config.image_channels} x {size} x {size}, {config.num_classes} classes"
        ),
        "protected": unit_of(config),
        "public": _public(config),
        "signal/noise": signal_note(config),
    }


def no_guarantee(config: ResolvedConfig) -> str:
    """Returns why a run guarantees nothing, as its privacy label will say."""
    reason = "epsilon is unbounded"
    if config.noise_seed is not None:
        reason = f"noise {SEEDED}"
    elif not config.noise_multiplier:
        reason = "epsilon is unbounded, because there is no noise"
    return f"none; {NO_GUARANTEE}: {reason}"
