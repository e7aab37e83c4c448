"""Tables 1, A1 and A2 of the paper, to print beside our own numbers.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, appendix D (averages over five
    runs; the published epsilon of 10 is not a valid bound, see docs/privacy.md).
"""

import tomllib
from pathlib import Path
from typing import Any

from fedgs.evaluation.classifiers import CLASSIFIERS

_FILE = Path(__file__).with_suffix(".toml")
_TABLES: dict[str, Any] = tomllib.loads(_FILE.read_text())
TABLE_1: dict[str, dict[str, list[str]]] = _TABLES["table1"]
# data: trained on: classifier: accuracy. The file has a line of numbers for each column
# of the paper, in the order of `CLASSIFIERS`, so that it can be compared by eye.
PUBLISHED: dict[str, dict[str, dict[str, float]]] = {}
for _data, _table in _TABLES["classifiers"].items():
    _columns: dict[str, dict[str, float]] = {}
    for _title, _numbers in _table.items():
        _accuracies = [float(number) for number in _numbers.split()]
        _pairs = zip(CLASSIFIERS, _accuracies, strict=True)
        _columns[_title] = dict(_pairs)
    PUBLISHED[_data] = _columns
TABLE_1["mnist-by-writer"] = TABLE_1["mnist"]  # the same images
PUBLISHED["mnist-by-writer"] = PUBLISHED["mnist"]
