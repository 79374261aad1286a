"""The difference in loss and accuracy between the two optimizers over the dataset size (the paper's Fig. results_S)."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.study.figures.style import FAINT, draw_difference, legend_above, panels
from coupled_adam.study.metrics import METRICS
from coupled_adam.study.report_data import Size, compare_variants, main_pair, model_names, sizes
from coupled_adam.study.results import Result
from coupled_adam.study.statistics import Comparison
from coupled_adam.training.amounts import short

SHOWN = ("loss", "acc")
UNITS = {"loss": "loss (nats per token)", "acc": "accuracy"}


def draw_differences(results: Sequence[Result]) -> Figure | None:
    """A panel for each of loss and accuracy that was measured, a marker for each size.

    The bars are the one-sided 95% confidence threshold: a marker whose bar misses zero is significant, and filled.
    """
    pair = main_pair(results)
    if pair is None:
        return None
    found: dict[str, dict[Size, Comparison]] = {}
    for metric in SHOWN:
        for size in sizes(results):
            comparison = compare_variants(results, size, *pair, metric)
            if comparison is not None:
                found.setdefault(metric, {})[size] = comparison
    if not found:
        return None
    figure, rows = panels(1, len(found), 3.1)
    for axes, (metric, comparisons) in zip(rows[0], found.items(), strict=True):
        _draw_panel(axes, comparisons)
        axes.set(ylabel=f"difference in {UNITS[metric]}", xlabel="dataset size D (tokens)")
        axes.set_title(f"{METRICS[metric].better} is better", fontsize=9)
    legend_above(figure, rows[0])
    return figure


def _draw_panel(axes: Axes, comparisons: dict[Size, Comparison]) -> None:
    tokens = sorted({size.tokens for size in comparisons})
    names = model_names(list(comparisons))
    models = list(names)
    axes.axhline(0, color=FAINT, linewidth=1.2)
    for size, comparison in comparisons.items():
        model = (size.parameters, size.model)
        number = models.index(model)
        # Models of the same D stand side by side, so that their bars do not cover each other.
        place = tokens.index(size.tokens) + 0.14 * (number - (len(models) - 1) / 2)
        is_first = size == min(other for other in comparisons if (other.parameters, other.model) == model)
        draw_difference(axes, place, comparison, number, f"N = {names[model]}" if is_first else None)
    axes.set_xticks(range(len(tokens)), [short(each) for each in tokens])
    axes.set_xlim(-0.6, len(tokens) - 0.4)
