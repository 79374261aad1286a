"""`prepare`: from a source of text to a folder of token shards.

One process reads the source and writes the shards, the others turn text into tokens. Blocks of text go out and come
back in the same order, and where a block ends depends on the source alone: so the folder is the same, byte for byte,
for any number of processes, and whether or not the preparation was stopped and went on.

Legend: V tokens of the vocabulary.
"""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import replacing
from coupled_adam.byte_level_bpe import train_bpe
from coupled_adam.data.blocks import Block, read_blocks
from coupled_adam.data.corpus import UNFINISHED, Corpus, file_hash, open_corpus
from coupled_adam.data.encoding import Pieces, encoder, packer
from coupled_adam.data.guards import (
    files_of_corpus,
    only_one,
    refuse_differences,
    refuse_tokens_of_others,
    remove_corpus,
    saying_when_disk_is_full,
)
from coupled_adam.data.manifest import (
    MANIFEST_FILE,
    SPLITS,
    TOKENIZER_FILE,
    UNIGRAM_FILE,
    Manifest,
    read_manifest,
    write_manifest,
)
from coupled_adam.data.settings import SHARD_TOKENS, Settings, bpe_size, default_tokenizer
from coupled_adam.data.shards import Journal, ShardWriter, read_journal, write_journal
from coupled_adam.data.sources import Source, has_tokens, is_hub_dataset, open_source
from coupled_adam.data.splitting import Fractions
from coupled_adam.data.workers import Workers, available_processes
from coupled_adam.tokenizer import GPT2, SEPARATORS, Tokenizer, open_tokenizer, tokenizer_path

BPE_CHARACTERS = 2**27
"""A tokenizer is trained on so much of the training text, from its beginning."""


@dataclass(frozen=True)
class Progress:
    """How far a preparation is."""

    stage: str
    """What it does now, such as "tokenizing"."""
    done: float | None
    """The part that is done, 0 to 1; None where the size of the source is not known."""
    tokens: int = 0
    documents: int = 0


Report = Callable[[Progress], None]


def prepare(
    source: str,
    tokenizer: str | None,
    folder: str | Path,
    *,
    field: str = "text",
    separator: str | None = None,
    val: float | None = None,
    test: float | None = None,
    seed: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    max_tokens: int | None = None,
    processes: int | None = None,
    overwrite: bool = False,
    on_progress: Report | None = None,
    save_every: float = 10.0,
) -> Corpus:
    """Turn text into a folder of token shards.

    Called again, it goes on where it was stopped, and does nothing when the folder is complete.

    Args:
        source: "python-docs", "openwebtext", "slimpajama", "hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]", "text:FILES" or
            "tokens:FILES".
        tokenizer: a tiktoken name such as "gpt2", the path of a tokenizer.json, or "bpe:N" to train one of N tokens;
            None for "bpe:4096" with python-docs and "gpt2" with the others.
        folder: where to; made if it is missing.
        field: of .jsonl and .parquet files and of datasets that holds the text.
        separator: the special token behind every document; None for the one that the tokenizer is known to have.
        val: part of the documents to hold out for validation; None for 0.05 of a small source, 0.005 of a large one.
        test: the same for the test.
        seed: decides which documents are held out.
        shard_tokens: tokens of a shard, at most.
        max_tokens: stop when the splits have so many in all; up to a block of text more may come.
        processes: that tokenize; None for all cores.
        overwrite: remove what a preparation with other settings left in the folder, and begin again.
        on_progress: called after every block.
        save_every: seconds between the places from which a killed preparation can go on.

    Returns:
        The corpus, opened.
    """
    tokenizer = tokenizer or default_tokenizer(source)
    settings = Settings(source, tokenizer, field, separator, val, test, seed, shard_tokens, max_tokens)
    Fractions(val or 0, test or 0, seed)  # for what it says of bad numbers
    processes = available_processes() if processes is None else processes
    report = on_progress or (lambda progress: None)
    folder = Path(folder)
    if not overwrite and (folder / MANIFEST_FILE).is_file():  # it may be one that we have no right to write to
        _refuse_other_settings(folder, settings)
        _remove_unfinished(folder)
        return open_corpus(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with only_one(folder), saying_when_disk_is_full(folder):
            if overwrite or not (folder / MANIFEST_FILE).is_file():
                refuse_tokens_of_others(folder)  # before anything is removed: a manifest may be all that explains them
            if overwrite:
                remove_corpus(folder, tokenizer_path(tokenizer))
            if (folder / MANIFEST_FILE).is_file():  # another process has just finished it
                _refuse_other_settings(folder, settings)
            else:
                _Preparation(folder, settings, processes, report, save_every).run()
    except BaseException:
        with suppress(OSError):  # a bad name, no network: leave no folder behind, unless there is something in it
            folder.rmdir()
        raise
    return open_corpus(folder)


class _Preparation:
    """One preparation that is not complete, new or to go on with."""

    def __init__(self, folder: Path, settings: Settings, processes: int, report: Report, save_every: float) -> None:
        self.folder = folder
        self.settings = settings
        self.processes = processes
        self.report = report
        self.save_every = save_every
        self.unfinished = folder / UNFINISHED

    def run(self) -> None:
        journal = read_journal(self.folder)
        source: Source | None
        if journal is None:
            self._clear()
            try:
                journal, tokenizer, source = self._begin()
                write_journal(self.folder, journal)
            except BaseException:  # a bad name, no network: nothing is worth going on with
                shutil.rmtree(self.unfinished)
                raise
        else:
            refuse_differences(self.folder, "a preparation is under way in", journal.settings, self.settings.as_json())
            tokenizer = self._tokenizer(None)
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
        """An empty `unfinished`, in a folder where nothing of others would be overwritten."""
        there = [path.name for path in files_of_corpus(self.folder, tokenizer_path(self.settings.tokenizer))]
        if there:
            raise UserError(
                f"{self.folder} has {', '.join(there[:3])} already, and no {MANIFEST_FILE} that says what it is; give "
                "an empty folder with --out, or remove them with --overwrite"
            )
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir()

    def _begin(self) -> tuple[Journal, Tokenizer, Source]:
        settings = self.settings
        if has_tokens(settings.source):
            if settings.tokenizer.startswith("bpe:"):
                raise UserError(f"source {settings.source!r} has tokens already; name their tokenizer with --tokenizer")
            tokenizer = self._tokenizer(None)
            source = self._open_source(tokenizer, None)
        else:  # what is wrong with the source is said before a tokenizer is downloaded or trained
            source = self._open_source(None, None)
            tokenizer = self._tokenizer(source)
        fractions = self._fractions(source)
        found = {"source": source.found(), "val": fractions.val, "test": fractions.test}
        if (self.unfinished / TOKENIZER_FILE).is_file():
            found["tokenizer_sha256"] = file_hash(self.unfinished / TOKENIZER_FILE)
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

    def _tokenizer(self, source: Source | None) -> Tokenizer:
        """The tokenizer that is asked for; if it is a file, a copy of it in `unfinished`.

        Args:
            source: to train a tokenizer on; None where none is to be trained, or that was done before.
        """
        asked, separator = self.settings.tokenizer, self.settings.separator
        copy = self.unfinished / TOKENIZER_FILE
        if copy.is_file():
            return _with_separator(open_tokenizer(copy, separator))
        if asked.startswith("bpe:"):
            assert source is not None
            self.report(Progress("training the tokenizer", None))
            with replacing(copy) as temporary:
                train_bpe(self._training_texts(source), bpe_size(asked), temporary)
            return open_tokenizer(copy, separator)
        if asked == GPT2.name and has_tokens(self.settings.source):
            return GPT2  # without its file, which tokens that are there already do not need
        tokenizer = _with_separator(self._open_asked())
        if tokenizer.kind == "json":
            with replacing(copy) as temporary:
                shutil.copyfile(tokenizer.name, temporary)
            return open_tokenizer(copy, separator)
        return tokenizer

    def _open_asked(self) -> Tokenizer:
        asked = self.settings.tokenizer
        try:
            return open_tokenizer(asked, self.settings.separator)
        except (ValueError, ConnectionError) as error:
            if tokenizer_path(asked) is not None:
                raise
            raise type(error)(
                f"{error}. Or train a tokenizer on the text: --tokenizer bpe:8192, in a config data.tokenizer = "
                '"bpe:8192"'
            ) from error

    def _training_texts(self, source: Source) -> Iterator[str]:
        characters = 0
        for block in read_blocks(source, self._fractions(source)):
            for split, text, _ in block.pieces:
                if split == "train":
                    characters += len(text)
                    yield text
            part = characters / BPE_CHARACTERS
            self.report(Progress("training the tokenizer", max(part, block.progress or 0.0)))
            if part >= 1:
                return

    def _counts_so_far(self, writer: ShardWriter, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:  # (V,)
        """Count what a preparation before this one has written: saved counts could differ from the saved shards."""
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
                shutil.copyfile(self.unfinished / TOKENIZER_FILE, temporary)
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
                remove_corpus(self.folder, tokenizer_path(self.settings.tokenizer))  # nothing to go on with
                raise UserError(
                    f"source {self.settings.source!r}: none of its {documents} documents fell into the split {name!r}; "
                    "give more documents (in a .txt file a line <|endoftext|> separates them), larger --val and "
                    "--test, or --val 0 and --test 0 to hold none out"
                )


def _with_separator(tokenizer: Tokenizer) -> Tokenizer:
    """Refuse a tokenizer that cannot end a document."""
    tokenizer.encode("")  # raises for a list of tokens that cannot split a text
    if tokenizer.separator is None:
        raise UserError(
            f"tokenizer {tokenizer.name}: none of its tokens is {' or '.join(SEPARATORS)}; name the one that ends a "
            "document with --separator"
        )
    return tokenizer


def _remove_unfinished(folder: Path) -> None:
    """Remove what a process left that was killed between its last two steps; another one may be there just now."""
    if (folder / UNFINISHED).is_dir():
        with suppress(ValueError, OSError), only_one(folder):
            shutil.rmtree(folder / UNFINISHED)


def _refuse_other_settings(folder: Path, settings: Settings) -> None:
    """Refuse if a complete folder was made from something else than what is asked for now."""
    manifest = read_manifest(folder / MANIFEST_FILE)
    refuse_differences(folder, "there is another corpus in", manifest.settings, settings.as_json())
    found = (manifest.model_extra or {}).get("found", {})
    if is_hub_dataset(settings.source) or "source" not in found:
        return
    try:
        source = open_source(
            settings.source, field=settings.field, separator=manifest.separator or 0, processes=1, found=None
        )
    except ValueError:  # its files are gone, which does no harm to their tokens
        return
    refuse_differences(folder, "the source changed since", found["source"], source.found())
