"""The paper's theory on a study's runs, measured at their milestones."""

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
    """Measure the theory of a run; return the metrics by key, and notes for the user.

    A run that was trained without milestones is measured at its last checkpoint.
    """
    steps: list[int] | None = None
    notes: list[str] = []
    try:
        milestones(run_folder, TheoryFolder(run_folder))
    except ValueError:
        last = read_record(find_checkpoint(run_folder, None, on_skip=notes.append))
        steps = [last.step]
        notes.append(f"trained without milestones: theory measured only at the last checkpoint, step {last.step:,}")
    theory = theory_of_run(
        run_folder,
        checkpoints=steps,
        batches=evaluation.theory_batches,
        device=run_config(run_folder).training.device,
        on_progress=_say_each(),
    )
    return theory_metrics(theory), notes


def notes_on_theory(evaluation: EvaluationSection) -> Iterator[str]:
    """Notes for the user before the theory is measured."""
    if evaluation.theory and not has_scikit_learn():
        yield (
            "scikit-learn is not installed, so the theory has no mutual information; after installing it, "
            "`coupled-adam theory` adds it without repeating measurements"
        )


def _say_each() -> Callable[[int, int, int], None]:
    """Print a line for each checkpoint to the output of the run."""
    begun: set[int] = set()

    def say(done: int, total: int, step: int) -> None:
        if step not in begun:
            print(f"theory: step {step:,}, batch {done} of {total}", flush=True)
        begun.add(step)

    return say
