"""The theory of a study's runs, drawn with the functions of `coupled-adam theory`: one run per cell shown.

Runs with missing or damaged files are skipped.
"""

from collections.abc import Mapping

from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import SERIES_COLOURS
from coupled_adam.report.figures.clouds import shown_variants
from coupled_adam.report.grid import Grid, Size, Variant, gather_grid, model_names
from coupled_adam.study.theory_metrics import THEORY_BATCHES
from coupled_adam.theory.record import RunTheory
from coupled_adam.theory.theory_folder import TheoryFolder
from coupled_adam.theory.theory_plots import draw_A, draw_second_moment, draw_update_sums


def draw_constants(grid: Grid) -> Figure | None:
    """Draw A of E[v] = A p over training: for every model with the first optimizer, or for one model with all."""
    grid = _measured(grid)
    names = model_names(grid.sizes)
    shown: dict[str, RunTheory] = {}
    for model, name in names.items():
        largest = max(size for size in grid.sizes if (size.parameters, size.model) == model)
        for variant in grid.variants[: 1 if len(names) > 1 else len(SERIES_COLOURS)]:
            theory = _first(grid, largest, variant)
            if theory is not None:
                shown[name if len(names) > 1 else variant.label] = theory
    return draw_A(shown) if _have_curves(shown) else None


def draw_second_moments(grid: Grid) -> Figure | None:
    """Draw E[v] against the unigram probability at the last checkpoint of the first run that has it."""
    grid = _measured(grid)
    for variant in grid.variants:
        for run in grid.runs_of(grid.largest_size, variant):
            folder = TheoryFolder(run.run_folder)
            try:
                last = folder.read_run().checkpoints[-1]
                counts, second_moment = folder.read_unigram(), folder.read_arrays(last.step).second_moment  # (V,) both
            except (ValueError, IndexError):
                continue
            if counts.ndim == second_moment.ndim == 1 and counts.sum() > 0 and len(counts) <= len(second_moment):
                known = second_moment[: len(counts)]  # rows after these are padding
                return draw_second_moment(counts / counts.sum(), known, last.fits["second_moment"])
    return None


def draw_sums(grid: Grid) -> Figure | None:
    """Draw sums of updates over training, one row of panels per optimizer."""
    grid = _measured(grid)
    found = {
        variant.label: _first(grid, grid.largest_size, variant)
        for variant in (shown_variants(grid) if grid.results else ())
    }
    shown = {label: theory for label, theory in found.items() if theory is not None}
    return draw_update_sums(shown) if _have_curves(shown) else None


def _have_curves(shown: Mapping[str, RunTheory]) -> bool:
    """Whether some run has at least two checkpoints, which a curve needs."""
    return any(len(theory.checkpoints) > 1 for theory in shown.values())


def _measured(grid: Grid) -> Grid:
    """The runs whose theory was measured."""
    return gather_grid([run for run in grid.results if run.metrics.get(THEORY_BATCHES) is not None])


def _first(grid: Grid, size: Size, variant: Variant) -> RunTheory | None:
    """The theory of the first run of a cell, by seed, whose file is readable."""
    for run in grid.runs_of(size, variant):
        try:
            theory = TheoryFolder(run.run_folder).read_run()
        except ValueError:
            continue
        if theory.checkpoints:
            return theory
    return None
