"""Every setting of a run as a field, and what follows from the fields alone.

The field names are the public names: TOML keys, command-line flags (with `-` for `_`),
Flower's `[tool.flwr.app.config]` and the run folder's `config.json` all use them.
`fedgs.config.fields.option` declares one field and its range, `fedgs.config.checks`
checks combinations, `fedgs.config.run_config` reads and writes. This module imports no
tensor library.
"""

import dataclasses
import functools
import typing
import unicodedata
from dataclasses import dataclass
from typing import Any

from fedgs.config.fields import NOISE, Trait, check_range, coerced, option, scalar_type
from fedgs.config.hosting import Hosting, hosting, read_sizes
from fedgs.config.integers import clip_units
from fedgs.config.stages import FEATURES, PARTS, Stage, Terms, read_stages
from fedgs.errors import UserError

# GS-WGAN source/config.py defaults, as published (Chen, Orekondy, Fritz, NeurIPS 2020).
REFERENCE_NOISE_MULTIPLIER = 1.07
REFERENCE_NUM_CLIENTS = 1000
REFERENCE_NUM_ROUNDS = 20_000
REFERENCE_WARM_START_ROUNDS = 2_000

GIVEN = "given"  # the setting `data` where a program gave the images itself
GROUPS = ("Data", "Federation", "Privacy", "Training", "Model", "Runtime")
DATA, FEDERATION, PRIVACY, TRAINING, MODEL, RUNTIME, *_traits = Trait
RESULT, ROUNDING, NO_RESULT, IMAGES, OWNERS, CLIENTS, READING, BUG, *_traits = _traits
MECHANISM, SEED, OF_CLIENT, STAYS, FREE, PATH, MACHINE = _traits

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
    """The settings of one run and what follows from them; use `RunConfig`.

    Nothing here may be computed from private data.
    """

    # Data
    data: str = option(
        "digits",
        DATA | RESULT | IMAGES | OWNERS | CLIENTS | READING | OF_CLIENT | STAYS,
        "digits, fonts, mnist, fashion-mnist, mnist-by-writer, femnist, "
        "femnist:PATH, folder:PATH, npz:PATH or hf:NAME.",
    )
    data_dir: str | None = option(
        None,
        DATA | NO_RESULT | CLIENTS | READING | OF_CLIENT | STAYS | PATH | MACHINE,
        "Folder in torchvision's layout, for example with MNIST/raw; for femnist and "
        "hf:NAME the Hugging Face cache.",
    )
    download: bool = option(
        False,
        DATA | NO_RESULT | READING | OF_CLIENT | MACHINE,
        "Download a missing data set into data_dir.",
    )
    polarity: str = option(
        "auto",
        DATA | RESULT | IMAGES | READING | OF_CLIENT,
        "What the source's background is; light is inverted. auto is light for "
        "femnist, else dark.",
        choices=("auto", "dark-background", "light-background"),
    )
    classes: str = option(
        "all",
        DATA | RESULT | IMAGES | OWNERS | CLIENTS | READING | OF_CLIENT,
        "Classes of femnist: all (62), merged (36, one case), digits (10), letters "
        "(52) or merged-letters (26). Of folder:PATH and hf:NAME: the names of the "
        "classes in the order of their labels. Example: cat,dog.",
    )
    test_fraction: float = option(
        0.0,
        DATA | RESULT | OWNERS | CLIENTS | READING | OF_CLIENT,
        "Share of every owner's images held out of training, the same in every run. "
        "Unless set, train and baseline hold out 0.1 of data without a test split.",
        at_least=0,
        below=1,
    )
    hf_options: str | None = option(
        None,
        DATA | RESULT | IMAGES | OWNERS | CLIENTS | READING | OF_CLIENT | STAYS,
        "Of hf:NAME, in TOML: image, label and client (columns), split, test_split, "
        "subset. Example: label='fine_label'.",
    )
    partitioner: str | None = option(
        None,
        DATA | RESULT | CLIENTS | OF_CLIENT,
        "Class of flwr_datasets.partitioner that makes the clients of hf:NAME.",
    )
    partitioner_options: str | None = option(
        None,
        DATA | RESULT | CLIENTS | OF_CLIENT,
        "Its arguments, in TOML. Example: num_partitions=10, alpha=0.5.",
    )
    partition: str = option(
        "auto",
        DATA | RESULT | CLIENTS | OF_CLIENT,
        "How records become clients; auto is by-client where the data has clients.",
        choices=("auto", "iid", "by-client", "dirichlet"),
    )
    dirichlet_alpha: float = option(
        0.5,
        DATA | RESULT | CLIENTS | OF_CLIENT,
        "Label skew of the dirichlet partition; smaller is more.",
        above=0,
    )
    image_size: int = option(
        28,
        DATA | RESULT | IMAGES,
        "Side of the square images: 16, 28, 32 or 64.",
        at_least=16,
    )
    image_channels: int = option(
        1, DATA | RESULT | IMAGES, "1 for grey, 3 for RGB.", at_least=1, at_most=3
    )
    num_classes: int | None = option(
        None,
        DATA | RESULT | IMAGES | READING,
        "Number of labels; taken from the data when unset.",
        at_least=1,
    )
    corruption: str = option(
        "none",
        DATA | RESULT | BUG,
        "A bug in the data, for experiments, as invert, rotate or blur.",
        choices=CORRUPTIONS,
    )
    corruption_unit: str = option(
        "client",
        DATA | RESULT | BUG,
        "What is corrupted at random: all images of a client, or single images.",
        choices=("client", "image"),
    )
    corruption_fraction: float = option(
        0.5,
        DATA | RESULT | BUG,
        "Probability that a client, or an image, is corrupted.",
        at_least=0,
        at_most=1,
    )
    corruption_seed: int | None = option(
        None,
        DATA | RESULT | BUG,
        "Decides what is corrupted; seed when unset.",
        at_least=0,
    )
    cohort: str | None = option(
        None,
        DATA | RESULT | OF_CLIENT | STAYS | PATH,
        "Use only the clients that this text file names, one a line; num_clients "
        "counts them.",
    )

    # Federation
    num_clients: int | None = option(
        None,
        FEDERATION | RESULT | CLIENTS | MECHANISM,
        "K, the units of privacy; all clients of the data when unset.",
        at_least=1,
    )
    clients_per_round: int | None = option(
        1,
        FEDERATION | RESULT | MECHANISM,
        "m, participants of a round, 1 to K.",
        at_least=1,
    )
    client_selection: str = option(
        "uniform",
        FEDERATION | RESULT | MECHANISM,
        "Who participates: uniform (the paper), balanced (equally often) or all.",
        choices=("uniform", "balanced", "all"),
    )
    selection_seed: int | None = option(
        None,
        FEDERATION | RESULT | SEED | STAYS,
        "Seed of who participates; seed when unset. In a deployment the server draws "
        "it and tells no client.",
        at_least=0,
    )
    discriminator_training: str = option(
        "selected",
        FEDERATION | RESULT | MECHANISM,
        "Whose discriminators train in a round: selected (the paper), "
        "every_round (all clients) or frozen (none after the warm start).",
        choices=("selected", "every_round", "frozen"),
    )
    clients_per_node: int = option(
        1,
        FEDERATION | RESULT | MECHANISM,
        "P, clients hosted by one node; the node adds noise once to their sum.",
        at_least=1,
    )
    node_sizes: str | None = option(
        None,
        FEDERATION | RESULT | MECHANISM,
        "Clients of each node, comma-separated, where nodes differ: 120,45,300. "
        "Replaces clients_per_node; num_clients is their sum.",
    )
    privacy_unit: str = option(
        "client",
        FEDERATION | RESULT | MECHANISM,
        "What one client stands for in the guarantee.",
        choices=("client", "record"),
    )
    min_nodes: int | None = option(
        None,
        FEDERATION | RESULT | MECHANISM,
        "A round counts when this many of its nodes answered; all when unset.",
        at_least=1,
    )
    round_timeout: float = option(
        600.0, FEDERATION | RESULT, "Seconds to wait for the nodes of a round.", above=0
    )
    transport: str = option(
        "exact",
        FEDERATION | RESULT,
        "How tensors travel: exact (float32), or compact: fakes in 8 bits, sanitized "
        "gradients in eighths of the noise, compressed. Changes the result.",
        choices=("exact", "compact"),
    )
    nodes: str | None = option(
        None,
        FEDERATION | NO_RESULT,
        "Names of the nodes of a deployment, comma-separated, in the order of their "
        "clients; unset in a simulation.",
    )

    # Privacy
    noise_multiplier: float | None = option(
        None,
        PRIVACY | RESULT | MECHANISM,
        "Noise per node and release: noise_std = 2 * clip_bound * noise_multiplier.",
        **NOISE,
    )
    target_epsilon: float | None = option(
        None,
        PRIVACY | RESULT,
        "Find the smallest noise for this epsilon over all rounds.",
        above=0,
    )
    adversary: str = option(
        "release",
        PRIVACY | RESULT,
        "Against whom target_epsilon holds.",
        choices=("release", "server", "secagg", "unmasked"),
    )
    relation: str = option(
        "replace-one",
        PRIVACY | RESULT,
        "Neighbouring relation of target_epsilon.",
        choices=("replace-one", "zero-out"),
    )
    delta: float = option(
        1e-5, PRIVACY | RESULT, "delta of every epsilon.", at_least=1e-300, below=1
    )
    clip_bound: float = option(
        1.0,
        PRIVACY | RESULT | MECHANISM,
        "C, the largest L2 norm of one fake's gradient, or of one client's embedding.",
        above=0,
    )
    batch_size: int = option(
        32, PRIVACY | RESULT | MECHANISM, "B, fakes answered by a release.", at_least=1
    )
    gradient_basis: str = option(
        "pixels",
        PRIVACY | RESULT,
        "Clip and noise pixels (the paper) or a low-frequency DCT block.",
        choices=("pixels", "dct"),
    )
    dct_size: int = option(
        14,
        PRIVACY | RESULT,
        "Side k of the k x k DCT block; never tuned on private data.",
        at_least=1,
    )
    amplification: bool = option(
        False,
        PRIVACY | RESULT | MECHANISM,
        "Count the random selection as protection (release adversary only): promises "
        "that nobody outside the server learns who was selected.",
    )
    colluding_nodes: int = option(
        0,
        PRIVACY | RESULT,
        "Nodes of a round whose noise the secagg adversary knows.",
        at_least=0,
    )
    client_epsilon: float | None = option(
        None,
        PRIVACY | RESULT,
        "A client refuses releases beyond this epsilon, by its own count (server "
        "adversary, relation and delta as above).",
        above=0,
    )
    client_limits: str | None = option(
        None,
        PRIVACY | RESULT | STAYS | PATH,
        "TOML file of what a client agrees to, checked by the client itself.",
    )
    secure_aggregation: bool = option(
        False,
        PRIVACY | RESULT | MECHANISM,
        "The server learns only the sum over a round's nodes: integers, discrete noise "
        "and masks.",
    )
    secure_noise: bool = option(
        True,
        PRIVACY | RESULT,
        "Draw unseeded noise by the sampler against floating-point attacks.",
    )
    noise_seed: int | None = option(
        None,
        PRIVACY | RESULT | SEED,
        "Seed of the noise, for reproduction only: a seeded run is not private.",
        at_least=0,
    )

    # Training
    num_rounds: int = option(
        REFERENCE_NUM_ROUNDS,
        TRAINING | RESULT | MECHANISM,
        "T, rounds: one for each stage, then one generator update each.",
        at_least=1,
    )
    stages: str | None = option(
        None,
        TRAINING | RESULT | MECHANISM,
        "Kinds of features whose class means the first rounds release, one each, "
        "comma-separated: means,scatter,moments,... for a Gaussian of each class, "
        "...,parts for four.",
    )
    stage_weights: str | None = option(
        None,
        TRAINING | RESULT | MECHANISM,
        "Each stage's share of the privacy spent, in units of one fake's gradient: "
        "noise_std = 2 * clip_bound * noise_multiplier / sqrt(weight). "
        "Unset: equal, sum 1.",
    )
    moment_size: int = option(
        10,
        TRAINING | RESULT,
        "Side k of the k x k low frequencies (DCT) whose moments stages release.",
        at_least=1,
    )
    public_data: str | None = option(
        None,
        TRAINING | RESULT,
        "Public images that stages start from, with the run's labels: a "
        "value of data, such as fonts. The server reads them, clients do not.",
    )
    discriminator_steps: int = option(
        5, TRAINING | RESULT, "n_dis, discriminator steps of a round.", at_least=1
    )
    discriminator_batch_size: int = option(
        32,
        TRAINING | RESULT,
        "Real and fake images of a discriminator step; drawn with replacement.",
        at_least=1,
    )
    fakes_per_round: int | None = option(
        None,
        TRAINING | RESULT,
        "Size of the one set of fakes that a round's steps draw from; "
        "unset: n_dis fresh batches, the last one answered (the paper).",
        at_least=1,
    )
    warm_start: str = option(
        "local",
        TRAINING | RESULT,
        "Warm start against an own generator that is thrown away (local) or "
        "against the server's first fakes (public).",
        choices=("local", "public"),
    )
    warm_start_rounds: int = option(
        REFERENCE_WARM_START_ROUNDS,
        TRAINING | RESULT,
        "T_w, warm-start rounds of n_dis discriminator steps.",
        at_least=0,
    )
    generator_learning_rate: float = option(
        1e-4, TRAINING | RESULT, "Adam's step size for the generator.", above=0
    )
    generator_beta1: float = option(
        0.5, TRAINING | RESULT, "Adam's beta1 for the generator.", at_least=0, below=1
    )
    generator_beta2: float = option(
        0.9, TRAINING | RESULT, "Adam's beta2 for the generator.", at_least=0, below=1
    )
    discriminator_learning_rate: float = option(
        1e-4, TRAINING | RESULT, "Adam's step size for the discriminators.", above=0
    )
    discriminator_beta1: float = option(
        0.5,
        TRAINING | RESULT,
        "Adam's beta1 for the discriminators.",
        at_least=0,
        below=1,
    )
    discriminator_beta2: float = option(
        0.9,
        TRAINING | RESULT,
        "Adam's beta2 for the discriminators.",
        at_least=0,
        below=1,
    )
    gradient_penalty_weight: float = option(
        10.0, TRAINING | RESULT, "Weight of the WGAN gradient penalty.", at_least=0
    )
    gradient_penalty_every: int = option(
        1,
        TRAINING | RESULT,
        "Discriminator steps from one gradient penalty to the next (lazy above 1); "
        "it then has as many times the weight.",
        at_least=1,
    )
    drift_weight: float = option(
        1e-3, TRAINING | RESULT, "Weight of mean(D(real)^2).", at_least=0
    )
    ema_decay: float = option(
        0.999,
        TRAINING | RESULT,
        "Decay of the averaged generator, min(1 - 1/(t+1), ema_decay).",
        at_least=0,
        below=1,
    )

    # Model
    generator: str = option(
        "resnet",
        MODEL | RESULT,
        "Generator: resnet or dcgan (the paper), the light upsample, gaussian: one "
        "Gaussian for each class, which stages determine, or coded: linear "
        "layers through a short code.",
        choices=("resnet", "dcgan", "upsample", "gaussian", "coded"),
    )
    generator_dim: int = option(
        64, MODEL | RESULT, "Width of the generator.", at_least=1
    )
    discriminator_dim: int = option(
        64,
        MODEL | RESULT,
        "Width d of the discriminator: channels d, 2d, 4d.",
        at_least=1,
    )
    spectral_norm: bool = option(
        True, MODEL | RESULT, "Spectral normalisation of the discriminator."
    )
    discriminator_activation: str = option(
        "relu",
        MODEL | RESULT,
        "Activation of the discriminator.",
        choices=("relu", "leaky_relu"),
    )
    conditional: bool = option(
        True, MODEL | RESULT, "Generator and discriminator see the label."
    )
    latent: str = option(
        "bernoulli",
        MODEL | RESULT,
        "Latent z: bernoulli bits (the paper; 10 bits and 10 labels give at most "
        "10,240 distinct images), normal, or uniform on [0, 1) (PATE-GAN).",
        choices=("bernoulli", "normal", "uniform"),
    )
    latent_dim: int = option(10, MODEL | RESULT, "Length of z.", at_least=1)

    # Runtime
    engine: str = option(
        "local",
        RUNTIME | NO_RESULT | MECHANISM | MACHINE,
        "local (one process) or flower (a simulation on Ray).",
        choices=("local", "flower"),
    )
    output: str = option(
        "", RUNTIME | NO_RESULT | STAYS | PATH | MACHINE, "The run folder to create."
    )
    seed: int | None = option(
        None,
        RUNTIME | RESULT | SEED,
        "Seed of initialisation, latents, data order and selection; "
        "drawn and recorded when unset.",
        at_least=0,
    )
    device: str = option(
        "cpu",
        RUNTIME | ROUNDING | OF_CLIENT | MACHINE,
        "cpu or cuda, for discriminators and generator.",
    )
    num_workers: int = option(
        2,
        RUNTIME | NO_RESULT | FREE | MACHINE,
        "Threads (local) or Ray actors (flower) that nodes are spread over; "
        "does not change the result.",
        at_least=1,
    )
    num_threads: int = option(
        1,
        RUNTIME | ROUNDING | MACHINE,
        "torch threads of one worker; bit-for-bit promises hold for one value.",
        at_least=1,
    )
    fast_messages: bool = option(
        True,
        RUNTIME | NO_RESULT | FREE | MACHINE,
        "Hand messages to Flower's simulated nodes at once instead of ten times a "
        "second; off for a Flower version that is not known.",
    )
    gpu_fraction: float = option(
        0.0,
        RUNTIME | NO_RESULT | MACHINE,
        "GPU share of one Ray actor.",
        at_least=0,
        at_most=1,
    )
    stacking: str = option(
        "auto",
        RUNTIME | ROUNDING,
        "Many discriminators in one batched call (stacked) or in turn (loop); "
        "auto is stacked up to width 32 and on a GPU.",
        choices=("auto", "stacked", "loop"),
    )
    chunk_size: int = option(
        64,
        RUNTIME | ROUNDING,
        "Clients of a node in one batched call; changes the last bits.",
        at_least=1,
    )
    checkpoint_every: int | None = option(
        None,
        RUNTIME | NO_RESULT | FREE,
        "Rounds between checkpoints; unset: as often as costs under 5 % of the time.",
        at_least=1,
    )
    sample_every: int | None = option(
        None,
        RUNTIME | NO_RESULT | FREE,
        "Rounds between sample grids; unset: ten over the run.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        """Coerces and checks every field by itself; `node_sizes` implies `num_clients`.

        Raises:
            UserError: a value of the wrong type or outside its range.
        """
        hints = _types_of(type(self))
        for spec in dataclasses.fields(self):
            value = coerced(spec.name, hints[spec.name], getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)
            if value is not None:
                check_range(spec, value)
        if sizes := read_sizes(self.node_sizes):
            object.__setattr__(self, "node_sizes", ",".join(map(str, sizes)))
            if self.num_clients is None:
                object.__setattr__(self, "num_clients", sum(sizes))

    @property
    def schedule_seed(self) -> int | None:
        """Seed that decides who participates: the selection's own, or the run's."""
        return self.seed if self.selection_seed is None else self.selection_seed

    @property
    def stacked(self) -> bool:
        """Whether discriminators train in batched calls (see `stacking`)."""
        if self.stacking == "auto":
            return self.device != "cpu" or self.discriminator_dim <= 32
        return self.stacking == "stacked"

    @property
    def fakes_sent(self) -> int:
        """Number of fake images that one round sends to every participant."""
        if self.fakes_per_round is not None:
            return self.fakes_per_round
        steps = self.discriminator_steps * self.discriminator_batch_size
        return max(steps, self.batch_size)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that `num_clients` clients live on."""
        return self.hosting.num_nodes

    @property
    def hosting(self) -> Hosting:
        """Which of the `num_clients` clients live on which node."""
        num_clients = _known(self.num_clients)
        return hosting(num_clients, self.clients_per_node, self.node_sizes)

    @property
    def largest_node(self) -> int:
        """Most clients that one node hosts; P where `num_clients` is unset."""
        unset = self.num_clients is None
        return self.clients_per_node if unset else self.hosting.largest

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes of a deployment, in their order; empty elsewhere."""
        if self.nodes is None:
            return ()
        return tuple(name.strip() for name in self.nodes.split(","))

    def node_title(self, node_id: int) -> str:
        """Returns what a node is called for people: its name, else "node 3"."""
        names = self.node_names
        return names[node_id] if names else f"node {node_id}"

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
        if self.noise_multiplier is None:
            raise UserError(
                "noise_multiplier is unset: give --noise-multiplier or --target-epsilon"
            )
        return 2.0 * self.clip_bound * self.noise_multiplier

    @property
    def release_shape(self) -> tuple[int, int, int, int]:
        """Shape (B, channels, side, side) of B gradients in their basis."""
        side = self.dct_size if self.gradient_basis == "dct" else self.image_size
        return (self.batch_size, self.image_channels, side, side)

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

    @property
    def stage_list(self) -> tuple[Stage, ...]:
        """The stages that the run begins with, one round each; empty without."""
        return read_stages(self.stages, self.stage_weights)

    @property
    def moment_features(self) -> int:
        """Number of low frequencies of one image, over all channels."""
        return self.image_channels * self.moment_size**2

    @property
    def num_stages(self) -> int:
        """S, the rounds 1 to S release embeddings; 0 without stages."""
        return len(self.stage_list)

    @property
    def num_parts(self) -> int:
        """Gaussians of each class of the generator `gaussian`."""
        return PARTS if any(s.kind == "parts" for s in self.stage_list) else 1

    def terms(self, round: int) -> Terms:
        """Returns what the release of a round, from 1, is agreed to be.

        Raises:
            UserError: noise_multiplier or num_classes is unset.

        Source: docs/privacy.md, "Embedding releases".
        """
        multiplier = self.noise_multiplier
        if multiplier is None:
            raise UserError(
                "noise_multiplier is unset: give --noise-multiplier or --target-epsilon"
            )
        if not 1 <= round <= self.num_stages:
            return Terms("gradient", multiplier, self.clip_bound, self.release_shape)
        stage = self.stage_list[round - 1]
        if self.num_classes is None:
            raise UserError("num_classes is unset: give --num-classes")
        groups = stage.num_groups(self.num_classes)
        shape = (1, 1, groups, 1 + FEATURES[stage.kind](self))
        multiplier /= stage.weight**0.5
        return Terms("embedding", multiplier, self.clip_bound, shape)


@functools.cache
def _types_of(kind: type[Settings]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _known(num_clients: int | None) -> int:
    if num_clients is None:
        raise UserError("num_clients is unset: give --num-clients or data with clients")
    return num_clients


def settings_with(traits: Trait) -> tuple[str, ...]:
    """Returns the names of the settings that have all these traits, in their order."""
    specs = dataclasses.fields(Settings)
    return tuple(spec.name for spec in specs if traits in spec.metadata["traits"])


def field_type(name: str) -> tuple[type, bool]:
    """Returns the scalar type of a setting and whether it may be unset."""
    return scalar_type(_types_of(Settings)[name])
