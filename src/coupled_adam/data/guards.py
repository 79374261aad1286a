"""What protects a folder: one preparation at a time, no mixing of settings, no file of others overwritten."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError, UserOSError, is_full_disk
from coupled_adam.base.locks import LockHeld, locked
from coupled_adam.data.corpus import UNFINISHED
from coupled_adam.data.manifest import MANIFEST_FILE, SPLITS, TOKENIZER_FILE, UNIGRAM_FILE
from coupled_adam.data.settings import differences

LOCK = "lock"


def remove_corpus(folder: Path, kept: Path | None) -> None:
    """Remove what `prepare` writes to a folder; the manifest first, so that no part of the rest looks whole."""
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    for path in files_of_corpus(folder, kept):
        path.unlink()
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


def files_of_corpus(folder: Path, kept: Path | None) -> list[Path]:
    """Files with the names of a corpus, but for the tokenizer that the user gave if it lies there."""
    shards = [path for name in SPLITS for path in folder.glob(f"{name}-{5 * '[0-9]'}.bin")]
    files = [path for path in (folder / UNIGRAM_FILE, folder / TOKENIZER_FILE) if path.is_file()]
    return [path for path in [*sorted(shards), *files] if kept is None or not path.samefile(kept)]


def refuse_tokens_of_others(folder: Path) -> None:
    """Refuse a folder with shards as nanoGPT names them: they are not ours to remove, and beside a manifest of other
    tokens nobody would read them again."""
    there = [f"{name}.bin" for name in SPLITS if (folder / f"{name}.bin").is_file()]
    if there:
        raise UserError(
            f"{folder} has {', '.join(there)}, which another program made, and they are left alone; prepare into an "
            "empty folder, or move them away"
        )


def refuse_differences(folder: Path, what: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse, naming what changed, if anything did."""
    changed = differences(before, now)
    if changed:
        raise UserError(
            f"{what} {folder}: {'; '.join(changed)}. Give another folder with --out, or replace it with --overwrite"
        )


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder, which a process that is killed loses."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / LOCK))
        except LockHeld as error:
            raise UserError(f"{folder} is being prepared by {error.by}; {error.remedy}") from None
        yield


@contextmanager
def saying_when_disk_is_full(folder: Path) -> Iterator[None]:
    """Say what to do when the disk is full, or the user's part of it, or a file as large as it may be."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise UserOSError(
            f"{folder}: no space is left on the disk ({error.strerror}); what is done is kept: make room and run the "
            "same command again, and it goes on"
        ) from error
