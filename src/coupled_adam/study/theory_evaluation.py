"""The paper's theory on a study's runs: measured at the milestones of each, kept in its folder, and in its result."""

from collections.abc import Callable, Iterator
from pathlib import Path

from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.evaluation.weights import find_checkpoint, run_config
from coupled_adam.study.theory_metrics import theory_metrics
from coupled_adam.theory.fits import has_scikit_learn
from coupled_adam.theory.measure import milestones, theory_of_run
from coupled_adam.theory.theory_folder import TheoryFolder
from coupled_adam.training.checkpoint.checkpoint_folder import read_record


def measure_theory(run_folder: Path, evaluation: EvaluationSection) -> tuple[dict[str, float | None], list[str]]:
    """The theory of a run, by its names in the run's result; and what the user should know.

    A run that was trained before its theory was asked for has no milestones: then its last checkpoint is measured.
    """
    steps: list[int] | None = None
    notes: list[str] = []
    try:
        milestones(run_folder, TheoryFolder(run_folder))
    except ValueError:
        last = read_record(find_checkpoint(run_folder, None, on_skip=notes.append))
        steps = [last.step]
        notes.append(f"trained without milestones: the theory is that of its last checkpoint, step {last.step}, alone")
    theory = theory_of_run(
        run_folder,
        checkpoints=steps,
        batches=evaluation.theory_batches,
        device=run_config(run_folder).training.device,
        on_progress=_say_each(),
    )
    return theory_metrics(theory), notes


def notes_on_theory(evaluation: EvaluationSection) -> Iterator[str]:
    """What the user should know before the theory is measured."""
    if evaluation.theory and not has_scikit_learn():
        yield (
            "scikit-learn is not installed: the theory goes without mutual information, which `coupled-adam theory` "
            "adds later without measuring anything again"
        )


def _say_each() -> Callable[[int, int, int], None]:
    """A line for each checkpoint, in the output of the run."""
    begun: set[int] = set()

    def say(done: int, total: int, step: int) -> None:
        if step not in begun:
            print(f"theory: step {step}, batch {done} of {total}", flush=True)
        begun.add(step)

    return say
