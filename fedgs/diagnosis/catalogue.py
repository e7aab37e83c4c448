"""Which transformation of one cohort's pictures explains the other cohort?

A group is the mean picture of each class, as far as its low frequencies show it. For
each entry of the catalogue: the entry is applied to the pictures of the healthy cohort,
which move by u. The suspicious cohort lies d away. If a share f of its clients has the
bug, d = f u, because means are linear; so f = <d, u> / <u, u>, and the bug explains

    E = 2 f <d, u> - f^2 <u, u>,    f limited to [0, 1],

of the squared distance <d, d>: more than leaving the pictures alone, which explains 0.
All products are of different groups, so that the groups' own noise cancels on average.
An entry that is not undone by another one is asked both ways: the healthy cohort may be
the spoilt one.

Frequencies are in units in which the noise of the release is white
(`fedgs.config.feature_settings.frequency_weight`). Pictures of them are not cut off at
black and white, so that noise cancels, and averages of intact and of spoilt images lie
on one line.

Images are compared class by class, in the classes that both cohorts have (`products`).
So how many images of a class there are makes no difference, and a cohort that lacks one
is compared in the others. Labels say more: if the pictures of one class are called by
another's name, one class is gone and the mean of the other has moved towards it. Where
that would have brought a class that the cohort lacks, the bug explains nothing of it. A
group that lacks one of the classes itself cannot tell how their pictures would mix.

Privacy: post-processing of DP output.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from fedgs.config.feature_settings import frequency_weight
from fedgs.data.transformations import TURNS, Degree, Transformation
from fedgs.diagnosis import permutation
from fedgs.diagnosis.products import Products, alike, over_classes, products
from fedgs.evaluation.images import LabelledImages

Images = NDArray[np.float32]
Labels = NDArray[np.int64]
Array = NDArray[np.float64]
Rows = NDArray[np.bool_]
Step = tuple[Transformation, Degree]
Relabel = Callable[[Labels, int, Degree], Labels]
_COPIES = 8  # a power of two, so that the mean of equal ones is exact
_SHOWN = 0.5  # of a share by averages, in which longer embeddings count less
# Of the mean pixel in averages, over what makes its noise white: it alone tells less
# contrast from an inversion of some images.
_OF_BRIGHTNESS = 2.0
_LEAST_SPREAD = 1e-3  # of pictures that are all alike
HEALTHY = "healthy"
SUSPICIOUS = "suspicious"


@dataclass(frozen=True)
class Candidate:
    """A bug at one degree, in one of the cohorts.

    Attributes:
        steps: entry of the catalogue and degree; two for a combination.
        spoilt: the cohort that would have the bug.
        moves: <x_g, u_h> of all groups' means x and moves u.
        sizes: <u_g, u_h>, likewise.
    """

    steps: tuple[Step, ...]
    spoilt: str
    moves: Products
    sizes: Products

    @property
    def entry(self) -> Transformation:
        """The entry of the catalogue; of a combination the last one."""
        entry, _ = self.steps[-1]
        return entry

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.entry.name

    @property
    def family(self) -> str:
        """The family of the entry."""
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
        along = over_classes(self.moves, other, intact, _along)
        compared = other
        if any(entry.labels is not None for entry, _ in self.steps):
            # Other labels move pictures from class to class: what they would bring to a
            # class that the other cohort lacks speaks against them.
            compared = intact
        return along, over_classes(self.sizes, compared, intact, size_within)

    def explained(self, healthy: Rows, suspicious: Rows) -> Array:
        """Returns E, shape (n,); 0 where the bug moves nothing that can be seen."""
        along, size = self.products(healthy, suspicious)
        # An estimate without bias: it may be below 0 where the bug moves nothing.
        size = np.maximum(size, 0)
        # Divided by infinity where the bug moves nothing: a share of 0.
        divisor = np.where(size > 0, size, np.inf)
        share = np.clip(along / divisor, 0, 1)
        return 2 * share * along - share**2 * size

    def share(self, healthy: Rows, suspicious: Rows) -> Array:
        """Returns f, shape (n,), without limits; NaN where it cannot be measured."""
        along, size = self.products(healthy, suspicious)
        measurable = np.where(size > 0, size, np.nan)
        return along / measurable


class CohortSamples:
    """The pictures of all groups, and what they look like after any transformation.

    Attributes:
        num_classes: of the labels.
        num_frequencies: how many along each side the pictures have.
        means: the low frequencies of every class, in units of how far pictures are from
            their group's mean, shape (number of groups, number of classes, d); 0 of a
            class that a group lacks.
        is_known: which classes each group has, shape (number of groups, number of
            classes).
        gram: inner products of the groups' means.
        rows: of `permutation.splits`: the true cohorts first, then all others.
    """

    def __init__(
        self,
        groups: Sequence[LabelledImages],
        num_classes: int,
        num_frequencies: int,
        num_suspicious: int,
    ) -> None:
        """Takes one picture of each class of every group; the last are suspicious."""
        self.num_classes = num_classes
        self.num_frequencies = num_frequencies
        num_healthy = len(groups) - num_suspicious
        self.rows = permutation.splits(num_suspicious, num_healthy)
        self._images = [group.images for group in groups]
        self._labels = [group.labels for group in groups]
        classes = np.arange(num_classes)
        of_groups = [np.isin(classes, own) for own in self._labels]
        self.is_known = np.stack(of_groups)
        self._sets = alike(self.is_known)
        intact: list[Images] = []
        for own in self._images:
            intact.append(low_frequencies(own, num_frequencies))
        # The unit is of the intact pictures, and stays: a bug that widened it would
        # look smaller. It does not depend on which group is in which cohort.
        self._unit = _spread(intact)
        self.means = self._means(intact)
        self.gram = self._products(self.means, self.means)
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

    def squared_distances(self) -> Array:
        """Returns how far apart the cohorts of every split are, squared, at least 0."""
        return np.maximum(0.0, self.squared_distance(~self.rows, self.rows))

    def squared_distance(self, healthy: Rows, suspicious: Rows) -> Array:
        """Returns `permutation.squared_distance`, over the classes that both have."""
        return over_classes(
            self.gram, healthy, suspicious, permutation.squared_distance
        )

    def _products(
        self,
        one: Array,
        other: Array,
        is_told: NDArray[np.bool_] | None = None,
    ) -> Products:
        sets = self._sets
        if is_told is not None and not np.array_equal(is_told, self.is_known):
            sets = alike(self.is_known, is_told)
        return products(one, other, sets)

    def _means(self, frequencies: Sequence[Images]) -> Array:
        """Returns the class means of all groups, in units of `means`."""
        of_groups: list[Array] = []
        for own, labels in zip(frequencies, self._labels, strict=True):
            of_groups.append(class_means(own, labels, self.num_classes))
        means = np.nan_to_num(np.stack(of_groups))
        return means / self._unit

    def shown(self, entry: Transformation) -> float:
        """Returns how much of a bug's share the pictures show at least.

        Turns and other labels leave a client's weight in an average as it is. Other
        bugs may make its embedding longer, so that it counts less; and what is not
        linear may change each image and not their average.
        """
        is_of_labels = entry.images is None
        if entry.family == TURNS or is_of_labels:
            return 1.0
        return _SHOWN if entry.is_linear else 0.0

    def candidates(
        self,
        entries: Sequence[Transformation],
        after: Candidate | None = None,
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
        means, is_told = self._after(steps)
        moved = means - self.means
        first = Candidate(
            steps=steps,
            spoilt=SUSPICIOUS,
            moves=self._products(self.means, moved, is_told),
            sizes=self._products(moved, moved, is_told),
        )
        if first.is_turn:
            return [first]
        return [first, dataclasses.replace(first, spoilt=HEALTHY)]

    def _after(self, steps: tuple[Step, ...]) -> tuple[Array, NDArray[np.bool_]]:
        """Returns the means after the steps: those on images first, then on labels.

        Returns:
            The means, and of which classes each group can tell them.
        """
        on_images = [step for step in steps if step[0].images is not None]
        key = tuple((entry.name, degree) for entry, degree in on_images)
        if key not in self._known:
            frequencies: list[Images] = []
            for images in self._images:
                changed = self._changed(images, on_images)
                frequencies.append(low_frequencies(changed, self.num_frequencies))
            self._known[key] = self._means(frequencies)
        means = self._known[key]
        is_told = self.is_known
        for entry, degree in steps:
            if entry.labels is not None:
                shares = self._shares(entry.labels, degree)
                means = np.einsum("kl,gld->gkd", shares, means)
                # A mean over several classes needs the means of all of them.
                num_needed = (shares > 0).sum(1)
                num_there = is_told.astype(np.int64) @ (shares > 0).T
                is_told = is_told & (num_there == num_needed)
        return means, is_told

    def _changed(self, intact: Images, steps: Sequence[Step]) -> Images:
        """Returns pictures after the steps."""
        # A bug may be random; an average is one of many images, so of many draws.
        images = intact.repeat(_COPIES, axis=0)
        for entry, degree in steps:
            if entry.images is None:
                continue
            if entry.is_picture_turn:
                images = entry.images(images, degree)
            else:
                # No bug has seen what noise leaves beyond black and white.
                cut_off = images.clip(0, 1)
                changed = entry.images(cut_off, degree)
                images = images + changed - cut_off
        copies = images.reshape(-1, _COPIES, *images.shape[1:])
        return copies.mean(1)

    def _shares(self, labels: Relabel, degree: Degree) -> Array:
        """Returns how much of a new class (row) is of an old one (column).

        All old classes are equally large. One that no picture has any more keeps its
        mean.
        """
        old = np.arange(self.num_classes)
        new = labels(old, self.num_classes, degree)
        counts = np.zeros((self.num_classes, self.num_classes))
        counts[new, old] = 1
        is_empty = counts.sum(1) == 0
        counts += np.diag(is_empty)
        return counts / counts.sum(1, keepdims=True)


def low_frequencies(images: Images, count: int) -> Images:
    """Returns count x count low frequencies, in units in which the noise is white.

    Privacy: post-processing of DP output.

    Args:
        images: shape (n, C, S, S).
        count: at most S.

    Returns:
        Shape (n, C * count * count).
    """
    weights = np.empty((count, count))
    for row, col in np.ndindex(weights.shape):
        weights[row, col] = frequency_weight(row, col)
    weights[0, 0] *= _OF_BRIGHTNESS
    spectrum = np.asarray(fft.dctn(images, axes=(2, 3), norm="ortho"))
    low = spectrum[:, :, :count, :count]
    weighted = low * weights
    flat = weighted.reshape(len(images), -1)
    return flat.astype(np.float32)


def class_means(values: Images, labels: Labels, num_classes: int) -> Array:
    """Returns the mean of every class; NaN where a class has no picture.

    Privacy: post-processing of DP output.

    Args:
        values: shape (n, d).
        labels: shape (n,), below num_classes.
        num_classes: at least 1.

    Returns:
        Shape (num_classes, d).
    """
    classes = np.arange(num_classes)[:, None]
    is_of = labels == classes  # (num_classes, n)
    counts = is_of.sum(1)[:, None]
    sums = is_of.astype(values.dtype) @ values
    means = sums / np.maximum(1, counts)
    known = np.where(counts > 0, means, np.nan)
    return known.astype(np.float64)


def _spread(groups: Sequence[Images]) -> float:
    """Returns how far pictures are from their group's mean, root mean square."""
    of_groups = [own.var(0).sum() for own in groups]
    spread = float(np.sqrt(np.mean(of_groups)))
    return max(_LEAST_SPREAD, spread)


def _along(moves: Array, other: Rows, intact: Rows) -> Array:
    """Returns <d, u> of some classes."""
    along = permutation.between(moves, other, intact)
    return along - permutation.within(moves, intact)


def size_within(sizes: Array, other: Rows, intact: Rows) -> Array:
    """Returns <u, u> of some classes."""
    return permutation.within(sizes, intact)
