"""What version 0.1.0 wrote still trains, resumes and reports: see fixtures/written-by-0.1.0/README.md."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coupled_adam.cli import app

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


def _last(metrics: Path, kind: str) -> dict[str, Any]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind][-1]


def test_corpus_is_known_and_trains(old_files: Path) -> None:
    about = json.loads(_run("data", "info", "data/stories", "--verify", "--json"))
    assert about["verified"] is True
    _run("train", "small.toml", "--out", "runs/new", "--set", "training.tokens=1024", "--set", "log.val_every=8")
    assert _last(old_files / "runs/new/metrics.jsonl", "val")["loss"] < 6


def test_stopped_run_resumes_to_the_end_of_the_run_that_was_not_stopped(old_files: Path) -> None:
    _run("train", "runs/stopped", "--resume")
    for kind in ("train", "val", "embeddings"):
        resumed = _last(old_files / "runs/stopped/metrics.jsonl", kind)
        whole = _last(old_files / "runs/whole-metrics.jsonl", kind)
        assert resumed["step"] == whole["step"] == 64
        for key in {"loss", "output_iso", "output_mu_norm_ratio"} & whole.keys():
            assert resumed[key] == pytest.approx(whole[key], rel=1e-4), key


def test_killed_study_finishes_and_reports_the_numbers_it_had(old_files: Path) -> None:
    _run("study", "run", "small-study.toml", "--out", "studies/small")
    before = _results(WRITTEN / "studies/small")
    now = _results(old_files / "studies/small")
    assert (len(before), len(now)) == (3, 4)
    assert all(now[run]["metrics"] == before[run]["metrics"] for run in before)
    assert all(now[run]["config_hash"] == before[run]["config_hash"] for run in before)
    # main.csv of 0.1.0 was written before the fourth run was taken away: all four were there.
    with (
        (WRITTEN / "studies/small/tables/main.csv").open() as old,
        (old_files / "studies/small/tables/main.csv").open() as new,
    ):
        for before, now in zip(csv.DictReader(old), csv.DictReader(new), strict=True):
            for key in (key for key in before if key.endswith(("_mean", "_std"))):
                assert float(now[key]) == pytest.approx(float(before[key]), rel=1e-3), key


def test_old_run_is_inspected(old_files: Path) -> None:
    (model,) = json.loads(_run("inspect", "runs/stopped", "--json"))["models"]
    (measured,) = model["tables"]
    assert 0 < measured["mu_norm_ratio"] < 0.2
