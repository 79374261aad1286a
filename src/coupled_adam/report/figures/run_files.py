"""What the figures read from run folders: mean curves over seeds, and arrays from embeddings.npz.

A file that is missing or damaged costs its figure, never the report. Letters: P points of a curve, S seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coupled_adam.base.files import require_regular_file
from coupled_adam.report.curves import curve_of, curves_of
from coupled_adam.study.results import Result

EMBEDDINGS = "embeddings.npz"
MOST_POINTS = 400  # of a curve; more could not be seen, and would make the page large

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MeanCurve:
    """The mean over seeds, and the band from the lowest to the highest of them."""

    steps: Floats  # (P,)
    mean: Floats  # (P,)
    low: Floats  # (P,)
    high: Floats  # (P,)


def mean_curve(runs: Sequence[Result], kind: str, key: str, most: int = MOST_POINTS) -> MeanCurve | None:
    """One logged number over training, of the runs of one cell.

    Args:
        runs: differ in the seed alone.
        kind: of the rows in metrics.jsonl: train, val or embeddings.
        key: of the number.
        most: points of the curve.

    Returns:
        None when no run has at least two values, or when the runs have no two steps in common.
    """
    curves = [curve for run in runs if len(curve := curve_of(run.run_folder, kind, key)) > 1]
    if not curves:
        return None
    steps = np.array(sorted(set.intersection(*(set(curve) for curve in curves))), np.float64)
    if len(steps) < 2:
        return None
    values = np.array([[curve[step] for step in steps] for curve in curves])  # (S, P)
    steps, values = _thinned(steps, most), _thinned(values, most)
    return MeanCurve(steps, values.mean(0), values.min(0), values.max(0))


def is_thinned(results: Sequence[Result], kind: str, most: int = MOST_POINTS) -> bool:
    """Whether a run has more rows of a kind than a curve shows points, so that neighbours are averaged."""
    return any(len(curve) > most for run in results for curve in curves_of(run.run_folder, kind))


def embedding_arrays(run: Result) -> Mapping[str, NDArray[np.float32]]:
    """The arrays of embeddings.npz; empty when there is no such file or it cannot be read."""
    try:
        require_regular_file(run.run_folder / EMBEDDINGS)
        with np.load(run.run_folder / EMBEDDINGS, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except Exception:  # whatever numpy and zipfile stumble over in bytes that are no arrays
        return {}
    return {name: array for name, array in arrays.items() if array.dtype.kind in "fiu" and np.isfinite(array).all()}


def _thinned(values: Floats, most: int) -> Floats:
    """(..., P) with as many neighbours averaged as it takes for P to be at most `most`; the last may be fewer."""
    together = -(-values.shape[-1] // most)
    starts = np.arange(0, values.shape[-1], together)
    counts = np.diff(np.append(starts, values.shape[-1]))
    return np.asarray(np.add.reduceat(values, starts, axis=-1) / counts)
