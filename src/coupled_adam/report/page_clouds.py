"""The embeddings around the origin as data for the page, where the reader turns them: the points of the main picture.

A point has three coordinates: along the mean embedding, and along the first two principal components across it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.report.figures.clouds import cloud_arrays, window
from coupled_adam.report.figures.style import looks
from coupled_adam.report.grid import Grid

MOST_POINTS = 600  # of each optimizer; more would make the page large and turning slow
UNITS = 1000  # coordinates are whole thousandths of the window's half width


def clouds_data(grid: Grid) -> dict[str, Any] | None:
    """Every cloud with the window they share, or None where no run has one.

    {units, window: [left, bottom, right, top], clouds: [{name, colour, before, after, mean}]}; before and
    after hold x, y, z of one token after the other, in the same order.
    """
    found = cloud_arrays(grid)
    if not found:
        return None
    low, high = window([arrays[part] for arrays in found.values() for part in ("cloud_initial", "cloud_final")])
    scale = UNITS / float((high - low).max() / 2)
    colours = looks(grid.variants)

    def whole(points: NDArray[np.float32]) -> list[int]:
        return [int(value) for value in np.rint(np.asarray(points, np.float64) * scale).ravel()]

    clouds = []
    for variant, arrays in found.items():
        count = min(len(arrays["cloud_initial"]), len(arrays["cloud_final"]))
        chosen = slice(None, count, max(1, -(-count // MOST_POINTS)))
        clouds.append(
            {
                "name": variant.label,
                "colour": colours[variant.name].colour,
                "before": whole(arrays["cloud_initial"][chosen]),
                "after": whole(arrays["cloud_final"][chosen]),
                "mean": whole(arrays["mean_final"]),
            }
        )
    return {"units": UNITS, "window": [round(float(v) * scale) for v in (*low, *high)], "clouds": clouds}
