"""A study folder and the status of its runs. All state is in the files.

study.toml                      the study as last run, with all settings
runs/<cell>/seed-<k>/           a run folder of training, and in addition:
    evaluation.json             the result; exists if the run is finished
    error.txt                   why the run failed; exists until the run is retried
    output.txt                  what the run printed
    claim                       lock; exists while a process works on the run, or was killed doing so (see base/locks)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import copy_whole, remove_leftovers, require_regular_file, write_whole
from coupled_adam.base.locks import is_held
from coupled_adam.config.builtin_files import CONFIG_FILE, PRESETS, STUDY_FILE
from coupled_adam.config.run_config import load_config, to_toml
from coupled_adam.config.study_config import Study, load_study
from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.metrics import BIN_LOSS, QUANTISED_LOSSES, TASK_LIMIT, bin_key
from coupled_adam.paper_tasks import task_key
from coupled_adam.study.config_hash import settings_that_differ
from coupled_adam.study.expansion import Cell
from coupled_adam.study.results import (
    EMBEDDINGS_FILE,
    EVALUATION,
    Result,
    completed,
    gather_results,
    read_evaluation,
    write_evaluation,
)
from coupled_adam.study.theory_metrics import THEORY_BATCHES
from coupled_adam.training.checkpoint.checkpoint_folder import checkpoints_in, step_of
from coupled_adam.training.logbook import METRICS_FILE, parse_row
from coupled_adam.training.run_folder import RunFolder

ERROR, OUTPUT, CLAIM = "error.txt", "output.txt", "claim"
RUNS_HERE = Path("runs")
"""Default parent of study folders."""
TO_BE_MEASURED = "to be measured"
TAIL_BYTES = 2**14


class StudyFolder:
    """The paths of one study."""

    def __init__(self, path: Path, reused: Sequence[Result] = ()) -> None:
        """
        Args:
            path: of the study folder.
            reused: results from other study folders. They count as finished runs if their settings are the same,
                whatever their names, unless the run was started in this folder.
        """
        self.path = path
        self._reused: dict[str, list[Result]] = {}
        for result in reused:
            self._reused.setdefault(result.config_hash, []).append(result)

    def run(self, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self.path / cell.run

    def require_fit(self, study: Study, cells: Sequence[Cell]) -> None:
        """Check that the folder is new or belongs to the same study; write nothing.

        Raises:
            ValueError: the folder holds something else, or runs whose settings have changed.
        """
        stored = self.path / STUDY_FILE
        if stored.is_file():
            name = load_study(str(stored)).name
            if name != study.name:
                raise UserError(f"{self.path} holds the study {name!r}, not {study.name!r}; pass another --out")
        elif self.path.is_dir() and not all(_is_beginning(path) for path in self.path.iterdir()):
            raise UserError(f"{self.path} exists and is not a study folder; pass another --out")
        changed = [f"{cell.label}: {', '.join(keys)}" for cell in cells if (keys := self.changes(cell))]
        if changed:
            raise UserError(
                f"{self.path} holds runs of this study with other settings. Undo the changes, rename the cells, pass "
                f"another --out, or remove the folders of these runs to repeat them ({self.path}/runs/...):\n"
                + "\n".join(changed)
            )

    def prepare(self, study: Study) -> None:
        """Create the folder if missing and write the study to it.

        Args:
            study: one that passes `require_fit`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        write_whole(self.path / STUDY_FILE, to_toml(self._with_own_bases(study)))

    def changes(self, cell: Cell) -> list[str]:
        """List the settings that have changed since a run was started."""
        config = self.run(cell) / CONFIG_FILE
        return (
            [] if cell.is_open or not config.is_file() else settings_that_differ(load_config(str(config)), cell.config)
        )

    def _with_own_bases(self, study: Study) -> Study:
        """Copy base config files into the folder, so that it has everything needed to rerun the study."""
        kept: dict[str, str] = {}
        for base in [study.base, *(model.base for model in study.models if model.base)]:
            if base not in PRESETS and base not in kept:
                kept[base] = f"base-{len(kept) + 1}.toml"
                write_whole(self.path / kept[base], to_toml(load_config(base)))
        models = [model.model_copy(update={"base": kept.get(model.base or "", model.base)}) for model in study.models]
        return study.model_copy(update={"base": kept.get(study.base, study.base), "models": models})

    def result(self, cell: Cell, evaluation: EvaluationSection) -> Result | None:
        """The result of a finished run; None if it is unfinished or lacks a measurement that the study now asks for."""
        if cell.is_open:
            return None
        own = read_evaluation(self.run(cell), self.path)
        found = [own] if own is not None else self._reused_for(cell)
        fits = [each for each in found if each.config_hash == cell.config_hash]
        return next((each for each in fits if is_measured(each.metrics, asked_of(cell, evaluation))), None)

    def _reused_for(self, cell: Cell) -> list[Result]:
        """Runs of other folders that may stand for a run that was not started here: those of the same name first, last
        all together, because each may lack measurements that another has."""
        if (self.run(cell) / CONFIG_FILE).is_file():
            return []
        same = sorted(self._reused.get(cell.config_hash, []), key=lambda each: each.cell != cell.id)
        together = [reduce(completed, same)] if len(same) > 1 else []
        return [
            replace(
                each,
                cell=cell.id,
                optimizer=cell.optimizer,
                settings=cell.settings,
                model=cell.model,
                trial=cell.trial,
            )
            for each in (*same, *together)
        ]

    def copy_reused(self, cells: Sequence[Cell], study: Study) -> None:
        """Copy reused runs into the folder, so that it no longer needs the other folders: results, curves and
        embeddings, not checkpoints."""
        for cell in cells:
            result, target = self.result(cell, study.evaluation), self.run(cell)
            if result is None or read_evaluation(target, self.path) is not None:
                continue
            target.mkdir(parents=True, exist_ok=True)
            for name in (METRICS_FILE, EMBEDDINGS_FILE):
                copy_whole(result.run_folder / name, target / name)
            # Last, because it marks the run as finished.
            write_evaluation(replace(result, study=study.name, folder=self.path, run=cell.run.as_posix()))

    def status(self, cell: Cell, evaluation: EvaluationSection) -> str:
        """Status of a run: finished, running, failed, to be measured (trained, but lacks a measurement), stopped
        (can be resumed) or waiting."""
        folder = self.run(cell)
        if self.result(cell, evaluation) is not None:
            return "finished"
        if is_claimed(folder):
            return "running"
        if (folder / ERROR).is_file():
            return "failed"
        if newest_step(folder) == cell.config.total_steps:
            return TO_BE_MEASURED
        return "stopped" if (folder / METRICS_FILE).is_file() else "waiting"

    def forget_errors(self, cells: Sequence[Cell], evaluation: EvaluationSection) -> None:
        """Remove the outdated error.txt of finished runs."""
        for cell in cells:
            if self.result(cell, evaluation) is not None:
                (self.run(cell) / ERROR).unlink(missing_ok=True)

    def gather(self, cells: Sequence[Cell]) -> list[Result]:
        """Write results.jsonl from the results of the runs, in the order of the study."""
        trials = {self.run(cell): cell.trial for cell in cells if not cell.is_open}
        return gather_results(self.path, [self.run(cell) for cell in cells], trials)

    def outside(self, cells: Sequence[Cell]) -> list[str]:
        """Finished runs in the folder that are no longer part of the study."""
        wanted = {self.run(cell) for cell in cells}
        found = sorted(path.parent for path in self.path.glob(f"runs/*/seed-*/{EVALUATION}"))
        return ["/".join(path.parts[-2:]) for path in found if path not in wanted]


def _is_beginning(path: Path) -> bool:
    """Whether a file is left over from a study that was killed before study.toml was complete."""
    return fnmatchcase(path.name, ".*.tmp") or fnmatchcase(path.name, "base-*.toml")


def asked_of(cell: Cell, evaluation: EvaluationSection) -> EvaluationSection:
    """Measurements of a run. Candidates need only their curves, which have the validation loss: the test split is not
    used before the winner is known."""
    return EvaluationSection(test_loss=False, measures=False) if cell.is_candidate else evaluation


def is_measured(metrics: Mapping[str, float | None], evaluation: EvaluationSection) -> bool:
    """Whether a result has every metric asked for; values may be None."""
    if not expected_metrics(evaluation) <= metrics.keys():
        return False
    # A result without a limit covers all documents.
    if evaluation.tasks and metrics.get(TASK_LIMIT) not in (None, evaluation.task_limit):
        return False
    return not evaluation.theory or metrics[THEORY_BATCHES] == evaluation.theory_batches


def expected_metrics(evaluation: EvaluationSection) -> set[str]:
    """The metrics that a result must have."""
    expected = {"train_loss"} | expected_measures(evaluation)
    expected |= {"loss"} if evaluation.test_loss else set()
    # Only if asked for explicitly: otherwise results of version 0.1.0 would count as unfinished, and runs whose
    # checkpoints are gone would be trained again.
    expected |= {bin_key(BIN_LOSS, 1)} if evaluation.loss_by_frequency else set()
    expected |= {metric.key for metric in QUANTISED_LOSSES} if evaluation.quantised_loss else set()
    expected |= {task_key(name) for name in evaluation.tasks or ()}
    return expected | ({THEORY_BATCHES} if evaluation.theory else set())


def expected_measures(evaluation: EvaluationSection) -> set[str]:
    """The embedding metrics that a result must have."""
    if not evaluation.measures:
        return set()
    return {"iso", "r_cos"} if evaluation.wordsim else {"iso"}


def is_claimed(run_folder: Path) -> bool:
    """Whether a process is working on this run."""
    return is_held(run_folder / CLAIM)


def newest_step(run_folder: Path) -> int:
    """Step of a run's newest checkpoint; 0 without checkpoints."""
    found = checkpoints_in(RunFolder(run_folder).checkpoints)
    return step_of(found[-1]) if found else 0


def last_row(run_folder: Path, kind: str = "train") -> dict[str, float] | None:
    """The last row of one kind in metrics.jsonl, read from the end of the file, which may still grow."""
    for line in reversed(_last_bytes(run_folder / METRICS_FILE).splitlines()):
        row = parse_row(line)
        if row is not None and row["kind"] == kind:
            return row
    return None


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a text file; empty if it is missing."""
    text = _last_bytes(path).decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])


def _last_bytes(path: Path) -> bytes:
    """The end of a file; empty if it is missing."""
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read()
    except (OSError, ValueError):
        return b""
