"""Where an optimizer gains and loses: the difference in loss, and the calibration, by token frequency.

A few optimizers are drawn as markers and lines. Many would cover each other: they are the rows of two maps.
"""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import FAINT, MARK, PAPER, POINTS, legend_above, panels
from coupled_adam.base.notation import MINUS
from coupled_adam.base.text import fixed
from coupled_adam.metrics import BIN_CALIBRATION, BIN_LOSS, NATS
from coupled_adam.report.figures.style import Look, draw_difference, looks
from coupled_adam.report.frequency_table import NUMBERS, bin_values, binned_cells, compare_bin
from coupled_adam.report.grid import CellRuns, Grid, fullest
from coupled_adam.report.significance import is_number, summarise

ROOM = 0.6
"""Share of the distance between two bins that the markers of one bin use."""
MOST_BESIDE = 5
"""Optimizers that are drawn as markers; more become the rows of maps."""
ROW, FRAME = 0.19, 0.55  # inches: a row of a map, and its title and axis
STRONGEST = 0.75  # opacity of the largest values, which leaves the numbers readable
SMALL = 7.5  # points: the numbers of a map
USUAL_NAME, LETTER = 24, 0.07  # letters of a name that fit beside the numbers, and inches for each further one
FORMS = {
    "markers": "Top: difference in loss from {baseline}, with the one-sided 95% threshold as bars; a filled marker is "
    "significant, a hollow one is not. Bottom: calibration, log(predicted / observed); 0 is calibrated, and below 0 "
    "the model underestimates these tokens. Lines are means over seeds; the band covers all seeds.",
    "maps": "Top: difference in loss from {baseline}, mean over seeds; bold: significant by the one-sided test at 95%. "
    "Blue is better, orange is worse. Bottom: calibration, log(predicted / observed); 0 is calibrated, and below 0 "
    "(blue) the model underestimates these tokens.",
}
"""What the caption says about the two forms of the figure."""


def draw_by_frequency(grid: Grid) -> Figure | None:
    """Draw two panels over the ten bins, for the D and model of `shown_cells`: the loss difference to the first
    optimizer, if there are others, and the calibration of all."""
    cells = shown_cells(grid)
    if not cells:
        return None
    if form_of(cells) == "maps":
        return _draw_maps(cells)
    colours = looks(grid.variants)
    figure, rows = panels(2 if len(cells) > 1 else 1, 1, 2.3)
    shown = [row[0] for row in rows]
    if len(cells) > 1:
        _draw_differences(shown[0], cells, colours)
        shown[0].set(ylabel=f"difference in {BIN_LOSS.symbol}\n({NATS})")
    for cell in cells:
        _draw_calibration(shown[-1], cell, colours[cell.variant.name])
    shown[-1].set(ylabel=f"{BIN_CALIBRATION.symbol}\nlog(predicted / observed)")
    shown[-1].set(xlabel="bin of token frequency (10: the rarest)")
    for axes in shown:
        axes.axhline(0, color=FAINT, linewidth=1.2, zorder=0)
        axes.set_xticks(NUMBERS)
        axes.set_xlim(NUMBERS[0] - 0.6, NUMBERS[-1] + 0.6)
    legend_above(figure, reversed(shown))  # the lower panel has all optimizers
    return figure


def shown_cells(grid: Grid) -> list[CellRuns]:
    """The cells of the D and model with the most optimizers, the largest of several; empty without any."""
    return fullest(binned_cells(place) for place in grid.places)


def form_of(cells: Sequence[CellRuns]) -> str:
    """The form of the figure of these cells: a key of `FORMS`."""
    return "markers" if len(cells) <= MOST_BESIDE else "maps"


def _draw_maps(cells: Sequence[CellRuns]) -> Figure:
    """Draw the differences in loss and the calibration as numbers on a coloured ground: optimizers down, bins across.

    A title replaces the label of the vertical axis, so that the names have more room.
    """
    first, others = cells[0], cells[1:]
    figure, [[upper], [lower]] = panels(2, 1, FRAME + ROW * len(cells))
    longest = max(len(cell.variant.name) for cell in cells)
    figure.set_figwidth(figure.get_figwidth() + LETTER * max(0, longest - USUAL_NAME))
    compared = {
        (row, number): compare_bin(first, cell, number) for row, cell in enumerate(others) for number in NUMBERS
    }
    known = {place: found.difference for place, found in compared.items() if found.difference is not None}
    decided = {place for place, found in compared.items() if bool(found.significant) or bool(found.significantly_worse)}
    _draw_map(upper, [cell.variant.name for cell in others], known, decided)
    upper.set_title(f"difference in {BIN_LOSS.symbol} from {first.variant.label} ({NATS})", fontsize=9, loc="left")
    means = {
        (row, number): summarise(bin_values(cell, BIN_CALIBRATION, number)).mean
        for row, cell in enumerate(cells)
        for number in NUMBERS
    }
    calibration = {place: mean for place, mean in means.items() if mean is not None}
    _draw_map(lower, [cell.variant.name for cell in cells], calibration, set())
    lower.set_title(f"{BIN_CALIBRATION.symbol}: log(predicted / observed)", fontsize=9, loc="left")
    lower.set_xlabel("bin of token frequency (10: the rarest)", fontsize=9)
    return figure


def _draw_map(
    axes: Axes, names: Sequence[str], values: Mapping[tuple[int, int], float], bold: set[tuple[int, int]]
) -> None:
    """Draw values by row and bin: blue below zero, orange above, stronger for larger ones.

    The colours are transparent, so that the numbers are readable on a light and on a dark page.
    """
    # One extreme value does not make all others pale.
    most = float(np.quantile(np.abs(list(values.values())), 0.95)) if values else 0.0
    for (row, number), value in values.items():
        strength = STRONGEST * min(1.0, abs(value) / most) if most else 0.0
        colour = matplotlib.colors.to_rgba(POINTS if value < 0 else MARK, strength)
        axes.add_patch(matplotlib.patches.Rectangle((number - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor=PAPER))
        text = fixed(value, 2 if abs(value) < 10 else 1).replace("-", MINUS)
        weight = "bold" if (row, number) in bold else "normal"
        axes.text(number, row, text, fontsize=SMALL, weight=weight, ha="center", va="center_baseline")
    axes.set(xlim=(NUMBERS[0] - 0.5, NUMBERS[-1] + 0.5), ylim=(len(names) - 0.5, -0.5))
    axes.set_xticks(NUMBERS)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0, labelsize=8)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_differences(axes: Axes, cells: Sequence[CellRuns], colours: dict[str, Look]) -> None:
    first, others = cells[0], cells[1:]
    for place, cell in enumerate(others):
        # Optimizers are side by side, so that their bars do not overlap.
        beside = ROOM * ((place + 0.5) / len(others) - 0.5)
        for number in NUMBERS:
            comparison = compare_bin(first, cell, number)
            if comparison.difference is not None:
                colour = colours[cell.variant.name].colour
                draw_difference(axes, number + beside, comparison, place, None, marker_size=4.5, colour=colour)


def _draw_calibration(axes: Axes, cell: CellRuns, look: Look) -> None:
    """Draw the mean over seeds as a line, and their range as a band."""
    found = {
        number: [value for value in bin_values(cell, BIN_CALIBRATION, number) if is_number(value)] for number in NUMBERS
    }
    found = {number: values for number, values in found.items() if values}
    means = [summarise(values).mean or 0.0 for values in found.values()]
    lows, highs = map(min, found.values()), map(max, found.values())
    axes.plot(list(found), means, color=look.colour, linestyle=look.line, marker=".", label=cell.variant.label)
    axes.fill_between(list(found), list(lows), list(highs), color=look.colour, alpha=0.2, linewidth=0)
