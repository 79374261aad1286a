"""The caption of loss against embedding quality names the measures that the figure shows, and no others."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from fabricated_study import COUPLED, STANDARD, fabricate

from coupled_adam.report.figures import figure_list
from coupled_adam.report.grid import gather_grid
from coupled_adam.study.results import read_results

OPTIMIZERS = {"standard": STANDARD, "coupled": COUPLED, "partial": {**COUPLED, "row_exponent": 0.25}}


def test_the_caption_does_not_name_a_measure_that_no_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [ranking] = [entry for entry in figure_list.ENTRIES if entry.name == "ranking"]
    monkeypatch.setattr(figure_list, "ENTRIES", (ranking,))  # the other figures take time
    folder = fabricate(tmp_path / "study", optimizers=OPTIMIZERS, metrics=("loss", "iso"), with_runs=False)
    [drawn] = figure_list.draw_figures(gather_grid(read_results(folder)))
    assert "ISO" in drawn.caption
    assert "r_cos" not in drawn.caption
