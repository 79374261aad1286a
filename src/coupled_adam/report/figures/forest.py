"""Forest plot: one row per comparison, with the difference as a point and its 95% interval as a line.

The report draws its primary comparisons with it, `docs/results/overview.py` the comparisons of several studies.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coupled_adam.base.captioned_figure import FAINT, PAPER, WIDTH, legend_above
from coupled_adam.base.notation import MINUS
from coupled_adam.base.text import fixed
from coupled_adam.metrics import NATS
from coupled_adam.report.figures.style import looks
from coupled_adam.report.grid import Grid, optimizer_labels, size_labels
from coupled_adam.report.primary_comparisons import PrimaryComparison
from coupled_adam.report.result_notes import loss_name

LINE = 0.2  # inches: height of a line of text
FRAME = 1.05  # inches: axis, axis label and hints above and below the rows
LEAST_HEIGHT = 1.5  # inches: of a figure with a row or two, so that it is readable on a phone
GAP = 0.35  # lines between two groups
FONT = 9
LONGEST_LABEL = 40  # letters; longer labels are wrapped
LEAST_SIDE = 0.24  # share of the axis on each side of zero, so that the hints fit
MOST_ROWS = 60
MARGIN = 10  # points between the axes and the text beside them
BESIDE = ("axes fraction", "data")  # coordinates of that text
SIGNIFICANT, NOT_SIGNIFICANT, NOT_TESTED = "significant at 95% (Holm)", "not significant", "one seed, not tested"
POINT: dict[str, Any] = {"marker": "o", "markersize": 6, "capsize": 2.5, "linewidth": 1.4, "linestyle": "none"}


@dataclass(frozen=True)
class ForestRow:
    """One comparison with a baseline."""

    label: str
    difference: float
    interval: tuple[float, float] | None
    """95% interval of the difference; None with a single seed."""
    is_significant: bool
    colour: str
    numbers: str = ""
    """Text to the right of the axes."""


@dataclass(frozen=True)
class ForestGroup:
    """Rows under one heading."""

    heading: str
    """Empty for none."""
    rows: Sequence[ForestRow]
    note: str = ""
    """Text to the right of the axes, in the line of the heading."""


def draw_primary_differences(grid: Grid, primary: Sequence[PrimaryComparison]) -> Figure | None:
    """Draw the primary comparisons, grouped by size and baseline.

    None without two optimizers that share a seed, and with more comparisons than a figure can show.
    """
    found = [(each, each.difference) for each in primary]
    known = [(each, difference) for each, difference in found if difference is not None]
    if not 0 < len(known) <= MOST_ROWS:
        return None
    colours = {name: look.colour for name, look in looks(grid.variants).items()}
    labels = _labels(grid)
    rows: dict[str, list[ForestRow]] = {}
    headings = _headings([each for each, _ in known], labels)
    for each, difference in known:
        row = ForestRow(
            label=labels[each.optimizer.name],
            difference=difference,
            interval=each.comparison.paired_interval,
            is_significant=each.is_significant,
            colour=colours[each.optimizer.variant.name],
        )
        rows.setdefault(headings[each.baseline.name], []).append(row)
    baselines = {labels[each.baseline.name] for each, _ in known}
    baseline = baselines.pop() if len(baselines) == 1 else "the baseline"
    x_label = f"{loss_name(grid.results)} minus that of {baseline}\n({NATS})"
    return draw_forest([ForestGroup(heading, own) for heading, own in rows.items()], x_label)


def _labels(grid: Grid) -> dict[str, str]:
    """The optimizer of every cell, by the cell's id; with the id if two cells of a size would have the same name."""
    labels = {}
    for place in grid.places:
        for cell, name in zip(place.cells, optimizer_labels(place.cells), strict=True):
            labels[cell.name] = cell.variant.label if name == cell.variant.name else name
    return labels


def _headings(comparisons: Sequence[PrimaryComparison], labels: dict[str, str]) -> dict[str, str]:
    """The heading over the rows of every baseline, by its id: what distinguishes it from the others."""
    cells = {each.baseline.name: each.baseline for each in comparisons}
    sizes = size_labels(sorted({cell.size for cell in cells.values()}))
    has_several_baselines = len({labels[name] for name in cells}) > 1
    headings = {}
    for name, cell in cells.items():
        size = sizes[cell.size] if len(sizes) > 1 else ""
        against = f"against {labels[name]}" if has_several_baselines else ""
        headings[name] = ", ".join(part for part in (size, against) if part)
    return headings


def draw_forest(
    groups: Sequence[ForestGroup],
    x_label: str,
    *,
    hints: tuple[str, str] = ("← better", "worse →"),
    numbers_title: str = "",
    width: float = WIDTH,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw groups of rows from top to bottom. The figure grows with their number.

    Args:
        groups: with at least one row.
        x_label: what the difference is, with its unit.
        hints: on the left and on the right of the zero line.
        numbers_title: over the numbers of the rows.
        width: inches.
        limits: of the axis. An arrow marks whatever lies outside, with its value if it is a point. None for all.
    """
    rows = [row for group in groups for row in group.rows]
    headings, places, bottom = _places(groups)
    figure = Figure(figsize=(width, max(FRAME + LINE * bottom, LEAST_HEIGHT)), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=limits or _limits(rows), ylim=(bottom, 0))
    axes.set_xlabel(x_label, fontsize=FONT)
    axes.xaxis.set_major_locator(MaxNLocator(int(width), steps=[1, 2, 5, 10]))
    axes.tick_params(axis="x", labelsize=FONT)
    axes.yaxis.grid(False)
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=FAINT, linewidth=1.2)
    column = _draw_labels(axes, places, [_wrapped(row.label) for row in rows])
    for place, group in zip(headings, groups, strict=True):
        _draw_heading(axes, place, group, column)
    for place, row in zip(places, rows, strict=True):
        _draw_row(axes, place, row)
    at_zero, at_end = ("data", "axes fraction"), ("axes fraction", "axes fraction")
    _text(axes, hints[0], (0, 1), at_zero, (-6, 8), horizontalalignment="right")
    _text(axes, hints[1], (0, 1), at_zero, (6, 8))
    if numbers_title:
        _text(axes, numbers_title, (1, 1), at_end, (MARGIN, 8))
    _add_legend(figure, axes, rows)
    return figure


def _places(groups: Sequence[ForestGroup]) -> tuple[list[float], list[float], float]:
    """The middle of every heading, the middle of every row, and the end, in lines from the top."""
    headings: list[float] = []
    rows: list[float] = []
    end = 0.0
    for group in groups:
        end += GAP if rows else 0.0
        headings.append(end + 0.5)
        end += 1 if group.heading else 0
        for row in group.rows:
            height = _wrapped(row.label).count("\n") + 1
            rows.append(end + height / 2)
            end += height
    return headings, rows, end


def _wrapped(label: str) -> str:
    return textwrap.fill(label, LONGEST_LABEL)


def _limits(rows: Sequence[ForestRow]) -> tuple[float, float]:
    """The range of all points and intervals, with zero and room for the hints on both sides of it."""
    values = [value for row in rows for value in (row.difference, *(row.interval or ()))]
    low, high = min(0.0, *values), max(0.0, *values)
    span = (high - low) or 1.0
    least = LEAST_SIDE / (1 - LEAST_SIDE) * span
    return min(low - 0.06 * span, -least), max(high + 0.06 * span, least)


def _draw_labels(axes: Axes, places: Sequence[float], labels: Sequence[str]) -> float:
    """Label the rows, aligned on the left; return the width of this column in points."""
    axes.set_yticks(places, labels, fontsize=FONT)
    ticks = axes.get_yticklabels()
    per_point = axes.figure.dpi / 72
    column = max(tick.get_window_extent().width for tick in ticks) / per_point + MARGIN
    axes.tick_params(axis="y", length=0, pad=column)
    for tick in ticks:
        tick.set_horizontalalignment("left")
    return column


def _draw_heading(axes: Axes, place: float, group: ForestGroup, column: float) -> None:
    """Write a heading over the labels. It may reach into the axes, where it covers the grid."""
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}
    if group.heading:
        _text(axes, group.heading, (0, place), BESIDE, (-column - 6, 0), weight="bold", bbox=box)
    if group.note:
        _text(axes, group.note, (1, place), BESIDE, (MARGIN, 0), color=FAINT)


def _draw_row(axes: Axes, place: float, row: ForestRow) -> None:
    low, high = axes.get_xlim()
    face = row.colour if row.is_significant else PAPER
    ends = row.interval or (row.difference, row.difference)
    bars = [[row.difference - ends[0]], [ends[1] - row.difference]] if row.interval else None
    axes.errorbar(row.difference, place, xerr=bars, markerfacecolor=face, color=row.colour, **POINT)
    if ends[0] < low:
        axes.plot(low, place, marker="<", markersize=6, color=row.colour, markerfacecolor=face, clip_on=False)
    if ends[1] > high:
        axes.plot(high, place, marker=">", markersize=6, color=row.colour, markerfacecolor=face, clip_on=False)
    value = fixed(row.difference, 2).replace("-", MINUS)
    if row.difference < low:
        _text(axes, value, (low, place), ("data", "data"), (7, 0), color=row.colour)
    if row.difference > high:
        _text(axes, value, (high, place), ("data", "data"), (-7, 0), color=row.colour, horizontalalignment="right")
    if row.numbers:
        weight = "bold" if row.is_significant else "normal"
        _text(axes, row.numbers, (1, place), BESIDE, (MARGIN, 0), weight=weight)


def _text(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    coordinates: tuple[str, str],
    offset: tuple[float, float],
    **style: Any,
) -> None:
    """Write text `offset` points away from a position; by default it begins there."""
    usual: dict[str, Any] = {"horizontalalignment": "left", "verticalalignment": "center_baseline", "fontsize": FONT}
    axes.annotate(text, at, xycoords=coordinates, xytext=offset, textcoords="offset points", **(usual | style))


def _add_legend(figure: Figure, axes: Axes, rows: Sequence[ForestRow]) -> None:
    """Explain the kinds of markers that occur."""
    no_bar: list[float] = []  # drawn in the legend only
    if any(row.is_significant for row in rows):
        axes.errorbar([], [], xerr=no_bar, markerfacecolor=FAINT, color=FAINT, label=SIGNIFICANT, **POINT)
    if any(row.interval and not row.is_significant for row in rows):
        axes.errorbar([], [], xerr=no_bar, markerfacecolor=PAPER, color=FAINT, label=NOT_SIGNIFICANT, **POINT)
    if not all(row.interval for row in rows):
        axes.errorbar([], [], markerfacecolor=PAPER, color=FAINT, label=NOT_TESTED, **POINT)
    legend_above(figure, [axes])
