"""The picture of the README: a row of real images above a row of a run's samples.

    python -m experiments.front_page RUN --output docs/images/radiographs.png

The real images are the first ones of each class that the run has not seen; the samples
are the first ones that `fedgs sample RUN` draws of each class. None are chosen.
"""

import sys

import numpy as np
from numpy.typing import NDArray

from fedgs.app.flags import OutputOption, RunArgument, run_command
from fedgs.evaluation.images import load_real
from fedgs.files import write_atomically
from fedgs.library import load
from fedgs.runs.sample_files import as_png

_COLUMNS = 12
_MAGNIFIED = 3  # each pixel is this many pixels wide and high


def main(run: RunArgument, output: OutputOption) -> None:
    """Draw real images above synthetic ones, the same classes in each column."""
    trained = load(run)
    num_classes = trained.config.num_classes
    of_a_class = _COLUMNS // num_classes
    test = load_real(trained.config).test
    real: list[NDArray[np.float32]] = []
    synthetic: list[NDArray[np.float32]] = []
    for label in range(num_classes):
        of_class = test.images[test.labels == label]
        real.append(of_class[:of_a_class])
        drawn = trained.sample(of_a_class, labels=label)
        synthetic.append(drawn.images)
    # Pixels are repeated and not smoothed: the picture shows what there is.
    rows = np.concatenate([*real, *synthetic])
    large = rows.repeat(_MAGNIFIED, axis=2).repeat(_MAGNIFIED, axis=3)
    columns = of_a_class * num_classes
    write_atomically(output, as_png(large, columns))


if __name__ == "__main__":
    sys.exit(run_command(main))
