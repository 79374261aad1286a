"""Functions that the worker processes run: encode pieces of text as tokens, by split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coupled_adam.base.errors import UserError
from coupled_adam.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """Tokens of one split."""

    tokens: npt.NDArray[Any]  # of the shards' dtype
    documents: int
    """Number of documents that end in these tokens."""


Pieces = Sequence[tuple[str, Any, bool]]
"""For each piece: its split, its content (text or tokens), and whether it ends its document."""


def encoder(tokenizer: Tokenizer) -> Callable[[Pieces], dict[str, Encoded]]:
    """Make the function that encodes pieces of text as tokens by split, with a separator after each document."""

    def run(pieces: Pieces) -> dict[str, Encoded]:
        found = tokenizer.encode_documents([content for _, content, _ in pieces])
        return joined(
            [(split, tokens, ends) for (split, _, ends), tokens in zip(pieces, found, strict=True)], tokenizer
        )

    return run


def packer(tokenizer: Tokenizer) -> Callable[[Pieces], dict[str, Encoded]]:
    """Make the same function for pieces that are already tokens."""
    return lambda pieces: joined(pieces, tokenizer)


def joined(pieces: Pieces, tokenizer: Tokenizer) -> dict[str, Encoded]:
    """Join the tokens of pieces into one array per split, with a separator after each document."""
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    documents: dict[str, int] = {}
    assert tokenizer.separator is not None, "prepare refuses tokenizers without one"
    separator = np.array([tokenizer.separator], np.uint32)
    for split, content, ends in pieces:
        tokens = np.asarray(content, np.uint32)
        if len(tokens) and tokens.max() >= tokenizer.size:
            raise UserError(
                f"the source contains token {tokens.max()}, but the tokenizer {tokenizer.name} has only "
                f"{tokenizer.size} tokens; name the tokenizer of these tokens with --tokenizer"
            )
        parts.setdefault(split, []).extend([tokens, separator] if ends else [tokens])
        documents[split] = documents.get(split, 0) + ends
    kind = np.dtype(tokenizer.dtype).newbyteorder("<")
    return {split: Encoded(np.concatenate(arrays).astype(kind), documents[split]) for split, arrays in parts.items()}
