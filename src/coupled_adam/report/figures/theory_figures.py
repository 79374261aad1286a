"""The theory of a study's runs, drawn by the functions of `coupled-adam theory`: one run of each cell that is shown.

A run whose files are missing or damaged is passed over, as if it had not been measured.
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from coupled_adam.inspection.plates import SERIES_COLOURS
from coupled_adam.report.figures.clouds import shown_variants
from coupled_adam.report.report_data import Size, Variant, largest_size, model_names, runs_of, sizes, variants
from coupled_adam.study.results import Result
from coupled_adam.study.theory_metrics import THEORY_BATCHES
from coupled_adam.theory.figures import draw_A, draw_second_moment, draw_update_sums
from coupled_adam.theory.folder import TheoryFolder
from coupled_adam.theory.record import RunTheory


def draw_constants(results: Sequence[Result]) -> Figure | None:
    """A of E[v] = A p over training: of the first optimizer for every model, or of every optimizer for a single one."""
    results = _measured(results)
    names = model_names(sizes(results))
    shown: dict[str, RunTheory] = {}
    for model, name in names.items():
        largest = max(size for size in sizes(results) if (size.parameters, size.model) == model)
        for variant in variants(results)[: 1 if len(names) > 1 else len(SERIES_COLOURS)]:
            theory = _first(results, largest, variant)
            if theory is not None:
                shown[name if len(names) > 1 else variant.label] = theory
    return draw_A(shown) if _have_curves(shown) else None


def draw_second_moments(results: Sequence[Result]) -> Figure | None:
    """E[v] against the unigram probability at the last checkpoint of one run: the first that has it."""
    results = _measured(results)
    for variant in variants(results):
        for run in runs_of(results, largest_size(results), variant):
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


def draw_sums(results: Sequence[Result]) -> Figure | None:
    """Sums of updates over training, a row of panels for each optimizer."""
    results = _measured(results)
    found = {
        variant.label: _first(results, largest_size(results), variant)
        for variant in (shown_variants(results) if results else ())
    }
    shown = {label: theory for label, theory in found.items() if theory is not None}
    return draw_update_sums(shown) if _have_curves(shown) else None


def _have_curves(shown: Mapping[str, RunTheory]) -> bool:
    """Whether a run has two checkpoints: a run that kept only its last has no curve over training."""
    return any(len(theory.checkpoints) > 1 for theory in shown.values())


def _measured(results: Sequence[Result]) -> list[Result]:
    return [run for run in results if run.metrics.get(THEORY_BATCHES) is not None]


def _first(results: Sequence[Result], size: Size, variant: Variant) -> RunTheory | None:
    """The theory of the first run of a cell, in the order of seeds, whose file can be read."""
    for run in runs_of(results, size, variant):
        try:
            theory = TheoryFolder(run.run_folder).read_run()
        except ValueError:
            continue
        if theory.checkpoints:
            return theory
    return None
