"""Names of the members of the family of second moments, for tables, figures, folders and the terminal.

A member is one choice of column exponent x and row exponent y, with or without mean-free updates. All functions take
the settings of an [optimizer] section with `embeddings = "coupled"`, from a config or a run's result. Results of
version 0.1.0 have no exponents and are Coupled Adam.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coupled_adam.base.text import setting

# By column and row exponent: the name, and a short name for folders and narrow tables.
CORNERS = {
    (1.0, 0.0): ("Coupled Adam", "coupled"),
    (1.0, 1.0): ("factored", "factored"),
    (0.0, 1.0): ("one number per row", "per-row"),
    (0.0, 0.0): ("one number per table", "per-table"),
}
BETWEEN = ("partially coupled", "partial")
MEAN_FREE = "mean-free"


def is_coupled_adam(settings: Mapping[str, Any]) -> bool:
    """Whether the settings are the paper's method, with any scale exponent n.

    Example:
        >>> is_coupled_adam({"scale_exponent": 2.0}), is_coupled_adam({"mean_free": True})
        (True, False)
    """
    return not _exponents(settings) and not settings.get("mean_free")


def member_name(settings: Mapping[str, Any]) -> str:
    """Full name of a member.

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
    """Short name of a member, usable as a folder name.

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
    """Remove the spaces from the parts of a name.

    Example:
        >>> shortened(["y = 0.75 to 0.25", "n = 2"])
        ['y=0.75-0.25', 'n=2']
    """
    return [part.replace(" = ", "=").replace(" to ", "-") for part in parts]


def member_parts(settings: Mapping[str, Any]) -> list[str]:
    """List how a member differs from Coupled Adam.

    Example:
        >>> member_parts({"row_exponent": 1.0, "mean_free": True, "scale_exponent": 0.0})
        ['y = 1', 'mean-free']
    """
    return [*_exponents(settings), *_further_parts(settings)]


def _corner(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Both names of a named member; None for members in between and for an annealed row exponent."""
    if settings.get("row_exponent_start") is not None:
        return None
    return CORNERS.get((settings.get("column_exponent", 1.0), settings.get("row_exponent", 0.0)))


def _exponents(settings: Mapping[str, Any]) -> list[str]:
    """The exponents that differ from Coupled Adam's."""
    column, row, start = (
        settings.get("column_exponent", 1.0),
        settings.get("row_exponent", 0.0),
        settings.get("row_exponent_start"),
    )
    parts = [] if column == 1.0 else [f"x = {setting(column)}"]
    if start is not None:
        return [*parts, f"y = {setting(start)} to {setting(row)}"]
    return parts if row == 0.0 else [*parts, f"y = {setting(row)}"]


def _further_parts(settings: Mapping[str, Any]) -> list[str]:
    exponent = settings.get("scale_exponent") or 0.0
    return [*([MEAN_FREE] if settings.get("mean_free") else []), *([f"n = {setting(exponent)}"] if exponent else [])]
