"""Base class of file sources: find files by a pattern and read them in order, decompressed if needed."""

import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import require
from coupled_adam.base.files import user_path
from coupled_adam.data.sources import Piece, Position

COMPRESSED = (".gz", ".xz", ".zst")
READ_AT_ONCE = 2**17
# Below this total size, a larger fraction is held out, so that the losses can be measured.
SMALL_BYTES = 100_000_000


class Files:
    """A source of files; subclasses define how to read one file."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._sizes = [file.stat().st_size for file in self.files]
        self._file = self._piece = self._bytes_of_file = 0

    def found(self) -> dict[str, Any]:
        """Fingerprint of names and sizes, to detect changed files without reading them."""
        names = json.dumps([[file.name, size] for file, size in zip(self.files, self._sizes, strict=True)])
        digest = hashlib.sha256(names.encode()).hexdigest()[:12]
        return {"files": len(self.files), "bytes": sum(self._sizes), "names": digest}

    def default_fraction(self) -> float:
        return 0.05 if sum(self._sizes) < SMALL_BYTES else 0.005

    def pieces(self, position: Position | None) -> Iterator[Piece]:
        first, skipped = (position["file"], position["piece"]) if position else (0, 0)
        for number in range(first, len(self.files)):
            self._file, self._piece, self._bytes_of_file = number, 0, 0
            with reading(self.files[number]) as (content, raw):
                for piece in self.pieces_of_file(self.files[number], content):
                    self._piece += 1
                    self._bytes_of_file = raw.tell()
                    if number > first or self._piece > skipped:
                        yield piece
            self._bytes_of_file = self._sizes[number]  # .parquet files are not read to the last byte

    def pieces_of_file(self, path: Path, content: BinaryIO) -> Iterator[Piece]:
        """Yield the pieces of one file."""
        raise NotImplementedError

    def position(self) -> Position:
        return {"file": self._file, "piece": self._piece}

    def progress(self) -> float | None:
        return (sum(self._sizes[: self._file]) + self._bytes_of_file) / max(sum(self._sizes), 1)


def matching_files(pattern: str, suffixes: Sequence[str]) -> list[Path]:
    """Files that match a path or pattern, sorted by name.

    Args:
        pattern: a file, a folder (all files below it with one of the suffixes) or a glob; `**` matches subfolders.
        suffixes: allowed file name endings.
    """
    path = user_path(pattern)
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.is_file() and file.name.endswith(tuple(suffixes))]
    elif path.is_file():
        found = [path]
    elif has_magic(pattern):
        found = [Path(file) for file in glob(str(path), recursive=True) if Path(file).is_file()]
    else:
        raise UserError(f"{pattern}: no such file or folder; patterns such as 'books/*.txt' also work")
    if not found:
        raise UserError(f"{pattern}: no file matches; expected files that end in {', '.join(suffixes)}")
    for file in found:
        if not file.name.endswith(tuple(suffixes)):
            raise UserError(f"{file}: expected a file that ends in {', '.join(suffixes)}; rename or convert it")
    return sorted(found)


@contextmanager
def reading(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file; yield its decompressed content, and the raw file for measuring progress.

    A damaged file raises a UserError that names it.
    """
    damaged: list[type[Exception]] = [gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError, UnicodeDecodeError]
    with path.open("rb") as raw:
        content: Any = raw
        if path.suffix == ".gz":
            content = gzip.GzipFile(fileobj=raw)
        elif path.suffix == ".xz":
            content = lzma.LZMAFile(raw)  # noqa: SIM115
        elif path.suffix == ".zst":
            zstandard = require("zstandard", "study", f"to read {path}")
            damaged.append(zstandard.ZstdError)
            content = io.BufferedReader(_ZstandardReader(raw, zstandard.ZstdDecompressor()), READ_AT_ONCE)
        try:
            yield content, raw
        except tuple(damaged) as error:
            raise UserError(f"{path}: cannot be read ({error}); it is damaged or truncated, copy it again") from error


class _ZstandardReader(io.RawIOBase):
    """Reader for .zst files that detects truncation; the zstandard package's own reader does not."""

    def __init__(self, raw: BinaryIO, decompressor: Any) -> None:
        self._raw = raw
        self._decompressor = decompressor
        self._frame: Any = None
        self._compressed = b""
        self._content = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._compressed = self._compressed or self._raw.read(READ_AT_ONCE)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._content = self._frame.decompress(self._compressed)
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count
