"""`prepare`: turn a source of text into a folder of token shards, or resume or reuse an existing one.

One process reads the source and writes the shards; the others tokenize. The resulting folder is byte-identical for any
number of processes, and whether or not the preparation was interrupted.
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

    A second call resumes an interrupted preparation, and does nothing if the folder is complete.

    Args:
        source: "python-docs", "openwebtext", "slimpajama", "hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]", "text:FILES" or
            "tokens:FILES".
        tokenizer: a tiktoken name such as "gpt2", the path of a tokenizer.json, or "bpe:N" to train one with N tokens;
            None for "bpe:4096" with python-docs and "gpt2" otherwise.
        folder: output folder, created if missing.
        field: text field of .jsonl and .parquet files and of datasets.
        separator: the special token after every document; None for the tokenizer's usual one.
        val: fraction of the documents for validation; None for 0.05 of a small source, 0.005 of a large one.
        test: fraction of the documents for the test split; None as for `val`.
        seed: selects the held-out documents.
        shard_tokens: maximum number of tokens per shard.
        max_tokens: stop once all splits together have this many tokens; at most one block of text more is written.
        processes: number of processes that tokenize; None for all cores.
        overwrite: remove an existing corpus or unfinished preparation from the folder, and start again.
        on_progress: called after every block.
        save_every: seconds between saves; a killed preparation resumes from the last one.

    Returns:
        The opened corpus.
    """
    tokenizer = tokenizer or default_tokenizer(source)
    settings = Settings(source, tokenizer, field, separator, val, test, seed, shard_tokens, max_tokens)
    Fractions(val or 0, test or 0, seed)  # raises for invalid numbers
    processes = available_processes() if processes is None else processes
    report = on_progress or (lambda progress: None)
    folder = Path(folder)
    if not overwrite and (folder / MANIFEST_FILE).is_file():  # before locking: the folder may be read-only
        _refuse_other_settings(folder, settings)
        _remove_unfinished(folder)
        return open_corpus(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with only_one(folder), saying_when_disk_is_full(folder):
            if overwrite or not (folder / MANIFEST_FILE).is_file():
                refuse_tokens_of_others(folder)  # before removing a manifest that may describe these tokens
            if overwrite:
                remove_corpus(folder, tokenizer_path(tokenizer))
            if (folder / MANIFEST_FILE).is_file():  # another process has just written it
                _refuse_other_settings(folder, settings)
            else:
                Preparation(folder, settings, processes, report, save_every).run()
    except BaseException:
        with suppress(OSError):  # leave no empty folder behind after a wrong name or without a network
            folder.rmdir()
        raise
    return open_corpus(folder)


def _remove_unfinished(folder: Path) -> None:
    """Remove the leftovers of a process killed just before its last step, unless another process is working here."""
    if (folder / UNFINISHED).is_dir():
        with suppress(ValueError, OSError), only_one(folder):
            shutil.rmtree(folder / UNFINISHED)


def _refuse_other_settings(folder: Path, settings: Settings) -> None:
    """Raise a UserError if a complete folder was prepared with other settings or from another source."""
    manifest = read_manifest(folder / MANIFEST_FILE)
    refuse_differences(folder, "another corpus is in", manifest.settings, settings.as_json())
    found = (manifest.model_extra or {}).get("found", {})
    if is_hub_dataset(settings.source) or "source" not in found:
        return
    try:
        source = open_source(
            settings.source, field=settings.field, separator=manifest.separator or 0, processes=1, found=None
        )
    except ValueError:  # the source files are gone, but their tokens are still valid
        return
    refuse_differences(folder, "the source changed since", found["source"], source.found())
