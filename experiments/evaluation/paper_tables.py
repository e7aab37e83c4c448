"""Columns of the paper's Tables A1 and A2, to print beside our own numbers.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, appendix D (averages over five
    runs; the published epsilon of 10 is not a valid bound, see docs/privacy.md).
"""

from fedgs.evaluation.classifiers import NAMES

_MNIST_REAL = "0.98 0.99 0.73 0.93 0.84 0.88 0.56 0.91 0.88 0.92 0.93 0.97 0.91"
_MNIST_OURS = "0.79 0.80 0.21 0.45 0.77 0.35 0.64 0.39 0.78 0.76 0.79 0.52 0.50"
_FASHION_REAL = "0.88 0.91 0.56 0.84 0.65 0.79 0.59 0.83 0.80 0.84 0.84 0.88 0.83"
_FASHION_OURS = "0.65 0.64 0.25 0.47 0.55 0.40 0.48 0.38 0.67 0.65 0.68 0.54 0.47"


def _column(numbers: str) -> dict[str, float]:
    return dict(zip(NAMES, map(float, numbers.split()), strict=True))


REAL = {  # data: classifier: accuracy
    "mnist": _column(_MNIST_REAL),
    "mnist-by-writer": _column(_MNIST_REAL),  # the same images
    "fashion-mnist": _column(_FASHION_REAL),
}
GS_WGAN = {
    "mnist": _column(_MNIST_OURS),
    "fashion-mnist": _column(_FASHION_OURS),
}
