"""Which transformation of one cohort's samples explains the other cohort?

For each entry of the catalogue: the entry is applied to the samples of the healthy
cohort, and the class means of their features (`group_features.image_features`) move by
u. The suspicious cohort lies d away. If a share f of its images has the bug, d = f u,
because means are linear; so f = <d, u> / <u, u>, and the bug explains

    E = 2 f <d, u> - f^2 <u, u>,    f limited to [0, 1],

of the squared distance <d, d>: more than leaving the samples alone, which explains 0.
All products are of different groups, so that the groups' own noise cancels on average.
An entry that is not undone by another one is asked both ways: the healthy cohort may be
the spoilt one.

Where the samples are averages (`frequencies`), there is one feature: their low
frequencies, which are linear, and in units in which the noise of the release is white
(`fedgs.config.feature_settings.frequency_weight`). Pictures of them are not cut off at
black and white, so that noise cancels here too, and averages of intact and of spoilt
images lie on one line. A class that a group lacks has the mean of the other groups.

Privacy: post-processing of DP output.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from fedgs.config.feature_settings import frequency_weight
from fedgs.data.transformations import INVERSION, TURNS, Degree, Transformation
from fedgs.diagnosis import group_features as features
from fedgs.diagnosis import permutation
from fedgs.evaluation.images import LabelledImages

Array = NDArray[np.float64]
Rows = NDArray[np.bool_]
Step = tuple[Transformation, Degree]
Relabel = Callable[[features.Labels, int, Degree], features.Labels]
_COPIES = 8  # a power of two, so that the mean of equal ones is exact
SHOWN = 0.5  # of a share by averages, in which longer embeddings count less
# Of the mean pixel in averages, over what makes its noise white: it alone tells less
# contrast from an inversion of some images.
_OF_BRIGHTNESS = 2.0
_LEAST_DISTANCE = 1e-5  # squared, in units of images from their group's mean
# The features that a family changes, in their order; the rest is asked in all. Neither
# brightness nor contrast of a generator changes those of turns, and noise that is cut
# off at white instead of black changes the sharpness of inverted pictures.
_ASKED_IN = {
    INVERSION: np.array([1.0, 1.0, 1.0, 0.0, 0.0]),
    TURNS: np.array([0.0, 0.0, 1.0, 1.0, 0.0]),
}
HEALTHY = "healthy"
SUSPICIOUS = "suspicious"


@dataclass(frozen=True)
class Candidate:
    """A bug at one degree, in one of the cohorts.

    Attributes:
        steps: entry of the catalogue and degree; two for a combination.
        spoilt: the cohort that would have the bug.
        moves: <x_g, u_h> of all groups' features x and moves u, of each feature; shape
            (number of features, number of groups, number of groups).
        sizes: <u_g, u_h>, likewise.
        weights: of the features in a product, shape (number of features,).
    """

    steps: tuple[Step, ...]
    spoilt: str
    moves: Array
    sizes: Array
    weights: Array

    def weighted(self, weights: Array) -> "Candidate":
        """Returns the candidate with other weights of the features."""
        return dataclasses.replace(self, weights=weights)

    @property
    def entry(self) -> Transformation:
        """Of the catalogue; of a combination the last one."""
        entry, _ = self.steps[-1]
        return entry

    @property
    def name(self) -> str:
        """Of the entry."""
        return self.entry.name

    @property
    def family(self) -> str:
        """Of the entry."""
        return self.entry.family

    @property
    def is_turn(self) -> bool:
        """Whether another entry undoes it, so that it is asked in one cohort only."""
        return all(entry.is_turn for entry, _ in self.steps)

    def products(self, healthy: Rows, suspicious: Rows) -> tuple[Array, Array]:
        """Returns <d, u> and <u, u>.

        Args:
            healthy: the groups of the healthy cohort are True, shape (n, number of
                groups).
            suspicious: likewise; a group can be in neither.
        """
        intact = healthy
        other = suspicious
        if self.spoilt == HEALTHY:
            intact = suspicious
            other = healthy
        moves = np.tensordot(self.weights, self.moves, 1)
        sizes = np.tensordot(self.weights, self.sizes, 1)
        along = permutation.between(moves, other, intact)
        along -= permutation.within(moves, intact)
        return along, permutation.within(sizes, intact)

    def explained(self, healthy: Rows, suspicious: Rows) -> Array:
        """Returns E, shape (n,); 0 where the bug moves nothing that can be seen."""
        along, size = self.products(healthy, suspicious)
        # An estimate without bias: it may be below 0 where the bug moves nothing.
        size = np.maximum(size, 0)
        # Divided by infinity where the bug moves nothing: a share of 0.
        divisor = np.where(size > 0, size, np.inf)
        share = np.clip(along / divisor, 0, 1)
        return 2 * share * along - share**2 * size

    def explained_by_feature(self, healthy: Rows, suspicious: Rows) -> Array:
        """Returns what the first row's share explains of each feature's distance."""
        share = np.clip(self.share(healthy, suspicious)[:1], 0, 1)
        found = list[float]()
        for only_one in np.eye(len(self.weights)):
            alone = self.weighted(only_one)
            along, size = alone.products(healthy[:1], suspicious[:1])
            explained = 2 * share * along - share**2 * size
            found.append(float(explained[0]))
        return np.array(found)

    def share(self, healthy: Rows, suspicious: Rows) -> Array:
        """Returns f, shape (n,), without limits; NaN where it cannot be measured."""
        along, size = self.products(healthy, suspicious)
        measurable = np.where(size > 0, size, np.nan)
        return along / measurable


class CohortSamples:
    """The samples of all groups, and what they look like after any transformation.

    Attributes:
        num_classes: of the labels.
        frequencies: how many along each side averages have; None of other images.
        means: class means of the features, scaled, shape (number of groups, number of
            classes, d).
        by_feature: the same, by the feature's name.
        grams: inner products of the groups' means, of each feature.
        kernel: mean kernel of the pictures alone, of every two groups; of averages the
            inner product of their means.
        rows: of `permutation.splits`: the true cohorts first, then all others.
    """

    def __init__(
        self,
        groups: Sequence[LabelledImages],
        num_classes: int,
        frequencies: int | None = None,
        num_suspicious: int | None = None,
    ) -> None:
        """The last groups are suspicious: half of them where no number is given."""
        self.num_classes = num_classes
        self.frequencies = frequencies
        num_suspicious = num_suspicious or len(groups) // 2
        self.rows = permutation.splits(num_suspicious, len(groups) - num_suspicious)
        if frequencies:  # a generator that draws averages draws each again and again
            groups = _without_repeats(groups)
        self._images = [group.images for group in groups]
        self._labels = [group.labels for group in groups]
        of_images = [self._features(images) for images in self._images]
        # Units and scales are of the intact samples, and stay: a bug that widened them
        # would look smaller.
        self._units = features.spreads(of_images)
        self.by_feature = self._means(of_images)
        sizes = [means.shape[2] for means in self.by_feature.values()]
        self._ends = np.cumsum(sizes)
        self._scales = _scales(list(self.by_feature.values()), self.rows)
        self.means = self._joined(self.by_feature)
        by_feature = self._split(self.means)
        self.grams = np.stack([means @ means.T for means in by_feature])
        if frequencies:  # there is nothing beside the classes' means
            self.kernel = self.grams.sum(0)
        else:
            self.kernel = features.kernel_means(self._images)
        # The means after the steps on images, by these.
        self._known: dict[tuple[Any, ...], Array] = {(): self.means}

    @property
    def cohorts(self) -> NDArray[np.int64]:
        """The true cohort of every group: 0 is healthy, 1 suspicious."""
        return self.rows[0].astype(np.int64)

    def split_by(self, rows: Rows) -> "CohortSamples":
        """Returns the same groups, of which others are suspicious: see `rows`."""
        found = copy.copy(self)
        found.rows = rows
        return found

    def _features(self, images: features.Images) -> dict[str, features.Images]:
        """Returns what is averaged: of averages their low frequencies, nothing else."""
        if self.frequencies:
            return {"mean picture": low_frequencies(images, self.frequencies)}
        return features.image_features(images)

    def _split(self, means: Array) -> list[Array]:
        """Returns the features of all classes as vectors, a row for each group."""
        by_feature = np.split(means, self._ends[:-1], axis=2)
        return [own.reshape(len(own), -1) for own in by_feature]

    def _joined(self, by_feature: dict[str, Array]) -> Array:
        """Returns all features side by side, scaled, a mean over classes."""
        scaled = [
            scale * own
            for own, scale in zip(by_feature.values(), self._scales, strict=True)
        ]
        joined = np.concatenate(scaled, axis=2)
        # So that an inner product is a mean over classes, however many there are.
        return joined / np.sqrt(joined.shape[1])

    def _means(self, own: list[dict[str, features.Images]]) -> dict[str, Array]:
        return features.scaled_means(own, self._labels, self.num_classes, self._units)

    def shown(self, entry: Transformation) -> float:
        """Returns how much of a bug's share the samples show at least.

        All of it, unless they are averages. Turns and other labels leave a client's
        weight in them as it is. Other bugs may make its embedding longer, so that it
        counts less; and what is not linear may change each image and not their average.
        """
        is_of_labels = entry.images is None
        if not self.frequencies or entry.family == TURNS or is_of_labels:
            return 1.0
        return SHOWN if entry.is_linear else 0.0

    def candidates(
        self, entries: Sequence[Transformation], after: Candidate | None = None
    ) -> list[Candidate]:
        """Returns the catalogue's candidates, or each on top of another candidate."""
        found: list[Candidate] = []
        for entry in entries:
            for degree in entry.degrees_of(self.num_classes):
                steps: tuple[Step, ...] = ((entry, degree),)
                if after is not None:
                    steps = after.steps + steps
                found += self._both_ways(steps)
        return found

    def _both_ways(self, steps: tuple[Step, ...]) -> list[Candidate]:
        """Returns the candidates by which either cohort would be the spoilt one."""
        own = self._split(self.means)
        moved = self._split(self._after(steps) - self.means)
        last, _ = steps[-1]
        weights = np.ones(len(own))
        if not self.frequencies:
            weights = _ASKED_IN.get(last.family, weights)
        first = Candidate(
            steps=steps,
            spoilt=SUSPICIOUS,
            moves=np.stack([x @ u.T for x, u in zip(own, moved, strict=True)]),
            sizes=np.stack([u @ u.T for u in moved]),
            weights=weights,
        )
        if first.is_turn:
            return [first]
        return [first, dataclasses.replace(first, spoilt=HEALTHY)]

    def _after(self, steps: tuple[Step, ...]) -> Array:
        """Returns the means after the steps: those on images first, then on labels."""
        on_images = [step for step in steps if step[0].images is not None]
        key = tuple((entry.name, degree) for entry, degree in on_images)
        if key not in self._known:
            own: list[dict[str, features.Images]] = []
            for images in self._images:
                own.append(self._features(self._changed(images, on_images)))
            self._known[key] = self._joined(self._means(own))
        found = self._known[key]
        for entry, degree in steps:
            if entry.labels is not None:
                found = self._relabelled(found, entry.labels, degree)
        return found

    def _changed(
        self, intact: features.Images, steps: Sequence[Step]
    ) -> features.Images:
        """Returns images after the steps."""
        # A bug may be random; an average is one of many images, so of many draws.
        copies = 1
        if self.frequencies and len(intact) <= self.num_classes:
            copies = _COPIES
        images = intact.repeat(copies, axis=0)
        for entry, degree in steps:
            if entry.images is None:
                continue
            if entry.is_picture_turn or not self.frequencies:
                images = entry.images(images, degree)
            else:
                # No bug has seen what noise leaves beyond black and white.
                cut_off = images.clip(0, 1)
                images = images + entry.images(cut_off, degree) - cut_off
        return images.reshape(-1, copies, *images.shape[1:]).mean(1)

    def _relabelled(self, means: Array, labels: Relabel, degree: Degree) -> Array:
        """Returns the class means under other labels: means of the old classes' means.

        A class that no image has any more keeps its mean: a generator of it would draw
        what nobody knows.
        """
        old = np.concatenate(self._labels)
        # How many images of an old class (column) are of a new one (row).
        counts = np.zeros((self.num_classes, self.num_classes))
        np.add.at(counts, (labels(old, self.num_classes, degree), old), 1)
        counts += np.diag(counts.sum(1) == 0)
        shares = counts / counts.sum(1, keepdims=True)
        return np.einsum("kl,gld->gkd", shares, means)


def _without_repeats(groups: Sequence[LabelledImages]) -> Sequence[LabelledImages]:
    """Returns one image of each class if all of a class are alike in every group."""
    found = [_one_of_each(group) for group in groups]
    if len({len(group.labels) for group in found}) > 1:
        return groups
    return found


def _one_of_each(group: LabelledImages) -> LabelledImages:
    """Returns one image of each class if all of a class are alike, else the group."""
    labels, first, which = np.unique(
        group.labels, return_index=True, return_inverse=True
    )
    one_of_each = LabelledImages(group.images[first], labels)
    if np.array_equal(one_of_each.images[which], group.images):
        return one_of_each
    return group


def low_frequencies(images: features.Images, count: int) -> features.Images:
    """Returns count x count low frequencies, in units in which the noise is white.

    Privacy: post-processing of DP output.

    Args:
        images: shape (n, C, S, S).
        count: at most S.

    Returns:
        Shape (n, C * count * count).
    """
    found = np.asarray(fft.dctn(images, axes=(2, 3), norm="ortho"))
    sides = range(count)
    weights = np.array([[frequency_weight(row, col) for col in sides] for row in sides])
    weights[0, 0] *= _OF_BRIGHTNESS
    weighted = found[:, :, :count, :count] * weights
    return weighted.reshape(len(images), -1).astype(np.float32)


def _scales(by_feature: Sequence[Array], rows: Rows) -> list[float]:
    """Returns by what each feature is multiplied: 1 / the distance of random cohorts.

    Generators that are half trained differ in brightness, say, more than a bug moves
    their shapes. The scale does not depend on which group is in which cohort.
    """
    found = list[float]()
    for own in by_feature:
        flat = own.reshape(len(own), -1)
        squared = permutation.distances(flat @ flat.T / own.shape[1], rows) ** 2
        mean_squared = max(float(squared.mean()), _LEAST_DISTANCE)
        found.append(1 / math.sqrt(mean_squared))
    return found
