"""The figures of one table.

Legend: V vocabulary rows, H hidden size, S sampled rows.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from coupled_adam.base.captioned_figure import (
    MARK,
    POINTS,
    CaptionedFigure,
    captioned_figure,
    figure_style,
    powers_of_ten,
)
from coupled_adam.embeddings import EmbeddingMetrics
from coupled_adam.inspection.sampling import Sample
from coupled_adam.metrics import METRICS


def draw_table_figures(
    prefix: str, metrics: EmbeddingMetrics, sample: Sample, counts: NDArray[np.int64] | None
) -> list[CaptionedFigure]:
    """Draw all figures of one table.

    Args:
        prefix: of the figure names, unique for every table of a page.
        metrics: the measures of the table.
        sample: some of its rows.
        counts: (V,) token counts; None if unknown.
    """
    along_mean, first, second = sample.places.T
    shown = f"{len(sample.rows):,} of {metrics.shape[0]:,} tokens are shown."
    with figure_style():
        figures = [
            captioned_figure(
                f"{prefix}-side",
                "Side view",
                "Embeddings along their mean and along the first principal component orthogonal to it. "
                f"A healthy cloud is centred at the origin, an anisotropic one is not. {shown}",
                _cloud(along_mean, first, "along the mean", "component 1"),
            ),
            captioned_figure(
                f"{prefix}-front",
                "View along the mean",
                "The same embeddings along the first two principal components orthogonal to the mean.",
                _cloud(first, second, "component 1", "component 2"),
            ),
            captioned_figure(
                f"{prefix}-cosine",
                "Cosine of two tokens",
                f"For {len(sample.cosines):,} random pairs of different tokens. The line is the mean over all pairs.",
                _cosine_histogram(sample, metrics.mean_cosine),
            ),
            captioned_figure(
                f"{prefix}-spectrum",
                "Singular values",
                "Relative to the largest. A first value far above the others means that one direction dominates.",
                _spectrum(metrics.singular_values),
            ),
        ]
        if counts is not None:
            figure = _length_and_frequency(metrics.norms, counts, sample.rows)
            caption = f"Without tokens that never occur. {shown}"
            figures.append(captioned_figure(f"{prefix}-frequency", "Length and frequency", caption, figure))
    return figures


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.4, 3.2), layout="constrained")
    return figure, figure.add_subplot()


def _cloud(x: NDArray[np.float32], y: NDArray[np.float32], x_label: str, y_label: str) -> Figure:
    figure, axes = _axes()
    axes.scatter(x, y, s=3, color=POINTS, alpha=0.35, linewidths=0, rasterized=True)
    axes.plot([0], [0], marker="+", markersize=13, markeredgewidth=2.5, color=MARK, linestyle="none", label="origin")
    axes.set(xlabel=x_label, ylabel=y_label, aspect="equal", adjustable="datalim")
    axes.legend(loc="upper left", handletextpad=0.2, borderaxespad=0)
    return figure


def _cosine_histogram(sample: Sample, mean: float | None) -> Figure:
    figure, axes = _axes()
    axes.hist(sample.cosines, bins=80, range=(-1, 1), color=POINTS)
    if mean is not None:
        axes.axvline(mean, color=MARK, linewidth=2, label=f"mean {METRICS['mean_cosine'].text(mean)}")
        axes.legend(loc="upper left", borderaxespad=0)
    axes.set(xlim=(-1, 1), xticks=(-1, -0.5, 0, 0.5, 1), xlabel="cosine", ylabel="pairs")
    return figure


def _spectrum(singular_values: NDArray[np.float64]) -> Figure:
    """Draw the singular values, largest first, without zeros, which a logarithmic axis cannot show."""
    figure, axes = _axes()
    positive = singular_values[singular_values > 0]
    if len(positive):
        axes.plot(np.arange(1, len(positive) + 1), positive / positive[0], color=POINTS, linewidth=2)
        axes.plot([1], [1], marker="o", color=MARK)
        axes.set(xscale="log", yscale="log")
    axes.set(xlabel="number", ylabel="singular value")
    powers_of_ten(axes)
    return figure


def _length_and_frequency(norms: NDArray[np.float64], counts: NDArray[np.int64], rows: NDArray[np.int64]) -> Figure:
    """Draw the lengths (V,) over the counts (V,) for the sampled rows (S,)."""
    figure, axes = _axes()
    seen = rows[counts[rows] > 0]
    axes.scatter(counts[seen] / counts.sum(), norms[seen], s=3, color=POINTS, alpha=0.35, linewidths=0, rasterized=True)
    axes.set(xscale="log", ylim=(0, None), xlabel="frequency", ylabel="length")
    powers_of_ten(axes)
    return figure
