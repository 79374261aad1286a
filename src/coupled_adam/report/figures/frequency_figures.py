"""Where an optimizer gains and loses: the difference in loss, and the calibration, by token frequency."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import FAINT, legend_above, panels
from coupled_adam.metrics import BIN_CALIBRATION, BIN_LOSS, NATS
from coupled_adam.report.figures.style import Look, draw_difference, looks
from coupled_adam.report.frequency_table import NUMBERS, bin_values, binned_cells, compare_bin
from coupled_adam.report.grid import CellRuns, Grid
from coupled_adam.report.significance import is_number, summarise

ROOM = 0.6
"""Share of the distance between two bins that the markers of one bin use."""


def draw_by_frequency(grid: Grid) -> Figure | None:
    """Draw two panels over the ten bins, for the D and model of `shown_cells`: the loss difference to the first
    optimizer, if there are others, and the calibration of all."""
    cells = shown_cells(grid)
    if not cells:
        return None
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
    found = [cells for place in grid.places if (cells := binned_cells(place))]
    return max(found, key=lambda cells: (len(cells), cells[0].size), default=[])


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
