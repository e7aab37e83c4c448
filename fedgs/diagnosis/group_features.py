"""What the samples of one generator look like, as vectors that a bug changes.

`intensity` changes its sign if the images are inverted and `orientation` if they are
rotated by 90 degrees; neither notices the other's bug. So a share f of spoilt images
multiplies the vector by 1 - 2 f, and f can be read from it. `kernel_means` and
`classifier_accuracies` notice any difference.

Source: Bigün and Granlund, "Optimal orientation detection of linear symmetry", ICCV
1987 (structure tensor); Gretton et al., "A kernel two-sample test", JMLR 2012;
Lopez-Paz and Oquab, "Revisiting classifier two-sample tests", ICLR 2017.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Images = NDArray[np.float32]
Labels = NDArray[np.int64]
Array = NDArray[np.float64]
_SMOOTHING = 1.0  # pixels: the noise of a generator is finer than a stroke
_COMPONENTS = 32
_CELLS = 8  # along each side
_LEVELS, _RINGS = 8, 6
# Of the features: noise of the training alone changes how sharp samples are.
IS_LEARNED = np.array([True, True, False, False, False])
_LEAST_CONTRAST = 0.001  # per pixel, likewise
_LEAST_POWER = 1e-4  # per pixel: what is below it looks black


def intensity(images: Images) -> Array:
    """Returns 1 - 2 m, where m is the mean pixel: inversion changes its sign.

    Privacy: post-processing of DP output.

    Args:
        images: shape (n, C, S, S), in [0, 1].

    Returns:
        Shape (1,), from -1 (all white) to 1 (all background).

    >>> intensity(np.full((1, 1, 2, 2), 0.25, np.float32))
    array([0.5])
    """
    return np.array([1 - 2 * images.mean(dtype=np.float64)])


def orientation(images: Images, labels: Labels, num_classes: int) -> Array:
    """Returns the direction and strength of the strokes of every class.

    Of a class, from the structure tensor J summed over its images and pixels:
    (Jxx - Jyy, 2 Jxy) / (Jxx + Jyy), the gradient's direction at twice its angle. A
    rotation by 90 degrees, either way, exchanges Jxx and Jyy and changes the sign of
    Jxy: the sign of the vector. Inversion changes all gradients' sign, which J does not
    notice. A rotation by 180 degrees and a reflection at both axes go unseen.

    Privacy: post-processing of DP output.

    Args:
        images: shape (n, C, S, S), in [0, 1].
        labels: shape (n,), below num_classes.
        num_classes: at least 1.

    Returns:
        Shape (2 num_classes,), of norm 0 (no direction) to 1; a class without
        gradients is 0.
    """
    found = np.zeros((num_classes, 2))
    per_image = _structure(images)
    for label in range(num_classes):
        difference, mixed, energy = per_image[:, labels == label].sum(1)
        if energy > 0:
            found[label] = difference / energy, mixed / energy
    return found.ravel() / np.sqrt(num_classes)


def _structure(images: Images) -> Array:
    """Returns Jxx - Jyy, 2 Jxy and Jxx + Jyy of every image, shape (3, n)."""
    return _tensor(images).sum((2, 3))


def _tensor(images: Images) -> Array:
    """Returns Jxx - Jyy, 2 Jxy and Jxx + Jyy of every pixel, shape (3, n, s, s)."""
    smooth = gaussian_filter(
        images.astype(np.float64), (0, 0, _SMOOTHING, _SMOOTHING), mode="nearest"
    )
    along_x, along_y = np.diff(smooth, axis=3), np.diff(smooth, axis=2)
    gx = (along_x[:, :, 1:] + along_x[:, :, :-1]) / 2
    gy = (along_y[:, :, :, 1:] + along_y[:, :, :, :-1]) / 2
    products = [(gx * gx - gy * gy), 2 * gx * gy, gx * gx + gy * gy]
    return np.stack([product.sum(1) for product in products])


def _directions(images: Images) -> Images:
    """Returns where strokes of which direction are, shape (n, 3 * 8 * 8).

    The structure tensor's parts, summed over 8 x 8 cells, as shares of all gradients of
    an image: neither brightness nor contrast changes them. Of a blank one 0.
    """
    parts = _tensor(images)
    pool = _cells(parts.shape[-1])
    cells = (pool @ parts @ pool.T).reshape(3, len(images), -1)
    least = _LEAST_CONTRAST**2 * np.prod(images.shape[1:])
    shares = cells / (parts[2].sum((1, 2))[:, None] + least)
    return np.concatenate(shares, axis=1).astype(np.float32)


def _cells(side: int) -> Array:
    """Returns which share of each pixel lies in each of the cells, (cells, side)."""
    edges = np.linspace(0, side, _CELLS + 1)
    pixels = np.arange(side)
    upper = np.minimum(edges[1:, None], pixels + 1)
    return np.maximum(0, upper - np.maximum(edges[:-1, None], pixels))


def gram(features: list[Array]) -> Array:
    """Returns all inner products of vectors.

    Privacy: post-processing of DP output.

    >>> gram([np.array([1.0, 2.0]), np.array([0.0, 3.0])])
    array([[5., 6.],
           [6., 9.]])
    """
    stacked = np.stack(features)
    return stacked @ stacked.T


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

    flat = np.concatenate(groups).reshape(sum(map(len, groups)), -1)
    squared = euclidean_distances(flat, squared=True)
    kernel = np.exp(-squared / (2 * max(float(np.median(squared)), 1e-12)))
    count = len(groups)
    return kernel.reshape(count, len(flat) // count, count, -1).mean((1, 3), np.float64)


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
    centres = np.arange(_LEVELS)
    shares = [np.maximum(0, 1 - np.abs(place - c)).mean(1) for c in centres]
    return np.stack(shares, axis=1).astype(np.float32)


def _power(images: Images) -> Images:
    """Returns the log of each ring's power, as a share: contrast does not change it."""
    side = images.shape[-1]
    power = np.square(np.abs(np.fft.rfft2(images))).sum(1).reshape(len(images), -1)
    y, x = np.fft.fftfreq(side), np.fft.rfftfreq(side)
    radius = np.hypot(y[:, None], x[None]).ravel()
    ring = np.minimum((radius * 2 * _RINGS).astype(int), _RINGS - 1)
    is_in = (ring[:, None] == np.arange(_RINGS)) & (radius > 0)[:, None]
    mean = power @ (is_in / np.maximum(1, is_in.sum(0)))
    mean = mean / side**2 + _LEAST_POWER
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
    return {
        name: _filled(
            np.stack(
                [
                    class_means(own[name], y, num_classes)
                    for own, y in zip(groups, labels, strict=True)
                ]
            )
        )
        / unit
        for name, unit in units.items()
    }


def spreads(groups: list[dict[str, Images]]) -> dict[str, float]:
    """Returns how far images are from their group's mean, root mean square, by feature.

    It does not depend on which group is in which cohort.

    Privacy: post-processing of DP output.
    """
    return {
        name: max(1e-3, float(np.sqrt(np.mean([g[name].var(0).sum() for g in groups]))))
        for name in groups[0]
    }


def _filled(means: Array) -> Array:
    """Returns class means whose NaN are replaced by the mean of the other groups."""
    is_known = np.isfinite(means)
    total = np.where(is_known, means, 0).sum(0) / np.maximum(1, is_known.sum(0))
    return np.where(is_known, means, total)


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
    return np.where(counts > 0, sums / np.maximum(1, counts), np.nan).astype(np.float64)


def principal_components(groups: list[Images]) -> list[Array]:
    """Returns the images in the first principal components of all groups together.

    Privacy: post-processing of DP output.

    Args:
        groups: arrays (n, C, S, S) of one shape.

    Returns:
        For each group shape (n, k), k at most 32.
    """
    from sklearn.decomposition import PCA

    flat = np.concatenate(groups).reshape(sum(map(len, groups)), -1).astype(np.float64)
    if not np.ptp(flat, axis=0).any():  # PCA divides by the variance
        return [np.zeros((len(group), 1)) for group in groups]
    model = PCA(min(_COMPONENTS, *flat.shape), svd_solver="full")
    return np.split(model.fit_transform(flat), np.cumsum([len(g) for g in groups])[:-1])


def classifier_accuracies(components: list[Array], rows: NDArray[np.bool_]) -> Array:
    """Returns how well a linear classifier tells the two cohorts apart.

    Each group in turn is left out of the training and tested on: the classifier has to
    learn the cohort and not the generator, for any two generators can be told apart.

    Privacy: post-processing of DP output.

    Args:
        components: of the 2G groups.
        rows: of `permutation.splits`.

    Returns:
        Accuracy for every split, shape (number of splits,); a coin's is 0.5, and less
        is usual where the cohorts are alike.
    """
    size = len(components[0])
    cohorts = rows.astype(np.int64).repeat(size, axis=1)
    return np.array([np.mean(_predicted(components, own) == own) for own in cohorts])


def class_shares(
    components: list[Array], labels: list[Labels], num_classes: int
) -> Array:
    """Returns what share of a group's images looks like each class.

    A linear classifier of all other groups decides. Labels are drawn by whoever draws
    the samples, uniformly: how often a class is in the data does not reach a
    conditional generator. What is seen is a class that looks like another.

    Privacy: post-processing of DP output.

    Args:
        components: of all groups.
        labels: of all groups, each shape (n,).
        num_classes: at least 1.

    Returns:
        Shape (number of groups, num_classes); rows sum to 1.
    """
    shown = np.concatenate(labels)
    if len(np.unique(shown)) < 2:
        seen = np.zeros_like(shown)
    else:
        seen = _predicted(components, shown)
    by_group = np.split(seen, len(labels))
    counts = [np.bincount(group, minlength=num_classes) for group in by_group]
    return np.array(counts) / len(by_group[0])


def _predicted(components: list[Array], labels: Labels) -> Labels:
    """Returns what classifiers say of every group that saw all others but it.

    Args:
        components: of all groups, of one size.
        labels: of all their images.
    """
    x, groups = np.concatenate(components), np.arange(len(components))
    group = groups.repeat(len(components[0]))
    parts = [
        _fit_and_predict(x[group != one], labels[group != one], x[group == one])
        for one in groups
    ]
    return np.concatenate(parts)


def _fit_and_predict(x: Array, y: Labels, other: Array) -> Labels:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    classes = np.unique(y)
    if not x.any():  # no image differs from any other
        return np.full(len(other), classes[0])
    priors = np.full(len(classes), 1 / len(classes))
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=1e-3, priors=priors)
    return np.asarray(model.fit(x, y).predict(other))
