"""Two more pictures of the trained tables: the length of an embedding over its frequency, and the singular values."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from coupled_adam.base.captioned_figure import legend_above, panels
from coupled_adam.base.text import setting
from coupled_adam.report.figures.clouds import shown_variants
from coupled_adam.report.figures.style import looks, size_panels, two_lines
from coupled_adam.report.grid import Grid
from coupled_adam.report.run_files import embedding_arrays
from coupled_adam.study.results import Result


def draw_norm_and_frequency(grid: Grid, table: str = "") -> Figure | None:
    """Draw the length of embeddings against the logarithm of their frequency, for one run per optimizer.

    Args:
        grid: of the finished runs.
        table: "" or "input_", as for the clouds.
    """
    found = {}
    for variant in shown_variants(grid):
        for run in grid.runs_of(grid.largest_size, variant):
            arrays = embedding_arrays(run)
            frequency, norm = arrays.get(f"{table}log10_frequency"), arrays.get(f"{table}norm")  # (n,) each
            if frequency is not None and norm is not None and frequency.shape == norm.shape and norm.size:
                found[variant] = (frequency, norm)
                break
    if not found:
        return None
    figure, rows = panels(1, len(found), 2.8, share_y=True)
    colours = looks(grid.variants)
    for axes, (variant, (frequency, norm)) in zip(rows[0], found.items(), strict=True):
        axes.scatter(frequency, norm, s=4, color=colours[variant.name].colour, alpha=0.4, linewidths=0, rasterized=True)
        axes.set_title(variant.label if len(found) < 3 else two_lines(variant.label))
    rows[0][0].set(ylabel="length of the embedding", ylim=(0, None))
    figure.supxlabel("log10 of the frequency in the training text", fontsize=10)
    return figure


def draw_spectra(grid: Grid, table: str = "") -> Figure | None:
    """Draw singular values relative to the largest: the mean over seeds and their range, one panel per size.

    Args:
        grid: of the finished runs.
        table: "" or "input_", as for the clouds.
    """
    found = {
        (size, variant): spectra
        for size in grid.sizes
        for variant in grid.variants
        if (spectra := _spectra(grid.runs_of(size, variant), table)) is not None
    }
    if not found:
        return None
    shown = sorted({size for size, _ in found})
    figure, places = size_panels(shown, "number of the singular value", "relative to the largest")
    colours = looks(grid.variants)
    for (size, variant), spectra in found.items():
        axes, look = places[size], colours[variant.name]
        number = np.arange(1, spectra.shape[1] + 1)
        axes.plot(number, spectra.mean(0), color=look.colour, linestyle=look.line, label=variant.label)
        axes.fill_between(number, spectra.min(0), spectra.max(0), color=look.colour, alpha=0.2, linewidth=0)
    for axes in places.values():
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_formatter(lambda value, _: setting(value))
        axes.yaxis.set_major_formatter(lambda value, _: setting(value))
        axes.minorticks_off()
    legend_above(figure, places.values())
    return figure


def _spectra(runs: Sequence[Result], table: str) -> NDArray[np.float64] | None:
    """(S, H) singular values of a cell's runs, descending, relative to the largest; None if no run has two values."""
    spectra = []
    for run in runs:
        values = embedding_arrays(run).get(f"{table}singular_values", np.zeros(0))
        positive = np.sort(values[values > 0].astype(np.float64))[::-1]  # a logarithmic axis cannot show zeros
        if len(positive) > 1:
            spectra.append(positive / positive[0])
    if not spectra:
        return None
    shortest = min(len(spectrum) for spectrum in spectra)
    return np.stack([spectrum[:shortest] for spectrum in spectra])
