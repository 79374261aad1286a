"""Format numbers, amounts, durations and names as text, and parse amounts.

Every number on a terminal, in a log line, in a table, on a page and in an error message is formatted here, so that a
quantity reads the same wherever it appears. Whole numbers that must be exact are written `f"{number:,}"`. Number files
(CSV, JSON lines, TOML) and names of runs keep their own formats.

Tokens are written as "5B" or "300k", steps as a number or as a percentage of the run, "1%". A mean with its standard
deviation is written 0.123(4), which stands for 0.123 ± 0.004. The number in parentheses is in units of the mean's last
digit: 6.09(11) is 6.09 ± 0.11 and 25.0(11) is 25.0 ± 1.1.
"""

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from coupled_adam.base.errors import UserError

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")

SHORTHAND = re.compile(r"(?P<mean>-?\d+(?:\.(?P<decimals>\d+))?) ?(?:\((?P<std>\d+(?:\.\d+)?)\))?")

_LATEX_LETTERS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "[": "{[}",  # after the end of a row, LaTeX would read it as an argument
    "]": "{]}",
    "\N{EN DASH}": "--",
    "‖": r"\ensuremath{\|}",
    "μ": r"\ensuremath{\mu}",
    "\N{GREEK SMALL LETTER RHO}": r"\ensuremath{\rho}",
    "κ": r"\ensuremath{\kappa}",
    "↓": r"\ensuremath{\downarrow}",
    "↑": r"\ensuremath{\uparrow}",
    "±": r"\ensuremath{\pm}",
}


def printable(text: str) -> str:
    """Escape control characters, so that text from a file cannot move the terminal's cursor or break a line.

    Example:
        >>> printable("wte\\x1b[2J")
        'wte\\\\x1b[2J'
    """
    return text if text.isprintable() else repr(text)[1:-1]


def printable_lines(text: str) -> str:
    """Apply `printable` to each line of a text."""
    return "\n".join(map(printable, text.splitlines()))


def some_of(names: Iterable[str], most: int) -> str:
    """Join names with commas; after the first `most`, only count the rest.

    Example:
        >>> some_of(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun, in the singular or the plural.

    Args:
        number: how many.
        noun: the singular, such as "run" or, with its verb, "run is".
        plural: the noun with an "s" if not given.

    Example:
        >>> counted(1, "run"), counted(12_000, "run"), counted(0, "batch", "batches"), counted(2, "run is", "runs are")
        ('1 run', '12,000 runs', '0 batches', '2 runs are')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def escape_latex(text: str) -> str:
    r"""Escape plain text for LaTeX.

    Example:
        >>> print(escape_latex("coupled_adam, 5%"))
        coupled\_adam, 5\%
    """
    return "".join(_LATEX_LETTERS.get(letter, letter) for letter in text)


def fixed(value: float, decimals: int) -> str:
    """Format a number with a fixed number of decimals, never as a negative zero.

    Example:
        >>> fixed(3.88151, 3), fixed(-0.0001, 2), fixed(float("nan"), 3)
        ('3.882', '0.00', 'nan')
    """
    return f"{value:z.{decimals}f}"


def significant(value: float, digits: int) -> str:
    """Format a number with at most that many significant digits, and exponents without leading zeros.

    Example:
        >>> significant(0.73721, 3), significant(0.5, 3), significant(3.27e-5, 2), significant(12_345, 3)
        ('0.737', '0.5', '3.3e-5', '1.23e4')
    """
    return _short_exponent(f"{value:.{digits}g}")


def four_digits(value: float) -> str:
    """Format a number with four significant digits.

    Example:
        >>> four_digits(0.123456), four_digits(-54.0), four_digits(1e-12)
        ('0.1235', '-54', '1e-12')
    """
    return significant(value, 4)


def percent(share: float) -> str:
    """Format a share in percent, with one digit below 1%.

    Example:
        >>> percent(0.853), percent(0.0213), percent(0.0042), percent(9e-9)
        ('85%', '2%', '0.4%', '0%')
    """
    return f"{share:.0%}" if share >= 0.0095 or share < 5e-5 else f"{100 * share:.1g}%"


def scientific(value: float) -> str:
    """Format a small number with two digits and an exponent.

    Example:
        >>> scientific(2.94e-8), scientific(6e-4), scientific(0)
        ('2.9e-8', '6.0e-4', '0')
    """
    return _short_exponent(f"{value:.1e}") if value else "0"


def setting(value: float) -> str:
    """Format the value of a setting, such as a learning rate, with up to six digits.

    Example:
        >>> setting(0.95), setting(10.0), setting(6e-4), setting(3e-5)
        ('0.95', '10', '0.0006', '3e-5')
    """
    return significant(value, 6)


def _short_exponent(text: str) -> str:
    """Write 2.9e-8 instead of 2.9e-08."""
    return re.sub(r"e\+?(-?)0*(?=\d)", r"e\1", text)


def parse_tokens(amount: object) -> object:
    """Parse an amount as a whole number; return anything else unchanged, for the caller to reject.

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
    """Parse a percentage such as "1%" as an exact fraction; None if it is not a percentage or exceeds 100%.

    Example:
        >>> percentage("1%"), percentage("0.5 %"), percentage("1"), percentage("101%")
        (Fraction(1, 100), Fraction(1, 200), None, None)
    """
    match = _PERCENT.fullmatch(text.strip())
    share = Fraction(match[1]) / 100 if match else None
    return share if share is not None and share <= 1 else None


def steps(amount: int | str, total_steps: int) -> int:
    """Resolve a number of steps given as a count or as a percentage of all steps, rounded up.

    Args:
        amount: steps, or a percentage such as "1%".
        total_steps: number of steps in the run.

    Example:
        >>> steps(100, 5000), steps("1%", 5000), steps("1%", 5001)
        (100, 50, 51)
    """
    if isinstance(amount, int):
        return amount
    share = percentage(amount)
    if share is None:
        raise UserError(f'{amount!r}: expected a whole number of steps or a share of the run such as "1%"')
    return math.ceil(share * total_steps)


def short(amount: float) -> str:
    """Format an amount in at most four characters and a suffix, for tables.

    Example:
        >>> short(5_000_000_000), short(124_439_808), short(307_200), short(300), short(999_999)
        ('5B', '124M', '307k', '300', '1M')
    """
    for suffix, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        # 999.5k rounds to 1000k, which is written 1M.
        if amount >= 0.9995 * size:
            return f"{float(f'{amount / size:.3g}'):g}{suffix}"
    return f"{amount:.3g}"


def duration(seconds: float) -> str:
    """Format a duration in its two largest units; below ten seconds, with one decimal.

    Example:
        >>> duration(4.26), duration(42), duration(80), duration(3780), duration(273_600)
        ('4.3 s', '42 s', '1 min 20 s', '1 h 3 min', '3 d 4 h')
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:  # above it, rounding adds a digit
        return f"{max(0.0, seconds):.1f} s"
    seconds = round(seconds)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    if minutes:
        return f"{minutes} min {seconds % 60} s"
    return f"{seconds} s"


def size_text(size: int) -> str:
    """Format a number of bytes in a suitable unit.

    Example:
        >>> size_text(812), size_text(98_304), size_text(3_200_000), size_text(12_000_000_000)
        ('812 bytes', '98.3 KB', '3.20 MB', '12.0 GB')
    """
    if size < 1000:
        return counted(size, "byte")
    value, unit = size / 1000, "KB"
    for larger in ("MB", "GB", "TB", "PB"):
        if value < 999.5:  # above it, rounding adds a digit
            break
        value, unit = value / 1000, larger
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{fixed(value, decimals)} {unit}"


def energy(joules: float) -> str:
    """Format an energy in kilowatt hours.

    Example:
        >>> energy(3.6e6), energy(331_000)
        ('1 kWh', '0.0919 kWh')
    """
    return f"{significant(joules / 3.6e6, 3)} kWh"


class Value(NamedTuple):
    """A mean and its standard deviation, at the printed precision."""

    mean: float
    std: float | None
    """None if not given, as for a single run."""
    decimals: int


def shorthand(mean: float, std: float | None, decimals: int) -> str:
    """Format a mean and its standard deviation as 0.123(4).

    Args:
        mean: any finite number.
        std: the standard deviation, not negative; None prints only the mean.
        decimals: number of decimals of the mean, at least 0.

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
    shown = fixed(mean, decimals)
    if std is None:
        return shown
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"standard deviation is {std}; it must be finite and not negative, or None for a single run")
    units = fixed(std, decimals).replace(".", "").lstrip("0") or "0"
    return f"{shown}({units})"


def parse_shorthand(text: str) -> Value:
    """Parse a value such as 0.123(4), with or without a space before the parenthesis.

    A standard deviation with a decimal point, as in 25.0(1.1), is read literally: the paper and version 0.1 use that
    form from ten units on.

    Example:
        >>> parse_shorthand("1.10 (6)")
        Value(mean=1.1, std=0.06, decimals=2)
        >>> parse_shorthand("25.0(11)").std, parse_shorthand("25.0(1.1)").std
        (1.1, 1.1)
    """
    match = SHORTHAND.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{text!r} is not a valid value; write it as 0.123(4) or 0.123")
    decimals = len(match["decimals"] or "")
    std = match["std"]
    if std is None:
        return Value(float(match["mean"]), None, decimals)
    # Division by a power of ten is rounded once, so 6 / 100 is the float 0.06; 6 * 0.01 is not.
    return Value(float(match["mean"]), float(std) if "." in std else int(std) / 10**decimals, decimals)
