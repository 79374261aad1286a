"""Tokens of one split: memory-mapped shards as one sequence.

Legend: N tokens of the split, n windows, length tokens of one window.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coupled_adam.base.errors import UserError

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class Tokens:
    """A sequence of tokens in files, read on demand.

    Args:
        paths: the shards in order, none of them empty; headerless, little-endian.
        dtype: dtype of every shard, such as "uint16".
        vocabulary_size: V; reading a token of V or more is an error.
        name: name of the split in messages.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.arange(5, dtype="<u2").tofile(folder / "a.bin")
        >>> np.arange(5, 9, dtype="<u2").tofile(folder / "b.bin")
        >>> tokens = Tokens([folder / "a.bin", folder / "b.bin"], "uint16", vocabulary_size=10, name="train")
        >>> len(tokens), tokens.read(3, 4).tolist()
        (9, [3, 4, 5, 6])
    """

    def __init__(self, paths: Sequence[Path], dtype: str, vocabulary_size: int, name: str) -> None:
        self.paths = list(paths)
        self.dtype = dtype
        self.vocabulary_size = vocabulary_size
        self.name = name
        kind = np.dtype(dtype).newbyteorder("<")
        # Plain arrays over the maps: slicing an np.memmap costs microseconds of bookkeeping.
        self._shards: list[Array] = [np.asarray(np.memmap(path, kind, mode="r")) for path in self.paths]
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)  # (shards,)
        self._begins = self._ends - np.array([len(shard) for shard in self._shards], np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __reduce__(self) -> tuple[type["Tokens"], tuple[list[Path], str, int, str]]:
        # Send only the paths to another process, not all the tokens.
        return Tokens, (self.paths, self.dtype, self.vocabulary_size, self.name)

    def read(self, start: int, length: int) -> Int64:
        """The tokens start .. start + length - 1."""
        if start < 0 or length < 0 or start + length > len(self):
            raise UserError(
                f"{self.name}: tokens {start} to {start + length} were requested, but it has {len(self)} tokens"
            )
        return self._checked(self._across_shards(start, length))

    def windows(self, starts: Int64, length: int) -> Int64:
        """Read many windows of equal length.

        Args:
            starts: (n,) position of each window's first token.
            length: tokens per window.

        Returns:
            (n, length).
        """
        if len(starts) == 0:
            return np.empty((0, length), np.int64)
        if starts.min() < 0 or starts.max() + length > len(self):
            raise UserError(
                f"{self.name}: windows of {length} tokens that start at {starts.min()} to {starts.max()} were "
                f"requested, but it has {len(self)} tokens"
            )
        found = np.empty((len(starts), length), np.int64)
        shards = np.searchsorted(self._ends, starts, side="right")  # (n,) shard of each first token
        begins = starts - self._begins[shards]  # (n,) in that shard
        # One slice and one copy per window: as fast as numpy's indexing for one shard, and with many shards far faster
        # than sorting the windows by shard.
        for row, (shard, begin) in enumerate(zip(shards.tolist(), begins.tolist(), strict=True)):
            part = self._shards[shard][begin : begin + length]
            if len(part) == length:
                found[row] = part
            else:
                found[row] = self._across_shards(int(starts[row]), length)
        return self._checked(found)

    def _across_shards(self, start: int, length: int) -> Int64:
        found = np.empty(length, np.int64)
        shard = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < length:
            tokens = self._shards[shard]
            begin = start + filled - int(self._begins[shard])
            part = tokens[begin : begin + length - filled]
            found[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return found

    def _checked(self, tokens: Int64) -> Int64:
        # An embedding on a GPU would fail with an obscure assertion much later.
        if tokens.size and (tokens.max() >= self.vocabulary_size or tokens.min() < 0):
            wrong = tokens.max() if tokens.max() >= self.vocabulary_size else tokens.min()
            raise UserError(
                f"{self.name}: contains token {wrong}, but the vocabulary has only {self.vocabulary_size} tokens; the "
                "shards belong to another tokenizer, or their dtype differs from the manifest"
            )
        return tokens
