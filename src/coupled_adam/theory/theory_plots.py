"""The figures of the theory, one function each; drawn inside `figure_style()`.

Clouds of tokens become images inside the SVG. Labels are plain text, not mathematics, so that names may contain dollar
signs.

Letters: V rows of the table, padding included. In the code p is the unigram probability of a token; in figures, as in
the paper, p is the predicted probability and p̃ the unigram probability.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from coupled_adam.base.captioned_figure import INK, MARKERS, POINTS, SERIES_COLOURS, legend_above, panels, powers_of_ten
from coupled_adam.base.text import fixed, short
from coupled_adam.theory.record import CheckpointTheory, Fit, Optimizer, RunTheory
from coupled_adam.theory.theory_numbers import optimizers_of, through_input

Floats = NDArray[np.floating]

NAMES: dict[Optimizer, str] = {"sgd": "SGD", "adam": "Adam", "coupled": "Coupled Adam", "own": "the run's own"}
COLOURS: dict[Optimizer, str] = {"sgd": "#1a9e78", "adam": "#e0632b", "coupled": "#3d87c9", "own": "#8a4fb0"}
LINES: dict[Optimizer, str] = {"sgd": ":", "adam": "--", "coupled": "-", "own": "-."}
OPTIMIZER_MARKERS: dict[Optimizer, str] = {"sgd": "^", "adam": "s", "coupled": "o", "own": "D"}
PARTS = {"total": "whole update", "output": "output layer", "input": "input layer"}
PART_COLOURS = {"output": "#3d87c9", "input": "#c98a00", "total": "#7b6bd6"}
FIT = "#e0632b"
BINS = 16
SMALLEST = 1e-9
"""Smaller sums are drawn here, because a logarithmic axis cannot show zero."""


def draw_prior(counts: NDArray[np.int64]) -> Figure:
    """Draw the logarithm of the unigram probability, by token and sorted (Fig. prior_example).

    Args:
        counts: (V,) token counts, at least one positive.
    """
    p = counts / counts.sum()
    seen = np.flatnonzero(counts)
    largest = int(p.argmax())
    figure, [[by_token, by_rank]] = panels(1, 2, 2.9, share_y=True)
    by_token.scatter(seen, np.log(p[seen]), s=3, color=POINTS, alpha=0.4, linewidths=0, rasterized=True)
    by_token.plot([largest], [np.log(p[largest])], "o", color=FIT)
    by_token.annotate(
        f"max p̃ = {fixed(p[largest], 3)}\nlog p̃ = {fixed(np.log(p[largest]), 2)}",
        (largest, np.log(p[largest])),
        xytext=(10 if largest < len(p) / 2 else -10, 0),
        textcoords="offset points",
        horizontalalignment="left" if largest < len(p) / 2 else "right",
        verticalalignment="center",
        fontsize=9,
    )
    by_token.set(xlabel="token i", ylabel="log p̃")
    by_token.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    by_token.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    ordered = np.sort(np.log(p[seen]))[::-1]
    by_rank.plot(np.arange(1, len(ordered) + 1), ordered, color=POINTS, linewidth=2)
    by_rank.set(xscale="log", xlabel="rank")
    powers_of_ten(by_rank)
    by_token.margins(y=0.1)
    return figure


def draw_second_moment(p: Floats, second_moment: Floats, fit: Fit) -> Figure:
    """Draw E[v_i] against p̃_i with the line through the origin (Fig. experimental_results_E_p), also on log axes.

    Args:
        p: (V,) unigram probabilities.
        second_moment: (V,).
        fit: of these.
    """
    figure, [[plain, logarithmic]] = panels(1, 2, 3.0)
    label = "A p̃" if fit.r2 is None else f"A p̃, R² = {fixed(fit.r2, 3)}"
    for axes in (plain, logarithmic):
        _cloud(axes, p, second_moment)
        _line(axes, p, fit.A, label)
        axes.set_xlabel("unigram probability p̃")
    plain.set_ylabel("second moment E[v]")
    plain.set(xlim=(0, None), ylim=(0, None))
    plain.locator_params(nbins=4)
    plain.ticklabel_format(axis="y", scilimits=(-2, 3))
    _logarithmic(logarithmic, p, second_moment)
    logarithmic.plot(*_medians(p, second_moment), color=INK, linewidth=1.4, label="median")
    legend_above(figure, [logarithmic])
    return figure


def draw_x(p: Floats, x_true: Floats, x_false: Floats, fits: Mapping[str, Fit]) -> Figure:
    """Draw X of true and other tokens against p̃_i: the first should not depend on it, the second be proportional.

    Args:
        p: (V,) unigram probabilities.
        x_true: (V,), NaN for tokens that were never true.
        x_false: (V,).
        fits: "x_true" and "x_false".
    """
    figure, [[left, right]] = panels(1, 2, 3.0)
    shown = np.isfinite(x_true) & (p > 0)
    _cloud(left, p[shown], x_true[shown])
    left.plot(*_medians(p[shown], x_true[shown]), color=INK, linewidth=1.4, label="median")
    left.set(xscale="log", ylim=(-0.02, 1.05), ylabel="X(i=t) = E[(1 - p)²]")
    _cloud(right, p, x_false)
    _line(right, p, fits["x_false"].A, "A p̃")
    _logarithmic(right, p, x_false)
    right.plot(*_medians(p, x_false), color=INK, linewidth=1.4, label="median")
    right.set_ylabel("X(i≠t) = E[p²]")
    for axes, name in ((left, "x_true"), (right, "x_false")):
        axes.set_xlabel("unigram probability p̃")
        r2 = fits[name].r2
        axes.set_title("" if r2 is None else f"R² of A p̃: {fixed(r2, 3)}")
    powers_of_ten(left)
    legend_above(figure, [right])
    return figure


def draw_theorem(measured: Floats, predicted: Floats) -> Figure:
    """Draw the measured E[g_i^2] against the Theorem's right-hand side, both (V,), with the line of equality."""
    figure, [[axes]] = panels(1, 1, 3.4)
    shown = (measured > 0) & (predicted > 0)
    _cloud(axes, predicted[shown], measured[shown])
    if shown.any():
        ends = [float(predicted[shown].min()) / 2, float(predicted[shown].max()) * 2]
        axes.plot(ends, ends, color=FIT, linewidth=1, zorder=0, label="equal")  # below the points: they lie on it
        _logarithmic(axes, predicted[shown], measured[shown])
    axes.set(xlabel="S [ p̃ X(i=t) + (1 - p̃) X(i≠t) ]", ylabel="measured E[g²]")
    legend_above(figure, [axes])
    return figure


def draw_A(runs: Mapping[str, RunTheory]) -> Figure:
    """Draw the constant A of E[v_i] = A p̃_i over training, one line per run (Fig. experimental_results_A)."""
    figure, [[axes]] = panels(1, 1, 3.0)
    for number, (name, run) in enumerate(runs.items()):
        points = [(each.tokens_seen, A) for each in run.checkpoints if (A := each.fits["second_moment"].A) is not None]
        style: dict[str, Any] = {
            "color": SERIES_COLOURS[number % len(SERIES_COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
        }
        tokens, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(tokens, values, label=f"{name} (N = {short(run.parameters)})", **style)
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="tokens seen", ylabel="A")
    axes.ticklabel_format(axis="y", scilimits=(-2, 3))
    _tokens(axes)
    legend_above(figure, [axes])
    return figure


def draw_update_sums(runs: Mapping[str, RunTheory]) -> Figure:
    """Draw the shift of the mean embedding relative to the mean update length over training, one row per run."""
    figure, rows = panels(len(runs), len(PARTS), 2.5 if len(runs) == 1 else 2.2, share_y=True)
    for row, (run_name, run) in zip(rows, runs.items(), strict=True):
        tokens = [each.tokens_seen for each in run.checkpoints]
        for axes, (part, title) in zip(row, PARTS.items(), strict=True):
            for name in optimizers_of(run):
                sums = [_update_sum(each, name, part) for each in run.checkpoints]
                values = [math.nan if each is None else max(each, SMALLEST) for each in sums]
                axes.plot(tokens, values, marker=OPTIMIZER_MARKERS[name], **_line_style(name), label=NAMES[name])
            axes.set(xlim=(0, None), yscale="log", ylim=(SMALLEST / 2, 2))
            powers_of_ten(axes)
            _tokens(axes, 2)
            if row is rows[0]:
                axes.set_title(title, fontsize=9.5)
        row[0].set_ylabel("sum / lengths" if len(runs) == 1 else run_name, fontsize=9)
    figure.supxlabel("tokens seen", fontsize=10)
    if len(runs) > 1:
        figure.supylabel("sum of updates / sum of their lengths", fontsize=10)
    legend_above(figure, [row[0] for row in rows])
    return figure


def _update_sum(checkpoint: CheckpointTheory, optimizer: Optimizer, part: str) -> float | None:
    if part == "input":
        return through_input(checkpoint, optimizer)
    whole = checkpoint.update(optimizer)
    return whole.total if part == "total" else whole.output


def draw_gradient_sums(run: RunTheory) -> Figure:
    """Draw sums of gradients relative to the sum of their lengths, one point per batch, by layer."""
    figure, [[axes]] = panels(1, 1, 3.0)
    parts = ("output", "input", "total") if run.tied else ("output", "input")
    labels = {"output": "output layer", "input": "input layer", "total": "both (tied table)"}
    for number, part in enumerate(parts):
        tokens, values = _per_batch(run.checkpoints, part, run.tokens_per_batch)
        style: dict[str, Any] = {
            "color": PART_COLOURS[part],
            "marker": MARKERS[number],
            "markersize": 3,
            "linestyle": "none",
        }
        axes.plot(tokens, np.maximum(values, SMALLEST), label=labels[part], alpha=0.6, rasterized=True, **style)
    axes.set(xlim=(0, None), yscale="log", ylim=(SMALLEST / 2, 2))
    powers_of_ten(axes)
    axes.set(xlabel="tokens seen", ylabel="sum of gradients / sum of lengths")
    _tokens(axes)
    legend_above(figure, [axes])
    return figure


def _per_batch(
    checkpoints: Sequence[CheckpointTheory], part: str, tokens_per_batch: int
) -> tuple[list[int], list[float]]:
    """Tokens seen and relative gradient sum of every batch of every checkpoint."""
    tokens, values = [], []
    for each in checkpoints:
        for number, value in enumerate(each.gradient_sums[part]):
            tokens.append(each.tokens_seen + number * tokens_per_batch)
            values.append(value)
    return tokens, values


def _line_style(name: Optimizer) -> dict[str, Any]:
    return {"color": COLOURS[name], "linestyle": LINES[name], "markersize": 4, "linewidth": 1.6}


def _cloud(axes: Axes, x: Floats, y: Floats) -> None:
    axes.scatter(x, y, s=4, color=POINTS, alpha=0.4, linewidths=0, rasterized=True)


def _line(axes: Axes, p: Floats, A: float | None, label: str) -> None:
    """Draw A p between the smallest and largest positive probability."""
    if A is None:
        return
    ends = np.array([p[p > 0].min(), p.max()])
    axes.plot(ends, A * ends, color=FIT, linewidth=1.8, label=label)


def _logarithmic(axes: Axes, x: Floats, y: Floats) -> None:
    """Make both axes logarithmic around the positive values; without any, leave them linear."""
    shown = (x > 0) & (y > 0)
    if shown.any():
        axes.set(xscale="log", yscale="log")
        axes.set_xlim(x[shown].min() / 2, x[shown].max() * 2)
        axes.set_ylim(y[shown].min() / 3, y[shown].max() * 3)
        powers_of_ten(axes)


def _medians(p: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Median of y in bins of log p, which a cloud with thousands of points hides."""
    shown = (p > 0) & np.isfinite(y)
    p, y = p[shown], y[shown]
    if not len(p):
        return np.zeros(0), np.zeros(0)
    edges = np.geomspace(p.min(), p.max() * (1 + 1e-9), BINS + 1)
    bins = np.digitize(p, edges) - 1
    found = [number for number in range(BINS) if np.count_nonzero(bins == number) > 2]
    places = np.sqrt(edges[:-1] * edges[1:])[found]
    return places, np.array([np.median(y[bins == number]) for number in found])


def _tokens(axes: Axes, ticks: int = 5) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
