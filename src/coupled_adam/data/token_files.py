"""`tokens:` files: .bin as written by nanoGPT, and .u16.xz, both headerless and little-endian.

A document ends at the separator. Files with train, val or test in their names keep their split; if no file has, the
documents are split by hash.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from coupled_adam.base.errors import UserError
from coupled_adam.data.source_files import Files, matching_files
from coupled_adam.data.sources import Piece
from coupled_adam.embeddings.unigram import shard_dtype

SUFFIXES = [".bin", ".u16.xz"]
SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
TOKENS_AT_ONCE = 2**20


class TokenFiles(Files):
    """Documents of the token files that match a pattern, sorted by name."""

    def __init__(self, pattern: str, separator: int) -> None:
        super().__init__(matching_files(pattern, SUFFIXES))
        self.separator = separator
        self.keeps_splits = any(split_of_name(file) for file in self.files)

    def default_fraction(self) -> float:
        return 0.0 if self.keeps_splits else super().default_fraction()

    def pieces_of_file(self, path: Path, content: BinaryIO) -> Iterator[Piece]:
        split = (split_of_name(path) or "train") if self.keeps_splits else None
        kind = np.dtype("uint16" if path.name.endswith(".u16.xz") else shard_dtype(path)).newbyteorder("<")
        rest = np.empty(0, kind)  # tokens of an unfinished document
        is_continued = False
        while data := content.read(TOKENS_AT_ONCE * kind.itemsize):
            if len(data) % kind.itemsize:
                raise UserError(f"{path}: its length is not a multiple of {kind.itemsize} bytes ({kind.name} tokens)")
            tokens = np.concatenate([rest, np.frombuffer(data, kind)])
            start = 0
            for end in np.flatnonzero(tokens == self.separator).tolist():
                if end > start or is_continued:
                    yield Piece(tokens[start:end], split=split)
                start, is_continued = end + 1, False
            rest = tokens[start:]
            if len(rest) >= TOKENS_AT_ONCE:
                yield Piece(rest, ends_document=False, split=split)
                rest, is_continued = rest[:0], True
        if len(rest) or is_continued:
            yield Piece(rest, split=split)


def split_of_name(path: Path) -> str | None:
    """The split named in a file name.

    Example:
        >>> [split_of_name(Path(name)) for name in ("val.bin", "wiki_train56M.u16.xz", "latest.bin")]
        ['val', 'train', None]
    """
    words = re.findall("[a-z]+", path.name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)
