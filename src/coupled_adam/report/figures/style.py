"""Style of the figures: one colour, line style and marker for each optimizer and for each model size.

The colours work for all kinds of colour vision and on white and black; line styles and markers repeat the information.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import MARKERS, SERIES_COLOURS, panels
from coupled_adam.report.grid import Role, Size, Variant, size_labels
from coupled_adam.report.significance import Comparison

COLOURS: dict[Role, tuple[str, ...]] = {
    "standard": ("#e0632b", "#c98a00", "#d1557f"),
    "coupled": ("#3d87c9", "#7b6bd6", "#1fa3a3", "#8a6f5a"),
    "family": ("#4c9a2a", "#a8479c", "#a07c00", "#5f7f8c"),
}
SHADES: dict[Role, str] = {"scaled": "plasma", "family": "summer", "sgd": "viridis"}
LINES: dict[Role, str] = {"standard": "--", "coupled": "-", "scaled": "-", "family": "-.", "sgd": ":"}


@dataclass(frozen=True)
class Look:
    """Colour and line style of an optimizer, the same in every figure."""

    colour: str
    line: str


def looks(variants: Sequence[Variant]) -> dict[str, Look]:
    """Colour and line style of every optimizer of a study, by name."""
    found: dict[str, Look] = {}
    for role in LINES:
        family = [variant for variant in variants if variant.role == role]
        palette = COLOURS.get(role, ())
        if role in SHADES and len(family) > len(palette):
            palette = _shades(SHADES[role], len(family))
        for number, variant in enumerate(family):
            found[variant.name] = Look(palette[number % len(palette)], LINES[role])
    return found


def two_lines(label: str) -> str:
    """Break the name of an optimizer before its parenthesis, for the title of a narrow panel.

    Example:
        >>> two_lines("partially coupled (y = 0.25, mean-free)")
        'partially coupled\\n(y = 0.25, mean-free)'
    """
    return label.replace(" (", "\n(", 1)


def size_panels(
    shown: Sequence[Size], x_label: str, y_label: str, *, share_y: bool = True
) -> tuple[Figure, dict[Size, Axes]]:
    """Make a figure with one panel per size, three in a row, with shared axis labels."""
    columns = min(len(shown), 3)
    figure, rows = panels(-(-len(shown) // columns), columns, 2.1 if len(shown) > 1 else 3.0, share_y=share_y)
    places = [axes for row in rows for axes in row]
    for axes in places[len(shown) :]:
        axes.set_visible(False)
    if len(shown) > 1:
        for axes, label in zip(places, size_labels(shown).values(), strict=False):
            axes.set_title(label, fontsize=8.5)
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    return figure, dict(zip(shown, places, strict=False))


def draw_difference(
    axes: Axes,
    x: float,
    comparison: Comparison,
    number: int,
    label: str | None,
    marker_size: float = 7,
    colour: str | None = None,
) -> None:
    """Draw a marker with the one-sided 95% threshold as its bar, filled if the difference is significant.

    Args:
        axes: to draw on.
        x: position.
        comparison: must have a difference; without a threshold (one seed) there is no bar.
        number: index of the marker and of the default colour.
        label: legend entry; None for no entry.
        marker_size: in points.
        colour: None for the colour of `number`.
    """
    assert comparison.difference is not None
    colour = colour or SERIES_COLOURS[number % len(SERIES_COLOURS)]
    is_decided = comparison.significant or comparison.significantly_worse
    axes.errorbar(
        x,
        comparison.difference,
        yerr=comparison.threshold,
        marker=MARKERS[number % len(MARKERS)],
        color=colour,
        markerfacecolor=colour if is_decided else "none",
        markersize=marker_size,
        capsize=marker_size / 2,
        linestyle="none",
        label=label,
    )


def _shades(colormap: str, count: int) -> tuple[str, ...]:
    """Evenly spaced colours of a colormap, without its darkest and lightest."""
    places = np.linspace(0.25, 0.8, max(count, 2))
    return tuple(matplotlib.colors.to_hex(matplotlib.colormaps[colormap](place)) for place in places)
