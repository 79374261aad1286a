"""Write shards such that a preparation killed at any moment can resume and produces the same bytes.

During a preparation, FOLDER/unfinished holds the growing shard of each split and journal.json, which records the length
of these shards and the position of the source at the last save. To resume, the shards are truncated to that length. A
full shard moves to FOLDER. The manifest is written last and completes the folder; then `unfinished` is removed.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy.typing as npt
from pydantic import BaseModel, NonNegativeInt, ValidationError, model_validator

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import read_json, write_whole
from coupled_adam.data.corpus import UNFINISHED
from coupled_adam.data.manifest import SPLITS, Shard, Split

JOURNAL_FILE = "journal.json"


class SplitJournal(BaseModel):
    """Progress of one split."""

    documents: NonNegativeInt = 0
    shards: list[Shard] = []
    """Full shards."""
    growing: NonNegativeInt = 0
    """Number of tokens in the growing shard."""


class Journal(BaseModel):
    """Progress of a preparation."""

    settings: dict[str, Any]
    """Settings of the preparation."""
    found: dict[str, Any]
    """State of the source and the tokenizer at the start."""
    position: dict[str, Any] | None = None
    """Position of the source; None at its beginning."""
    open_split: str | None = None
    """Split of the document that contains the position."""
    is_read: bool = False
    """Whether the source has been read completely."""
    splits: dict[str, SplitJournal] = {name: SplitJournal() for name in SPLITS}

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if set(self.splits) != set(SPLITS) or not {"source", "val", "test"} <= self.found.keys():
            raise UserError("a split or the state of the source is missing")
        return self


def read_journal(folder: Path) -> Journal | None:
    """Read the journal of a folder; None if no preparation is unfinished."""
    path = folder / UNFINISHED / JOURNAL_FILE
    try:
        return Journal.model_validate(read_json(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise UserError(f"{path}: cannot be read ({error.errors()[0]['msg']}); start again with --overwrite") from None
    except ValueError as error:
        raise UserError(f"{error}; start again with --overwrite") from None


def write_journal(folder: Path, journal: Journal) -> None:
    """Write the journal atomically."""
    write_whole(folder / UNFINISHED / JOURNAL_FILE, json.dumps(journal.model_dump(mode="json")))


class ShardWriter:
    """Append tokens to the shards of one split.

    Args:
        folder: the corpus folder; its subfolder `unfinished` must exist.
        split: "train", "val" or "test".
        itemsize: bytes per token.
        shard_tokens: tokens per full shard.
        journal: state from which to resume.
    """

    def __init__(self, folder: Path, split: str, itemsize: int, shard_tokens: int, journal: SplitJournal) -> None:
        self.folder = folder
        self.split = split
        self.itemsize = itemsize
        self.shard_tokens = shard_tokens
        self.shards = list(journal.shards)
        self.growing = journal.growing
        self.documents = journal.documents
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        if self.growing:
            self._go_on()

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards) + self.growing

    def paths(self) -> list[Path]:
        """All files with tokens of this split, in order."""
        full = [self.folder / shard.file for shard in self.shards]
        return [*full, self.folder / UNFINISHED / self._name] if self.growing else full

    @property
    def _name(self) -> str:
        return f"{self.split}-{len(self.shards):05d}.bin"

    def append(self, tokens: npt.NDArray[Any]) -> None:
        """Write tokens, which have the shards' dtype, to as many shards as needed."""
        while len(tokens):
            if self._file is None:
                self._file = (self.folder / UNFINISHED / self._name).open("wb")
            part = tokens[: self.shard_tokens - self.growing]
            data = part.tobytes()
            self._file.write(data)
            self._hash.update(data)
            self.growing += len(part)
            tokens = tokens[len(part) :]
            if self.growing == self.shard_tokens:
                self.finish_shard()

    def finish_shard(self) -> None:
        """Close the growing shard, if any, and move it to the folder."""
        if self._file is None:
            return
        self.sync()
        self._file.close()
        os.replace(self.folder / UNFINISHED / self._name, self.folder / self._name)
        self.shards.append(Shard(file=self._name, tokens=self.growing, sha256=self._hash.hexdigest()))
        self._file, self._hash, self.growing = None, hashlib.sha256(), 0

    def sync(self) -> None:
        """Flush everything to disk, so that the journal may refer to it."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def journal(self) -> SplitJournal:
        return SplitJournal(documents=self.documents, shards=self.shards, growing=self.growing)

    def summary(self) -> Split:
        """The split's entry in the manifest, once all its shards are finished."""
        return Split(tokens=self.tokens, documents=self.documents, shards=list(self.shards))

    def close(self) -> None:
        """Close the file, even after an error."""
        if self._file is not None:
            with suppress(OSError):  # a failed last write does not matter: the journal does not refer to it
                self._file.close()
            self._file = None

    def _go_on(self) -> None:
        path = self.folder / UNFINISHED / self._name
        if not path.exists() and (self.folder / self._name).exists():  # full since the journal was written
            os.replace(self.folder / self._name, path)
        length = self.growing * self.itemsize
        if not path.exists() or path.stat().st_size < length:
            raise UserError(
                f"{path}: shorter than recorded in the journal, so the folder was changed; start again with --overwrite"
            )
        self._file = path.open("r+b")
        self._file.truncate(length)
        while data := self._file.read(2**24):
            self._hash.update(data)
