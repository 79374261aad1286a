"""Loss and calibration by token frequency in a report: the table, the figure, and results without them."""

import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated_study import COUPLED, STANDARD, fabricate, scaled
from scipy import stats

from coupled_adam.base.notation import MISSING
from coupled_adam.report.contents import read_report
from coupled_adam.report.grid import Grid, gather_grid
from coupled_adam.report.report_writer import write_report
from coupled_adam.report.result_tables import build_tables, write_tables
from coupled_adam.study.results import Result, merge_results, read_results

NAME = "loss_by_frequency"
EMPTY = 4
SIZES = (("30M", 30_000_000, 82_000_000), ("30M", 30_000_000, 262_000_000))


def with_bins(folder: Path, measured: tuple[str, ...] | None = None) -> Path:
    """Add made-up numbers of every bin to the results of a study, including a bin without tokens.

    Args:
        folder: of the study.
        measured: the optimizers whose runs get them; None for all.
    """
    generator = np.random.default_rng(5)
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for row in rows:
        is_coupled = row["settings"]["embeddings"] == "coupled"
        for number in range(1, 11):
            is_there = number != EMPTY
            # Coupled Adam gains in the frequent bins and loses in the rare ones.
            loss = 2 + 0.5 * number + (0.03 * (number - 5) if is_coupled else 0) + 0.002 * generator.standard_normal()
            values = {
                "loss": loss if is_there else None,
                "calibration": -0.01 * number * (1 + is_coupled) + 0.001 * row["seed"] if is_there else None,
                "tokens": 100.0 * number if is_there else 0.0,
                "targets": 4096.0 / 2**number if is_there else 0.0,
            }
            if measured is None or row["optimizer"] in measured:
                row["metrics"] |= {f"frequency_{key}_{number}": value for key, value in values.items()}
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def study(folder: Path, measured: tuple[str, ...] | None = None, **settings: Any) -> Path:
    return with_bins(fabricate(folder, **settings), measured)


def grid_of(folder: Path) -> Grid:
    return gather_grid(read_results(folder))


def table_rows(folder: Path) -> list[dict[str, str]]:
    """The table as in its CSV file."""
    write_tables(build_tables(grid_of(folder)), folder / "tables")
    with (folder / "tables" / f"{NAME}.csv").open() as file:
        return list(csv.DictReader(file))


def values_of(folder: Path, optimizer: str, key: str) -> list[float]:
    """The values of all seeds, in the order of the file."""
    return [run.metrics[key] or math.nan for run in read_results(folder) if run.optimizer == optimizer]


def test_table_has_the_mean_of_every_bin_and_the_difference_from_the_first_optimizer(tmp_path: Path) -> None:
    folder = study(tmp_path / "study")
    rows = table_rows(folder)
    numbers = [number for number in range(1, 11) if number != EMPTY]
    expected = [(str(number), name) for number in numbers for name in ("standard", "coupled")]
    assert [(row["bin"], row["optimizer"]) for row in rows] == expected
    for row in rows:
        number = int(row["bin"])
        for key in ("loss", "calibration"):
            values = values_of(folder, row["optimizer"], f"frequency_{key}_{number}")
            assert float(row[f"frequency_{key}_mean"]) == pytest.approx(np.mean(values), rel=1e-12)
            assert float(row[f"frequency_{key}_std"]) == pytest.approx(np.std(values, ddof=1), rel=1e-9)
            assert row[f"frequency_{key}_seeds"] == "3"
        assert float(row["frequency_tokens_value"]) == 100 * number
        assert float(row["frequency_targets_value"]) == 4096 / 2**number
        if row["optimizer"] == "standard":
            assert (row["difference_value"], row["difference"], row["verdict"]) == ("", MISSING, MISSING)
            continue
        first, second = (values_of(folder, name, f"frequency_loss_{number}") for name in ("standard", "coupled"))
        difference = statistics.fmean(second) - statistics.fmean(first)
        spread = math.hypot(statistics.stdev(first), statistics.stdev(second))
        threshold = stats.t.ppf(0.95, 2) * spread / math.sqrt(3)
        assert float(row["difference_value"]) == pytest.approx(difference, rel=1e-9)
        assert float(row["difference_std"]) == pytest.approx(spread, rel=1e-9)
        assert float(row["difference_threshold"]) == pytest.approx(threshold, rel=1e-6)
        outcome = "better" if difference < -threshold else "worse" if difference > threshold else "not significant"
        assert row["verdict"] == outcome
    verdicts = {row["bin"]: row["verdict"] for row in rows if row["optimizer"] == "coupled"}
    assert (verdicts["1"], verdicts["10"]) == ("better", "worse")


def test_one_seed_makes_no_claim(tmp_path: Path) -> None:
    rows = table_rows(study(tmp_path / "study", seeds=(1,)))
    assert {row["verdict"] for row in rows if row["optimizer"] == "coupled"} == {"no claim"}
    assert all(row["difference_value"] for row in rows if row["optimizer"] == "coupled")


def test_results_without_bins_have_neither_table_nor_figure_and_are_otherwise_unchanged(tmp_path: Path) -> None:
    figure_list = pytest.importorskip("coupled_adam.report.figures.figure_list")
    plain, binned = fabricate(tmp_path / "plain"), study(tmp_path / "binned")
    tables = {table.name: table for table in build_tables(grid_of(plain))}
    assert NAME not in tables
    assert NAME not in {figure.name for figure in figure_list.draw_figures(grid_of(plain))}
    others = {table.name: table for table in build_tables(grid_of(binned)) if table.name != NAME}
    assert others.keys() == tables.keys()
    assert all(others[name].rows == tables[name].rows for name in tables)


def test_metrics_of_bins_are_not_mistaken_for_tasks(tmp_path: Path) -> None:
    contents = read_report([study(tmp_path / "study")])
    assert "downstream" not in {table.name for table in contents.tables}


def test_optimizers_without_bins_are_left_out(tmp_path: Path) -> None:
    figures = pytest.importorskip("coupled_adam.report.figures.frequency_figures")
    optimizers = {"standard": STANDARD, "coupled": COUPLED, "coupled n=2": scaled(2)}
    folder = study(tmp_path / "study", ("coupled", "coupled n=2"), optimizers=optimizers)
    rows = table_rows(folder)
    assert {row["optimizer"] for row in rows} == {"coupled", "coupled n=2"}
    assert {row["verdict"] for row in rows if row["optimizer"] == "coupled"} == {MISSING}
    assert [cell.variant.name for cell in figures.shown_cells(grid_of(folder))] == ["coupled", "coupled n=2"]


def drawn(folder: Path) -> Any:
    figure_list = pytest.importorskip("coupled_adam.report.figures.figure_list")
    (found,) = (figure for figure in figure_list.draw_figures(grid_of(folder)) if figure.name == NAME)
    return found


def test_figure_shows_differences_and_calibration_of_every_bin_with_targets(tmp_path: Path) -> None:
    folder = study(tmp_path / "study")
    upper, lower = drawn(folder).figure.axes
    points = {
        round(float(line.get_xdata()[0])): float(line.get_ydata()[0])
        for line in upper.lines
        if len(line.get_xdata()) == 1 and line.get_marker() == "o"
    }
    numbers = [number for number in range(1, 11) if number != EMPTY]
    assert sorted(points) == numbers
    for number, shown in points.items():
        first, second = (values_of(folder, name, f"frequency_loss_{number}") for name in ("standard", "coupled"))
        assert shown == pytest.approx(np.mean(second) - np.mean(first))
    lines = {line.get_label(): line for line in lower.lines if line.get_marker() == "."}
    assert lines.keys() == {"standard Adam", "Coupled Adam"}
    for label, optimizer in (("standard Adam", "standard"), ("Coupled Adam", "coupled")):
        assert lines[label].get_xdata().tolist() == numbers
        means = [np.mean(values_of(folder, optimizer, f"frequency_calibration_{number}")) for number in numbers]
        assert lines[label].get_ydata() == pytest.approx(means)


def test_figure_of_one_optimizer_shows_only_its_calibration(tmp_path: Path) -> None:
    figure = drawn(study(tmp_path / "study", optimizers={"coupled": COUPLED})).figure
    assert len(figure.axes) == 1


def test_figure_of_several_sizes_shows_and_names_the_largest(tmp_path: Path) -> None:
    figures = pytest.importorskip("coupled_adam.report.figures.frequency_figures")
    folder = study(tmp_path / "study", sizes=SIZES)
    assert {cell.size.tokens for cell in figures.shown_cells(grid_of(folder))} == {262_000_000}
    assert "D = 262M" in drawn(folder).caption
    assert len(table_rows(folder)) == 2 * 2 * 9


def test_report_writes_table_and_figure_in_every_format(tmp_path: Path) -> None:
    folder = study(tmp_path / "study")
    page = write_report([folder], folder).read_text()
    assert f'id="table-{NAME}"' in page
    assert f'id="figure-{NAME}"' in page
    for suffix in (".csv", ".md", ".tex"):
        assert (folder / "tables" / f"{NAME}{suffix}").stat().st_size > 500
    for suffix in (".svg", ".pdf"):
        assert (folder / "figures" / f"{NAME}{suffix}").stat().st_size > 1000
    svg = page[page.index(f'id="figure-{NAME}"') :].partition("</figure>")[0]
    assert "currentColor" in svg
    assert "var(--line)" in svg


def test_bins_from_one_folder_complete_the_results_of_another(tmp_path: Path) -> None:
    plain, binned = fabricate(tmp_path / "plain", with_runs=False), study(tmp_path / "binned", with_runs=False)
    merged: list[Result] = merge_results([plain, binned])
    assert [run.metrics for run in merged] == [run.metrics for run in read_results(binned)]
