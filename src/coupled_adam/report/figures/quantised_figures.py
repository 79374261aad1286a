"""What it costs to round the vocabulary table to integers: the increase of the test loss, by optimizer."""

from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import FAINT, MARKERS, SERIES_COLOURS, WIDTH, legend_above
from coupled_adam.metrics import METRICS, NATS, QUANTISED_LOSSES
from coupled_adam.report.grid import CellRuns, Grid, fullest, optimizer_labels
from coupled_adam.report.result_notes import loss_name
from coupled_adam.report.significance import Summary, summarise

LOSS = METRICS["loss"]
LINE, FRAME = 0.22, 0.85  # inches: height of an optimizer, and of the axis below them


def shown_cells(grid: Grid) -> list[CellRuns]:
    """The measured cells of the D and model that has most of them, the largest of several."""
    return fullest([cell for cell in place.cells if _costs(cell)] for place in grid.places)


def draw_costs_of_rounding(grid: Grid) -> Figure | None:
    """Draw the increase of the loss for every kind of rounding: mean over seeds, standard deviation as bars."""
    cells = shown_cells(grid)
    if not cells:
        return None
    figure = Figure(figsize=(WIDTH, FRAME + LINE * max(len(cells), 3)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=FAINT, linewidth=1.2)
    costs = [_costs(cell) for cell in cells]
    for number, metric in enumerate(QUANTISED_LOSSES):
        found = {place: own[metric.key] for place, own in enumerate(costs) if metric.key in own}
        if not found:
            continue
        axes.errorbar(
            [cost.mean or 0.0 for cost in found.values()],
            list(found),
            xerr=[cost.std or 0.0 for cost in found.values()],
            marker=MARKERS[number],
            color=SERIES_COLOURS[number],
            markersize=5.5,
            elinewidth=1,
            capsize=2.5,
            linestyle="none",
            label=metric.symbol,
        )
    axes.set_yticks(range(len(cells)), optimizer_labels(cells), fontsize=9)
    axes.set_ylim(len(cells) - 0.5, -0.5)  # from top to bottom
    axes.set_xlabel(f"{loss_name(grid.results)} minus that of the unrounded table ({NATS})", fontsize=9)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    legend_above(figure, [axes])
    return figure


def _costs(cell: CellRuns) -> dict[str, Summary]:
    """The increase of the loss by kind of rounding, over the seeds for which it was measured."""
    exact = cell.values(LOSS.key)
    found = {}
    for metric in QUANTISED_LOSSES:
        pairs = [(rounded, exact[seed]) for seed, rounded in cell.values(metric.key).items()]
        costs = [rounded - plain for rounded, plain in pairs if rounded is not None and plain is not None]
        if costs:
            found[metric.key] = summarise(costs)
    return found
