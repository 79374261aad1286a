"""Downstream tasks of a study's runs: the checks before training, and the metrics of a result.

The evaluation keeps each finished task in the run folder, so it can be resumed.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import user_path
from coupled_adam.config.run_config import Config
from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.data.corpus import Corpus
from coupled_adam.evaluation.downstream.evaluate import evaluate_run
from coupled_adam.evaluation.downstream.harness import check_tasks
from coupled_adam.evaluation.downstream.task_results import Downstream
from coupled_adam.evaluation.run_tokenizer import require_fit, run_tokenizer
from coupled_adam.metrics import TASK_LIMIT
from coupled_adam.paper_tasks import METRIC, task_key

WITHOUT = "To skip the tasks: --set evaluation.tasks=none"


def measure_tasks(run_folder: Path, evaluation: EvaluationSection) -> tuple[dict[str, float | None], list[str]]:
    """Evaluate a run on the tasks of its study; return the metrics by key, and notes for the user."""
    notes: list[str] = []
    found = evaluate_run(
        run_folder,
        tasks=evaluation.tasks or [],
        task_data=_task_data(evaluation),
        limit=evaluation.task_limit,
        with_loss=False,  # measure_run measures it
        on_progress=_say_begin,
        on_note=notes.append,
    )
    return {**task_metrics(found), TASK_LIMIT: evaluation.task_limit}, notes


def task_metrics(found: Downstream) -> dict[str, float | None]:
    """Accuracy of every task, None for a task without one; and the mean of the paper's seven if all were evaluated."""
    of_tasks = {task_key(name): task.metrics.get(METRIC) for name, task in found.tasks.items()}
    return {**of_tasks, **found.metrics()}


def check_task_names(evaluation: EvaluationSection) -> None:
    """Check that lm-eval is installed and knows the tasks, and that the task files exist.

    Raises:
        ValueError, ImportError: something is missing.
    """
    if evaluation.tasks:
        try:
            check_tasks(evaluation.tasks, _task_data(evaluation))
        except ValueError as error:
            # The message names the options of `coupled-adam eval`.
            words = str(error).replace("--task-data", "evaluation.task_data").replace("--tasks", "evaluation.tasks")
            raise UserError(words) from error


def check_tokenizers(evaluation: EvaluationSection, configs: Iterable[Config], corpora: Mapping[str, Corpus]) -> None:
    """Open the tokenizers that the tasks need, to fail before the first training and not after it.

    Args:
        evaluation: of the study.
        configs: of all runs.
        corpora: by `data.folder`.

    Raises:
        ValueError, OSError, ImportError: a tokenizer is unavailable or does not fit the model.
    """
    different = {(config.data.folder, config.rows): config for config in configs}
    for config in different.values() if evaluation.tasks else ():
        corpus = corpora[config.data.folder]
        if corpus.tokenizer is None:
            raise UserError(
                f"evaluation.tasks needs the tokenizer of {corpus.folder}, which is unknown; write a manifest with "
                f"`coupled-adam data prepare tokens:...`. {WITHOUT}"
            )
        try:
            tokens = run_tokenizer(config, corpus)
            require_fit(tokens, config.rows, config.name)
        except (UserError, OSError) as error:
            raise UserError(f"evaluation.tasks: {error}. {WITHOUT}") from error


def _task_data(evaluation: EvaluationSection) -> Path | None:
    return None if evaluation.task_data is None else user_path(evaluation.task_data)


def _say_begin(task: str, done: int, total: int) -> None:
    """Print a line for each task to the output of the run."""
    if done == 0:
        print(f"task {task}", flush=True)
