"""What runs logged in metrics.jsonl, as curves: numbers by step. A file that is missing or damaged has none."""

import math
from functools import lru_cache
from pathlib import Path

from coupled_adam.training.logbook import FILE_NAME, read_metrics

Curve = dict[int, float]
"""The values of one number by step."""


def curve_of(run_folder: Path, kind: str, key: str) -> Curve:
    """One logged number of a run.

    Args:
        run_folder: as training writes it.
        kind: of the rows: train, val or embeddings.
        key: of the number.
    """
    return _read_curves(run_folder).get((kind, key), {})


def curves_of(run_folder: Path, kind: str) -> list[Curve]:
    """All that a run logged in rows of one kind."""
    return [curve for (other, _), curve in _read_curves(run_folder).items() if other == kind]


def _read_curves(run_folder: Path) -> dict[tuple[str, str], Curve]:
    path = run_folder / FILE_NAME
    try:
        return _curves(path, path.stat().st_mtime_ns)
    except (OSError, ValueError):
        return {}


@lru_cache(maxsize=512)
def _curves(path: Path, changed: int) -> dict[tuple[str, str], Curve]:
    """All curves of a run: every figure asks for another one, and the file of a long run is slow to read."""
    curves: dict[tuple[str, str], Curve] = {}
    for row in read_metrics(path):
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float) and math.isfinite(value):
                curves.setdefault((row["kind"], key), {})[row["step"]] = value
    return curves
