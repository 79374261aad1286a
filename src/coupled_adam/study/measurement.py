"""Measurements of a trained run: its test loss, its embeddings, the end of its curves, and on request downstream tasks
and the theory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coupled_adam.base.files import user_path
from coupled_adam.config.run_config import Config
from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.data.corpus import open_known_corpus
from coupled_adam.embeddings import EmbeddingMetrics, measure
from coupled_adam.evaluation.held_out_loss import SplitLoss, loss_over, pick_split
from coupled_adam.evaluation.loss_by_frequency import Counts, FrequencyBin
from coupled_adam.evaluation.quantised_loss import quantised_losses
from coupled_adam.evaluation.weights import load_run
from coupled_adam.metrics import (
    BIN_CALIBRATION,
    BIN_LOSS,
    BIN_TARGETS,
    BIN_TOKENS,
    INPUT_PREFIX,
    NEED_WORDS,
    QUANTISED_LOSSES,
    TABLE_METRICS,
    bin_key,
)
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.study.embedding_arrays import initial_tables, table_arrays, write_arrays
from coupled_adam.study.folder import expected_measures
from coupled_adam.study.results import Result
from coupled_adam.study.task_evaluation import measure_tasks
from coupled_adam.study.theory_evaluation import measure_theory
from coupled_adam.study.words import words_of
from coupled_adam.training.devices import pick_device
from coupled_adam.training.logbook import METRICS_FILE, read_metrics

# The training loss is the mean over this last fraction of the steps.
LAST_PART = 0.05

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class Measured:
    """Measurements of a run."""

    metrics: Metrics
    tokens_per_second: float | None
    """Training throughput."""
    loss_split: str
    """Split of the loss."""
    notes: list[str]
    """Notes for the user."""


def measure_run(run_folder: Path, evaluation: EvaluationSection, before: Result | None = None) -> Measured:
    """Measure a finished run and write its embeddings.npz.

    The slow measurements, tasks and theory, come first: they keep partial results, so a kill loses little.

    Args:
        run_folder: with the checkpoint of the last step.
        evaluation: what to measure.
        before: an earlier result of the run; its metrics are not measured again.
    """
    release_memory()  # this process may have trained the run
    curves, tokens_per_second = from_curves(run_folder)
    metrics: Metrics = {**(before.metrics if before else {}), **curves}
    split, notes = before.loss_split if before else "test", []
    if evaluation.tasks:
        found, said = measure_tasks(run_folder, evaluation)
        metrics |= found
        notes += said
        release_memory()
    if evaluation.theory:
        found, said = measure_theory(run_folder, evaluation)
        metrics |= found
        notes += said
        release_memory()
    needs_loss = evaluation.test_loss and "loss" not in metrics
    asks_for_bins = needs_loss if evaluation.loss_by_frequency is None else evaluation.loss_by_frequency
    needs_bins = asks_for_bins and bin_key(BIN_LOSS, 1) not in metrics
    needs_quantised = evaluation.quantised_loss and QUANTISED_LOSSES[0].key not in metrics
    needs_measures = not expected_measures(evaluation) <= metrics.keys()
    if needs_loss or needs_bins or needs_quantised or needs_measures:
        model, config, corpus = load_run(run_folder)
        corpus = corpus or open_known_corpus(user_path(config.data.folder))
        model.to(pick_device(config.training.device))
        counts = corpus.unigram() if needs_bins or needs_measures else None
        if needs_loss or needs_bins or needs_quantised:
            split, note = pick_split(corpus)
            notes += [note] if note else []
            tokens, bf16 = corpus.tokens(split), is_in_bf16(model, config)
            if needs_loss or needs_bins:
                found_loss = loss_over(model, tokens, training_counts=counts if needs_bins else None, bf16=bf16)
                metrics |= loss_metrics(found_loss) if needs_loss else {}
                metrics |= bin_metrics(found_loss.by_frequency or ())
            metrics |= quantised_losses(model, tokens, bf16=bf16) if needs_quantised else {}
        if needs_measures:
            assert counts is not None
            metrics |= measure_tables(run_folder, model, config, counts, words_of(corpus, evaluation.wordsim))
    return Measured(metrics, tokens_per_second, split, notes)


def is_in_bf16(model: LanguageModel, config: Config) -> bool:
    """Whether to measure the loss in bfloat16, the precision of the training."""
    precision = config.training.precision
    return precision == "bf16" or (next(model.parameters()).is_cuda and precision == "auto")


def loss_metrics(found: SplitLoss) -> Metrics:
    """The loss, by its keys in a result."""
    return {"loss": found.loss, "loss_standard_error": found.standard_error}


def bin_metrics(bins: Sequence[FrequencyBin]) -> Metrics:
    """The loss by token frequency, by its keys in a result; None for a bin without targets."""
    metrics: Metrics = {}
    for number, each in enumerate(bins, 1):
        metrics[bin_key(BIN_LOSS, number)] = each.loss
        metrics[bin_key(BIN_CALIBRATION, number)] = each.calibration
        metrics[bin_key(BIN_TOKENS, number)] = each.tokens
        metrics[bin_key(BIN_TARGETS, number)] = each.targets
    return metrics


def from_curves(run_folder: Path) -> tuple[Metrics, float | None]:
    """Final losses and the throughput, from metrics.jsonl."""
    rows = read_metrics(run_folder / METRICS_FILE)
    train = [row for row in rows if row["kind"] == "train"]
    val = [row for row in rows if row["kind"] == "val"]
    last_step = train[-1]["step"] if train else 0
    last = [row["loss"] for row in train if row["step"] > (1 - LAST_PART) * last_step and row.get("loss") is not None]
    metrics: Metrics = {"train_loss": sum(last) / len(last) if last else None}
    if val:
        metrics["val_loss"] = val[-1].get("loss")
    rates = sorted(row["tokens_per_second"] for row in train if row.get("tokens_per_second"))
    return metrics, rates[len(rates) // 2] if rates else None


def measure_tables(
    run_folder: Path, model: LanguageModel, config: Config, counts: Counts, words: dict[str, Any]
) -> Metrics:
    """Measure the output table and, with the prefix `input_`, an untied input table.

    Args:
        run_folder: where to write the arrays for the figures.
        model: trained.
        config: of the run.
        counts: (V,) token counts of the training split.
        words: word pairs and tokenizer, for `measure`.
    """
    V = min(len(counts), config.rows)
    start = initial_tables(config.to_model_config(), config.seed)
    roles = {"": model.output_table_name}
    if model.input_table_name != model.output_table_name:
        roles[INPUT_PREFIX] = model.input_table_name
    metrics: Metrics = {}
    arrays: dict[str, Any] = {}
    for prefix, name in roles.items():
        table = model.get_parameter(name).detach()[:V]  # (V, H)
        record = measure(table, unigram=counts, **words)
        metrics |= {f"{prefix}{key}": value for key, value in numbers(record).items()}
        of_table = table_arrays(table, start[name][:V], record, counts)
        arrays |= {f"{prefix}{key}": value for key, value in of_table.items()}
    write_arrays(run_folder, arrays)
    return metrics


def numbers(record: EmbeddingMetrics) -> Metrics:
    """Metrics of a table; without word pairs, those that need them are omitted."""
    left_out = () if record.word_similarity else NEED_WORDS
    return {metric.key: getattr(record, metric.key) for metric in TABLE_METRICS if metric.key not in left_out}


def release_memory() -> None:
    """Free memory between two runs in one process."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # Each model is a recompilation of the same code; torch.compile gives up after eight.
        torch._dynamo.reset()
