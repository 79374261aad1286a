"""Validation loss and embedding measures of a model during training.

Every rank must call the same measure at the same step. Letters: V vocabulary rows, H width, B samples, T context.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coupled_adam.config.run_config import Config
from coupled_adam.data.batches import Batches
from coupled_adam.data.corpus import Corpus
from coupled_adam.embeddings.download import word_pairs_of
from coupled_adam.embeddings.unigram import Counts
from coupled_adam.training.embedding_monitor import full_measures, light_measures
from coupled_adam.training.parallel import Ranks
from coupled_adam.training.rank_batches import RankBatches
from coupled_adam.training.run_tokens import word_tokenizer

VALIDATION_SEED = 0  # the same windows for every run, so that runs can be compared


@dataclass(frozen=True)
class Measures:
    """Measures of a model in its current state."""

    module: nn.Module
    """The module to call, possibly wrapped in DDP."""
    tables: Mapping[str, Tensor]
    """(V, H) by role: input and output, or only output for a tied model."""
    vocabulary_size: int
    """Number of rows before the padding."""
    word_similarity: Mapping[str, Any]
    """`unigram`, `tokenizer` and `word_pairs`, as far as known."""
    validation: RankBatches | None
    validation_batches: int
    ranks: Ranks
    precision: Callable[[], AbstractContextManager[Any]]
    """Autocast, or nothing."""

    @property
    def can_validate(self) -> bool:
        """Whether the corpus has enough validation text."""
        return self.validation is not None

    def light(self) -> dict[str, float | None]:
        """Length of each table's mean embedding, and its ratio to the mean length."""
        values = light_measures(self.tables, self.vocabulary_size)
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))

    def full(self) -> dict[str, float | None]:
        """All measures of each table; empty on ranks other than the first."""
        return full_measures(self.tables, self.vocabulary_size, **self.word_similarity)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over windows of the validation text, shuffled by VALIDATION_SEED; always the same windows."""
        assert self.validation is not None
        total = torch.zeros((), device=self.ranks.device)
        for step in range(self.validation_batches):
            for tokens, targets in self.validation.micro_batches(step):
                with self.precision():
                    total += self.module(tokens, targets)
        micro_batches = self.validation_batches * (self.validation.share // self.validation.micro_batch_size)
        return float(self.ranks.mean(total / micro_batches))


def build_measures(
    config: Config,
    corpus: Corpus,
    unigram: Counts | None,
    ranks: Ranks,
    module: nn.Module,
    model: nn.Module,
    precision: Callable[[], AbstractContextManager[Any]],
) -> Measures:
    """Build the measures configured in the section [log].

    Args:
        config: the config of the run.
        corpus: its training data.
        unigram: token counts of the corpus; needed only on the first rank.
        ranks, module, model, precision: of the run.
    """
    names = {"output": model.output_table_name, "input": model.input_table_name}
    if names["output"] == names["input"]:
        del names["input"]
    validation, batches = validation_batches(config, corpus, ranks)
    return Measures(
        module=module,
        # Looked up once: after a validation, FSDP2 shows gathered weights under these names until the next step.
        tables={role: model.get_parameter(str(name)) for role, name in names.items()},
        vocabulary_size=min(corpus.vocabulary_size, config.rows),
        word_similarity=ranks.first_does(lambda: _word_similarity(config, corpus, unigram)) or {},
        validation=validation,
        validation_batches=batches,
        ranks=ranks,
        precision=precision,
    )


def validation_batches(config: Config, corpus: Corpus, ranks: Ranks) -> tuple[RankBatches | None, int]:
    """Batches of the validation text and their number; each window is used at most once."""
    if "val" not in corpus.splits:
        return None, 0
    tokens, context = corpus.tokens("val"), config.model.context
    windows = (len(tokens) - 1) // context
    batch_size, micro_batch_size = config.training.batch_size, config.micro_batch_size(ranks.size)
    if windows < batch_size:  # a single smaller batch, with micro-batches no larger than in training
        micro_batch_size = min(micro_batch_size, windows // ranks.size)
        at_once = micro_batch_size * ranks.size
        batch_size = windows // at_once * at_once if at_once else 0
    if batch_size == 0:
        return None, 0
    batches = Batches(tokens, context, batch_size, VALIDATION_SEED, "epochs")
    return RankBatches(batches, ranks, micro_batch_size), min(config.log.val_batches, windows // batch_size)


def _word_similarity(config: Config, corpus: Corpus, unigram: Counts | None) -> dict[str, Any]:
    known: dict[str, Any] = {"unigram": unigram}
    if config.log.wordsim is not None:
        tokenizer = word_tokenizer(corpus, "log.wordsim")
        word_pairs = word_pairs_of(config.log.wordsim, "set log.wordsim to it")
        known |= {"tokenizer": tokenizer, "word_pairs": word_pairs}
    return known
