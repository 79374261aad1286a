"""Summary of a corpus for `data info` and `data count`: sizes, settings and most frequent tokens.

Legend: V tokens of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coupled_adam.base.errors import UserError
from coupled_adam.data.corpus import Corpus
from coupled_adam.tokenizer import open_tokenizer

MOST_FREQUENT = 10


@dataclass(frozen=True)
class FrequentToken:
    """A token and its count."""

    token: int
    text: str | None
    """Printable text of the token; None if the tokenizer cannot be opened."""
    count: int


def describe(corpus: Corpus) -> dict[str, Any]:
    """Summarize a corpus as JSON values."""
    manifest = corpus.manifest
    return {
        "folder": str(corpus.folder),
        "source": manifest.source,
        "tokenizer": corpus.tokenizer,
        "vocabulary_size": corpus.vocabulary_size,
        "dtype": manifest.dtype,
        "separator": manifest.separator,
        "fingerprint": corpus.fingerprint,
        "splits": {
            name: {
                "tokens": split.tokens,
                "documents": split.documents,
                "shards": len(split.shards),
                "bytes": split.tokens * np.dtype(manifest.dtype).itemsize,
            }
            for name, split in manifest.splits.items()
        },
        "most_frequent": [vars(token) for token in most_frequent(corpus.unigram(), corpus.tokenizer_spec)],
    }


def most_frequent(counts: npt.NDArray[np.int64], tokenizer: str | Path | None) -> list[FrequentToken]:
    """The tokens with the highest counts, in descending order.

    Args:
        counts: (V,).
        tokenizer: a tokenizer.json, or a tiktoken name; None if unknown.
    """
    # The lower number wins a tie; tokens with count 0 are left out.
    tokens = [int(token) for token in np.argsort(-counts, kind="stable")[:MOST_FREQUENT] if counts[token]]
    texts = shown(tokens, tokenizer)
    return [FrequentToken(token, text, int(counts[token])) for token, text in zip(tokens, texts, strict=True)]


def shown(tokens: Sequence[int], tokenizer: str | Path | None) -> Sequence[str | None]:
    """Printable texts of tokens; None for each if the tokenizer cannot be opened."""
    if tokenizer is None:
        return [None] * len(tokens)
    try:
        return open_tokenizer(tokenizer).printable_tokens(tokens)
    except (UserError, OSError):
        return [None] * len(tokens)


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy of the counts in nats: the loss of a model that knows only the token frequencies.

    Example:
        >>> round(entropy(np.array([1, 1, 0, 2])), 4)  # 1.5 bits
        1.0397
    """
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
