"""Selected settings in a report: in its first lines, and in notes that stand alone, because `study report` prints them
without their table."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from fabricated_study import fabricate

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.ranking import selection_table
from coupled_adam.report.report_page import what_was_compared
from coupled_adam.study.results import read_results
from coupled_adam.study.trials import Trial

KEY = "optimizer.tables.lr_factor"


def test_a_winner_at_the_edge_is_named_with_its_setting_and_the_length_of_the_reported_runs(tmp_path: Path) -> None:
    results = read_results(fabricate(tmp_path / "study", seeds=(1,), with_runs=False))
    reported = [replace(each, trial=Trial(KEY, 9.0, False, each.cell, "upper", 2)) for each in results]
    shorter = [
        replace(
            each, seed=0, tokens=each.tokens // 2, metrics={"val_loss": 3.0}, trial=Trial(KEY, value, True, each.cell)
        )
        for each in results
        for value in (3.0, 9.0)
    ]
    table = selection_table(shorter, reported)
    assert table is not None
    [of_coupled] = [note for note in table.notes if "coupled (307k, " in note]
    assert f"{KEY} = 9" in of_coupled
    assert "fewer tokens" in table.notes[-1]
    as_long = [replace(each, tokens=results[0].tokens) for each in shorter]
    table = selection_table(as_long, reported)
    assert table is not None
    assert not any("fewer tokens" in note for note in table.notes)


def test_the_first_lines_of_the_page_name_a_selected_setting(tmp_path: Path) -> None:
    results = read_results(fabricate(tmp_path / "study", seeds=(1,), with_runs=False))
    assert not any("selected" in phrase for phrase in what_was_compared(gather_grid(results)))
    reported = [replace(each, trial=Trial(KEY, 9.0, False, each.cell, "upper", 2)) for each in results]
    assert KEY in what_was_compared(gather_grid(reported))[-1]
