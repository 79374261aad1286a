"""Files: written as a whole or not at all, and read so that whatever is wrong with one is a ValueError naming it.

A file from a stranger can be anything: a pipe that never ends, a device, text of another encoding, JSON of ten thousand
brackets. `read_json` and `read_toml` (and `parse_json`, `parse_toml` for text that is there already) turn all of that
into one kind of error before it can hang, crash or be believed.
"""

import errno
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import size_text

LARGEST_TEXT = 2**28
"""Bytes of a text file that is read as a whole; the largest tokenizer.json have a tenth of it."""
LARGEST_TOML = 2**20
DEEPEST = 100
"""Levels of nesting in JSON and TOML; nobody writes ten by hand."""
LARGEST_NUMBER = int(sys.float_info.max)
_LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST}}}""")
SECONDS_OF_WRITING = 60.0
"""No file takes that long to be written."""


def user_path(text: str | Path) -> Path:
    """A path as a user writes it, with ~ for their home. ~name of an unknown user stays as it is.

    Example:
        >>> user_path("~nobody-of-that-name/runs").parts[0]
        '~nobody-of-that-name'
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user, or no home
        return Path(text)


def require_writable(path: Path) -> None:
    """Make the folder of `path`; an OSError says now, and not after the work, that `path` cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_folder(path)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; brought to the disk and renamed to `path` if nothing was raised."""
    temporary = path.with_name(f".{path.name}.{_machine()}-{os.getpid()}.tmp")
    _refuse_folder(path)
    try:
        temporary.unlink(missing_ok=True)  # of a killed process with the same number
        temporary.touch(exist_ok=False)
        permissions = temporary.stat().st_mode  # of any new file here; safetensors would make one for the owner alone
        yield temporary
        temporary.chmod(stat.S_IMODE(permissions))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        reason = "this is a folder, but a file is to be written here; move it away, then run the same command again"
        raise IsADirectoryError(errno.EISDIR, reason, str(path))


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, as a whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder.

    Only names that `replacing` gives, and only where nobody can still be writing: the process was on this machine and
    is gone, or the file is older than any writing takes.
    """
    for path in folder.glob(".*.tmp"):
        match = re.fullmatch(r"\..+\.(?:(?P<machine>[0-9a-f]{8})-)?(?P<pid>[0-9]+)\.tmp", path.name)
        if match is None or path.is_dir():
            continue
        with suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > SECONDS_OF_WRITING
            pid = int(match["pid"])
            is_gone = match["machine"] == _machine() and (pid == os.getpid() or process_is_gone(pid))
            if is_old or is_gone:
                path.unlink()


def remove_leftover(path: Path) -> None:
    """Remove a file or folder that a killed process left; a ValueError names it where that is not possible."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        where = f" at {error.filename}" if error.filename and Path(error.filename) != path else ""
        raise UserError(
            f"{path}: left by a process that was killed, and cannot be removed ({error.strerror}{where}); remove it, "
            "then run the same command again"
        ) from error


def require_regular_file(path: Path, remedy: str = "save the content to a file and give that") -> None:
    """Refuse a pipe, a device or a socket, which could be read for ever; a FileNotFoundError where there is nothing."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: this is {kind_of_file(mode)}, expected a regular file; {remedy}")


def kind_of_file(mode: int) -> str:
    """What a name stands for, by the mode that stat gives.

    Example:
        >>> kind_of_file(os.stat(os.curdir).st_mode)
        'a folder'
    """
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_limited(path: Path, limit: int = LARGEST_TEXT) -> bytes:
    """The content of a regular file of at most `limit` bytes; everything else is a ValueError or an OSError."""
    require_regular_file(path)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path}: has more than {size_text(limit)}, which no file of this kind has; give another file")
    return content


def file_hash(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, limit: int = LARGEST_TEXT) -> str:
    """The text of a regular file in UTF-8."""
    return _decoded(read_limited(path, limit), str(path))


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        ValueError: whatever is wrong with the content, naming the file.
        OSError: where it cannot be read, or is not there.
    """
    return parse_json(read_limited(path), str(path))


def parse_json(content: str | bytes, source: str) -> Any:
    """The value that JSON stands for.

    Args:
        content: the text.
        source: what to call it in messages.

    Example:
        >>> parse_json('{"step": 300}', "state.json")
        {'step': 300}
        >>> parse_json("[" * 10**5, "state.json")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        coupled_adam.base.errors.UserError: state.json: nested more than 100 levels deep...
    """
    text = _decoded(content, source) if isinstance(content, bytes) else content
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(source) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{source}: not valid JSON ({error})") from None
    except ValueError:  # of int()
        raise _too_long(source) from None
    return _sane(value, source)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; raises as `read_json` does."""
    return parse_toml(read_text(path, LARGEST_TOML), str(path))


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The tables that TOML stands for; raises as `parse_json` does."""
    if _LONG_KEY.search(text):  # tomllib takes minutes for it
        raise _too_deep(source)
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(source) from None
    except ValueError as error:
        raise UserError(f"{source}: not valid TOML: {error}") from None
    _sane(value, source)
    return value


def _decoded(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not a text file: byte {error.start} is not UTF-8") from None


def _sane(value: Any, source: str) -> Any:
    """The value, if whoever uses it can walk through it and turn its numbers into floats."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inside: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inside += each.values()
            elif isinstance(each, list):
                inside += each
            elif isinstance(each, int) and abs(each) > LARGEST_NUMBER:
                raise _too_long(source)
        if not inside:
            return value
        level = inside
    raise _too_deep(source)


def _too_deep(source: str) -> UserError:
    return UserError(f"{source}: nested more than {DEEPEST} levels deep, so it is damaged or made to do harm")


def _too_long(source: str) -> UserError:
    return UserError(f"{source}: has a number of more than {sys.float_info.max_10_exp} digits, so it is damaged")


def process_is_gone(pid: int, start: str = "") -> bool:
    """Whether no process of this machine has the number; with `start`, none that started then. False if not known."""
    if os.name == "nt":  # there os.kill sends a Ctrl-C
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it belongs to somebody else
        pass
    state, started = _process_stat(pid)
    return state in ("Z", "X") or bool(start and started and start != started)


def process_start(pid: int) -> str:
    """When a process started, in the kernel's ticks since it did; empty where the system does not say."""
    return _process_stat(pid)[1]


def _process_stat(pid: int) -> tuple[str, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before it can be anything
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


@functools.cache
def where_processes_live() -> str:
    """This machine, its present boot, and the namespace in which its process numbers have a meaning."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


@functools.cache
def _machine() -> str:
    """Eight hex digits for `where_processes_live`, short enough for the name of a file."""
    return hashlib.sha256(where_processes_live().encode()).hexdigest()[:8]
