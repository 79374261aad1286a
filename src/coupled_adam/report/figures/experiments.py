"""The dataset sizes D and model sizes N of the study, with the line of compute-optimal training, N = D/20."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import FAINT, MARKERS, SERIES_COLOURS, legend_above, panels
from coupled_adam.base.text import short
from coupled_adam.report.grid import Grid, model_names

TOKENS_PER_PARAMETER = 20


def draw_experiments(grid: Grid) -> Figure | None:
    """Draw a point for every size with a finished run; None for a single size."""
    shown = grid.sizes
    if len(shown) < 2:
        return None
    figure, [[axes]] = panels(1, 1, 3.2)
    models = model_names(shown)
    for number, ((parameters, model), name) in enumerate(models.items()):
        tokens = [size.tokens for size in shown if (size.parameters, size.model) == (parameters, model)]
        colour, marker = SERIES_COLOURS[number % len(SERIES_COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot(tokens, [parameters] * len(tokens), marker, color=colour, markersize=8, label=f"N = {name}")
    all_tokens = np.array(
        [size.tokens for size in shown] + [parameters * TOKENS_PER_PARAMETER for parameters, _ in models]
    )
    ends = np.array([all_tokens.min() / 2, all_tokens.max() * 2], np.float64)
    axes.plot(ends, ends / TOKENS_PER_PARAMETER, color=FAINT, linestyle="--", label="N = D/20")
    axes.set(xscale="log", yscale="log", xlabel="dataset size D (tokens)", ylabel="model size N (parameters)")
    tokens_ticks = _apart([size.tokens for size in shown])
    parameter_ticks = _apart([size.parameters for size in shown])
    axes.set_xticks(tokens_ticks, [short(tick) for tick in tokens_ticks])
    axes.set_yticks(parameter_ticks, [short(tick) for tick in parameter_ticks])
    axes.minorticks_off()
    legend_above(figure, [axes])
    return figure


def _apart(values: Sequence[int]) -> list[int]:
    """The distinct values, without those whose label would overlap the previous one on a logarithmic axis."""
    kept: list[int] = []
    for value in sorted(set(values)):
        if not kept or value > 1.4 * kept[-1]:
            kept.append(value)
    return kept
