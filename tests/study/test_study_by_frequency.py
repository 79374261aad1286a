"""Loss by token frequency in a study: measured with the test loss or later, and never by training again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from study_evaluations import by_label, do
from study_runs import ADAMW, COUPLED, write_study

from coupled_adam.data.manifest import UNIGRAM_FILE
from coupled_adam.study import cell, measurement
from coupled_adam.study.results import EVALUATION, Result, read_results

ASKING = "evaluation.loss_by_frequency=true"
BIN_KEYS = {f"frequency_{key}_{bin}" for key in ("loss", "calibration", "tokens", "targets") for bin in range(1, 11)}
FIRST = "small-1.536k-standard/seed-1"


def results(out: Path) -> dict[str, Result]:
    return by_label(read_results(out))


def bins_in(result: Result) -> set[str]:
    return {key for key in result.metrics if key.startswith("frequency_")}


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("this was done before")


def forget_bins(out: Path) -> None:
    """Reduce the results to those of version 0.1.0."""
    for file in out.glob(f"runs/*/seed-*/{EVALUATION}"):
        row = json.loads(file.read_text())
        row["metrics"] = {key: value for key, value in row["metrics"].items() if key not in BIN_KEYS}
        file.write_text(json.dumps(row) + "\n")


def test_every_run_has_it_and_all_share_the_bins(tmp_path: Path) -> None:
    file = write_study(tmp_path, ADAMW + COUPLED)
    ended = do(file, tmp_path / "out")
    assert {status for status, _ in ended.values()} == {"finished"}
    found = list(results(tmp_path / "out").values())
    assert len(found) == 4
    counts = np.load(tmp_path / "corpus" / UNIGRAM_FILE)
    for run in found:
        assert bins_in(run) == BIN_KEYS
        values = {key: [run.metrics[f"frequency_{key}_{bin}"] for bin in range(1, 11)] for key in ("loss", "targets")}
        weighted = sum((loss or 0) * (targets or 0) for loss, targets in zip(*values.values(), strict=True))
        assert sum(targets or 0 for targets in values["targets"]) == 202
        assert weighted / 202 == pytest.approx(run.metrics["loss"], rel=1e-9)
        assert sum(run.metrics[f"frequency_tokens_{bin}"] or 0 for bin in range(1, 11)) == len(counts)
    for key in ("tokens", "targets"):
        shared = {tuple(run.metrics[f"frequency_{key}_{bin}"] for bin in range(1, 11)) for run in found}
        assert len(shared) == 1


def test_results_without_it_count_as_finished_until_it_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write_study(tmp_path, ADAMW), tmp_path / "out"
    do(file, out)
    whole = results(out)
    forget_bins(out)
    for name in ("_train_here", "_train_with_torchrun"):
        monkeypatch.setattr(cell, name, forbidden)
    monkeypatch.setattr(measurement, "measure", forbidden)
    assert do(file, out) == {}
    assert bins_in(results(out)[FIRST]) == set()
    ended = do(file, out, ASKING)
    assert {status for status, _ in ended.values()} == {"finished"}
    for label, run in results(out).items():
        assert run.metrics == whole[label].metrics
    monkeypatch.setattr(measurement, "loss_over", forbidden)
    assert do(file, out, ASKING) == {}


def test_it_can_be_left_out(tmp_path: Path) -> None:
    file = write_study(tmp_path, ADAMW)
    do(file, tmp_path / "out", "evaluation.loss_by_frequency=false", only=(FIRST,))
    run = results(tmp_path / "out")[FIRST]
    assert bins_in(run) == set()
    assert run.metrics["loss"] is not None


@pytest.mark.parametrize("asked", [True, False])
def test_without_the_test_loss_it_is_measured_on_request(asked: bool, tmp_path: Path) -> None:
    file = write_study(tmp_path, ADAMW)
    do(file, tmp_path / "out", "evaluation.test_loss=false", *([ASKING] if asked else []), only=(FIRST,))
    run = results(tmp_path / "out")[FIRST]
    assert "loss" not in run.metrics
    assert bins_in(run) == (BIN_KEYS if asked else set())


def test_unreadable_counts_fail_the_run_by_name_and_keep_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write_study(tmp_path, ADAMW), tmp_path / "out"
    nothing = ("evaluation.measures=false", "evaluation.test_loss=false")
    do(file, out, *nothing, only=(FIRST,))
    monkeypatch.setattr(cell, "_train_here", forbidden)
    path = tmp_path / "corpus" / UNIGRAM_FILE
    counts = np.load(path)
    path.write_bytes(b"no array")
    status, reason = do(file, out, *nothing, ASKING, only=(FIRST,))[FIRST]
    assert status == "failed"
    assert str(path) in reason
    np.save(path, counts)
    assert do(file, out, *nothing, ASKING, only=(FIRST,))[FIRST] == ("finished", "")
    assert bins_in(results(out)[FIRST]) == BIN_KEYS
