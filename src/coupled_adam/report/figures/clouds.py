"""The main picture: the embeddings around the origin before and after training, optimizers side by side."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from coupled_adam.base.captioned_figure import FAINT, INK, WIDTH, legend_above, panels
from coupled_adam.report.figures.style import looks, two_lines
from coupled_adam.report.grid import Grid, Variant, gather_grid, size_of
from coupled_adam.report.run_files import embedding_arrays
from coupled_adam.study.results import Result

Arrays = Mapping[str, NDArray[np.float32]]
MOST_BESIDE = 4
PARTS = ("cloud_initial", "cloud_final", "mean_final")


def draw_clouds(grid: Grid, table: str = "") -> Figure | None:
    """Draw some embeddings of one run per optimizer at the largest size, all at the same scale.

    Args:
        grid: of the finished runs.
        table: "" for the output table (or the table of a tied model), "input_" for the input table of an untied model.
    """
    found = cloud_arrays(grid, table)
    if not found:
        return None
    low, high = window([arrays[table + part] for arrays in found.values() for part in PARTS[:2]])
    titles = {variant: variant.label if len(found) < 3 else two_lines(variant.label) for variant in found}
    height = 0.75 + 0.2 * any("\n" in title for title in titles.values())
    height += (WIDTH - 0.8) / max(len(found), 2) * float((high - low)[1] / (high - low)[0])
    figure, rows = panels(1, len(found), height, share_y=True)
    colours = looks(grid.variants)
    for axes, (variant, arrays) in zip(rows[0], found.items(), strict=True):
        _draw_cloud(axes, arrays, table, colours[variant.name].colour)
        axes.set_title(titles[variant])
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
        axes.locator_params(nbins=5 if len(found) < 3 else 3)
    rows[0][0].set_ylabel("across it")
    figure.supxlabel("along the mean embedding", fontsize=10)
    legend_above(figure, rows[0][:1])
    return figure


def cloud_arrays(grid: Grid, table: str = "") -> dict[Variant, Arrays]:
    """The arrays of one run of each optimizer shown, if a run has them."""
    found = {}
    for variant in shown_variants(grid):
        arrays = _first_arrays(grid.runs_of(grid.largest_size, variant), table)
        if arrays is not None:
            found[variant] = arrays
    return found


def shown_variants(grid: Grid) -> list[Variant]:
    """The optimizers of the largest size, if they fit side by side; otherwise the main pair of the study, or without
    such a pair the first, the middle and the last."""
    largest = grid.largest_size
    shown = gather_grid([run for run in grid.results if size_of(run) == largest])
    all_variants = shown.variants
    if len(all_variants) <= MOST_BESIDE:
        return all_variants
    pair = shown.main_pair
    if pair is not None:
        return list(pair)
    places = {0, len(all_variants) // 2, len(all_variants) - 1}
    return [all_variants[place] for place in sorted(places)]


def _first_arrays(runs: Sequence[Result], table: str) -> Arrays | None:
    """Arrays of the first run that has them, in the order of seeds."""
    for run in runs:
        arrays = embedding_arrays(run)
        places = [arrays.get(table + part) for part in PARTS]
        if all(place is not None and place.size and place.shape[-1] == 3 for place in places):
            return arrays
    return None


def _draw_cloud(axes: Axes, arrays: Arrays, table: str, colour: str) -> None:
    before, after, mean = (arrays[table + part] for part in PARTS)  # (S, 3), (S, 3), (3,)
    axes.scatter(after[:, 0], after[:, 1], s=6, color=colour, alpha=0.5, linewidths=0, rasterized=True)
    axes.scatter(before[:, 0], before[:, 1], s=6, color=FAINT, alpha=0.5, linewidths=0, rasterized=True)
    axes.scatter([], [], s=30, color=FAINT, label="before training")
    for (x, y), marker, size, label in (((0.0, 0.0), "+", 14, "origin"), (mean[:2], "x", 8, "mean")):
        axes.plot([x], [y], marker, color=INK, markersize=size, markeredgewidth=2, label=label)


def window(clouds: Sequence[NDArray[np.float32]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Corners (2,) of a nearly square window that contains the origin and almost every point."""
    points = np.concatenate([cloud[:, :2] for cloud in clouds]).astype(np.float64)
    low = np.minimum(np.quantile(points, 0.002, axis=0), 0.0)
    high = np.maximum(np.quantile(points, 0.998, axis=0), 0.0)
    half = np.maximum(0.55 * (high - low), 1e-6)
    half = np.maximum(half, 0.8 * half.max())
    middle = (low + high) / 2
    return middle - half, middle + half
