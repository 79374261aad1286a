"""Table cells in Markdown, LaTeX and HTML: escaped text, and values such as 0.123(4) typeset as in the paper."""

import html
import re
from collections.abc import Callable

from coupled_adam.base.text import SHORTHAND, escape_latex

# Shown in a table for a missing value.
MISSING = "\N{EN DASH}"
# A minus sign as wide as a plus: a hyphen would be too short and could break the line.
MINUS = "\N{MINUS SIGN}"
INTERVAL = re.compile(r"-?[\d.,e+-]+ to -?[\d.,e+-]+")


def to_markdown(text: str, *, bold: bool = False) -> str:
    """Format text for a cell of a Markdown table.

    Example:
        >>> to_markdown("0.123(4)", bold=True)
        '**0.123(4)**'
    """
    escaped = re.sub(r"([\\|*_`<\[\]])", r"\\\1", text)
    return f"**{escaped}**" if bold else escaped


def to_latex(text: str, *, bold: bool = False) -> str:
    r"""Format text for a cell of a LaTeX table; values such as 0.123(4) look as in the paper's tables.

    Example:
        >>> print(to_latex("-54(3)", bold=True))
        \textbf{$-$54 {\tiny (3)}}
    """
    shown = _typeset(text, "$-$", r" {{\tiny ({})}}", escape_latex)
    return f"\\textbf{{{shown}}}" if bold else shown


def to_html(text: str, *, bold: bool = False) -> str:
    """Format text for a cell of an HTML table; the standard deviation in 0.123(4) is set smaller.

    Example:
        >>> to_html("0.123(4)", bold=True)
        '<b>0.123<small>(4)</small></b>'
    """
    shown = _typeset(text, MINUS, "<small>({})</small>", html.escape)
    return f"<b>{shown}</b>" if bold else shown


def _typeset(text: str, minus: str, std: str, escape: Callable[[str], str]) -> str:
    """Format a number with its standard deviation, an interval, or else any text.

    Args:
        text: of a cell.
        minus: replaces the hyphens of numbers.
        std: format of the standard deviation.
        escape: for texts that are neither.
    """
    match = SHORTHAND.fullmatch(text)
    if match:
        return match["mean"].replace("-", minus) + (std.format(match["std"]) if match["std"] else "")
    return text.replace("-", minus) if INTERVAL.fullmatch(text) else escape(text)
