"""A lock between processes, for training runs, studies and data preparation.

The lock is a file. If the file system supports locks (flock; msvcrt.locking on Windows), the operating system releases
the lock when the process ends, even if it is killed; the file's content only names the holder. If the file system has
no locks (some network and FUSE file systems: ENOLCK, EOPNOTSUPP, ENOSYS), a marker file NAME.held is created
exclusively instead. A killed process leaves its marker behind; the next process takes it over if the holder ran on the
same machine and is gone. A holder on another machine is assumed to be alive, and the error says which file to remove.
"""

import errno
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import kind_of_file, parse_json, process_is_gone, process_start, where_processes_live

NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
SECONDS_BETWEEN_TRIES = 0.1
SECONDS_FOR_A_RECORD = 1.0
"""How long to wait for the record in a newly created file."""
LOCKED_BYTE = 2**30  # far behind the record: on Windows other processes cannot read a locked byte
LARGEST_RECORD = 4096
MARKER, TURN = ".held", ".taken"


class LockHeld(UserError):
    """Another process holds the lock.

    Args:
        path: the lock file.
        by: the holder, such as "process 1234".
        remedy: what to do.
    """

    def __init__(self, path: Path, by: str, remedy: str) -> None:
        super().__init__(path, by, remedy)  # the same arguments, so that the error can be pickled
        self.path = path
        self.by = by
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.path}: held by {self.by}; {self.remedy}"


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    where: str
    pid: int
    start: str

    def is_gone(self) -> bool:
        """Whether the process is known to have ended; always False for a process on another machine."""
        return self.where == where_processes_live() and process_is_gone(self.pid, self.start)

    def __str__(self) -> str:
        if self.where == where_processes_live():
            return f"process {self.pid}"
        return f"process {self.pid} on {self.where.partition(' ')[0]}"


@contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock `path`, and remove its file on release.

    Args:
        path: the lock file; its folder must exist.
        patience: seconds to wait for another process to release the lock.

    Raises:
        LockHeld: another process holds the lock, or may hold it, and the wait is over.
        ValueError: `path` exists and is not a regular file.
    """
    until = time.monotonic() + patience
    while True:
        try:
            release = _acquire(path)
            break
        except LockHeld:
            if time.monotonic() >= until:
                raise
            time.sleep(SECONDS_BETWEEN_TRIES)
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:  # not in a forked child
            release()


def lock_names(name: str) -> tuple[str, ...]:
    """All file names that a lock of this name can leave behind when its process is killed."""
    return name, f"{name}{MARKER}", f"{name}{MARKER}{TURN}"


def is_held(path: Path) -> bool:
    """Whether a process holds the lock now; needs no write permission."""
    marker = _marker(path)
    if _may_hold(marker):
        return True
    try:
        descriptor = _open(path, os.O_RDONLY if sys.platform != "win32" else os.O_RDWR)
    except (OSError, ValueError):  # missing, or not a file that can be locked
        return False
    try:
        _lock(descriptor, shared=True)
    except BlockingIOError:
        return True
    except _NoLocksError:
        return _may_hold(path)
    finally:
        os.close(descriptor)
    return False


def _acquire(path: Path) -> Callable[[], None]:
    """Acquire the lock and return the function that releases it."""
    while True:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(descriptor)
            # The previous holder may have removed the file between our open and our lock.
            if not _is_still_there(descriptor, path):
                os.close(descriptor)
                continue
        except BlockingIOError:
            holder = _read_holder(path)
            os.close(descriptor)
            raise LockHeld(path, str(holder or "another process"), "wait for it, or stop it") from None
        except _NoLocksError:
            os.close(descriptor)
            return _acquire_marker(path)
        except BaseException:
            os.close(descriptor)
            raise
        break
    try:
        _refuse_if_held(_marker(path))  # by a process that found no lock support here
    except BaseException:
        os.close(descriptor)
        raise
    with suppress(OSError):  # only for messages; on a full disk the lock works without it
        os.ftruncate(descriptor, 0)
        os.write(descriptor, _own_record())

    def release() -> None:
        with suppress(OSError):  # Windows cannot remove an open file
            path.unlink()
        with suppress(OSError):
            _unlock(descriptor)
        os.close(descriptor)

    return release


def _acquire_marker(path: Path) -> Callable[[], None]:
    """Acquire the lock on a file system without locks, by creating a marker file exclusively."""
    _refuse_if_held(path)  # by a process that locked it while the file system supported locks
    marker = _marker(path)
    try:
        _make(marker)
    except FileExistsError:
        _refuse_if_held(marker)
        _take_over(marker)

    def release() -> None:
        for each in (path, marker):
            with suppress(OSError):
                each.unlink()

    return release


def _take_over(marker: Path) -> None:
    """Take over the marker of a process that is gone.

    A second file lets one process at a time do so; otherwise a second process could take the marker from the first.
    """
    turn = marker.with_name(f"{marker.name}{TURN}")
    try:
        _make(turn)
    except FileExistsError:
        raise LockHeld(
            turn,
            str(_read_holder(turn) or "another process"),
            f"it is taking over {marker.name}; try again, and if that fails, remove {turn}",
        ) from None
    try:
        _refuse_if_held(marker)  # another process may have just taken it over
        # Remove only the marker of a process that is gone; no other process can replace that while we hold the turn.
        # A missing marker may be created by another process at any moment, and then belongs to that process.
        if _is_left_behind(marker):
            marker.unlink(missing_ok=True)
        try:
            _make(marker)
        except FileExistsError:
            raise LockHeld(marker, str(_read_holder(marker) or "another process"), "try again") from None
    finally:
        turn.unlink(missing_ok=True)


def _make(path: Path) -> None:
    """Create a file that names this process as its holder; raise FileExistsError if it exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, _own_record())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def _refuse_if_held(path: Path) -> None:
    if not _may_hold(path):
        return
    holder = _read_holder(path)
    remedy = f"wait for it, or stop it; if it is gone, remove {path}"
    raise LockHeld(path, str(holder or "an unknown process"), remedy)


def _may_hold(path: Path) -> bool:
    """Whether the file names a holder that is not known to be gone."""
    until = time.monotonic() + SECONDS_FOR_A_RECORD
    is_marker = path.suffix == MARKER  # an empty lock file means nothing: version 0.1.0 left one behind
    while True:
        try:
            size = path.lstat().st_size
        except OSError:
            return False
        if size > 0:
            holder = _read_holder(path)
            return holder is None or not holder.is_gone()
        if not is_marker:
            return False
        if time.monotonic() > until:
            return True
        time.sleep(0.05)


def _is_left_behind(path: Path) -> bool:
    """Whether the file exists and the process that created it is gone."""
    holder = _read_holder(path)
    return holder is not None and holder.is_gone()


def _read_holder(path: Path) -> Holder | None:
    """The process that wrote the file; None if the file cannot be read."""
    try:
        descriptor = _open(path, os.O_RDONLY)
        try:
            values = parse_json(os.read(descriptor, LARGEST_RECORD), str(path))
        finally:
            os.close(descriptor)
        holder = Holder(str(values["where"]), int(values["pid"]), str(values["start"]))
        return holder if holder.pid > 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _own_record() -> bytes:
    pid = os.getpid()
    return json.dumps(asdict(Holder(where_processes_live(), pid, process_start(pid)))).encode() + b"\n"


def _marker(path: Path) -> Path:
    return path.with_name(f"{path.name}{MARKER}")


def _open(path: Path, flags: int) -> int:
    """Open a lock file; refuse a pipe, a device or a symbolic link."""
    with suppress(FileNotFoundError):
        _require_file(path, path.lstat().st_mode)
    # Some systems lack these flags.
    flags |= os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        _require_file(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_file(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{path}: this is {kind_of_file(mode)}, expected a lock file; remove it, then run the command again"
        )


def _is_still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


class _NoLocksError(Exception):
    """The file system has no locks."""


def _lock(descriptor: int, *, shared: bool = False) -> None:
    """Lock an open file; raise BlockingIOError if another process holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise _NoLocksError from error
        raise


def _unlock(descriptor: int) -> None:
    """Release the lock, even if a forked process still has the file open."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
        return
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)
