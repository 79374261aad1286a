"""Files of version 0.1.0 still train, resume and report: see fixtures/written-by-0.1.0/README.md."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.run_files import curve_of
from coupled_adam.study.results import read_results

WRITTEN = Path(__file__).parent / "fixtures" / "written-by-0.1.0"


@pytest.fixture
def old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(WRITTEN, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def _results(study: Path) -> dict[tuple[str, int], dict[str, Any]]:
    results = [json.loads(line) for line in (study / "results.jsonl").read_text().splitlines()]
    return {(result["cell"], result["seed"]): result for result in results}


def _rows(metrics: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def _last(metrics: Path, kind: str) -> dict[str, Any]:
    return _rows(metrics, kind)[-1]


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """The values written by 0.1.0, under today's keys."""
    return {key.removeprefix("output_").replace("isoscore", "iso_score"): value for key, value in values.items()}


def test_an_old_corpus_is_recognised_and_trains(old_files: Path) -> None:
    about = json.loads(_run("data", "info", "data/stories", "--verify", "--json"))
    assert about["verified"] is True
    _run("train", "small.toml", "--out", "runs/new", "--set", "training.tokens=1024", "--set", "log.val_every=8")
    assert _last(old_files / "runs/new/metrics.jsonl", "val")["loss"] < 6


def test_a_stopped_run_resumes_to_the_end_of_the_uninterrupted_run(old_files: Path) -> None:
    _run("train", "runs/stopped", "--resume")
    for kind in ("train", "val", "embeddings"):
        resumed = _last(old_files / "runs/stopped/metrics.jsonl", kind)
        whole = _renamed(_last(old_files / "runs/whole-metrics.jsonl", kind))
        assert resumed["step"] == whole["step"] == 64
        assert resumed.keys() == whole.keys()
        for key in {"loss", "iso", "mu_norm_ratio"} & whole.keys():
            assert resumed[key] == pytest.approx(whole[key], rel=1e-4), key


def test_rows_before_and_after_a_resumption_are_one_curve(old_files: Path) -> None:
    whole = {
        row["step"]: row["output_mu_norm_ratio"] for row in _rows(WRITTEN / "runs/whole-metrics.jsonl", "embeddings")
    }
    assert curve_of(old_files / "runs/stopped", "embeddings", "mu_norm_ratio") == {8: whole[8], 16: whole[16]}
    _run("train", "runs/stopped", "--resume")
    resumed = _rows(old_files / "runs/stopped/metrics.jsonl", "embeddings")
    assert {row["step"]: row["mu_norm_ratio"] for row in resumed} == pytest.approx(whole, rel=1e-4)
    assert list(whole)[:2] == [8, 16]
    assert [row["mu_norm_ratio"] for row in resumed[:2]] == [whole[8], whole[16]]
    assert not any(key.startswith("output_") for row in resumed for key in row)


def test_a_killed_study_finishes_and_reports_its_old_numbers(old_files: Path) -> None:
    _run("study", "run", "small-study.toml", "--out", "studies/small")
    before = _results(WRITTEN / "studies/small")
    now = _results(old_files / "studies/small")
    assert (len(before), len(now)) == (3, 4)
    assert all(now[run]["metrics"] == _renamed(before[run]["metrics"]) for run in before)
    assert all(now[run]["config_hash"] == before[run]["config_hash"] for run in before)
    # main.csv of 0.1.0 was written with all four runs, before the fourth was removed.
    with (
        (WRITTEN / "studies/small/tables/main.csv").open() as old,
        (old_files / "studies/small/tables/main.csv").open() as new,
    ):
        for before, now in zip(csv.DictReader(old), csv.DictReader(new), strict=True):
            for key in (key for key in before if key.endswith(("_mean", "_std"))):
                assert float(now[key]) == pytest.approx(float(before[key]), rel=1e-3), key


def test_report_of_old_results_has_every_metric_and_curve(old_files: Path) -> None:
    pytest.importorskip("matplotlib")
    from coupled_adam.report.page_data import curves_data

    study = old_files / "studies/small"
    results = read_results(study)
    grid = gather_grid(results)
    before = list(_results(WRITTEN / "studies/small").values())
    assert [result.metrics["iso_score"] for result in results] == [each["metrics"]["isoscore"] for each in before]
    (table,) = (table for table in build_tables(grid) if table.name == "runs")
    assert "iso_score" in {column.key for column in table.columns}
    assert {entry["quantity"] for entry in curves_data(grid)} == {
        *(
            "mean-embedding ratio",
            "training loss",
            "validation loss",
            "validation loss minus that of standard Adam",
            "gradient norm",
        ),  # a single ISO value does not make a curve
    }


def test_an_old_run_can_be_inspected(old_files: Path) -> None:
    (model,) = json.loads(_run("inspect", "runs/stopped", "--json"))["models"]
    (measured,) = model["tables"]
    assert 0 < measured["mu_norm_ratio"] < 0.2
