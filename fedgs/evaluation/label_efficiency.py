"""Label efficiency: what a student learns from n labelled synthetic images.

The labels are the generator's, or those that an annotator gives to the images. The
annotator is a classifier that was trained on the real data, so labels by it are not
covered by the generator's epsilon.

Source: Triastcyn, Faltings, "Generating higher-fidelity synthetic datasets with privacy
    guarantees", Algorithms 2022, section 3.2 and Figure 3. The student is a CNN of
    unpublished size there; here it is the CNN of `downstream`.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedgs.evaluation.downstream import CNN, Report, cnn_accuracy
from fedgs.evaluation.images import LabelledImages

NUM_LABELS = (10, 30, 100, 300, 1000, 3000, 10_000)
NUM_STEPS = 300  # at least, however few images


def label_efficiency(
    synthetic: LabelledImages,
    annotated: NDArray[np.int64],
    test: LabelledImages,
    num_classes: int,
    seed: int,
    report: Report,
    num_labels: Sequence[int] = NUM_LABELS,
    num_steps: int = NUM_STEPS,
    device: str = "cpu",
) -> dict[str, dict[str, float]]:
    """Returns the student's test accuracy for each number of labels.

    The images are shuffled once, and the student of n labels sees the first n, so each
    set holds the smaller ones.

    Privacy: reads private data; output private. The test images are real.

    Args:
        synthetic: images with the generator's labels.
        annotated: the annotator's labels of the same images, shape (n,).
        test: real images with labels.
        num_classes: number of labels.
        seed: decides the shuffling, and the student's initialisation and dropout.
        report: is called after every student.
        num_labels: sizes; those above the number of images are left out.
        num_steps: optimizer steps of a student, at least.
        device: cpu or cuda.

    Returns:
        For `generator` and `annotator`: number of labels, as a string, to accuracy.
    """
    sizes = [size for size in num_labels if size <= len(synthetic.labels)]
    order = np.random.default_rng(seed).permutation(len(synthetic.labels))
    labels_by = {"generator": synthetic.labels, "annotator": annotated}
    curves: dict[str, dict[str, float]] = {}
    done = 0
    for teacher, labels in labels_by.items():
        curve: dict[str, float] = {}
        # Each student sees the images of the one before, and more.
        for size in sizes:
            rows = order[:size]
            train = LabelledImages(synthetic.images[rows], labels[rows])
            curve[str(size)] = cnn_accuracy(
                train,
                test,
                num_classes,
                seed,
                device,
                num_epochs=num_epochs(size, num_steps),
            )
            done += 1
            report(done, len(labels_by) * len(sizes))
        curves[teacher] = curve
    return curves


def num_epochs(size: int, num_steps: int) -> int:
    """Returns how often a student sees its images, to make the number of steps.

    >>> num_epochs(10, 300), num_epochs(1000, 300), num_epochs(60_000, 300)
    (300, 19, 3)
    """
    batches = math.ceil(size / CNN.batch_size)
    return max(CNN.num_epochs, math.ceil(num_steps / batches))
