"""Numbers of single runs: readers see one notation, and CSV files keep their form and all digits."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_study import fabricate

from coupled_adam.metrics import METRICS
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.runs_table import runs_table
from coupled_adam.report.table_formats import to_csv, to_markdown_table
from coupled_adam.study.results import read_results
from coupled_adam.training.display import FORMATS

Shown = tuple[dict[str, str], dict[str, str]]


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    """The first run in the table of all runs, by heading in Markdown and by column in the CSV file."""
    run, *_ = read_results(fabricate(tmp_path / "study", with_runs=False))
    metrics = {"loss": 3.88151, "acc": 0.41234, "kappa": 12.3456}
    run = replace(run, metrics=metrics, seconds=80.4, tokens_per_second=541_234.0, energy_joules=331_000.0)
    table = runs_table(gather_grid([run]))
    heading, _, row = [line for line in to_markdown_table(table).splitlines() if line.startswith("|")][:3]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (heading, row)]
    (columns,) = list(csv.DictReader(io.StringIO(to_csv(table))))[:1]
    return dict(zip(*cells, strict=True)), columns


def test_one_run_has_three_decimals_for_losses_and_units_for_costs(
    shown: Shown,
) -> None:
    cells, _ = shown
    assert (cells["loss (↓)"], cells["accuracy (↑)"], cells["κ (↑)"]) == ("3.882", "0.412", "12.35")
    assert (cells["time"], cells["tokens/s"], cells["energy"]) == ("1 min 20 s", "541k", "0.0919 kWh")


def test_csv_files_keep_their_form_and_all_digits(shown: Shown) -> None:
    _, columns = shown
    assert (columns["loss"], columns["loss_value"], columns["kappa"]) == ("3.8815", "3.88151", "12.346")
    assert (columns["seconds"], columns["seconds_value"]) == ("80", "80.4")
    assert (columns["tokens_per_second"], columns["energy_joules"]) == ("541,234", "331,000")


def test_the_training_display_and_the_report_show_the_same_loss() -> None:
    assert FORMATS["loss"][1](3.88151) == f"{METRICS['train_loss'].short} {METRICS['loss'].text(3.88151)}"
    assert METRICS["loss"].text(float("nan")) == "nan"
    assert METRICS["loss"].text(3.88151, 0.0123) == "3.882(12)"
    assert METRICS["loss"].mean_text(3.88151, 0.0123, 3) == "3.88(1)"
