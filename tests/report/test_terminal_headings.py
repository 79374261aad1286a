"""Headings of the results in the terminal say what their numbers count."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from fabricated_study import fabricate

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.table_formats import to_rich_comparison
from coupled_adam.study.results import read_results


def test_optimizers_with_different_numbers_of_seeds_show_them_by_name(tmp_path: Path) -> None:
    results = read_results(fabricate(tmp_path / "study", seeds=(1, 2), with_runs=False))
    fewer = [each for each in results if (each.optimizer, each.seed) != ("coupled", 2)]
    headings = [column.header for column in to_rich_comparison(build_tables(gather_grid(fewer))[0]).columns[1:]]
    assert headings == ["standard\nseeds: 2", "coupled\nseeds: 1 of 2"]
