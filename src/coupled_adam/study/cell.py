"""One run of a study: train or resume, measure, write the result.

A run can be killed at any moment and started again: training resumes from its last checkpoint, and the result is
written last and atomically.
"""

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from rich.console import Console

from coupled_adam.base.errors import UserError, as_user_error
from coupled_adam.base.files import read_json, read_text, remove_leftovers, write_whole
from coupled_adam.base.locks import LockHeld, locked
from coupled_adam.config.builtin_files import CONFIG_FILE
from coupled_adam.config.run_config import Config, to_toml
from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.study.energy import EnergyMeter, visible_gpus
from coupled_adam.study.expansion import Cell
from coupled_adam.study.folder import CLAIM, ERROR, OUTPUT, StudyFolder, asked_of, tail
from coupled_adam.study.results import Result, read_evaluation, write_evaluation
from coupled_adam.study.trials import VALIDATION_LOSS, Trial
from coupled_adam.training.run_folder import RunFolder

if TYPE_CHECKING:
    from coupled_adam.study.measurement import Measured

Status = Literal["finished", "stopped", "busy", "failed"]
SPENT = "spent.json"
SECONDS_FOR_ANOTHER = 20.0
"""How long to wait for a worker whose study was killed: it needs a moment to save and exit."""
OUTPUT_WIDTH = 120


@dataclass(frozen=True)
class Task:
    """One run, with everything its worker process needs to know."""

    study_folder: Path
    study: str
    cell: Cell
    evaluation: EvaluationSection
    ranks: int = 1
    """Number of training processes; torchrun starts them if there is more than one."""
    measure_energy: bool = False
    """Whether this run has exclusive use of its GPUs, so that it can be charged with their energy."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.study_folder / self.cell.run

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, for a pipe or a cluster job."""
        cell = self.cell
        return {
            "study_folder": str(self.study_folder),
            "study": self.study,
            "cell": {"id": cell.id, "seed": cell.seed, "model": cell.model, "optimizer": cell.optimizer},
            "trial": None if cell.trial is None else cell.trial.to_json(),
            "config": cell.config.model_dump(),
            "evaluation": self.evaluation.model_dump(),
            "ranks": self.ranks,
            "measure_energy": self.measure_energy,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Task":
        """The inverse of `to_json`."""
        config = Config.model_validate(values["config"])
        trial = None if values["trial"] is None else Trial.from_json(values["trial"])
        return cls(
            study_folder=Path(values["study_folder"]),
            study=values["study"],
            cell=Cell(**values["cell"], config=config, trial=trial),
            evaluation=EvaluationSection.model_validate(values["evaluation"]),
            ranks=values["ranks"],
            measure_energy=values["measure_energy"],
        )


def run_cell(task: Task) -> tuple[Status, str]:
    """Train and measure one run; its output goes to output.txt.

    Returns:
        The status, and a message for the user. "finished"; "stopped": a signal arrived and progress was saved; "busy":
        another process is working on the run; "failed": the message is the reason, which is also in error.txt.

    Raises:
        KeyboardInterrupt: a signal arrived during measurement.
        Exception: an internal error, which is also in error.txt. Do not reuse the process.
    """
    folder = task.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG_FILE).is_file():
        write_whole(folder / CONFIG_FILE, to_toml(task.cell.config))
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / CLAIM, SECONDS_FOR_ANOTHER))
        except LockHeld as error:
            return "busy", f"{error.by} is working on it; {error.remedy}"
        (folder / ERROR).unlink(missing_ok=True)
        remove_leftovers(folder)
        if is_finished(task):
            return "finished", ""  # a cluster may start a job twice
        with (folder / OUTPUT).open("a", encoding="utf-8") as output:
            try:
                return _train_and_measure(task, output)
            except Exception as error:
                from coupled_adam.training.trainer import TrainingStopped

                if isinstance(error, TrainingStopped) and task.cell.is_candidate:
                    _write_diverged(task)
                    return "finished", f"diverged: {error}"
                mendable = error if isinstance(error, TrainingStopped) else as_user_error(error)
                is_expected = mendable is not None
                reason = str(mendable) if is_expected else f"{type(error).__name__}: {error}"
                write_error(folder, reason, "" if is_expected else _traceback(error))
                if not is_expected:
                    raise
                return "failed", reason


def _write_diverged(task: Task) -> None:
    """Write the result of a candidate whose training diverged: without a loss, its value cannot win."""
    from coupled_adam.study.measurement import Measured

    metrics: dict[str, float | None] = {"train_loss": None, VALIDATION_LOSS: None}
    write_evaluation(_result(task, Measured(metrics, None, "test", []), Spent.read(task.folder)))


def write_error(run_folder: Path, reason: str, details: str = "") -> None:
    """Write to the run folder why the run failed; create the folder if missing."""
    run_folder.mkdir(parents=True, exist_ok=True)
    write_whole(run_folder / ERROR, f"{reason}\n" + (f"\n{details}\n" if details else ""))


def is_finished(task: Task) -> bool:
    """Whether the run has its result."""
    return StudyFolder(task.study_folder).result(task.cell, task.evaluation) is not None


def read_error(run_folder: Path) -> str:
    """Read why the run failed from its folder, without the details."""
    try:
        return read_text(run_folder / ERROR).split("\n\n")[0].strip()
    except (OSError, ValueError):
        return ""


def _train_and_measure(task: Task, output: TextIO) -> tuple[Status, str]:
    folder, started = task.folder, time.monotonic()
    spent = Spent.read(folder)
    with EnergyMeter(visible_gpus() if task.measure_energy else []) as meter:
        try:
            if not is_trained(task):
                train = _train_here if task.ranks == 1 else _train_with_torchrun
                train(task, output)
                if not is_trained(task):
                    return "stopped", ""
            from coupled_adam.study.measurement import measure_run

            before = read_evaluation(folder, task.study_folder)
            is_ours = before is not None and before.config_hash == task.cell.config_hash
            measured = measure_run(folder, asked_of(task.cell, task.evaluation), before if is_ours else None)
        finally:
            spent = spent.plus(time.monotonic() - started, meter.joules)
            spent.write(folder)
    write_evaluation(_result(task, measured, spent))
    return "finished", "; ".join(measured.notes)


def is_trained(task: Task) -> bool:
    """Whether the checkpoint of the last step exists and is complete."""
    from coupled_adam.training.checkpoint.checkpoint_folder import step_of
    from coupled_adam.training.checkpoint.save_and_load import newest_good

    folder = RunFolder(task.folder).checkpoints
    total = task.cell.config.total_steps
    newest = newest_good(folder, on_skip=lambda _: None, last_step=total) if folder.is_dir() else None
    return newest is not None and step_of(newest) == total


def _train_here(task: Task, output: TextIO) -> None:
    from coupled_adam.training.run import run_training

    console = Console(file=output, width=OUTPUT_WIDTH, highlight=False)
    run_training(task.cell.config, task.folder, resume=True, console=console)


def _train_with_torchrun(task: Task, output: TextIO) -> None:
    """Train on several ranks; a signal to this process is forwarded, and the ranks save."""
    write_whole(task.folder / CONFIG_FILE, to_toml(task.cell.config))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={task.ranks}"),
        *("-m", "coupled_adam", "train", str(task.folder), "--resume"),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code != 0 and not is_trained(task):
        state = RunFolder(task.folder).read_state()
        if state.get("diverged"):
            from coupled_adam.training.trainer import TrainingStopped

            raise TrainingStopped(str(state.get("problem")))
        raise UserError(f"torchrun failed with exit code {code}; last lines of {OUTPUT}:\n{tail(task.folder / OUTPUT)}")


@dataclass(frozen=True)
class Spent:
    """Time and energy a run has used so far, over all starts that were not killed."""

    seconds: float = 0.0
    joules: float | None = None

    @classmethod
    def read(cls, run_folder: Path) -> "Spent":
        try:
            values = read_json(run_folder / SPENT)
            joules = values["joules"]
            return cls(float(values["seconds"]), None if joules is None else float(joules))
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def plus(self, seconds: float, joules: float | None) -> "Spent":
        known = [each for each in (self.joules, joules) if each is not None]
        return Spent(self.seconds + seconds, sum(known) if known else None)

    def write(self, run_folder: Path) -> None:
        write_whole(run_folder / SPENT, json.dumps({"seconds": self.seconds, "joules": self.joules}) + "\n")


def _result(task: Task, measured: "Measured", spent: Spent) -> Result:
    cell, state = task.cell, RunFolder(task.folder).read_state()
    return Result(
        study=task.study,
        cell=cell.id,
        seed=cell.seed,
        optimizer=cell.optimizer,
        settings=cell.settings,
        model=cell.model,
        parameters=cell.parameters,
        tokens=cell.config.training.tokens,
        metrics=measured.metrics,
        seconds=round(spent.seconds, 3),
        tokens_per_second=measured.tokens_per_second,
        energy_joules=spent.joules,
        config_hash=cell.config_hash,
        package=str(state.get("package", "")),
        commit=state.get("commit"),
        torch=str(state.get("torch", "")),
        device=str(state.get("device", "")),
        run=cell.run.as_posix(),
        loss_split=measured.loss_split,
        trial=cell.trial,
        folder=task.study_folder,
    )


def _traceback(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error)).strip()
