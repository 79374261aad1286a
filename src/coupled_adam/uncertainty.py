"""A mean and its standard deviation as text, in one notation everywhere: 0.123(4) stands for 0.123 ± 0.004.

The number in parentheses counts units of the last digit of the mean, however many there are: 6.09(11) is 6.09 ± 0.11
and 25.0(11) is 25.0 ± 1.1. A shorthand is a plain string; `study.notation` makes the other forms from it.
"""

import math
import re
from typing import NamedTuple

SHORTHAND = re.compile(r"(?P<mean>-?\d+(?:\.(?P<decimals>\d+))?) ?(?:\((?P<std>\d+(?:\.\d+)?)\))?")


class Value(NamedTuple):
    """A mean and its standard deviation as far as they are printed."""

    mean: float
    std: float | None
    """None: not given, as for a single run."""
    decimals: int


def shorthand(mean: float, std: float | None, decimals: int) -> str:
    """Write a mean and its standard deviation.

    Args:
        mean: any finite number.
        std: the standard deviation, not negative; None where there is none, and then only the mean is printed.
        decimals: decimals of the mean, from 0.

    Returns:
        The shorthand, in plain text.

    Example:
        >>> shorthand(0.1234, 0.0042, 3), shorthand(15.2, 3.1, 0), shorthand(3.141, 0.002, 2), shorthand(25.0, 1.1, 1)
        ('0.123(4)', '15(3)', '3.14(0)', '25.0(11)')
        >>> shorthand(2.433, None, 3)
        '2.433'
    """
    if decimals < 0:
        raise ValueError(f"decimals is {decimals}; pass 0 or more")
    if not math.isfinite(mean):
        raise ValueError(f"mean is {mean}, which has no shorthand; leave it out or show it as missing")
    shown = f"{mean:z.{decimals}f}"  # z: never a negative zero
    if std is None:
        return shown
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"standard deviation is {std}; it must be finite and not negative, or None for a single run")
    units = f"{std:.{decimals}f}".replace(".", "").lstrip("0") or "0"
    return f"{shown}({units})"


def parse_shorthand(text: str) -> Value:
    """Read a shorthand back, with or without a space before the parenthesis.

    A standard deviation with a point of its own, 25.0(1.1), is read as it is: the paper and version 0.1 write it so
    from ten units on.

    Example:
        >>> parse_shorthand("1.10 (6)")
        Value(mean=1.1, std=0.06, decimals=2)
        >>> parse_shorthand("25.0(11)").std, parse_shorthand("25.0(1.1)").std
        (1.1, 1.1)
    """
    match = SHORTHAND.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no shorthand; write it as 0.123(4) or 0.123")
    decimals = len(match["decimals"] or "")
    std = match["std"]
    if std is None:
        return Value(float(match["mean"]), None, decimals)
    # Division by a power of ten is rounded once, so 6 / 100 is the float 0.06; 6 * 0.01 is not.
    return Value(float(match["mean"]), float(std) if "." in std else int(std) / 10**decimals, decimals)
