"""Which settings contradict each other; `fedgs.config.fields` checks each alone.

Every check raises UserError naming the setting, its value and the remedy. This module
imports no tensor library.
"""

import re

from fedgs.config.conditions import DEPLOYED, REFUSAL_TELLS, why_not_amplified
from fedgs.config.hosting import read_sizes, shortened
from fedgs.config.settings import Settings
from fedgs.errors import UserError

FEMNIST_CLASSES = ("all", "merged", "digits", "letters", "merged-letters")
NODE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"  # also a file's name: of its key
NODE_NAME_RULE = (
    "letters, digits, '.', '_' and '-', at most 63, a letter or digit first"
)


def check_model(config: Settings) -> None:
    """Checks the shapes of images and the device."""
    if config.image_size not in (16, 28, 32, 64):
        raise UserError(
            f"image_size = {config.image_size}: give --image-size 16, 28, 32 or 64"
        )
    if config.image_channels not in (1, 3):
        raise UserError(
            f"image_channels = {config.image_channels}: give --image-channels 1 or 3"
        )
    if config.device.split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"device = {config.device!r}: give --device cpu or cuda")


def _check_classes(config: Settings, kind: str) -> None:
    shown = f"classes = {config.classes!r}"
    if kind == "femnist" and config.classes not in FEMNIST_CLASSES:
        raise UserError(
            f"{shown}: give --classes one of {', '.join(FEMNIST_CLASSES)} for femnist"
        )
    if config.classes != "all" and kind not in ("femnist", "folder", "hf"):
        raise UserError(
            f"{shown}: only femnist, folder:PATH and hf:NAME have classes to choose, "
            f"data = {config.data!r} has not; leave out --classes"
        )
    names = config.class_names
    if len(set(names)) < len(names) or "" in names:
        raise UserError(f"{shown}: give --classes each name once, as in cat,dog")


def check_data(config: Settings) -> None:
    """Checks that the settings of the data fit their source."""
    kind = config.data.partition(":")[0]
    if config.download and config.data_dir is None and kind not in ("femnist", "hf"):
        raise UserError("download = True: give --data-dir, the folder to download into")
    _check_classes(config, kind)
    for name in ("hf_options", "partitioner", "partitioner_options"):
        value = getattr(config, name)
        flag = f"--{name.replace('_', '-')}"
        if value is not None and kind != "hf":
            raise UserError(
                f"{name} = {value!r}: is for --data hf:NAME, not for "
                f"{config.data!r}; leave out {flag}"
            )
    if config.partitioner is not None and config.test_fraction:
        raise UserError(
            f"test_fraction = {config.test_fraction}: partitioner = "
            f"{config.partitioner!r} shuffles who has which image, and an evaluation "
            "could not find those held out; leave out --test-fraction, or name a "
            "column of clients: --hf-options \"client='NAME'\""
        )
    if config.cohort is not None and config.partition in ("iid", "dirichlet"):
        raise UserError(
            f"cohort = {config.cohort!r}: partition = {config.partition} makes clients "
            "that no file can name; leave one of the two out"
        )
    if config.partitioner_options is not None and config.partitioner is None:
        raise UserError(
            f"partitioner_options = {config.partitioner_options!r}: give --partitioner"
        )
    if config.partitioner is not None and config.partition in ("iid", "dirichlet"):
        raise UserError(
            f"partitioner = {config.partitioner!r}: partition = {config.partition} "
            "would replace its clients; leave one of the two out"
        )


def check_node_sizes(config: Settings) -> None:
    """Checks the number of clients of each node."""
    if config.node_sizes is None:
        return
    hosted = sum(read_sizes(config.node_sizes))
    if hosted != config.num_clients:
        raise UserError(
            f"node_sizes = {shortened(config.node_sizes)}: these nodes host {hosted} "
            f"clients, num_clients = {config.num_clients}; give --node-sizes whose sum "
            f"is that number, or --num-clients {hosted}"
        )


def check_federation(config: Settings) -> None:
    """Checks the clients, nodes and participants of a round."""
    num_clients, per_round = config.num_clients, config.clients_per_round
    if config.client_selection == "all":
        if num_clients is not None and per_round not in (None, num_clients):
            raise UserError(
                f"clients_per_round = {per_round}: client_selection = all means all "
                f"{num_clients} clients; leave --clients-per-round out"
            )
    elif per_round is None:
        raise UserError(
            f"clients_per_round is unset: client_selection = {config.client_selection} "
            "needs --clients-per-round"
        )
    elif num_clients is not None and per_round > num_clients:
        raise UserError(
            f"clients_per_round = {per_round}: give --clients-per-round at most "
            f"num_clients = {num_clients}"
        )
    min_nodes = config.min_nodes or 0
    if num_clients is not None and min_nodes > config.num_nodes:
        raise UserError(
            f"min_nodes = {min_nodes}: give --min-nodes at most the "
            f"{config.num_nodes} nodes of this run"
        )
    if config.privacy_unit == "record" and config.partition in (
        "by-client",
        "dirichlet",
    ):
        raise UserError(
            f"privacy_unit = record: partition = {config.partition} lets a record "
            "move others between clients; give --partition iid or --privacy-unit client"
        )


def check_nodes(config: Settings) -> None:
    """Checks the names of a deployment's nodes."""
    names = config.node_names
    if not names:
        return
    for name in names:
        if not re.fullmatch(NODE_NAME, name):
            raise UserError(
                f"nodes = {config.nodes!r}: {name!r} is no name of a node; give "
                f"--nodes names of {NODE_NAME_RULE}"
            )
    if len(set(names)) < len(names):
        raise UserError(f"nodes = {config.nodes!r}: give each node its own name")
    if config.engine != "flower":
        raise UserError(
            f"nodes = {config.nodes!r}: engine = {config.engine} has no deployed "
            "nodes; leave out --nodes, or use `fedgs deploy submit`"
        )
    if config.num_clients is not None and config.num_nodes != len(names):
        raise UserError(
            f"nodes = {config.nodes!r}: {len(names)} names, but num_clients = "
            f"{config.num_clients} with {_nodes(config)} needs {config.num_nodes} "
            "nodes; give --num-clients and --clients-per-node, or --node-sizes, that "
            "fit"
        )


def _nodes(config: Settings) -> str:
    if config.node_sizes is None:
        return f"clients_per_node = {config.clients_per_node}"
    return f"node_sizes = {shortened(config.node_sizes)}"


def check_privacy(config: Settings) -> None:
    """Checks the noise, the accounting's conditions and the basis."""
    if config.target_epsilon is not None and config.noise_multiplier == 0:
        raise UserError(
            "noise_multiplier = 0: no finite target_epsilon can hold; "
            "leave one of the two out"
        )
    if config.amplification:
        _check_amplification(config)
    if config.colluding_nodes:
        _check_collusion(config)
    if config.gradient_basis == "dct" and config.dct_size > config.image_size:
        raise UserError(
            f"dct_size = {config.dct_size}: give --dct-size at most "
            f"image_size = {config.image_size}"
        )


def _check_amplification(config: Settings) -> None:
    if config.nodes is not None:
        raise UserError(
            f"amplification = True: refused: nodes = {shortened(config.nodes)}: "
            f"{DEPLOYED}; leave out --amplification; in a run folder that exists, set "
            '"amplification": false in its config.json'
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
    if not reason and config.client_epsilon is not None:
        reason = f"client_epsilon: {REFUSAL_TELLS}"
    if reason:
        remedy = "leave out --amplification, or change that"
        raise UserError(f"amplification = True: refused: {reason}; {remedy}")


def _check_collusion(config: Settings) -> None:
    colluding = config.colluding_nodes
    if config.engine == "local":
        raise UserError(
            f"colluding_nodes = {colluding}: engine = local has no secagg adversary; "
            "leave out --colluding-nodes"
        )
    clients = config.clients_per_round or config.num_clients
    if clients is not None and config.num_clients is not None:
        nodes = config.hosting.fewest_nodes(clients)
        nodes = min(nodes, config.min_nodes or nodes)
        if colluding > nodes:
            raise UserError(
                f"colluding_nodes = {colluding}: give --colluding-nodes at most the "
                f"{nodes} nodes of a round whose noise counts"
            )


def check_training(config: Settings) -> None:
    """Checks the fakes of a round."""
    fakes = config.fakes_per_round
    if fakes is not None and fakes < config.batch_size:
        raise UserError(
            f"fakes_per_round = {fakes}: give --fakes-per-round at least "
            f"batch_size = {config.batch_size}"
        )


def check_runtime(config: Settings) -> None:
    """Checks the use of a GPU."""
    if config.gpu_fraction and config.device == "cpu":
        raise UserError(
            f"gpu_fraction = {config.gpu_fraction}: give --device cuda with it"
        )


def check_submitted(config: Settings) -> None:
    """Refuses a deployed run whose selection every client could compute.

    Raises:
        UserError: selection_seed is set: Flower sends all settings to every client.
    """
    if config.selection_seed is not None:
        raise UserError(
            f"selection_seed = {config.selection_seed}: Flower hands a submitted run's "
            "settings to every client; leave out --selection-seed, the server draws it"
        )


CHECKS = (
    check_model,
    check_data,
    check_node_sizes,
    check_federation,
    check_nodes,
    check_privacy,
    check_training,
    check_runtime,
)
