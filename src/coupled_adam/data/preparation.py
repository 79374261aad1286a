"""Prepare a corpus, or resume an interrupted preparation: text to tokens, shards, counts and the manifest.

Workers encode blocks of text, and the results are written in the same order. Block boundaries depend only on the
source. A journal records the block from which to resume.

Legend: V tokens of the vocabulary.
"""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import file_hash, replacing
from coupled_adam.base.text import counted
from coupled_adam.data.blocks import Block, read_blocks
from coupled_adam.data.corpus import UNFINISHED
from coupled_adam.data.corpus_tokenizer import known_tokenizer, tokenizer_for
from coupled_adam.data.encoding import Pieces, encoder, packer
from coupled_adam.data.guards import files_of_corpus, refuse_differences, remove_corpus
from coupled_adam.data.manifest import (
    MANIFEST_FILE,
    SPLITS,
    TOKENIZER_FILE,
    UNIGRAM_FILE,
    Manifest,
    write_manifest,
)
from coupled_adam.data.settings import Settings
from coupled_adam.data.shards import Journal, ShardWriter, read_journal, write_journal
from coupled_adam.data.sources import Source, has_tokens, open_source
from coupled_adam.data.splitting import Fractions
from coupled_adam.data.workers import Workers
from coupled_adam.tokenizer import Tokenizer, tokenizer_path


@dataclass(frozen=True)
class Progress:
    """Progress of a preparation."""

    stage: str
    """Current stage, such as "tokenizing"."""
    done: float | None
    """Fraction done, 0 to 1; None if the size of the source is unknown."""
    tokens: int = 0
    documents: int = 0


Report = Callable[[Progress], None]


class Preparation:
    """A new or resumed preparation of a corpus."""

    def __init__(self, folder: Path, settings: Settings, processes: int, report: Report, save_every: float) -> None:
        self.folder = folder
        self.settings = settings
        self.processes = processes
        self.report = report
        self.save_every = save_every
        self.unfinished = folder / UNFINISHED
        self.tokenizer_copy = self.unfinished / TOKENIZER_FILE

    def run(self) -> None:
        """Read the source from the position in the journal, and write the manifest at the end."""
        journal = read_journal(self.folder)
        source: Source | None
        if journal is None:
            self._clear()
            try:
                journal, tokenizer, source = self._begin()
                write_journal(self.folder, journal)
            except BaseException:  # such as a wrong name or no network: nothing to resume
                shutil.rmtree(self.unfinished)
                raise
        else:
            refuse_differences(
                self.folder, "an unfinished preparation is in", journal.settings, self.settings.as_json()
            )
            tokenizer = known_tokenizer(self.settings, self.tokenizer_copy)
            source = None if journal.is_read else self._open_source(tokenizer, journal.found["source"])
            if source is not None:
                refuse_differences(self.folder, "the source changed since", journal.found["source"], source.found())
        with ExitStack() as stack:
            itemsize = np.dtype(tokenizer.dtype).itemsize
            writers = {}
            for name in SPLITS:
                writers[name] = ShardWriter(
                    self.folder, name, itemsize, self.settings.shard_tokens, journal.splits[name]
                )
                stack.callback(writers[name].close)
            counts = self._counts_so_far(writers["train"], tokenizer)
            if source is not None:
                journal = self._tokenize(source, tokenizer, journal, writers, counts)
            self._finish(tokenizer, journal, writers, counts)

    def _clear(self) -> None:
        """Create an empty `unfinished` folder; refuse to overwrite files of an unknown corpus."""
        there = [path.name for path in files_of_corpus(self.folder, tokenizer_path(self.settings.tokenizer))]
        if there:
            raise UserError(
                f"{self.folder} already contains {', '.join(there[:3])} but no {MANIFEST_FILE}; choose an empty folder "
                "with --out, or remove these files with --overwrite"
            )
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir()

    def _begin(self) -> tuple[Journal, Tokenizer, Source]:
        settings = self.settings
        if has_tokens(settings.source):
            if settings.tokenizer.startswith("bpe:"):
                raise UserError(f"source {settings.source!r} is already tokens; name their tokenizer with --tokenizer")
            tokenizer = known_tokenizer(settings, self.tokenizer_copy)
            source = self._open_source(tokenizer, None)
        else:  # check the source before a tokenizer is downloaded or trained
            source = self._open_source(None, None)
            tokenizer = tokenizer_for(
                settings, self.tokenizer_copy, source, self._fractions(source), on=self._say_training
            )
        fractions = self._fractions(source)
        found = {"source": source.found(), "val": fractions.val, "test": fractions.test}
        if self.tokenizer_copy.is_file():
            found["tokenizer_sha256"] = file_hash(self.tokenizer_copy)
        return Journal(settings=settings.as_json(), found=found), tokenizer, source

    def _open_source(self, tokenizer: Tokenizer | None, found: dict[str, Any] | None) -> Source:
        return open_source(
            self.settings.source,
            field=self.settings.field,
            separator=(tokenizer.separator if tokenizer else None) or 0,
            processes=self.processes,
            found=found,
        )

    def _fractions(self, source: Source) -> Fractions:
        val, test, default = self.settings.val, self.settings.test, source.default_fraction()
        return Fractions(default if val is None else val, default if test is None else test, self.settings.seed)

    def _counts_so_far(self, writer: ShardWriter, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:  # (V,)
        """Count the tokens written before a resume; stored counts could differ from the stored shards."""
        from coupled_adam.embeddings.unigram import add_counts, read_tokens

        counts = np.zeros(tokenizer.size, np.int64)
        for path in writer.paths():
            for tokens in read_tokens(path, tokenizer.dtype):
                add_counts(counts, tokens, path)
        return counts

    def _tokenize(
        self,
        source: Source,
        tokenizer: Tokenizer,
        journal: Journal,
        writers: dict[str, ShardWriter],
        counts: npt.NDArray[np.int64],
    ) -> Journal:
        fractions = Fractions(journal.found["val"], journal.found["test"], self.settings.seed)
        waiting: deque[Block] = deque()

        def sent() -> Iterator[Pieces]:
            for block in read_blocks(source, fractions, journal.position, journal.open_split):
                waiting.append(block)
                yield block.pieces

        self._say(None, writers)
        saved_at = time.monotonic()
        are_tokens = has_tokens(self.settings.source)
        with Workers(1 if are_tokens else self.processes, packer if are_tokens else encoder, tokenizer) as workers:
            for encoded in workers.map(sent()):
                block = waiting.popleft()
                full_shards = sum(len(writer.shards) for writer in writers.values())
                for split, part in encoded.items():
                    writers[split].append(part.tokens)
                    writers[split].documents += part.documents
                    if split == "train":
                        counts += np.bincount(part.tokens, minlength=len(counts))
                is_due = time.monotonic() - saved_at >= self.save_every
                if is_due or sum(len(writer.shards) for writer in writers.values()) > full_shards:
                    self._save(journal, writers, position=block.position, open_split=block.open_split)
                    saved_at = time.monotonic()
                self._say(block.progress, writers)
                if sum(writer.tokens for writer in writers.values()) >= (self.settings.max_tokens or np.inf):
                    break
        return self._save(journal, writers, is_read=True)

    def _save(self, journal: Journal, writers: dict[str, ShardWriter], **changes: Any) -> Journal:
        for writer in writers.values():
            writer.sync()
        splits = {name: writer.journal() for name, writer in writers.items()}
        journal = journal.model_copy(update={"splits": splits, **changes})
        write_journal(self.folder, journal)
        return journal

    def _say_training(self, done: float | None) -> None:
        self.report(Progress("training the tokenizer", done))

    def _say(self, done: float | None, writers: dict[str, ShardWriter]) -> None:
        tokens = sum(writer.tokens for writer in writers.values())
        if self.settings.max_tokens is not None:
            done = max(done or 0.0, min(tokens / self.settings.max_tokens, 1.0))
        self.report(Progress("tokenizing", done, tokens, sum(writer.documents for writer in writers.values())))

    def _finish(
        self,
        tokenizer: Tokenizer,
        journal: Journal,
        writers: dict[str, ShardWriter],
        counts: npt.NDArray[np.int64],
    ) -> None:
        self._refuse_empty_splits(journal, writers)
        for writer in writers.values():
            writer.finish_shard()
        with replacing(self.unfinished / UNIGRAM_FILE) as temporary, temporary.open("wb") as file:
            np.save(file, counts)
        os.replace(self.unfinished / UNIGRAM_FILE, self.folder / UNIGRAM_FILE)
        if tokenizer.kind == "json":
            with replacing(self.unfinished / "copy") as temporary:
                shutil.copyfile(self.tokenizer_copy, temporary)
            os.replace(self.unfinished / "copy", self.folder / TOKENIZER_FILE)
        manifest = Manifest.model_validate(
            {
                "tokenizer": TOKENIZER_FILE if tokenizer.kind == "json" else tokenizer.name,
                "vocabulary_size": tokenizer.size,
                "dtype": tokenizer.dtype,
                "separator": tokenizer.separator,
                "source": self.settings.source,
                "splits": {name: writer.summary() for name, writer in writers.items() if writer.shards},
                "settings": journal.settings,
                "found": journal.found,
            }
        )
        write_manifest(self.unfinished / MANIFEST_FILE, manifest)
        os.replace(self.unfinished / MANIFEST_FILE, self.folder / MANIFEST_FILE)
        shutil.rmtree(self.unfinished)

    def _refuse_empty_splits(self, journal: Journal, writers: dict[str, ShardWriter]) -> None:
        documents = sum(writer.documents for writer in writers.values())
        wanted = ["train", *(name for name in ("val", "test") if journal.found[name] > 0)]
        for name in wanted:
            if writers[name].tokens == 0:
                for writer in writers.values():
                    writer.close()
                remove_corpus(self.folder, tokenizer_path(self.settings.tokenizer))  # nothing to resume
                raise UserError(
                    f"source {self.settings.source!r}: none of its {counted(documents, 'document')} fell into the "
                    f"split {name!r}; use more documents (in a .txt file a line <|endoftext|> separates them), larger "
                    "--val and --test, or --val 0 and --test 0 for no held-out splits"
                )
