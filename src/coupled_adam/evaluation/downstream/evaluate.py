"""Evaluating a model: its loss on the test split, then one task after the other, each kept as soon as it is done.

A task whose result is there already, of the same model on the same documents, is not repeated. So an evaluation that
was stopped goes on where it was, and more tasks can be added later.
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
"""Told what is being evaluated, how many of its requests are done, and of how many."""
OnNote = Callable[[str], None]
"""Told a sentence that the user should know."""


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
    """Evaluate a run, and keep the results in its folder.

    Args:
        run: the folder that training wrote.
        tasks: names of lm-eval.
        task_data: folder of local files for the paper's tasks; None: lm-eval's own datasets.
        limit: documents of each task, from the first; None: all.
        device: "auto", "cpu" or "cuda"; None: as the config of the run says, and "auto" where that says "cuda".
        precision: None: as the config of the run says, and where that says "auto", bf16 on CUDA.
        checkpoint: its step; None: the newest that is whole.
        tokenizer: "gpt2" or the path of a tokenizer.json; None: that of the run's corpus.
        with_loss: whether the loss is evaluated too; where the corpus is not here, a note says so.
        fresh: repeat what is there already.
        out: file of the results; None: `downstream.json` in the folder of the run.
        on_progress: told after each pass; it must hold its own stream, as lm-eval is kept from printing meanwhile.
        on_note: told what the user should know.

    Returns:
        All results of the file: those of earlier evaluations of the same model too.
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
            raise UserError(f"{run}: its loss cannot be evaluated, and no task was asked for; name some with --tasks")
        results = results.with_loss(loss)

    def model_for(task: str) -> Any:
        assert tokens is not None
        return answering_model(tokens, lambda requests: opened.score(task, requests, on_progress))

    return add_tasks(results, tasks, task_data, model_for, on_progress).found


@dataclass(frozen=True)
class OpenedRun:
    """A checkpoint of a run, found but not read yet."""

    run: Path
    config: Config
    path: Path
    record: Record
    corpus: Corpus | None
    """None where it is not here, or has changed."""
    device: torch.device
    precision: Precision

    @classmethod
    def of(
        cls, run: Path, checkpoint: int | None, device: str | None, precision: Precision | None, on_note: OnNote
    ) -> "OpenedRun":
        """Find everything; a ValueError says what is not there."""
        config = run_config(run)
        path = find_checkpoint(run, checkpoint, on_skip=on_note)
        record = read_record(path)
        corpus = None
        try:
            corpus = run_corpus(config, record)
        except (UserError, OSError) as error:
            on_note(str(error))
        # A run of a GPU may be evaluated where there is none; one of the CPU stays there, to be as it was.
        where = pick_device(device or ("cpu" if config.training.device == "cpu" else "auto"))
        wanted = precision or (None if config.training.precision == "auto" else config.training.precision)
        return cls(run, config, path, record, corpus, where, wanted or default_precision(where))

    @cached_property
    def model(self) -> LanguageModel:
        """The model, on its device; read when first asked for."""
        shape = self.config.to_model_config()
        return model_with(shape, load_weights(shape, self.path)).to(self.device)

    def tokenizer_for(self, tokenizer: str | None) -> Tokenizer:
        """The tokenizer of the run, or the given one if it can be that."""
        tokens = open_json_tokenizer(tokenizer) if tokenizer else run_tokenizer(self.config, self.corpus)
        require_fit(tokens, self.config.rows, str(self.run))
        if tokenizer and self.corpus is not None and tokens.size != self.corpus.vocabulary_size:
            raise UserError(
                f"the tokenizer {tokens.name} has {tokens.size} tokens, but the corpus of {self.run} was made with "
                f"{self.corpus.vocabulary_size}: the vocabulary does not match; leave --tokenizer out, or give the one "
                "that this model was trained with"
            )
        return tokens

    def score(self, task: str, requests: Sequence[TokenRequest], on_progress: OnProgress) -> list[Score]:
        """The scores of the requests of a task, in their order."""
        return score_requests(
            self.model,
            requests,
            precision=self.precision,
            on_progress=lambda done, total: on_progress(task, done, total),
        )

    def subject(self, tokenizer: str | None, lm_eval: str | None, limit: int | None) -> Subject:
        """What is evaluated, with what `Subject` says of the tasks."""
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
    """Where an evaluation takes place, for those who compare results later."""
    return {"package": __version__, "torch": str(torch.__version__), "device": device_name(device)}


@dataclass(frozen=True)
class ResultsFile:
    """Results, and the file that holds them."""

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
        """What a file holds of this model; nothing where it holds results of another.

        Args:
            path: the file; need not exist.
            subject: what is to be evaluated.
            environment: where.
            fresh: forget the results of `tasks`, and a file that is damaged.
            tasks: what is to be evaluated of it.
            on_note: told when results of another model are replaced.
        """
        try:
            require_writable(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); give another file with --out") from error
        try:
            stored = read_file(path)
        except ValueError:
            if not fresh:
                raise
            stored = None
        if stored is not None and not stored.subject.fits(subject):
            on_note(f"{path} held results of another checkpoint, precision, tokenizer or lm-eval; they are replaced")
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
        """The same with this loss, written."""
        return self if loss is None else self.keep(replace(self.found, loss=loss))

    def keep(self, found: Downstream) -> "ResultsFile":
        """Write results."""
        write_file(self.path, found)
        return ResultsFile(self.path, found)


def run_loss(
    opened: OpenedRun, on_progress: OnProgress, on_note: OnNote, stored: LossResult | None = None
) -> LossResult | None:
    """The loss of a run over its test split; None, and a note, where its corpus is not here.

    Args:
        opened: the run.
        on_progress: told when it begins and when it is done.
        on_note: told what the user should know.
        stored: what was found before; of the same tokens, it is not evaluated again.
    """
    if opened.corpus is None:
        if stored is None:
            on_note(
                f"no test loss: the corpus of the run, {opened.config.data.folder}, is not here as it was; a relative "
                "folder is looked for from the current one"
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
    """The loss over the test split of a corpus, or over the validation split where it has none, unless it is there.

    The loss by token frequency comes with it, unless the training split cannot be counted.

    Args:
        corpus: has one of the two.
        stored: what was found before; of the same tokens and with the loss by frequency, it is not evaluated again.
        loss: evaluates a model on the tokens of a split, with the counts of the training split or without.
        on_progress: told when it begins and when it is done.
        on_note: told which split it is, if not the test split, and why there is no loss by frequency.
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
    """How often each token occurs in the training split; None, and a note, where that cannot be said."""
    try:
        return corpus.unigram()
    except (UserError, OSError) as error:
        on_note(f"no loss by token frequency, as the training tokens cannot be counted: {error}")
        return None


def is_done(found: Downstream, task: str, task_data: Path | None) -> bool:
    """Whether a task has its result, on the same documents."""
    return task in found.tasks and found.tasks[task].data == harness.data_hash(task, task_data)


def add_tasks(
    results: ResultsFile,
    tasks: Sequence[str],
    task_data: Path | None,
    model_for: Callable[[str], Any],
    on_progress: OnProgress,
    seconds: dict[str, float] | None = None,
) -> ResultsFile:
    """Evaluate the tasks that are not there, and write the results after each.

    Args:
        results: what is there.
        tasks: names, checked.
        task_data: folder of local files, or None.
        model_for: the model of harness_model.py that answers the requests of a task.
        on_progress: told when a task begins.
        seconds: what each task took elsewhere; None: what it takes here.

    Raises:
        ValueError: for tasks that this model cannot take, when all others are done.
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
