"""Curves over training for each optimizer: the losses, the mean-embedding ratio and ISO.

A line is the mean over seeds, and the band covers all seeds.
"""

from collections.abc import Mapping

from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import FAINT, legend_above
from coupled_adam.metrics import METRICS, NATS, logged_key
from coupled_adam.report.figures.style import looks, size_panels
from coupled_adam.report.grid import Grid, Size, Variant
from coupled_adam.report.run_files import MeanCurve, mean_curve, mean_difference

FEW = 4
"""Optimizers whose bands do not cover each other's lines."""


def draw_training_loss(grid: Grid) -> Figure | None:
    """Draw the loss of the training batches."""
    return draw_over_training(grid, "train", "loss")


def draw_validation_loss(grid: Grid) -> Figure | None:
    """Draw the loss on the validation text."""
    return draw_over_training(grid, "val", "loss")


def draw_validation_difference(grid: Grid) -> Figure | None:
    """Draw the validation loss minus that of the first optimizer, which shows what the falling curves of
    `draw_validation_loss` hide."""
    first = grid.variants[0]
    found = {
        (size, variant): curve
        for size in grid.sizes
        for variant in grid.variants[1:]
        if (curve := mean_difference(grid.runs_of(size, first), grid.runs_of(size, variant), "val", "loss")) is not None
    }
    figure = _draw_curves(grid, found, f"{METRICS['val_loss'].label} minus\n{first.label}'s (nats)")
    for axes in figure.axes if figure else []:
        axes.axhline(0, color=FAINT, linewidth=1.2)
    return figure


def draw_mean_ratio(grid: Grid, table: str = "") -> Figure | None:
    """Draw the length of the mean embedding divided by the mean length of the embeddings.

    Args:
        grid: of the finished runs.
        table: "" for the output table (or the table of a tied model), "input_" for the input table of an untied model.
    """
    return draw_over_training(grid, "embeddings", f"{table}mu_norm_ratio", bottom=0.0)


def draw_isotropy(grid: Grid, table: str = "") -> Figure | None:
    """Draw the isotropy of a table; arguments as for `draw_mean_ratio`."""
    return draw_over_training(grid, "embeddings", f"{table}iso", bottom=0.0)


def draw_over_training(grid: Grid, kind: str, key: str, *, bottom: float | None = None) -> Figure | None:
    """Draw one logged number over training, one panel per size.

    Args:
        grid: of the finished runs.
        kind: of the rows in metrics.jsonl.
        key: of the number.
        bottom: start of the vertical axis; None for below the smallest value.
    """
    found = {
        (size, variant): curve
        for size in grid.sizes
        for variant in grid.variants
        if (curve := mean_curve(grid.runs_of(size, variant), kind, key)) is not None
    }
    metric = METRICS[logged_key(kind, key)]
    return _draw_curves(grid, found, f"{metric.label} ({NATS})" if key == "loss" else metric.label, bottom=bottom)


def _draw_curves(
    grid: Grid, found: Mapping[tuple[Size, Variant], MeanCurve], label: str, *, bottom: float | None = None
) -> Figure | None:
    """Draw curves by size and optimizer, one panel per size; None without any."""
    if not found:
        return None
    figure, places = size_panels(sorted({size for size, _ in found}), "training step", label)
    colours = looks(grid.variants)
    opacity = 0.2 if len(grid.variants) <= FEW else 0.07  # many bands cover the lines
    for (size, variant), curve in found.items():
        axes, look = places[size], colours[variant.name]
        axes.plot(curve.steps, curve.mean, color=look.colour, linestyle=look.line, label=variant.label)
        axes.fill_between(curve.steps, curve.low, curve.high, color=look.colour, alpha=opacity, linewidth=0)
    for axes in places.values():
        axes.set_xlim(0, None)
        axes.locator_params(axis="x", nbins=4)
        if bottom is not None:
            axes.set_ylim(bottom, None)
    legend_above(figure, places.values())
    return figure
