"""All optimizers at once: loss against the quality of the embeddings, and loss over the learning rate."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import MARKERS, legend_above, panels
from coupled_adam.base.text import setting
from coupled_adam.metrics import METRICS, NATS
from coupled_adam.report.figures.style import looks, size_panels
from coupled_adam.report.grid import CellRuns, Grid, fullest
from coupled_adam.report.learning_rates import rate_curves
from coupled_adam.report.ranking import LEAST_RANKED, ranked_cells
from coupled_adam.report.result_notes import loss_name
from coupled_adam.report.significance import summarise

QUALITIES = ("r_cos", "iso")
NEAR = (14, 9)  # points across and up within which the numbers of two points would overlap
FAR = 2.0  # a loss further above the next lower one than this many spans of the lower ones leaves the axis
EDGE = 0.95  # height of the arrows for such losses, as a share of the axis


def shown_place(grid: Grid) -> list[CellRuns]:
    """The cells of the D and model with the most optimizers, the largest of several; empty if there are too few to
    rank."""
    best = fullest(ranked_cells(place) for place in grid.places)
    return best if len(best) >= LEAST_RANKED else []


def drawn_qualities(grid: Grid) -> list[str]:
    """The measures of embeddings that more than one ranked optimizer has."""
    cells = shown_place(grid)
    return [
        key for key in QUALITIES if sum(summarise(cell.values(key).values()).mean is not None for cell in cells) > 1
    ]


def has_losses_beyond(grid: Grid) -> bool:
    """Whether a loss is so high that the figure shows it as an arrow at the upper edge."""
    losses = _losses(shown_place(grid))
    return bool(losses) and max(losses) > highest_drawn(losses)


def _losses(cells: Sequence[CellRuns]) -> list[float]:
    """The mean losses of those cells that have one."""
    return [loss for cell in cells if (loss := summarise(cell.values("loss").values()).mean) is not None]


def draw_ranking(grid: Grid) -> Figure | None:
    """Draw the loss against r_cos and ISO: one point per optimizer, with the standard deviation over seeds as bars."""
    cells = shown_place(grid)
    drawn = drawn_qualities(grid)
    if not cells or not drawn:
        return None
    figure, [row] = panels(1, len(drawn), 3.2, share_y=True)
    colours = looks(grid.variants)
    losses = _losses(cells)
    top = highest_drawn(losses)
    points: dict[Axes, dict[int, tuple[float, float]]] = {axes: {} for axes in row}
    for axes, key in zip(row, drawn, strict=True):
        for rank, cell in enumerate(cells, 1):
            x, y = summarise(cell.values(key).values()), summarise(cell.values("loss").values())
            if x.mean is None or y.mean is None:
                continue
            draw = partial(
                axes.errorbar,
                x.mean,
                xerr=x.std,
                color=colours[cell.variant.name].colour,
                markersize=6,
                elinewidth=1,
                capsize=2.5,
                linestyle="none",
                label=f"{rank}  {cell.variant.name}",
            )
            if y.mean <= top:
                draw(y.mean, yerr=y.std, marker=MARKERS[rank % len(MARKERS)])
                points[axes][rank] = (x.mean, y.mean)
                continue
            across = axes.get_xaxis_transform()  # x in data, y as a share of the axis
            draw(EDGE, marker="^", transform=across)
            text = f"{rank}: {METRICS['loss'].mean_text(y.mean, None, y.count)}"
            axes.annotate(text, (x.mean, EDGE), xycoords=across, xytext=(6, -4), textcoords="offset points", fontsize=8)
        axes.set(xlabel=METRICS[key].heading)
    if max(losses) > top:
        low, high = row[0].get_ylim()
        row[0].set_ylim(low, high + 0.15 * (high - low))  # room for the arrows
    row[0].set(ylabel=f"{loss_name(grid.results)} ({NATS})")
    legend_above(figure, row)
    figure.draw_without_rendering()  # lays out the panels, which decides which points are close together
    for axes, by_rank in points.items():
        _number_points(axes, by_rank)
    return figure


def highest_drawn(losses: Sequence[float]) -> float:
    """The highest loss on the axis: a few outliers, at most a quarter, would press all other points into a strip.

    Example:
        >>> highest_drawn([5.07, 5.1, 5.26, 6.22])
        5.26
        >>> highest_drawn([4.1, 4.3, 4.6])
        4.6
        >>> highest_drawn([4.1, 4.11, 4.5, 4.6, 4.7])
        4.7
    """
    ordered = sorted(losses)
    for low, high in itertools.pairwise(ordered[-max(1, len(ordered) // 4) - 1 :]):
        if high - low > FAR * (low - ordered[0]):
            return low
    return ordered[-1]


def _number_points(axes: Axes, by_rank: Mapping[int, tuple[float, float]]) -> None:
    """Write the rank beside every point; points whose numbers would overlap share a label, such as 4-9."""
    per_point = axes.figure.dpi / 72
    shown = {rank: axes.transData.transform(point) / per_point for rank, point in by_rank.items()}
    groups: list[list[int]] = []
    for rank, (x, y) in shown.items():
        near = [
            group
            for group in groups
            if any(abs(x - shown[other][0]) < NEAR[0] and abs(y - shown[other][1]) < NEAR[1] for other in group)
        ]
        groups = [*(group for group in groups if group not in near), sorted([rank, *itertools.chain(*near)])]
    for group in groups:
        corner = max(by_rank[rank][0] for rank in group), sum(by_rank[rank][1] for rank in group) / len(group)
        axes.annotate(ranges(group), corner, xytext=(5, 4), textcoords="offset points", fontsize=8)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, with three or more in a row as a range.

    Example:
        >>> ranges([3, 4, 5, 8, 9])
        '3–5, 8, 9'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{run[0]}\N{EN DASH}{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in found)


def draw_learning_rates(grid: Grid) -> Figure | None:
    """Draw the loss over the learning rate, one line per optimizer and one panel per size."""
    curves = [curve for curve in rate_curves(grid) if len(curve.losses()) > 1]
    if not curves:
        return None
    sizes = list(dict.fromkeys(curve.size for curve in curves))
    figure, places = size_panels(sizes, "learning rate", f"{loss_name(grid.results)} ({NATS})", share_y=False)
    colours = looks([curve.variant for curve in curves])
    names = list(dict.fromkeys(curve.name for curve in curves))
    for curve in curves:
        points, look = curve.losses(), colours[curve.variant.name]
        axes = places[curve.size]
        axes.errorbar(
            [lr for lr, _ in points],
            [summary.mean or 0.0 for _, summary in points],
            yerr=[summary.std or 0.0 for _, summary in points],
            marker=MARKERS[names.index(curve.name) % len(MARKERS)],
            color=look.colour,
            linestyle=look.line,
            markersize=4.5,
            linewidth=1.2,
            capsize=2.5,
            label=curve.name,
        )
        axes.set_xscale("log")
        rates = sorted({lr for each in curves if each.size == curve.size for lr, _ in each.cells})
        axes.set_xticks(rates, [setting(lr) for lr in rates])
        axes.minorticks_off()
    legend_above(figure, list(places.values()))
    return figure
