"""Which settings contradict each other; `fedgs.config.fields` checks each alone.

Every check yields problems: a setting's name, and what is wrong with its value and what
to do. `refuse` makes the first one the UserError. This module imports no tensor
library.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

from fedgs.config.amplification_rules import DEPLOYED, why_not_amplified
from fedgs.config.feature_settings import OF_MOMENTS
from fedgs.config.fields import Problem, refuse, shortened
from fedgs.config.integers import why_too_coarse
from fedgs.config.placement import read_sizes
from fedgs.config.plugins import GS_WGAN
from fedgs.config.rounds import rounds_alike
from fedgs.config.settings import IMAGE_SIZES, Settings
from fedgs.config.terms import Terms
from fedgs.files import NAME_RULE, is_plain_name

FEMNIST_CLASSES = ("all", "merged", "digits", "letters", "merged-letters")
# Sources whose format fixes the values of black and white.
OF_ONE_RANGE = (
    "digits",
    "fonts",
    "mnist",
    "fashion-mnist",
    "mnist-by-writer",
    "femnist",
)
DOWNLOADED = ("mnist", "fashion-mnist", "mnist-by-writer", "femnist", "hf")
NO_DOWNLOAD = "chest-xray is fetched by hand, from doi.org/10.17632/rscbjbr9sj"
DEVICE = r"cpu|cuda(:[0-9]{1,3})?"
NODE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"  # also a file's name: of its key
NODE_NAME_RULE = (
    "letters, digits, '.', '_' and '-', at most 63, a letter or digit first"
)


def model_problems(config: Settings) -> Iterator[Problem]:
    """Yields what is wrong with the shape of images and the device."""
    if config.image_size not in (None, *IMAGE_SIZES):
        yield "image_size", "give --image-size 16, 28, 32 or 64"
    if config.image_channels not in (None, 1, 3):
        yield "image_channels", "give --image-channels 1 or 3"
    if not re.fullmatch(DEVICE, config.device):
        yield "device", "give --device cpu, cuda, or cuda:1 for the second GPU"


def _class_problems(config: Settings, kind: str) -> Iterator[Problem]:
    if kind == "femnist" and config.classes not in FEMNIST_CLASSES:
        names = ", ".join(FEMNIST_CLASSES)
        yield "classes", f"give --classes one of {names} for femnist"
    if config.classes != "all" and kind not in ("femnist", "folder", "hf"):
        what = "only femnist, folder:PATH and hf:NAME have classes to choose"
        yield "classes", f"{what}, and data is {config.data!r}; leave out --classes"
    # A label is the place of its class in this list, so a name has to be there once.
    names = config.class_names
    if len(set(names)) < len(names) or "" in names:
        yield "classes", "give --classes each name once, as in cat,dog"
    wrong = [name for name in names if not is_plain_name(name)]
    # Names of folders: one with ".." or "/" would lead out of the data.
    if kind == "folder" and wrong:
        yield "classes", f"{wrong[0]!r} cannot be a folder's name; {NAME_RULE}"


def _picture_problems(config: Settings, kind: str) -> Iterator[Problem]:
    """Yields which settings of pictures contradict each other or their source."""
    if config.normalize and config.window is not None:
        why = "normalize = True takes black and white from each picture"
        yield "window", f"{why}; leave one of the two out"
    if kind not in OF_ONE_RANGE:
        return
    why = f"data = {config.data!r} has one range of values"
    if config.window is not None:
        yield "window", f"{why}; leave out --window"
    if config.normalize:
        yield "normalize", f"{why}; leave out --normalize"


def _held_out_problems(config: Settings) -> Iterator[Problem]:
    """Yields why what is held out is not known, or not found again."""
    if config.test_fraction and config.test_owners:
        yield (
            "test_owners",
            f"test_fraction = {config.test_fraction:g} holds out images of every "
            "owner as well; leave one of the two out",
        )
    if config.partitioner is None:
        return
    for name in ("test_fraction", "test_owners"):
        if getattr(config, name):
            yield (
                name,
                f"{config.partitioner} deals images in random order, so that an "
                "evaluation could not find the ones held out; leave out "
                f"--{name.replace('_', '-')}, or name a column of clients: --data "
                "hf:NAME?client=COLUMN",
            )


def data_problems(config: Settings) -> Iterator[Problem]:
    """Yields which settings of the data do not fit their source."""
    has_moments = any(phase.method in OF_MOMENTS for phase in config.phases)
    if config.public_data is not None and not has_moments:
        why = "no phase of moments starts from public data"
        yield "public_data", f"{why}; leave it out, or give --phases with moments"
    kind = config.data.partition(":")[0]
    if config.download:
        if kind == "chest-xray":
            yield "download", f"{NO_DOWNLOAD}; leave out --download"
        elif kind not in DOWNLOADED:
            yield "download", f"{kind} is never downloaded; leave out --download"
        elif config.data_dir is None and kind not in ("femnist", "hf"):
            yield "download", "give --data-dir, the folder to download into"
    yield from _class_problems(config, kind)
    yield from _picture_problems(config, kind)
    yield from _held_out_problems(config)
    # Of a deployment, the data are known to its clients only.
    if config.nodes is None:
        yield from same_source_problems(config)
    is_shuffled = config.partition in ("iid", "dirichlet")
    if config.cohort is not None and is_shuffled:
        why = f"partition = {config.partition} makes clients that no file can name"
        yield "cohort", f"{why}; leave one of the two out"
    if config.cohort_value is not None and not (config.cohorts or config.nodes):
        yield "cohort_value", "give --cohorts, the file that assigns owners to cohorts"
    if config.cohorts is not None and is_shuffled:
        why = f"partition = {config.partition} makes clients that no file can name"
        yield "cohorts", f"{why}; leave one of the two out"
    if config.partitioner is not None and is_shuffled:
        why = f"it would replace the clients of {config.partitioner}"
        yield "partition", f"{why}; leave one of the two out"


def node_size_problems(config: Settings) -> Iterator[Problem]:
    """Yields whether the nodes host another number of clients than there are."""
    if config.node_sizes is None:
        return
    hosted = sum(read_sizes(config.node_sizes))
    if hosted != config.num_clients:
        yield (
            "node_sizes",
            f"these nodes host {hosted} clients, but num_clients is "
            f"{config.num_clients}; give --node-sizes whose sum is that number, or "
            f"--num-clients {hosted}",
        )


def federation_problems(config: Settings) -> Iterator[Problem]:
    """Yields what is wrong with the clients, nodes and participants of a round."""
    num_clients = config.num_clients
    per_round = config.clients_per_round
    if config.client_selection == "all":
        if num_clients is not None and per_round not in (None, num_clients):
            what = f"client_selection = all means all {num_clients} clients"
            yield "clients_per_round", f"{what}; leave out --clients-per-round"
    elif per_round is None:
        why = f"client_selection = {config.client_selection} needs"
        yield "clients_per_round", f"{why} --clients-per-round"
    elif num_clients is not None and per_round > num_clients:
        most = f"num_clients = {num_clients}"
        yield "clients_per_round", f"give --clients-per-round at most {most}"
    min_answers = config.min_answers or 0
    # Without the number of clients, `num_nodes` is not known yet.
    if num_clients is not None and min_answers > config.num_nodes:
        most = f"the {config.num_nodes} nodes of this run"
        yield "min_answers", f"give --min-answers at most {most}"
    depends_on_others = config.partition in ("by-client", "dirichlet")
    if config.privacy_unit == "record" and depends_on_others:
        yield (
            "privacy_unit",
            f"partition = {config.partition} lets a record move others between "
            "clients; give --partition iid or --privacy-unit client",
        )


def node_problems(config: Settings) -> Iterator[Problem]:
    """Yields what is wrong with the names of a deployment's nodes."""
    names = config.node_names
    if not names:
        return
    for name in names:
        if not re.fullmatch(NODE_NAME, name):
            remedy = f"give --client names of {NODE_NAME_RULE}"
            yield "nodes", f"{name!r} is no name of a node; {remedy}"
    if len(set(names)) < len(names):
        yield "nodes", "give each node its own name"
    if config.engine != "flower":
        why = f"engine = {config.engine} has no deployed nodes"
        yield "nodes", f"{why}; use `fedgs deploy submit`, which names them"
    if config.num_clients is not None and config.num_nodes != len(names):
        yield (
            "nodes",
            f"there are {len(names)} names, but num_clients = {config.num_clients} "
            f"with {_nodes(config)} needs {config.num_nodes} nodes; give "
            "--num-clients and --clients-per-node, or --node-sizes, that fit",
        )


def _nodes(config: Settings) -> str:
    if config.node_sizes is None:
        return f"clients_per_node = {config.clients_per_node}"
    return f"node_sizes = {shortened(config.node_sizes)}"


def privacy_problems(config: Settings) -> Iterator[Problem]:
    """Yields what is wrong with the noise, the accounting's conditions, the basis."""
    if config.target_epsilon is not None and config.noise_multiplier == 0:
        why = "no finite target_epsilon can hold"
        yield "noise_multiplier", f"{why}; leave one of the two out"
    if config.privacy_unit == "record" and config.relation == "zero-out":
        yield (
            "relation",
            "if one record contributes nothing, the whole answer of its shard may "
            "change, so only replace-one can be bounded; give --relation replace-one",
        )
    if config.amplification:
        yield from _amplification_problems(config)
    if config.secure_aggregation:
        yield from _aggregation_problems(config)


def _amplification_problems(config: Settings) -> Iterator[Problem]:
    if config.nodes is not None:
        yield (
            "amplification",
            f"refused: nodes = {shortened(config.nodes)}: {DEPLOYED}; leave out "
            "--amplification",
        )
    reason = why_not_amplified(
        config.client_selection,
        config.discriminator_training,
        config.largest_node,
        config.clients_per_round,
        config.num_clients,
    )
    if not reason and config.adversary != "release":
        reason = f"adversary = {config.adversary} sees who takes part"
    if reason:
        remedy = "leave out --amplification, or change that"
        yield "amplification", f"refused: {reason}; {remedy}"


def _aggregation_problems(config: Settings) -> Iterator[Problem]:
    """Yields why the server would learn more than a sum, or a sum too coarse."""
    remedy = "leave out --secure-aggregation, or change that"
    if config.amplification:
        why = (
            "nodes learn who else is asked, but amplification needs that nobody "
            "learns it"
        )
        yield "secure_aggregation", f"{why}; {remedy}"
    clients = config.clients_per_round
    if config.client_selection == "all" or clients is None:
        clients = config.num_clients
    if clients is None or config.num_clients is None:
        return
    # The local engine adds in one process, which sees everything anyway.
    fewest = config.hosting.fewest_nodes(clients)
    if config.min_answers:
        fewest = min(fewest, config.min_answers)
    if config.engine != "local" and fewest < 2:
        why = "a round may have only one node, so that no sum hides its answer"
        yield "secure_aggregation", f"{why}; {remedy}"
    if config.noise_multiplier is None:
        return
    for terms in _known_terms(config):
        numbers = math.prod(terms.shape[1:])
        units = config.units(terms)
        why = why_too_coarse(terms.noise_multiplier, units, numbers)
        if why:
            yield "secure_aggregation", why
        # One client's cohort decides the weights of others, which are rounded anew: by
        # half of a clip bound at most, which replace-one has to spare.
        largest = config.hosting.largest
        changed = largest * math.sqrt(numbers / terms.num_groups)
        if terms.num_groups > 1 and units < 2 * changed:
            why = f"{units} units of a clip bound are too coarse for groups of a node"
            remedy = "give nodes fewer clients, or less noise"
            yield "secure_aggregation", f"{why} of {largest} clients; {remedy}"


def _known_terms(config: Settings) -> list[Terms]:
    """Returns the terms of all rounds; without classes those that have none of them."""
    # What is too coarse for the smallest image is too coarse for all.
    config = dataclasses.replace(
        config,
        image_size=config.image_size or IMAGE_SIZES[0],
        image_channels=config.image_channels or 1,
    )
    if config.num_classes is not None:
        return [alike.terms for alike in rounds_alike(config)]
    found: list[Terms] = []
    for index in range(len(config.phases)):
        own = config.at_phase(index)
        if own.method == GS_WGAN:  # others' shapes have the number of classes
            found.append(own.phase_terms(1))
    return found


def same_source_problems(config: Settings) -> Iterator[Problem]:
    """Yields whether `public_data` names the private images in other words."""
    public = config.public_data
    if public is not None and _source(public) == _source(config.data):
        yield (
            "public_data",
            f"by its name, it contains images of data = {config.data!r}, which the run "
            "would show without noise; give data of other people",
        )


def _source(data: str) -> str:
    """Returns what settings that name the same images have in common.

    MNIST, QMNIST, EMNIST and FEMNIST are of the same writers: all are cut from NIST's
    Special Database 19.
    """
    kind, _, where = data.partition(":")
    if kind == "hf":
        where = where.partition("?")[0]  # options choose columns, not images
    path = Path(where).expanduser()
    # hf:NAME is a data set of the hub, or a folder in its format.
    is_folder_of_hub = kind == "hf" and path.is_dir()
    is_local = kind in ("npz", "folder") or is_folder_of_hub
    if where and is_local:
        return str(path.resolve())
    if kind == "hf":
        name = where.lower()
    else:
        name = kind
    if re.search("fashion.?mnist", name):
        return "fashion-mnist"
    if re.search("(?<![a-z])(q|e|fe)?mnist", name):
        return "nist"
    return name


def check_data(config: Settings) -> None:
    """Checks the settings of the data alone; `RunConfig.validate` checks all.

    Raises:
        UserError: they do not fit their source.
    """
    refuse(config, data_problems(config))


# What a plan of releases has to satisfy, whatever trains by it.
OF_PLANS = (node_size_problems, federation_problems, privacy_problems)
CHECKS = (model_problems, data_problems, *OF_PLANS, node_problems)
