"""`prepare`: from a source of text to a folder of token shards, made, gone on with, or found complete.

One process reads the source and writes the shards, the others turn text into tokens. The folder is the same, byte for
byte, for any number of processes, and whether or not the preparation was stopped and went on.
"""

import shutil
from contextlib import suppress
from pathlib import Path

from coupled_adam.data.corpus import UNFINISHED, Corpus, open_corpus
from coupled_adam.data.guards import (
    only_one,
    refuse_differences,
    refuse_tokens_of_others,
    remove_corpus,
    saying_when_disk_is_full,
)
from coupled_adam.data.manifest import MANIFEST_FILE, read_manifest
from coupled_adam.data.preparation import Preparation, Progress, Report
from coupled_adam.data.settings import SHARD_TOKENS, Settings, default_tokenizer
from coupled_adam.data.sources import is_hub_dataset, open_source
from coupled_adam.data.splitting import Fractions
from coupled_adam.data.workers import available_processes
from coupled_adam.tokenizer import tokenizer_path

__all__ = ["Progress", "prepare"]


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
                Preparation(folder, settings, processes, report, save_every).run()
    except BaseException:
        with suppress(OSError):  # a bad name, no network: leave no folder behind, unless there is something in it
            folder.rmdir()
        raise
    return open_corpus(folder)


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
