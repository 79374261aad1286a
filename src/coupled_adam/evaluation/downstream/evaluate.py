"""Evaluate a model: its loss on the test split, then one task after another, each stored as soon as it is done.

A task that already has a result for the same model and documents is not repeated. So a stopped evaluation can be
resumed, and more tasks can be added later.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from coupled_adam import __version__
from coupled_adam.base.errors import UserError
from coupled_adam.base.files import require_writable
from coupled_adam.config.run_config import Config
from coupled_adam.data.corpus import Corpus
from coupled_adam.data.tokens import Tokens
from coupled_adam.evaluation.downstream import harness
from coupled_adam.evaluation.downstream.harness_model import answering_model
from coupled_adam.evaluation.downstream.requests_file import Score, TokenRequest
from coupled_adam.evaluation.downstream.scoring import Precision, default_precision, score_requests
from coupled_adam.evaluation.downstream.task_results import (
    Downstream,
    LossResult,
    Subject,
    TaskResult,
    file_name,
    read_file,
    write_file,
)
from coupled_adam.evaluation.held_out_loss import SplitLoss, loss_over, pick_split
from coupled_adam.evaluation.loss_by_frequency import Counts
from coupled_adam.evaluation.run_tokenizer import open_json_tokenizer, require_fit, run_tokenizer
from coupled_adam.evaluation.weights import find_checkpoint, load_weights, model_with, run_config, run_corpus
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.tokenizer import Tokenizer
from coupled_adam.training.checkpoint.checkpoint_folder import Record, read_record
from coupled_adam.training.devices import device_name, pick_device

OnProgress = Callable[[str, int, int], None]
"""Called with the name of a task, the number of requests done, and their total."""
OnNote = Callable[[str], None]
"""Called with a note for the user."""


def evaluate_run(
    run: Path,
    *,
    tasks: Sequence[str],
    task_data: Path | None = None,
    limit: int | None = None,
    device: str | None = None,
    precision: Precision | None = None,
    checkpoint: int | None = None,
    tokenizer: str | None = None,
    with_loss: bool = True,
    fresh: bool = False,
    out: Path | None = None,
    on_progress: OnProgress = lambda *_: None,
    on_note: OnNote = lambda _: None,
) -> Downstream:
    """Evaluate a run and store the results in its folder.

    Args:
        run: the run folder.
        tasks: names of lm-eval tasks.
        task_data: folder of local files for the paper's tasks; None for lm-eval's own datasets.
        limit: evaluate only the first documents of each task; None for all.
        device: "auto", "cpu" or "cuda"; None for the run's config, with "cuda" read as "auto".
        precision: None for the run's config; if that is "auto", bf16 on CUDA.
        checkpoint: step of the checkpoint; None for the newest complete one.
        tokenizer: "gpt2" or the path of a tokenizer.json; None for that of the run's corpus.
        with_loss: whether to evaluate the loss too; without the corpus, only a note is given.
        fresh: repeat finished evaluations.
        out: file of the results; None for `downstream.json` in the run folder.
        on_progress: called after each pass; it must use its own stream, because lm-eval's output is suppressed.
        on_note: called with notes for the user.

    Returns:
        All results in the file, including those of earlier evaluations of the same model.
    """
    if tasks:
        harness.check_tasks(tasks, task_data)
    opened = OpenedRun.of(run, checkpoint, device, precision, on_note)
    tokens = opened.tokenizer_for(tokenizer) if tasks else None
    path = out or run / file_name(checkpoint, limit)
    tokenizer_hash, version = (None, None) if tokens is None else (tokens.sha256, harness.lm_eval_version())
    subject = opened.subject(tokenizer_hash, version, limit)
    results = ResultsFile.open(path, subject, environment(opened.device), fresh=fresh, tasks=tasks, on_note=on_note)
    if with_loss:
        stored = None if fresh else results.found.loss
        loss = run_loss(opened, on_progress, on_note, stored)
        if loss is None and not tasks:
            raise UserError(f"{run}: the loss cannot be evaluated and no tasks are given; pass --tasks")
        results = results.with_loss(loss)

    def model_for(task: str) -> Any:
        assert tokens is not None
        return answering_model(tokens, lambda requests: opened.score(task, requests, on_progress))

    return add_tasks(results, tasks, task_data, model_for, on_progress).found


@dataclass(frozen=True)
class OpenedRun:
    """A checkpoint of a run whose weights are not loaded yet."""

    run: Path
    config: Config
    path: Path
    record: Record
    corpus: Corpus | None
    """None if it is missing or has changed."""
    device: torch.device
    precision: Precision

    @classmethod
    def of(
        cls, run: Path, checkpoint: int | None, device: str | None, precision: Precision | None, on_note: OnNote
    ) -> "OpenedRun":
        """Find the config, checkpoint and corpus of a run; raise ValueError if something is missing."""
        config = run_config(run)
        path = find_checkpoint(run, checkpoint, on_skip=on_note)
        record = read_record(path)
        corpus = None
        try:
            corpus = run_corpus(config, record)
        except (UserError, OSError) as error:
            on_note(str(error))
        # A run trained on a GPU may be evaluated without one; a run trained on the CPU stays there.
        where = pick_device(device or ("cpu" if config.training.device == "cpu" else "auto"))
        wanted = precision or (None if config.training.precision == "auto" else config.training.precision)
        return cls(run, config, path, record, corpus, where, wanted or default_precision(where))

    @cached_property
    def model(self) -> LanguageModel:
        """The model on its device, loaded on first use."""
        shape = self.config.to_model_config()
        return model_with(shape, load_weights(shape, self.path)).to(self.device)

    def tokenizer_for(self, tokenizer: str | None) -> Tokenizer:
        """The tokenizer of the run, or the given one if it fits."""
        tokens = open_json_tokenizer(tokenizer) if tokenizer else run_tokenizer(self.config, self.corpus)
        require_fit(tokens, self.config.rows, str(self.run))
        if tokenizer and self.corpus is not None and tokens.size != self.corpus.vocabulary_size:
            raise UserError(
                f"the tokenizer {tokens.name} has {tokens.size} tokens, but the corpus of {self.run} was made with "
                f"{self.corpus.vocabulary_size}: the vocabulary does not match; remove --tokenizer, or pass the "
                "tokenizer that this model was trained with"
            )
        return tokens

    def score(self, task: str, requests: Sequence[TokenRequest], on_progress: OnProgress) -> list[Score]:
        """Score the requests of a task, in order."""
        return score_requests(
            self.model,
            requests,
            precision=self.precision,
            on_progress=lambda done, total: on_progress(task, done, total),
        )

    def subject(self, tokenizer: str | None, lm_eval: str | None, limit: int | None) -> Subject:
        """Description of the evaluated model and the task settings."""
        return Subject(
            name=self.config.name,
            weights=self.record.fingerprint,
            step=self.record.step,
            precision=self.precision,
            tokenizer=tokenizer,
            lm_eval=lm_eval,
            limit=limit,
        )


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and device of an evaluation, for later comparisons."""
    return {"package": __version__, "torch": str(torch.__version__), "device": device_name(device)}


@dataclass(frozen=True)
class ResultsFile:
    """Results and their file."""

    path: Path
    found: Downstream

    @classmethod
    def open(
        cls,
        path: Path,
        subject: Subject,
        environment: dict[str, Any],
        *,
        fresh: bool,
        tasks: Sequence[str],
        on_note: OnNote,
    ) -> "ResultsFile":
        """Read the results of this model from a file; results of another model are replaced.

        Args:
            path: the file, which may be missing.
            subject: the model to evaluate.
            environment: of this evaluation.
            fresh: ignore the results of `tasks`, and a damaged file.
            tasks: the tasks to evaluate.
            on_note: called if results of another model are replaced.
        """
        try:
            require_writable(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); pass another file with --out") from error
        try:
            stored = read_file(path)
        except ValueError:
            if not fresh:
                raise
            stored = None
        if stored is not None and not stored.subject.fits(subject):
            on_note(f"{path} has results of another checkpoint, precision, tokenizer or lm-eval; replacing them")
            stored = None
        if stored is None:
            return cls(path, Downstream(subject, environment=environment))
        known = replace(
            subject,
            tokenizer=subject.tokenizer or stored.subject.tokenizer,
            lm_eval=subject.lm_eval or stored.subject.lm_eval,
        )
        kept = {name: task for name, task in stored.tasks.items() if not (fresh and name in tasks)}
        return cls(path, replace(stored, subject=known, tasks=kept, environment=environment))

    def with_loss(self, loss: LossResult | None) -> "ResultsFile":
        """Add a loss and write the file."""
        return self if loss is None else self.keep(replace(self.found, loss=loss))

    def keep(self, found: Downstream) -> "ResultsFile":
        """Write results."""
        write_file(self.path, found)
        return ResultsFile(self.path, found)


def run_loss(
    opened: OpenedRun, on_progress: OnProgress, on_note: OnNote, stored: LossResult | None = None
) -> LossResult | None:
    """Loss of a run over its test split; None and a note if its corpus is missing.

    Args:
        opened: the run.
        on_progress: called at the start and at the end.
        on_note: called with notes for the user.
        stored: an earlier result; not repeated if it is for the same tokens.
    """
    if opened.corpus is None:
        if stored is None:
            on_note(
                f"no test loss: the corpus of the run, {opened.config.data.folder}, is missing or has changed; a "
                "relative folder is relative to the current one"
            )
        return stored
    if not {"test", "val"} & set(opened.corpus.splits):
        on_note(f"no test loss: {opened.corpus.folder} has no test split and no validation split")
        return stored

    def loss(tokens: Tokens, counts: Counts | None) -> SplitLoss:
        return loss_over(opened.model, tokens, training_counts=counts, bf16=opened.precision == "bf16")

    return loss_of_split(opened.corpus, stored, loss, on_progress, on_note)


def loss_of_split(
    corpus: Corpus,
    stored: LossResult | None,
    loss: Callable[[Tokens, Counts | None], SplitLoss],
    on_progress: OnProgress,
    on_note: OnNote,
) -> LossResult:
    """Loss over the test split of a corpus, or over the validation split if there is no test split.

    Includes the loss by token frequency, unless the training split cannot be counted.

    Args:
        corpus: must have one of the two splits.
        stored: an earlier result; not repeated if it is for the same tokens and has the loss by frequency.
        loss: evaluates a model on the tokens of a split, with or without the counts of the training split.
        on_progress: called at the start and at the end.
        on_note: called if another split than test is used, or if there is no loss by frequency.
    """
    split, note = pick_split(corpus)
    if note:
        on_note(note)
    fingerprint = corpus.fingerprint
    known = stored if stored is not None and (stored.split, stored.corpus) == (split, fingerprint) else None
    if known is not None and known.by_frequency is not None:
        return known
    counts = _training_counts(corpus, on_note)
    if known is not None and counts is None:
        return known
    on_progress(f"{split} loss", 0, 1)
    started = time.monotonic()
    found = loss(corpus.tokens(split), counts)
    on_progress(f"{split} loss", 1, 1)
    return LossResult.of(found, split, fingerprint, round(time.monotonic() - started, 3))


def _training_counts(corpus: Corpus, on_note: OnNote) -> Counts | None:
    """Token counts of the training split; None and a note if they are unavailable."""
    try:
        return corpus.unigram()
    except (UserError, OSError) as error:
        on_note(f"no loss by token frequency, because the training tokens cannot be counted: {error}")
        return None


def is_done(found: Downstream, task: str, task_data: Path | None) -> bool:
    """Whether a task has a result for the same documents."""
    return task in found.tasks and found.tasks[task].data == harness.data_hash(task, task_data)


def add_tasks(
    results: ResultsFile,
    tasks: Sequence[str],
    task_data: Path | None,
    model_for: Callable[[str], Any],
    on_progress: OnProgress,
    seconds: dict[str, float] | None = None,
) -> ResultsFile:
    """Evaluate the tasks without a result, and write the results after each.

    Args:
        results: existing results.
        tasks: names, already checked.
        task_data: folder of local files, or None.
        model_for: returns the model of harness_model.py that answers the requests of a task.
        on_progress: called when a task starts.
        seconds: time of each task on another machine; None to measure it here.

    Raises:
        ValueError: this model cannot be evaluated on some tasks; raised after all others are done.
    """
    refused = []
    for name in tasks:
        if is_done(results.found, name, task_data):
            continue
        on_progress(name, 0, 1)
        started = time.monotonic()
        task = harness.load_task(name, task_data)
        try:
            scored = harness.evaluate_task(model_for(name), name, task, results.found.subject.limit)
        except ValueError as error:
            refused.append(f"task {name}: {error}")
            continue
        taken = (seconds or {}).get(name, time.monotonic() - started)
        result = TaskResult(
            metrics=scored.metrics,
            examples=scored.examples,
            documents=scored.documents,
            version=str(task.VERSION),
            data=harness.data_hash(name, task_data),
            seconds=round(taken, 3),
        )
        results = results.keep(results.found.with_task(name, result))
    if refused:
        rest = f"\nThe other tasks are done: {results.path}" if results.found.tasks else ""
        raise UserError("\n".join(refused) + rest)
    return results
