"""What the members of the family of second moments are called: in tables, figures, folders and on a terminal.

A member is one choice of column exponent x and row exponent y, with or without mean-free updates. All functions take
the settings of an [optimizer] section with `embeddings = "coupled"`, as a config or the result of a run has them;
results of version 0.1.0 have no exponents, and are Coupled Adam.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# By column and row exponent: in words, and short for folders and narrow tables.
CORNERS = {
    (1.0, 0.0): ("Coupled Adam", "coupled"),
    (1.0, 1.0): ("factored", "factored"),
    (0.0, 1.0): ("one number a row", "per-row"),
    (0.0, 0.0): ("one number a table", "per-table"),
}
BETWEEN = ("partially coupled", "partial")
MEAN_FREE = "mean-free"


def is_coupled_adam(settings: Mapping[str, Any]) -> bool:
    """Whether it is the paper's method, whatever its scale exponent n, and no other member of the family.

    Example:
        >>> is_coupled_adam({"scale_exponent": 2.0}), is_coupled_adam({"mean_free": True})
        (True, False)
    """
    return not _exponents(settings) and not settings.get("mean_free")


def member_name(settings: Mapping[str, Any]) -> str:
    """The name of a member in words.

    Example:
        >>> member_name({"row_exponent": 0.25, "mean_free": True}), member_name({"row_exponent": 1.0})
        ('partially coupled (y = 0.25, mean-free)', 'factored')
        >>> member_name({"scale_exponent": 2.0, "mean_free": True})
        'Coupled Adam (mean-free, n = 2)'
    """
    name, _ = _corner(settings) or BETWEEN
    parts = [*([] if _corner(settings) else _exponents(settings)), *_further_parts(settings)]
    return f"{name} ({', '.join(parts)})" if parts else name


def short_member_name(settings: Mapping[str, Any]) -> str:
    """The name of a member in few characters, which a folder can be called after.

    Example:
        >>> short_member_name({"row_exponent": 0.25, "mean_free": True}), short_member_name({"scale_exponent": -2.0})
        ('partial y=0.25 mean-free', 'coupled n=-2')
        >>> short_member_name({"row_exponent_start": 0.75, "row_exponent": 0.25, "anneal": "10%"})
        'partial y=0.75-0.25'
    """
    _, name = _corner(settings) or BETWEEN
    parts = [*([] if _corner(settings) else _exponents(settings)), *_further_parts(settings)]
    return " ".join([name, *shortened(parts)])


def shortened(parts: Sequence[str]) -> list[str]:
    """Parts of a name without spaces.

    Example:
        >>> shortened(["y = 0.75 to 0.25", "n = 2"])
        ['y=0.75-0.25', 'n=2']
    """
    return [part.replace(" = ", "=").replace(" to ", "-") for part in parts]


def member_parts(settings: Mapping[str, Any]) -> list[str]:
    """What sets a member apart from Coupled Adam, for a list in brackets.

    Example:
        >>> member_parts({"row_exponent": 1.0, "mean_free": True, "scale_exponent": 0.0})
        ['y = 1', 'mean-free']
    """
    return [*_exponents(settings), *_further_parts(settings)]


def _corner(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of a member that has one of its own; None between them, and where the row exponent is annealed."""
    if settings.get("row_exponent_start") is not None:
        return None
    return CORNERS.get((settings.get("column_exponent", 1.0), settings.get("row_exponent", 0.0)))


def _exponents(settings: Mapping[str, Any]) -> list[str]:
    """The exponents that are not Coupled Adam's."""
    column, row, start = (
        settings.get("column_exponent", 1.0),
        settings.get("row_exponent", 0.0),
        settings.get("row_exponent_start"),
    )
    parts = [] if column == 1.0 else [f"x = {column:g}"]
    if start is not None:
        return [*parts, f"y = {start:g} to {row:g}"]
    return parts if row == 0.0 else [*parts, f"y = {row:g}"]


def _further_parts(settings: Mapping[str, Any]) -> list[str]:
    exponent = settings.get("scale_exponent") or 0.0
    return [*([MEAN_FREE] if settings.get("mean_free") else []), *([f"n = {exponent:g}"] if exponent else [])]
