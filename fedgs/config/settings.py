"""The settings that all runs share, and what follows from them alone.

A method's own are of a class over this one (`fedgs.config.method_settings`).

The field names are the public names: TOML keys, command-line flags (with `-` for `_`),
Flower's `[tool.flwr.app.config]` and the run folder's `config.json` all use them.
`fedgs.config.fields.option` declares one field and its range, `fedgs.config.checks`
checks combinations, `fedgs.config.run_config` reads and writes. This module imports no
tensor library.
"""

import bisect
import dataclasses
import functools
import typing
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from fedgs.config.fields import (
    NOISE,
    SMALLEST_CLIP,
    Problem,
    check_range,
    coerced,
    entry,
    option,
)
from fedgs.config.hub import HubSource, read_hub
from fedgs.config.integers import clip_units
from fedgs.config.phases import Phase, read_phases
from fedgs.config.placement import Placement, hosting, read_sizes
from fedgs.config.plugins import GS_WGAN, load, settings_of_method
from fedgs.config.terms import Terms
from fedgs.config.window import read_window
from fedgs.errors import UserError

# GS-WGAN source/config.py defaults, as published (Chen, Orekondy, Fritz, NeurIPS 2020).
REFERENCE_NOISE_MULTIPLIER = 1.07
REFERENCE_NUM_CLIENTS = 1000
REFERENCE_NUM_ROUNDS = 20_000

WITH_ROUNDS = "feature-means-gs-wgan"  # the default recipe, and rounds after it
GIVEN = "given"  # the setting `data` where a program gave the images itself
IMAGE_SIZES = (16, 28, 32, 64)  # sides that generators and discriminators are made for
GROUPS = (
    *("Data", "Federation", "Privacy", "Training", "GS-WGAN", "Debugging", "Model"),
    "Runtime",
)

PAD = "pad"
CROP = "crop"
STRETCH = "stretch"
FITS = (PAD, CROP, STRETCH)  # ways to make a picture square
PARTS_OF_CLASS = 4  # Gaussians of each class, where a phase releases parts
# More are mistakes of a key: arrays of them overflow before they are refused.
MOST_WIDTH = 8192

# The names of `fedgs.data.transformations`, which loads what this module must not.
CORRUPTIONS = (
    *("none", "invert", "rotate", "rotate-180", "rotate-270"),
    *("mirror", "upside-down", "transpose", "anti-transpose"),
    *("blur", "noise", "contrast", "brightness", "gamma", "shift", "crop", "border"),
    *("blank", "scale", "low-resolution", "compression"),
    *("swap-labels", "shift-labels", "mislabel"),
)


@dataclass(frozen=True)
class Settings:
    """The settings that the runs of all methods have; use `RunConfig`.

    Nothing here may be computed from private data.
    """

    # Data
    data: str = option(
        "digits",
        "Data",
        "Images to use: digits, fonts, mnist, fashion-mnist, mnist-by-writer, "
        "femnist, chest-xray, femnist:PATH, chest-xray:PATH, folder:PATH, npz:PATH or"
        " hf:NAME.",
        traits=("images", "owners", "clients", "reading", "of_client", "stays"),
    )
    data_dir: str | None = option(
        None,
        "Data",
        "Folder with MNIST/raw, ChestXRay or other data sets; for femnist and hf:NAME"
        " the Hugging Face cache.",
        traits=("clients", "reading", "of_client", "stays", "path", "machine"),
    )
    download: bool = option(
        False,
        "Data",
        "Download the data set into data_dir if it is missing, and in `fedgs evaluate` "
        "the weights of fid_inception_v3_pool3 too.",
        traits=("reading", "of_client", "machine"),
    )
    background: str = option(
        "auto",
        "Data",
        "Background of the source images. Images with a light background are "
        "inverted. auto means light for femnist and dark for all other data.",
        traits=("images", "reading", "of_client"),
        choices=("auto", "dark", "light"),
    )
    fit: str = option(
        PAD,
        "Data",
        "Way in which a picture is made square: pad adds background, crop keeps the "
        "middle, stretch distorts the picture.",
        traits=("images", "reading", "of_client"),
        choices=FITS,
    )
    window: str | None = option(
        None,
        "Data",
        "Pixel values LOW,HIGH that become black and white. Pictures of 16 bits need "
        "them. Default: 0,255, or the window that a DICOM file contains. Example: "
        "0,4095.",
        traits=("images", "reading", "of_client"),
    )
    normalize: bool = option(
        False,
        "Data",
        "Stretch the contrast of each picture: its 1st percentile becomes black and "
        "its 99th white.",
        traits=("images", "reading", "of_client"),
    )
    classes: str = option(
        "all",
        "Data",
        "Classes to use. For femnist: all (62), merged (36; upper and lower case are "
        "one class), digits (10), letters (52) or merged-letters (26). For "
        "folder:PATH and hf:NAME: the names of the classes in the order of their "
        "labels. Example: cat,dog.",
        traits=("images", "owners", "clients", "reading", "of_client"),
    )
    test_fraction: float = option(
        0.0,
        "Data",
        "Share of each owner's images to keep for evaluation. Default: 0.1 in `fedgs "
        "train` without test split and test_owners, else 0.",
        traits=("owners", "clients", "reading", "of_client"),
        at_least=0,
        below=1,
    )
    test_owners: float | None = option(
        0.0,
        "Data",
        "Share of owners to keep for evaluation, by a hash of their names. Default: "
        "0.2 in `fedgs train` if most have up to 5 images, else 0.",
        traits=("owners", "clients", "reading", "of_client"),
        at_least=0,
        below=1,
    )
    partition: str = option(
        "auto",
        "Data",
        "Way in which images are dealt to clients: by-client (each owner is a "
        "client), iid or dirichlet (random shards). auto means by-client if the data "
        "name their owners.",
        traits=("clients", "of_client"),
        choices=("auto", "iid", "by-client", "dirichlet"),
    )
    image_size: int | None = option(
        None,
        "Data",
        "Side of the square images, 16, 28, 32 or 64, to which pictures are resized. "
        "Default: their own.",
        traits=("images",),
        at_least=16,
    )
    image_channels: int | None = option(
        None,
        "Data",
        "Number of colour channels: 1 for grey, 3 for RGB. Default: 1 if all pictures"
        " are grey, 3 if all are in colour.",
        traits=("images",),
        at_least=1,
        at_most=3,
    )
    num_classes: int | None = option(
        None,
        "Data",
        "Number of classes. Default: the number in the data.",
        traits=("images", "reading"),
        at_least=1,
        at_most=1_000_000,
    )
    cohort: str | None = option(
        None,
        "Data",
        "Text file with the names of the clients to use, one on each line. "
        "num_clients then counts only these.",
        traits=("of_client", "stays", "path"),
    )

    cohorts: str | None = option(
        None,
        "Data",
        "CSV file that assigns each owner to a cohort, such as the version of an app."
        " It begins with the line `owner,cohort`. It stays with the client: no server"
        " reads it.",
        traits=("of_client", "stays", "path"),
    )
    cohort_value: str | None = option(
        None,
        "Data",
        "Cohort to use: a value in the file that --cohorts names. num_clients then "
        "counts only the clients of this cohort.",
        traits=("clients",),
    )

    # Federation
    num_clients: int | None = option(
        None,
        "Federation",
        "Number of clients (units of privacy). Default: all clients of the data, if "
        "data are read.",
        traits=("clients", "mechanism"),
        at_least=1,
    )
    clients_per_round: int | None = option(
        1,
        "Federation",
        "Number of clients that take part in a round, from 1 to num_clients. Default:"
        " all clients if client_selection is all.",
        traits=("mechanism",),
        at_least=1,
    )
    client_selection: str = option(
        "uniform",
        "Federation",
        "Rule that selects the clients of a round: uniform (random, as in the paper),"
        " balanced (each equally often) or all.",
        traits=("mechanism",),
        choices=("uniform", "balanced", "all"),
    )
    clients_per_node: int = option(
        1,
        "Federation",
        "Number of clients on one node. A node adds noise once, to the sum over its "
        "clients.",
        traits=("mechanism",),
        at_least=1,
    )
    node_sizes: str | None = option(
        None,
        "Federation",
        "Number of clients on each node, if nodes differ. This replaces "
        "clients_per_node, and the sum is num_clients. Example: 120,45,300.",
        traits=("mechanism",),
    )
    privacy_unit: str = option(
        "client",
        "Federation",
        "What the guarantee protects as a whole: one client with all of its images, "
        "or one record (an image with its label).",
        traits=("mechanism",),
        choices=("client", "record"),
    )
    min_answers: int | None = option(
        None,
        "Federation",
        "Number of nodes that must answer, else the round is discarded. Default: all "
        "nodes.",
        traits=("mechanism",),
        at_least=1,
    )
    round_timeout: float = option(
        600.0,
        "Federation",
        "Number of seconds to wait for the nodes in a round.",
        above=0,
    )
    message_precision: str = option(
        "exact",
        "Federation",
        "Precision of messages: exact (float32) or compact (fewer bytes: fakes in 8 "
        "bits, sanitized gradients rounded to eighths of the noise). It changes the "
        "result.",
        choices=("exact", "compact"),
    )

    # Privacy
    noise_multiplier: float | None = option(
        None,
        "Privacy",
        "Strength of the noise, if no target epsilon sets it: its standard deviation "
        "is 2 * clip_bound * noise_multiplier.",
        traits=("mechanism",),
        **NOISE,
    )
    target_epsilon: float | None = option(
        None,
        "Privacy",
        "Privacy budget (epsilon) of the whole run; it sets the noise. A smaller one "
        "protects more.",
        above=0,
    )
    adversary: str = option(
        "release",
        "Privacy",
        "Adversary against whom target_epsilon holds: release (sees what is "
        "published), server (sees each answer), secagg (a server that sees only sums)"
        " or unmasked (secagg, but masks fail).",
        choices=("release", "server", "secagg", "unmasked"),
    )
    relation: str = option(
        "replace-one",
        "Privacy",
        "Change of a client that epsilon hides: to other data, or to none (zero-out).",
        choices=("replace-one", "zero-out"),
    )
    delta: float = option(
        1e-5,
        "Privacy",
        "Delta that belongs to every epsilon. It should be far below 1 / num_clients.",
        at_least=1e-300,
        below=1,
    )
    clip_bound: float = option(
        1.0,
        "Privacy",
        "Clip bound C: the largest L2 norm of the gradient for one fake image, or of "
        "one client's embedding.",
        traits=("mechanism",),
        at_least=SMALLEST_CLIP,
    )
    amplification: bool = option(
        False,
        "Privacy",
        "Count the random selection of clients as protection (adversary release "
        "only). You promise that nobody outside the server learns who was selected.",
        traits=("mechanism",),
    )
    secure_aggregation: bool = option(
        False,
        "Privacy",
        "Hide single answers from the server by masks, so that it learns only their "
        "sum.",
        traits=("mechanism",),
    )
    noise_seed: int | None = option(
        None,
        "Privacy",
        "Seed of the noise, for reproduction only: a run with it is not private. The "
        "selection of clients then follows from seed.",
        at_least=0,
    )

    # Training
    phases: tuple[Phase, ...] = option(
        (Phase(GS_WGAN),),
        "Training",
        "Phases of the run in their order, each with one method: METHOD, METHOD:SHARE"
        " or METHOD*ROUNDS:SHARE, separated by commas. SHARE is the phase's share of "
        "the privacy that the run spends (mu^2). In a TOML file, each phase is a "
        "table [[phases]]. Example: means:0.25,scatter:0.25,moments:0.5.",
    )
    num_rounds: int = option(
        REFERENCE_NUM_ROUNDS,
        "Training",
        "Number of rounds of all phases together.",
        traits=("mechanism",),
        at_least=1,
    )

    public_data: str | None = option(
        None,
        "Training",
        "Public images from which the moments start, with the same classes as the "
        "private ones: a value of data. Only the server reads them. Example: fonts.",
    )

    # Model
    generator: str = option(
        "resnet",
        "Model",
        "Kind of generator: resnet or dcgan (as in the paper), upsample (small and "
        "fast), gaussian (one Gaussian for each class, determined by moments), "
        "refined (a gaussian followed by a U-net) or coded (linear layers through a "
        "short code).",
        choices=("resnet", "dcgan", "upsample", "gaussian", "refined", "coded"),
    )
    generator_dim: int = option(
        64,
        "Model",
        "Width of the generator.",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    latent: str = option(
        "bernoulli",
        "Model",
        "Distribution of the generator's random input z: bernoulli (bits, as in the "
        "paper; 10 bits and 10 classes give at most 10,240 different images), normal,"
        " or uniform on [0, 1).",
        choices=("bernoulli", "normal", "uniform"),
    )
    latent_dim: int = option(
        10,
        "Model",
        "Length of the generator's random input z.",
        at_least=1,
    )

    # Runtime
    engine: str = option(
        "local",
        "Runtime",
        "Place where clients run: this process, or a Flower simulation.",
        traits=("mechanism", "machine"),
        choices=("local", "flower"),
    )
    output: str = option(
        "",
        "Runtime",
        "Run folder to create. Default: a new one in runs/.",
        traits=("stays", "path", "machine"),
    )
    seed: int | None = option(
        None,
        "Runtime",
        "Seed of first weights, latents and data order, but not of the noise. "
        "Default: drawn and recorded.",
        at_least=0,
    )
    device: str = option(
        "cpu",
        "Runtime",
        "Processor that trains: cpu or cuda.",
        traits=("of_client", "machine"),
    )
    num_workers: int = option(
        2,
        "Runtime",
        "Number of threads (local) or Ray actors (flower) that share the nodes. It "
        "does not change the result.",
        traits=("free", "machine"),
        at_least=1,
    )

    precision: str = option(
        "float32",
        "Runtime",
        "Precision of convolutions. bfloat16 is faster if the processor supports it, "
        "else slower.",
        choices=("float32", "bfloat16"),
    )

    # Set by recipes or commands, and never by people
    recipe: str = entry("", traits=("free",))  # whose name a run is told by
    phase_index: int | None = entry(None)  # of the phase at hand; None: a whole run
    nodes: str | None = entry(None)  # names of a deployment's, in their clients' order
    checkpoint_every: int | None = entry(None, traits=("free",), at_least=1)  # rounds
    selection_hash: str = entry("", traits=("stays",))  # of `selection_key`
    corruption: str = entry("none", choices=CORRUPTIONS)  # a planted bug
    corruption_unit: str = entry("client", choices=("client", "image", "node"))
    corruption_fraction: float = entry(0.5, at_least=0, at_most=1)  # of these units
    corruption_seed: int | None = entry(None, at_least=0)  # `seed` when unset

    def __post_init__(self) -> None:
        """Coerces and checks every field by itself; `node_sizes` implies `num_clients`.

        Raises:
            UserError: a value of the wrong type or outside its range.
        """
        object.__setattr__(self, "phases", read_phases(self.phases))
        hints = types_of(type(self))
        for spec in dataclasses.fields(self):
            if spec.name == "phases":
                continue
            value = coerced(spec.name, hints[spec.name], getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)
            if value is not None:
                check_range(spec, value)
        first_rounds(self.phases, self.num_rounds)  # refuses another number
        read_window(self.window)  # refuses what is no window
        if sizes := read_sizes(self.node_sizes):
            object.__setattr__(self, "node_sizes", ",".join(map(str, sizes)))
            if self.num_clients is None:
                object.__setattr__(self, "num_clients", sum(sizes))

    @property
    def is_drawn_in_secret(self) -> bool:
        """Whether who participates follows from a secret, which the run folder draws.

        With `noise_seed` it follows from `seed`: all of such a run can be made again.
        """
        return self.client_selection != "all" and self.noise_seed is None

    @property
    def window_limits(self) -> tuple[float, float] | None:
        """The values that become black and white, None without `window`."""
        return read_window(self.window)

    @property
    def hub(self) -> HubSource | None:
        """The Hugging Face data set that `data` names, None if it names none."""
        return read_hub(self.data)

    @property
    def partitioner(self) -> str | None:
        """The partitioner of flwr-datasets that makes the clients of a `hub` source."""
        return self.hub.partitioner if self.hub else None

    @property
    def is_dealt(self) -> bool:
        """Whether a partitioner deals images to clients that are no owners."""
        return self.partitioner not in (None, "NaturalIdPartitioner")

    @property
    def num_nodes(self) -> int:
        """Number of nodes that `num_clients` clients live on."""
        return self.hosting.num_nodes

    @property
    def hosting(self) -> Placement:
        """Which of the `num_clients` clients live on which node."""
        num_clients = _known(self.num_clients)
        return hosting(num_clients, self.clients_per_node, self.node_sizes)

    @property
    def largest_node(self) -> int:
        """Most clients that one node hosts; P where `num_clients` is unset."""
        if self.num_clients is None:
            return self.clients_per_node
        return self.hosting.largest

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes of a deployment, in their order; empty elsewhere."""
        if self.nodes is None:
            return ()
        return tuple(name.strip() for name in self.nodes.split(","))

    def node_title(self, node_id: int) -> str:
        """Returns what a node is called for people: its name, else "node 3"."""
        names = self.node_names
        if names:
            return names[node_id]
        return f"node {node_id}"

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels; empty for all."""
        if self.classes == "all":
            return ()
        # An accent may be typed as one character or two; NFC makes them the same.
        names = unicodedata.normalize("NFC", self.classes).split(",")
        return tuple(name.strip() for name in names)

    @property
    def noise_std(self) -> float:
        """Standard deviation of one node's noise, 2 * clip_bound * noise_multiplier."""
        return 2.0 * self.clip_bound * self.known_noise

    @property
    def known_noise(self) -> float:
        """The noise multiplier.

        Raises:
            UserError: it is unset.
        """
        if self.noise_multiplier is None:
            raise UserError(
                "noise_multiplier is unset: the noise depends on it; give "
                "--noise-multiplier or --target-epsilon"
            )
        return self.noise_multiplier

    # What a method's own settings may say otherwise.
    discriminator_training = "selected"
    batch_size = 1
    warm_start_rounds = 0
    releases_once = False  # the method has one round, whatever else a run has
    public_images: ClassVar[
        tuple[str, ...]
    ] = ()  # whose it looks at beside `public_data`

    @property
    def is_warm_start_public(self) -> bool:
        """Whether the warm start is on the server's first fakes."""
        return False

    @property
    def fakes_sent(self) -> int:
        """Number of fake images that one round sends to every participant."""
        return 0

    @property
    def num_parts(self) -> int:
        """Gaussians of each class of the generator `gaussian`."""
        if any(phase.method == "parts" for phase in self.phases):
            return PARTS_OF_CLASS
        return 1

    # ------------------------------------------------------------------ phases

    @property
    def method(self) -> str:
        """The method of the phase at hand; of a whole run, that of its last phase."""
        if self.phase_index is None:
            return self.phases[-1].method
        return self.phases[self.phase_index].method

    @property
    def methods(self) -> str:
        """The methods of all phases in their order, in words."""
        return ", ".join(phase.method for phase in self.phases)

    @property
    def earlier_phases(self) -> tuple[Phase, ...]:
        """The phases before the one at hand."""
        return self.phases[: self.phase_index]

    @property
    def first_rounds(self) -> tuple[int, ...]:
        """The first round of each phase, from 1, and the one after the last round."""
        return first_rounds(self.phases, self.num_rounds)

    @property
    def rounds_before(self) -> int:
        """Number of rounds of the phases before the one at hand."""
        return self.first_rounds[self.phase_index or 0] - 1

    def problems(self) -> Iterator[Problem]:
        """Yields which of a method's own settings contradict each other or others."""
        yield from ()

    def at_phase(self, index: int) -> Self:
        """Returns the settings of one phase, as its method sees them."""
        raise NotImplementedError("of `RunConfig`")

    def at_round(self, round: int) -> Self:
        """Returns `at_phase` of the phase that a round is in.

        Args:
            round: the round of the run, from 1. One beyond the last is like the last.
        """
        index = bisect.bisect_right(self.first_rounds, round) - 1
        return self.at_phase(min(max(index, 0), len(self.phases) - 1))

    def terms(self, round: int) -> Terms:
        """Returns what the release of a round is agreed to be.

        Args:
            round: the round of the run, from 1.

        Raises:
            UserError: noise_multiplier or num_classes is unset.
        """
        own = self.at_round(round)
        return own.phase_terms(round - own.rounds_before)

    def phase_terms(self, round: int) -> Terms:
        """Returns what a release of the phase at hand is agreed to be.

        Args:
            round: the round of the phase, from 1.

        Raises:
            UserError: noise_multiplier or num_classes is unset.
        """
        # Methods of fedgs state their terms in their settings' class, without torch;
        # this is for all others.
        terms: Terms = load("phases", self.method).terms(self, round)
        return terms

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape (channels, side, side) of an image.

        Raises:
            UserError: it is unset, and no data have been read yet.
        """
        if self.image_size is None or self.image_channels is None:
            names = "image_size and image_channels are unset"
            raise UserError(f"{names}: give --image-size and --image-channels, or data")
        return self.image_channels, self.image_size, self.image_size

    @property
    def is_masked(self) -> bool:
        """Whether nodes mask their sums: with secure aggregation in Flower."""
        return self.secure_aggregation and self.engine != "local"

    def units(self, terms: Terms) -> int:
        """Returns the units of a clip bound in a secure aggregation, 0 without one.

        Raises:
            UserError: clients_per_round or num_clients is unset.
        """
        if not self.secure_aggregation:
            return 0
        clients = self.clients_per_round
        if self.client_selection == "all" or clients is None:
            clients = _known(self.num_clients)
        return clip_units(terms.noise_multiplier, clients)


# Cached: the phase of a round is looked up for each event of a ledger.
@functools.lru_cache(maxsize=256)
def first_rounds(phases: tuple[Phase, ...], num_rounds: int) -> tuple[int, ...]:
    """Returns the first round of each phase, from 1, and the one after the last round.

    Raises:
        UserError: the phases have another number of rounds.
    """
    rounds = [_own_rounds(phase) for phase in phases]
    known = sum(count for count in rounds if count is not None)
    names = ", ".join(phase.method for phase in phases)
    if rounds.count(None) > 1:
        raise UserError(
            f"phases = {names}: two of them have no number of rounds; give "
            "METHOD*ROUNDS"
        )
    left = num_rounds - known
    if None in rounds and left < 1:
        raise UserError(
            f"num_rounds = {num_rounds}: the other phases of {names} have {known} "
            f"rounds; give --num-rounds at least {known + 1}"
        )
    if None not in rounds and left != 0:
        raise UserError(
            f"num_rounds = {num_rounds}: the phases {names} have {known} rounds; leave "
            f"out --num-rounds, or give --recipe {WITH_ROUNDS}, which has more of them"
        )
    starts = [1]
    for count in rounds:
        if count is None:
            count = left
        starts.append(starts[-1] + count)
    return tuple(starts)


def _own_rounds(phase: Phase) -> int | None:
    """Returns how many rounds a phase has, None where other phases leave them."""
    if not settings_of_method(phase.method).releases_once:
        return phase.rounds
    if phase.rounds not in (None, 1):
        problem = f"{phase.method} releases once, not {phase.rounds} times"
        raise UserError(f"phases: {problem}; leave its number of rounds out")
    return 1


def num_rounds_of(phases: Sequence[Phase], num_rounds: int) -> int:
    """Returns the rounds of all phases; those given where a phase has what is left."""
    rounds = [_own_rounds(phase) for phase in phases]
    if None in rounds:
        return num_rounds
    return sum(count or 0 for count in rounds)


@functools.cache
def types_of(kind: type[Settings]) -> dict[str, Any]:
    """Returns the types of a class of settings, by name."""
    return typing.get_type_hints(kind)


def _known(num_clients: int | None) -> int:
    if num_clients is None:
        raise UserError("num_clients is unset: give --num-clients or data with clients")
    return num_clients
