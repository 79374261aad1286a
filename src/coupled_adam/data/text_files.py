"""`text:` files: .txt, .jsonl and .parquet, each also as .gz, .xz or .zst.

In a .txt file, a line `<|endoftext|>` separates documents; without such a line, the file is one document. In the other
formats, every line or row is a document.
"""

import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import require
from coupled_adam.base.files import parse_json
from coupled_adam.data.source_files import COMPRESSED, Files, matching_files
from coupled_adam.data.sources import Piece

KINDS = (".txt", ".jsonl", ".parquet")
SUFFIXES = [kind + compression for kind in KINDS for compression in ("", *COMPRESSED)]
SEPARATOR_LINE = "<|endoftext|>"
# Size of a piece of a .txt document. Pieces end at line breaks, where the cut affects the tokens least.
PIECE_CHARACTERS = 2**20
ROWS_AT_ONCE = 1000


class TextFiles(Files):
    """Documents of the text files that match a pattern, sorted by name."""

    def __init__(self, pattern: str, field: str) -> None:
        super().__init__(matching_files(pattern, SUFFIXES))
        self.field = field

    def pieces_of_file(self, path: Path, content: BinaryIO) -> Iterator[Piece]:
        kind = next(suffix for suffix in path.suffixes[-2:] if suffix in KINDS)
        if kind == ".parquet":
            return self._rows(path, content)
        # utf-8-sig drops a byte order mark, as written on Windows.
        lines = io.TextIOWrapper(content, encoding="utf-8-sig")
        return _parts_of_text(lines) if kind == ".txt" else self._lines(path, lines)

    def _lines(self, path: Path, lines: io.TextIOWrapper) -> Iterator[Piece]:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                record = parse_json(line, f"{path}, line {number}")
            except ValueError as error:
                raise UserError(f"{error}; every line must be one object") from None
            if not isinstance(record, dict) or self.field not in record:
                has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise UserError(
                    f"{path}, line {number}: no field {self.field!r} (it has: {has}); name the text field with --field"
                )
            if not isinstance(record[self.field], str):
                raise UserError(f"{path}, line {number}: {self.field!r} is {record[self.field]!r}, expected text")
            if record[self.field]:
                yield Piece(record[self.field])

    def _rows(self, path: Path, content: BinaryIO) -> Iterator[Piece]:
        parquet = require("pyarrow.parquet", "hf", f"to read {path}")
        arrow = require("pyarrow", "hf", f"to read {path}")
        with tempfile.TemporaryFile() as copy:
            if path.suffix in COMPRESSED:  # parquet is read from its end
                shutil.copyfileobj(content, copy)
                copy.seek(0)
            try:
                file = parquet.ParquetFile(copy if path.suffix in COMPRESSED else content)
                if self.field not in file.schema_arrow.names:
                    raise UserError(
                        f"{path}: no column {self.field!r} (it has: {', '.join(file.schema_arrow.names)}); name the "
                        "text column with --field"
                    )
                for rows in file.iter_batches(ROWS_AT_ONCE, columns=[self.field]):
                    yield from (Piece(text) for text in rows.column(0).cast("string").to_pylist() if text)
            except arrow.ArrowException as error:
                raise UserError(f"{path}: cannot be read as .parquet ({error}); copy it again") from error


def _parts_of_text(file: io.TextIOWrapper) -> Iterator[Piece]:
    """Yield documents without leading and trailing empty lines; inner empty lines stay, even at a cut."""
    lines: list[str] = []
    characters = 0
    while line := file.readline(PIECE_CHARACTERS):
        if line.rstrip("\r\n") == SEPARATOR_LINE:
            if lines:
                yield Piece("".join(lines).rstrip("\n"))
            lines, characters = [], 0
            continue
        is_empty = line == "\n"
        # Cut only before a line with text: then all line breaks so far are inside the document.
        if characters >= PIECE_CHARACTERS and not is_empty:
            yield Piece("".join(lines), ends_document=False)
            lines, characters = [], 0
        if lines or not is_empty:
            lines.append(line)
            characters += len(line)
    if lines:
        yield Piece("".join(lines).rstrip("\n"))
