"""All optimizers at once: loss against the quality of the embeddings, and loss over the learning rate."""

from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import MARKERS, legend_above, panels
from coupled_adam.base.text import setting
from coupled_adam.metrics import METRICS, NATS
from coupled_adam.report.figures.style import looks, size_panels
from coupled_adam.report.grid import CellRuns, Grid
from coupled_adam.report.learning_rates import rate_curves
from coupled_adam.report.ranking import LEAST_RANKED, ranked_cells
from coupled_adam.report.result_notes import loss_name
from coupled_adam.report.significance import summarise

QUALITIES = ("r_cos", "iso")


def shown_place(grid: Grid) -> list[CellRuns]:
    """The cells of the D and model with the most optimizers, the largest of several; empty if there are too few to
    rank."""
    places = [ranked_cells(place) for place in grid.places]
    best = max(places, key=lambda cells: (len(cells), cells[0].size if cells else None), default=[])
    return best if len(best) >= LEAST_RANKED else []


def drawn_qualities(grid: Grid) -> list[str]:
    """The measures of embeddings that more than one ranked optimizer has."""
    cells = shown_place(grid)
    return [
        key for key in QUALITIES if sum(summarise(cell.values(key).values()).mean is not None for cell in cells) > 1
    ]


def draw_ranking(grid: Grid) -> Figure | None:
    """Draw the loss against r_cos and ISO: one point per optimizer, with the standard deviation over seeds as bars."""
    cells = shown_place(grid)
    drawn = drawn_qualities(grid)
    if not cells or not drawn:
        return None
    figure, [row] = panels(1, len(drawn), 3.2, share_y=True)
    colours = looks(grid.variants)
    for axes, key in zip(row, drawn, strict=True):
        for rank, cell in enumerate(cells, 1):
            x, y = summarise(cell.values(key).values()), summarise(cell.values("loss").values())
            if x.mean is None or y.mean is None:
                continue
            axes.errorbar(
                x.mean,
                y.mean,
                xerr=x.std,
                yerr=y.std,
                marker=MARKERS[rank % len(MARKERS)],
                color=colours[cell.variant.name].colour,
                markersize=6,
                elinewidth=1,
                capsize=2.5,
                linestyle="none",
                label=f"{rank}  {cell.variant.name}",
            )
            # With many optimizers some share a colour; the rank distinguishes them.
            axes.annotate(str(rank), (x.mean, y.mean), xytext=(5, 4), textcoords="offset points", fontsize=8)
        axes.set(xlabel=METRICS[key].heading)
    row[0].set(ylabel=f"{loss_name(grid.results)} ({NATS})")
    legend_above(figure, row)
    return figure


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
