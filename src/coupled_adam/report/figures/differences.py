"""The difference between two optimizers: in loss and accuracy over the dataset size (the paper's Fig. results_S), and
in the accuracy of each task. With several pairs, each has a row."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import FAINT, legend_above, panels
from coupled_adam.base.text import short
from coupled_adam.metrics import METRICS, NATS, TASKS
from coupled_adam.report.figures.style import draw_difference
from coupled_adam.report.grid import Grid, Size, Variant, model_names
from coupled_adam.report.significance import Comparison

SHOWN = ("loss", "acc")
Pair = tuple[Variant, Variant]


def draw_differences(grid: Grid) -> Figure | None:
    """Draw the differences in loss and in accuracy, one marker per size and one row of panels per pair of optimizers.

    The bars are the one-sided 95% confidence threshold: a marker whose bar misses zero is significant, and filled. A
    metric needs at least two sizes; a single number is in the tables.
    """
    found: dict[Pair, dict[str, dict[Size, Comparison]]] = {}
    for pair in grid.difference_pairs:
        for metric in SHOWN:
            compared = {size: grid.compare(size, *pair, metric) for size in grid.sizes}
            known = {size: comparison for size, comparison in compared.items() if comparison is not None}
            if len(known) > 1:
                found.setdefault(pair, {})[metric] = known
    if not found:
        return None
    metrics = [metric for metric in SHOWN if any(metric in of_pair for of_pair in found.values())]
    figure, rows = panels(len(found), len(metrics), 3.1 if len(found) == 1 else 2.5)
    for row, (pair, of_pair) in zip(rows, found.items(), strict=True):
        for axes, metric in zip(row, metrics, strict=True):
            axes.set_visible(metric in of_pair)
            _draw_panel(axes, of_pair.get(metric, {}))
            label = f"difference in {METRICS[metric].symbol}"
            direction = f"{METRICS[metric].better} is better"
            if len(found) == 1:
                axes.set_ylabel(f"{label} ({NATS})" if metric == "loss" else label)
                axes.set_title(direction, fontsize=9)
            else:
                axes.set_ylabel(f"{label}\n{direction}", fontsize=8)
        if len(found) > 1:  # one title per row: two do not fit side by side
            row[0].set_title(f"{pair[1].label} minus {pair[0].label}", fontsize=9, loc="left")
    for axes in rows[-1]:
        axes.set_xlabel("dataset size D (tokens)")
    legend_above(figure, [axes for row in rows for axes in row])
    return figure


def draw_task_differences(grid: Grid) -> Figure | None:
    """Draw the tasks side by side, one marker per model at its largest dataset with tasks, one panel per pair of
    optimizers. None for a single task of a single model."""
    found = {pair: _task_differences(grid, pair) for pair in grid.difference_pairs}
    found = {pair: of_pair for pair, of_pair in found.items() if sum(map(len, of_pair.values())) > 1}
    if not found:
        return None
    measured = {key for of_pair in found.values() for of_model in of_pair.values() for key in of_model}
    shown = [task for task in TASKS if task.key in measured]
    names = model_names(grid.sizes)
    models = [model for model in names if any(model in of_pair for of_pair in found.values())]
    figure, rows = panels(len(found), 1, 3.4 if len(found) == 1 else 2.3)
    for [axes], (pair, of_pair) in zip(rows, found.items(), strict=True):
        axes.axhline(0, color=FAINT, linewidth=1.2)
        for number, model in enumerate(models):
            label: str | None = f"N = {names[model]}"
            for place, task in enumerate(shown):
                if task.key in of_pair.get(model, {}):
                    aside = 0.14 * (number - (len(models) - 1) / 2)
                    draw_difference(axes, place + aside, of_pair[model][task.key], number, label)
                    label = None  # one legend entry per model
        axes.set_xticks(range(len(shown)), [task.label for task in shown], rotation=30, horizontalalignment="right")
        axes.set(xlim=(-0.6, len(shown) - 0.4), ylabel=f"difference in {METRICS['acc'].symbol}")
        if len(found) > 1:
            axes.set_title(f"{pair[1].label} minus {pair[0].label}", fontsize=9)
    legend_above(figure, [axes for [axes] in rows])
    return figure


def _task_differences(grid: Grid, pair: Pair) -> dict[tuple[int, str], dict[str, Comparison]]:
    """Differences by model and task; larger datasets replace smaller ones."""
    found: dict[tuple[int, str], dict[str, Comparison]] = {}
    for size in grid.sizes:
        compared = {task.key: grid.compare(size, *pair, task.key) for task in TASKS}
        known = {key: comparison for key, comparison in compared.items() if comparison is not None}
        if known:
            found[size.parameters, size.model] = known
    return found


def _draw_panel(axes: Axes, comparisons: dict[Size, Comparison]) -> None:
    tokens = sorted({size.tokens for size in comparisons})
    names = model_names(list(comparisons))
    models = list(names)
    axes.axhline(0, color=FAINT, linewidth=1.2)
    for size, comparison in comparisons.items():
        model = (size.parameters, size.model)
        number = models.index(model)
        # Models of the same D are side by side, so that their bars do not overlap.
        place = tokens.index(size.tokens) + 0.14 * (number - (len(models) - 1) / 2)
        is_first = size == min(other for other in comparisons if (other.parameters, other.model) == model)
        draw_difference(axes, place, comparison, number, f"N = {names[model]}" if is_first else None)
    axes.set_xticks(range(len(tokens)), [short(each) for each in tokens])
    axes.set_xlim(-0.6, len(tokens) - 0.4)
