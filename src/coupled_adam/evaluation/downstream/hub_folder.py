"""Evaluate any Hugging Face folder with lm-eval's own model class.

Letters: B windows of a batch, T context, V vocabulary rows.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import require
from coupled_adam.base.files import file_hash, read_json
from coupled_adam.data.corpus import open_known_corpus
from coupled_adam.data.tokens import Tokens
from coupled_adam.evaluation.downstream import harness
from coupled_adam.evaluation.downstream.evaluate import (
    OnNote,
    OnProgress,
    ResultsFile,
    add_tasks,
    environment,
    is_done,
    loss_of_split,
)
from coupled_adam.evaluation.downstream.harness_model import LOGIT_BYTES, hugging_face_model
from coupled_adam.evaluation.downstream.scoring import Precision, default_precision
from coupled_adam.evaluation.downstream.task_results import Downstream, LossResult, Subject, file_name
from coupled_adam.evaluation.held_out_loss import IGNORED, SplitLoss, loss_over
from coupled_adam.evaluation.loss_by_frequency import Counts
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.training.devices import pick_device

CONFIG = "config.json"
WEIGHTS = ("*.safetensors", "*.bin")
# Tokenizer files that transformers can open.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def is_hugging_face_folder(path: Path) -> bool:
    """Whether a folder holds a model in the format of `transformers`."""
    return (path / CONFIG).is_file()


def evaluate_folder(
    folder: Path,
    *,
    tasks: Sequence[str],
    task_data: Path | None = None,
    limit: int | None = None,
    device: str | None = None,
    precision: Precision | None = None,
    data: Path | None = None,
    fresh: bool = False,
    out: Path | None = None,
    on_progress: OnProgress = lambda *_: None,
    on_note: OnNote = lambda _: None,
) -> Downstream:
    """Evaluate a Hugging Face folder and store the results in it.

    Args:
        folder: with config.json, the weights and the tokenizer.
        data: a corpus prepared with this model's tokenizer, for the loss; None for no loss.
        tasks, task_data, limit, device, precision, fresh, out, on_progress, on_note: as in `evaluate_run`.
    """
    require("transformers", "eval", f"to open {folder}")
    if tasks:
        harness.check_tasks(tasks, task_data)
    _check_folder(folder)
    where = pick_device(device or "auto")
    kind = precision or default_precision(where)
    tokenizer = _tokenizer_hash(folder)
    version = harness.lm_eval_version()
    subject = Subject(folder.resolve().name, weights_hash(folder), None, kind, tokenizer, version, limit)
    path = out or folder / file_name(None, limit)
    results = ResultsFile.open(path, subject, environment(where), fresh=fresh, tasks=tasks, on_note=on_note)
    left = [name for name in tasks if not is_done(results.found, name, task_data)]
    if not left and data is None:
        return results.found  # without loading the model
    current = ""

    def on_requests(count: int, total: int) -> None:
        on_progress(current, count, total)

    try:
        with harness.quiet():
            model = hugging_face_model(folder, device=where.type, precision=kind, on_requests=on_requests)
    except Exception as error:  # transformers, tokenizers and safetensors have no common base class
        raise UserError(f"{folder}: transformers cannot open it ({error}); copy or export the model again") from error
    _check_vocabulary(folder, model)
    if data is not None:
        stored = None if fresh else results.found.loss
        results = results.with_loss(_loss(stored, model, data, on_progress, on_note))

    def model_for(task: str) -> Any:
        nonlocal current
        current = task
        return model

    return add_tasks(results, tasks, task_data, model_for, on_progress).found


def weights_hash(folder: Path) -> str:
    """Hash of the config and all weights of a folder."""
    files = [folder / CONFIG, *sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))]
    return hashlib.sha256(repr([(path.name, file_hash(path)) for path in files]).encode()).hexdigest()


class LossModel(nn.Module):
    """Adapts a `transformers` model to the calls that `loss_over` makes."""

    def __init__(self, model: nn.Module, context: int) -> None:
        super().__init__()
        self.model = model
        self.config = SimpleNamespace(context=context)

    def logit_chunks(self, tokens: Tensor) -> Iterator[Tensor]:  # (B, T) -> (B * T, V), once
        yield self.model(input_ids=tokens).logits.flatten(0, 1)

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str) -> Tensor:  # (B, T), (B, T) -> (B, T)
        (logits,) = self.logit_chunks(tokens)
        losses = F.cross_entropy(logits.float(), targets.flatten(), ignore_index=IGNORED, reduction=reduction)
        return losses.view_as(targets)


def _loss(stored: LossResult | None, model: Any, data: Path, on_progress: OnProgress, on_note: OnNote) -> LossResult:
    """Loss over the test split of a corpus, unless already known."""
    corpus = open_known_corpus(data)
    for note in corpus.notes:
        on_note(note)
    rows, size = model.model.config.vocab_size, len(model.tokenizer)
    if corpus.vocabulary_size > rows or corpus.vocabulary_size != size:
        raise UserError(
            f"--data: {data} has a vocabulary of {corpus.vocabulary_size}, but the model's tokenizer has {size}: "
            "the vocabulary does not match; prepare the text with the model's tokenizer"
        )
    T = model.max_length
    windows = max(1, LOGIT_BYTES[model.device.type] // (4 * rows * T))
    loss_model = cast(LanguageModel, LossModel(model.model, T))

    def loss(tokens: Tokens, counts: Counts | None) -> SplitLoss:
        # The weights already have the precision, so autocast is not needed.
        return loss_over(loss_model, tokens, training_counts=counts, bf16=False, windows_at_once=windows)

    return loss_of_split(corpus, stored, loss, on_progress, on_note)


def _check_folder(folder: Path) -> None:
    try:
        read_json(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot read {CONFIG} ({error}); copy the model again") from None
    if not any(path.is_file() for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise UserError(f"{folder}: weights are missing ({' or '.join(WEIGHTS)}); copy the model again")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(
            f"{folder}: the tokenizer is missing ({TOKENIZERS[0]}), and the tasks need one; export the run again with "
            "--tokenizer, or save it there with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )


def _tokenizer_hash(folder: Path) -> str:
    """Hash of tokenizer.json if there is one, which equals that of the exported run; otherwise of another file."""
    files = [folder / name for name in TOKENIZERS if (folder / name).is_file()]
    return file_hash(files[0])


def _check_vocabulary(folder: Path, model: Any) -> None:
    size, rows = len(model.tokenizer), model.model.config.vocab_size
    if size > rows:
        raise UserError(
            f"{folder}: its tokenizer has {size} tokens, but its table has {rows} rows: the vocabulary does not match; "
            "replace the tokenizer with the one that this model was trained with"
        )
