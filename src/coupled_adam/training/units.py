"""Numbers as people read them on a progress line: short, with three digits and a prefix where they are large."""

import math

PREFIXES = ("", "k", "M", "G", "T", "P")


def si(value: float) -> str:
    """A number with three digits and an SI prefix.

    Example:
        >>> si(541_234), si(1_900_000), si(36.94e9), si(87)
        ('541k', '1.90M', '36.9G', '87')
    """
    if not math.isfinite(value):
        return str(value)
    thousands = 0
    while abs(value) >= 999.5 and thousands < len(PREFIXES) - 1:
        value /= 1000
        thousands += 1
    if thousands == 0:
        return f"{value:.3g}"
    # 9.995 is shown as 10.0: the thresholds are where rounding adds a digit.
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}{PREFIXES[thousands]}"


def duration(seconds: float) -> str:
    """A length of time in its two largest units.

    Example:
        >>> duration(42), duration(725), duration(3780), duration(273_600)
        ('42s', '12m 05s', '1h 03m', '3d 04h')
    """
    if not math.isfinite(seconds):
        return "?"
    seconds = max(0, round(seconds))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days}d {hours % 24:02d}h"
    if hours:
        return f"{hours}h {minutes % 60:02d}m"
    if minutes:
        return f"{minutes}m {seconds % 60:02d}s"
    return f"{seconds}s"


def learning_rate(value: float) -> str:
    """Two digits and an exponent without leading zeros.

    Example:
        >>> learning_rate(6e-4), learning_rate(0)
        ('6.0e-4', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
