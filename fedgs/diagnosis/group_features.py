"""What the samples of one generator look like, as vectors that a bug changes.

Source: Bigün and Granlund, "Optimal orientation detection of linear symmetry", ICCV
1987 (structure tensor); Gretton et al., "A kernel two-sample test", JMLR 2012.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Images = NDArray[np.float32]
Labels = NDArray[np.int64]
Array = NDArray[np.float64]
_SMOOTHING = 1.0  # pixels: the noise of a generator is finer than a stroke
_CELLS = 8  # along each side
_LEVELS = 8  # of brightness
_RINGS = 6  # of spatial frequencies
NUM_LEARNED = 2  # the first features; noise of the training alone changes the others
_LEAST_CONTRAST = 0.001  # per pixel, likewise
_LEAST_POWER = 1e-4  # per pixel: what is below it looks black


def _tensor(images: Images) -> Array:
    """Returns Jxx - Jyy, 2 Jxy and Jxx + Jyy of every pixel, shape (3, n, s, s)."""
    smooth = gaussian_filter(
        images.astype(np.float64), (0, 0, _SMOOTHING, _SMOOTHING), mode="nearest"
    )
    along_x = np.diff(smooth, axis=3)
    along_y = np.diff(smooth, axis=2)
    # Both where four pixels meet, so that they are of one place.
    gx = (along_x[:, :, 1:] + along_x[:, :, :-1]) / 2
    gy = (along_y[:, :, :, 1:] + along_y[:, :, :, :-1]) / 2
    of_channels = (gx * gx - gy * gy, 2 * gx * gy, gx * gx + gy * gy)
    return np.stack([product.sum(1) for product in of_channels])


def _directions(images: Images) -> Images:
    """Returns where strokes of which direction are, shape (n, 3 * 8 * 8).

    The structure tensor's parts, summed over 8 x 8 cells, as shares of all gradients of
    an image: neither brightness nor contrast changes them. Of a blank one 0.
    """
    parts = _tensor(images)
    pool = _cells(parts.shape[-1])
    cells = (pool @ parts @ pool.T).reshape(3, len(images), -1)
    least = _LEAST_CONTRAST**2 * np.prod(images.shape[1:])
    of_image = parts[2].sum((1, 2))  # all gradients, whatever their direction
    shares = cells / (of_image[:, None] + least)
    return np.concatenate(shares, axis=1).astype(np.float32)


def _cells(side: int) -> Array:
    """Returns which share of each pixel lies in each of the cells, (cells, side)."""
    edges = np.linspace(0, side, _CELLS + 1)
    pixels = np.arange(side)
    # A pixel reaches from its number to the next one, and may lie in two cells.
    upper = np.minimum(edges[1:, None], pixels + 1)
    lower = np.maximum(edges[:-1, None], pixels)
    return np.maximum(0, upper - lower)


def kernel_means(groups: list[Images]) -> Array:
    """Returns the mean Gaussian kernel between the images of every two groups.

    That is the inner product of the groups' mean embeddings: the squared distance of
    two is their MMD^2. The bandwidth is the median distance of all images.

    Privacy: post-processing of DP output.

    Args:
        groups: G arrays (n, C, S, S) of one shape.

    Returns:
        Shape (G, G), in [0, 1].
    """
    from sklearn.metrics.pairwise import euclidean_distances

    images = np.concatenate(groups)
    flat = images.reshape(len(images), -1)
    squared = euclidean_distances(flat, squared=True)
    bandwidth = max(float(np.median(squared)), 1e-12)
    kernel = np.exp(-squared / (2 * bandwidth))
    count = len(groups)
    by_group = kernel.reshape(count, len(flat) // count, count, -1)
    return by_group.mean((1, 3), np.float64)


def image_features(images: Images) -> dict[str, Images]:
    """Returns what is averaged over the images of a class, by the feature's name.

    Averages of these over images are linear: of images a share f of which is spoilt,
    they lie at f on the way from the intact to the spoilt ones.

    Privacy: post-processing of DP output.

    Args:
        images: shape (n, C, S, S), in [0, 1].

    Returns:
        Shapes (n, C S S): the picture; (n, 8): shares of pixels of each brightness;
        (n, C S S): the picture of one contrast; (n, 192): where strokes of which
        direction are; (n, 6): log of the share of power in each ring of spatial
        frequencies.
    """
    values = images.reshape(len(images), -1)
    return {
        "mean picture": values,
        "brightness of pixels": _histogram(values),
        "shape": _of_one_contrast(values),
        "direction of strokes": _directions(images),
        "sharpness": _power(images),
    }


def is_learned(num_features: int) -> NDArray[np.bool_]:
    """Tells of each feature whether it weighs fully; averages have the first alone."""
    return np.arange(num_features) < NUM_LEARNED


def _of_one_contrast(values: Images) -> Images:
    """Returns pictures less their mean, of length 1; nearly blank ones are shorter.

    Generators that are half trained differ much in brightness, and little in shape.
    """
    apart = values - values.mean(1, keepdims=True)
    length = np.linalg.norm(apart, axis=1, keepdims=True)
    return apart / (length + _LEAST_CONTRAST * np.sqrt(values.shape[1]))


def _histogram(values: Images) -> Images:
    """Returns shares of pixels near 0, 1/7 ... 1, linear in between."""
    place = values * (_LEVELS - 1)
    shares = [
        np.maximum(0, 1 - np.abs(place - centre)).mean(1)
        for centre in np.arange(_LEVELS)
    ]
    return np.stack(shares, axis=1).astype(np.float32)


def _power(images: Images) -> Images:
    """Returns the log of each ring's power, as a share: contrast does not change it."""
    side = images.shape[-1]
    power = np.square(np.abs(np.fft.rfft2(images))).sum(1).reshape(len(images), -1)
    y = np.fft.fftfreq(side)
    x = np.fft.rfftfreq(side)
    radius = np.hypot(y[:, None], x[None]).ravel()
    ring = np.minimum((radius * 2 * _RINGS).astype(int), _RINGS - 1)
    is_in_ring = ring[:, None] == np.arange(_RINGS)
    is_in_ring &= (radius > 0)[:, None]  # the mean of a picture is in none
    in_ring = power @ (is_in_ring / np.maximum(1, is_in_ring.sum(0)))
    mean = in_ring / side**2 + _LEAST_POWER
    return np.log(mean / mean.mean(1, keepdims=True)).astype(np.float32)


def scaled_means(
    groups: list[dict[str, Images]],
    labels: list[Labels],
    num_classes: int,
    units: dict[str, float],
) -> dict[str, Array]:
    """Returns the class means of all groups. One without a class gets the others' mean.

    Privacy: post-processing of DP output.

    Args:
        groups: `image_features` of each group.
        labels: of each group.
        num_classes: at least 1.
        units: of each feature, of `spreads`.

    Returns:
        For each feature shape (number of groups, num_classes, d).
    """
    found: dict[str, Array] = {}
    for name, unit in units.items():
        of_groups = [
            class_means(own[name], own_labels, num_classes)
            for own, own_labels in zip(groups, labels, strict=True)
        ]
        found[name] = _filled(np.stack(of_groups)) / unit
    return found


def spreads(groups: list[dict[str, Images]]) -> dict[str, float]:
    """Returns how far images are from their group's mean, root mean square, by feature.

    It does not depend on which group is in which cohort.

    Privacy: post-processing of DP output.
    """
    found: dict[str, float] = {}
    for name in groups[0]:
        of_groups = [group[name].var(0).sum() for group in groups]
        found[name] = max(1e-3, float(np.sqrt(np.mean(of_groups))))
    return found


def _filled(means: Array) -> Array:
    """Returns class means whose NaN are replaced by the mean of the other groups."""
    is_known = np.isfinite(means)
    total = np.where(is_known, means, 0).sum(0)
    of_others = total / np.maximum(1, is_known.sum(0))
    return np.where(is_known, means, of_others)


def class_means(values: Images, labels: Labels, num_classes: int) -> Array:
    """Returns the mean of every class; NaN where a class has no image.

    Privacy: post-processing of DP output.

    Args:
        values: a feature of `image_features`, shape (n, d).
        labels: shape (n,), below num_classes.
        num_classes: at least 1.

    Returns:
        Shape (num_classes, d).
    """
    is_of = labels == np.arange(num_classes)[:, None]
    counts = is_of.sum(1)[:, None]
    sums = is_of.astype(values.dtype) @ values
    means = sums / np.maximum(1, counts)
    return np.where(counts > 0, means, np.nan).astype(np.float64)
