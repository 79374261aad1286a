"""The ablations: every metric over the scale exponent n of Scaled Coupled Adam, and the loss over SGD's factor f."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coupled_adam.base.captioned_figure import FAINT, INK, MARKERS, SERIES_COLOURS, legend_above, panels
from coupled_adam.metrics import MAIN, METRICS, NATS, OTHERS
from coupled_adam.report.figures.style import draw_difference, looks, size_panels
from coupled_adam.report.grid import Grid, Size, Variant, size_labels
from coupled_adam.report.result_notes import loss_name, loss_splits
from coupled_adam.report.shown_metrics import named
from coupled_adam.report.significance import Comparison, Summary, summarise


def draw_scale_loss(grid: Grid) -> Figure | None:
    """Draw the loss difference to n = 0 over n, with the one-sided 95% threshold as bars (Fig. ablation_scale)."""
    found = _differences_to_itself(grid, "loss")
    if not found:
        return None
    figure, [[axes]] = panels(1, 1, 3.1)
    _draw_over_n(axes, found, grid.sizes)
    axes.set(xlabel="scale exponent n", ylabel=f"{METRICS['loss'].symbol} less that of n = 0\n({NATS})")
    legend_above(figure, [axes])
    return figure


def draw_scale_complete(grid: Grid) -> Figure | None:
    """Draw the same for every metric (Fig. ablation_scale_complete)."""
    metrics = [metric for metric in (*MAIN, *OTHERS) if metric.better]
    found = {metric: _differences_to_itself(grid, metric.key) for metric in metrics}
    found = {metric: differences for metric, differences in found.items() if differences}
    if not found:
        return None
    figure, axes_rows = panels(-(-len(found) // 2), 2, 1.75)
    shown = [axes for row in axes_rows for axes in row]
    splits = loss_splits(grid.results)
    for axes, (metric, differences) in zip(shown, found.items(), strict=False):
        _draw_over_n(axes, differences, grid.sizes, marker_size=4.5)
        axes.set_title(named(metric, splits).heading)
    for axes in shown[len(found) :]:
        axes.set_visible(False)
    figure.supxlabel("scale exponent n", fontsize=10)
    figure.supylabel("difference to n = 0", fontsize=10)
    legend_above(figure, shown[: len(found)])
    return figure


def draw_sgd_loss(grid: Grid) -> Figure | None:
    """Draw the loss over SGD's factor f, one panel per size with at least two values of f; the best f is marked, and
    the other optimizers are lines."""
    family = [variant for variant in grid.variants if variant.role == "sgd" and variant.f]
    found = {
        size: points
        for size in grid.sizes
        if len(points := _points(grid, size, [(variant.f, variant) for variant in family], "loss")) > 1
    }
    if not found:
        return None
    figure, places = size_panels(
        list(found), "factor f of the learning rate", f"{loss_name(grid.results)} ({NATS})", share_y=False
    )
    colours = looks(grid.variants)
    others = [variant for variant in grid.variants if variant.role in ("standard", "coupled")]
    for size, points in found.items():
        axes = places[size]
        _draw_points(axes, points, 1, "SGD")
        best, lowest = min(((f, summary.mean or 0.0) for f, summary in points), key=lambda point: point[1])
        axes.plot([best], [lowest], "o", markersize=12, markerfacecolor="none", color=INK, label="best f")
        for variant in others:
            mean = summarise(grid.values_of(size, variant, "loss").values()).mean
            if mean is not None:
                look = colours[variant.name]
                axes.axhline(mean, color=look.colour, linestyle=look.line, label=variant.label)
    legend_above(figure, places.values())
    return figure


def _scaled_family(grid: Grid) -> list[Variant]:
    """Coupled Adam with every n of the study; empty if the study does not vary n."""
    if not grid.has_scale_exponents:
        return []
    by_n: dict[float, Variant] = {}
    for variant in grid.variants:
        if variant.role in ("coupled", "scaled"):
            by_n.setdefault(variant.n, variant)
    return list(by_n.values())


def _differences_to_itself(grid: Grid, metric: str) -> dict[Size, dict[float, Comparison]]:
    """For every size, compare each other n with n = 0; empty if the study does not have n = 0."""
    family = _scaled_family(grid)
    itself = next((variant for variant in family if variant.n == 0), None)
    found: dict[Size, dict[float, Comparison]] = {}
    for size in grid.sizes:
        for variant in family:
            if itself is not None and variant is not itself:
                comparison = grid.compare(size, itself, variant, metric)
                if comparison is not None:
                    found.setdefault(size, {})[variant.n] = comparison
    return found


def _draw_over_n(
    axes: Axes, found: Mapping[Size, Mapping[float, Comparison]], all_sizes: Sequence[Size], marker_size: float = 7
) -> None:
    """Draw one line per size through the differences to n = 0, which is the point at the origin."""
    labels = size_labels(all_sizes)
    axes.axhline(0, color=FAINT, linewidth=1.2)
    for size, points in found.items():
        number = all_sizes.index(size)  # the same colour in every panel
        line = {0.0: 0.0} | {n: comparison.difference or 0.0 for n, comparison in points.items()}
        colour = SERIES_COLOURS[number % len(SERIES_COLOURS)]
        axes.plot(sorted(line), [line[n] for n in sorted(line)], color=colour, linewidth=1, alpha=0.6)
        for n, comparison in points.items():
            draw_difference(axes, n, comparison, number, labels[size] if len(all_sizes) > 1 else None, marker_size)
    axes.plot([0], [0], "o", color=INK, markersize=marker_size)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _points(
    grid: Grid, size: Size, family: Sequence[tuple[float, Variant]], metric: str
) -> list[tuple[float, Summary]]:
    """Pairs of n or f and the measured values, without unmeasured ones."""
    summaries = [(x, summarise(grid.values_of(size, variant, metric).values())) for x, variant in family]
    return [(x, summary) for x, summary in summaries if summary.mean is not None]


def _draw_points(axes: Axes, points: Sequence[tuple[float, Summary]], number: int, label: str | None) -> None:
    axes.errorbar(
        [x for x, _ in points],
        [summary.mean or 0.0 for _, summary in points],
        yerr=[summary.std or 0.0 for _, summary in points],
        marker=MARKERS[number % len(MARKERS)],
        color=SERIES_COLOURS[number % len(SERIES_COLOURS)],
        markersize=4.5,
        linewidth=1.2,
        capsize=2.5,
        label=label,
    )
