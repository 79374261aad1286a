"""The documents of a source in blocks that the workers take: where a block ends depends on the source alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from coupled_adam.data.sources import Position, Source
from coupled_adam.data.splitting import Fractions

BLOCK_LENGTH = 2**19
"""Characters (or tokens, of a source that has tokens) from which on a block is full."""


@dataclass(frozen=True)
class Block:
    """Some pieces of documents that follow each other."""

    pieces: list[tuple[str, Any, bool]]
    """For each its split, its content, and whether its document ends with it."""
    position: Position
    """Of the source, behind them."""
    open_split: str | None
    """Split of the document that goes on behind them, if one does."""
    progress: float | None
    """The part of the source up to here."""


def read_blocks(
    source: Source, fractions: Fractions, position: Position | None = None, open_split: str | None = None
) -> Iterator[Block]:
    """All blocks of a source, or those after a block whose position and open split are given."""
    pieces: list[tuple[str, Any, bool]] = []
    length = 0
    split = open_split
    for piece in source.pieces(position):
        content = valid_text(piece.content) if isinstance(piece.content, str) else piece.content
        if split is None:  # a document begins
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
    r"""A text that can be written in UTF-8: halves of a pair of surrogates, which JSON may have, are replaced.

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
