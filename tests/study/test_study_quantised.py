"""The loss with rounded tables in a study: measured on request, also later, and never by training again."""

import csv
from pathlib import Path

import pytest
from study_evaluations import by_label, do
from study_runs import ADAMW, COUPLED, write_study

from coupled_adam.metrics import QUANTISED_LOSSES
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.result_tables import build_tables, write_tables
from coupled_adam.study import cell, measurement
from coupled_adam.study.results import read_results

ASKING = "evaluation.quantised_loss=true"
SEED = ("*/seed-1",)
KEYS = {metric.key for metric in QUANTISED_LOSSES}


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("this was done before")


def test_it_is_added_to_finished_runs_and_gets_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = write_study(tmp_path, ADAMW + COUPLED), tmp_path / "out"
    do(file, out, only=SEED)
    plain = by_label(read_results(out))
    assert all(not KEYS & run.metrics.keys() for run in plain.values())
    for name in ("_train_here", "_train_with_torchrun"):
        monkeypatch.setattr(cell, name, forbidden)
    for name in ("measure", "loss_over"):
        monkeypatch.setattr(measurement, name, forbidden)
    ended = do(file, out, ASKING, only=SEED)
    assert {status for status, _ in ended.values()} == {"finished"}
    for label, run in by_label(read_results(out)).items():
        loss = plain[label].metrics["loss"]
        assert {key: value for key, value in run.metrics.items() if key not in KEYS} == plain[label].metrics
        assert run.metrics["loss_int8_group"] == pytest.approx(loss, abs=0.01)
        assert run.metrics["loss_int4_row"] != loss
    assert do(file, out, ASKING, only=SEED) == {}
    write_tables(build_tables(gather_grid(read_results(out))), tmp_path / "tables")
    with (tmp_path / "tables" / "quantised.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["optimizer"] for row in rows] == ["standard", "coupled"]
    assert all(any(key.startswith(metric) for key in rows[0]) for metric in ("loss", *KEYS))
