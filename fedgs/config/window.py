"""The setting `window`: which values of a picture become black and white.

>>> read_window("-1000, 400")
(-1000.0, 400.0)

This module imports no tensor library.
"""

import math

from fedgs.config.fields import shortened
from fedgs.errors import UserError

REMEDY = "give --window LOW,HIGH, two numbers, the lower one first, as in 0,4095"
# A division by less may overflow, and no device tells such values apart.
SMALLEST_WIDTH = 1e-12


def read_window(text: str | None) -> tuple[float, float] | None:
    """Returns the values that become black and white, None where the text is unset.

    Privacy: public, as settings are.

    Raises:
        UserError: the text is no pair of finite numbers in rising order, or they are
            too close together or too far apart to compute with.
    """
    if text is None:
        return None
    words = text.split(",")
    try:
        limits = [float(word) for word in words]
    except ValueError:
        limits = []
    is_pair = len(limits) == 2 and all(math.isfinite(limit) for limit in limits)
    if not is_pair or limits[0] >= limits[1]:
        raise UserError(f"window = {shortened(text)!r}: {REMEDY}")
    low = limits[0]
    high = limits[1]
    width = high - low
    if width < SMALLEST_WIDTH or not math.isfinite(width):
        raise UserError(
            f"window = {shortened(text)!r}: it is {width:g} wide; give --window "
            f"LOW,HIGH with a finite width of at least {SMALLEST_WIDTH:g}"
        )
    return low, high
