"""Settings and terms of methods that release mean features of images, once each.

    means, scatter, moments, parts   a Gaussian for each class, or for each part of it
    features, pretrained-features    a refiner behind them, by layers of public networks
    group-means                      class means of groups of clients, to compare them

`fedgs.methods.feature_means` runs them. This module imports no tensor library.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fedgs.config.fields import Problem, option
from fedgs.config.settings import IMAGE_SIZES, PARTS_OF_CLASS, Settings
from fedgs.config.terms import Terms
from fedgs.errors import UserError
from fedgs.files import NAME_RULE, is_plain_name

# Of an image in each network: the feature by which its number is released. No client's
# embedding is shorter, so none is shorter than a clip bound of at most this.
MASS = 2.0
MOST_FEATURES = 1_000_000  # of one image
LOWEST_WEIGHT = 0.25  # of `frequency_weight`
# Of each cohort: the fewest that a test at 0.05 needs, and C(12, 6) / 2 = 462 splits.
FEWEST_GROUPS = 4
MOST_GROUPS = 6
FEWEST_CLIENTS = 2  # of a group
SPLITS = 2  # a class is cut across its longest axes, so many of them
# Layers of the networks that make features (`fedgs.gan.public_networks`), four of each:
# means over 7 x 7 fields of channels, squares over 4 x 4, means over 4 x 4, a last
# layer; and products of coordinates along the longest axes of the last one.
IMAGENET_LAYERS = (24 * 7**2, 24 * 4**2, 40 * 4**2, 40 * 2**2)
SMALL_LAYERS = (32 * 7**2, 32 * 4**2, 64 * 4**2, 128)
LAYERS = {"imagenet": IMAGENET_LAYERS, "random": SMALL_LAYERS, "fonts": SMALL_LAYERS}
TRUNK_AXES = 64
PRETRAINED = "pretrained-features"  # of networks that have seen public images
OF_TRUNKS = {"features": ("random",), PRETRAINED: ("fonts", "imagenet")}
SHA256 = re.compile("[0-9a-f]{64}")
# Methods whose release a moment's features are measured along.
OF_MOMENTS = ("means", "scatter", "moments", "parts")
OF_FEATURES = (*OF_MOMENTS, *OF_TRUNKS)


def num_pairs(size: int) -> int:
    """Returns the number of products of two of `size` coordinates."""
    return size * (size + 1) // 2


def layers_of(method: str) -> tuple[int, ...]:
    """Returns the features of each layer of a method's trunks, four for each."""
    return tuple(size for trunk in OF_TRUNKS[method] for size in LAYERS[trunk])


def frequency_weight(row: int, column: int) -> float:
    """Returns by what group means multiply one low frequency, before it is clipped.

    Amplitudes of images fall as 1 / frequency. So the mean pixel alone would be most of
    an embedding's length, and clipping would leave less of all that tells bugs apart.

    Privacy: public; the same for all data.

    Args:
        row: the row of the DCT, from 0.
        column: likewise.

    >>> frequency_weight(0, 0), frequency_weight(3, 4)
    (0.25, 1.25)
    """
    return LOWEST_WEIGHT * max(1.0, math.hypot(row, column))


@dataclass(frozen=True)
class FeatureSettings(Settings):
    """Settings of every method that releases mean features."""

    releases_once = True
    needed_generator = "gaussian"

    @property
    def num_features(self) -> int:
        """Features of one image in the phase's release, without the one of its number.

        Raises:
            UserError: num_classes is unset.
        """
        trunks = OF_TRUNKS[self.method]
        return sum(layers_of(self.method)) + len(trunks) * num_pairs(TRUNK_AXES)

    @property
    def num_groups(self) -> int:
        """Groups of images whose mean features the phase releases: the classes.

        Raises:
            UserError: num_classes is unset.
        """
        if self.num_classes is None:
            raise UserError("num_classes is unset: give --num-classes")
        return self.num_classes

    def phase_terms(self, round: int) -> Terms:
        """Returns one embedding by network, group and feature, clipped as a whole.

        Source: docs/privacy.md, "Embedding releases".
        """
        return Terms(
            release="embedding",
            noise_multiplier=self.known_noise,
            clip_bound=self.clip_bound,
            shape=(1, 1, self.num_groups, 1 + self.num_features),
        )

    def problems(self) -> Iterator[Problem]:
        """Yields what of the run does not fit a release of mean features."""
        yield from super().problems()
        if self.client_selection != "all":
            yield (
                "phases",
                f"every client takes part in {self.method}, but client_selection is "
                f"{self.client_selection}; give --client-selection all",
            )
        if self.clip_bound > MASS:
            why = (
                f"embeddings may be as short as {MASS:g}, so a larger bound adds only "
                "noise"
            )
            yield "clip_bound", f"{why}; give --clip-bound at most {MASS:g}"
        if self.latent != "normal":
            yield "latent", f"{self.method} needs normal latents; give --latent normal"
        # The Gaussians are set by releases and not trained, and a refiner is fitted to
        # features, so no other generator can learn anything from these phases.
        if any(phase.method in OF_TRUNKS for phase in self.phases):
            generator = "refined"
        else:
            generator = "gaussian"
        if self.generator != generator:
            why = "the phases of mean features need another one"
            yield "generator", f"{why}; give --generator {generator}"


@dataclass(frozen=True)
class LowFrequencySettings(FeatureSettings):
    """Settings of methods that release low frequencies of images."""

    moment_size: int = option(
        10,
        "Training",
        "Number k: the moments of the k x k low frequencies (DCT) of an image are "
        "released.",
        at_least=1,
    )

    @property
    def moment_features(self) -> int:
        """Number of low frequencies of one image, over all channels.

        Those of a grey image as long as no data have been read.
        """
        return (self.image_channels or 1) * self.moment_size**2

    def problems(self) -> Iterator[Problem]:
        """Yields whether images have fewer frequencies."""
        yield from super().problems()
        most = self.image_size or max(IMAGE_SIZES)
        if self.moment_size > most:
            yield (
                "moment_size",
                f"give --moment-size at most {most}, the side of an image",
            )


@dataclass(frozen=True)
class MomentSettings(LowFrequencySettings):
    """Settings of means, scatter, moments and parts."""

    @property
    def num_features(self) -> int:
        """Features of one image in the release, without the one of its number."""
        if self.method == "means":
            return self.moment_features
        if self.method == "scatter":
            return num_pairs(self.moment_features)
        return self.latent_dim + num_pairs(self.latent_dim)

    @property
    def num_groups(self) -> int:
        """Groups of images whose mean features the phase releases."""
        if self.method == "scatter":
            return 1  # of all images, once each is taken off its class' mean
        groups = super().num_groups
        if self.method == "parts":
            return groups * PARTS_OF_CLASS
        return groups

    def problems(self) -> Iterator[Problem]:
        """Yields which settings of moments contradict each other, or their order."""
        yield from super().problems()
        if self.public_data is not None and self.latent_dim > self.moment_features:
            most = f"the {self.moment_features} low frequencies of moment_size"
            yield "latent_dim", f"give --latent-dim at most {most}"
        if self.num_features > MOST_FEATURES:
            if self.method == "scatter":
                name = "moment_size"
            else:
                name = "latent_dim"
            why = f"it makes more than {MOST_FEATURES} products of two coordinates"
            yield name, f"{why}; give a smaller --{name.replace('_', '-')}"
        # Each needs what the phase before found. Public data stand in for the first
        # two, of which the model is then made.
        before = tuple(phase.method for phase in self.earlier_phases)
        if self.public_data is None:
            first = ("means", "scatter")
        else:
            first = ()
        if self.method in ("means", "scatter"):
            so_far = (*before, self.method)
            is_in_order = so_far == first[: len(so_far)]
        else:
            begun = before[: len(first)]
            later = before[len(first) :]
            is_in_order = begun == first and set(later) <= {"moments"}
        if not is_in_order:
            order = ", ".join([*first, "any number of moments, parts once, features"])
            yield (
                "phases",
                f"these phases must come in the order {order}; give them in this order",
            )


@dataclass(frozen=True)
class TrunkSettings(FeatureSettings):
    """Settings of `features`: a refiner is fitted to the layers of a random network."""

    def problems(self) -> Iterator[Problem]:
        """Yields whether a phase comes between the moments and what refines them."""
        yield from super().problems()
        before = {phase.method for phase in self.earlier_phases}
        if not before or not before <= {*OF_MOMENTS}:
            yield (
                "phases",
                f"{self.method} must come after moments, and after nothing else; give "
                "the phases in this order",
            )


@dataclass(frozen=True)
class PretrainedSettings(TrunkSettings):
    """Settings of `pretrained-features`: networks that have seen public images."""

    public_images = ("ImageNet", "fonts")

    features: str | None = option(
        None,
        "Training",
        "Classifier of torchvision.models, such as vgg19, whose layers are features in "
        "place of the packaged ImageNet network's; its weights lie in torchvision's "
        "cache already, on every machine.",
    )
    features_sha256: str | None = option(
        None,
        "Training",
        "SHA-256 of the file with its weights; other files are refused. Default: that "
        "of the file found at the start.",
    )

    def problems(self) -> Iterator[Problem]:
        """Yields whether a hash is of no network, or is none."""
        yield from super().problems()
        digest = self.features_sha256
        if digest is None:
            return
        if self.features is None:
            yield (
                "features_sha256",
                "belongs to a network; give --features, or leave it out",
            )
        if not SHA256.fullmatch(digest):
            yield "features_sha256", "give 64 hexadecimal digits in lower case"


@dataclass(frozen=True)
class GroupMeansSettings(LowFrequencySettings):
    """Settings of `group-means`: which groups of clients are compared, by what rule.

    Without `healthy`, every node is a site, and sites are compared. With it, the two
    cohorts of clients are, whichever nodes they live on.
    """

    healthy: str | None = option(
        None,
        "Debugging",
        "Cohort to compare with: a value in the files that clients give with "
        "--cohorts. Default: nodes are compared with each other.",
    )
    suspicious: str | None = option(
        None,
        "Debugging",
        "Cohort that may have a bug: a value in the files that clients give with "
        "--cohorts; or, without --healthy, the name of a node. Default: every node in"
        " turn.",
    )
    groups: int = option(
        FEWEST_GROUPS,
        "Debugging",
        "Number of groups, from 4 to 6, into which each cohort or node is divided.",
        at_least=FEWEST_GROUPS,
        at_most=MOST_GROUPS,
    )
    clients_per_group: int | None = option(
        None,
        "Debugging",
        "Number of clients in each group of a node; further clients are not used. "
        "Default: as many as the smallest node allows.",
        at_least=FEWEST_CLIENTS,
    )
    alpha: float = option(
        0.05,
        "Debugging",
        "Largest probability that a bug is reported although there is none.",
        above=0,
        below=1,
    )
    min_effect: float = option(
        0.25,
        "Debugging",
        "Smallest share of affected clients that is reported as a bug.",
        above=0,
        below=1,
    )

    @property
    def compares_nodes(self) -> bool:
        """Whether nodes are compared, and not cohorts of clients wherever they live."""
        return self.healthy is None

    @property
    def num_blocks(self) -> int:
        """Groups of clients in one release: those of a node, or of both cohorts."""
        if self.compares_nodes:
            return self.groups
        return 2 * self.groups

    @property
    def group_size(self) -> int:
        """Clients of each group of a node, where nodes are compared.

        Raises:
            UserError: num_clients is unset.
        """
        return self.clients_per_group or self.hosting.smallest // self.groups

    @property
    def num_features(self) -> int:
        """Features of one image in the release, without the one of its number."""
        return self.moment_features

    def phase_terms(self, round: int) -> Terms:
        """Returns one embedding of all groups, by group, class and feature.

        A client's is zero but in the block of its own group, so that one clip bound and
        one noise are those of all groups.

        Source: docs/privacy.md, "One release for all groups".
        """
        size = None
        if self.compares_nodes and self.num_clients is not None:
            size = self.group_size
        return Terms(
            release="embedding",
            noise_multiplier=self.known_noise,
            clip_bound=self.clip_bound,
            shape=(1, self.num_blocks, self.num_groups, 1 + self.num_features),
            num_groups=self.num_blocks,
            clients_per_group=size,
            is_by_node=self.compares_nodes,
        )

    def problems(self) -> Iterator[Problem]:
        """Yields which settings do not say what is compared with what."""
        yield from super().problems()
        if len(self.phases) > 1:
            why = f"{self.method} cannot be combined with other phases"
            yield "phases", f"{why}; give it alone"
        if self.healthy is not None and self.suspicious is None:
            why = "a second cohort is needed to compare it with"
            yield "healthy", f"{why}; give --suspicious too"
        if self.healthy is not None and self.healthy == self.suspicious:
            why = "it is the same cohort as healthy"
            yield "suspicious", f"{why}; give another --suspicious"
        for name in ("healthy", "suspicious"):
            value = getattr(self, name)
            if value is not None and not is_plain_name(value):
                yield name, NAME_RULE  # of the files of its groups
        if not self.compares_nodes and self.clients_per_group is not None:
            why = "the groups of cohorts have all owners of these"
            yield "clients_per_group", f"{why}; leave it out"
        if self.compares_nodes:
            yield from self._problems_of_nodes()
        elif self.nodes is None and self.cohorts is None:
            yield "healthy", "give --cohorts, the file that assigns owners to cohorts"

    def _problems_of_nodes(self) -> Iterator[Problem]:
        why = "nodes are compared with each other"
        if self.secure_aggregation:
            yield (
                "secure_aggregation",
                f"{why}, which their sum does not allow; leave it out, or "
                "give --healthy and --suspicious",
            )
        if self.min_answers is not None:
            yield "min_answers", f"{why}, so all have to answer; leave it out"
        if self.num_clients is None:
            return
        if self.num_nodes < 2:
            yield (
                "num_clients",
                f"{why}, but there is only one; give a smaller --clients-per-node",
            )
        titles = self.site_names
        if self.suspicious is not None and self.suspicious not in titles:
            yield "suspicious", f"give --suspicious one of {', '.join(titles)}"
        smallest = self.hosting.smallest
        is_small = self.group_size < FEWEST_CLIENTS
        if self.groups * self.group_size > smallest or is_small:
            yield (
                "clients_per_group",
                f"the smallest node has {smallest} clients for {self.groups} groups; "
                "give a smaller --clients-per-group, or leave that node out",
            )

    @property
    def site_names(self) -> tuple[str, ...]:
        """What the nodes are called, in their order.

        Raises:
            UserError: num_clients is unset.
        """
        return self.node_names or tuple(map(str, range(self.num_nodes)))
