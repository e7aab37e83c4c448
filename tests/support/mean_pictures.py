"""What a release of group means shows of a group's images, but for its noise."""

import numpy as np
from scipy import fft

from fedgs.evaluation.images import LabelledImages


def mean_pictures(group: LabelledImages, count: int) -> LabelledImages:
    """Returns the mean picture of each class, of `count` x `count` low frequencies."""
    classes = np.unique(group.labels)
    means = [group.images[group.labels == label].mean(0) for label in classes]
    frequencies = fft.dctn(np.stack(means), axes=(2, 3), norm="ortho")
    frequencies[:, :, count:] = 0
    frequencies[:, :, :, count:] = 0
    pictures = fft.idctn(frequencies, axes=(2, 3), norm="ortho")
    return LabelledImages(pictures.astype(np.float32), classes)
