"""Run a study: keep finished runs, resume stopped ones, report failures and continue with the rest.

The runner itself computes nothing. It gives tasks to a launcher, follows the progress of the runs in their files and
collects the results.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from coupled_adam.config.builtin_files import CONFIG_FILE
from coupled_adam.config.run_config import load_config, with_rows
from coupled_adam.config.study_config import Study
from coupled_adam.data.workers import available_processes
from coupled_adam.models.model_config import parameter_count
from coupled_adam.study.cell import Task
from coupled_adam.study.energy import visible_gpus
from coupled_adam.study.expansion import Cell, with_rows_in_numbers
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.launchers import ClusterLauncher, Ended, LocalLauncher, RunLauncher, worker_environments
from coupled_adam.study.selection import cells_now, selection_lines, selections_of, with_candidates
from coupled_adam.study.study_display import StudyDisplay
from coupled_adam.training.interruption import Interruption, watching_signals

if TYPE_CHECKING:
    from coupled_adam.data.corpus import Corpus

LauncherName = Literal["local", "torchrun", "slurm"]
LAUNCHERS: tuple[LauncherName, ...] = ("local", "torchrun", "slurm")
SECONDS_BETWEEN_LOOKS = 0.5
SMALL_MODEL = 5_000_000  # parameters


@dataclass
class StudyOutcome:
    """How this call of a study ended."""

    finished: int = 0
    """Number of finished runs, including earlier ones."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by run."""
    busy: dict[str, str] = field(default_factory=dict)
    """Runs that another process is working on, with the remedy."""
    waiting: dict[str, str] = field(default_factory=dict)
    """Runs whose setting is not selected yet, with the reason."""
    left: int = 0
    """Number of runs left unfinished after a signal."""
    signal: str | None = None
    runs_go_on: bool = False
    """Whether cluster jobs continue without the runner."""


def run_study(
    study: Study,
    cells: Sequence[Cell],
    folder: StudyFolder,
    *,
    all_cells: Sequence[Cell],
    jobs: int | None,
    launcher: LauncherName,
    display: StudyDisplay,
    before_runs: Callable[[], None],
) -> StudyOutcome:
    """Do all unfinished runs among `cells`.

    If a setting is selected, the candidates come first; a reported run starts as soon as its winner is known.

    Args:
        study: as loaded.
        cells: the requested runs; candidates that decide one of their settings are added.
        folder: of the study; must pass `require_fit`. It is written only after all checks have passed.
        all_cells: all runs of the study from `cells_of`, in the order of the results.
        jobs: number of parallel runs. None: one per GPU; without GPUs one per core if all models are small, otherwise
            one; with torchrun one; with slurm the cluster decides.
        launcher: where to run.
        display: shows the progress.
        before_runs: prepares what all runs need, while the workers start.

    Raises:
        ValueError, OSError, ImportError: the study cannot start; its folder is unchanged.
    """
    outcome = StudyOutcome()
    runs = RunQueue(study, cells, all_cells, folder)
    outcome.finished = len(runs.found_finished())
    unfinished = runs.unfinished()
    todo = runs.ready(outcome)
    if not todo:
        _prepare(study, folder, runs)
        outcome.waiting = runs.undecided()
        return outcome
    machine = _machine(study, folder, jobs, launcher, unfinished, display.say)
    try:
        before_runs()
        _prepare(study, folder, runs)
        with watching_signals() as interruption, display:
            display.begin(runs.wanted(), unfinished, may_grow=runs.may_grow())
            _loop(study, folder, runs, deque(todo), machine, display, interruption, outcome)
            outcome.signal = interruption.signal_name
    except KeyboardInterrupt:  # during data preparation, or the second Ctrl-C
        outcome.signal = "SIGINT"
        machine.launcher.stop()
    finally:
        machine.launcher.close()
    outcome.left = len(runs.wanted()) - outcome.finished - len(outcome.failed) - len(outcome.busy)
    outcome.waiting = runs.undecided() if outcome.signal is None else {}
    outcome.runs_go_on = machine.launcher.leaves_on_stop and outcome.signal is not None
    return outcome


class RunQueue:
    """The runs of a study as they become known: the finished candidates decide which runs a selection needs next.

    Args:
        study: as loaded.
        cells: the requested runs.
        all_cells: all runs of the study.
        folder: with the finished runs.
    """

    def __init__(self, study: Study, cells: Sequence[Cell], all_cells: Sequence[Cell], folder: StudyFolder) -> None:
        self.study, self.folder = study, folder
        self.all_cells = all_cells
        self._labels = {cell.label for cell in with_candidates(cells, all_cells)}
        self._handed_out: set[str] = set()
        self.said: set[str] = set()
        """Selections whose outcome was printed."""
        self.known: list[Cell] = []
        """All runs of the study known to be needed."""
        self.look()

    def look(self) -> None:
        """Update `known` from the finished candidates."""
        self.known = cells_now(self.all_cells, self.folder, self.study)

    def wanted(self) -> list[Cell]:
        """The requested runs and their candidates, as far as known."""
        return [cell for cell in self.known if cell.label in self._labels]

    def unfinished(self) -> list[Cell]:
        """Requested runs without a result."""
        return [cell for cell in self.wanted() if self.folder.result(cell, self.study.evaluation) is None]

    def may_grow(self) -> bool:
        """Whether a selection may still add candidates to the requested runs."""
        open_ones = {cell.trial.of for cell in self.wanted() if cell.trial is not None and cell.is_open}
        return any(
            selection.of in open_ones and selection.may_extend(selection.choice(self.folder, self.study))
            for selection in selections_of(self.all_cells, self.study)
        )

    def found_finished(self) -> list[Cell]:
        """Requested runs that had a result before they were handed out, each returned once."""
        waiting = {cell.label for cell in self.unfinished()}
        found = [cell for cell in self.wanted() if cell.label not in waiting | self._handed_out]
        self._handed_out |= {cell.label for cell in found}
        return found

    def ready(self, outcome: StudyOutcome) -> list[Cell]:
        """Unfinished runs whose settings are known, each returned once. A run that was started with another winner is
        reported as failed."""
        found = []
        for cell in self.unfinished():
            if cell.is_open or cell.label in self._handed_out:
                continue
            self._handed_out.add(cell.label)
            changed = self.folder.changes(cell)
            if changed:
                outcome.failed[cell.label] = (
                    f"another value was selected after it was started ({', '.join(changed)}); to repeat it, remove its "
                    f"folder {self.folder.run(cell)}"
                )
            else:
                found.append(cell)
        return found

    def news(self) -> list[str]:
        """Selections decided since the last call."""
        wanted = {cell.trial.of for cell in self.wanted() if cell.trial is not None}
        lines = selection_lines(self.folder, self.study, self.all_cells)
        new = [of for of in lines if of in wanted and of not in self.said]
        self.said |= set(new)
        return [lines[of] for of in new]

    def undecided(self) -> dict[str, str]:
        """Requested runs whose setting cannot be selected yet, with the reason."""
        lines = selection_lines(self.folder, self.study, self.all_cells)
        reason = "its candidates are not all finished"
        return {cell.label: lines.get(cell.trial.of, reason) for cell in self.wanted() if cell.is_open and cell.trial}


def _prepare(study: Study, folder: StudyFolder, runs: RunQueue) -> None:
    """Update the folder before any run starts."""
    folder.prepare(with_rows_in_numbers(study, runs.all_cells))
    folder.copy_reused(runs.known, study)
    folder.forget_errors(runs.known, study.evaluation)
    folder.gather(runs.known)


@dataclass(frozen=True)
class LaunchSettings:
    """A launcher and the settings of its tasks."""

    launcher: RunLauncher
    ranks: int
    threads: int | None
    """CPU threads per run; None for torch's default."""
    measure_energy: bool


def _machine(
    study: Study,
    folder: StudyFolder,
    jobs: int | None,
    name: LauncherName,
    todo: Collection[Cell],
    say: Callable[[str], None],
) -> LaunchSettings:
    if name == "slurm":
        cluster = ClusterLauncher(folder.path / "jobs", study.slurm, jobs)
        if not cluster.is_slurm:
            say(f"Slurm not found: submitit runs the study on this machine, {cluster.slots} at a time.")
        # A cluster job has its GPUs to itself.
        return LaunchSettings(
            cluster, study.slurm.gpus if cluster.is_slurm else 1, None, measure_energy=cluster.is_slurm
        )
    gpus = visible_gpus()
    if name == "torchrun":
        count = min(jobs or 1, len(todo))
        ranks = max(1, (len(gpus) or available_processes()) // count)
        return LaunchSettings(LocalLauncher(worker_environments(count, gpus, ranks)), ranks, None, bool(gpus))
    count = min(jobs or len(gpus) or _jobs_on_cpu(todo), len(todo))
    # Without GPUs the runs share the cores; torch would give all cores to each run.
    threads = None if gpus or count == 1 else max(1, available_processes() // count)
    return LaunchSettings(LocalLauncher(worker_environments(count, gpus, 1)), 1, threads, 0 < count <= len(gpus))


def _jobs_on_cpu(cells: Collection[Cell]) -> int:
    """Number of parallel runs on a CPU: one per core for small models, where more threads would not help."""
    largest = max(parameter_count(cell.config.to_model_config()) for cell in cells)
    return available_processes() if largest < SMALL_MODEL else 1


def _loop(
    study: Study,
    folder: StudyFolder,
    runs: RunQueue,
    todo: deque[Cell],
    machine: LaunchSettings,
    display: StudyDisplay,
    interruption: Interruption,
    outcome: StudyOutcome,
) -> None:
    launcher = machine.launcher
    running = 0
    is_stopping = False
    for line in runs.news():
        display.say(f"selected  {line}")
    while todo or running:
        if interruption and not is_stopping:
            is_stopping = True
            todo.clear()
            running = 0 if launcher.leaves_on_stop else running
            display.say(f"{interruption.signal_name}: saving and stopping all runs; press Ctrl-C again to kill them.")
            launcher.stop()
        while todo and running < launcher.slots:
            cell = todo.popleft()
            launcher.start(_task(study, folder, cell, machine))
            display.started(cell, folder.run(cell))
            running += 1
        try:
            ended = launcher.wait(SECONDS_BETWEEN_LOOKS)
        except KeyboardInterrupt:  # the second Ctrl-C
            launcher.stop()
            continue
        for each in ended:
            running -= 1
            _note(each, outcome)
            if each.status == "finished":
                folder.forget_errors([each.task.cell], study.evaluation)
            display.ended(each)
            if each.status == "finished":
                if each.task.cell.is_candidate:
                    _go_on(runs, todo, display, outcome, starts_more=not is_stopping)
                folder.gather(runs.known)
        display.refresh()


def _go_on(
    runs: RunQueue, todo: deque[Cell], display: StudyDisplay, outcome: StudyOutcome, *, starts_more: bool
) -> None:
    """Add the runs that a selection needs next, after a candidate has finished."""
    before = {cell.label for cell in runs.wanted()}
    runs.look()
    runs.folder.copy_reused(runs.known, runs.study)
    found = runs.found_finished()
    outcome.finished += len(found)
    new = [cell for cell in runs.wanted() if cell.label not in before]
    display.add(new, finished=found, may_grow=runs.may_grow())
    for line in runs.news():
        display.say(f"selected  {line}")
    if starts_more:
        todo.extend(runs.ready(outcome))


def _task(study: Study, folder: StudyFolder, cell: Cell, machine: LaunchSettings) -> Task:
    """Make the task of a run. A resumed run keeps its number of threads, so that its numbers are the same as without
    the interruption."""
    stored = folder.run(cell) / CONFIG_FILE
    threads = load_config(str(stored)).training.threads if stored.is_file() else machine.threads
    training = cell.config.training
    if training.threads is None and threads is not None:
        training = training.model_copy(update={"threads": threads})
    config = with_rows(cell.config).model_copy(update={"training": training})
    return Task(
        study_folder=folder.path.absolute(),
        study=study.name,
        cell=replace(cell, config=config),
        evaluation=study.evaluation,
        ranks=machine.ranks,
        measure_energy=machine.measure_energy,
    )


def _note(ended: Ended, outcome: StudyOutcome) -> None:
    label = ended.task.cell.label
    if ended.status == "finished":
        outcome.finished += 1
    elif ended.status == "failed":
        outcome.failed[label] = ended.message
    elif ended.status == "busy":
        outcome.busy[label] = ended.message


def prepare_data(cells: Sequence[Cell], say: Callable[[str], None]) -> "dict[str, Corpus]":
    """Prepare or open each corpus that the runs need, check it, and print notes about it.

    Returns:
        The corpora, by the `data.folder` of the runs.

    Raises:
        ValueError, OSError, ImportError: a corpus is unusable; no run has started.
    """
    # Imported here because it loads numpy, which a dry run does not need.
    from coupled_adam.training.run_tokens import (
        note_on_unused_rows,
        prepare_tokens,
        require_rows,
        require_validation,
        say_notes,
    )

    corpora: dict[str, Corpus] = {}
    for config in {cell.config.data: cell.config for cell in cells}.values():
        folder = config.data.folder
        if folder in corpora:
            say_notes(config, corpora[folder], say)
        else:
            corpora[folder] = prepare_tokens(config, say)
    notes: list[str] = []
    different = {(cell.config.data, cell.config.rows): cell.config for cell in cells}
    selected_with = {cell.config.data.folder: cell.config for cell in cells if cell.is_candidate}
    for config in selected_with.values():
        require_validation(config, corpora[config.data.folder])
    for config in different.values():
        corpus = corpora[config.data.folder]
        require_rows(config, corpus)
        if "test" not in corpus.splits and "val" in corpus.splits:
            notes.append(f"{corpus.folder} has no test split; using its validation split instead")
        if note := note_on_unused_rows(config, corpus):
            notes.append(f"Note: {note}")
    for note in dict.fromkeys(notes):
        say(note)
    return corpora
