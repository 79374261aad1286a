"""Checkpoint folders: list, read, check, replace and delete them. Does not use torch.

checkpoints/step-000000300/     a complete checkpoint; it gets this name once all its files are on disk
    __0_0.distcp ...            the tensors, one file per rank
    .metadata                   the position of each tensor in these files
    tables.safetensors          the vocabulary tables
    state.json                  written last: the state of the run, size and sha256 of every file above
    checked.json                the times of these files when they were last read completely and found intact
checkpoints/.step-000000400.tmp         being written or deleted; after a kill, a leftover
checkpoints/.step-000000400.replaced    the old checkpoint of a step that is being saved again
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import file_hash, kind_of_file, read_json, remove_leftover, write_whole

STATE_FILE = "state.json"
CHECKED_FILE = "checked.json"
FORMAT = 1
SECONDS_OF_A_TICK = 0.02
"""Upper bound of a file system's clock tick. A file that changes twice within a tick may keep its timestamp."""


@dataclass(frozen=True)
class StoredFile:
    """Expected size and hash of a checkpoint file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """The content of `state.json`."""

    step: int
    milestone: bool
    """Whether the checkpoint is never deleted."""
    state: dict[str, Any]
    """State of the run, as passed to `save`."""
    files: dict[str, StoredFile]
    """All other files in the folder, by name."""

    @property
    def fingerprint(self) -> str:
        """Hash of the names and hashes of all files. Its definition must not change: evaluation results store it."""
        files = sorted((name, file.sha256) for name, file in self.files.items())
        return hashlib.sha256(repr(files).encode()).hexdigest()


def write_record(folder: Path, record: Record) -> None:
    """Write `state.json`, including a checksum of its content."""
    content = {"format": FORMAT, **asdict(record)}
    write_whole(folder / STATE_FILE, json.dumps({**content, "sha256": _checksum(content)}, indent=1) + "\n")


def read_record(folder: Path) -> Record:
    """Read and validate `state.json`; raise a UserError if it is invalid."""
    path = folder / STATE_FILE
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise TypeError(f"expected an object, found {type(content).__name__}")
        checksum = content.pop("sha256", None)
        if content.get("format") != FORMAT:
            raise UserError(f"format is {content.get('format')!r}, expected {FORMAT}")
        if checksum != _checksum(content):
            raise UserError("its checksum does not match: it was changed or damaged")
        return _record(content, folder)
    except FileNotFoundError:
        raise UserError(f"{STATE_FILE} is missing: the checkpoint is incomplete, or the file was deleted") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{STATE_FILE} cannot be read ({error})") from None


def _record(content: dict[str, Any], folder: Path) -> Record:
    """Build a Record from the content of `state.json`, checking every value."""
    step, milestone, state = content["step"], content["milestone"], content["state"]
    if type(step) is not int or step < 0:
        raise UserError(f"step is {step!r}, expected a whole number of at least 0")
    named = re.fullmatch(r"step-(\d+)", folder.name)
    if named is not None and step != int(named[1]):
        raise UserError(f"step is {step}, but the folder is called {folder.name}")
    if type(milestone) is not bool or not isinstance(state, dict):
        raise UserError("milestone is not a boolean, or state is not an object")
    files = {}
    for name, file in content["files"].items():
        if type(file["bytes"]) is not int or file["bytes"] < 0 or not isinstance(file["sha256"], str):
            raise UserError(f"size or sha256 of {name!r} is invalid")
        if name in ("", ".", "..") or Path(name).name != name:
            raise UserError(f"{name!r} is not the name of a file in the folder")
        files[name] = StoredFile(file["bytes"], file["sha256"])
    return Record(step, milestone, state, files)


def stored_file(path: Path) -> StoredFile:
    """Size and hash of a file."""
    return StoredFile(path.stat().st_size, file_hash(path))


def wrong_sizes(folder: Path, files: dict[str, StoredFile]) -> str | None:
    """Describe the first file that is missing or has the wrong size; None if all are right."""
    for name, expected in sorted(files.items()):
        try:
            found = (folder / name).stat()
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is {kind_of_file(found.st_mode)}, expected a file"
        if found.st_size != expected.bytes:
            return f"{name} has {found.st_size} bytes, expected {expected.bytes}"
    return None


def file_times(folder: Path, record: Record) -> dict[str, Any]:
    """Fingerprint, sizes and times of the files; if they are unchanged, so is the content. Call before reading.

    They include the inode change time, which cannot be set back and differs for a copy.
    """
    found = {name: (folder / name).stat() for name in sorted(record.files)}
    youngest = max((max(each.st_mtime, each.st_ctime) for each in found.values()), default=0.0)
    age = time.time() - youngest
    if 0 <= age < SECONDS_OF_A_TICK:  # after this, any change gives another time
        time.sleep(SECONDS_OF_A_TICK - age)
    files = {name: [each.st_size, each.st_mtime_ns, each.st_ctime_ns] for name, each in found.items()}
    return {"fingerprint": record.fingerprint, "files": files}


def is_checked(folder: Path, times: dict[str, Any]) -> bool:
    """Whether the files were read completely and found intact, and have not changed since."""
    try:
        return bool(read_json(folder / CHECKED_FILE) == times)
    except (OSError, ValueError):
        return False


def remember_checked(folder: Path, times: dict[str, Any]) -> None:
    """Store the times of files that were found intact, if the folder is writable."""
    with contextlib.suppress(OSError):
        write_whole(folder / CHECKED_FILE, json.dumps(times) + "\n")


def folder_of_step(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step.

    Example:
        >>> folder_of_step(Path("run/checkpoints"), 300).as_posix()
        'run/checkpoints/step-000000300'
    """
    return folder / f"step-{step:09d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """All checkpoints in a folder, intact or damaged, sorted by step."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint folder from `checkpoints_in`."""
    return int(checkpoint.name.removeprefix("step-"))


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename a folder whose files are all on disk to its final name, replacing an older folder of that name."""
    sync_folder(temporary)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_old(folder: Path, keep: int, newest: Path) -> None:
    """Delete the checkpoints before `newest`, except milestones and the last `keep`, which include `newest`.

    Damaged checkpoints do not count and are not deleted: the user may want to recover something from them.
    """
    found = checkpoints_in(folder)
    before = found[: found.index(newest)]
    candidates = [path for path in before if _is_whole(path) and not read_record(path).milestone]
    for path in candidates[: max(0, len(candidates) - (keep - 1))]:
        doomed = temporary_name(path)
        path.rename(doomed)  # so that a kill during the deletion leaves no damaged checkpoint
        shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Delete leftovers of killed processes; no other process may be writing to this folder."""
    for path in folder.iterdir():
        if re.fullmatch(r"\.step-\d+\.tmp", path.name):
            remove_leftover(path)
        elif match := re.fullmatch(r"\.(step-\d+)\.replaced", path.name):
            if (folder / match[1]).exists():
                remove_leftover(path)
            else:  # killed between the two renames of put_in_place
                path.rename(folder / match[1])


def temporary_name(checkpoint: Path) -> Path:
    """Temporary name of a checkpoint that is being written or deleted."""
    return checkpoint.with_name(f".{checkpoint.name}.tmp")


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint looks intact, without reading all of it."""
    with contextlib.suppress(ValueError):
        return wrong_sizes(path, read_record(path).files) is None
    return False


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
