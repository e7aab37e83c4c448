"""How an epsilon and a delta are written: never less than they are.

A bound that is rounded to nearest claims more than was proved half of the time. So the
one form of an upper bound is rounded up, and that of a lower bound, of an audit, down.

>>> upper(24.38161), upper(610.336), upper(10.0), upper(1e-5)
('24.39', '610.34', '10', '1e-05')
>>> lower(24.38161)
'24.38'
"""

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

_ANY_SIZE = Context(prec=700)  # digits of the largest and the smallest float


def upper(value: float | None, digits: int = 4) -> str:
    """Returns an upper bound in words, rounded up; "unbounded" for None and infinity.

    Args:
        value: at least 0.
        digits: how many stay; from 100 to a million two behind the point. From a
            million on the form is 2.171e+08, because nobody counts so many digits.
    """
    return _rounded(value, digits, ROUND_CEILING)


def lower(value: float | None, digits: int = 4) -> str:
    """Returns a lower bound in words, rounded down; as `upper`."""
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float | None, digits: int, way: str) -> str:
    if value is None:
        return "unbounded"
    if value == float("inf"):
        return "unbounded"
    typed = repr(float(value))  # 1e-5 as it was typed, not as it is stored
    exact = Decimal(typed)
    places = digits - 1 - exact.adjusted()
    if 100 <= value < 1e6:
        places = 2
    last_digit = Decimal(1).scaleb(-places)
    kept = exact.quantize(last_digit, way, _ANY_SIZE)
    if value >= 1e6:
        return f"{float(kept):.{digits - 1}e}"
    # The float of so few digits is written with the same digits again.
    text = repr(float(kept))
    return text.removesuffix(".0")
