"""Tables 1, A1 and A2 of the paper, to print beside our own numbers.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, appendix D (averages over five
    runs; the published epsilon of 10 is not a valid bound, see docs/privacy.md).
"""

import tomllib
from pathlib import Path
from typing import Any

from fedgs.evaluation.classifiers import CLASSIFIERS

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TABLE_1: dict[str, dict[str, list[str]]] = _TABLES["table1"]
PUBLISHED = {  # data: trained on: classifier: accuracy
    data: {
        title: dict(zip(CLASSIFIERS, map(float, numbers.split()), strict=True))
        for title, numbers in table.items()
    }
    for data, table in _TABLES["classifiers"].items()
}
TABLE_1["mnist-by-writer"] = TABLE_1["mnist"]  # the same images
PUBLISHED["mnist-by-writer"] = PUBLISHED["mnist"]
