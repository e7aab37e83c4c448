"""Tables A1 and A2 of the paper, to print beside our own numbers.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, appendix D (averages over five
    runs; the published epsilon of 10 is not a valid bound, see docs/privacy.md).
"""

from fedgs.evaluation.classifiers import NAMES

_A1 = {
    "Real": "0.98 0.99 0.73 0.93 0.84 0.88 0.56 0.91 0.88 0.92 0.93 0.97 0.91",
    "GAN (non-private)": (
        "0.84 0.84 0.28 0.46 0.80 0.40 0.71 0.50 0.84 0.81 0.83 0.39 0.44"
    ),
    "G-PATE": "0.25 0.51 0.11 0.36 0.71 0.13 0.61 0.11 0.60 0.24 0.26 0.33 0.15",
    "DP-SGD GAN": "0.60 0.64 0.32 0.44 0.62 0.36 0.37 0.45 0.59 0.56 0.60 0.63 0.60",
    "DP-Merf": "0.63 0.63 0.38 0.43 0.76 0.29 0.57 0.36 0.72 0.58 0.66 0.66 0.70",
    "DP-Merf AE": "0.54 0.68 0.21 0.33 0.50 0.27 0.17 0.20 0.55 0.43 0.55 0.45 0.54",
    "GS-WGAN": "0.79 0.80 0.21 0.45 0.77 0.35 0.64 0.39 0.78 0.76 0.79 0.52 0.50",
}
_A2 = {
    "Real": "0.88 0.91 0.56 0.84 0.65 0.79 0.59 0.83 0.80 0.84 0.84 0.88 0.83",
    "GAN (non-private)": (
        "0.77 0.73 0.41 0.57 0.59 0.53 0.55 0.44 0.77 0.77 0.76 0.69 0.65"
    ),
    "G-PATE": "0.30 0.50 0.42 0.38 0.57 0.24 0.57 0.25 0.55 0.30 0.35 0.33 0.49",
    "DP-SGD GAN": "0.50 0.46 0.21 0.32 0.50 0.33 0.28 0.38 0.55 0.39 0.51 0.51 0.52",
    "DP-Merf": "0.56 0.54 0.33 0.40 0.62 0.25 0.59 0.27 0.67 0.46 0.59 0.61 0.62",
    "DP-Merf AE": "0.56 0.62 0.26 0.45 0.54 0.36 0.12 0.30 0.65 0.40 0.50 0.55 0.55",
    "GS-WGAN": "0.65 0.64 0.25 0.47 0.55 0.40 0.48 0.38 0.67 0.65 0.68 0.54 0.47",
}


def _columns(table: dict[str, str]) -> dict[str, dict[str, float]]:
    return {
        title: dict(zip(NAMES, map(float, numbers.split()), strict=True))
        for title, numbers in table.items()
    }


PUBLISHED = {  # data: trained on: classifier: accuracy
    "mnist": _columns(_A1),
    "mnist-by-writer": _columns(_A1),  # the same images
    "fashion-mnist": _columns(_A2),
}
