r"""The paper's shorthand for a mean and its standard deviation: 0.123(4) stands for 0.123 ± 0.004.

The number in parentheses counts units of the last digit, as in 1.10(6) and 15(3). From ten units on it is written out
instead, as in 25.0(1.1). A shorthand is a plain string; the other forms are made from it.
"""

import html
import math
import re
from typing import NamedTuple

# What a table shows where there is nothing to show.
MISSING = "\N{EN DASH}"

SHORTHAND = re.compile(r"(?P<mean>-?\d+(?:\.(?P<decimals>\d+))?) ?(?:\((?P<std>\d+(?:\.\d+)?)\))?")


class Value(NamedTuple):
    """A mean and its standard deviation as far as they are printed."""

    mean: float
    std: float | None
    """None: not given, as for a single run."""
    decimals: int


def shorthand(mean: float, std: float | None, decimals: int) -> str:
    """A mean and its standard deviation as the paper prints them.

    Args:
        mean: any finite number.
        std: the standard deviation, not negative; None where there is none, and then only the mean is printed.
        decimals: decimals of the mean, from 0.

    Returns:
        The shorthand, in plain text.

    Example:
        >>> shorthand(0.1234, 0.0042, 3), shorthand(15.2, 3.1, 0), shorthand(3.141, 0.002, 2), shorthand(25.0, 1.1, 1)
        ('0.123(4)', '15(3)', '3.14(0)', '25.0(1.1)')
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
    written_out = f"{std:.{decimals}f}"
    units = written_out.replace(".", "").lstrip("0") or "0"
    return f"{shown}({units if len(units) == 1 else written_out})"


def parse_shorthand(text: str) -> Value:
    """Read a shorthand back, with or without a space before the parenthesis.

    Example:
        >>> parse_shorthand("1.10 (6)")
        Value(mean=1.1, std=0.06, decimals=2)
        >>> parse_shorthand("25.0(1.1)").std
        1.1
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


def to_markdown(text: str, *, bold: bool = False) -> str:
    """A text for a cell of a Markdown table.

    Example:
        >>> to_markdown("0.123(4)", bold=True)
        '**0.123(4)**'
    """
    escaped = re.sub(r"([\\|*_`<\[\]])", r"\\\1", text)
    return f"**{escaped}**" if bold else escaped


def to_latex(text: str, *, bold: bool = False) -> str:
    r"""A text for a cell of a LaTeX table; a shorthand in the form of the paper's tables.

    Example:
        >>> print(to_latex("-54(3)", bold=True))
        \textbf{$-$54 {\tiny (3)}}
    """
    match = SHORTHAND.fullmatch(text)
    if match:
        shown = match["mean"].replace("-", "$-$") + (f" {{\\tiny ({match['std']})}}" if match["std"] else "")
    else:
        shown = escape_latex(text)
    return f"\\textbf{{{shown}}}" if bold else shown


def to_html(text: str, *, bold: bool = False) -> str:
    """A text for a cell of an HTML table; the standard deviation of a shorthand is set smaller.

    Example:
        >>> to_html("0.123(4)", bold=True)
        '<b>0.123<small>(4)</small></b>'
    """
    match = SHORTHAND.fullmatch(text)
    if match:
        # U+2212, a minus sign as wide as a plus: a hyphen would be too short and could break the line.
        shown = match["mean"].replace("-", "\N{MINUS SIGN}")
        shown += f"<small>({match['std']})</small>" if match["std"] else ""
    else:
        shown = html.escape(text)
    return f"<b>{shown}</b>" if bold else shown


LATEX_LETTERS = {
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
    "[": "{[}",  # after the end of a row it would be taken for an argument
    "]": "{]}",
    MISSING: "--",
    "‖": r"\ensuremath{\|}",
    "μ": r"\ensuremath{\mu}",
    "\N{GREEK SMALL LETTER RHO}": r"\ensuremath{\rho}",
    "κ": r"\ensuremath{\kappa}",
    "↓": r"\ensuremath{\downarrow}",
    "↑": r"\ensuremath{\uparrow}",
    "±": r"\ensuremath{\pm}",
}


def escape_latex(text: str) -> str:
    r"""Plain text as LaTeX prints it, letter by letter.

    Example:
        >>> print(escape_latex("coupled_adam, 5%"))
        coupled\_adam, 5\%
    """
    return "".join(LATEX_LETTERS.get(letter, letter) for letter in text)
