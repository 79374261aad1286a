"""Writing shards so that a preparation that was killed at any moment can go on, and ends in the same bytes.

While it runs, FOLDER/unfinished has the shard of each split that still grows, and journal.json: how long those were at
some moment, and where the source stood then. To go on, they are cut to that length. A full shard moves to FOLDER; the
manifest, written last, makes the folder complete, and `unfinished` goes.
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
    """How far one split is."""

    documents: NonNegativeInt = 0
    shards: list[Shard] = []
    """Those that are full."""
    growing: NonNegativeInt = 0
    """Tokens of the shard that is not."""


class Journal(BaseModel):
    """How far a preparation is."""

    settings: dict[str, Any]
    """What it was asked for."""
    found: dict[str, Any]
    """What the source and the tokenizer were when it began."""
    position: dict[str, Any] | None = None
    """Of the source; None at its beginning."""
    open_split: str | None = None
    """Split of the document that the position is in the middle of."""
    is_read: bool = False
    """Whether nothing more is to be read from the source."""
    splits: dict[str, SplitJournal] = {name: SplitJournal() for name in SPLITS}

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if set(self.splits) != set(SPLITS) or not {"source", "val", "test"} <= self.found.keys():
            raise UserError("it lacks a split, or what the source was")
        return self


def read_journal(folder: Path) -> Journal | None:
    """The journal of a folder; None where no preparation is under way."""
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
    """Write the journal, as a whole or not at all."""
    write_whole(folder / UNFINISHED / JOURNAL_FILE, json.dumps(journal.model_dump(mode="json")))


class ShardWriter:
    """Appends tokens to the shards of one split.

    Args:
        folder: of the corpus; `unfinished` in it exists.
        split: "train", "val" or "test".
        itemsize: bytes of a token.
        shard_tokens: tokens of a full shard.
        journal: where to go on from.
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
        """All files that have tokens of this split, in order."""
        full = [self.folder / shard.file for shard in self.shards]
        return [*full, self.folder / UNFINISHED / self._name] if self.growing else full

    @property
    def _name(self) -> str:
        return f"{self.split}-{len(self.shards):05d}.bin"

    def append(self, tokens: npt.NDArray[Any]) -> None:
        """Write tokens of the shards' dtype, into as many shards as it takes."""
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
        """Close the growing shard, if there is one, and move it to the folder."""
        if self._file is None:
            return
        self.sync()
        self._file.close()
        os.replace(self.folder / UNFINISHED / self._name, self.folder / self._name)
        self.shards.append(Shard(file=self._name, tokens=self.growing, sha256=self._hash.hexdigest()))
        self._file, self._hash, self.growing = None, hashlib.sha256(), 0

    def sync(self) -> None:
        """Bring everything to the disk, so that the journal may speak of it."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def journal(self) -> SplitJournal:
        return SplitJournal(documents=self.documents, shards=self.shards, growing=self.growing)

    def summary(self) -> Split:
        """The split for the manifest, when all its shards are finished."""
        return Split(tokens=self.tokens, documents=self.documents, shards=list(self.shards))

    def close(self) -> None:
        """Let go of the file, whatever happened before."""
        if self._file is not None:
            with suppress(OSError):  # the rest could not be written; the journal does not speak of it
                self._file.close()
            self._file = None

    def _go_on(self) -> None:
        path = self.folder / UNFINISHED / self._name
        if not path.exists() and (self.folder / self._name).exists():  # it became full after the journal was written
            os.replace(self.folder / self._name, path)
        length = self.growing * self.itemsize
        if not path.exists() or path.stat().st_size < length:
            raise UserError(
                f"{path}: is shorter than its journal says, so the folder was changed; start again with --overwrite"
            )
        self._file = path.open("r+b")
        self._file.truncate(length)
        while data := self._file.read(2**24):
            self._hash.update(data)
