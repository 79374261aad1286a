"""The pictures of one table, as SVG elements to be put into a page.

Lines and letters take the colours of the page around them, so that they can be read on light and on dark. Clouds of
points become images inside the SVG: ten thousand circles would be slow to show.

Legend: V vocabulary rows, H hidden size, S sampled rows.
"""

import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from coupled_adam.embeddings import EmbeddingMetrics
from coupled_adam.inspection.sampling import Sample

# Stand-ins for colours that only the page knows; no other part of a figure has these.
INK, LINE = "#010203", "#040506"
PAGE_COLOURS = {INK: "currentColor", LINE: "var(--line)"}
POINTS, MARK = "#3d87c9", "#e0632b"  # visible on white and on black

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Picture:
    """One figure of the page."""

    title: str
    svg: str
    caption: str


def draw_pictures(
    prefix: str, metrics: EmbeddingMetrics, sample: Sample, counts: NDArray[np.int64] | None
) -> list[Picture]:
    """All pictures of one table.

    Args:
        prefix: begins the id of every SVG element; another one for every table of a page.
        metrics: the measures of the table.
        sample: some of its rows.
        counts: (V,) how often each token occurs; None: not known.
    """
    along_mean, first, second = sample.places.T
    shown = f"{len(sample.rows):,} of {metrics.shape[0]:,} tokens are shown."
    with matplotlib.rc_context(STYLE):
        pictures = [
            Picture(
                "Seen from the side",
                to_svg(_cloud(along_mean, first, "along the mean", "component 1"), f"{prefix}-side"),
                "Embeddings along their mean and along the first principal component across it. "
                f"A healthy cloud lies around the origin, an anisotropic one beside it. {shown}",
            ),
            Picture(
                "Seen along the mean",
                to_svg(_cloud(first, second, "component 1", "component 2"), f"{prefix}-front"),
                "The same embeddings along the two first principal components across the mean.",
            ),
            Picture(
                "Cosine of two tokens",
                to_svg(_cosine_histogram(sample, metrics.mean_cosine), f"{prefix}-cosine"),
                f"Of {len(sample.cosines):,} random pairs of different tokens. The line is the mean over all pairs.",
            ),
            Picture(
                "Singular values",
                to_svg(_spectrum(metrics.singular_values), f"{prefix}-spectrum"),
                "Relative to the largest. A first value far above the others is one direction that dominates.",
            ),
        ]
        if counts is not None:
            figure = _length_and_frequency(metrics.norms, counts, sample.rows)
            caption = f"Tokens that never occur are left out. {shown}"
            pictures.append(Picture("Length and frequency", to_svg(figure, f"{prefix}-frequency"), caption))
    return pictures


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
        axes.axvline(mean, color=MARK, linewidth=2, label=f"mean {mean:.3f}")
        axes.legend(loc="upper left", borderaxespad=0)
    axes.set(xlim=(-1, 1), xticks=(-1, -0.5, 0, 0.5, 1), xlabel="cosine", ylabel="pairs")
    return figure


def _spectrum(singular_values: NDArray[np.float64]) -> Figure:
    """Of the singular values, largest first; zeros have no place on a logarithmic axis."""
    figure, axes = _axes()
    positive = singular_values[singular_values > 0]
    if len(positive):
        axes.plot(np.arange(1, len(positive) + 1), positive / positive[0], color=POINTS, linewidth=2)
        axes.plot([1], [1], marker="o", color=MARK)
        axes.set(xscale="log", yscale="log")
    axes.set(xlabel="number", ylabel="singular value")
    return figure


def _length_and_frequency(norms: NDArray[np.float64], counts: NDArray[np.int64], rows: NDArray[np.int64]) -> Figure:
    """Of the lengths and counts (V,) of the sampled rows (S,)."""
    figure, axes = _axes()
    seen = rows[counts[rows] > 0]
    axes.scatter(counts[seen] / counts.sum(), norms[seen], s=3, color=POINTS, alpha=0.35, linewidths=0, rasterized=True)
    axes.set(xscale="log", ylim=(0, None), xlabel="frequency", ylabel="length")
    return figure


def to_svg(figure: Figure, prefix: str) -> str:
    """The figure as an SVG element whose ids begin with `prefix`."""
    buffer = io.StringIO()
    unnamed = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", transparent=True, dpi=180, metadata=unnamed)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    for stand_in, colour in PAGE_COLOURS.items():
        svg = svg.replace(stand_in, colour)
    return svg
