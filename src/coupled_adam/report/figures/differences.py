"""The difference between the two optimizers: in loss and accuracy over the dataset size (the paper's Fig. results_S),
and in the accuracy of each task."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import FAINT, legend_above, panels
from coupled_adam.base.text import short
from coupled_adam.metrics import METRICS, NATS, TASKS
from coupled_adam.report.figures.style import draw_difference
from coupled_adam.report.grid import Grid, Size, model_names
from coupled_adam.report.significance import Comparison

SHOWN = ("loss", "acc")


def draw_differences(grid: Grid) -> Figure | None:
    """A panel for each of loss and accuracy that was measured at two sizes or more, a marker for each size.

    The bars are the one-sided 95% confidence threshold: a marker whose bar misses zero is significant, and filled. One
    size alone is a number, which the tables have, and no figure.
    """
    pair = grid.main_pair
    if pair is None:
        return None
    found: dict[str, dict[Size, Comparison]] = {}
    for metric in SHOWN:
        for size in grid.sizes:
            comparison = grid.compare(size, *pair, metric)
            if comparison is not None:
                found.setdefault(metric, {})[size] = comparison
    found = {metric: comparisons for metric, comparisons in found.items() if len(comparisons) > 1}
    if not found:
        return None
    figure, rows = panels(1, len(found), 3.1)
    for axes, (metric, comparisons) in zip(rows[0], found.items(), strict=True):
        _draw_panel(axes, comparisons)
        unit = f" ({NATS})" if metric == "loss" else ""
        axes.set(ylabel=f"difference in {METRICS[metric].symbol}{unit}", xlabel="dataset size D (tokens)")
        axes.set_title(f"{METRICS[metric].better} is better", fontsize=9)
    legend_above(figure, rows[0])
    return figure


def draw_task_differences(grid: Grid) -> Figure | None:
    """The tasks beside each other, and a marker for each model: that of its largest dataset with tasks. None for a
    single task of a single model."""
    pair = grid.main_pair
    if pair is None:
        return None
    found: dict[tuple[int, str], dict[str, Comparison]] = {}  # of a model, by task; larger datasets replace smaller
    for size in grid.sizes:
        compared = {task.key: grid.compare(size, *pair, task.key) for task in TASKS}
        known = {key: comparison for key, comparison in compared.items() if comparison is not None}
        if known:
            found[size.parameters, size.model] = known
    if sum(len(known) for known in found.values()) < 2:
        return None
    shown = [task for task in TASKS if any(task.key in of_model for of_model in found.values())]
    names = model_names(grid.sizes)
    models = [model for model in names if model in found]
    figure, [[axes]] = panels(1, 1, 3.4)
    axes.axhline(0, color=FAINT, linewidth=1.2)
    for number, model in enumerate(models):
        label: str | None = f"N = {names[model]}"
        for place, task in enumerate(shown):
            if task.key in found[model]:
                beside = 0.14 * (number - (len(models) - 1) / 2)
                draw_difference(axes, place + beside, found[model][task.key], number, label)
                label = None  # once is enough
    axes.set_xticks(range(len(shown)), [task.label for task in shown], rotation=30, horizontalalignment="right")
    axes.set(xlim=(-0.6, len(shown) - 0.4), ylabel=f"difference in {METRICS['acc'].symbol}")
    legend_above(figure, [axes])
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
