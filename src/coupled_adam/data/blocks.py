"""Split the documents of a source into blocks for the workers. Block boundaries depend only on the source."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from coupled_adam.data.sources import Position, Source
from coupled_adam.data.splitting import Fractions

BLOCK_LENGTH = 2**19
"""Characters (or tokens, for a token source) at which a block is full."""


@dataclass(frozen=True)
class Block:
    """Consecutive pieces of documents."""

    pieces: list[tuple[str, Any, bool]]
    """For each piece: its split, its content, and whether it ends its document."""
    position: Position
    """Position of the source after this block."""
    open_split: str | None
    """Split of the document that continues in the next block; None if the block ends a document."""
    progress: float | None
    """Fraction of the source read so far."""


def read_blocks(
    source: Source, fractions: Fractions, position: Position | None = None, open_split: str | None = None
) -> Iterator[Block]:
    """Yield all blocks of a source, or those after the block with this position and open split."""
    pieces: list[tuple[str, Any, bool]] = []
    length = 0
    split = open_split
    for piece in source.pieces(position):
        content = valid_text(piece.content) if isinstance(piece.content, str) else piece.content
        if split is None:  # start of a document
            split = piece.split or fractions.split_of(_content_bytes(content))
        pieces.append((split, content, piece.ends_document))
        length += len(content) + 1
        if piece.ends_document:
            split = None
        if length >= BLOCK_LENGTH:
            yield Block(pieces, source.position(), split, source.progress())
            pieces, length = [], 0
    if pieces:
        yield Block(pieces, source.position(), split, source.progress())


def valid_text(text: str) -> str:
    r"""Replace lone surrogates, which JSON may contain, so that the text can be encoded as UTF-8.

    Example:
        >>> valid_text("a\ud83d\ude00b\ud800c")
        'a😀b�c'
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _content_bytes(content: Any) -> bytes:
    return content.encode() if isinstance(content, str) else np.asarray(content, "<u4").tobytes()
