"""From the settings that a user gives to a run that can start.

`resolve` loads the data and fixes every open value; `check_capacity` refuses what the
machine cannot hold; `new_run` makes the folder after both, so they write nothing.
"""

import dataclasses
import math
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from fedgs.cohorts.cohort_file import selection_costs
from fedgs.config.amplification_rules import PUBLIC_SELECTION
from fedgs.config.checks import model_problems
from fedgs.config.fields import refuse
from fedgs.config.method_settings import settings_with
from fedgs.config.recipes import HELD_OUT, OWNERS_HELD_OUT, moments_for
from fedgs.config.rounds import rounds_alike
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.config.settings import GIVEN
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data
from fedgs.data.records import DataWarning
from fedgs.data.sources import (
    READERS,
    has_few_images_each,
    has_test_split,
    with_absolute_path,
)
from fedgs.deployment import MOST_ANSWER_BYTES
from fedgs.errors import UserError
from fedgs.gan.models import build_discriminator
from fedgs.gan.torchvision_network import with_weights
from fedgs.methods import phase_with_discriminators
from fedgs.methods.public_data import digests, public_start
from fedgs.privacy.accountant import Plan
from fedgs.privacy.budget import calibrate_noise
from fedgs.privacy.selection_cost import SelectionCost, Target
from fedgs.runs.run_folder import RunFolder, check_free

Load = Callable[[RunConfig], FederatedImages]


def new_run(
    config: RunConfig,
    load: Load = load_data,
    name: str = "run",
) -> tuple[RunFolder, FederatedImages]:
    """Makes the folder of a run that can start, and loads its data.

    Args:
        config: the settings; without `output` the folder is made in `runs/`.
        load: the function that loads the data.
        name: begins the name of a folder in `runs/`.

    Raises:
        UserError: bad input; nothing was written.
    """
    # Last: whatever is refused above leaves no folder behind.
    resolved, data = planned_run(config, load, name)
    return RunFolder.create(resolved), data


def planned_run(
    config: RunConfig,
    load: Load = load_data,
    name: str = "run",
) -> tuple[ResolvedConfig, FederatedImages]:
    """Returns the settings of a run that can start, and its data; writes nothing.

    Args:
        config: see `new_run`, as for `load` and `name`.
        load: the function that loads the data.
        name: the folder's name.

    Raises:
        UserError: bad input.
    """
    config = free_output(config, name)
    resolved, data = resolve(with_absolute_paths(config), load=load)
    check_capacity(resolved, Path(resolved.output).parent)
    return resolved, data


def free_output(config: RunConfig, name: str) -> RunConfig:
    """Returns settings with the name of a run folder that does not exist yet.

    Args:
        config: without `output` the folder is one in `runs/`.
        name: begins the name of a folder in `runs/`.

    Raises:
        UserError: the folder exists.
    """
    if not config.output:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        data_name = config.data.split(":")[0]
        output = f"runs/{name}-{data_name}-{stamp}"
        config = dataclasses.replace(config, output=output)
    check_free(config.output)
    return config


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Returns settings whose paths hold from any working directory."""
    found = {
        name: str(Path(path).expanduser().absolute())
        for name in settings_with("path")
        if (path := getattr(config, name))
    }
    if config.public_data is not None:
        found["public_data"] = with_absolute_path(config.public_data)
    return dataclasses.replace(config, **found, data=with_absolute_path(config.data))


def resolve(
    config: RunConfig,
    data: FederatedImages | None = None,
    load: Load = load_data,
) -> tuple[ResolvedConfig, FederatedImages]:
    """Loads the data and fixes every open setting: shape, K, m, seed, noise.

    Privacy: public, but for the data itself.

    Args:
        config: the settings.
        data: the data that they describe, if they are loaded already.
        load: loads it else.

    Raises:
        UserError: settings that contradict each other, the data or the machine.
    """
    # Checked before the data are loaded, which may take long, and again with them.
    config = with_weights(_with_seed(config.validate()))
    if config.amplification and config.noise_seed is not None:
        remedy = "leave out --amplification or --noise-seed"
        raise UserError(f"amplification = True: refused: {PUBLIC_SELECTION}; {remedy}")
    if data is None:
        data = load(config)
    # Before the data fill in what was left open: afterwards nobody could tell it from
    # what the user gave.
    counted = ",".join(_counted(config))
    config = _with_test_owners(config, data)
    config = _with_partition(_with_participants(config, data.num_clients), data)
    channels, side, _ = data.images.shape[1:]
    config = dataclasses.replace(
        config,
        image_size=side,
        image_channels=channels,
        num_classes=data.num_classes,
    ).validate()
    resolved = dataclasses.replace(with_noise(config), counted=counted)
    _check_public(resolved, data)
    return resolved, data


def _counted(config: RunConfig) -> Iterator[str]:
    """Yields the settings that are left to the data, where it is the user's own."""
    # Numbers of a published data set are public already.
    kind = config.data.partition(":")[0]
    if kind not in (*READERS, GIVEN):
        return
    if config.num_clients is None:
        yield "num_clients"
    if kind in ("femnist", "chest-xray"):
        return  # their format fixes all that follows
    if config.num_classes is None and config.classes == "all":
        yield "num_classes"
    if config.image_size is None:
        yield "image_size"
    if config.image_channels is None:
        yield "image_channels"
    if config.test_owners is None:
        yield "test_owners"


def _check_public(config: ResolvedConfig, data: FederatedImages) -> None:
    """Refuses public images that are private ones, or their negatives.

    Raises:
        UserError: with their number; or as `public_start`.
    """
    _, public = public_start(config)
    if not public:
        return
    # By hashes, so that comparing all images with all others is quick.
    count = len(public & digests(data.images))
    if count:
        raise UserError(
            f"public_data = {config.public_data!r}: {count} of its images occur in the "
            "private data, and the run would show them without noise; give data of "
            "other people"
        )


def resolve_deployed(config: RunConfig) -> ResolvedConfig:
    """Fixes every open setting of a deployed run, whose data the server does not see.

    Images are grey unless the settings say otherwise; a client with others refuses.

    Args:
        config: with the names of its nodes.

    Raises:
        UserError: settings that contradict each other, or that data would have told.
    """
    for name in ("num_classes", "image_size"):
        if getattr(config, name) is None:
            raise UserError(
                f"{name} is unset: the server of a deployment sees no data; give "
                f"--{name.replace('_', '-')}"
            )
    if config.image_channels is None:
        config = dataclasses.replace(config, image_channels=1)
    num_clients = config.num_clients
    if num_clients is None:
        num_clients = len(config.node_names) * config.clients_per_node
    config = _with_seed(_with_participants(config, num_clients))
    resolved = with_noise(with_weights(config.validate()))
    check_answer(resolved)
    public_start(resolved)  # refuses data that do not fit, before anything is started
    return resolved


def check_answer(config: ResolvedConfig) -> None:
    """Refuses a deployed run whose answers weigh more than its server reads.

    Raises:
        UserError: with both weights.
    """
    shapes = [alike.terms.shape for alike in rounds_alike(config)]
    weight = 4 * max(map(math.prod, shapes))  # numbers of 32 bits
    if weight > MOST_ANSWER_BYTES:
        raise UserError(
            f"batch_size = {config.batch_size}: an answer of this run has "
            f"{weight / 2**20:.0f} MiB, but a server reads at most "
            f"{MOST_ANSWER_BYTES / 2**20:.0f}; give smaller batches, images or networks"
        )


def fitted_to_data(
    config: RunConfig,
    given: Mapping[str, Any],
    load: Load = load_data,
) -> tuple[RunConfig, FederatedImages]:
    """Fits the default recipe to what is public of the data, and loads them.

    There are as many low frequencies, and parts of classes or not, as number of
    clients, nodes and noise pay for.

    Privacy: public, but for the data.

    Args:
        config: the configuration of the recipe, with a target epsilon.
        given: settings that stay.
        load: the function that loads the data.

    Returns:
        The settings, with a seed, and the data that they describe.

    Raises:
        UserError: as of `resolve`.
    """
    # The seed is fixed now, because it also decides how the data are split, and they
    # are not loaded again.
    config = with_absolute_paths(_with_seed(config))
    resolved, data = resolve(config, load=load)
    # Over the settings as they were given, not the resolved ones: these have noise for
    # the phases of before, and the noise is calibrated anew for the fitted ones.
    return dataclasses.replace(config, **moments_for(resolved, given)), data


def with_held_out(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Returns settings with the share to hold out, the same by any recipe.

    It is `HELD_OUT` of every owner's images where scores need it and owners may: not
    where the data have a test split, nor of images that a program gives, which scores
    and holds out there. An owner then never holds out all: noise falls with the number
    of owners, not of images.

    Of a source that is published as one whose owners have one or two images each, it is
    `OWNERS_HELD_OUT` of the owners: a share of so few images would be none. Whether the
    user's own data are such, they tell when they are read; not where the number of
    clients is given, which is then that of all owners.

    Privacy: public. It depends on the name of the source and on no image of it.

    Args:
        config: the configuration of a recipe.
        given: names of settings that stay.
    """
    if {"test_fraction", "test_owners"} & {*given}:
        return config
    is_refused = config.privacy_unit == "record" or config.partitioner is not None
    is_scored = config.data == GIVEN or has_test_split(config)
    fraction = 0.0
    owners: float | None = 0.0
    if is_refused or is_scored:
        pass
    elif has_few_images_each(config.data) and config.num_clients is None:
        owners = OWNERS_HELD_OUT
    else:
        fraction = HELD_OUT
        # Only the user's own data are not known in advance, so they decide it.
        kind = config.data.partition(":")[0]
        if kind in ("folder", "npz") and config.num_clients is None:
            owners = None
    return dataclasses.replace(config, test_fraction=fraction, test_owners=owners)


def _with_seed(config: RunConfig) -> RunConfig:
    if config.seed is not None:
        return config
    return dataclasses.replace(config, seed=secrets.randbelow(2**31))


def _with_participants(config: RunConfig, num_clients: int) -> RunConfig:
    """Returns the settings with K, and with m where all take part."""
    per_round = config.clients_per_round
    if config.client_selection == "all" and per_round is None:
        per_round = num_clients
    return dataclasses.replace(
        config,
        num_clients=num_clients,
        clients_per_round=per_round,
    )


def _with_test_owners(config: RunConfig, data: FederatedImages) -> RunConfig:
    """Returns the settings with the shares that were held out of the data."""
    if config.test_owners is not None:
        return config
    if not data.holds_out_owners:
        return dataclasses.replace(config, test_owners=0.0)
    return dataclasses.replace(config, test_owners=OWNERS_HELD_OUT, test_fraction=0.0)


def _with_partition(config: RunConfig, data: FederatedImages) -> RunConfig:
    """Returns the settings with what `auto` was; warns where owners are cut."""
    if data.owners == "cut":
        cut = f"partition = {config.partition}"
    else:
        cut = ""
    if config.is_dealt:
        cut = f"data = {config.data!r}"
    if cut:
        warnings.warn(
            f"{cut}: a client is a shard, not a person, and may have images of many "
            "owners; k shards of one owner cost k times mu. To protect whole owners, "
            "let each be a client: --partition by-client, or hf:NAME?client=COLUMN",
            DataWarning,
            stacklevel=2,
        )
    if config.partition != "auto" or config.is_dealt:
        return config
    if data.owners == "kept":
        found = "by-client"
    else:
        found = "iid"
    return dataclasses.replace(config, partition=found)


def with_noise(config: RunConfig) -> ResolvedConfig:
    """Returns the configuration with the noise that its target_epsilon asks for.

    All other settings that a run needs are set already.

    A `noise_multiplier` given beside `target_epsilon` stays: the target is then a
    budget that stops the run. The target includes a private selection of the cohort.

    Privacy: computed from the plan, never from data.

    Raises:
        UserError: neither is given, the target cannot be met, or one client is alone.
    """
    is_alone = config.num_clients == 1 and config.privacy_unit == "client"
    if is_alone and config.noise_multiplier != 0:
        raise UserError(
            "num_clients = 1: with one client there is no privacy; give data of more "
            "owners, or --privacy-unit record with --partition iid"
        )
    selections = selection_costs([config])
    target = config.target_epsilon
    if config.noise_multiplier is not None:
        if target is not None:
            # The selection of the cohort alone may have spent it already.
            Target.of(config, selections).check()
        return ResolvedConfig.from_flat({}, config)
    if target is None:
        raise UserError(
            "noise_multiplier is unset: give --noise-multiplier (0 for a run without "
            "privacy) or --target-epsilon"
        )
    # A plan needs some noise; the calibration does not read it.
    plan = Plan.from_config(dataclasses.replace(config, noise_multiplier=1.0))
    noise_multiplier = calibrate_noise(
        plan,
        target_epsilon=target,
        delta=config.delta,
        adversary=config.adversary,
        relation=config.relation,
        selections=selections,
    )
    own = {"noise_multiplier": noise_multiplier}
    resolved = ResolvedConfig.from_flat(own, config).validate()
    # The method states its terms itself, so what was calibrated is checked with them.
    _check_calibrated(resolved, selections)
    return resolved


def _check_calibrated(
    config: ResolvedConfig,
    selections: Sequence[SelectionCost],
) -> None:
    """Refuses a method whose noise does not follow the calibrated multiplier.

    Raises:
        UserError: its terms at this noise multiplier cost more than the target.
    """
    asked = Target.of(config, selections)
    plan = Plan.from_config(config)
    if plan.amplification:
        return  # of GS-WGAN alone, whose terms are proportional
    ratio = plan.ratio(asked.adversary, asked.relation, 0)
    law, _, _ = plan.law(config.client_selection, ratio)
    # The multiplier was rounded up; its terms may be rounded by a last bit.
    if asked.least_ratio(law) > ratio * (1 + 1e-9):
        raise UserError(
            f"target_epsilon = {config.target_epsilon:g}: the noise of phases = "
            f"{config.methods} is not proportional to noise_multiplier, so it cannot "
            "be calibrated; give --noise-multiplier"
        )


def check_device(config: RunConfig) -> None:
    """Refuses a device that this machine does not have.

    Raises:
        UserError: there is no such device.
    """
    refuse(config, model_problems(config))
    number = int(config.device.partition(":")[2] or 0)
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
    else:
        count = 0
    if config.device != "cpu" and number >= count:
        if count:
            there = f"{count} GPUs are here, from 0 on"
        else:
            there = "no GPU is here"
        raise UserError(f"device = {config.device}: {there}; give --device cpu")


def check_capacity(config: ResolvedConfig, folder: Path) -> None:
    """Refuses a run whose discriminators fit neither memory nor disk.

    Raises:
        UserError: with the estimate and what is there.
    """
    check_device(config)
    state = state_bytes(config)
    if config.device == "cpu":
        held = int(state * copies_in_memory(config))
        limits = {"memory": (held, psutil.virtual_memory().available)}
    else:
        limits = {"GPU memory": (state, torch.cuda.mem_get_info()[0])}
    # The run's folder is made later: its disk is that of the nearest one above it.
    while not folder.exists():
        folder = folder.parent
    # The committed states, the newest ones, and those that the next save overwrites.
    limits["disk"] = (3 * state, shutil.disk_usage(folder).free)
    for what, (needed, there) in limits.items():
        if needed > there:
            phase = phase_with_discriminators(config)
            if phase is None:
                width = None
            else:
                width = phase.config.discriminator_dim
            raise UserError(
                f"discriminator_dim = {width}: the discriminators of "
                f"{clients_needed(config)} clients need about {needed / 1e9:.1f} GB "
                f"of {what}, {there / 1e9:.1f} GB are free; give a smaller "
                "--discriminator-dim, --num-clients or --num-rounds"
            )


def copies_in_memory(config: ResolvedConfig) -> float:
    """Returns how often memory holds the discriminators; workers may share a node."""
    if config.engine == "local":
        return 1
    of_one = config.hosting.most_clients(nodes_in_memory(config))
    copies = config.num_workers * of_one / config.num_clients
    return min(max(2.0, copies), config.num_workers)


def nodes_in_memory(config: ResolvedConfig) -> int:
    """Returns how many nodes a worker of a simulation keeps in memory at most."""
    return math.ceil(config.num_nodes / config.num_workers) + 1


def clients_needed(config: ResolvedConfig) -> int:
    """Returns how many clients' discriminators the run makes at most."""
    phase = phase_with_discriminators(config)
    if phase is None:
        return 0
    if config.discriminator_training == "every_round" or config.is_warm_start_public:
        return config.num_clients
    nodes = min(config.num_nodes, config.clients_per_round * config.num_rounds)
    return config.hosting.most_clients(nodes)


def state_bytes(config: ResolvedConfig) -> int:
    """Returns the size of the run's discriminators with their Adam moments."""
    if not (count := clients_needed(config)):
        return 0
    phase = phase_with_discriminators(config)
    assert phase is not None  # noqa: S101 - else no client needs any
    params = build_discriminator(phase.config, 0).parameters()
    # Each parameter with its two moments, in 4 bytes.
    return count * 3 * 4 * sum(param.numel() for param in params)
