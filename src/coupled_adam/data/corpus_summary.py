"""What a corpus holds, in numbers and in its most frequent tokens: what `data info` and `data count` show.

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
    """A token and how often it occurs."""

    token: int
    text: str | None
    """As a terminal can show it; None where the tokenizer cannot be opened here."""
    count: int


def describe(corpus: Corpus) -> dict[str, Any]:
    """Everything worth knowing about a corpus, as JSON."""
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
    """The tokens with the highest counts, the highest first.

    Args:
        counts: (V,).
        tokenizer: a tokenizer.json, or a tiktoken name; None where nobody knows it.
    """
    # Of equally frequent ones the first; those that never occur are not among them.
    tokens = [int(token) for token in np.argsort(-counts, kind="stable")[:MOST_FREQUENT] if counts[token]]
    texts = shown(tokens, tokenizer)
    return [FrequentToken(token, text, int(counts[token])) for token, text in zip(tokens, texts, strict=True)]


def shown(tokens: Sequence[int], tokenizer: str | Path | None) -> Sequence[str | None]:
    """The texts of tokens; None for each where the tokenizer needs a package or a network that is not there."""
    if tokenizer is None:
        return [None] * len(tokens)
    try:
        return open_tokenizer(tokenizer).printable_tokens(tokens)
    except (UserError, OSError):
        return [None] * len(tokens)


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """The entropy of the counts in nats: the loss of a model that knows how frequent tokens are, and nothing else.

    Example:
        >>> round(entropy(np.array([1, 1, 0, 2])), 4)  # 1.5 bits
        1.0397
    """
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
