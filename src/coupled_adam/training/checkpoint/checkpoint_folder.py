"""`state.json` and the folders around it: what a checkpoint holds, which checkpoints there are, and which may go.

    checkpoints/step-000000300/     a whole checkpoint: it got this name when everything in it was on the disk
        __0_0.distcp ...            the tensors, one file per rank
        .metadata                   which tensor lies where in them
        tables.safetensors          the vocabulary tables
        state.json                  written last: the state of the run, size and sha256 of every file above
        checked.json                the times of those files when they were last read completely and found whole
    checkpoints/.step-000000400.tmp         being written or being deleted; after a kill, a leftover
    checkpoints/.step-000000400.replaced    the former checkpoint of a step that is being saved again

Nothing here knows of torch.
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
"""A file that changes twice within a tick of the disk's clock may keep its time; no such clock is slower than this."""


@dataclass(frozen=True)
class StoredFile:
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """The content of `state.json`."""

    step: int
    milestone: bool
    """Kept for ever."""
    state: dict[str, Any]
    """Of the run, as it was given to `save`."""
    files: dict[str, StoredFile]
    """All other files of the folder, by name."""

    @property
    def fingerprint(self) -> str:
        """A hash of the names and hashes of all files. Results of evaluations hold it: it must never change."""
        files = sorted((name, file.sha256) for name, file in self.files.items())
        return hashlib.sha256(repr(files).encode()).hexdigest()


def write_record(folder: Path, record: Record) -> None:
    """Write `state.json`, with a checksum of its own."""
    content = {"format": FORMAT, **asdict(record)}
    write_whole(folder / STATE_FILE, json.dumps({**content, "sha256": _checksum(content)}, indent=1) + "\n")


def read_record(folder: Path) -> Record:
    """Read `state.json`; a ValueError says what is wrong with it."""
    path = folder / STATE_FILE
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise TypeError(f"expected an object, found {type(content).__name__}")
        checksum = content.pop("sha256", None)
        if content.get("format") != FORMAT:
            raise UserError(f"format is {content.get('format')!r}, expected {FORMAT}")
        if checksum != _checksum(content):
            raise UserError("its checksum does not fit: it was changed or damaged")
        return _record(content, folder)
    except FileNotFoundError:
        raise UserError(f"{STATE_FILE} is missing: the checkpoint was never finished, or it was deleted") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{STATE_FILE} cannot be read ({error})") from None


def _record(content: dict[str, Any], folder: Path) -> Record:
    """The values of `state.json`, none of which is believed before it is what we write."""
    step, milestone, state = content["step"], content["milestone"], content["state"]
    if type(step) is not int or step < 0:
        raise UserError(f"step is {step!r}, expected a whole number of 0 or more")
    named = re.fullmatch(r"step-(\d+)", folder.name)
    if named is not None and step != int(named[1]):
        raise UserError(f"step is {step}, but the folder is called {folder.name}")
    if type(milestone) is not bool or not isinstance(state, dict):
        raise UserError("its milestone is no truth value, or its state no object")
    files = {}
    for name, file in content["files"].items():
        if type(file["bytes"]) is not int or file["bytes"] < 0 or not isinstance(file["sha256"], str):
            raise UserError(f"size and sha256 of {name!r} are none")
        if name in ("", ".", "..") or Path(name).name != name:
            raise UserError(f"{name!r} is not the name of a file in the folder")
        files[name] = StoredFile(file["bytes"], file["sha256"])
    return Record(step, milestone, state, files)


def stored_file(path: Path) -> StoredFile:
    """Size and hash of a file."""
    return StoredFile(path.stat().st_size, file_hash(path))


def wrong_sizes(folder: Path, files: dict[str, StoredFile]) -> str | None:
    """The first file that is missing, or longer or shorter than it was written; None when all are there."""
    for name, expected in sorted(files.items()):
        try:
            found = (folder / name).stat()
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is {kind_of_file(found.st_mode)}, was written as a file"
        if found.st_size != expected.bytes:
            return f"{name} has {found.st_size} bytes, was written with {expected.bytes}"
    return None


def file_times(folder: Path, record: Record) -> dict[str, Any]:
    """Hash, sizes and times of the files: while they stay as they are, so does the content. Take them before reading.

    The time of the last change of the inode is among them: nothing can set it back, and a copy has one of its own.
    """
    found = {name: (folder / name).stat() for name in sorted(record.files)}
    youngest = max((max(each.st_mtime, each.st_ctime) for each in found.values()), default=0.0)
    age = time.time() - youngest
    if 0 <= age < SECONDS_OF_A_TICK:  # from now on a change gives another time
        time.sleep(SECONDS_OF_A_TICK - age)
    files = {name: [each.st_size, each.st_mtime_ns, each.st_ctime_ns] for name, each in found.items()}
    return {"fingerprint": record.fingerprint, "files": files}


def is_checked(folder: Path, times: dict[str, Any]) -> bool:
    """Whether the files were read completely and found whole, and have not changed since."""
    try:
        return bool(read_json(folder / CHECKED_FILE) == times)
    except (OSError, ValueError):
        return False


def remember_checked(folder: Path, times: dict[str, Any]) -> None:
    """Keep the times of files that were found whole, where the folder can be written to."""
    with contextlib.suppress(OSError):
        write_whole(folder / CHECKED_FILE, json.dumps(times) + "\n")


def folder_of_step(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies.

    Example:
        >>> folder_of_step(Path("run/checkpoints"), 300).as_posix()
        'run/checkpoints/step-000000300'
    """
    return folder / f"step-{step:09d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or damaged, in the order of their steps."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's folder, as `checkpoints_in` gives it."""
    return int(checkpoint.name.removeprefix("step-"))


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a folder whose files are all on the disk its name; a former folder of that name goes."""
    sync_folder(temporary)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_old(folder: Path, keep: int, newest: Path) -> None:
    """Delete the checkpoints before `newest`, except milestones and the last `keep`, which it is one of.

    What is damaged counts as nothing and stays: whoever was told of it may still want something from it.
    """
    found = checkpoints_in(folder)
    before = found[: found.index(newest)]
    candidates = [path for path in before if _is_whole(path) and not read_record(path).milestone]
    for path in candidates[: max(0, len(candidates) - (keep - 1))]:
        doomed = temporary_name(path)
        path.rename(doomed)  # first, so that a kill half-way leaves no checkpoint that looks damaged
        shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed writers left behind; nothing else may be writing in this folder."""
    for path in folder.iterdir():
        if re.fullmatch(r"\.step-\d+\.tmp", path.name):
            remove_leftover(path)
        elif match := re.fullmatch(r"\.(step-\d+)\.replaced", path.name):
            if (folder / match[1]).exists():
                remove_leftover(path)
            else:  # killed between the two renames of put_in_place
                path.rename(folder / match[1])


def temporary_name(checkpoint: Path) -> Path:
    """The name of a checkpoint while it is written or deleted."""
    return checkpoint.with_name(f".{checkpoint.name}.tmp")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_whole(path: Path) -> bool:
    """As far as can be seen without reading all of it."""
    with contextlib.suppress(ValueError):
        return wrong_sizes(path, read_record(path).files) is None
    return False


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
