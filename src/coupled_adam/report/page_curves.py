"""The curves of a study as data for the page, where the reader picks a quantity and points at a step."""

from typing import Any

from coupled_adam.report.figures.run_files import is_thinned, mean_curve
from coupled_adam.report.figures.style import looks
from coupled_adam.report.grid import Grid, size_labels

QUANTITIES = (
    ("embeddings", "output_mu_norm_ratio", "mean-embedding ratio"),
    ("embeddings", "output_iso", "ISO"),
    ("embeddings", "input_mu_norm_ratio", "mean-embedding ratio, input table"),
    ("train", "loss", "training loss"),
    ("val", "loss", "validation loss"),
    ("train", "grad_norm", "gradient norm"),
)
MOST_POINTS = 150
DIGITS = 5


def curves_data(grid: Grid) -> list[dict[str, Any]]:
    """One entry for each size and quantity that was logged: {size, quantity, lines: [{name, colour, line, steps, mean,
    low, high}]}."""
    colours = looks(grid.variants)
    labels = size_labels(grid.sizes)
    found = []
    for kind, key, label in QUANTITIES:
        for size in grid.sizes:
            lines = []
            for variant in grid.variants:
                curve = mean_curve(grid.runs_of(size, variant), kind, key, MOST_POINTS)
                if curve is not None:
                    look = colours[variant.name]
                    arrays = {"steps": curve.steps, "mean": curve.mean, "low": curve.low, "high": curve.high}
                    numbers = {name: [float(f"{v:.{DIGITS}g}") for v in array] for name, array in arrays.items()}
                    lines.append({"name": variant.label, "colour": look.colour, "line": look.line, **numbers})
            if lines:
                found.append({"size": labels[size], "quantity": label, "lines": lines})
    return found


def curves_note(grid: Grid) -> str:
    """What to say below the curves; empty where every logged step has a point of its own."""
    if not any(is_thinned(grid.results, kind, MOST_POINTS) for kind in {kind for kind, _, _ in QUANTITIES}):
        return ""
    return f"Curves of more than {MOST_POINTS} points are averaged over neighbouring steps."
