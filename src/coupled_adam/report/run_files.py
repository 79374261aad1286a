"""Files of run folders that a report reads: curves from metrics.jsonl and arrays from embeddings.npz.

Without a missing or damaged file, the report lacks only a figure. Letters: P points of a curve, S seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coupled_adam.base.files import require_regular_file
from coupled_adam.study.results import EMBEDDINGS_FILE, Result
from coupled_adam.training.logbook import METRICS_FILE, read_metrics

MOST_POINTS = 400  # per curve; more would be invisible and make the page large

LEFT_OUT = 0.2  # share of the training at its start that `mean_difference` leaves out

Floats = NDArray[np.float64]
Curve = dict[int, float]
"""Values by step."""


@dataclass(frozen=True)
class MeanCurve:
    """The mean over seeds, and the band from the lowest to the highest seed."""

    steps: Floats  # (P,)
    mean: Floats  # (P,)
    low: Floats  # (P,)
    high: Floats  # (P,)


def curve_of(run_folder: Path, kind: str, key: str) -> Curve:
    """Read one logged number of a run.

    Args:
        run_folder: written by training.
        kind: of the rows: train, val or embeddings.
        key: of the number.
    """
    return _read_curves(run_folder).get((kind, key), {})


def curves_of(run_folder: Path, kind: str) -> list[Curve]:
    """Read all numbers that a run logged in rows of one kind."""
    return [curve for (other, _), curve in _read_curves(run_folder).items() if other == kind]


def _read_curves(run_folder: Path) -> dict[tuple[str, str], Curve]:
    path = run_folder / METRICS_FILE
    try:
        return _curves(path, path.stat().st_mtime_ns)
    except (OSError, ValueError):
        return {}


@lru_cache(maxsize=512)
def _curves(path: Path, changed: int) -> dict[tuple[str, str], Curve]:
    """Read all curves of a run at once: figures need several, and the file of a long run is slow to read."""
    curves: dict[tuple[str, str], Curve] = {}
    for row in read_metrics(path):
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float) and math.isfinite(value):
                curves.setdefault((row["kind"], key), {})[row["step"]] = value
    return curves


def mean_curve(runs: Sequence[Result], kind: str, key: str, most: int = MOST_POINTS) -> MeanCurve | None:
    """Average one logged number over the runs of one cell.

    Args:
        runs: differ only in the seed.
        kind: of the rows in metrics.jsonl: train, val or embeddings.
        key: of the number.
        most: largest number of points.

    Returns:
        The curve; None if no run has two values, or if the runs do not have two steps in common.
    """
    return _mean_of([curve for run in runs if len(curve := curve_of(run.run_folder, kind, key)) > 1], most)


def mean_difference(
    first: Sequence[Result], second: Sequence[Result], kind: str, key: str, most: int = MOST_POINTS
) -> MeanCurve | None:
    """Average the difference of one logged number between runs with the same seed, second minus first.

    The first fifth of the training is left out: differences are largest there and would hide those that remain.

    Returns:
        The curve; None if no two runs with the same seed have two steps in common.
    """
    by_seed = {run.seed: curve_of(run.run_folder, kind, key) for run in first}
    differences = []
    for run in second:
        own, other = curve_of(run.run_folder, kind, key), by_seed.get(run.seed, {})
        begin = max(own, default=0) * LEFT_OUT
        differences.append({step: own[step] - other[step] for step in own.keys() & other.keys() if step >= begin})
    return _mean_of([curve for curve in differences if len(curve) > 1], most)


def _mean_of(curves: Sequence[Curve], most: int) -> MeanCurve | None:
    """The mean over curves at their common steps; None without two of them."""
    if not curves:
        return None
    steps = np.array(sorted(set.intersection(*(set(curve) for curve in curves))), np.float64)
    if len(steps) < 2:
        return None
    values = np.array([[curve[step] for step in steps] for curve in curves])  # (S, P)
    steps, values = _thinned(steps, most), _thinned(values, most)
    return MeanCurve(steps, values.mean(0), values.min(0), values.max(0))


def is_thinned(results: Sequence[Result], kind: str, most: int = MOST_POINTS) -> bool:
    """Whether a run has more rows of a kind than a curve has points, so that neighbours are averaged."""
    return any(len(curve) > most for run in results for curve in curves_of(run.run_folder, kind))


def embedding_arrays(run: Result) -> Mapping[str, NDArray[np.float32]]:
    """The arrays of embeddings.npz; empty if the file is missing or unreadable."""
    try:
        require_regular_file(run.run_folder / EMBEDDINGS_FILE)
        with np.load(run.run_folder / EMBEDDINGS_FILE, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except Exception:  # numpy and zipfile raise many kinds of errors on damaged files
        return {}
    return {name: array for name, array in arrays.items() if array.dtype.kind in "fiu" and np.isfinite(array).all()}


def _thinned(values: Floats, most: int) -> Floats:
    """Average neighbours of (..., P) until P is at most `most`; the last point may average fewer."""
    together = -(-values.shape[-1] // most)
    starts = np.arange(0, values.shape[-1], together)
    counts = np.diff(np.append(starts, values.shape[-1]))
    return np.asarray(np.add.reduceat(values, starts, axis=-1) / counts)
