"""Settings and terms of methods that release mean features of images, once each.

    means, scatter, moments, parts   a Gaussian for each class, or for each part of it
    features, pretrained-features    a refiner behind them, by layers of public networks

`fedgs.methods.feature_means` runs them. This module imports no tensor library.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fedgs.config.fields import Problem, option
from fedgs.config.settings import IMAGE_SIZES, PARTS_OF_CLASS, Settings
from fedgs.config.terms import Terms
from fedgs.errors import UserError

# Of an image in each network: the feature by which its number is released. No client's
# embedding is shorter, so none is shorter than a clip bound of at most this.
MASS = 2.0
MOST_FEATURES = 1_000_000  # of one image
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
# Methods whose release a moment's features are measured along.
OF_MOMENTS = ("means", "scatter", "moments", "parts")
OF_FEATURES = (*OF_MOMENTS, *OF_TRUNKS)


def num_pairs(size: int) -> int:
    """Returns the number of products of two of `size` coordinates."""
    return size * (size + 1) // 2


def layers_of(method: str) -> tuple[int, ...]:
    """Returns the features of each layer of a method's trunks, four for each."""
    return tuple(size for trunk in OF_TRUNKS[method] for size in LAYERS[trunk])


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
                f"every client takes part in {self.method}, client_selection = "
                f"{self.client_selection}; give --client-selection all",
            )
        if self.clip_bound > MASS:
            why = f"an embedding may be as short as {MASS:g}, beyond that is only noise"
            yield "clip_bound", f"{why}; give --clip-bound at most {MASS:g}"
        if self.latent != "normal":
            yield "latent", f"{self.method} determines it; give --latent normal"
        # The Gaussians are set by releases and not trained, and a refiner is fitted to
        # features, so no other generator can learn anything from these phases.
        if any(phase.method in OF_TRUNKS for phase in self.phases):
            generator = "refined"
        else:
            generator = "gaussian"
        if self.generator != generator:
            why = "the phases of mean features determine it"
            yield "generator", f"{why}; give --generator {generator}"


@dataclass(frozen=True)
class MomentSettings(FeatureSettings):
    """Settings of means, scatter, moments and parts."""

    moment_size: int = option(
        10,
        "Training",
        "Side k of the k x k low frequencies (DCT) whose moments are released.",
        at_least=1,
    )

    @property
    def moment_features(self) -> int:
        """Number of low frequencies of one image, over all channels.

        Those of a grey image as long as no data have been read.
        """
        return (self.image_channels or 1) * self.moment_size**2

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
        most = self.image_size or max(IMAGE_SIZES)
        if self.moment_size > most:
            yield (
                "moment_size",
                f"give --moment-size at most {most}, the side of an image",
            )
        if self.num_features > MOST_FEATURES:
            if self.method == "scatter":
                name = "moment_size"
            else:
                name = "latent_dim"
            why = f"more than {MOST_FEATURES} products of two coordinates"
            yield name, f"{why}; give a smaller --{name.replace('_', '-')}"
        # Each needs what the phase before found. Public data stand in for the first
        # two, of which the model is then made.
        before = tuple(phase.method for phase in self.earlier_phases)
        if self.public_data is None:
            first = ("means", "scatter")
        else:
            first = ()
        if self.method in ("means", "scatter"):
            is_in_order = (*before, self.method) == first[: len(before) + 1]
        else:
            later = before[len(first) :]
            is_in_order = before[: len(first)] == first and set(later) <= {"moments"}
        if not is_in_order:
            order = ", ".join([*first, "any number of moments, parts once, features"])
            yield "phases", f"moments come in the order {order}; give them so"


@dataclass(frozen=True)
class TrunkSettings(FeatureSettings):
    """Settings of `features`: a refiner is fitted to the layers of a random network."""

    def problems(self) -> Iterator[Problem]:
        """Yields whether a phase comes between the moments and what refines them."""
        yield from super().problems()
        before = {phase.method for phase in self.earlier_phases}
        if not before or not before <= {*OF_MOMENTS}:
            yield "phases", f"{self.method} comes after moments alone; give them so"


@dataclass(frozen=True)
class PretrainedSettings(TrunkSettings):
    """Settings of `pretrained-features`: networks that have seen public images."""

    public_images = ("ImageNet", "fonts")
