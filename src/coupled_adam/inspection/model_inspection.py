"""Measure a PATH: read its tables, the token counts and the word pairs.

Legend: V vocabulary rows, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import read_toml, user_path
from coupled_adam.config.builtin_files import CONFIG_FILE
from coupled_adam.embeddings import (
    EmbeddingMetrics,
    WordPairs,
    count_unigram,
    load_unigram,
    measure,
    open_tokenizer,
)
from coupled_adam.embeddings.download import word_pairs_of
from coupled_adam.inspection.folders import TOKENIZER
from coupled_adam.inspection.model_tables import Model, Role, read_model
from coupled_adam.inspection.quantising import QuantisationError, errors_json, quantisation_errors
from coupled_adam.inspection.sampling import Sample, draw_sample
from coupled_adam.metrics import NEED_WORDS

COUNTS = "unigram.npy"  # in a corpus that `coupled-adam data prepare` made
COUNTS_NEEDED = "needs token counts: --unigram FILE"
WORDS_NEEDED = "needs word pairs with human scores: --wordsim DIR"
TOKENIZER_NEEDED = "needs the model's tokenizer: --tokenizer SPEC"
UNDEFINED = "not defined for this table"
FEW_PAIRS = "a benchmark is missing, or too few of its words are single tokens"

Counts = NDArray[np.int64]  # (V,)
OnProgress = Callable[[str, float], None]
"""Called with the name of the measurement and its progress in [0, 1]."""


@dataclass(frozen=True)
class Request:
    """What to measure for every PATH."""

    tensor: str | None = None
    """The only table to measure; None for the input and output tables."""
    unigram: Path | None = None
    """Token counts (.npy), or token shards to count."""
    wordsim: str | None = None
    """A folder of word pairs with human scores, or "download"."""
    tokenizer: str | None = None
    """For all models; None for each model's own."""
    device: str | None = None
    pictures: bool = False
    """Also sample every table for figures."""
    vocabulary_size: int | None = None
    """Later rows of the tables are padding; None to use the files' own value."""
    quantise: Sequence[str] = ()
    """Integer types ("int8", "int4") to quantise the tables to, for the error."""


@dataclass(frozen=True)
class MeasuredTable:
    """One table and its measures."""

    name: str
    role: Role
    metrics: EmbeddingMetrics
    missing: Mapping[str, str]
    """Reasons by measure why it may be missing."""
    counts: Counts | None
    sample: Sample | None
    quantised: Sequence[QuantisationError] = ()
    """Empty if not requested."""


@dataclass(frozen=True)
class MeasuredModel:
    """The tables of one PATH."""

    path: str
    tied: bool
    tables: Sequence[MeasuredTable]


def inspect_models(paths: Sequence[str], request: Request, progress: OnProgress) -> list[MeasuredModel]:
    """Measure the tables of every PATH in turn, with only one in memory."""
    _require_device(request.device)
    word_pairs = None if request.wordsim is None else word_pairs_of(request.wordsim, "pass --wordsim DIR")

    read_counts = cache(_read_counts)
    models = []
    for path in paths:
        counts_of = partial(read_counts, request.unigram or _beside_tokens_of_run(Path(path), COUNTS))
        model = read_model(path, request.tensor)
        tables = [replace(table, matrix=table.matrix[: request.vocabulary_size]) for table in model.tables]
        models.append(_measure_model(replace(model, tables=tables), request, word_pairs, counts_of, progress))
    return models


def json_object(models: Sequence[MeasuredModel]) -> dict[str, object]:
    """The measures as one JSON object; missing ones are null."""
    return {
        "models": [
            {
                "path": model.path,
                "tied": model.tied,
                "tables": [
                    {"name": table.name, "role": table.role, **table.metrics.to_dict(), **_quantised_json(table)}
                    for table in model.tables
                ],
            }
            for model in models
        ]
    }


def _quantised_json(table: MeasuredTable) -> dict[str, object]:
    return {"quantised": errors_json(table.quantised)} if table.quantised else {}


def _measure_model(
    model: Model,
    request: Request,
    word_pairs: Mapping[str, WordPairs] | None,
    counts_of: Callable[[int], Counts | None],
    progress: OnProgress,
) -> MeasuredModel:
    specification = request.tokenizer
    if word_pairs and specification is None:
        if model.tokenizer is not None:
            specification = model.tokenizer()
        elif of_run := _beside_tokens_of_run(Path(model.path), TOKENIZER):
            specification = str(of_run)
    tokenizer = open_tokenizer(specification) if word_pairs and specification else None
    tables = []
    for table in model.tables:
        counts = counts_of(table.matrix.shape[0])
        try:
            metrics = measure(
                table.matrix,
                unigram=counts,
                tokenizer=tokenizer,
                word_pairs=word_pairs if tokenizer else None,
                device=request.device,
                progress=partial(progress, f"{model.path} {table.name}"),
            )
        except ValueError as error:
            raise UserError(f"{model.path}: tensor {table.name!r}: {error}") from None
        missing = {
            **dict.fromkeys(("rho", "rho_log"), COUNTS_NEEDED if counts is None else UNDEFINED),
            **dict.fromkeys(
                NEED_WORDS,
                FEW_PAIRS if tokenizer else TOKENIZER_NEEDED if word_pairs else WORDS_NEEDED,
            ),
        }
        sample = draw_sample(table.matrix) if request.pictures else None
        quantised = []
        if request.quantise:
            on_rows = partial(progress, f"{model.path} {table.name}, quantised")
            quantised = quantisation_errors(table.matrix, request.quantise, on_rows)
        tables.append(MeasuredTable(table.name, table.role, metrics, missing, counts, sample, quantised))
    return MeasuredModel(model.path, model.tied, tables)


def _beside_tokens_of_run(folder: Path, name: str) -> Path | None:
    """A file of the corpus that a run was trained on, if the corpus is still in the folder of the run's config."""
    try:
        config = read_toml(folder / CONFIG_FILE)
        path = user_path(config["data"]["folder"]) / name
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if path.is_file() else None


def _read_counts(unigram: Path | None, rows: int) -> Counts | None:
    if unigram is None:
        return None
    if (unigram / COUNTS).is_file():  # a prepared corpus: counts of the training split only
        unigram = unigram / COUNTS
    return load_unigram(unigram, rows) if unigram.suffix == ".npy" else count_unigram([unigram], rows)


def _require_device(device: str | None) -> None:
    try:
        torch.zeros(1, device=device or "cpu").item()
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).split("\n", maxsplit=1)[0]
        raise UserError(f"device {device!r} cannot be used: {reason}") from None
