"""Amounts as people write them: tokens as "5B" or "300k", steps as a number or as a share of the run, "1%"."""

import math
import re
from fractions import Fraction

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def parse_tokens(amount: object) -> object:
    """The whole number that an amount stands for; what is no amount comes back as it is, for the caller to refuse.

    Example:
        >>> parse_tokens("5B"), parse_tokens("1.5 M"), parse_tokens("300k"), parse_tokens(2e9), parse_tokens("1.5")
        (5000000000, 1500000, 300000, 2000000000, '1.5')
    """
    if isinstance(amount, float) and amount.is_integer():
        return int(amount)
    match = _AMOUNT.fullmatch(amount.strip()) if isinstance(amount, str) else None
    if match is None:
        return amount
    # Fractions, because 4.35 * 1e9 in floating point is not a whole number.
    exact = Fraction(match[1]) * _SUFFIXES[match[2].lower()]
    return int(exact) if exact.denominator == 1 else amount


def percentage(text: str) -> Fraction | None:
    """The share that "1%" stands for, exactly; None when the text is none, or above 100%.

    Example:
        >>> percentage("1%"), percentage("0.5 %"), percentage("1"), percentage("101%")
        (Fraction(1, 100), Fraction(1, 200), None, None)
    """
    match = _PERCENT.fullmatch(text.strip())
    share = Fraction(match[1]) / 100 if match else None
    return share if share is not None and share <= 1 else None


def steps(amount: int | str, total_steps: int) -> int:
    """A number of steps, or that share of all steps, rounded up.

    Args:
        amount: steps, or a percentage such as "1%".
        total_steps: the steps of the whole run.

    Example:
        >>> steps(100, 5000), steps("1%", 5000), steps("1%", 5001)
        (100, 50, 51)
    """
    if isinstance(amount, int):
        return amount
    share = percentage(amount)
    if share is None:
        raise ValueError(f'{amount!r}: expected a whole number of steps or a share of the run such as "1%"')
    return math.ceil(share * total_steps)


def short(amount: float) -> str:
    """An amount in at most four characters and a suffix, for tables.

    Example:
        >>> short(5_000_000_000), short(124_439_808), short(307_200), short(300), short(999_999)
        ('5B', '124M', '307k', '300', '1M')
    """
    for suffix, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        # 999.5k already rounds to 1000k, which is written 1M.
        if amount >= 0.9995 * size:
            return f"{float(f'{amount / size:.3g}'):g}{suffix}"
    return f"{amount:.3g}"
