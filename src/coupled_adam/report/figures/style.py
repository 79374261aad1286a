"""Style of the figures: one colour, line style and marker for each optimizer and for each model size.

The colours work on white and on black, and those of a study with few optimizers for all kinds of colour vision; line
styles and markers repeat the information.
"""

import itertools
from collections.abc import Mapping, Sequence
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
    "family": ("#4c9a2a", "#a8479c", "#5f7f8c", "#a07c00"),
}
# For a study with more optimizers of a role than these: all but the first of each role take one of these.
FURTHER_COLOURS = (
    *("#a8479c", "#c98a00", "#1fa3a3", "#8a5a3c", "#ea6f9e", "#7b6bd6"),
    *("#6f7b87", "#c4303e", "#1f7a5c", "#3f63c0", "#d44fd0"),
)
SHADES: dict[Role, str] = {"scaled": "plasma", "sgd": "viridis"}  # ablations over n and over f
LINES: dict[Role, str] = {"standard": "--", "coupled": "-", "scaled": "-", "family": "-.", "sgd": ":"}


@dataclass(frozen=True)
class Look:
    """Colour and line style of an optimizer, the same in every figure."""

    colour: str
    line: str


def looks(variants: Sequence[Variant]) -> dict[str, Look]:
    """Colour and line style of every optimizer of a study, by name; no two have both in common."""
    by_role = {role: [variant for variant in variants if variant.role == role] for role in LINES}
    is_few = all(len(by_role[role]) <= len(palette) for role, palette in COLOURS.items())
    palettes = {role: _shades(SHADES[role], len(by_role[role])) for role in SHADES}
    if is_few:
        return _looks(by_role, COLOURS | palettes)
    free = itertools.cycle(FURTHER_COLOURS)
    for role in LINES:
        if role in COLOURS:
            palettes[role] = (COLOURS[role][0], *(next(free) for _ in by_role[role][1:]))
        elif len(by_role[role]) == 1:
            palettes[role] = (next(free),)
    return _looks(by_role, palettes)


def _looks(by_role: Mapping[Role, Sequence[Variant]], palettes: Mapping[Role, Sequence[str]]) -> dict[str, Look]:
    """Give the optimizers of every role the colours of its palette, and its line unless another has both already."""
    found: dict[str, Look] = {}
    for role, family in by_role.items():
        for variant, colour in zip(family, palettes[role], strict=False):
            wanted = [Look(colour, line) for line in (LINES[role], *LINES.values())]
            taken = found.values()
            found[variant.name] = next((look for look in wanted if look not in taken), wanted[0])
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
    if len(rows) > 1:
        figure.supylabel(y_label, fontsize=10)
    else:  # beside the panels; that of the figure would be centred on the panels and the legend
        places[0].set_ylabel(y_label)
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
