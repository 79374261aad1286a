"""Atomic writes, and safe reads that report every problem as a ValueError naming the file.

An untrusted file can be anything: an endless pipe, a device, text in another encoding, JSON with ten thousand brackets.
`read_json` and `read_toml` (`parse_json` and `parse_toml` for text in memory) turn all of these into one kind of error
before they can hang or crash the program.
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
"""Maximum bytes of a text file; the largest known tokenizer.json has a tenth of this."""
LARGEST_TOML = 2**20
DEEPEST = 100
"""Maximum nesting depth of JSON and TOML; files written by hand rarely reach ten."""
LARGEST_NUMBER = int(sys.float_info.max)
_LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST}}}""")
SECONDS_OF_WRITING = 60.0
"""A temporary file older than this is abandoned: no write takes this long."""


def user_path(text: str | Path) -> Path:
    """Expand ~ in a path given by the user. The ~name of an unknown user stays unchanged.

    Example:
        >>> user_path("~nobody-of-that-name/runs").parts[0]
        '~nobody-of-that-name'
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:  # unknown user, or no home folder
        return Path(text)


def require_writable(path: Path) -> None:
    """Create the parent folder of `path`, and raise an OSError now, before the work, if `path` cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_folder(path)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success, flush it to disk and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.{_machine()}-{os.getpid()}.tmp")
    _refuse_folder(path)
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process with the same pid
        temporary.touch(exist_ok=False)
        permissions = temporary.stat().st_mode  # the default for new files; safetensors would restrict it to the owner
        yield temporary
        temporary.chmod(stat.S_IMODE(permissions))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        reason = "this is a folder, but a file must be written here; move the folder away, then run the command again"
        raise IsADirectoryError(errno.EISDIR, reason, str(path))


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def copy_whole(source: Path, target: Path) -> None:
    """Copy a regular file atomically; do nothing if it does not exist."""
    if source.exists():
        require_regular_file(source)
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder.

    Only files named by `replacing` are removed, and only if no process can still be writing: the process ran on this
    machine and is gone, or the file is older than `SECONDS_OF_WRITING`.
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
    """Remove a file or folder that a killed process left; raise a UserError if that fails."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        where = f" at {error.filename}" if error.filename and Path(error.filename) != path else ""
        raise UserError(
            f"{path}: left by a killed process and cannot be removed ({error.strerror}{where}); remove it, "
            "then run the command again"
        ) from error


def require_regular_file(path: Path, remedy: str = "save the content to a file and give that") -> None:
    """Raise a UserError for a pipe, a device or a socket, whose content may never end.

    A missing file raises a FileNotFoundError.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: this is {kind_of_file(mode)}, expected a regular file; {remedy}")


def kind_of_file(mode: int) -> str:
    """Describe the kind of file by the mode from `stat`.

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
    """Read a regular file of at most `limit` bytes; raise a ValueError or an OSError for anything else."""
    require_regular_file(path)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path}: larger than {size_text(limit)}, the limit for files of this kind; use another file")
    return content


def file_hash(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, limit: int = LARGEST_TEXT) -> str:
    """Read a regular file as UTF-8 text."""
    return _decoded(read_limited(path, limit), str(path))


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: the content is invalid; the message names the file.
        OSError: the file is missing or cannot be read.
    """
    return parse_json(read_limited(path), str(path))


def parse_json(content: str | bytes, source: str) -> Any:
    """Parse JSON.

    Args:
        content: the JSON text.
        source: its name in error messages.

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
    """Read a TOML file; raises the same errors as `read_json`."""
    return parse_toml(read_text(path, LARGEST_TOML), str(path))


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML; raises the same errors as `parse_json`."""
    if _LONG_KEY.search(text):  # tomllib would take minutes
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
    """Return the value unless it is nested too deeply or an integer is too large for a float."""
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
    return UserError(f"{source}: nested more than {DEEPEST} levels deep; the file is damaged or malicious")


def _too_long(source: str) -> UserError:
    return UserError(f"{source}: contains a number of more than {sys.float_info.max_10_exp} digits; it is damaged")


def process_is_gone(pid: int, start: str = "") -> bool:
    """Whether no process with this pid (and, if given, this start time) runs on this machine. False if unknown."""
    if os.name == "nt":  # os.kill would send a Ctrl-C
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it belongs to another user
        pass
    state, started = _process_stat(pid)
    return state in ("Z", "X") or bool(start and started and start != started)


def process_start(pid: int) -> str:
    """Start time of a process in the kernel's clock ticks since boot; empty if the system does not report it."""
    return _process_stat(pid)[1]


def _process_stat(pid: int) -> tuple[str, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may contain anything
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


@functools.cache
def where_processes_live() -> str:
    """Identify the machine, its current boot and the pid namespace; pids are comparable only within these."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


@functools.cache
def _machine() -> str:
    """`where_processes_live` as eight hex digits, short enough for a file name."""
    return hashlib.sha256(where_processes_live().encode()).hexdigest()[:8]
