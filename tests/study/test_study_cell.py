"""A single run of a study: its time, its final message, and runs of other processes."""

from pathlib import Path

import pytest
from study_fake_worker import result_of
from study_runs import ADAMW, run_here, write_study

from coupled_adam.config.study_config import load_study
from coupled_adam.study import cell as study_cell
from coupled_adam.study import measurement, runner
from coupled_adam.study.cell import Spent, Task, run_cell
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.launchers import Ended
from coupled_adam.study.measurement import Measured
from coupled_adam.study.results import read_evaluation
from coupled_adam.training.run_folder import RunFolder


def task_of(tmp_path: Path) -> Task:
    study = load_study(str(write_study(tmp_path, ADAMW)))
    return Task(tmp_path / "out", study.name, cells_of(study)[0], study.evaluation)


def test_time_and_energy_add_up_over_all_starts(tmp_path: Path) -> None:
    Spent().plus(10.0, None).write(tmp_path)
    assert Spent.read(tmp_path) == Spent(10.0, None)
    Spent.read(tmp_path).plus(5.0, 200.0).write(tmp_path)
    Spent.read(tmp_path).plus(2.5, None).plus(0.5, 50.0).write(tmp_path)
    assert Spent.read(tmp_path) == Spent(18.0, 250.0)


def test_a_finished_run_passes_on_the_notes_of_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(tmp_path)
    notes = ["the corpus has no test split", "a task was left out"]
    measured = Measured(result_of(task).metrics, 7.0, "val", notes)
    monkeypatch.setattr(study_cell, "is_trained", lambda _: True)
    monkeypatch.setattr(measurement, "measure_run", lambda *_: measured)
    monkeypatch.setattr(RunFolder, "read_state", lambda _: {})
    status, message = run_cell(task)
    assert status == "finished"
    assert all(note in message for note in notes)
    result = read_evaluation(task.folder, task.study_folder)
    assert result is not None
    assert (result.metrics, result.loss_split, result.tokens_per_second) == (measured.metrics, "val", 7.0)


class BusyLauncher:
    """Reports that another process works on the first task, and finishes none of the others."""

    slots, leaves_on_stop = 1, False

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def start(self, task: Task) -> None:
        self.tasks.append(task)

    def wait(self, seconds: float) -> list[Ended]:
        return [Ended(self.tasks[-1], "busy" if len(self.tasks) == 1 else "stopped")]

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_run_of_another_process_is_not_counted_as_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_study(tmp_path, ADAMW)
    launcher = BusyLauncher()
    monkeypatch.setattr(runner, "LocalLauncher", lambda _: launcher)
    outcome, _ = run_here(file, tmp_path / "out")
    assert (len(launcher.tasks), list(outcome.busy)) == (2, [launcher.tasks[0].cell.label])
    assert (outcome.finished, outcome.left) == (0, 1)
