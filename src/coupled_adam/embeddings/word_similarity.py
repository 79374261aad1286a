"""Correlation of embedding cosines with human judgements of word similarity.

A pair of words is used if both are single tokens and neither row is zero.

Legend: V vocabulary rows, H hidden size, w distinct words, m usable pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from coupled_adam.base.errors import UserError
from coupled_adam.embeddings.correlation import pearson, spearman
from coupled_adam.embeddings.embedding_matrix import EmbeddingMatrix
from coupled_adam.embeddings.word_pairs import (
    MEN,
    RW,
    SIMLEX,
    WORDSIM,
    WORDSIM_RELATEDNESS,
    WORDSIM_SIMILARITY,
    WordPairs,
)
from coupled_adam.tokenizer import SingleTokens

R_COS = (SIMLEX, MEN, WORDSIM, RW)
R_COS_5 = (MEN, RW, SIMLEX, WORDSIM_SIMILARITY, WORDSIM_RELATEDNESS)
FEWEST_PAIRS = 3


@dataclass(frozen=True)
class WordSimilarity:
    """Correlation of one benchmark with the cosines of one embedding matrix."""

    pearson: float | None
    """100 times Pearson's correlation of cosine and human score; None below three usable pairs."""
    spearman: float | None
    """100 times Spearman's rank correlation."""
    pairs_used: int
    """Number of pairs in which both words are single tokens with a non-zero embedding."""
    pairs_total: int
    """Number of pairs in the benchmark."""


def similarity_of(
    table: EmbeddingMatrix, tokenizer: SingleTokens, word_pairs: Mapping[str, WordPairs]
) -> dict[str, WordSimilarity]:
    """Compute the correlations of every benchmark, by name."""
    words = {word for benchmark in word_pairs.values() for pair in benchmark.pairs for word in pair}
    ids = {word: token for word in sorted(words) if (token := tokenizer.token_id(word)) is not None}
    for word, token in ids.items():
        if not 0 <= token < table.V:
            raise UserError(
                f"tokenizer: {word!r} is token {token}, but the table has {table.V} rows; "
                "pass the tokenizer this table was trained with"
            )
    distinct = np.unique(np.fromiter(ids.values(), np.int64, len(ids)))
    directions = torch.nn.functional.normalize(
        table.rows(distinct).double(), dim=1, eps=0.0
    )  # (w, H), NaN for zero rows
    position = dict(zip(distinct.tolist(), range(len(distinct)), strict=True))
    row_of = {word: position[token] for word, token in ids.items()}
    return {name: agreement(benchmark, row_of, directions) for name, benchmark in word_pairs.items()}


def agreement(benchmark: WordPairs, row_of: Mapping[str, int], directions: torch.Tensor) -> WordSimilarity:
    """Correlate the cosines of one benchmark's pairs with the human scores."""
    usable = [i for i, pair in enumerate(benchmark.pairs) if pair[0] in row_of and pair[1] in row_of]
    first = [row_of[benchmark.pairs[i][0]] for i in usable]
    second = [row_of[benchmark.pairs[i][1]] for i in usable]
    # Rounded, so that pairs with the same cosine share a rank regardless of the order of summation.
    cosines = (directions[first] * directions[second]).sum(1).cpu().numpy().round(12)  # (m,)
    scores = np.array([benchmark.scores[i] for i in usable])
    has_direction = np.isfinite(cosines)
    cosines, scores = cosines[has_direction], scores[has_direction]
    enough = len(cosines) >= FEWEST_PAIRS
    return WordSimilarity(
        pearson=percent(pearson(cosines, scores)) if enough else None,
        spearman=percent(spearman(cosines, scores)) if enough else None,
        pairs_used=len(cosines),
        pairs_total=len(benchmark.pairs),
    )


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
