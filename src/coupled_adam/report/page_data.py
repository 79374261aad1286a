"""Data of the interactive parts of the page: curves over training, and the embeddings around the origin.

A point of a cloud has three coordinates: along the mean embedding, and along the first two principal components
orthogonal to it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.metrics import LOSSES, METRICS, logged_key
from coupled_adam.report.figures.clouds import cloud_arrays, window
from coupled_adam.report.figures.style import Look, looks
from coupled_adam.report.grid import Grid, Variant, size_labels
from coupled_adam.report.run_files import MeanCurve, is_thinned, mean_curve, mean_difference

# Kinds of rows in metrics.jsonl and their keys.
SHOWN = (
    ("embeddings", "mu_norm_ratio"),
    ("embeddings", "iso"),
    ("embeddings", "input_mu_norm_ratio"),
    ("train", "loss"),
    ("val", "loss"),
    ("train", "grad_norm"),
)
MOST_OF_A_CURVE = 150
DIGITS = 5
MOST_OF_A_CLOUD = 600  # per optimizer; more would make the page large and rotation slow
UNITS = 1000  # coordinates are whole thousandths of the window's half width


def curves_data(grid: Grid) -> list[dict[str, Any]]:
    """One entry per size and quantity.

    {size, quantity, decimals, lines: [{name, colour, line, steps, mean, low, high}]}
    """
    colours = looks(grid.variants)
    labels = size_labels(grid.sizes)
    found = []
    for kind, key in SHOWN:
        for size in grid.sizes:
            runs = {variant: grid.runs_of(size, variant) for variant in grid.variants}
            metric = METRICS[logged_key(kind, key)]
            # Without decimals, the page shows four significant digits, as `Metric.text` does.
            decimals = metric.decimals_of(1) if metric in LOSSES else None
            curves = {variant: mean_curve(own, kind, key, MOST_OF_A_CURVE) for variant, own in runs.items()}
            plots = {metric.label: curves}
            first = grid.variants[0]
            if metric is METRICS["val_loss"]:
                plots[f"{metric.label} minus that of {first.label}"] = {
                    variant: mean_difference(runs[first], own, kind, key, MOST_OF_A_CURVE)
                    for variant, own in runs.items()
                    if variant != first
                }
            for quantity, curves in plots.items():
                lines = [_line(variant, colours[variant.name], curve) for variant, curve in curves.items() if curve]
                if lines:
                    found.append({"size": labels[size], "quantity": quantity, "decimals": decimals, "lines": lines})
    return found


def _line(variant: Variant, look: Look, curve: MeanCurve) -> dict[str, Any]:
    arrays = {"steps": curve.steps, "mean": curve.mean, "low": curve.low, "high": curve.high}
    numbers = {name: [float(f"{v:.{DIGITS}g}") for v in array] for name, array in arrays.items()}
    return {"name": variant.label, "colour": look.colour, "line": look.line, **numbers}


def curves_note(grid: Grid) -> str:
    """Note below the curves; empty if every logged step has its own point."""
    if not any(is_thinned(grid.results, kind, MOST_OF_A_CURVE) for kind in {kind for kind, _ in SHOWN}):
        return ""
    return f"Curves of more than {MOST_OF_A_CURVE} points are averaged over neighbouring steps."


def clouds_data(grid: Grid) -> dict[str, Any] | None:
    """All clouds and their common window; None if no run has a cloud.

    {units, window: [left, bottom, right, top], clouds: [{name, colour, before, after, mean}]}; before and
    after hold x, y, z of the tokens, in the same order.
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
        chosen = slice(None, count, max(1, -(-count // MOST_OF_A_CLOUD)))
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
