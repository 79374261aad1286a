"""`inspect` and `recentre` of a folder of runs: the error names runs to pass instead."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from coupled_adam.base.errors import UserError
from coupled_adam.cli import app
from coupled_adam.inspection.model_tables import read_model


def write_run(folder: Path) -> None:
    checkpoint = folder / "checkpoints" / "step-5"
    checkpoint.mkdir(parents=True)
    save_file({"wte.weight": np.eye(4, dtype=np.float32)}, checkpoint / "tables.safetensors")


def test_a_study_folder_is_refused_with_one_run_of_each_cell(tmp_path: Path) -> None:
    for run in ("a/seed-1", "a/seed-2", "b/seed-2", "b/seed-10"):
        write_run(tmp_path / "runs" / run)
    (tmp_path / "runs" / "c" / "seed-1").mkdir(parents=True)  # not trained yet
    with pytest.raises(UserError) as refused:
        read_model(str(tmp_path))
    named = str(refused.value).split("coupled-adam inspect ")[1].split()
    assert {Path(run).parent for run in named} == {tmp_path / "runs" / "a", tmp_path / "runs" / "b"}
    assert len(named) == 2
    for run in named:
        assert read_model(run).tables


def test_a_folder_of_runs_is_refused_with_its_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "mine")
    with pytest.raises(UserError, match=f"coupled-adam inspect {tmp_path / 'mine'}$"):
        read_model(str(tmp_path))


def test_recentring_a_study_folder_is_refused_with_a_run(tmp_path: Path) -> None:
    run = tmp_path / "study" / "runs" / "a" / "seed-1"
    write_run(run)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["recentre", str(tmp_path / "study"), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert str(run) in result.output.replace("\n", "")
