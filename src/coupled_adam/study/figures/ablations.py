"""The ablations: every metric over the scale exponent n of Scaled Coupled Adam, and the loss over SGD's factor f."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.inspection.figures import INK
from coupled_adam.study.figures.style import (
    FAINT,
    MARKERS,
    SIZE_COLOURS,
    draw_difference,
    legend_above,
    looks,
    panels,
    size_panels,
)
from coupled_adam.study.metrics import MAIN, OTHERS, Metric
from coupled_adam.study.report_data import (
    Size,
    Variant,
    compare_variants,
    has_scale_exponents,
    loss_name,
    runs_of,
    sizes,
    values_of,
    variants,
)
from coupled_adam.study.results import Result
from coupled_adam.study.statistics import Summary, summarise


def draw_scale_loss(results: Sequence[Result]) -> Figure | None:
    """The difference in loss to n = 0 over n, with the one-sided 95% threshold as bars (Fig. ablation_scale)."""
    family = _scaled_family(results)
    itself = next((variant for variant in family if variant.n == 0), None)
    if itself is None:
        return None
    found = {
        (size, variant): comparison
        for size in sizes(results)
        for variant in family
        if variant is not itself
        and (comparison := compare_variants(results, size, itself, variant, "loss")) is not None
    }
    if not found:
        return None
    figure, [[axes]] = panels(1, 1, 3.1)
    axes.axhline(0, color=FAINT, linewidth=1.2)
    shown = sorted({size for size, _ in found})
    for number, size in enumerate(shown):
        points = {variant.n: comparison for (other, variant), comparison in found.items() if other == size}
        line = {0.0: 0.0} | {n: comparison.difference or 0.0 for n, comparison in points.items()}
        colour = SIZE_COLOURS[number % len(SIZE_COLOURS)]
        axes.plot(sorted(line), [line[n] for n in sorted(line)], color=colour, linewidth=1, alpha=0.6)
        for n, comparison in points.items():
            draw_difference(axes, n, comparison, number, size.label if len(shown) > 1 else None)
    axes.plot([0], [0], "o", color=INK, markersize=7)
    axes.set(xlabel="scale exponent n", ylabel="loss less that of n = 0\n(nats per token)")
    legend_above(figure, [axes])
    return figure


def draw_scale_complete(results: Sequence[Result]) -> Figure | None:
    """Every metric over n: mean and standard deviation over seeds (Fig. ablation_scale_complete)."""
    family = _scaled_family(results)
    metrics = [metric for metric in (*MAIN, *OTHERS) if metric.better and _is_measured(results, family, metric)]
    if not family or not metrics:
        return None
    rows = -(-len(metrics) // 2)
    figure, axes_rows = panels(rows, 2, 1.75)
    places = [axes for row in axes_rows for axes in row]
    for axes, metric in zip(places, metrics, strict=False):
        for number, size in enumerate(sizes(results)):
            points = _points(results, size, [(variant.n, variant) for variant in family], metric.key)
            _draw_points(axes, points, number, size.label if len(sizes(results)) > 1 else None)
        axes.set_title(metric.heading)
    for axes in places[len(metrics) :]:
        axes.set_visible(False)
    figure.supxlabel("scale exponent n", fontsize=10)
    legend_above(figure, places[: len(metrics)])
    return figure


def draw_sgd_loss(results: Sequence[Result]) -> Figure | None:
    """The loss over SGD's factor f, a panel for each size, with the best f marked and the other optimizers as lines."""
    family = [variant for variant in variants(results) if variant.role == "sgd" and variant.f is not None]
    found = {
        size: points
        for size in sizes(results)
        if (points := _points(results, size, [(variant.f or 0.0, variant) for variant in family], "loss"))
    }
    if not found:
        return None
    figure, places = size_panels(
        list(found), "factor f of the learning rate", f"{loss_name(results)} (nats per token)", share_y=False
    )
    colours = looks(variants(results))
    others = [variant for variant in variants(results) if variant.role in ("standard", "coupled")]
    for size, points in found.items():
        axes = places[size]
        _draw_points(axes, points, 1, "SGD")
        best, lowest = min(((f, summary.mean or 0.0) for f, summary in points), key=lambda point: point[1])
        axes.plot([best], [lowest], "o", markersize=12, markerfacecolor="none", color=INK, label="best f")
        for variant in others:
            mean = summarise(values_of(runs_of(results, size, variant), "loss").values()).mean
            if mean is not None:
                look = colours[variant.name]
                axes.axhline(mean, color=look.colour, linestyle=look.line, label=variant.label)
    legend_above(figure, places.values())
    return figure


def _scaled_family(results: Sequence[Result]) -> list[Variant]:
    """Coupled Adam with every n of the study, or nothing when it does not vary n."""
    if not has_scale_exponents(results):
        return []
    by_n: dict[float, Variant] = {}
    for variant in variants(results):
        if variant.role in ("coupled", "scaled"):
            by_n.setdefault(variant.n, variant)
    return list(by_n.values())


def _is_measured(results: Sequence[Result], family: Sequence[Variant], metric: Metric) -> bool:
    names = {variant.name for variant in family}
    return any(result.metrics.get(metric.key) is not None for result in results if result.optimizer in names)


def _points(
    results: Sequence[Result], size: Size, family: Sequence[tuple[float, Variant]], metric: str
) -> list[tuple[float, Summary]]:
    """(n or f, what was measured there), where something was."""
    summaries = [(x, summarise(values_of(runs_of(results, size, variant), metric).values())) for x, variant in family]
    return [(x, summary) for x, summary in summaries if summary.mean is not None]


def _draw_points(axes: Axes, points: Sequence[tuple[float, Summary]], number: int, label: str | None) -> None:
    axes.errorbar(
        [x for x, _ in points],
        [summary.mean or 0.0 for _, summary in points],
        yerr=[summary.std or 0.0 for _, summary in points],
        marker=MARKERS[number % len(MARKERS)],
        color=SIZE_COLOURS[number % len(SIZE_COLOURS)],
        markersize=4.5,
        linewidth=1.2,
        capsize=2.5,
        label=label,
    )
