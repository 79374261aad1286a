"""Protection of a corpus folder: one preparation at a time, no mixed settings, no foreign files overwritten."""

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
    """Remove the files that `prepare` writes; the manifest first, so that a partial folder never looks complete."""
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    for path in files_of_corpus(folder, kept):
        path.unlink()
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


def files_of_corpus(folder: Path, kept: Path | None) -> list[Path]:
    """Files named like those of a corpus, except the user's own tokenizer file `kept`."""
    shards = [path for name in SPLITS for path in folder.glob(f"{name}-{5 * '[0-9]'}.bin")]
    files = [path for path in (folder / UNIGRAM_FILE, folder / TOKENIZER_FILE) if path.is_file()]
    return [path for path in [*sorted(shards), *files] if kept is None or not path.samefile(kept)]


def refuse_tokens_of_others(folder: Path) -> None:
    """Raise a UserError if the folder has shards named as by nanoGPT.

    They belong to the user, and next to a manifest for other tokens they would never be read again.
    """
    there = [f"{name}.bin" for name in SPLITS if (folder / f"{name}.bin").is_file()]
    if there:
        raise UserError(
            f"{folder} contains {', '.join(there)}, written by another program; prepare into an empty folder, or move "
            "these files away"
        )


def refuse_differences(folder: Path, what: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a UserError that lists the changed settings, if any changed."""
    changed = differences(before, now)
    if changed:
        raise UserError(
            f"{what} {folder}: {'; '.join(changed)}. Choose another folder with --out, or replace it with --overwrite"
        )


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder; a killed process releases it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / LOCK))
        except LockHeld as error:
            raise UserError(f"{folder} is being prepared by {error.by}; {error.remedy}") from None
        yield


@contextmanager
def saying_when_disk_is_full(folder: Path) -> Iterator[None]:
    """Turn errors about a full disk, quota or file size limit into a UserError with a remedy."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise UserOSError(
            f"{folder}: the disk is full ({error.strerror}); finished work is kept. Free some space and run the same "
            "command again to resume"
        ) from error
