"""The folder of a study, and how each of its runs stands, as the files say; nothing else is remembered.

study.toml                      the study as it was run last, with all settings
runs/<cell>/seed-<k>/           a run folder of training, and beside its files:
    evaluation.json             the result; there when the run is finished
    error.txt                   why the run failed; there until it is tried again
    output.txt                  what the run printed
    claim                       there while a process works on the run, or was killed as it did (see base/locks)
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import remove_leftovers, require_regular_file, write_whole
from coupled_adam.base.locks import is_held
from coupled_adam.config.builtin_files import CONFIG_FILE, PRESETS, STUDY_FILE
from coupled_adam.config.run_config import load_config, to_toml
from coupled_adam.config.study_config import Study, load_study
from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.metrics import BIN_LOSS, QUANTISED_LOSSES, TASK_LIMIT, bin_key
from coupled_adam.paper_tasks import task_key
from coupled_adam.study.config_hash import settings_that_differ
from coupled_adam.study.expansion import Cell
from coupled_adam.study.results import EVALUATION, Result, gather_results, read_evaluation
from coupled_adam.study.theory_metrics import THEORY_BATCHES
from coupled_adam.training.checkpoint.checkpoint_folder import checkpoints_in, step_of
from coupled_adam.training.logbook import METRICS_FILE, parse_row
from coupled_adam.training.run_folder import RunFolder

ERROR, OUTPUT, CLAIM = "error.txt", "output.txt", "claim"
RUNS_HERE = Path("runs")
"""Where a study goes, under its name, when nothing else is said."""
TO_BE_MEASURED = "to be measured"
TAIL_BYTES = 2**14


class StudyFolder:
    """The paths of one study."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self.path / cell.run

    def require_fit(self, study: Study, cells: Sequence[Cell]) -> None:
        """See that the folder is new, or as the same study left it; nothing is written.

        Raises:
            ValueError: where the folder holds something else, or runs that now would have other settings.
        """
        stored = self.path / STUDY_FILE
        if stored.is_file():
            name = load_study(str(stored)).name
            if name != study.name:
                raise UserError(f"{self.path} holds the study {name!r}, not {study.name!r}; give another --out")
        elif self.path.is_dir() and not all(_is_beginning(path) for path in self.path.iterdir()):
            raise UserError(f"{self.path} exists and is not the folder of a study; give another --out")
        changed = [f"{cell.label}: {', '.join(keys)}" for cell in cells if (keys := self.changes(cell))]
        if changed:
            raise UserError(
                f"{self.path} holds runs of this study that had other settings. Take the changes back, give the cells "
                f"other names, give another --out, or remove the folders of these runs to do them again "
                f"({self.path}/runs/...):\n" + "\n".join(changed)
            )

    def prepare(self, study: Study) -> None:
        """Make the folder where it is missing, and write the study as it is run from here on.

        Args:
            study: one that fits into the folder: see `require_fit`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        write_whole(self.path / STUDY_FILE, to_toml(self._with_own_bases(study)))

    def changes(self, cell: Cell) -> list[str]:
        """The settings in which a run that was begun differs from what it would be now."""
        config = self.run(cell) / CONFIG_FILE
        return (
            [] if cell.is_open or not config.is_file() else settings_that_differ(load_config(str(config)), cell.config)
        )

    def _with_own_bases(self, study: Study) -> Study:
        """Copies base configs that are files into the folder, so that it holds everything to run the study again."""
        kept: dict[str, str] = {}
        for base in [study.base, *(model.base for model in study.models if model.base)]:
            if base not in PRESETS and base not in kept:
                kept[base] = f"base-{len(kept) + 1}.toml"
                write_whole(self.path / kept[base], to_toml(load_config(base)))
        models = [model.model_copy(update={"base": kept.get(model.base or "", model.base)}) for model in study.models]
        return study.model_copy(update={"base": kept.get(study.base, study.base), "models": models})

    def result(self, cell: Cell, evaluation: EvaluationSection) -> Result | None:
        """The result of a finished run; None where it is not finished, or not measured as the study asks now."""
        if cell.is_open:
            return None
        result = read_evaluation(self.run(cell), self.path)
        if result is None or result.config_hash != cell.config_hash:
            return None
        return result if is_measured(result.metrics, asked_of(cell, evaluation)) else None

    def status(self, cell: Cell, evaluation: EvaluationSection) -> str:
        """finished, running, failed, to be measured (it is trained, and lacks what the study asks for now), stopped
        (it goes on from where it was) or waiting."""
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
        """Remove the error.txt of finished runs: whatever failed there once is mended."""
        for cell in cells:
            if self.result(cell, evaluation) is not None:
                (self.run(cell) / ERROR).unlink(missing_ok=True)

    def gather(self, cells: Sequence[Cell]) -> list[Result]:
        """Write results.jsonl from what the runs of the study have written, in the order of the study."""
        trials = {self.run(cell): cell.trial for cell in cells if not cell.is_open}
        return gather_results(self.path, [self.run(cell) for cell in cells], trials)

    def outside(self, cells: Sequence[Cell]) -> list[str]:
        """The finished runs that lie in the folder but are not among the given ones: the study had them once."""
        wanted = {self.run(cell) for cell in cells}
        found = sorted(path.parent for path in self.path.glob(f"runs/*/seed-*/{EVALUATION}"))
        return ["/".join(path.parts[-2:]) for path in found if path not in wanted]


def _is_beginning(path: Path) -> bool:
    """Whether a file is what a study leaves that was killed before its study.toml was whole."""
    return fnmatchcase(path.name, ".*.tmp") or fnmatchcase(path.name, "base-*.toml")


def asked_of(cell: Cell, evaluation: EvaluationSection) -> EvaluationSection:
    """What is measured of a run: of a candidate only its curves, which have the validation loss. The test split is not
    touched before the winner is known."""
    return EvaluationSection(test_loss=False, measures=False) if cell.is_candidate else evaluation


def is_measured(metrics: Mapping[str, float | None], evaluation: EvaluationSection) -> bool:
    """Whether a result has all that is asked for, though it may be None; one that has not is measured again."""
    if not expected_metrics(evaluation) <= metrics.keys():
        return False
    # All documents are never too few.
    if evaluation.tasks and metrics.get(TASK_LIMIT) not in (None, evaluation.task_limit):
        return False
    return not evaluation.theory or metrics[THEORY_BATCHES] == evaluation.theory_batches


def expected_metrics(evaluation: EvaluationSection) -> set[str]:
    """The metrics that a result must have."""
    expected = {"train_loss"} | expected_measures(evaluation)
    expected |= {"loss"} if evaluation.test_loss else set()
    # Not where it is left open: results of version 0.1.0 would not be finished any more, and those whose checkpoints
    # are gone would be trained again.
    expected |= {bin_key(BIN_LOSS, 1)} if evaluation.loss_by_frequency else set()
    expected |= {metric.key for metric in QUANTISED_LOSSES} if evaluation.quantised_loss else set()
    expected |= {task_key(name) for name in evaluation.tasks or ()}
    return expected | ({THEORY_BATCHES} if evaluation.theory else set())


def expected_measures(evaluation: EvaluationSection) -> set[str]:
    """Those of them that measure the embeddings."""
    if not evaluation.measures:
        return set()
    return {"iso", "r_cos"} if evaluation.wordsim else {"iso"}


def is_claimed(run_folder: Path) -> bool:
    """Whether a process works on this run now."""
    return is_held(run_folder / CLAIM)


def newest_step(run_folder: Path) -> int:
    """The step of the newest checkpoint of a run; 0 where there is none."""
    found = checkpoints_in(RunFolder(run_folder).checkpoints)
    return step_of(found[-1]) if found else 0


def last_row(run_folder: Path, kind: str = "train") -> dict[str, float] | None:
    """The last row of one kind in metrics.jsonl, read from the end of the file; the run may be writing to it."""
    for line in reversed(_last_bytes(run_folder / METRICS_FILE).splitlines()):
        row = parse_row(line)
        if row is not None and row["kind"] == kind:
            return row
    return None


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a text file; empty where there is none."""
    text = _last_bytes(path).decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])


def _last_bytes(path: Path) -> bytes:
    """The end of a file; nothing where there is none."""
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read()
    except (OSError, ValueError):
        return b""
