"""lm-evaluation-harness: load its tasks, with its own datasets or local files, and evaluate a model on a task.

Prompts, requests, metrics and standard errors are lm-eval's. With local files, lm-eval's own definition is used and
only the source of the documents changes.
"""

import contextlib
import difflib
import importlib.metadata
import io
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import require
from coupled_adam.base.files import file_hash
from coupled_adam.evaluation.downstream.task_data import LOCAL_TASKS, check_files, read_documents
from coupled_adam.paper_tasks import PAPER_NAMES, PAPER_TASKS

# Types whose requests are log-likelihoods of given texts.
SCORED_TYPES = ("loglikelihood", "multiple_choice")
# For the standard error of LAMBADA's perplexity; lm-eval's 100,000 take minutes. All other errors have a formula.
BOOTSTRAP_DRAWS = 1000
NEAR_MATCHES = 3


@dataclass(frozen=True)
class Scored:
    """Result of a model on a task."""

    metrics: dict[str, float]
    """By lm-eval's names: acc, acc_stderr, acc_norm, perplexity, ..."""
    examples: int
    """Number of evaluated documents."""
    documents: int
    """Number of documents in the task."""


def lm_eval_version() -> str:
    """Version of lm-eval; raises ImportError with the install command if it is missing."""
    require("lm_eval", "eval", "to evaluate downstream tasks")
    return importlib.metadata.version("lm_eval")


def check_tasks(names: Sequence[str], task_data: Path | None) -> None:
    """Check tasks before a model is loaded: raise for unknown names, tasks that generate text and missing files."""
    lm_eval_version()
    for name in names:
        if name not in PAPER_NAMES:
            _check_name(name)
    if task_data is not None:
        check_files(task_data, names)


def data_hash(name: str, task_data: Path | None) -> str | None:
    """SHA-256 of the local file of a task; None if lm-eval uses its own dataset."""
    return None if task_data is None else file_hash(task_data / LOCAL_TASKS[name].file)


def load_task(name: str, task_data: Path | None) -> Any:
    """Load an lm-eval task with all its documents.

    Args:
        name: of the task, already checked.
        task_data: folder of local files; None for lm-eval's own dataset, downloaded if it is not cached.
    """
    with quiet():
        try:
            manager = task_manager(name in PAPER_NAMES)
            spec = name if task_data is None else local_definition(name, task_data)
            task = manager.load([spec])["tasks"][name]
        except (ConnectionError, FileNotFoundError) as error:
            raise UserError(
                f"task {name}: lm-eval could not get its dataset ({error}); connect to the internet"
                + (", or pass local files with --task-data DIR" if name in PAPER_NAMES else "")
            ) from error
        if task.get_config("num_fewshot") is None:  # as lm-eval's command does
            task.set_config(key="num_fewshot", value=0)
        from lm_eval.defaults import DEFAULT_OTHER_SEED

        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    if task.OUTPUT_TYPE not in SCORED_TYPES:
        raise UserError(_wrong_type(name, str(task.OUTPUT_TYPE)))
    return task


def local_definition(name: str, task_data: Path) -> dict[str, Any]:
    """Build lm-eval's definition of a task with documents from a local file instead of the Hub."""
    import datasets
    from lm_eval.tasks._yaml_loader import load_yaml

    local = read_documents(task_data, name)
    documents = datasets.DatasetDict({local.split: datasets.Dataset.from_list(local.documents)})
    definition: dict[str, Any] = load_yaml(task_manager(True).task_index[name].yaml_path, resolve_func=True)
    # The other splits only provide few-shot examples, which the seven tasks do not use.
    others = dict.fromkeys({"training_split", "validation_split", "test_split"} - {f"{local.split}_split"})
    assert definition[f"{local.split}_split"] == local.split, f"{name}: lm-eval evaluates on another split"
    return {**definition, **others, "custom_dataset": lambda **_: documents}


def evaluate_task(model: Any, name: str, task: Any, limit: int | None) -> Scored:
    """Evaluate a model on a task.

    Args:
        model: from harness_model.py.
        name: of the task.
        task: from `load_task`.
        limit: evaluate only the first documents; None for all.
    """
    from lm_eval.evaluator import evaluate

    settings = {"limit": limit, "bootstrap_iters": BOOTSTRAP_DRAWS, "log_samples": False}
    try:
        with quiet(), templates_compiled_once():
            found = evaluate(lm=model, task_dict={"tasks": {name: task}}, **settings)
    except OverflowError as error:
        raise UserError(
            "the correct answers are so unlikely under the model that a metric of lm-eval overflows (such as the "
            "perplexity); its weights may have diverged: evaluate an earlier checkpoint, or skip the task"
        ) from error
    count = found["n-samples"][name]
    metrics = {
        key.removesuffix(",none"): float(value)
        for key, value in found["results"][name].items()
        if key not in ("name", "alias", "sample_len", "sample_count") and isinstance(value, (int, float))
    }
    return Scored(metrics, count["effective"], count["original"])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and log messages of lm-eval and datasets; errors are still raised.

    Output meant for the user must use its own stream.
    """
    import datasets

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    had_bars = datasets.are_progress_bars_disabled() is False
    before = os.environ.get("DISABLE_MULTIPROC")
    # Otherwise lm-eval would fork this process, which may use CUDA and threads, for one second of work.
    os.environ["DISABLE_MULTIPROC"] = "1"
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


@contextlib.contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Cache compiled prompt templates: lm-eval compiles them for every document, which takes most of its time."""
    from lm_eval.utils import env

    env.from_string = cache(env.from_string)
    try:
        yield
    finally:
        del env.from_string  # restores the method of the class


@cache
def task_manager(paper_only: bool) -> Any:
    """lm-eval's task index; reading the index of all tasks takes seconds."""
    import lm_eval.tasks

    if not paper_only:
        return lm_eval.tasks.TaskManager()
    root = Path(lm_eval.tasks.__file__).parent
    folders = [root / folder for folder in dict.fromkeys(task.folder for task in PAPER_TASKS)]
    return lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)


def _check_name(name: str) -> None:
    with quiet():
        manager = task_manager(False)
    if name in manager.all_groups or name in manager.all_tags:
        with quiet():
            entry = manager.task_index[name]
        members = sorted(entry.tags) if name in manager.all_tags else _members(entry)
        raise UserError(f"task {name!r} is a group in lm-eval; list its tasks instead: {', '.join(members[:12])}")
    if name not in manager.all_subtasks:
        near = difflib.get_close_matches(name, manager.all_subtasks, NEAR_MATCHES, cutoff=0.6)
        hint = f"did you mean {', '.join(near)}?" if near else f"the paper's are {', '.join(PAPER_NAMES)}"
        raise UserError(f"task {name!r}: unknown to lm-eval {lm_eval_version()}; {hint}")
    from lm_eval.tasks._yaml_loader import load_yaml

    definition = load_yaml(manager.task_index[name].yaml_path, resolve_func=False)
    kind = definition.get("output_type")
    if kind is not None and kind not in SCORED_TYPES:
        raise UserError(_wrong_type(name, kind))


def _members(entry: Any) -> list[str]:
    named = [child if isinstance(child, str) else child.get("task", child.get("group")) for child in entry.cfg["task"]]
    return [str(name) for name in named]


def _wrong_type(name: str, kind: str) -> str:
    return (
        f"task {name!r} has the output type {kind}, which is not supported; this command only scores given answers "
        f"({' and '.join(SCORED_TYPES)}). Export the model and run lm-eval's own command on the folder"
    )
